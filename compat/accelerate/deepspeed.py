"""DeepSpeed JSON files that define the optimizer and the schedule, as ``accelerate`` reads them.

Paceline creates both as torch objects and leaves the rest of the file to its DeepSpeed strategy.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from ... import messages
from ...accelerator import plugins
from ...strategies.deepspeed.settings import read_config, read_dict, without_auto

_SECTIONS = ("optimizer", "scheduler")
#: Options of DeepSpeed's own optimizers.
_OWN_OPTIONS = ("adam_w_mode", "torch_adam")


#: The fields that a configuration file may set, with their names in the file.
_FIELDS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
}
#: Fields that must not differ from the file's value. For all other fields, the file's value is used.
_CHECKED = ("gradient_accumulation_steps", "gradient_clipping")


class DummyOptim:
    """Placeholder for the optimizer that a DeepSpeed JSON file defines.

    Args:
        params: parameters, or parameter groups.
        lr: the learning rate, if the file has ``"auto"``.
        weight_decay: the weight decay, if the file has ``"auto"``.
        **kwargs: stored, but have no effect.
    """

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs
        messages.ignored("DummyOptim", "the DeepSpeed file defines the optimizer", **kwargs)


class DummyScheduler:
    """Placeholder for the schedule that a DeepSpeed JSON file defines.

    Args:
        optimizer: the DummyOptim, or the optimizer.
        total_num_steps: length of the schedule in updates, if the file has ``"auto"``.
        warmup_num_steps: length of the warmup in updates, if the file has ``"auto"``.
        lr_scheduler_callable: creates the schedule from the optimizer, if the file defines none.
        **kwargs: stored, but have no effect.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
        messages.ignored("DummyScheduler", "the DeepSpeed file defines the schedule", **kwargs)


@dataclass
class DeepSpeedPlugin(plugins.DeepSpeedPlugin):
    """Paceline's DeepSpeedPlugin, whose configuration may define the optimizer and the schedule.

    ``hf_ds_config`` is converted to an :class:`HfDeepSpeedConfig`, and its values are copied to the fields.
    """

    def __post_init__(self) -> None:
        given = self.hf_ds_config
        if given is None:
            return
        if not hasattr(given, "config"):
            self.hf_ds_config = given = HfDeepSpeedConfig(given)
        vars(self)["_file"] = given.given if isinstance(given, HfDeepSpeedConfig) else copy.deepcopy(given.config)
        for name, key in _FIELDS.items():
            value = self.get_value(key, "auto")
            if value != "auto" and (getattr(self, name) is None or name not in _CHECKED):
                setattr(self, name, value)

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration. :meth:`fill` replaces its ``"auto"`` values."""
        if self.hf_ds_config is not None:
            return self.hf_ds_config.config
        return vars(self).setdefault("_config", self._initial())

    @deepspeed_config.setter
    def deepspeed_config(self, config: dict[str, Any]) -> None:
        if self.hf_ds_config is not None:
            self.hf_ds_config.config = config
        else:
            vars(self)["_config"] = config

    def _initial(self) -> dict[str, Any]:
        devices = {"offload_optimizer": self.offload_optimizer_device, "offload_param": self.offload_param_device}
        found: dict[str, Any] = dict.fromkeys(
            ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
        )
        found["zero_optimization"] = {"stage": 2 if self.zero_stage is None else self.zero_stage}
        found["zero_optimization"] |= {name: {"device": device or "none"} for name, device in devices.items()}
        return found if self.gradient_clipping is None else {**found, "gradient_clipping": self.gradient_clipping}

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value in the configuration by its dotted name."""
        return _value(self.deepspeed_config, ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return True if a value in the configuration is ``"auto"``."""
        return self.get_value(ds_key_long) == "auto"

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replace an ``"auto"`` value with the argument of the same name; report any other value that differs from it.

        Args:
            ds_key_long: dotted name of the value.
            mismatches: list to which a sentence about a difference is appended.
            must_match: whether a value that is not ``"auto"`` must equal the argument.
            **kwargs: values by dotted names.
        """
        if ds_key_long not in kwargs:
            return
        asked, found = kwargs[ds_key_long], self.get_value(ds_key_long)
        self._replace({ds_key_long: asked})
        if must_match and mismatches is not None and found not in (None, "auto", asked):
            mismatches.append(f"{ds_key_long} is {found!r} in the DeepSpeed configuration, but {asked!r} is requested")

    def is_zero3_init_enabled(self) -> bool:
        """Return True if ``zero3_init_flag`` is set."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Context manager that sets ``zero3_init_flag``. Models are sharded only when they are prepared."""
        before, self.zero3_init_flag = self.zero3_init_flag, enable
        try:
            yield
        finally:
            self.zero3_init_flag = before

    @property
    def selected(self) -> bool:
        """Always True, because an Accelerator has one plugin."""
        return True

    def select(self) -> None:
        """Do nothing, because an Accelerator has one plugin."""

    def show_precision(self, mixed_precision: str) -> None:
        """Add the sections that specify the precision to ``deepspeed_config``."""
        config = self.deepspeed_config
        config.setdefault("steps_per_print", math.inf)
        for name in ("bf16", "fp16"):
            config.setdefault(name, {"enabled": mixed_precision == name})
            self._replace({f"{name}.enabled": mixed_precision == name})

    def read(self) -> dict[str, Any]:
        """Return the configuration without ``"auto"`` values, the optimizer and the schedule."""
        return read_config({name: value for name, value in self._given.items() if name not in _SECTIONS})

    def decided(self, name: str) -> Any:
        """Return a value as Paceline's plugin does, but 1.0 for ``gradient_clipping`` if it is ``"auto"``."""
        found = super().decided(name)
        return 1.0 if found is None and name == "gradient_clipping" and self._given.get(name) == "auto" else found

    def fill(self, objects: Iterable[Any], steps: int, world: int, split: bool) -> None:
        """Replace the ``"auto"`` values that follow from the prepared objects.

        Args:
            objects: the objects to prepare: loaders, DummyOptim and DummyScheduler.
            steps: number of micro-batches in a window.
            world: number of processes.
            split: whether processes share batches.
        """
        loaders = [one for one in objects if isinstance(one, DataLoader) and one.batch_size]
        sizes = [int(one.batch_size or 0) // (world if split else 1) for one in loaders]
        self._replace({"gradient_accumulation_steps": steps, "gradient_clipping": self.decided("gradient_clipping")})
        if sizes:
            self._replace({"train_micro_batch_size_per_gpu": (min if self.is_train_batch_min else max)(sizes)})
        micro = self.deepspeed_config.get("train_micro_batch_size_per_gpu")
        if isinstance(micro, int):
            self._replace({"train_batch_size": micro * steps * world})
        for one in objects:
            if isinstance(one, DummyOptim):
                self._replace({"optimizer.params.lr": one.lr, "optimizer.params.weight_decay": one.weight_decay})
            if isinstance(one, DummyScheduler):
                self._replace(
                    {f"scheduler.params.{name}": value for name, value in _lengths(one, world, split).items()}
                )

    def _replace(self, values: Mapping[str, Any]) -> None:
        """Replace ``"auto"`` values; ``values`` has dotted names."""
        for name, value in values.items():
            place, last = _place(self.deepspeed_config, name)
            if place is not None and place.get(last) == "auto" and value is not None:
                place[last] = value

    @property
    def _given(self) -> dict[str, Any]:
        """The configuration as the user passed it."""
        return vars(self).get("_file", {})


def _lengths(schedule: DummyScheduler, world: int, split: bool) -> dict[str, Any]:
    """Return the schedule's values for a DeepSpeed file. Scripts count its steps before loaders are sharded."""
    own, total = schedule.optimizer, schedule.total_num_steps
    return {
        "warmup_min_lr": 0,
        "warmup_max_lr": own.lr if isinstance(own, DummyOptim) else own.defaults["lr"],
        "warmup_num_steps": max(1, schedule.warmup_num_steps),
        "total_num_steps": total if split or total is None else math.ceil(total / world),
    }


def _place(config: Any, name: str) -> tuple[Any, str]:
    """Return the section that contains a dotted name (None if there is none), and the last part of the name."""
    *sections, last = name.split(".")
    for section in sections:
        config = None if config is None else config.get(section)
    return config, last


def _value(config: Any, name: str, default: Any) -> Any:
    """Return a value by its dotted name."""
    found, last = _place(config, name)
    return default if found is None else found.get(last, default)


class HfDeepSpeedConfig:
    """A DeepSpeed configuration whose values are read by dotted names.

    Args:
        config_file_or_dict: a dict, or the path of a JSON file.

    Attributes:
        given: the configuration as the user passed it.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.given: dict[str, Any] = copy.deepcopy(read_dict(config_file_or_dict))
        self.config = copy.deepcopy(self.given)

    def find_config_node(self, ds_key_long: str) -> tuple[Any, str]:
        """Return the section that contains a dotted name (None if there is none), and the last part of the name."""
        return _place(self.config, ds_key_long)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value by its dotted name."""
        return _value(self.config, ds_key_long, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete a value or a section by its dotted name."""
        found, last = self.find_config_node(ds_key_long)
        if found is not None and last in found:
            del found[last]
        elif must_exist:
            raise ValueError(f"The DeepSpeed configuration has no {ds_key_long!r}. Check the name.")

    def is_true(self, ds_key_long: str) -> bool:
        """Return True if the value is set and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return True if the value is set and false."""
        found = self.get_value(ds_key_long)
        return found is not None and not found

    def is_zero2(self) -> bool:
        """Return True for stage 2."""
        return self.get_value("zero_optimization.stage", -1) == 2

    def is_zero3(self) -> bool:
        """Return True for stage 3."""
        return self.get_value("zero_optimization.stage", -1) == 3

    def is_offload(self) -> bool:
        """Return True if weights or the optimizer state are offloaded from the GPU."""
        names = ("offload_optimizer", "offload_param")
        return any(self.get_value(f"zero_optimization.{name}.device") in ("cpu", "nvme") for name in names)


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Return the DeepSpeed plugin in an AcceleratorState."""
    if state.deepspeed_plugin is None:
        raise ValueError("This Accelerator has no DeepSpeedPlugin. Pass Accelerator(deepspeed_plugin=...).")
    return state.deepspeed_plugin


def created(objects: tuple[Any, ...], plugin: Any) -> list[Any]:
    """Replace each DummyOptim and DummyScheduler with the torch object that the filled configuration defines.

    Raises:
        ValueError: if the configuration and the script both define the optimizer or the schedule, or neither does.
    """
    config = without_auto(plugin.deepspeed_config) if isinstance(plugin, DeepSpeedPlugin) else {}
    optimizers = {id(one): _optimizer(one, config) for one in objects if isinstance(one, DummyOptim)}
    _refuse_both("optimizer", objects, torch.optim.Optimizer, bool(optimizers), config)
    found = [optimizers.get(id(one), one) for one in objects]
    schedules = [one for one in objects if isinstance(one, DummyScheduler)]
    _refuse_both("scheduler", objects, torch.optim.lr_scheduler.LRScheduler, bool(schedules), config)
    for index, one in enumerate(found):
        if isinstance(one, DummyScheduler):
            found[index] = _scheduler(one, optimizers.get(id(one.optimizer), one.optimizer), config)
    return found


def _refuse_both(name: str, objects: Any, kind: type, dummy: bool, config: Mapping[str, Any]) -> None:
    if name in config and not dummy and any(isinstance(one, kind) for one in objects):
        stand_in = "DummyOptim" if name == "optimizer" else "DummyScheduler"
        raise ValueError(
            f"The DeepSpeed configuration defines the {name}, and the script creates one too. Remove {name!r} from the "
            f"configuration, or create an accelerate.utils.{stand_in} in the script."
        )


def _optimizer(dummy: DummyOptim, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    if "optimizer" not in config:
        raise ValueError(
            "DummyOptim is a placeholder for the optimizer in a DeepSpeed configuration, but the configuration has "
            "none. Create a torch optimizer, or add 'optimizer' to the configuration."
        )
    section = config["optimizer"]
    kind, params = str(section.get("type")), dict(section.get("params") or {})
    kinds: dict[str, Any] = {
        "adam": torch.optim.AdamW if params.get("adam_w_mode", True) else torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
        "sgd": torch.optim.SGD,
    }
    if kind.lower() not in kinds:
        raise ValueError(messages.unknown("optimizer in the DeepSpeed configuration", kind, kinds))
    params = {name: value for name, value in params.items() if name not in _OWN_OPTIONS}
    return kinds[kind.lower()](list(dummy.params), **{"weight_decay": 0.0, **params})


def _scheduler(dummy: DummyScheduler, optimizer: Any, config: Mapping[str, Any]) -> Any:
    if "scheduler" not in config:
        if dummy.lr_scheduler_callable is None:
            raise ValueError(
                "DummyScheduler is a placeholder for the scheduler in a DeepSpeed configuration, but the "
                "configuration has none. Pass lr_scheduler_callable, or add 'scheduler' to the configuration."
            )
        return dummy.lr_scheduler_callable(optimizer)
    schedules: Any = importlib.import_module("deepspeed.runtime.lr_schedules")
    section = config["scheduler"]
    kind, params = str(section.get("type")), dict(section.get("params") or {})
    if kind not in schedules.VALID_LR_SCHEDULES:
        raise ValueError(
            messages.unknown("scheduler in the DeepSpeed configuration", kind, schedules.VALID_LR_SCHEDULES)
        )
    if kind in ("WarmupDecayLR", "WarmupCosineLR") and "total_num_steps" not in params:
        raise ValueError(
            f"{kind} in the DeepSpeed configuration has no length. Pass DummyScheduler(total_num_steps=...), and set "
            "'total_num_steps' to \"auto\" in the configuration."
        )
    return getattr(schedules, kind)(optimizer, **params)

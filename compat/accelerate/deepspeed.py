"""DeepSpeed JSON files that define the optimizer and the schedule, as ``accelerate`` reads them.

Paceline creates both as torch objects and leaves the rest of the file to its DeepSpeed strategy.
"""

from __future__ import annotations

import base64
import copy
import importlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ... import messages
from ...accelerator import plugins
from ...settings import resolve
from ...strategies.deepspeed.settings import read_dict, without_auto

if TYPE_CHECKING:
    from typing_extensions import Self

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
#: Fields that show the values of a file and have no other effect.
_SHOWN = {
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
#: The values that fields show if nothing else sets them.
_DEFAULTS = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_stage": 2,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "offload_optimizer_nvme_path": "none",
    "offload_param_nvme_path": "none",
    "zero3_save_16bit_model": False,
    "enable_msamp": False,
    "msamp_opt_level": "O1",
}


class DummyOptim:
    """Placeholder for the optimizer that a DeepSpeed JSON file defines.

    Args:
        params: parameters, or parameter groups.
        lr: the learning rate, used if the file has ``"auto"`` instead of a value.
        weight_decay: the weight decay, used if the file has ``"auto"`` instead of a value.
        **kwargs: stored, but otherwise unused.
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
        total_num_steps: length of the schedule in updates, used if the file has ``"auto"`` instead of a value.
        warmup_num_steps: length of the warmup in updates, used if the file has ``"auto"`` instead of a value.
        lr_scheduler_callable: function that creates the schedule from the optimizer; used if the file defines no
            schedule.
        **kwargs: stored, but otherwise unused.
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
    """Paceline's DeepSpeedPlugin, with a configuration that may define the optimizer and the schedule.

    ``hf_ds_config`` is converted to an :class:`HfDeepSpeedConfig`, and its values are copied to the fields. Without
    ``hf_ds_config``, an :class:`HfDeepSpeedConfig` is created from the fields. Fields that are not set show
    Accelerate's defaults.
    """

    def __post_init__(self) -> None:
        vars(self)["_defaults"] = {}
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        vars(self).update(vars(plugins.DeepSpeedPlugin(**given).filled(resolve())))
        if self.hf_ds_config is None:
            self._show(_DEFAULTS)
            self.hf_ds_config = HfDeepSpeedConfig(self._from_fields())
            vars(self)["_file"] = {}
        else:
            if not hasattr(self.hf_ds_config, "config"):
                self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)
            own = self.hf_ds_config
            vars(self)["_file"] = own.given if isinstance(own, HfDeepSpeedConfig) else copy.deepcopy(own.config)
            for name, key in _FIELDS.items():
                value = self.get_value(key, "auto")
                if value != "auto" and (getattr(self, name) is None or name not in _CHECKED):
                    setattr(self, name, value)
            self._show({name: self.get_value(key) for name, key in _SHOWN.items() if self.get_value(key) != "auto"})
            self._show(_DEFAULTS)
            self._replace({key: getattr(self, name) for name, key in {**_FIELDS, **_SHOWN}.items()})
        self.deepspeed_config.setdefault("steps_per_print", math.inf)
        self._show({"zero3_init_flag": self.hf_ds_config.is_zero3()})
        vars(self)["_built"] = copy.deepcopy(self.get_value("zero_optimization") or {})

    def _show(self, values: Mapping[str, Any]) -> None:
        """Set fields that are None to default values, which still count as not set."""
        for name, value in values.items():
            if getattr(self, name) is None and value is not None:
                setattr(self, name, value)
                vars(self)["_defaults"][name] = value

    def _asked(self) -> plugins.DeepSpeedPlugin:
        """Return Paceline's plugin with the values that the script, the settings or the file set.

        Raises:
            ValueError: a value in ``zero_optimization`` that was not ``"auto"`` was changed after the plugin was
                created.
        """
        built = vars(self).get("_built", {})
        for name, value in (self.get_value("zero_optimization") or {}).items():
            if value != built.get(name) and "auto" not in (built.get(name), *_leaves(built.get(name))):
                raise ValueError(
                    f"deepspeed_config['zero_optimization'][{name!r}] was set to {value!r} after the DeepSpeedPlugin "
                    "was created, so the change has no effect. Pass the value to DeepSpeedPlugin, for example as "
                    "zero_stage=3 or in hf_ds_config."
                )
        defaults, found = vars(self)["_defaults"], {one.name: getattr(self, one.name) for one in fields(self)}
        found = {name: None if value in ("auto", defaults.get(name)) else value for name, value in found.items()}
        file = {name: value for name, value in self._given.items() if name not in _SECTIONS}
        return plugins.DeepSpeedPlugin(**{**found, "hf_ds_config": file or None})

    def _from_fields(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.zero_stage}
        for name in ("offload_optimizer", "offload_param"):
            device, path = getattr(self, f"{name}_device"), getattr(self, f"{name}_nvme_path")
            zero[name] = {"device": device, "nvme_path": path if device == "nvme" else None}
        zero["stage3_gather_16bit_weights_on_model_save"] = self.zero3_save_16bit_model
        found = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "zero_optimization": zero,
        }
        return {**found, "gradient_clipping": self.gradient_clipping} if self.gradient_clipping else found

    def filled(self, settings: Mapping[str, Any] | None) -> Self:
        """Return this plugin itself, because it read the settings when it was created."""
        del settings
        return self

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The DeepSpeed configuration. :meth:`fill` replaces its ``"auto"`` values."""
        return self.hf_ds_config.config

    @deepspeed_config.setter
    def deepspeed_config(self, config: dict[str, Any]) -> None:
        self.hf_ds_config.config = config

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value in the configuration by its dotted name."""
        return _value(self.deepspeed_config, ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return True if a value in the configuration is ``"auto"``."""
        return self.get_value(ds_key_long) == "auto"

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replace an ``"auto"`` value with the argument of the same name. Report any other value that differs from it.

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

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Add the sections that specify the precision to ``deepspeed_config``.

        Args:
            mixed_precision: ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``, which uses bf16.
        """
        config, word = self.deepspeed_config, "bf16" if mixed_precision == "fp8" else mixed_precision
        for name in ("fp16", "bf16"):
            enabled = {"enabled": name == word}
            config.setdefault(name, {**enabled, "auto_cast": True} if name == word == "fp16" else enabled)
            self._replace({f"{name}.enabled": name == word})

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: Mapping[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Call :meth:`fill_match` for each value of the configuration.

        Args:
            prefix: dotted name of the section.
            mismatches: list to which sentences about differences are appended.
            config: the section; None means the entire configuration.
            must_match: whether values that are not ``"auto"`` must equal the arguments.
            **kwargs: values by dotted names.

        Raises:
            ValueError: values differ.
        """
        found: list[str] = [] if mismatches is None else mismatches
        for name, value in list((self.deepspeed_config if config is None else config).items()):
            if isinstance(value, Mapping):
                self.deepspeed_config_process(f"{prefix}{name}.", found, value, must_match, **kwargs)
            else:
                self.fill_match(prefix + name, found, must_match, **kwargs)
        if found and not prefix:
            raise ValueError(f"{'; '.join(found)}. Make both values equal, or set the configuration's value to 'auto'.")

    def set_deepspeed_weakref(self) -> None:
        """Do nothing, because models are sharded when they are prepared, not when they are created."""

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Raise an error if the plugin lists mixture-of-experts layers, which Paceline does not support.

        Args:
            model: not used.

        Raises:
            NotImplementedError: ``transformer_moe_cls_names`` is set.
        """
        del model
        self.options()

    def read(self) -> dict[str, Any]:
        """Return the configuration without the optimizer, the schedule and ``"auto"`` values."""
        return self._asked().read()

    def options(self) -> dict[str, Any]:
        """Return the arguments for DeepSpeedStrategy."""
        return self._asked().options()

    def decided(self, name: str) -> Any:
        """Return the value that Paceline's plugin returns, but 1.0 for a ``gradient_clipping`` of ``"auto"``."""
        found = self._asked().decided(name)
        if found is None and name == "gradient_clipping":
            found = 1.0 if self.is_auto(name) else self.get_value(name)
        return found

    def micro_batches(self, steps: int | None) -> int | None:
        """Return the number of micro-batches in a window.

        This is ``steps``, the Accelerator's number, or the DeepSpeed configuration's number if ``steps`` is None.
        """
        return self.decided("gradient_accumulation_steps") if steps is None else steps

    @property
    def clip_norm(self) -> float | None:
        """Maximum gradient norm at each step, known after :meth:`fill`; None means no clipping."""
        found = self.get_value("gradient_clipping")
        return float((self.decided("gradient_clipping") if found is None else found) or 0.0) or None

    def fill(self, objects: Iterable[Any], steps: int, world: int, split: bool) -> int:
        """Replace the ``"auto"`` values that can be derived from the prepared objects.

        Args:
            objects: the objects to prepare: loaders, DummyOptim and DummyScheduler.
            steps: number of micro-batches in a window.
            world: number of processes.
            split: whether processes share batches.

        Returns:
            The configuration's number of micro-batches. ``steps`` may differ if the loop counts micro-batches itself.
        """
        loaders = [one for one in objects if isinstance(one, DataLoader) and one.batch_size]
        sizes = [int(one.batch_size or 0) // (world if split else 1) for one in loaders]
        self._replace({"gradient_accumulation_steps": steps, "gradient_clipping": self.decided("gradient_clipping")})
        counted = int(self.get_value("gradient_accumulation_steps", steps))
        self._replace({_SHOWN["zero3_save_16bit_model"]: False})
        if sizes:
            self._replace({"train_micro_batch_size_per_gpu": (min if self.is_train_batch_min else max)(sizes)})
        micro = self.deepspeed_config.get("train_micro_batch_size_per_gpu")
        if isinstance(micro, int):
            self._replace({"train_batch_size": micro * counted * world})
        for one in objects:
            if isinstance(one, nn.Module):
                self._replace(_buckets(getattr(one, "config", None)))
            if isinstance(one, DummyOptim):
                self._replace({"optimizer.params.lr": one.lr, "optimizer.params.weight_decay": one.weight_decay})
            if isinstance(one, DummyScheduler):
                self._replace(
                    {f"scheduler.params.{name}": value for name, value in _lengths(one, world, split).items()}
                )
        return counted

    def _replace(self, values: Mapping[str, Any]) -> None:
        """Replace ``"auto"`` values with ``values``, which are keyed by dotted names."""
        for name, value in values.items():
            place, last = _place(self.deepspeed_config, name)
            if place is not None and place.get(last) == "auto" and value is not None:
                place[last] = value

    @property
    def _given(self) -> dict[str, Any]:
        """The configuration as the user passed it."""
        return vars(self).get("_file", {})


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for entry in value.values():
            yield entry
            yield from _leaves(entry)


def _buckets(config: Any) -> dict[str, int]:
    """Return the values that depend on the hidden size of a model, if the model's configuration defines that size."""
    size = getattr(config, "hidden_size", None) or max(getattr(config, "hidden_sizes", None) or (0,))
    values = {
        "reduce_bucket_size": size * size,
        "stage3_prefetch_bucket_size": int(0.9 * size * size),
        "stage3_param_persistence_threshold": 10 * size,
    }
    return {f"zero_optimization.{name}": value for name, value in values.items() if size}


def _lengths(schedule: DummyScheduler, world: int, split: bool) -> dict[str, Any]:
    """Return a schedule's values for a DeepSpeed file. Scripts count the total steps before loaders are sharded."""
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


def _parsed(given: Any) -> Any:
    """Parse JSON text; return anything else unchanged."""
    if isinstance(given, str) and not os.path.exists(given):
        for read in (str, base64.urlsafe_b64decode):
            with suppress(ValueError):
                return json.loads(read(given))
    return given


class HfDeepSpeedConfig:
    """A DeepSpeed configuration whose values are read by dotted names.

    Args:
        config_file_or_dict: a dict, the path of a JSON file, or JSON text, which may be encoded in base64.

    Attributes:
        given: the configuration as the user passed it.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.given: dict[str, Any] = copy.deepcopy(read_dict(_parsed(config_file_or_dict)))
        self.config = copy.deepcopy(self.given)

    def set_stage_and_offload(self) -> None:
        """Do nothing, because stage and offloading are read from the configuration on each access."""

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
        """Return True if the value is set but false."""
        found = self.get_value(ds_key_long)
        return found is not None and not found

    def is_zero2(self) -> bool:
        """Return True for ZeRO stage 2."""
        return self.get_value("zero_optimization.stage", -1) == 2

    def is_zero3(self) -> bool:
        """Return True for ZeRO stage 3."""
        return self.get_value("zero_optimization.stage", -1) == 3

    def is_offload(self) -> bool:
        """Return True if weights or the optimizer state are offloaded from the GPU."""
        if not (self.is_zero2() or self.is_zero3()):
            return False
        names = ("offload_optimizer", "offload_param")
        return any(self.get_value(f"zero_optimization.{name}.device") in ("cpu", "nvme") for name in names)


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Return the DeepSpeed plugin in an AcceleratorState."""
    if state.deepspeed_plugin is None:
        raise ValueError("The AcceleratorState has no DeepSpeedPlugin. Pass Accelerator(deepspeed_plugin=...).")
    return state.deepspeed_plugin


def created(objects: tuple[Any, ...], plugin: Any) -> list[Any]:
    """Replace each DummyOptim and DummyScheduler with the torch object that the filled configuration defines.

    Raises:
        ValueError: the configuration and the script both define the optimizer or the schedule, or neither does.
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
            f"configuration, or create an accelerate.utils.{stand_in} in the script instead."
        )


def _optimizer(dummy: DummyOptim, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    if "optimizer" not in config:
        raise ValueError(
            "DummyOptim is a placeholder for the optimizer in a DeepSpeed configuration, but the configuration defines "
            "no optimizer. Create a torch optimizer, or add 'optimizer' to the configuration."
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
        raise ValueError(f"DeepSpeed configuration: {messages.unknown('optimizer', kind, kinds)}")
    params = {name: value for name, value in params.items() if name not in _OWN_OPTIONS}
    return kinds[kind.lower()](list(dummy.params), **{"weight_decay": 0.0, **params})


def _scheduler(dummy: DummyScheduler, optimizer: Any, config: Mapping[str, Any]) -> Any:
    if "scheduler" not in config:
        if dummy.lr_scheduler_callable is None:
            raise ValueError(
                "DummyScheduler is a placeholder for the scheduler in a DeepSpeed configuration, but the configuration "
                "defines no scheduler. Pass lr_scheduler_callable, or add 'scheduler' to the configuration."
            )
        return dummy.lr_scheduler_callable(optimizer)
    schedules: Any = importlib.import_module("deepspeed.runtime.lr_schedules")
    section = config["scheduler"]
    kind, params = str(section.get("type")), dict(section.get("params") or {})
    if kind not in schedules.VALID_LR_SCHEDULES:
        raise ValueError(
            f"DeepSpeed configuration: {messages.unknown('scheduler', kind, schedules.VALID_LR_SCHEDULES)}"
        )
    if kind in ("WarmupDecayLR", "WarmupCosineLR") and "total_num_steps" not in params:
        raise ValueError(
            f"The {kind} schedule in the DeepSpeed configuration has no length. Pass "
            "DummyScheduler(total_num_steps=...), and set 'total_num_steps' to \"auto\" in the configuration."
        )
    return getattr(schedules, kind)(optimizer, **params)

"""DeepSpeed JSON files that define the optimizer and the schedule, as ``accelerate`` reads them.

Paceline creates both as torch objects and leaves the rest of the file to its DeepSpeed strategy.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ... import messages
from ...accelerator import plugins
from ...strategies.deepspeed.settings import read_config, read_dict, without_auto

_SECTIONS = ("optimizer", "scheduler")
#: Options of DeepSpeed's own optimizers.
_OWN_OPTIONS = ("adam_w_mode", "torch_adam")


class DummyOptim:
    """Stands for the optimizer that a DeepSpeed JSON file defines.

    Args:
        params: parameters, or parameter groups.
        lr: the learning rate, if the file has ``"auto"``.
        weight_decay: the weight decay, if the file has ``"auto"``.
        **kwargs: kept, but without effect.
    """

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs
        messages.ignored("DummyOptim", "the DeepSpeed file defines the optimizer", **kwargs)


class DummyScheduler:
    """Stands for the schedule that a DeepSpeed JSON file defines.

    Args:
        optimizer: the DummyOptim, or the optimizer.
        total_num_steps: length of the schedule in updates, if the file has ``"auto"``.
        warmup_num_steps: length of the warmup in updates, if the file has ``"auto"``.
        lr_scheduler_callable: creates the schedule from the optimizer, if the file defines none.
        **kwargs: kept, but without effect.
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


class DeepSpeedPlugin(plugins.DeepSpeedPlugin):
    """Paceline's DeepSpeedPlugin, whose configuration may define the optimizer and the schedule."""

    @property
    def sections(self) -> dict[str, Any]:
        """The sections that define the optimizer and the schedule, without ``"auto"`` values."""
        return {name: without_auto(value) for name, value in self._file.items() if name in _SECTIONS}

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration without its ``"auto"`` values."""
        return read_config({name: value for name, value in self._file.items() if name not in _SECTIONS}) | self.sections

    def options(self) -> dict[str, Any]:
        """Return the arguments for DeepSpeedStrategy, which gets neither the optimizer nor the schedule."""
        found = super().options()
        if "config" in found:
            found["config"] = {name: value for name, value in found["config"].items() if name not in _SECTIONS}
        return found

    @property
    def _file(self) -> dict[str, Any]:
        return read_dict(getattr(self.hf_ds_config, "config", self.hf_ds_config))


class HfDeepSpeedConfig:
    """A DeepSpeed configuration whose values are read by dotted names.

    Args:
        config_file_or_dict: a dict, or the path of a JSON file.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = read_dict(config_file_or_dict)

    def find_config_node(self, ds_key_long: str) -> tuple[Any, str]:
        """Return the section that holds a dotted name (None if there is none), and the last part of the name."""
        *sections, last = ds_key_long.split(".")
        found: Any = self.config
        for name in sections:
            found = None if found is None else found.get(name)
        return found, last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value by its dotted name."""
        found, last = self.find_config_node(ds_key_long)
        return default if found is None else found.get(last, default)

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
        """Return True if weights or the optimizer's state are kept outside the GPU."""
        names = ("offload_optimizer", "offload_param")
        return any(self.get_value(f"zero_optimization.{name}.device") in ("cpu", "nvme") for name in names)


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Return the DeepSpeed plugin of an AcceleratorState."""
    if state.deepspeed_plugin is None:
        raise ValueError("This Accelerator has no DeepSpeedPlugin. Pass Accelerator(deepspeed_plugin=...).")
    return state.deepspeed_plugin


def created(objects: tuple[Any, ...], plugin: Any) -> list[Any]:
    """Replace each DummyOptim and DummyScheduler with the torch object that the DeepSpeed configuration defines.

    Raises:
        ValueError: the configuration and the script both define the optimizer or the schedule, or neither does.
    """
    config = plugin.sections if isinstance(plugin, DeepSpeedPlugin) else {}
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
            "DummyOptim stands for the optimizer of a DeepSpeed configuration, but there is none in it. Create a torch "
            "optimizer, or add 'optimizer' to the configuration."
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
    params = {"lr": dummy.lr, "weight_decay": dummy.weight_decay, **params}
    return kinds[kind.lower()](list(dummy.params), **params)


def _scheduler(dummy: DummyScheduler, optimizer: Any, config: Mapping[str, Any]) -> Any:
    if "scheduler" not in config:
        if dummy.lr_scheduler_callable is None:
            raise ValueError(
                "DummyScheduler stands for the schedule of a DeepSpeed configuration, but there is none in it. Pass "
                "lr_scheduler_callable, or add 'scheduler' to the configuration."
            )
        return dummy.lr_scheduler_callable(optimizer)
    schedules: Any = importlib.import_module("deepspeed.runtime.lr_schedules")
    section = config["scheduler"]
    kind, params = str(section.get("type")), dict(section.get("params") or {})
    if kind not in schedules.VALID_LR_SCHEDULES:
        raise ValueError(
            messages.unknown("scheduler in the DeepSpeed configuration", kind, schedules.VALID_LR_SCHEDULES)
        )
    if kind.startswith("Warmup"):
        params = {"warmup_num_steps": dummy.warmup_num_steps, **params}
        if kind in ("WarmupLR", "WarmupDecayLR"):
            params = {"warmup_max_lr": optimizer.param_groups[0]["lr"], **params}
        if kind in ("WarmupDecayLR", "WarmupCosineLR"):
            params = {"total_num_steps": dummy.total_num_steps, **params}
    return getattr(schedules, kind)(optimizer, **params)

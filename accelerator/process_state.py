"""``PartialState`` (device, rank and process group) and ``AcceleratorState`` (precision and plugins).

All Accelerators in a process share one process group, but each has its own precision, plugins and windows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import messages
from ..devices.kinds import kind_of
from ..processes.devices import find_kind
from ..processes.process_group import leave
from ..settings import resolve
from ..strategies.base import Strategy
from .enums import DistributedType
from .kwargs_handlers import Handlers, InitProcessGroupKwargs
from .process_info import Processes
from .strategy_options import Choice, choose

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Environment variable that is set in processes started from a notebook.
FORKED = "FORK_LAUNCHED"
_PLUGINS = ("deepspeed_plugin", "fsdp_plugin", "dynamo_plugin", "parallelism_config")


@dataclass
class _Process:
    """State shared by all objects in this process.

    Attributes:
        strategy: the strategy that joined the process group; None until one has joined.
        state: state of the newest Accelerator.
        resets: number of times that the state has been reset.
        cpu: whether a PartialState was created with ``cpu=True``.
        debug: value that the program assigned to ``PartialState.debug``; None if the program did not assign a value.
    """

    strategy: Strategy | None = None
    state: AcceleratorState | None = None
    resets: int = 0
    cpu: bool = False
    debug: bool | None = None

    def forget(self) -> None:
        vars(self).update(vars(_Process(resets=self.resets + 1)))


_process = _Process()


@contextmanager
def forgotten() -> Iterator[None]:
    """Context manager that hides this process's state, so that processes started inside it do not inherit the state."""
    before = vars(_process).copy()
    _process.forget()
    try:
        yield
    finally:
        vars(_process).update(before)


class _Shared(Mapping[str, Any]):
    """Mapping for programs that check whether a state already exists; empty until a state exists."""

    def __init__(self, attribute: str) -> None:
        self._attribute = attribute

    def _shown(self) -> dict[str, Any]:
        value = getattr(_process, self._attribute)
        return {} if value is None else {self._attribute: value}

    def __getitem__(self, name: str) -> Any:
        return self._shown()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shown())

    def __len__(self) -> int:
        return len(self._shown())


def stays_on_cpu() -> bool:
    """Return True if a PartialState was created with ``cpu=True``."""
    return _process.cpu


class PartialState(Processes):
    """The device and rank of this process; creates the process group if there is none.

    All instances share the same state.

    Args:
        cpu: whether to use the CPU even if there are GPUs.
        **group: arguments of InitProcessGroupKwargs: ``backend``, ``timeout``, ``init_method``.
    """

    _shared_state = _Shared("strategy")

    def __init__(self, cpu: bool = False, **group: Any) -> None:
        if _process.strategy is None:
            _process.strategy = _made(cpu, group)
        elif cpu and _process.strategy.device.type != "cpu":
            raise ValueError(
                f"PartialState got cpu=True, but this process already uses {_process.strategy.device}. Pass cpu=True "
                "to the first PartialState or Accelerator."
            )
        else:
            messages.ignored("PartialState", "this process has already joined its process group", **group)
        _process.cpu = cpu or _process.cpu
        self._own = _process.strategy
        self._resets = _process.resets

    def __reduce__(self) -> Any:
        """Pickle this state so that a copy describes the process that unpickles it."""
        return _place_here, (self.device.type == "cpu",)

    @classmethod
    def of(cls, strategy: Strategy) -> PartialState:
        """Return the state of a strategy that has been set up. The process keeps the first strategy passed here."""
        state = object.__new__(cls)
        state._own, state._resets = strategy, _process.resets
        if _process.strategy is None:
            _process.strategy = strategy
        return state

    @staticmethod
    def _reset_state() -> None:
        """Clear the process's state, so that the next PartialState or Accelerator recreates it."""
        _process.forget()

    @property
    def strategy(self) -> Strategy:  # type: ignore[override]
        """The strategy, which determines where tensors live and how processes communicate."""
        if self._resets != _process.resets:
            if _process.strategy is None:
                raise AttributeError  # __getattr__ adds the message, with the attribute's name
            self._own, self._resets = _process.strategy, _process.resets
        return self._own

    def __getattr__(self, name: str) -> Any:
        """Raise an error for a missing attribute, or for a property that raised an AttributeError."""
        if "_resets" in vars(self) and not self.initialized and hasattr(type(self), name):
            raise AttributeError(_forgotten("PartialState", name))
        return object.__getattribute__(self, name)  # raises the error again

    @property
    def initialized(self) -> bool:
        """Whether there is a state; False after a reset."""
        return self._resets == _process.resets or _process.strategy is not None

    @property
    def default_device(self) -> torch.device:
        """The best kind of device on this machine."""
        return torch.device(find_kind("auto"))

    @property
    def backend(self) -> str | None:
        """The process group's backend; None without a process group."""
        return getattr(self.strategy, "backend", None)

    @property
    def debug(self) -> bool:
        """Whether shapes are compared before each collective operation (PACELINE_DEBUG)."""
        return bool(resolve()["debug"]) if _process.debug is None else _process.debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        _process.debug = debug

    @property
    def fork_launched(self) -> bool:
        """Whether a notebook started this process."""
        return os.environ.get(FORKED, "0").lower() in ("1", "true")

    def set_device(self) -> None:
        """Make this process's device the current device."""
        kind_of(self.device).make_current(self.device)

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave ``group``, or the default process group if ``group`` is None. Every process must call this."""
        if group is not None:
            torch.distributed.destroy_process_group(group)
        elif torch.distributed.is_initialized():
            leave()
            _process.forget()

    def __repr__(self) -> str:
        if not self.initialized:
            return "PartialState(forgotten)"
        return (
            f"Distributed environment: {self.distributed_type}{f'  Backend: {self.backend}' if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


class AcceleratorState:
    """The precision and plugins of an Accelerator, plus every attribute of its PartialState.

    ``AcceleratorState()`` returns the state of the newest Accelerator. To change settings, use the Accelerator.

    Args:
        mixed_precision: None, or the Accelerator's precision.

    Raises:
        ValueError: there is no Accelerator yet, or the newest one has a different precision.
    """

    _shared_state = _Shared("state")

    mixed_precision: str
    deepspeed_plugin: Any
    fsdp_plugin: Any
    dynamo_plugin: Any
    parallelism_config: Any
    device_mesh: DeviceMesh | None

    def __new__(cls, mixed_precision: str | None = None, **given: Any) -> AcceleratorState:
        """Return the state of the newest Accelerator."""
        state = _process.state
        if state is None:
            raise ValueError(
                "AcceleratorState() describes an Accelerator, but this process has not created one. Call Accelerator() "
                "first; for the device and ranks alone, use PartialState()."
            )
        if mixed_precision is not None and str(mixed_precision) != state.mixed_precision:
            raise ValueError(
                f"AcceleratorState got mixed_precision={str(mixed_precision)!r}, but the latest Accelerator uses "
                f"{state.mixed_precision!r}. Leave out mixed_precision, or read the state attribute of the Accelerator "
                "that you mean."
            )
        messages.ignored(
            "AcceleratorState",
            "AcceleratorState() describes the latest Accelerator, which has its own settings",
            False,
            **given,
        )
        return state

    @classmethod
    def of(cls, partial: PartialState, mixed_precision: str = "no", **plugins: Any) -> AcceleratorState:
        """Create the state of a new Accelerator; from then on, ``AcceleratorState()`` returns this state.

        Args:
            partial: the Accelerator's PartialState.
            mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"``, ``"fp8"``, or the name of another precision.
            **plugins: the Accelerator's plugins, keyed by name.
        """
        state = object.__new__(cls)
        mesh, sizes = getattr(partial.strategy, "mesh", None), plugins.get("parallelism_config")
        if mesh is not None and sizes is not None and sizes.sp_enabled:
            mesh = sizes.get_device_mesh(mesh.device_type)  # has the dimension "sp"
        vars(state).update({name: plugins.get(name) for name in _PLUGINS}, device_mesh=mesh)
        vars(state).update(_partial=partial, mixed_precision=mixed_precision)
        _process.state = state
        return state

    def __reduce__(self) -> Any:
        """Pickle this state so that a copy has the same settings but describes the process that unpickles it."""
        return _state_here, (self._partial, {"mixed_precision": self.mixed_precision, **self.plugins})

    @property
    def plugins(self) -> dict[str, Any]:
        """A dict of all plugins, keyed by name; a plugin that is not in use is None."""
        return {name: vars(self)[name] for name in _PLUGINS}

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Clear the newest Accelerator's state; with ``reset_partial_state``, also clear the process's state."""
        if _process.state is not None:
            vars(_process.state).clear()
            _process.state = None
        if reset_partial_state:
            _process.forget()

    @property
    def initialized(self) -> bool:
        """Whether there is a state; False after a reset."""
        return "_partial" in vars(self)

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded by ``fully_shard``."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def use_fsdp(self) -> bool:
        """Whether there is an FSDP plugin."""
        return self.fsdp_plugin is not None

    @property
    def deepspeed_plugins(self) -> dict[str, Any] | None:
        """A dict with the DeepSpeed plugin under the name ``"default"``; None if DeepSpeed is not used."""
        return None if self.deepspeed_plugin is None else {"default": self.deepspeed_plugin}

    def get_deepspeed_plugin(self, name: str = "default") -> Any:
        """Return the DeepSpeed plugin; ``"default"`` is the only valid name."""
        return (self.deepspeed_plugins or {})[name]

    def select_deepspeed_plugin(self, name: str = "default") -> None:
        """Check that a plugin with the given name exists; with at most one plugin, there is nothing to select."""
        self.get_deepspeed_plugin(name)

    def __getattr__(self, name: str) -> Any:
        partial = vars(self).get("_partial")
        if partial is None:
            raise AttributeError(_forgotten("AcceleratorState", name))
        known = hasattr(type(partial), name) or name in vars(partial)
        return getattr(partial, name) if known else object.__getattribute__(self, name)  # raises with this class's name

    def __repr__(self) -> str:
        return f"{self._partial!r}\nMixed precision type: {self.mixed_precision}\n"


def _place_here(cpu: bool) -> PartialState:
    return PartialState(cpu=cpu and _process.strategy is None)


def _state_here(partial: PartialState, settings: dict[str, Any]) -> AcceleratorState:
    state = object.__new__(AcceleratorState)
    vars(state).update(settings, _partial=partial, device_mesh=None)
    return state


def is_initialized() -> bool:
    """Return True if this process has created an Accelerator."""
    return _process.state is not None


def _made(cpu: bool, group: dict[str, Any]) -> Strategy:
    """Create a strategy and join the process group that the launcher describes."""
    handlers = Handlers(process_group=InitProcessGroupKwargs(**group) if group else None)
    resolved = resolve({"cpu": cpu or None}, door="PartialState")
    settings = {name: resolved[name] for name in ("cpu", "device")}
    strategy = choose(Choice(handlers=handlers, settings=settings))
    strategy.setup_environment()
    return strategy


def _forgotten(kind: str, name: str) -> str:
    return (
        f"`{kind}` object has no attribute `{name}` anymore, because `{kind}._reset_state()` was called. Create a new "
        f"{'PartialState' if kind == 'PartialState' else 'Accelerator'}() and read the attribute from there."
    )

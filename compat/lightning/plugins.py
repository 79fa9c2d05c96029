"""Adds the methods and attributes of Lightning's strategies, precisions and accelerators to Paceline's classes.

Each added method or attribute only calls a Paceline method or returns a fixed value.
"""

from __future__ import annotations

import functools
import inspect
import threading
import typing
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload

from ... import messages
from ...callbacks.device_stats_monitor import cpu_stats, device_stats
from ...checkpoint.checkpoint_io import AsyncCheckpointIO, TorchCheckpointIO
from ...processes.accelerators import Accelerator, AcceleratorRegistry
from ...processes.device_transfer import move
from ...strategies.base import Strategy
from ...strategies.distributed import DistributedStrategy
from ...strategies.fsdp.settings import FSDPSettings
from ...torch_private import pytree
from ...trainer import checkpoint_contents, start_run
from ...trainer.trainer import Trainer

#: The last Trainer that created or received each strategy.
_trainers: weakref.WeakKeyDictionary[Any, weakref.ref[Trainer]] = weakref.WeakKeyDictionary()


def remember(trainer: Trainer) -> None:
    """Record a strategy's Trainer, so that attributes such as ``strategy.lightning_module`` can read from it."""
    _trainers[trainer.strategy] = weakref.ref(trainer)


def _trainer(strategy: Strategy) -> Any:
    found = _trainers.get(strategy)
    return None if found is None else found()


def _of_trainer(name: str, otherwise: Any = None, settable: bool = False) -> property:
    """Create a property for strategies that reads, or sets, the attribute ``name`` of the strategy's Trainer."""

    def get(strategy: Strategy) -> Any:
        trainer = _trainer(strategy)
        return otherwise if trainer is None else getattr(trainer, name)

    def put(strategy: Strategy, value: Any) -> None:
        trainer = _trainer(strategy)
        if trainer is None:
            raise AttributeError(
                f"{type(strategy).__name__}.{name} cannot be set, because no Trainer has this strategy yet. Set it "
                "during the fit, for example in on_train_epoch_start."
            )
        setattr(trainer, name, value)

    return property(get, put if settable else None, doc=f"The Trainer's ``{name}``.")


class StrategyNames(Strategy):
    """Attributes and methods that :func:`install` adds to every strategy."""

    #: Whether a checkpoint is loaded only after the module is on its device; always False in Paceline.
    restore_checkpoint_after_setup = False
    #: Whether resuming restores the optimizers; always True in Paceline.
    lightning_restore_optimizer = True
    handles_gradient_accumulation = False
    lightning_module = _of_trainer("lightning_module")
    model = _of_trainer("model")
    optimizers = _of_trainer("optimizers", [], settable=True)
    lr_scheduler_configs = _of_trainer("lr_scheduler_configs", [], settable=True)

    @property
    def _lightning_module(self) -> Any:
        return self.lightning_module

    @_lightning_module.setter
    def _lightning_module(self, module: Any) -> None:
        self.connect(module)

    def connect(self, model: Any) -> None:
        """Give the Trainer a module before its first run, so that ``trainer.save_checkpoint`` can save it."""
        trainer = _trainer(self)
        if trainer is None:
            raise AttributeError(
                f"{type(self).__name__}.connect needs a Trainer. Create one with Trainer(strategy=...), and use its "
                "strategy."
            )
        if trainer.state.fn is not None and model is not trainer.lightning_module:
            raise RuntimeError(
                f"The module cannot be replaced by {messages.a(model)} during {trainer.state.fn}. Connect it before "
                "the run."
            )
        start_run.hold(trainer.current_run, model)

    @property
    def strategy_name(self) -> str:
        """The name by which a Trainer chooses this strategy."""
        return self.names[0] if self.names else type(self).__name__.lower()

    @property
    def accelerator(self) -> Accelerator:
        """The type of device."""
        return AcceleratorRegistry[self.device.type]()

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices of this machine's processes."""
        return list(getattr(self, "devices", [])) or [self.device]

    @property
    def num_processes(self) -> int:
        """Number of processes on this machine."""
        return len(self.parallel_devices)

    def setup_distributed(self) -> None:
        """Same as :meth:`setup_environment`."""
        self.setup_environment()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if the decision is True on all processes or, if ``all`` is False, on any process."""
        return self.agree(decision, all)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device."""
        return move(batch, self.device if device is None else device)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader unchanged."""
        return dataloader

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Same as :meth:`init_context`."""
        return self.init_context()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint on rank 0."""
        if storage_options is not None and self.communicates_forward:
            raise TypeError(
                f"{type(self).__name__}.save_checkpoint(storage_options=...) is not supported, because a strategy that "
                "shards models writes its own checkpoints. Leave out storage_options."
            )
        if self.is_global_zero:
            self._io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint."""
        return self._io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint on rank 0."""
        if self.is_global_zero:
            self._io.remove_checkpoint(filepath)

    @property
    def _io(self) -> Any:
        return self.checkpoint_io or TorchCheckpointIO()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers. If a program overrides this method, the override replaces Paceline's behavior."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self.load_optimizer_state(self.model, optimizer, state)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's full state dict."""
        return self.model_state(_trainer(self).lightning_module)


class AcceleratorNames(Accelerator):
    """Methods that :func:`install` adds to every accelerator."""

    def get_device_stats(self, device: Any) -> dict[str, float]:
        """Return statistics about a device, as ``DeviceStatsMonitor`` logs them."""
        return cpu_stats() if self.name == "cpu" else device_stats(torch.device(device))

    def setup_device(self, device: torch.device) -> None:
        """Do nothing, because a Strategy sets up its own device."""


def restoring_optimizers(restore: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``restore_optimizers`` to call ``load_optimizer_state_dict`` if a strategy overrides it."""

    def call(run: Any, states: list[Any], *args: Any) -> None:
        strategy = run.strategy
        if type(strategy).load_optimizer_state_dict is StrategyNames.load_optimizer_state_dict:
            restore(run, states, *args)
        elif strategy.lightning_restore_optimizer:
            strategy.load_optimizer_state_dict({"optimizer_states": states})

    return call


def copying(save: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``AsyncCheckpointIO.save_checkpoint`` to copy the tensors first, unless the Trainer is the caller."""

    @functools.wraps(save)
    def call(io: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # the Trainer calls it in a thread, with copies
            checkpoint = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), checkpoint)
        save(io, checkpoint, *args, **kwargs)

    return call


def install() -> None:
    """Add the attributes and methods that Lightning's classes have but Paceline's classes lack."""
    for names in (StrategyNames, AcceleratorNames):
        owner = names.__base__
        for name, value in vars(names).items():
            if not hasattr(owner, name):
                setattr(owner, name, value)
    setattr(AsyncCheckpointIO, "save_checkpoint", copying(AsyncCheckpointIO.save_checkpoint))  # noqa: B010
    checkpoint_contents.restore_optimizers = restoring_optimizers(checkpoint_contents.restore_optimizers)


# ---- strategy arguments ----------------------------------------------------------------------------------------------

#: Lightning's names of FSDP arguments, and the corresponding names in FSDPSettings.
_FSDP = {
    "mixed_precision": "mixed_precision_policy",
    "auto_wrap_policy": "auto_wrap_policy",
    "cpu_offload": "cpu_offload",
    "sharding_strategy": "sharding_strategy",
    "backward_prefetch": "backward_prefetch",
    "forward_prefetch": "forward_prefetch",
    "limit_all_gathers": "limit_all_gathers",
    "use_orig_params": "use_orig_params",
    "sync_module_states": "sync_module_states",
    "param_init_fn": "param_init_fn",
    "ignored_modules": "ignored_modules",
}


#: Method of Lightning's strategies that has no equivalent in Paceline.
_LAUNCHES = "_configure_launcher"


def take_arguments(strategy: Any) -> None:
    """Make a strategy's constructor accept Lightning's additional arguments.

    The strategy uses ``precision_plugin``, ``checkpoint_io``, ``cluster_environment`` and, if the strategy is
    distributed, ``parallel_devices``. ``accelerator`` is ignored.
    """
    init = strategy.__init__
    shards = "fsdp" in strategy.names

    @functools.wraps(init)
    def take(self: Any, *args: Any, **kwargs: Any) -> None:
        if hasattr(type(self), _LAUNCHES):
            raise TypeError(
                f"{type(self).__name__} defines {_LAUNCHES!r}, which Paceline never calls. Remove it, and choose how "
                "processes start with Trainer(strategy='ddp'), 'ddp_spawn', 'ddp_fork' or 'ddp_notebook', or start "
                "them with torchrun."
            )
        devices = kwargs.pop("parallel_devices", None)
        kwargs.pop("accelerator", None)
        parts = {name: kwargs.pop(name, None) for name in ("checkpoint_io", "cluster_environment")}
        precision = kwargs.pop("precision_plugin", None)
        if precision is not None:
            kwargs["precision"] = precision
        given = dict(kwargs)
        if shards:
            _translate_fsdp(kwargs)
        init(self, *args, **kwargs)
        if shards:
            _show_fsdp(self, given)
        for name, part in parts.items():
            if part is not None:
                setattr(self, name, part)
        if devices and isinstance(self, DistributedStrategy):
            self.devices = list(devices)

    take.__annotations__ = init.__annotations__  # wraps() in Python 3.14 omits assigned annotations
    vars(take)["__signature__"] = _typed(init)
    strategy.__init__ = take


def _translate_fsdp(arguments: dict[str, Any]) -> None:
    """Replace FSDP1 arguments with their FSDP2 equivalents."""
    asked = {own: arguments.pop(name) for name, own in _FSDP.items() if name in arguments}
    recomputed = arguments.pop("activation_checkpointing_policy", arguments.get("activation_checkpointing"))
    if recomputed is not None:
        arguments["activation_checkpointing"] = recomputed if isinstance(recomputed, bool) else _classes(recomputed)
    if isinstance(asked.get("auto_wrap_policy"), (set, frozenset)):
        arguments["wrap"] = tuple(asked.pop("auto_wrap_policy"))
    for unused in ("process_group", "activation_checkpointing_kwargs"):
        arguments.pop(unused, None)
    mesh = arguments.get("device_mesh")
    if isinstance(mesh, (tuple, list)):
        del arguments["device_mesh"]
        arguments["data_parallel_replicate"], arguments["data_parallel_shard"] = mesh
    if asked:
        arguments.update(
            {name: value for name, value in FSDPSettings(**asked).options().items() if name not in arguments}
        )


def _show_fsdp(strategy: Any, given: dict[str, Any]) -> None:
    """Store the user's FSDP arguments in the attributes from which programs read them."""
    offload = given.get("cpu_offload") or False
    strategy.cpu_offload = CPUOffload(offload_params=offload) if isinstance(offload, bool) else offload
    strategy.mixed_precision_config = given.get("mixed_precision")
    strategy.kwargs = {"use_orig_params": given.get("use_orig_params", True)}


def _classes(policy: Any) -> Any:
    found = FSDPSettings(auto_wrap_policy=policy).options() if not isinstance(policy, (set, list, tuple, type)) else {}
    return found.get("wrap") or (tuple(policy) if isinstance(policy, (set, list, tuple)) else policy)


def _typed(init: Callable[..., Any]) -> inspect.Signature:
    """Return a constructor's signature with resolved types, for command lines. A mesh may also be a pair of sizes."""
    signature = inspect.signature(init)
    try:
        types = typing.get_type_hints(init)
    except NameError:
        return signature
    if "device_mesh" in types:
        types["device_mesh"] = tuple[int, int] | DeviceMesh | None
    shown = [one.replace(annotation=types.get(one.name, one.annotation)) for one in signature.parameters.values()]
    return signature.replace(parameters=shown)

"""The module wrapper that ``Fabric.setup`` returns, and the ``trainer`` attribute of a LightningModule under Fabric."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...accelerator.accelerator import Accelerator
from ...accelerator.loaders import PreparedLoader
from ...accelerator.models import unwrapped
from ...accelerator.optimizers import AcceleratedOptimizer
from ...processes.device_transfer import move
from ...strategies.base import Strategy
from ...strategies.precision.base import Precision
from ...torch_private import is_initialized, own_modules
from ...trainer.module import TrainingModule

if TYPE_CHECKING:
    from .fabric import Fabric

#: LightningModule methods that run through the strategy, like forward, even if they are not marked.
_STEPS = frozenset({"training_step", "validation_step", "test_step", "predict_step"})


class FabricModule(nn.Module):
    """A prepared module, which also has all attributes and methods of the user's module (:attr:`module`).

    Its ``forward`` converts inputs to the precision's dtype and floating-point outputs to torch's default dtype.
    """

    def __init__(self, accelerator: Accelerator, module: nn.Module) -> None:
        super().__init__()
        self._original_module = module
        vars(self).update(_accelerator=accelerator, _marked=set[str]())
        self.training = module.training

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return own_modules(self)["_original_module"]  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        """The device of the module's parameters; for a LightningModule, its own ``device``."""
        return self._own("device", self._accelerator.device)

    @property
    def dtype(self) -> Any:
        """The dtype of the module's parameters; for a LightningModule, its own ``dtype``."""
        return self._own("dtype", torch.get_default_dtype())

    def _own(self, name: str, default: Any) -> Any:
        known = getattr(self.module, name, None)
        return known if known is not None else getattr(next(self.module.parameters(), None), name, default)

    # Subclasses in libraries read Lightning's names for the parts of the wrapper.

    @property
    def _forward_module(self) -> nn.Module:
        return self.module

    @property
    def _strategy(self) -> Strategy:
        return self._accelerator.strategy

    @property
    def _precision(self) -> Precision:
        return self._strategy.precision

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._in_precision(self.module, *args, **kwargs)

    def _in_precision(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        precision = self._precision
        if precision.input_dtype is None:
            return call(*args, **kwargs)
        args, kwargs = precision.convert_input((args, kwargs))
        return precision.convert_output(call(*args, **kwargs))

    def mark_forward_method(self, method: str | Callable[..., Any]) -> None:
        """Mark a method of the module, so that its calls run through the strategy and the precision, like forward."""
        name = method if isinstance(method, str) else method.__name__
        if name == "forward":
            raise ValueError(
                "mark_forward_method('forward') is not needed, because forward is always marked. Pass the name of "
                "another method."
            )
        if not callable(getattr(self.module, name, None)):
            raise AttributeError(
                f"mark_forward_method({name!r}): {type(self.module).__name__} has no method of that name. Pass the "
                "name of one of its methods."
            )
        self._marked.add(name)

    def __getattr__(self, name: str) -> Any:
        if not is_initialized(self) or name == "_original_module":
            return super().__getattr__(name)
        module = self.module
        if name in self._marked or (name in _STEPS and isinstance(module, TrainingModule)):
            placement = self._accelerator.prepared.placement(module, "setup_module")
            method = placement.route_method(name)
            return partial(self._in_precision, method)
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = own_modules(self).get("_original_module") if is_initialized(self) else None
        if module is None or name in ("training", "_original_module") or not hasattr(module, name):
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's ``state_dict``, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a ``state_dict`` into the module."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the module's named parameters, without a prefix."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the module's named buffers, without a prefix."""
        return self.module.named_buffers(*args, **kwargs)


def is_wrapped(obj: Any) -> bool:
    """Return True if an object came from ``Fabric.setup`` or ``Fabric.setup_dataloaders``."""
    return isinstance(unwrapped(obj), (FabricModule, AcceleratedOptimizer, PreparedLoader, FabricLoader))


def original(obj: Any) -> Any:
    """Return the user's module inside a module that ``Fabric.setup`` returned; return anything else unchanged."""
    obj = unwrapped(obj)
    return obj.module if isinstance(obj, FabricModule) else obj


def unwrapped_in(collection: Any) -> Any:
    """Return a collection with the user's original objects in place of the objects from ``Fabric.setup``."""
    if isinstance(collection, Mapping):
        return {key: unwrapped_in(value) for key, value in collection.items()}
    if type(collection) in (list, tuple):
        return type(collection)(unwrapped_in(value) for value in collection)
    found = original(collection)
    return found.optimizer if isinstance(found, AcceleratedOptimizer) else found


class FabricLoader:
    """A loader that every process reads in full, with its batches moved to the device.

    Args:
        loader: the user's loader.
        device: device to move batches to; if None, batches are not moved.
    """

    def __init__(self, loader: Any, device: torch.device | None) -> None:
        self._loader, self._device = loader, device

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch if self._device is None else move(batch, self._device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self._loader, name)


# ---- a LightningModule's trainer -------------------------------------------------------------------------------------


class _Value:
    """A name under which a module logs values. Every value is sent to Fabric's loggers immediately."""

    def __init__(self, fabric: Fabric, name: str, options: Any) -> None:
        self.fabric, self.name, self.options = fabric, name, options
        self.resumed = False

    def update(self, value: Any, batch_size: int | None) -> None:
        self.fabric.log(self.name, value.compute() if hasattr(value, "compute") else value)


class _Values(dict[str, _Value]):
    """The mapping in which a module's ``self.log`` and ``self.log_dict`` look up names."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[Any, Any] = {}

    def group(self, key: Any, group: Any) -> None:
        """Do nothing, because each value is logged separately."""


class _Store:
    """Receives the values that a module's ``self.log`` logs."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric, self.records = fabric, _Values()

    def define(self, name: str, value: Any, options: Any) -> _Value:
        """Start logging values under a name."""
        record = self.records[name] = _Value(self.fabric, name, options)
        return record


class _FabricStrategy:
    """The strategy, with Fabric's backward pass."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._fabric.strategy, name)

    def backward(self, loss: Tensor, how: Callable[[Tensor], Any] | None = None) -> None:
        self._fabric.accelerator_of_loop.backward(loss)


class FabricTrainer:
    """The ``trainer`` of a LightningModule that Fabric has set up.

    This object defines only the attributes that make sense in a custom loop, and reads all other attributes from the
    Fabric.

    Args:
        fabric: the Fabric that set up the module.
        optimizers: the optimizers that were set up together with the module.
    """

    barebones = False

    def __init__(self, fabric: Fabric, optimizers: list[Any]) -> None:
        hooks = SimpleNamespace(on_before_backward=(), on_after_backward=())
        self._fabric = fabric
        self.strategy = _FabricStrategy(fabric)
        unscale = self.strategy.unscale_gradients
        self.current_run = SimpleNamespace(managed=optimizers, hooks=hooks, unscale_gradients=unscale)
        self.optimizers = [one.optimizer for one in optimizers]
        self.lr_scheduler_configs: list[Any] = []
        self.current_epoch = self.global_step = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_fabric" not in vars(self):
            raise AttributeError(name)
        if not hasattr(self._fabric, name):
            raise AttributeError(
                f"self.trainer.{name} does not exist, because this module runs under Fabric, without a Trainer. Use an "
                "attribute of Fabric, or pass the value to the module."
            )
        return getattr(self._fabric, name)


def attach_to_fabric(fabric: Fabric, module: nn.Module, optimizers: list[Any]) -> None:
    """Make a LightningModule, and all LightningModules inside it, log and optimize through Fabric."""
    trainer, store = FabricTrainer(fabric, optimizers), _Store(fabric)
    for one in module.modules():
        if isinstance(one, TrainingModule):
            vars(one).update(_trainer=trainer, _metric_store=store, fabric=fabric)


def takes_fabric(function: Callable[..., Any]) -> bool:
    """Return True if a function has a parameter for the Fabric."""
    return bool(inspect.signature(function).parameters)

"""The part of a :class:`.base.Strategy` that decides where tensors live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..big_model.deferred_weights import Waiting
from ..big_model.empty_init import no_initial_values
from ..big_model.quantized_layers import prepare_quantized
from ..processes.device_transfer import mover
from .foreach_optimizers import prefer_foreach
from .precision.base import Precision, precision_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

T = TypeVar("T")


class Placement:
    """Moves modules, optimizers and batches to a device and converts them to a precision's dtypes.

    The methods of this class are called when a run starts, never during a step. The class keeps the whole module on one
    device. A subclass overrides ``setup_module`` to shard the module, ``wrap_for_training`` and ``bind_step`` to run
    training steps through a wrapper, ``setup_optimizers`` to change optimizers, and ``init_context`` to change how
    layers are created.

    Args:
        device: the device of the module and the batches.
        precision: dtypes and loss scaling; full float32 if None.
    """

    #: Deferred weights of the module that was set up most recently; each module gets a new object.
    waiting: Waiting = Waiting()
    #: Whether each process holds the whole module, which quantized weights require.
    holds_whole_module: ClassVar[bool] = True
    #: Whether an optimizer step goes through the precision's ``optimizer_step``.
    steps_through_precision: ClassVar[bool] = True

    def __init__(self, device: torch.device | str = "cpu", precision: Precision | None = None) -> None:
        self.device = torch.device(device)
        self.precision = precision_of(self, precision)
        self.precision.use_on(self.device)

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self.device

    @property
    def precision_plugin(self) -> Precision:
        """The Precision in use."""
        return self.precision

    @property
    def device_ids(self) -> list[int]:
        """The device index of each process on this machine; 0, 1, ... on the CPU."""
        return [self.device.index or 0]

    def init_context(self) -> AbstractContextManager[Any]:
        """Context manager in which new layers are created on this strategy's device, with the precision's dtype."""
        return self.precision.creation_context(self.device)

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Like :meth:`module_init_context`, but for tensors."""
        return self.module_init_context(empty_init)

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return :meth:`empty_init_context` if ``empty_init`` is True, else :meth:`init_context`."""
        return self.empty_init_context() if empty_init else self.init_context()

    @contextmanager
    def empty_init_context(self) -> Iterator[None]:
        """Context manager in which new layers skip weight initialization, because their weights will be loaded later.

        By default, layers get uninitialized memory. A strategy that shards the model creates the layers on the meta
        device.
        """
        with self.init_context(), no_initial_values():
            yield

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Convert the module to the precision's dtype, and move it to the device. A subclass may also shard it.

        Layers on the meta device are allocated and initialized.
        """
        module = self.precision.convert_module(module)
        self._materialize(module, torch.device("cpu") if self.precision.quantizes else self.device)
        module = self.precision.move_module(module, self.device)
        prepare_quantized(module)
        return module

    def _materialize(self, module: nn.Module, device: torch.device) -> None:
        self.waiting = Waiting(module)
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            from ..big_model.materialize import materialize

            self.waiting.unfilled = materialize(module, device, self.waiting.noted)
            self.waiting.take_memory(module, device)

    def settle_batch_norm(self, module: nn.Module, synchronize: bool) -> None:
        """If ``synchronize``, let batch norms compute their statistics over the batches of all processes.

        Called before :meth:`setup_module`.
        """

    def wrap_for_training(self, module: nn.Module) -> nn.Module:
        """Return a wrapper for a module that has been set up, or the module itself if training needs no wrapper."""
        return module

    def bind_step(self, step: Callable[..., T], wrapped: nn.Module, training: bool = False) -> Callable[..., T]:
        """Return the function that the loop calls in place of a module's step. Called once, when the run starts.

        Args:
            step: ``module.training_step``, ``validation_step``, ...
            wrapped: in a fit, the result of :meth:`wrap_for_training`.
            training: whether this is the training step.
        """
        return self.precision.bind_forward(step)

    def setup_optimizers(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        """Prepare the user's optimizers and return the optimizers to use; any existing state is moved to the device."""
        self.precision.setup_optimizers(optimizers)
        for optimizer in optimizers:
            move_optimizer_state(optimizer, self.device)
        prefer_foreach(optimizers)
        return optimizers

    def batch_mover(self) -> Callable[[Any], Any] | None:
        """Return the function that moves a batch to the device and converts it to the precision's input dtype.

        Returns None if nothing needs to be moved or converted. If your own Precision subclass overrides
        ``convert_input``, the batch is only moved.
        """
        converts = "convert_input" in self.precision.overrides
        return mover(self.device, None if converts else self.precision.input_dtype)


def move_optimizer_state(optimizer: Optimizer, device: torch.device) -> None:
    """Move optimizer state to ``device``, except for ``step``, which torch keeps on the CPU on purpose."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device != device and key != "step":
                state[key] = value.to(device)

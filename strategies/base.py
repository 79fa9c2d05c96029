"""The interface between the training loop and the hardware, used by both ``Trainer`` and ``Accelerator``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from .. import messages
from ..big_model.device_map import spread_in
from ..big_model.quantized_layers import prepare_quantized
from ..big_model.sharded_loading import all_or_none
from ..devices.kinds import kind_of
from ..torch_private import multiply_each_
from ..torch_versions import untried
from .communication import Communication
from .placement import Placement
from .precision.base import gradients
from .state import State

if TYPE_CHECKING:
    from torch.distributed.algorithms.join import Joinable
    from torch.optim import Optimizer
    from typing_extensions import Self


class Strategy(Placement, Communication, State):
    """Runs a model in one process on one device. Subclasses distribute the work across several processes.

    The base classes handle placement, communication and checkpoint state. This class adds the parts that combine them:
    starting and ending a run, and the training step. A run calls ``setup_environment``, ``setup_module`` and
    ``setup_optimizers``, then runs its steps, and finally calls ``teardown``.

    A separate object, ``strategy.precision``, decides dtypes and loss scaling.
    """

    #: The names that select this strategy in ``Trainer(strategy=...)``.
    names: ClassVar[tuple[str, ...]] = ()
    #: Whether forward passes communicate. If so, all ranks must run the same number of them, including in evaluation.
    communicates_forward: bool = False
    #: Whether gradients are communicated. If so, a loop that accumulates gradients should call ``sync_gradients``.
    communicates_gradients: ClassVar[bool] = False
    #: Whether a step splits its batch into micro-batches.
    splits_batches: ClassVar[bool] = False
    #: Whether processes may hold different weights and optimizer states, because they have trained apart.
    replicas_differ: bool = False
    #: The methods that a profiler times.
    timed: ClassVar[tuple[str, ...]] = (
        *("backward", "optimizer_step"),
        *("reduce", "all_gather", "broadcast", "gather_objects", "barrier"),
    )

    # ---- the run ---------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Make this process's device the current one, and join the process group. Called once per run on each rank."""
        if warning := untried():
            messages.warn_once(warning)
        kind_of(self.device).make_current(self.device)

    def for_another_module(self) -> Self:
        """Return a strategy for another module, with the same processes, device and precision as this one.

        Every rank must call this, on a strategy that has already been set up and has no module of its own.
        """
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def places(self, module: nn.Module) -> bool:
        """Return True if :meth:`setup_module` should place the module, False if a device map has already placed it.

        Raises:
            RuntimeError: a device map has placed the module, and this strategy cannot use such a module.
        """
        spread = spread_in(module)
        if spread is None:
            return True
        name, single = type(spread).__name__, self.world_size == 1 and not self.communicates_forward
        if not single or (spread is not module and self.device.type != "cpu"):
            raise RuntimeError(
                f"{name} was dispatched by a device map (dispatch_model or load_checkpoint_and_dispatch). A "
                "dispatched model must stay on its devices and can only run in a single process, but "
                f"{type(self).__name__} has world size {self.world_size} and moves models to {self.device}. To shard "
                "the model for training, build it under init_empty_weights and load it with load_checkpoint_in_model "
                "under strategy='fsdp'."
            )
        self.precision.convert_module(module)  # raises if it would change the dtype of a dispatched model
        prepare_quantized(module)
        messages.info_once(
            f"{name} stays on the devices of its device map. Trainable weights stay in memory, even if they exceed "
            "max_memory. To train a model that does not fit in memory, use strategy='fsdp'."
        )
        return False

    def settle_weights(self, module: nn.Module, required: bool = True) -> None:
        """Load deferred weights (see :mod:`.big_model.deferred_weights`) unless a checkpoint has replaced them.

        Every process must call this, after the module is set up and any checkpoint is loaded. If ``required``, a tensor
        that still has no values raises a RuntimeError.
        """
        if self.waiting.notes:
            all_or_none(partial(self.waiting.read, module), self.gather_objects)
        if required and self.waiting.unfilled:
            self.waiting.check(module, self.gather_objects)

    def explain(self, error: BaseException) -> BaseException | None:
        """Return a clearer error if ``error`` is caused by how this strategy works; None otherwise."""
        return None

    def on_exception(self, exception: BaseException) -> None:
        """Called if an exception ends a run, after the ``on_exception`` hooks and before :meth:`teardown`."""

    def teardown(self) -> None:
        """Release the strategy's resources. Called once per run, even after an error."""

    def time_with(self, around: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None) -> None:
        """Wrap the methods listed in ``timed`` with a profiler's ``around`` for one run; None unwraps them."""
        for name in self.timed:
            if around is None:
                vars(self).pop(name, None)
            else:
                setattr(self, name, around(f"[Strategy]{type(self).__name__}.{name}", getattr(self, name)))

    # ---- communication of gradients ----------------------------------------------------------------------------------

    def sync_gradients(self, enabled: bool) -> None:
        """Set whether the next backward pass communicates gradients; only a window's last pass needs to."""

    def scale_waiting(self, factor: float) -> None:
        """Multiply the gradients that wait for an optimizer step, inside :meth:`joinable`'s context."""

    def sync_next_backward(self) -> None:
        """Make the next backward pass communicate gradients, even if its forward pass ran with communication off."""
        self.sync_gradients(True)

    def complete_gradients(self, optimizer: Optimizer) -> None:
        """Reduce the accumulated gradients that no later backward pass will reduce."""

    def left_gradients(self) -> bool:
        """Return True if the last backward pass did not communicate its gradients but should have.

        Called once after each backward pass.
        """
        return False

    def left_gradients_by_hand(self) -> bool:
        """Return True if gradients of manual optimization should have been communicated but were not.

        Such gradients come from ``loss.backward()`` or ``torch.autograd.grad`` instead of ``manual_backward``. Called
        before each optimizer step of manual optimization.
        """
        return False

    def check_parameters(self, module: nn.Module) -> None:
        """Check that training still reaches every parameter. Called when an epoch or a pass over a loader begins."""

    def check_replicas(self, module: nn.Module) -> None:
        """Warn about weights that differ between the ranks but should not. All ranks must call this."""

    def keep_gradients_local(self) -> AbstractContextManager[Any]:
        """Context manager that keeps gradients local to each process, regardless of :meth:`sync_gradients`."""
        self._needs_whole_model("keep_gradients_local")
        return nullcontext()

    def joinable(self) -> Joinable | None:
        """Return the object to pass to torch's ``Join`` context manager, for ranks with different numbers of batches.

        Returns None if backward passes do not communicate.
        """
        self._needs_whole_model("joinable")
        return None

    def _needs_whole_model(self, what: str) -> None:
        if self.communicates_gradients:
            raise NotImplementedError(
                f"{type(self).__name__} does not support {what}, because each process holds only part of the model "
                "and needs the other processes in every step. Use strategy='ddp', where each process holds the whole "
                "model."
            )

    def measure_communication(self) -> None:
        """Start measuring how long gradient communication takes in this run."""

    def communication_seconds(self) -> dict[str, float] | None:
        """Return the time spent communicating gradients so far, in seconds.

        Returns:
            A dict with ``all``, ``exposed`` (the part that did not overlap with backward) and the number of ``steps``;
            None if the communication was not measured.
        """
        return None

    # ---- one step --------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, how: Callable[[Tensor], Any] | None = None) -> None:
        """Scale the loss, of shape (), if fp16 requires scaling, then run backward on it.

        This calls ``how(loss)``, or ``loss.backward()`` if ``how`` is None.
        """
        loss = self.precision.scale_loss(loss)
        if how is None:
            loss.backward()
        else:
            with self.precision.backward_context():
                how(loss)

    def split_sequences(
        self, tensors: Sequence[Tensor], dims: Sequence[int], unrestored: Collection[Tensor] = ()
    ) -> AbstractContextManager[Any]:
        """Context manager in which tensors hold this process's part of each sequence, and attention covers all parts.

        The base class's context manager changes nothing, because every process has the full sequences. ``dims`` lists
        the sequence dimension of each tensor. Tensors in ``unrestored`` are not restored afterwards.
        """
        return nullcontext()

    def batch_cutter(self) -> Callable[[Any], Any] | None:
        """Return the function that prepared loaders call to cut a batch to this process's part of each sequence.

        Returns None if batches contain full sequences.
        """
        return None

    def full_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's gradient or None. Every process must call this, because some strategies gather it."""
        return parameter.grad

    def scale_gradients(self, optimizer: Optimizer, factor: float | Tensor) -> None:
        """Multiply every gradient of ``optimizer`` by ``factor``, a number or a scalar tensor, in place."""
        grads = gradients(optimizer)
        if grads:
            multiply_each_(grads, factor)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients by fp16's loss scale; a second call before the optimizer step does nothing."""
        self.precision.unscale_gradients(optimizer)

    def finish_gradients(self, optimizer: Optimizer, factor: float | Tensor) -> None:
        """Finish the gradients of an accumulation window: remove fp16's loss scale and multiply by ``factor``."""
        if self.precision.scaler is not None:
            self.unscale_gradients(optimizer)
        if isinstance(factor, Tensor) or factor != 1.0:
            self.scale_gradients(optimizer, factor)

    def clip(self, parameters: Iterable[Tensor], value: float, algorithm: str | None) -> None:
        """Clip finished gradients to ``value``; ``algorithm`` is ``"value"`` or ``"norm"`` (None means ``"norm"``)."""
        if algorithm == "value":
            self.clip_by_value(parameters, float(value))
        else:
            self.clip_by_norm(parameters, float(value))

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the total gradient norm across all shards; return the norm before clipping as a scalar tensor."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_by_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clip each gradient element to ``[-clip_value, clip_value]``."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Run one optimizer step. Returns False if the step was skipped because of an fp16 overflow."""
        return self.precision.optimizer_step(optimizer, closure)

    def requires_grad_changed(self) -> None:
        """Called after parameters are frozen or unfrozen during a step."""


class SingleDevice(Strategy):
    """Trains on one CPU, GPU or Apple device. Its name is ``"single_device"``, or ``"cpu"`` for the CPU."""

    names: ClassVar[tuple[str, ...]] = ("single_device", "cpu")

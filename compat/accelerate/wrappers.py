"""``accelerate``'s optimizer and scheduler classes. Prepared objects are instances of these classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from ... import messages
from ...accelerator import accumulation, optimizers, schedulers
from ...accelerator.accumulation import Window
from ...accelerator.process_state import AcceleratorState, PartialState
from .attributes import replace_scaler
from .gradient_state import GradientState


class AcceleratedOptimizer(optimizers.AcceleratedOptimizer):
    """A prepared optimizer that reports when it keeps gradients that Accelerate would clear.

    Args:
        optimizer: the optimizer.
        device_placement: has no effect, because the optimizer's state is on the parameters' device.
        scaler: has no effect, because the Accelerator scales losses.
    """

    def __init__(self, optimizer: Optimizer, device_placement: bool = True, scaler: Any = None) -> None:
        messages.ignored("AcceleratedOptimizer", "the Accelerator scales losses itself", scaler=scaler)
        strategy, state = PartialState().strategy, GradientState()
        if not hasattr(state, "window"):  # there is no Accelerator
            state.window = Window(state, strategy)
        super().__init__(optimizer, strategy, state)

    #: The optimizer's state is always on the device of its parameters.
    device_placement = True

    @property
    def scaler(self) -> Any:
        """The ``GradScaler`` for fp16; None if losses are not scaled."""
        return self.strategy.precision.scaler

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        replace_scaler(self.strategy, scaler)

    @property
    def gradient_state(self) -> accumulation.GradientState:
        """The state of the Accelerator's accumulation window."""
        return self._state_of_gradients

    @property
    def accelerator_state(self) -> AcceleratorState:
        """The state of the newest Accelerator."""
        return AcceleratorState()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients that a step has used, and keep all others."""
        super().zero_grad(set_to_none)
        state = self._state_of_gradients
        if state.sync_gradients and state.window.count and not state.window.cleared:
            messages.info_once(
                "optimizer.zero_grad() was called before backward in the last micro-batch of a window. The call keeps "
                "the gradients of the earlier micro-batches, whereas Accelerate clears them. As a result, losses "
                "differ from Accelerate's.",
                key="gradients are kept",
            )


class AcceleratedScheduler(schedulers.AcceleratedScheduler):
    """A prepared scheduler.

    Args:
        scheduler: the scheduler.
        optimizers: the prepared optimizer or optimizers with which the scheduler advances.
        step_with_optimizer: if False, advance on every call.
        split_batches: has no effect, because schedules advance once per update.
    """

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> None:
        found: Sequence[Any] = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        super().__init__(scheduler, found, GradientState(), step_with_optimizer)
        self.split_batches = split_batches

    @property
    def gradient_state(self) -> accumulation.GradientState:
        """The state of the Accelerator's accumulation window."""
        return self._state_of_gradients


def prepared_optimizer(*args: Any) -> AcceleratedOptimizer:
    """Create the optimizer that ``prepare`` returns. The arguments are those of the optimizer's base class."""
    found = object.__new__(AcceleratedOptimizer)
    optimizers.AcceleratedOptimizer.__init__(found, *args)
    return found


def prepared_scheduler(split_batches: bool, *args: Any) -> AcceleratedScheduler:
    """Create the scheduler that ``prepare`` returns. The other arguments are those of the scheduler's base class."""
    found = object.__new__(AcceleratedScheduler)
    schedulers.AcceleratedScheduler.__init__(found, *args)
    found.split_batches = split_batches
    return found

"""Prepared learning rate schedulers, which advance with their optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..strategies.one_cycle_schedules import MAY_END, advance

if TYPE_CHECKING:
    from .accumulation import GradientState
    from .optimizers import AcceleratedOptimizer


class AcceleratedScheduler:
    """Wraps the user's scheduler and exposes all of its attributes.

    ``step()`` advances the scheduler only if the scheduler's optimizers have stepped, and does nothing while gradients
    accumulate or after a step that was skipped because of an overflow. If a finished ``OneCycleLR`` is stepped, it
    keeps its last learning rate, and there is a warning.

    Args:
        with_optimizer: if False, advance on every call.
        times: number of scheduler steps per call: 1, or the number of processes if the schedule counts the batches of
            all processes.
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[AcceleratedOptimizer],
        state: GradientState,
        with_optimizer: bool = True,
        times: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self.step_with_optimizer = with_optimizer
        self._state_of_gradients = state
        self._times = times

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the scheduler by calling the wrapped scheduler's ``step`` with these arguments.

        If there are arguments, such as a metric, the scheduler advances once per call, even after a pass that ended
        inside an accumulation window.
        """
        state, told = self._state_of_gradients, bool(args or kwargs)
        if self.step_with_optimizer:
            after_pass = told and not state.depth and not state.in_dataloader
            if not state.sync_gradients and not after_pass:
                return
            for optimizer in self.optimizers:
                if optimizer.step_was_skipped:
                    return
        if told:
            self.scheduler.step(*args, **kwargs)
            return
        for _ in range(self._times):
            if isinstance(self.scheduler, MAY_END):
                advance(self.scheduler)
            else:
                self.scheduler.step()

    def get_last_lr(self) -> list[float]:
        """Return the current learning rate of each parameter group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)

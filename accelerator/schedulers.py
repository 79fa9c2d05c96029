"""A prepared learning rate scheduler: it moves with its optimizer, one step for each ``step()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..strategies.one_cycle_schedules import MAY_END, advance

if TYPE_CHECKING:
    from .accumulation import GradientState
    from .optimizers import AcceleratedOptimizer


class AcceleratedScheduler:
    """Stands for the user's scheduler.

    ``step()`` moves it when its optimizers have stepped: not on a micro-batch that only accumulates, not after a step
    that was left out because of an overflow. A ``OneCycleLR`` that is over keeps its last learning rate, with a
    warning.

    Args:
        scheduler: the user's.
        optimizers: those it moves with.
        state: of the Accelerator.
        with_optimizer: False: each call moves it.
        times: how often a call moves it: 1, or the number of processes for a schedule that counts the batches of all.
    """

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
        """Move on, as the scheduler's own ``step`` does with these arguments.

        One that is told a metric moves once a call, and after a pass also where that was left within a window.
        """
        state, told = self._state_of_gradients, bool(args or kwargs)
        if self.step_with_optimizer:
            after_pass = told and not state.depth and not state.in_dataloader
            if not state.sync_gradients and not after_pass:
                return
            for optimizer in self.optimizers:
                if optimizer._is_overflow:
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
        """The learning rates in force, by parameter group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back :meth:`state_dict`."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)

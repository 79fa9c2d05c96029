"""Stop a run before it reaches its limits, at the same boundary on all ranks and with one checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from typing_extensions import Self

from .. import messages
from ..processes.cluster_environment import requeue
from ..processes.signals import interruption
from ..processes.stop_agreement import Stop, chosen

if TYPE_CHECKING:
    from .run import Run

#: Why a run stops at a boundary: "" if it does not, "asked" if a stop was requested, "signal" if a signal ends it.
Reason = Literal["", "asked", "signal"]


class Stops:
    """Stops one run at a boundary.

    There is a boundary after each training batch (inside an accumulation window, a fit continues to the end of the
    window), after each validation of a fit, between epochs, and between the batches of ``validate``, ``test`` and
    ``predict``.

    ``actions`` says what each signal does. ``signum`` is the signal that ends the run, set on all ranks at the boundary
    that they agreed on; 0 until then.
    """

    def __init__(self, run: Run, actions: Mapping[int, str]) -> None:
        self.run, self.state, self.actions = run, run.state, actions
        self.signum = 0
        self._found: Stop | None = None

    def here(self) -> Reason:
        """Pass a boundary; return why the run stops there, or an empty string.

        The training loop inlines the case in which nobody has requested a stop. :class:`.stop_agreement.StopVote`
        explains the order.
        """
        reason = self.at(self.state.boundaries + 1) if self.state.stop_requested else ""
        self.state.boundaries += 1
        if self.state.stop_requested:
            reason = self.at(self.state.boundaries)
        return reason

    def at(self, boundary: int) -> Reason:
        """Return why the run stops at a boundary; an empty string if it does not stop.

        Called only while ``state.stop_requested`` is set.
        """
        state = self.state
        if self._found is None:
            self._found = self._decide(boundary)
        found = self._found
        if found is None or boundary < found.boundary:
            return ""
        if found.signum:
            self.signum = state.signum = found.signum
            return "signal"
        if not state.should_stop:
            messages.info(f"Training stops because {messages.ranks(found.ranks)} requested a stop.")
        state.should_stop = True
        return "asked"

    def _decide(self, boundary: int) -> Stop | None:
        """Agree with the other processes on where to stop; return None if there is no reason to stop."""
        state, strategy = self.state, self.run.strategy
        state.stop_requested = False  # reset before reading the requests, because a later request sets it again
        told = strategy.is_told_to_stop()
        if not (told or state.signum or state.should_stop):
            return None
        state.stop_requested = True
        wants = state.fn == "fit" and state.should_stop and self.run.trainer.may_stop()
        if not (told or state.signum or wants):
            return None
        try:
            return strategy.decide_stop(boundary, state.signum, wants)
        except RuntimeError as error:
            if not state.signum:
                raise
            messages.info_anywhere(f"Rank {self.run.strategy.global_rank} stops without the other ranks: {error}")
            raise interruption(state.signum) from None

    def at_end(self) -> None:
        """Stop all ranks at the end of the run if any of them has received a signal in the meantime."""
        self.signum = chosen(self.run.strategy.gather_objects(self.state.signum))
        if self.signum:
            self.state.signum = self.signum
            raise interruption(self.signum)

    def by_signal(self) -> BaseException:
        """Save once, on all ranks together, and return the exception that ends the run."""
        run, state = self.run, self.state
        name, saved = signal.Signals(self.signum).name, False
        state.saving = True
        try:
            for callback in run.trainer.callbacks if state.fn == "fit" else []:
                callback.save_on_signal(run.trainer, name)
                saved |= callback.has_saved(state.global_step, weights=True)
                if callback.has_saved(state.global_step):
                    break  # one file to resume from is enough, and time may be short
        finally:
            state.saving = False
        if state.fn == "fit" and not saved:
            messages.info(f"{name} ends the fit {self._unsaved()}")
        return interruption(self.signum)

    def _unsaved(self) -> str:
        if self.state.global_step == 0:
            return "before its first step, so nothing was trained or saved."
        fix = "" if self.run.trainer.checkpoint_callbacks else " A ModelCheckpoint would have saved one."
        return f"after step {self.state.global_step} without a new checkpoint.{fix}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Wait for all ranks, because a launcher kills the other processes as soon as one has exited."""
        if not self.signum:
            return
        with suppress(RuntimeError):  # a rank has exited
            self.run.strategy.barrier("stop")
        if self.actions.get(self.signum) == "requeue" and self.run.strategy.is_global_zero:
            requeue()

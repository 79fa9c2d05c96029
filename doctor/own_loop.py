"""``accelerator.doctor()``: the doctor for a user's own loop."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from .. import messages
from ..strategies.base import Strategy
from .doctor import Doctor
from .script_options import Plan
from .step_clock import INDEX
from .subject import has_compiled

if TYPE_CHECKING:
    from ..accelerator.accelerator import Accelerator

T = TypeVar("T")

_FETCH = "[_TrainingEpochLoop].train_dataloader_next"


class OwnLoop:
    """Times an Accelerator's methods and prepared objects, and provides facts about the user's loop to the doctor.

    The Accelerator uses this object when it binds its methods, models, optimizers and loaders.
    """

    own_loop = True

    def __init__(self, accelerator: Accelerator, examiner: Doctor) -> None:
        self.accelerator, self.examiner = accelerator, examiner
        self._trained: Any = None

    @contextmanager
    def examined(self) -> Iterator[Doctor]:
        """Context manager for a loop. At the end, all ranks together create, print and write the report.

        Objects that are prepared inside the context are measured too. If an error ends the loop, the report covers the
        steps that rank 0 has finished.
        """
        examiner = self.examiner
        examiner.setup("fit", self.accelerator.local_process_index, self.accelerator.project_dir)
        try:
            self.begin()
            try:
                yield examiner
            except BaseException:
                self.stop()
                _judge_what_is_done(examiner)
                raise
            self.stop()  # the printing and communication below are not part of the loop
            examiner.end()
            examiner.describe()
        finally:
            self.stop()
            examiner.teardown("fit")

    def begin(self) -> None:
        """Start timing the loop."""
        self.accelerator.observe(*self.accelerator.gradient_state.observers, self)
        self.examiner.begin(self)

    def stop(self) -> None:
        """Stop timing the loop."""
        self.accelerator.observe(*(one for one in self.accelerator.gradient_state.observers if one is not self))

    # ---- facts for the doctor ---------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """The Accelerator's strategy."""
        return self.accelerator.strategy

    @property
    def communication(self) -> dict[str, float]:
        """The communication times of the first trained model so far; see :meth:`Strategy.communication_seconds`."""
        return next((told for one in self._replicas() if (told := one.communication_seconds())), None) or {}

    def measure_communication(self) -> None:
        """Make the models' strategies measure communication."""
        for strategy in self._replicas():
            strategy.measure_communication()

    def _replicas(self) -> list[Strategy]:
        return [one.strategy for one in self.accelerator.prepared.trained]

    @property
    def accumulate(self) -> int:
        """Number of micro-batches per update."""
        return self.accelerator.gradient_state.num_steps

    @property
    def is_compiled(self) -> bool:
        """Whether models are compiled."""
        return self.accelerator.settings["dynamo_backend"] != "no" or has_compiled(self.modules)

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The prepared models."""
        return self.accelerator.prepared.models

    @property
    def loader(self) -> Any:
        """The loader that was last used for training."""
        loaders = self.accelerator.prepared.loaders
        return self._trained or (loaders[0] if loaders else None)

    @property
    def updates(self) -> int:
        """Number of updates so far, counted by the first optimizer."""
        return next((optimizer.updates for optimizer in self.accelerator.prepared.live_optimizers), 0)

    # ---- while the Accelerator binds ---------------------------------------------------------------------------------

    def around(self, part: str, function: Callable[..., T]) -> Callable[..., T]:
        """Return a version of ``function`` whose duration counts toward a part of the step."""
        return self.examiner.clock.around(part, function)

    def loader_to_prepare(self, loader: Any) -> Any:
        """Return the loader to prepare instead of the user's ``loader``."""
        return self.examiner.loader_to_prepare(loader)

    def one_pass(self, loader: Any, hand_out: Callable[..., Generator[Any]], iterator: Iterator[Any]) -> Generator[Any]:
        """Measure a pass over a loader; the pass counts as evaluation if every model is in eval mode.

        Args:
            loader: the prepared loader.
            hand_out: function that yields the batches of an iterator to the loop.
            iterator: the batches on their device.
        """
        if self.modules and not any(module.training for module in self.modules):
            return self._evaluation(hand_out(iterator))
        self._trained = loader
        return hand_out(self.batches(iterator))

    def batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator over a training pass's batches that measures how long the loop waits for each batch."""
        return self.examiner.iterate(_FETCH, iterator)

    def training_ends(self) -> None:
        """Called by ``accelerator.end_training()``."""

    def _evaluation(self, batches: Iterator[Any]) -> Generator[Any]:
        """Yield the batches; all time until the loop has processed the last batch counts as evaluation."""
        clock = self.examiner.clock
        before, clock.held = clock.enter(INDEX["evaluation"]), True
        try:
            yield from batches
        finally:
            clock.held = False
            clock.enter(before)


class PlannedLoop(OwnLoop):
    """A loop in a script that ``paceline doctor`` runs.

    The loop is measured until it has processed the plan's number of batches or training ends. Then the report is
    written, and the program exits.
    """

    def __init__(self, accelerator: Accelerator, plan: Plan) -> None:
        from .script_run import PlannedDoctor

        super().__init__(accelerator, PlannedDoctor(plan))
        self._plan = plan
        self._done = False

    def start(self) -> None:
        """Start measuring."""
        self.examiner.setup("fit", self.accelerator.local_process_index)
        self.begin()
        atexit.register(self._finish_if_it_went_well)

    def batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and exit the program after the plan's number of batches."""
        for batch in super().batches(iterator):
            yield batch
            self._plan.steps -= 1
            if self._plan.steps <= 0:
                self.training_ends()
                raise SystemExit(0)

    def training_ends(self) -> None:
        """Write the report."""
        if not self._done:
            self._done = True
            self.stop()
            self.examiner.end()
            self.examiner.describe()
            self.examiner.teardown("fit")

    def _finish_if_it_went_well(self) -> None:
        """Write the report when the program ends, unless the program failed. Every process must take part in this."""
        if getattr(sys, "last_value", None) is None:
            self.training_ends()


def _judge_what_is_done(examiner: Doctor) -> None:
    """Report on a loop that was stopped by an error, without hiding the error."""
    try:
        examiner.interrupted()
        examiner.describe()
    except Exception as error:
        messages.warn(f"The doctor could not report on the failed loop: {type(error).__name__}: {error}")

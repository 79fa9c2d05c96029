"""``accelerator.doctor()``: the doctor for a user's own loop."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import DataLoader

from .. import messages
from ..strategies.base import Strategy
from .doctor import Doctor
from .script_options import Plan, loader_change
from .step_clock import INDEX
from .subject import has_compiled

if TYPE_CHECKING:
    from ..accelerator.accelerator import Accelerator

#: Methods of the Accelerator and the part of a step that each belongs to.
_METHODS = {
    "backward": "backward",
    "clip_grad_norm_": "optimizer",
    "clip_grad_value_": "optimizer",
    "gather": "communication",
    "gather_for_metrics": "communication",
    "reduce": "communication",
    "pad_across_processes": "communication",
    "wait_for_everyone": "communication",
    "log": "logging",
    "save_state": "checkpoint",
    "save_model": "checkpoint",
    "save": "checkpoint",
}
_FETCH = "[_TrainingEpochLoop].train_dataloader_next"


class Wiring:
    """Wraps prepared objects to time them, and provides the doctor with facts about the loop."""

    own_loop = True

    def __init__(self, accelerator: Accelerator, examiner: Doctor) -> None:
        self.accelerator, self.examiner = accelerator, examiner
        self.updates = 0
        self._wrapped: list[tuple[Any, str, bool, Any]] = []
        self._seen: set[int] = set()
        self._trained: Any = None

    @contextmanager
    def examined(self) -> Iterator[Doctor]:
        """Context manager for a loop. At the end, all ranks together create, print and write the report.

        Objects prepared inside the context are measured too. If an error ends the loop, the report covers the steps
        that rank 0 has finished.
        """
        examiner = self.examiner
        examiner.setup("fit", self.accelerator.local_process_index, self.accelerator.project_dir)
        try:
            self.wrap()
            examiner.begin(self)
            try:
                yield examiner
            except BaseException:
                self.unwrap()
                _judge_what_is_done(examiner)
                raise
            self.unwrap()  # the printing and communication below are not part of the loop
            examiner.end()
            examiner.describe()
        finally:
            self.unwrap()
            examiner.teardown("fit")

    # ---- facts for the doctor ---------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """The Accelerator's strategy."""
        return self.accelerator.strategy

    @property
    def communication(self) -> dict[str, float]:
        """Seconds spent on communication so far, for the first trained model."""
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

    # ---- wrapping ---------------------------------------------------------------------------------------------------

    def wrap(self) -> None:
        """Wrap everything that has been prepared so far."""
        accelerator, clock = self.accelerator, self.examiner.clock
        for name, part in _METHODS.items():
            self._set(accelerator, name, clock.around(part, getattr(accelerator, name)))
        self._set(accelerator, "prepare", partial(self._prepare, accelerator.prepare))
        self._wrap_prepared()

    def _prepare(self, prepare: Callable[..., Any], *objects: Any, **options: Any) -> Any:
        found = prepare(*objects, **options)
        self._wrap_prepared()
        self.measure_communication()
        return found

    def _wrap_prepared(self) -> None:
        accelerator, clock = self.accelerator, self.examiner.clock
        for module in self._new(accelerator.prepared.models):
            self._set(module, "forward", clock.around("forward", module.forward))
        for optimizer in self._new(accelerator.prepared.optimizers):
            first = optimizer is accelerator.prepared.optimizers[0]
            step = self._counting(optimizer.step) if first else optimizer.step
            self._set(optimizer, "step", clock.around("optimizer", step))
            self._set(optimizer, "zero_grad", clock.around("optimizer", optimizer.zero_grad))
        for loader in self._new(accelerator.prepared.loaders):
            self._set(loader, "_hand_out", partial(self._pass, loader, loader._hand_out))

    def _new(self, objects: Sequence[Any]) -> list[Any]:
        found = [one for one in objects if id(one) not in self._seen]
        self._seen |= {id(one) for one in found}
        return found

    def _counting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        state = self.accelerator.gradient_state

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.updates += state.sync_gradients
            return step(*args, **kwargs)

        return counted

    def _pass(self, loader: Any, hand_out: Callable[..., Iterator[Any]], one: Any, iterator: Iterator[Any]) -> Any:
        """Measure a pass over a loader; it counts as evaluation if every model is in eval mode."""
        if self.modules and not any(module.training for module in self.modules):
            return self._evaluation(hand_out(one, iterator))
        self._trained = loader
        return hand_out(one, self.examiner.iterate(_FETCH, iterator))

    def _evaluation(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches; all time until the last batch has been processed counts as evaluation."""
        clock = self.examiner.clock
        before, clock.held = clock.enter(INDEX["evaluation"]), True
        try:
            yield from batches
        finally:
            clock.held = False
            clock.enter(before)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        own = vars(owner)
        self._wrapped.append((owner, name, name in own, own.get(name)))
        own[name] = value

    def unwrap(self) -> None:
        """Undo all wrapping."""
        while self._wrapped:
            owner, name, had, value = self._wrapped.pop()
            if had:
                vars(owner)[name] = value
            else:
                vars(owner).pop(name, None)


class PlannedLoop(Wiring):
    """A loop in a script that ``paceline doctor`` runs.

    The loop is measured until it has processed the plan's number of batches or training ends. Then the report is
    written, and the program exits.
    """

    def __init__(self, accelerator: Accelerator, plan: Plan) -> None:
        from .script_run import PlannedDoctor

        super().__init__(accelerator, PlannedDoctor(plan))
        self._plan = plan
        self._change = loader_change(plan.change)
        self._done = False

    def start(self) -> None:
        """Start measuring."""
        self.examiner.setup("fit", self.accelerator.local_process_index)
        self.wrap()
        self.examiner.begin(self)
        vars(self.examiner)["iterate"] = partial(self._limited, self.examiner.iterate)
        own = vars(self.accelerator)
        if self._change:
            own["prepare"] = partial(self._prepare_changed, own["prepare"])
        own["end_training"] = partial(self._end, self.accelerator.end_training)
        atexit.register(self._finish_if_it_went_well)

    def _prepare_changed(self, prepare: Callable[..., Any], *objects: Any, **options: Any) -> Any:
        from .script_run import changed

        return prepare(
            *(changed(one, **self._change) if isinstance(one, DataLoader) else one for one in objects), **options
        )

    def _limited(self, iterate: Callable[..., Iterator[Any]], action: str, iterator: Any) -> Iterator[Any]:
        for batch in iterate(action, iterator):
            yield batch
            self._plan.steps -= 1
            if self._plan.steps <= 0:
                self._finish()
                raise SystemExit(0)

    def _end(self, end_training: Callable[[], None]) -> None:
        self._finish()
        end_training()

    def _finish(self) -> None:
        if not self._done:
            self._done = True
            self.unwrap()
            self.examiner.end()
            self.examiner.describe()
            self.examiner.teardown("fit")

    def _finish_if_it_went_well(self) -> None:
        """Write the report when the program ends, unless it failed. Writing the report needs every process."""
        if getattr(sys, "last_value", None) is None:
            self._finish()


def _judge_what_is_done(examiner: Doctor) -> None:
    """Report on a loop that was stopped by an error, without hiding that error."""
    try:
        examiner.interrupted()
        examiner.describe()
    except Exception as error:
        messages.warn(f"The doctor could not report on the failed loop: {type(error).__name__}: {error}")

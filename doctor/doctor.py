"""``Trainer(profiler="doctor")``: measures how each rank spends its time in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..data.batches import batch_size_of
from ..devices.kinds import kind_of
from ..profilers.base import Profiler
from .device_clock import EVERY, DeviceClock
from .measurements import WARM_UP, Facts, from_rows, loader_facts, memory_of, numa_of, usable_cores
from .report import Report
from .step_clock import INDEX, PARTS, STEPS, WORDS, Clock
from .subject import TrainerSubject
from .watches import Collections, Compilations, StepWatch

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer
    from .own_loop import OwnLoop

T = TypeVar("T")
_END = object()

#: Number of hooks whose times are kept, slowest first.
MOST_HOOKS = 20
#: Steps in which every operator is recorded. These are warmup steps, which are not measured.
WATCHED = (1, 2)

_LOOKED_AT = (*range(WATCHED[0], WARM_UP + 1),)

#: Part of a step by the end of an action's name; the first match wins.
_SUFFIXES = (
    (".train_dataloader_next", "data"),
    (".batch_to_device", "copy"),
    (".training_step", "forward"),
    (".backward", "backward"),
    (".optimizer_step", "optimizer"),
    (".optimizer_zero_grad", "optimizer"),
    (".configure_gradient_clipping", "optimizer"),
    ("run_validation", "evaluation"),
    ("save_checkpoint", "checkpoint"),
    ("wait_for_checkpoint", "checkpoint"),
)
_PREFIXES = (
    ("[Callback]", "callbacks"),
    ("[TrainingModule]", "callbacks"),
    ("[DataModule]", "callbacks"),
    ("[Logging]", "logging"),
    ("[Strategy]", "communication"),
)
_NOT_TIMED = (
    "run_training_epoch",
    "run_training_batch",
    ".validation_step",
    ".test_step",
    ".predict_step",
    ".val_next",
    ".test_next",
    ".predict_next",
)


def part_of(action: str) -> str | None:
    """Return the part of a step that an action belongs to; None if the action is not timed."""
    if action.endswith(_NOT_TIMED):
        return None
    for ending, part in _SUFFIXES:
        if action.endswith(ending):
            return part
    return next((part for beginning, part in _PREFIXES if action.startswith(beginning)), "other")


def hook_of(action: str) -> str:
    """Shorten an action's name: ``"[Callback]EarlyStopping{...}.on_fit_end"`` gives ``"EarlyStopping.on_fit_end"``."""
    owner, _, hook = action.partition("]")[2].rpartition(".")
    return f"{owner.partition('{')[0].rpartition('<locals>.')[2]}.{hook}"


class Doctor(Profiler):
    """Measures a fit and reports, even after an error, what is slow, why, and how much a change would help.

    Measuring costs about 14 microseconds per step (``benchmarks/doctor_cost.py``). The time in your own
    ``trainer.profiler.profile(name)`` blocks counts toward the part of the step that surrounds them.

    Args:
        dirpath: folder for ``doctor.html`` and ``doctor.json``; None means the folder of the run's logger.
        filename: name of both files, without extension; None means ``doctor``.
        write: whether to write the files; if False, only print the report.
        operators: whether to record every operator in the second and third steps, to find lines that wait for the
            device, and batches that are too small. Recording makes these two steps several times slower.

    Attributes:
        report: the report, on rank 0 after a fit; None if an error ended the fit during the warmup.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        write: bool = True,
        operators: bool = True,
    ) -> None:
        super().__init__(dirpath, filename)
        self.write = write
        self.operators = operators
        self.report: Report | None = None
        self._clear()

    def _clear(self) -> None:
        self.clock = Clock()
        self.device_clock: DeviceClock | None = None
        self.step_watch: StepWatch | None = None
        self.collections = Collections()
        self.compilations = Compilations(self.clock)
        self._begun = perf_counter()
        self._communication: dict[str, float] = {}
        self._hooks: dict[str, float] = {}
        self._updates, self._batch_size = 0, None
        self.subject: TrainerSubject | OwnLoop | None = None
        self._watched: StepWatch | None = None

    def __getstate__(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in ("filename", "write", "operators")}
        return {"dirpath": None if self._in_log_dir else self.dirpath, **given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    # ---- actions ----------------------------------------------------------------------------------------------------

    def start(self, action_name: str) -> None:
        """Do nothing, because time in the user's blocks counts toward the part of the step that surrounds them."""

    def stop(self, action_name: str) -> None:
        pass

    def around(self, action_name: str, function: Callable[..., T]) -> Callable[..., T]:
        part = part_of(action_name) if self._stage == "fit" or self._stage is None else None
        if part == "callbacks":
            return self.clock.around_hook(part, hook_of(action_name), function)
        return function if part is None else self.clock.around(part, function)

    def iterate(self, action_name: str, iterator: Iterable[T]) -> Iterator[T]:
        if part_of(action_name) != "data":
            return iter(iterator)
        return self._steps(partial(next, iter(iterator), _END))

    def _steps(self, fetch: Callable[[], Any]) -> Iterator[Any]:
        """Yield the batches, and mark a boundary on the clock before each batch."""
        clock, fetch = self.clock, self.clock.around("data", fetch)
        totals = clock.totals
        step = int(totals[STEPS])
        while True:
            clock.boundary()
            if step in _LOOKED_AT or (self.device_clock is not None and step % EVERY <= 1):
                self._at(step)
            batch = fetch()
            if batch is _END:
                return
            step += 1
            totals[STEPS] = step
            if self.step_watch is not None and step - 1 in WATCHED:
                self._watch(batch)
            yield batch

    def _at(self, step: int) -> None:
        """Start or stop recording at a boundary between two steps; ``step`` is the index of the next step."""
        clock, watch, device = self.clock, self.step_watch, self.device_clock
        if watch is not None:
            watch.end()
            if step > WATCHED[-1] or clock.totals[INDEX["compile"]]:
                self._watched, self.step_watch = watch, None
        if step == WARM_UP:
            self._settled()
        if device is not None and step > WARM_UP:
            if clock.marks is not None:
                clock.marks(clock.current)
                clock.marks = None
                device.close()
            if step % EVERY == 0:
                clock.marks = device
                device(clock.current)

    def _watch(self, batch: Any) -> None:
        self._batch_size = batch_size_of(batch)
        if self.step_watch is not None:
            self.step_watch.begin()

    def _settled(self) -> None:
        """Start measuring steps, after the warmup."""
        self.collections.begin()
        self._hooks = dict(self.clock.hooks)
        if self.subject is not None:
            self._updates, self._communication = self.subject.updates, self.subject.communication

    # ---- a run ------------------------------------------------------------------------------------------------------

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | Path | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        if stage == "fit":
            self._clear()
            self.report = None

    def attach(self, trainer: Trainer) -> None:
        if self._stage == "fit":
            self.begin(TrainerSubject(trainer))

    def begin(self, subject: TrainerSubject | OwnLoop) -> None:
        """Start measuring. Called right before the first step."""
        self.subject = subject
        kind = kind_of(subject.strategy.device)
        if kind.has_timed_events():
            self.device_clock = DeviceClock(partial(kind.new_event, timed=True))
        self.step_watch = StepWatch() if self.operators and not subject.is_compiled else None
        self.compilations.begin()
        subject.measure_communication()
        self.clock.last = self._begun = perf_counter()

    def finish(self, trainer: Trainer) -> None:
        if self._stage == "fit":
            self.end()

    def end(self) -> None:
        """Create the report after the last step. Every rank must call this."""
        if self.subject is None:
            return
        strategy = self.subject.strategy
        self.clock.boundary()
        self._end_watching()
        found = strategy.gather_objects(self.facts())
        if strategy.is_global_zero:
            self.report = Report.of(found)

    def interrupted(self) -> None:
        """Create a report after an error, covering only the steps that this process has finished."""
        if self.subject is None:
            return
        self.clock.cut()
        self._end_watching()
        facts = self.facts()
        if facts.steps and self.subject.strategy.is_global_zero:
            self.report = Report.of([facts])

    def _end_watching(self) -> None:
        if self.step_watch is not None:
            self.step_watch.end()
            self._watched, self.step_watch = self.step_watch, None
        if self.device_clock is not None:
            self.clock.marks = None
            self.device_clock.read()
        self.collections.end()
        self.compilations.end()

    def split(self) -> dict[str, float]:
        """Return the seconds of each part from the report or, without a report, from the host's clock."""
        if self._stage != "fit":
            return {}
        parts = dict(zip(PARTS, self.clock.totals, strict=False)) if self.report is None else self.report.ranks[0].parts
        least = 0.0005 * sum(parts.values())
        return {WORDS[name]: parts[name] for name in PARTS if parts.get(name, 0.0) > least}

    def summary(self) -> str:
        return "" if self.report is None else self.report.text()

    def describe(self) -> None:
        if self._stage == "fit" and self.report is not None:
            self.report.say()
            if self.write:
                self.report.write(self.dirpath, self.filename or "doctor")

    def teardown(self, stage: str | None) -> None:
        self.collections.end()
        self.compilations.end()
        if self.step_watch is not None:
            self.step_watch.end()
        self.clock.marks = None
        self.subject = None
        super().teardown(stage)

    # ---- facts ------------------------------------------------------------------------------------------------------

    def facts(self) -> Facts:
        """Return this process's measurements so far."""
        facts = Facts()
        from_rows(facts, list(self.clock.rows), WARM_UP)
        facts.run_seconds = perf_counter() - self._begun
        facts.run_parts = dict(zip(PARTS, self.clock.totals, strict=False))
        self._of_watches(facts)
        facts.cores, facts.threads = usable_cores(), torch.get_num_threads()
        facts.versions = {"torch": torch.__version__}
        if self.subject is not None:
            self._of_subject(facts, self.subject)
        return facts

    def _of_watches(self, facts: Facts) -> None:
        watch = self._watched
        if watch is not None and watch.steps:
            facts.operators = watch.operators // watch.steps
            facts.lines = [line._asdict() for line in watch.found()]
        facts.batch_size = self._batch_size
        facts.recompilations = [
            {"function": name, "times": times, "reason": reason} for name, times, reason in self.compilations.found()
        ]
        facts.collection_seconds, facts.collections = self.collections.seconds, self.collections.runs
        device = self.device_clock
        if device is not None and device.steps >= 3 and facts.steps:
            scale = facts.steps / device.steps
            facts.device_seconds = {name: device.seconds[i] * scale for i, name in enumerate(PARTS)}

    def _of_subject(self, facts: Facts, subject: TrainerSubject | OwnLoop) -> None:
        strategy = subject.strategy
        facts.rank, facts.world_size = strategy.global_rank, strategy.world_size
        facts.local_world_size = max(1, strategy.world_size // max(1, strategy.num_nodes))
        facts.strategy, facts.device = type(strategy).__name__, strategy.device.type
        if facts.device != "cpu":
            facts.device_name = kind_of(strategy.device).name_of(strategy.device)
        done = self.clock.totals[STEPS] - WARM_UP  # a long run keeps only its newest rows
        kept = facts.steps / done if done > 0 else 0.0
        facts.updates = max(0, round((subject.updates - self._updates) * kept))
        facts.collection_seconds *= kept
        took = {name: (took - self._hooks.get(name, 0.0)) * kept for name, took in self.clock.hooks.items()}
        facts.hooks = dict(sorted(took.items(), key=lambda item: -item[1])[:MOST_HOOKS])
        facts.accumulate, facts.own_loop = subject.accumulate, subject.own_loop
        parameters = [parameter for module in subject.modules for parameter in module.parameters()]
        facts.parameter_bytes = sum(p.numel() * p.element_size() for p in parameters)
        facts.loader = loader_facts(subject.loader)
        if facts.batch_size is None:
            facts.batch_size = facts.loader.get("batch_size")
        facts.memory, facts.numa = memory_of(strategy.device), numa_of(strategy.device)
        facts.communication = _per_step(self._communication, subject.communication)


def _per_step(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the seconds of communication per step between two readings from the strategy."""
    count = after.get("steps", 0.0) - before.get("steps", 0.0)
    if count < 1:
        return {}
    return {name: max(0.0, after[name] - before.get(name, 0.0)) / count for name in ("all", "exposed")}

"""Run real steps with growing batch sizes to find the largest one that fits into memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader

from .. import messages
from ..data.batches import batch_size_of
from ..data.combined_loader import CombinedLoader, length_of
from ..data.loaders import is_loader_collection, replaced, samples_in_batch, whole_of
from ..devices.kinds import kind_of
from ..memory.out_of_memory_retry import is_out_of_memory
from ..processes.cpu_memory import give_back_memory
from ..torch_private import forget_iterator
from . import trial
from .attribute_lookup import TunedAttribute
from .trial_run import keep_run, refuse_strategy, trial_in_run

if TYPE_CHECKING:
    from ..trainer.run import Run

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class BatchTrial(NamedTuple):
    """The result for one batch size.

    Attributes:
        size: samples in one process's batch.
        fits: whether all processes had enough memory.
        peak_bytes: peak memory of the process that used the most: device memory, or the process's own memory on a
            CPU; None if unknown.
        seconds: how long the trial took.
        where: ranks that ran out of memory.
    """

    size: int
    fits: bool
    peak_bytes: int | None
    seconds: float
    where: tuple[int, ...] = ()

    def __str__(self) -> str:
        used = "" if self.peak_bytes is None else f", peak memory {messages.size(self.peak_bytes)}"
        place = f" on {messages.ranks(self.where)}" if self.where != (0,) and self.where else ""
        return f"{self.size} {'fits' if self.fits else 'ran out of memory'}{place}{used}"


@dataclass
class SizeSearchResult:
    """The batch size that fits, and how it was found.

    Attributes:
        size: samples in one process's batch.
        trials: results for all sizes tried, in order.
    """

    size: int
    trials: list[BatchTrial] = field(default_factory=list)


@dataclass(frozen=True)
class SizeSearch:
    """A batch size search with its settings. Call it with a prepared run.

    Args:
        places: function that finds the attributes that hold the size.
    """

    places: Callable[[Run], list[TunedAttribute]]
    method: trial.Method = "fit"
    mode: Literal["power", "binsearch"] = "power"
    steps_per_trial: int = 3
    init_val: int = 2
    max_trials: int = 25
    margin: float = 0.05
    max_val: int | None = 8192

    def __post_init__(self) -> None:
        if self.mode not in ("power", "binsearch"):
            raise ValueError(messages.unknown("scale_batch_size mode", self.mode, ("power", "binsearch")))
        most = self.max_val is None or self.max_val >= 1
        if min(self.steps_per_trial, self.init_val, self.max_trials) < 1 or not 0 <= self.margin < 1 or not most:
            raise ValueError(
                f"scale_batch_size(steps_per_trial={self.steps_per_trial}, init_val={self.init_val}, "
                f"max_trials={self.max_trials}, margin={self.margin}, max_val={self.max_val}): the counts must be at "
                "least 1, the margin at least 0 and below 1, and max_val at least 1 or None."
            )

    def __call__(self, run: Run) -> SizeSearchResult:
        """Try sizes on the module, then restore everything, including the size."""
        check(run)
        kept, places = keep_run(run), self.places(run)
        before = [place.get() for place in places]
        trials = Trials(self, run, places, kept.restore)
        try:
            return SizeSearchResult(self.search(trials), trials.made)
        finally:
            kept.restore()
            for place, value in zip(places, before, strict=True):
                place.set(value)

    def search(self, trials: Trials) -> int:
        """Double the size until it no longer fits, or halve it until it does. ``binsearch`` then refines the result.

        ``binsearch`` stops once the remaining range is within half the margin, because more precision is not worth the
        extra trials.
        """
        size, fits, fails = min(self.init_val, self.max_val or self.init_val), 0, 0
        while len(trials.made) < self.max_trials:
            if trials(size):
                fits = size
                size = min(2 * size, self.max_val or 2 * size, trials.samples or 2 * size)
                if fails or size <= fits:
                    break
            else:
                fails, size = size, size // 2
                if size == 0 or fits:
                    break
        if not fits:
            raise self.nothing_fits(trials.made)
        while (
            self.mode == "binsearch"
            and fails - fits > max(1, self.margin * fits / 2)
            and len(trials.made) < self.max_trials
        ):
            size = (fits + fails) // 2
            if trials(size):
                fits = size
            else:
                fails = size
        return max(int(fits * (1 - self.margin)), 1) if self.mode == "binsearch" and fails else fits

    def nothing_fits(self, made: list[BatchTrial]) -> RuntimeError:
        """Return the error to raise if no size fits."""
        return RuntimeError(
            f"None of the batch sizes tried fits into memory ({'; '.join(map(str, made))}). Reduce the memory per "
            "sample: precision='bf16-mixed', activation checkpointing, strategy='fsdp', or a smaller model."
        )


class Trials:
    """Tries sizes on all ranks.

    Trials do not reduce gradients across ranks, so no rank waits for one that ran out of memory. All ranks learn about
    the failure after the trial.

    Attributes:
        made: results so far.
        samples: samples in one process's shard of the data; None while unknown.
    """

    def __init__(self, search: SizeSearch, run: Run, places: list[TunedAttribute], restore: Callable[[], None]) -> None:
        self.settings, self.run, self.places, self.restore = search, run, places, restore
        self.made: list[BatchTrial] = []
        self.samples: int | None = None

    def __call__(self, size: int) -> bool:
        """Try a size; return whether it fits."""
        strategy = self.run.strategy
        _reset_peak(strategy.device)
        start = time.perf_counter()
        kind, error = self.attempt(size)
        mine = (kind, _peak_bytes(strategy.device), time.perf_counter() - start, self.samples)
        self.restore()
        _reset_peak(strategy.device)
        found = strategy.gather_objects(mine)
        self.refuse_errors(error, [one[0] for one in found])
        out = tuple(rank for rank, one in enumerate(found) if one[0] == "out of memory")
        peaks = [one[1] for one in found if one[1] is not None]
        seconds, known = max(one[2] for one in found), [one[3] for one in found if one[3] is not None]
        self.samples = max(known) if known else None
        self.made.append(BatchTrial(size, not out, max(peaks) if peaks else None, seconds, out))
        return not out

    def attempt(self, size: int) -> tuple[str, Exception | None]:
        """Run a trial's steps. Return a description of this rank's failure (or ""), and an error to raise, if any."""
        for place in self.places:
            place.set(size)
        try:
            self.steps(size)
        except Exception as error:
            if not is_out_of_memory(error):
                return f"{type(error).__name__}: {error}", error
            return "out of memory", None  # without the error, because its frames would keep the memory allocated
        return "", None

    def refuse_errors(self, error: Exception | None, kinds: list[str]) -> None:
        """Raise an error on every rank if any rank failed for a reason other than running out of memory."""
        if error is not None:
            raise error
        wrong = next(((r, kind) for r, kind in enumerate(kinds) if kind not in ("", "out of memory")), None)
        if wrong is not None:
            raise RuntimeError(f"scale_batch_size failed on rank {wrong[0]}: {wrong[1]}")

    def steps(self, size: int) -> None:
        """Run real steps with batches of ``size`` samples."""
        settings = self.settings
        change = None if self.places_decide() else partial(_resized, size=size)
        with trial_in_run(self.run, change) as own:
            strategy, made = own.strategy, 0
            if settings.method != "fit":
                steps, allowed = settings.steps_per_trial, own.trainer
                allowed.limit_val_batches = allowed.limit_test_batches = allowed.limit_predict_batches = steps
                self.check_size(own.source.evaluation(settings.method)[0][0], size, None)
                trial.evaluate(own, settings.method)
                return
            own.source.batch_agreement = lambda: None
            self.check_size(own.source.train(), size, None)

            def enough(losses: Any) -> bool:
                nonlocal made
                if made == 0:
                    self.check_size(None, size, own.metrics.batch)
                made += 1
                return made >= settings.steps_per_trial

            if strategy.world_size == 1 or not strategy.communicates_gradients:
                trial.train(own, lambda: None, enough)
                return
            with strategy.keep_gradients_local():
                trial.train(own, lambda: None, enough)

    def places_decide(self) -> bool:
        """Return True if loaders come from hooks, which read the size from an attribute."""
        return self.run.source.given.get(stage_of(self.settings.method)) is None

    def check_size(self, loader: Any, size: int, batch: Any) -> None:
        """Raise an error unless batches have ``size`` samples; otherwise, the trials would be meaningless."""
        found = samples_in_batch(loader, 1) if loader is not None else None
        if loader is not None:
            strategy = self.run.strategy
            total = length_of(getattr(whole_of(loader), "dataset", None))
            rest = 0 if getattr(loader, "drop_last", False) else strategy.num_data_ranks - 1
            self.samples = None if total is None else (total + rest) // strategy.num_data_ranks
        elif batch is not None and self.samples is None and self.run.strategy.world_size == 1:
            found = batch_size_of(batch)
        if found is not None and found != size:
            where = messages.names([place.words for place in self.places], "and")
            key = self.places[0].key if self.places else "batch_size"
            raise RuntimeError(
                f"{where} {'was' if len(self.places) < 2 else 'were'} set to {size}, but the loader yields batches of "
                f"{found}, so the loader does not use that value. Create the loader in the hook, with DataLoader(..., "
                f"batch_size=self.{key})."
            )


def stage_of(method: str) -> str:
    """Return the stage whose loader is resized."""
    return "train" if method == "fit" else method


def check(run: Run) -> None:
    """Raise an error if trials cannot run independently on each rank."""
    strategy = run.strategy
    refuse_strategy(run, "scale_batch_size")
    if strategy.world_size > 1 and (strategy.communicates_forward or run.trainer.sync_batchnorm):
        what = "sync_batchnorm=True" if run.trainer.sync_batchnorm else type(strategy).__name__
        raise NotImplementedError(
            f"scale_batch_size does not work on {strategy.world_size} processes with {what}, because the forward "
            "pass communicates. If one rank ran out of memory, the others would wait for it forever. Use "
            "paceline.find_executable_batch_size around a function that creates the module and the Trainer, or search "
            "on one process."
        )


# ---- effective batch size --------------------------------------------------------------------------------------------


class BatchPlan(NamedTuple):
    """The batch size of one process, and the number of batches per update."""

    size: int
    accumulate: int


def plan(largest: int, effective: int | None, num_ranks: int) -> BatchPlan | None:
    """Choose the largest batch size, up to ``largest``, that divides a process's share of ``effective`` samples.

    Return None if ``effective`` is None.
    """
    if effective is None:
        return None
    if effective < 1 or effective % num_ranks:
        raise ValueError(
            f"scale_batch_size(effective_batch={effective}) cannot be split evenly across {num_ranks} processes. Use a "
            f"multiple of {num_ranks}, or 'keep'."
        )
    share = effective // num_ranks
    size = next(size for size in range(min(largest, share), 0, -1) if share % size == 0)
    return BatchPlan(size, share // size)


# ---- loaders ---------------------------------------------------------------------------------------------------------


def _check_loader(loader: Any) -> None:
    """Raise a ValueError if this loader's batch size cannot be changed from outside."""
    why = ""
    if isinstance(loader, CombinedLoader) or is_loader_collection(loader):
        why = "several loaders were passed, so it is not clear which one to resize"
    elif not isinstance(loader, DataLoader):
        why = f"{messages.a(loader)} was passed, which yields ready-made batches"
    elif type(loader.batch_sampler) is not BatchSampler:
        made = "its dataset (batch_size=None)" if loader.batch_sampler is None else type(loader.batch_sampler).__name__
        why = f"the {type(loader).__name__} that was passed gets its batches from {made}"
    if why:
        raise ValueError(
            f"scale_batch_size cannot change the batch size: {why}. Define train_dataloader() on the module or a "
            "DataModule so that it reads self.batch_size, or pass a single DataLoader(dataset, batch_size=...)."
        )


def size_of(loader: Any) -> int:
    """Return a loader's batch size; raise a ValueError if it cannot be changed."""
    _check_loader(loader)
    return loader.batch_sampler.batch_size


def _resized(loader: Any, size: int) -> Any:
    """Return a copy of a loader with a different batch size."""
    _check_loader(loader)
    batches = BatchSampler(loader.sampler, size, loader.drop_last)
    return replaced(loader, batch_size=size, batch_sampler=batches)


def resize(loader: Any, size: int) -> None:
    """Change the batch size of the user's loader in place, which DataLoader itself does not allow."""
    _check_loader(loader)
    loader.batch_sampler.batch_size = size
    vars(loader).update(batch_size=size)
    forget_iterator(loader)


# ---- peak memory -----------------------------------------------------------------------------------------------------


def _reset_peak(device: torch.device) -> None:
    """Free unused memory and restart the peak measurement."""
    gc.collect()
    kind = kind_of(device)
    if kind.counts_memory():
        kind.release_cached_memory()
        kind.reset_peak_memory(device)
        return
    give_back_memory()
    with suppress(OSError):  # another system, or a container that forbids it
        _RESET.write_text("5")


def _peak_bytes(device: torch.device) -> int | None:
    """Return the device's (on a CPU, this process's) peak memory since :func:`_reset_peak`; None if unknown."""
    if kind_of(device).counts_memory():
        return kind_of(device).peak_memory(device)
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:") and device.type == "cpu":
                return int(line.split()[1]) * 1024
    return None

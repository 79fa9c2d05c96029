"""Search within a run and apply the result, for the tuner's callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import messages
from ..callbacks.base import accumulation_of
from ..trainer.start_run import setup_optimizers
from .attribute_lookup import TunedAttribute, find, find_one_of, lr_places
from .batch_size import BatchPlan, SizeSearch, SizeSearchResult, plan, resize, size_of, stage_of
from .lr_range_test import LRFinder, RangeTest, change_rates, check, shares_of

if TYPE_CHECKING:
    from ..trainer.run import Run


def is_dry(fast_dev_run: bool | int, what: str) -> bool:
    """Return True in a dry run, after reporting that the search is skipped."""
    if fast_dev_run:
        messages.info_once(f"{what} search is skipped in a dry run (fast_dev_run).")
    return bool(fast_dev_run)


def take_lr(found: LRFinder, places: list[TunedAttribute]) -> float | None:
    """Set the attributes to the suggested learning rate, and report and return that rate."""
    rate = found.suggestion()
    if rate is not None and places:
        before = places[0].get()
        for place in places:
            place.set(rate)
        words = messages.names([place.words for place in places], "and").replace("'", "")
        messages.info(
            f"The learning rate ({words}) was set to {rate:.4g} (previously {before}) after a range test of "
            f"{len(found.results['lr'])} steps."
        )
    return rate


class SizePlaces:
    """Finds the attributes that hold the batch size. They are required only if hooks create the loaders."""

    def __init__(self, name: str, method: str) -> None:
        self.name, self.method = name, method

    def __call__(self, run: Run) -> list[TunedAttribute]:
        """Find the attributes and hyperparameters that hold a run's batch size."""
        return self.of(run.module, run.datamodule, run.source.given.get(stage_of(self.method)))

    def of(self, module: Any, datamodule: Any, given: Any) -> list[TunedAttribute]:
        """Find the attributes and hyperparameters of a module and a DataModule that hold the batch size."""
        if given is None:
            return find_one_of([module, datamodule], self.name, ["batch_size"], "batch_arg_name")
        size_of(given)
        return find([module, datamodule], self.name)


def effective_now(run: Run, places: list[TunedAttribute], given: Any, wanted: Any, world: int) -> int | None:
    """Return how many samples an update must use across all processes; None if that number may change."""
    if wanted is None:
        return None
    other = next((c for c in run.trainer.callbacks if accumulation_of([c], 0) is not None), None)
    if other is not None:
        raise ValueError(
            f"scale_batch_size(effective_batch={wanted!r}) sets accumulate_grad_batches, but so does the "
            f"callback {type(other).__name__}. Remove one of them."
        )
    if wanted != "keep":
        if isinstance(wanted, bool) or not isinstance(wanted, int):
            raise ValueError(
                f"scale_batch_size(effective_batch={wanted!r}) got {messages.a(wanted)}. Pass a number of samples "
                "across all processes, 'keep' for the current number, or None."
            )
        return wanted
    size = size_of(given) if given is not None else places[0].get()
    if isinstance(size, bool) or not isinstance(size, int):
        raise ValueError(
            f"scale_batch_size(effective_batch='keep'): {places[0].words} is {size!r}, so there is no batch size to "
            f"keep. Set {places[0].words} to an int, or pass effective_batch as a number of samples across all "
            "processes."
        )
    return size * run.trainer.accumulate_grad_batches * world


def planned(found: SizeSearchResult, effective: int | None, world: int, accumulate: int) -> BatchPlan:
    """Return the batch size and the accumulation after a search; keep ``accumulate`` if ``effective`` is None."""
    return plan(found.size, effective, world) or BatchPlan(found.size, accumulate)


def load_with_size(run: Run, places: list[TunedAttribute], size: int, method: str) -> None:
    """Set the attributes to a batch size, create the run's loaders, and restore the attributes."""
    before = [place.get() for place in places]
    try:
        for place in places:
            place.set(size)
        if method != "fit":
            run.source.load_evaluation(method)
            return
        run.source.train()
        if run.source.validates():
            run.source.load_evaluation("validate")
    finally:
        for place, value in zip(places, before, strict=True):
            place.set(value)


def take_size(
    run: Run, places: list[TunedAttribute], given: Any, found: SizeSearchResult, effective: int | None, world: int
) -> BatchPlan:
    """Set and report the batch size and, unless ``effective`` is None, the accumulation."""
    before = size_of(given) if given is not None else places[0].get()
    decided = planned(found, effective, world, run.trainer.accumulate_grad_batches)
    _put_size(run, places, given, decided)
    learns = decided.size * decided.accumulate * world
    also = f", and accumulate_grad_batches to {decided.accumulate}" if effective is not None else ""
    messages.info(
        f"Batch sizes tried: {'; '.join(map(str, found.trials))}. batch_size was set to {decided.size} (previously "
        f"{before}){also}. Number of samples per update: {learns}."
    )
    return decided


def _put_size(run: Run, places: list[TunedAttribute], given: Any, decided: BatchPlan) -> None:
    """Set the batch size and the number of batches to accumulate."""
    for place in places:
        place.set(decided.size)
    if given is not None:
        resize(given, decided.size)
    run.trainer.accumulate_grad_batches = decided.accumulate


def find_lr(run: Run, settings: Mapping[str, Any], update_attr: bool, attr_name: str) -> LRFinder | None:
    """Run a range test and continue training with the suggested learning rate."""
    if is_dry(run.trainer.fast_dev_run, "The learning rate"):
        return None
    places = lr_places(run.module, run.datamodule, attr_name) if update_attr else []
    initial = places[0].get() if places else None
    check(run)
    shares = shares_of(run.optimizers[0], initial)
    found = RangeTest(**settings, attr_name=attr_name if update_attr else None)(run)
    rate = take_lr(found, places) if update_attr else found.suggestion()
    if rate is not None and update_attr:
        if run.state.stage is None:
            setup_optimizers(run)  # again, because configure_optimizers reads the rate
        else:
            schedulers = [config.scheduler for config in run.lr_scheduler_configs]
            change_rates(run.optimizers[0], schedulers, shares, rate)
    return found


def find_size(run: Run, settings: Mapping[str, Any], name: str, effective_batch: Any, method: Any) -> Any:
    """Find the largest batch size that fits and continue with it; return (batch size, accumulation, trials)."""
    if is_dry(run.trainer.fast_dev_run, "The batch size"):
        return None
    locate = SizePlaces(name, method)
    given, world = run.source.given.get(stage_of(method)), run.strategy.num_data_ranks
    places = locate(run)
    effective = effective_now(run, places, given, effective_batch if method == "fit" else None, world)
    plan(1, effective, world)
    found = SizeSearch(locate, method=method, **settings)(run)
    decided = take_size(run, places, given, found, effective, world)
    _reload(run, method)
    return decided.size, decided.accumulate, found.trials


def resume_size(run: Run, name: str, size: int, accumulate: int) -> None:
    """Continue with the saved run's batch size."""
    _put_size(run, SizePlaces(name, "fit")(run), run.source.given.get("train"), BatchPlan(size, accumulate))
    messages.info(f"The run resumes with its saved batch_size={size} and accumulate_grad_batches={accumulate}.")
    _reload(run, "fit")


def _reload(run: Run, method: str) -> None:
    """Drop the loaders, so that they are recreated."""
    source = run.source
    source.release()
    source.eval.clear()
    if method == "fit":
        source.train_loader = None
        if run.state.stage is None:
            setup_optimizers(run)  # again, because schedules may depend on the number of steps
        else:
            source.reload_if_due()

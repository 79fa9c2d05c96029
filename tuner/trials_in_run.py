"""What the tuner's callbacks ask for in the middle of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import messages
from ..trainer.start_run import setup_optimizers
from .attribute_lookup import Place, find, find_one_of, lr_places, owners
from .batch_size import Found, Plan, SizeSearch, plan, stage_of
from .learning_rate import LRFinder, RangeTest, change_rates, check, shares_of
from .loaders import resize, size_of

if TYPE_CHECKING:
    from ..trainer.run import Run


def take_lr(found: LRFinder, places: list[Place]) -> float | None:
    """Set the suggested learning rate where it lies, and say so."""
    rate = found.suggestion()
    if rate is not None and places:
        before = places[0].get()
        for place in places:
            place.set(rate)
        words = messages.names([place.words for place in places], "and").replace("'", "")
        messages.info(
            f"Learning rate {rate:.4g} (range test of {len(found.results['lr'])} steps): {words} was {before}."
        )
    return rate


class SizePlaces:
    """Where the batch size lies: in what hooks read, or in the loader that was given (and in the former, if it is)."""

    def __init__(self, name: str, method: str) -> None:
        self.name, self.method = name, method

    def __call__(self, run: Run) -> list[Place]:
        """The attributes and hyperparameters.

        Raises:
            AttributeError: a hook makes the loader, and there are none.
            ValueError: the loader that was given cannot be changed.
        """
        return self.of(run.module, run.datamodule, run.source.given.get(stage_of(self.method)))

    def of(self, module: Any, datamodule: Any, given: Any) -> list[Place]:
        """As a call, for what an entry point was given."""
        both = owners(module, datamodule)
        if given is None:
            return find_one_of(both, self.name, ["batch_size"], "batch_arg_name")
        size_of(given)
        return find(both, self.name)


def effective_now(run: Run, places: list[Place], given: Any, wanted: Any, world: int) -> int | None:
    """Samples that an update is to learn from, over all processes; None: no matter.

    Raises:
        ValueError: ``wanted`` is neither a number nor ``"keep"``, or something else sets the accumulation.
    """
    if wanted is None:
        return None
    other = next((c for c in run.trainer.callbacks if c.get_accumulate_grad_batches(0) is not None), None)
    if other is not None:
        raise ValueError(
            f"scale_batch_size(effective_batch={wanted!r}) sets accumulate_grad_batches, and so does the "
            f"{type(other).__name__} among the callbacks. Leave one of them out."
        )
    if wanted != "keep":
        if isinstance(wanted, bool) or not isinstance(wanted, int):
            raise ValueError(
                f"scale_batch_size(effective_batch={wanted!r}): pass a number of samples over all processes, 'keep' "
                "for the current number, or None."
            )
        return wanted
    size = size_of(given) if given is not None else places[0].get()
    if isinstance(size, bool) or not isinstance(size, int):
        raise ValueError(
            f"scale_batch_size(effective_batch='keep'): {places[0].words} is {size!r}, so there is no batch size to "
            "keep. Set it, or pass effective_batch as a number of samples over all processes."
        )
    return size * run.trainer.accumulate_grad_batches * world


def take_size(run: Run, places: list[Place], given: Any, found: Found, effective: int | None, world: int) -> Plan:
    """Set the batch size where it lies, and the accumulation where the effective batch is to be kept; say so."""
    before = size_of(given) if given is not None else places[0].get()
    decided = plan(found.size, effective, world) or Plan(found.size, run.trainer.accumulate_grad_batches)
    put_size(run, places, given, decided)
    learns = decided.size * decided.accumulate * world
    also = f" and accumulate_grad_batches={decided.accumulate}" if effective is not None else ""
    messages.info(
        f"Batch sizes tried: {'; '.join(map(str, found.trials))}. From here on batch_size={decided.size}{also} (it was "
        f"{before}): an update learns from {learns} samples."
    )
    return decided


def put_size(run: Run, places: list[Place], given: Any, decided: Plan) -> None:
    """Set a batch size and the accumulation."""
    for place in places:
        place.set(decided.size)
    if given is not None:
        resize(given, decided.size)
    run.trainer.accumulate_grad_batches = decided.accumulate


class Trials:
    """Tries things within a run; for callbacks.

    Args:
        trainer: attached when the methods are called.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def find_lr(self, settings: Mapping[str, Any], update_attr: bool, attr_name: str) -> LRFinder | None:
        """A range test here, whose suggestion the training goes on with."""
        run = self.run
        if self.is_dry("The learning rate"):
            return None
        module = run.module
        places = lr_places(module, run.datamodule, attr_name) if update_attr else []
        initial = places[0].get() if places else None
        check(run)
        shares = shares_of(run.optimizers[0], initial)
        found = RangeTest(**settings, attr_name=attr_name if update_attr else None)(run)
        rate = take_lr(found, places) if update_attr else found.suggestion()
        if rate is not None and update_attr:
            if run.state.stage is None:
                self.start_again()
            else:
                schedulers = [config.scheduler for config in run.lr_scheduler_configs]
                change_rates(run.optimizers[0], schedulers, shares, rate)
        return found

    def find_size(self, settings: Mapping[str, Any], name: str, effective_batch: Any, method: str) -> Any:
        """The largest batch that fits, with which the run goes on: (batch size, accumulation, trials)."""
        run = self.run
        if self.is_dry("The batch size"):
            return None
        locate = SizePlaces(name, method)
        given, world = run.source.given.get(stage_of(method)), run.strategy.num_data_ranks
        places = locate(run)
        effective = effective_now(run, places, given, effective_batch if method == "fit" else None, world)
        plan(1, effective, world)
        found = SizeSearch(locate, method=method, **settings)(run)  # type: ignore[arg-type]
        decided = take_size(run, places, given, found, effective, world)
        self.take_loaders(method)
        return decided.size, decided.accumulate, found.trials

    def put_size(self, name: str, size: int, accumulate: int) -> None:
        """Go on with what a run before found."""
        given = self.run.source.given.get("train")
        put_size(self.run, SizePlaces(name, "fit")(self.run), given, Plan(size, accumulate))
        messages.info(f"The run continues with its batch_size={size} and accumulate_grad_batches={accumulate}.")
        self.take_loaders("fit")

    def take_loaders(self, method: str) -> None:
        """Let loaders be made anew."""
        run, source = self.run, self.run.source
        source.release()
        source.eval.clear()
        if method == "fit":
            source.train_loader = None
            if run.state.stage is None:
                self.start_again()
            else:
                source.reload_if_due()

    def start_again(self) -> None:
        """Optimizers and schedulers once more, before the training has begun: they read what was found."""
        setup_optimizers(self.run)

    def is_dry(self, what: str) -> bool:
        """Whether this is a dry run, in which nothing is searched for."""
        if self.run.trainer.fast_dev_run:
            messages.info_once(f"{what} is not searched for in a dry run (fast_dev_run).")
        return bool(self.run.trainer.fast_dev_run)

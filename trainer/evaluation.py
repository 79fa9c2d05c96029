"""The loop that runs validation, testing and prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..callbacks.base import Callback
from ..data.batches import Batches, StepIterator
from ..data.sharding import surplus
from ..torch_private import pytree
from . import phases
from .bind_steps import bind_mover, bind_step, takes_iterator
from .hooks import check_signature, method_of, overridden
from .module import TrainingModule
from .shared_step_values import keep_step, stand_by
from .state import Pending

if TYPE_CHECKING:
    from .run import Run

Kind = Literal["validate", "test", "predict"]

#: The stages as they appear in hook names.
WORDS = {"validate": "validation", "test": "test", "predict": "predict"}
#: The profiler's names for fetching each stage's batches.
FETCHES = {
    kind: f"[_EvaluationLoop].{word}_next"
    for kind, word in (("validate", "val"), ("test", "test"), ("predict", "predict"))
}


class EvalLoop:
    """Runs the module over every batch of every loader of a stage, without gradients.

    With ``keep_predictions``, the loop collects the outputs of ``predict_step``; with ``gather``, it also collects the
    outputs of the other ranks.
    """

    def __init__(self, run: Run, kind: Kind, keep_predictions: bool = False, gather: bool = False) -> None:
        self.run = run
        self.kind = kind
        self.word = WORDS[kind]
        self.keep = keep_predictions
        self.gather = gather
        self.metrics = run.metrics
        self.predictions: list[list[Any]] = []
        self.fetched: tuple[Any, int, int] = (None, 0, 0)

    def hooks(self, moment: str) -> tuple[Callable[..., Any], ...]:
        """Return the bound hooks ``on_<stage>_<moment>``."""
        return getattr(self.run.hooks, f"on_{self.word}_{moment}")

    def evaluate(self, zero_grad: bool = False) -> list[dict[str, float]]:
        """Run the stage once; return a dict of logged epoch values for each loader (empty for predict).

        ``zero_grad``: whether to let the module free its gradients before validation.
        """
        run = self.run
        if run.source.limit(self.kind) == 0:
            run.predictions = [] if self.kind == "predict" else run.predictions
            return []
        loaders, limits = run.source.evaluation(self.kind)
        self.metrics.enter(phases.PREDICT if self.kind == "predict" else phases.EVAL_MODE)
        if zero_grad and self.kind == "validate":
            self.switch("zero_grad")
        # A module may train on tensors that a fit's validation computed, which inference mode would forbid.
        inference = run.trainer.inference_mode and run.state.fn != "fit"
        with torch.inference_mode() if inference else torch.no_grad():
            self.switch("eval")
            try:
                results = self.run_loaders(loaders, limits)
            finally:
                self.switch("train")
        return results

    def switch(self, what: str) -> None:
        """Call the module's hook ``on_<stage>_model_<what>``."""
        method_of(self.run.module, f"on_{self.word}_model_{what}", TrainingModule)()

    def run_loaders(self, loaders: list[Any], limits: list[float]) -> list[dict[str, float]]:
        """Run the stage's hooks and batches, with gradients off and the module in eval mode."""
        run, metrics = self.run, self.metrics
        metrics.enter(phases.PREDICT if self.kind == "predict" else phases.ON_EVAL_START)
        if self.started():
            loaders, limits = run.source.evaluation(self.kind)
        fetches = takes_iterator(method_of(run.module, f"{self.word}_step", TrainingModule))
        step = bind_step(run, f"{self.word}_step", several_loaders=len(loaders) > 1 and not fetches)
        run_loader = self.run_iterator if fetches else self.run_loader
        self.check_hooks(several=len(loaders) > 1)
        self.predictions, run.predict_batch_indices, run.current_batch_indices = [], [], None
        self.fetched = (None, 0, 0)
        for idx, (loader, limit) in enumerate(zip(loaders, limits, strict=True)):
            run_loader(step, loader, limit, idx if len(loaders) > 1 else None)
            if idx + 1 < len(loaders):
                metrics.end_loader()
        metrics.enter(phases.PREDICT if self.kind == "predict" else phases.ON_EVAL_EPOCH_END)
        metrics.end_epoch()
        if self.kind == "predict":
            run.predictions = self.predictions if len(loaders) > 1 else self.predictions[0]
        for hook in self.hooks("epoch_end"):
            hook()
        found = metrics.finish_epoch()
        numbers = {}
        if run.state.pending is Pending.VALIDATION:
            run.state.pending = Pending.PLATEAUS
        if run.state.stage != "sanity_check":
            numbers = metrics.send_epoch(found)
        metrics.enter(phases.PREDICT if self.kind == "predict" else phases.ON_EVAL_END)
        for hook in self.hooks("end"):
            hook()
        if self.kind == "predict" or not numbers:
            return [{} for _ in loaders]
        return [
            {r.epoch_key: numbers[r.epoch_key] for at, r, _ in found if at in (idx, None)}
            for idx in range(len(loaders))
        ]

    def started(self) -> bool:
        """Call the start hooks; return True if one of them dropped the loaders by changing the batch size."""
        for moment in ("start", "epoch_start"):
            for hook in self.hooks(moment):
                hook()
        self.run.strategy.before_evaluation(self.run.module)
        self.run.strategy.check_replicas(self.run.module)
        return self.kind not in self.run.source.eval

    def run_loader(  # noqa: C901 - straight-line code, with fewer calls per batch
        self, step: Callable[..., Any], loader: Any, limit: float, dataloader_idx: int | None
    ) -> None:
        """Run every batch of one loader. Steps and hooks get ``dataloader_idx`` if it is not None."""
        run, state, metrics = self.run, self.run.state, self.metrics
        starts, ends = self.hooks("batch_start"), self.hooks("batch_end")
        extra = () if dataloader_idx is None else (dataloader_idx,)
        metrics.enter(phases.PREDICT if self.kind == "predict" else phases.EVAL_BATCH, dataloader_idx)
        source = run.source
        known = source.length(loader)
        batches = Batches(
            loader,
            bind_mover(run, dataloader_idx or 0),
            lookahead=source.looks_ahead(loader),
            limit=limit if limit < known else float("inf"),
        )
        kept: list[Any] = []
        taken: list[list[int]] = []
        unknown = known == float("inf")
        counted = limit - 1 if not unknown and surplus(loader) and limit == known else limit
        indices = source.track_indices(loader) if self.kind == "predict" and self.writes() else None
        batch_idx = -1
        after_step, after_hooks = places = metrics.step_value_sharings()
        stops, may_stop = run.stops, self.may_stop(known)
        with closing(batches):
            for batch, is_mine in run.trainer.profiler.iterate(FETCHES[self.kind], self.in_step(batches, known)):
                batch_idx += 1
                state.evaluated += 1
                if may_stop and stops.here():
                    raise stops.by_signal()
                metrics.batch = batch
                at_end = unknown and batches.exhausted and batch_idx + 1 < limit
                if batch_idx >= counted or not is_mine or (at_end and surplus(loader)):
                    with metrics.muted(run.module):
                        step(batch, batch_idx, *extra)
                    stand_by(places)
                    continue
                if indices is not None:
                    run.current_batch_indices = indices()
                    taken.append(run.current_batch_indices)
                for hook in starts:
                    hook(batch, batch_idx, *extra)
                outputs = step(batch, batch_idx, *extra)
                if after_step.active:
                    after_step.share()
                for hook in ends:
                    hook(outputs, batch, batch_idx, *extra)
                if after_hooks.active:
                    after_hooks.share()
                if self.keep:
                    kept.append(outputs)
                if metrics.steps_in_evaluation:
                    metrics.flush_eval_step()
        self.check_length(loader, batch_idx + 1, limit, known)
        keep_step(places)
        self.predictions.append(self.of_all_ranks(kept) if self.gather else kept)
        run.predict_batch_indices.append(taken)

    def run_iterator(self, step: Callable[..., Any], loader: Any, limit: float, dataloader_idx: int | None) -> None:
        """Run one loader through ``step(dataloader_iter)``, which fetches the batches itself.

        The batch-start hook gets the previously fetched batch, because the step may fetch several batches or none.
        """
        run, metrics = self.run, self.metrics
        name = f"{self.word}_step"
        if run.strategy.world_size > 1:
            raise ValueError(
                f"{name}(dataloader_iter) does not work with {run.strategy.world_size} processes, because a step that "
                f"fetches its own batches cannot skip padding batches. Use {name}(batch, batch_idx), or a single "
                "process."
            )
        metrics.enter(phases.PREDICT if self.kind == "predict" else phases.EVAL_BATCH, dataloader_idx)
        known = run.source.length(loader)
        limit = limit if limit < known else float("inf")
        batches = Batches(loader, bind_mover(run, dataloader_idx or 0), lookahead=True, limit=limit)
        iterator = StepIterator(batches, 0, metrics, dataloader_idx or 0)
        passed = 2 if dataloader_idx is None else 3
        kept: list[Any] = []
        with closing(iterator):
            for _ in iterator:
                taken = iterator.taken
                for hook in self.hooks("batch_start"):
                    hook(*self.fetched[:passed])
                try:
                    outputs = step(iterator, iterator.taken)
                except StopIteration:  # the step fetched past the end
                    break
                if iterator.taken == taken:
                    raise RuntimeError(
                        f"{name}(dataloader_iter) returned without calling next(dataloader_iter), so the evaluation "
                        "would never end. Fetch a batch: batch, batch_idx, dataloader_idx = next(dataloader_iter)."
                    )
                run.state.evaluated += iterator.taken - taken
                self.fetched = iterator.last
                for hook in self.hooks("batch_end"):
                    hook(outputs, *self.fetched[:passed])
                if self.keep:
                    kept.append(outputs)
                if metrics.steps_in_evaluation:
                    metrics.flush_eval_step()
        self.predictions.append(kept)
        run.predict_batch_indices.append([])

    def check_length(self, loader: Any, seen: int, limit: float, known: float) -> None:
        """Raise if the number of batches that a loader yielded differs from its length, or if an iterator is exhausted.

        If there were no batches, no values would be logged, and callbacks would monitor the values of the previous
        validation.
        """
        if seen == 0 and isinstance(loader, Iterator):
            self.refuse_empty(
                f"The {self.word} dataloader yielded no batches. A generator can be read only once, and the sanity "
                "check before training also reads from it. Pass a DataLoader, a list, or an object whose __iter__ "
                "starts over."
            )
        if seen != limit and known != float("inf"):
            raise RuntimeError(
                f"The {self.word} dataloader has length {known}, but yielded {seen} instead of {limit} batches. "
                "Correct __len__, or remove it."
            )

    def refuse_empty(self, why: str) -> None:
        """Raise an error for an evaluation without batches."""
        raise RuntimeError(why)

    def may_stop(self, known: float) -> bool:
        """Return True if a signal may stop this evaluation between two batches.

        Inside a fit, a validation is always finished. The same applies to an evaluation in which the ranks may have
        different numbers of batches (the length is not ``known``), because a rank that has run all of its batches would
        wait for the ranks that stopped.
        """
        run = self.run
        alike = known != float("inf") or run.strategy.communicates_forward or run.strategy.world_size == 1
        return alike and run.state.fn != "fit"

    def of_all_ranks(self, kept: list[Any]) -> list[Any]:
        """Return all ranks' outputs in data order: each rank's first batch, then each rank's second, and so on."""
        strategy = self.run.strategy
        outputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), kept)
        found = strategy.gather_objects((strategy.data_rank, outputs))
        shares = [share for _, share in sorted(dict(reversed(found)).items())]  # each shard of the data once
        rounds = range(max(len(share) for share in shares))
        return [share[number] for number in rounds for share in shares if number < len(share)]

    def in_step(self, batches: Batches, known: float) -> Iterable[tuple[Any, bool]]:
        """Return pairs of a batch and a flag, which is False if the batch is run only because other ranks have one."""
        strategy = self.run.strategy
        if strategy.communicates_forward and strategy.world_size > 1 and known == float("inf"):
            return self.until_all_end(batches)
        return zip(batches, repeat(True), strict=False)

    def until_all_end(self, batches: Batches) -> Iterator[tuple[Any, bool]]:
        """Yield batches when a forward pass needs all ranks but the number of batches per rank is unknown.

        A rank that has run out of batches repeats its last one, flagged False, until all ranks are done.
        """
        strategy = self.run.strategy
        iterator, end, last = iter(batches), object(), None
        while strategy.agree((batch := next(iterator, end)) is not end):
            if batch is end and last is None:
                raise RuntimeError(
                    f"Rank {strategy.global_rank} got no {self.word} batch, but other ranks did. Give every rank at "
                    "least one batch: use fewer processes or more data."
                )
            last = last if batch is end else batch
            yield last, batch is not end

    def writes(self) -> bool:
        """Return True if a hook may read the sample indices of a predicted batch."""
        return bool(self.hooks("batch_end") or self.hooks("epoch_end"))

    def check_hooks(self, several: bool) -> None:
        """Raise for batch hooks that do not accept the loop's arguments (also ``dataloader_idx`` if ``several``)."""
        run = self.run
        owners = [*((callback, Callback) for callback in run.trainer.callbacks), (run.module, TrainingModule)]
        for moment in ("batch_start", "batch_end"):
            name = f"on_{self.word}_{moment}"
            for owner, base in owners:
                method = overridden(owner, name, base)
                if method is not None:
                    check_signature(owner, name, method, several)


def show_results(results: list[dict[str, float]], fn: str) -> None:
    """Print the logged values, with one column per loader."""
    from rich.console import Console
    from rich.table import Table

    names = list(dict.fromkeys(name for one in results for name in one))
    if not names:
        return
    table = Table(title=fn.capitalize())
    table.add_column("Metric")
    for idx in range(len(results)):
        table.add_column("Value" if len(results) == 1 else f"Loader {idx}", justify="right")
    for name in names:
        table.add_row(name, *(f"{one[name]:.6g}" if name in one else "" for one in results))
    Console(soft_wrap=True).print(table)

"""A trainer that stands in for another one while something is tried, so that the other is not touched at all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from .. import messages
from ..callbacks.finetuning import BaseFinetuning
from ..callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from ..data.combined_loader import CombinedLoader
from ..data.loaders import eval_loaders, train_loader
from ..loggers.base import DummyLogger
from ..memory.out_of_memory_error import out_of_memory
from ..trainer.choose_profiler import chosen
from ..trainer.data_source import DataSource
from ..trainer.hooks import HookTable
from ..trainer.metrics import MetricStore
from ..trainer.start_run import attach, find_module
from ..trainer.state import RunState
from ..trainer.torch_settings import numerics
from .restore import Kept

if TYPE_CHECKING:
    from ..trainer.trainer import Request, Trainer

#: What a trial's loader is made of: of one that was given.
Change = Callable[[DataLoader[Any]], DataLoader[Any]]


def refuse_strategy(trainer: Trainer, what: str) -> None:
    """Raise under a strategy whose state lies where nobody can put it back."""
    from ..strategies.deepspeed.strategy import DeepSpeedStrategy

    strategy = trainer.strategy
    if isinstance(strategy, DeepSpeedStrategy) or strategy.splits_batches:
        raise NotImplementedError(
            f"{what} cannot put back what {type(strategy).__name__} keeps of weights and optimizers. Run it with "
            "strategy='ddp' or 'fsdp' (or on one device) once, and write the value it finds into your program."
        )


def apart(trainer: Trainer, request: Request, work: Callable[[Trainer], Any]) -> Any:
    """Attach a stand-in as an entry point would, let ``work`` use it, and leave module, data and trainer as they were.

    Where the strategy shards the module, it stays sharded, as after a fit; its values are put back.
    """
    module, strategy = find_module(trainer, request)[0], trainer.strategy
    double = _copied(trainer)
    double._clear()
    double._brought = (module, [], [])  # its callbacks stay at home
    kept = _kept_around(trainer, request, module)
    double.state.begin(request.fn)
    failed = True
    try:
        with numerics(double):
            attach(double, request)
            result = work(double)
            failed = False
    except BaseException as error:
        strategy.abandon(error)
        better = strategy.explain(error) or out_of_memory(double, error)
        if better is not None:
            raise better from error
        raise
    finally:
        try:
            double._teardown(request.fn, failed)
        finally:
            kept.put_back()
    return result


def _kept_around(trainer: Trainer, request: Request, module: Any) -> Kept:
    kept = Kept()
    kept.random(trainer.strategy.device)
    if not trainer.strategy.communicates_forward:
        kept.keep(module)
    data = request.datamodule
    for given in request.loaders.values():
        data = given if data is None and hasattr(given, "prepare_data_per_node") else data
    if data is not None:
        kept.attributes(data)
    return kept


def _copied(trainer: Trainer) -> Trainer:
    """The same settings and strategy; counters, callbacks and loggers of its own."""
    double = copy.copy(trainer)
    for name in ("saver", "_trials"):
        vars(double).pop(name, None)
    double.profiler = chosen(None)
    double.state = RunState()
    double.state.load_state_dict(trainer.state.state_dict())
    double.loggers = [DummyLogger()] if trainer.loggers else []
    double.callbacks = [copy.deepcopy(c) for c in trainer.callbacks if isinstance(c, BaseFinetuning)]
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            double.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.state.epoch)
    return double


@contextmanager
def stand_in(trainer: Trainer, change: Change | None = None) -> Iterator[Trainer]:
    """A stand-in within a run: on the same module, device and optimizers, with loaders and counters of its own.

    Whoever opens it keeps (see :class:`Kept`) what the run needs back.

    Args:
        trainer: attached.
        change: makes the trial's loaders from those that were given to the entry point.
    """
    module, datamodule, strategy = trainer.training_module, trainer.datamodule, trainer.strategy
    double = _copied(trainer)
    double.callbacks = []
    state = double.state
    state.begin(trainer.state.fn or "fit")
    state.pending, state.window, state.next_batch, state.batch_idx = "", 0, 0, -1
    double._metrics = MetricStore(state, strategy, None)
    double._source = DataSource(double, trial_loaders(trainer, change))
    double._hooks = HookTable(double, module, [], datamodule)
    double.optimizers = trainer.optimizers
    progress, strategy.progress = strategy.progress, state.where
    module.trainer = double
    if datamodule is not None:
        datamodule.trainer = double
    try:
        yield double
    finally:
        double._source.release()
        strategy.progress = progress
        module.trainer = trainer
        if datamodule is not None:
            datamodule.trainer = trainer


def keep_run(trainer: Trainer) -> Kept:
    """What trials within a run may change."""
    kept = Kept()
    kept.random(trainer.strategy.device)
    kept.keep(trainer.training_module)
    for optimizer in trainer.optimizers:
        kept.keep(optimizer)
    kept.keep(trainer.scaler)
    if trainer.datamodule is not None:
        kept.attributes(trainer.datamodule)
    kept.loaders(leaf for given in trial_loaders(trainer, None).values() for leaf in _leaves_of(given))
    return kept


def trial_loaders(trainer: Trainer, change: Change | None) -> dict[str, Any]:
    """Copies of the loaders that were given to the entry point, which share no running iterator with them."""
    found: dict[str, Any] = {}
    for stage, given in trainer._source.given.items():
        if given is None:
            continue
        _refuse_iterator(given, stage)
        if stage == "train":
            found[stage] = _copy_of(train_loader(given), change)
        else:
            copies = [_copy_of(loader, change) for loader in eval_loaders(given)]
            found[stage] = copies[0] if len(copies) == 1 else copies
    return found


def _refuse_iterator(given: Any, stage: str) -> None:
    if hasattr(given, "__next__"):
        raise TypeError(
            f"The {stage} loader is {messages.a(given)}, which can be read only once: a trial would use it up. "
            "Pass a DataLoader, a list, or an object whose __iter__ starts over."
        )


def _copy_of(loader: Any, change: Change | None) -> Any:
    from ..data.loaders import replaced

    if isinstance(loader, CombinedLoader):
        clone = copy.copy(loader)
        clone.flattened = [_copy_of(leaf, change) for leaf in loader.flattened]
        return clone
    if isinstance(loader, DataLoader):
        return replaced(loader) if change is None else change(loader)
    return loader


def _leaves_of(given: Any) -> Iterator[Any]:
    for one in given if isinstance(given, list) and given and isinstance(given[0], DataLoader) else [given]:
        if isinstance(one, CombinedLoader):
            for leaf in one.flattened:
                yield from _leaves_of(leaf)
        else:
            yield one

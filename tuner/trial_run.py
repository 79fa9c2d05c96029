"""Run trials separately, without touching the Trainer or its current run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from .. import messages
from ..callbacks.base import accumulation_of
from ..data.combined_loader import CombinedLoader
from ..data.loaders import eval_loaders, leaves_of, replaced, train_loader
from ..loggers.base import DummyLogger
from ..memory.out_of_memory_error import out_of_memory
from ..strategies.base import Strategy
from ..trainer.arguments import Request, check_profiler
from ..trainer.data_source import DataSource
from ..trainer.hooks import HookTable
from ..trainer.metrics import MetricStore
from ..trainer.run import Run
from ..trainer.start_run import attach, bind_hooks, end_logging, find_module, settle_max_epochs
from ..trainer.state import Pending, RunState
from ..trainer.torch_settings import numerics
from .saved_state import SavedState

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer

#: Creates a trial's loader from one that the user passed.
Change = Callable[[DataLoader[Any]], DataLoader[Any]]


def refuse_strategy(run: Run, what: str) -> None:
    """Raise an error if the strategy's state cannot be restored."""
    strategy = run.strategy
    if not strategy.restores_after_trials:
        raise NotImplementedError(
            f"{what} cannot restore the weights and optimizer states that {type(strategy).__name__} manages. Run the "
            "search once with strategy='ddp' or 'fsdp' (or on one device), and put the value that it finds into your "
            "program."
        )


def run_separately(
    trainer: Trainer, request: Request, work: Callable[[Run], Any], load: Callable[[Run, Any], Any] | None = None
) -> Any:
    """Prepare a separate run as an entry point does, call ``work``, and restore module, data and Trainer.

    A module that the strategy shards stays sharded, as after a fit. Afterward, the Trainer's attributes return the
    search's module and DataModule, and the loaders that ``load`` creates from the run and the result.
    """
    module, strategy = find_module(trainer.current_run, request)[0], trainer.strategy
    run = _own_run(trainer, request)
    run.trainer.brought_callbacks = (module, [], [])  # its callbacks are not called
    kept = _kept_around(strategy, request, module)
    run.state.begin(request.fn)
    failed = True
    try:
        with numerics(run.trainer):
            attach(run, request)
            result = work(run)
            if load is not None:
                load(run, result)
            failed = False
    except BaseException as error:
        strategy.abandon(error)
        better = strategy.explain(error) or out_of_memory(run, error)
        if better is not None:
            raise better from error
        raise
    finally:
        try:
            run.teardown(request.fn, failed)
        finally:
            kept.restore()
    show(trainer, request, run.source)
    return result


def show(trainer: Trainer, request: Request, source: DataSource | None = None) -> None:
    """Make the Trainer's attributes return a search's module, DataModule and loaders, as they do after a run."""
    module, data = find_module(trainer.current_run, request)[0], request.datamodule
    run = trainer.current_run = Run(trainer, None, trainer.current_run)
    run.module = run.model = module
    run.datamodule = data
    if source is not None:
        run.source, source.run = source, run
    module.trainer = trainer
    if data is not None:
        data.trainer = trainer
    if request.fn == "fit":
        settle_max_epochs(trainer)
    bind_hooks(run)
    end_logging(run)


def _kept_around(strategy: Strategy, request: Request, module: Any) -> SavedState:
    kept = SavedState()
    kept.random(strategy.device)
    if not strategy.communicates_forward:
        kept.keep(module)
    data = request.datamodule
    for given in request.loaders.values():
        data = given if data is None and hasattr(given, "prepare_data_per_node") else data
    if data is not None:
        kept.attributes(data)
    return kept


def _own_run(trainer: Trainer, request: Request | None = None) -> Run:
    """Create a run with the Trainer's settings and strategy but separate counters, callbacks and loggers."""
    double = copy.copy(trainer)
    double.profiler = check_profiler(None)
    double.loggers = [DummyLogger()] if trainer.loggers else []
    double.callbacks = [copy.deepcopy(callback) for callback in trainer.callbacks if callback.runs_in_trials]
    batches = accumulation_of(trainer.callbacks, trainer.state.epoch)
    double.accumulate_grad_batches = batches or trainer.accumulate_grad_batches
    double.state = RunState()
    double.state.load_state_dict(trainer.state.state_dict())
    run = double.current_run = Run(double, request)
    run.module = trainer.current_run.module
    return run


@contextmanager
def trial_in_run(run: Run, change: Change | None = None) -> Iterator[Run]:
    """Context manager for a trial inside a prepared run, with the same module and optimizers but its own loaders.

    Counters are separate, too. The caller saves and restores what the outer run needs (see :class:`SavedState`).
    """
    trainer, datamodule, strategy = run.trainer, run.datamodule, run.strategy
    own = _own_run(trainer)
    own.trainer.callbacks = []
    own.model, own.datamodule = run.model, datamodule
    own.lr_scheduler_configs, own.optimizers = run.lr_scheduler_configs, run.optimizers
    own.metrics = MetricStore(own.state, Strategy(), None)  # reduces nothing, so no rank waits for one that fails
    state = own.state
    state.begin(run.state.fn or "fit")
    state.pending, state.window, state.next_batch, state.batch_idx = Pending.NOTHING, 0, 0, -1
    own.source = DataSource(own, trial_loaders(run, change))
    own.hooks = HookTable(own.trainer, own.module, [], datamodule)
    progress, strategy.progress = strategy.progress, state.where
    own.module.trainer = own.trainer
    if datamodule is not None:
        datamodule.trainer = own.trainer
    try:
        yield own
    finally:
        own.source.release()
        strategy.progress = progress
        own.module.trainer = trainer
        if datamodule is not None:
            datamodule.trainer = trainer


def keep_run(run: Run) -> SavedState:
    """Save everything that trials within a run may change."""
    kept = SavedState()
    kept.random(run.strategy.device)
    kept.keep(run.module)
    for optimizer in run.optimizers:
        kept.keep(optimizer)
    kept.keep(run.strategy.precision.scaler)
    if run.datamodule is not None:
        kept.attributes(run.datamodule)
    kept.loaders(leaf for given in trial_loaders(run, None).values() for leaf in _leaves_of(given))
    return kept


def trial_loaders(run: Run, change: Change | None) -> dict[str, Any]:
    """Return copies of the loaders passed to the entry point, without their running iterators."""
    found: dict[str, Any] = {}
    for stage, given in run.source.given.items():
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
            f"The {stage} loader is {messages.a(given)}, which can be read only once, so a trial would use it up. "
            "Pass a DataLoader, a list, or an object whose __iter__ starts over."
        )


def _copy_of(loader: Any, change: Change | None) -> Any:
    if isinstance(loader, CombinedLoader):
        clone = copy.copy(loader)
        clone.flattened = [_copy_of(leaf, change) for leaf in loader.flattened]
        return clone
    if isinstance(loader, DataLoader):
        return replaced(loader) if change is None else change(loader)
    return loader


def _leaves_of(given: Any) -> Iterator[Any]:
    for one in given if isinstance(given, list) and given and isinstance(given[0], DataLoader) else [given]:
        yield from leaves_of(one)

"""One run of an entry point: the arguments of the call, everything created for the run, and its teardown."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from .. import messages
from ..callbacks.base import Rollback
from ..checkpoint.folder_lock import FolderLocks
from ..checkpoint.restore import PARTS
from ..data.worker_processes import explain_lost_worker, torchs_own
from ..memory.out_of_memory_error import out_of_memory
from ..processes import timings
from ..processes.cpu_memory import freed_memory_kept
from ..processes.signals import actions, watch
from ..strategies.base import Strategy
from ..strategies.sync_batch_norm import LayerSync
from . import profiling
from .arguments import Request
from .checkpoint_saver import Saver
from .data_source import DataSource
from .evaluation import EvalLoop
from .joint_optimizer import JointOptimizer
from .loop import FitLoop
from .metrics import MetricStore
from .optimizers import ManagedOptimizer
from .start_run import attach, end_logging
from .states import RunningStage, TrainerStatus
from .stopping import Stops
from .torch_settings import numerics

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..data.datamodule import DataModule
    from .checkpoint_contents import ChildRunData
    from .hooks import HookTable
    from .module import TrainingModule
    from .optimizers import SchedulerConfig
    from .trainer import Trainer


class Run:
    """One call to an entry point of a Trainer.

    Loops, steps, checkpoints, data and the tuner receive this object. The Trainer keeps its own arguments and exposes
    the last run's attributes.

    Args:
        trainer: the Trainer, whose arguments apply.
        request: the call to carry out; None before the first run.
        before: the previous run, whose module, counters and optimizers this run takes over.

    Attributes:
        state: the Trainer's counters, which the next run takes over.
        module: the user's module, unwrapped; None before the first run.
        model: the module as the strategy wrapped it.
        managed: the optimizers as ``self.optimizers()`` returns them.
        joint: the optimizer that automatic optimization steps: the only optimizer, or a :class:`.JointOptimizer` that
            combines all of them.
        fit: the loop of the last fit.
        ckpt_path: the checkpoint that was loaded, or None.
        newest: the checkpoint that ``"last"`` or ``"auto"`` found, on rank 0.
        resumes: whether the fit restores more than a checkpoint's weights.
        saves: the number of the latest save in this run or its checkpoint folders.
        child_data: the data that a run in other processes left for a checkpoint; None after a run in this process.
        folder_locks: the folders that this run has locked.
        shared_log_dir: rank 0's folder for the run; None with a single process.
    """

    module: TrainingModule
    hooks: HookTable
    stops: Stops

    def __init__(self, trainer: Trainer, request: Request | None = None, before: Run | None = None) -> None:
        self.trainer, self.request, self.strategy = trainer, request, trainer.strategy
        self.state = trainer.state
        self.folder_locks = FolderLocks()
        self.hooks = self.stops = None  # type: ignore[assignment] - set in `execute`
        self.module = before and before.module  # type: ignore[assignment] - set in `execute`
        self.model: Any = before and before.model
        self.datamodule: DataModule | None = before and before.datamodule
        self.source = DataSource(self, {}) if before is None else before.source
        self.metrics = MetricStore(self.state, self.strategy, None) if before is None else before.metrics
        self.optimizers = [] if before is None else before.optimizers
        self.lr_scheduler_configs: list[SchedulerConfig] = [] if before is None else before.lr_scheduler_configs
        self.fit: FitLoop | None = before and before.fit
        self.predictions: Any = before and before.predictions
        self.predict_batch_indices: list[list[list[int]]] = [] if before is None else before.predict_batch_indices
        self.current_batch_indices: list[int] | None = None
        self.ckpt_path: Any = before and before.ckpt_path
        self.newest: Any = before and before.newest
        self.resumes = before is not None and before.resumes
        self.saves = 0 if before is None else before.saves
        self.child_data: ChildRunData | None = before and before.child_data
        self.shared_log_dir: str | None = None
        self.layer_sync: LayerSync | None = None

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the fit, as ``configure_optimizers`` created them."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self.managed = [ManagedOptimizer(optimizer, self) for optimizer in self._optimizers]
        alone = len(self.managed) == 1
        self.joint = self.managed[0] if alone else ManagedOptimizer(JointOptimizer(self._optimizers), self)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by fp16's loss scale, once per step.

        Under automatic optimization, the gradients of all optimizers are divided.
        """
        together = self.module.automatic_optimization and optimizer in self._optimizers
        self.strategy.unscale_gradients(self.joint.optimizer if together else optimizer)

    @cached_property
    def saver(self) -> Saver:
        """The object that writes the checkpoints, one at a time."""
        return Saver(self)

    @property
    def holder(self) -> Strategy:
        """The strategy that collects the states for a checkpoint.

        After a run in child processes, it is a single-process strategy, because this process then has the complete
        states.
        """
        return self.strategy if self.child_data is None else Strategy()

    @property
    def log_dir(self) -> str | None:
        """The folder for this run's logs, the same on every rank."""
        if self.shared_log_dir is not None:
            return self.shared_log_dir
        loggers = self.trainer.loggers
        found = loggers[0].log_dir if loggers else self.trainer.default_root_dir
        return None if found is None else os.fspath(found)

    def send_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Send numbers to all loggers, at ``step`` on the x axis; does nothing on ranks other than 0."""
        if self.strategy.is_global_zero:
            for logger in self.trainer.loggers:
                logger.log_metrics(metrics=metrics, step=step)

    def count_save(self) -> int:
        """Count a new save and return its number, one above the latest in this run and in its checkpoint folders."""
        self.saves += 1
        return self.saves

    # ---- execution -------------------------------------------------------------------------------------------------

    def execute(self) -> Any:
        """Carry out the run; restart it from a checkpoint each time a callback raises :class:`Rollback`."""
        given = request = self.request
        if given is None or request is None:
            raise RuntimeError("This Run has nothing to do. Call a method of its Trainer, such as trainer.fit(module).")
        at_start = self.state.state_dict()
        while True:
            self.state.begin(request.fn)
            self.hooks = None  # type: ignore[assignment] - hooks are bound before any is called
            result, failed, back, wanted = None, True, None, actions(self.trainer.signals)
            reuses_memory = freed_memory_kept(self.strategy.device)  # on a CPU, later batches reuse memory
            # A signal only sets `state.signum`; the stops decide, for all ranks together, after which batch a run ends.
            with watch(self.state, wanted), Stops(self, wanted) as self.stops, reuses_memory:
                try:
                    with timings.phase(request.fn), numerics(self.trainer):  # numerics: torch's global settings
                        resumed = attach(self, request)  # module, data, hooks, device, optimizers and checkpoint
                        if request.fn == "fit":
                            FitLoop(self, resumed).train()
                        else:
                            result = self._evaluation(request).evaluate()
                        for hook in self.hooks.on_fit_end if request.fn == "fit" else ():
                            hook()
                        self.saver.wait()  # for a checkpoint that is still being written
                        self.stops.at_end()  # raises on all ranks if any of them got a signal in the meantime
                        self.trainer.profiler.finish(self.trainer)
                    failed = False
                except Rollback as rollback:
                    self.saver.wait()
                    back, failed = rollback.with_traceback(None), False
                except BaseException as error:
                    # If the cause is known, raise an error that says what to change instead.
                    better = explain_lost_worker(error, self.state.where(), self.source.name_of)
                    better = better or self.strategy.explain(error) or out_of_memory(self, error)
                    self._fail(better or error)
                    if better is not None:
                        raise better from torchs_own(error)
                    raise
                finally:
                    self.teardown(request.fn, failed)
            if back is None:
                return result
            request = self._gone_back(given, back, at_start)

    def _gone_back(self, given: Request, back: Rollback, at_start: dict[str, Any]) -> Request:
        """Return the request that repeats the fit from a checkpoint."""
        parts = PARTS if back.own else given.restore
        if "loops" not in parts:
            self.state.load_state_dict(at_start)
        return replace(given, ckpt_path=back.path, restore=parts, again=True)

    def _evaluation(self, request: Request) -> EvalLoop:
        kind: Any = request.fn
        self.state.stage = RunningStage(kind)
        return EvalLoop(self, kind, request.keep_predictions, request.gather)

    def _fail(self, error: BaseException) -> None:
        """Report an error to the strategy, profiler and hooks; errors raised while reporting do not hide it."""
        self.state.status = TrainerStatus.INTERRUPTED
        if not self.stops.signum:
            self.strategy.abandon(error)  # from here on, this process does not wait for the others
        profiler = self.trainer.profiler
        _run_all([profiler.interrupted, self.metrics.drain, partial(self.saver.wait, together=False)])
        hooks = () if self.hooks is None else self.hooks.on_exception
        _run_all([partial(hook, error) for hook in (*hooks, self.strategy.on_exception)])

    def teardown(self, fn: str, failed: bool) -> None:
        """Tear down the run: hooks, loggers, profiler, locks, loaders and strategy."""
        jobs: list[Any] = [partial(profiling.report_split, self)]
        if self.hooks is not None:
            jobs += [lambda hook=hook: hook(fn) for hook in self.hooks.teardown]
        status = ("interrupted" if self.state.signum else "failed") if failed else "success"
        if self.strategy.is_global_zero:
            jobs += [lambda logger=logger: logger.finalize(status) for logger in self.trainer.loggers]
        jobs += [partial(profiling.teardown, self, fn)]
        if self.layer_sync is not None:
            jobs += [partial(self.layer_sync.revert, self.module)]
        jobs += [
            self.saver.close,
            self.trainer.checkpoint_io.teardown,
            self.folder_locks.release,
            self.source.release,
            self.strategy.teardown,
            self.strategy.precision.teardown,
        ]
        if not failed:
            self.state.status = TrainerStatus.FINISHED
        try:
            _run_all(jobs, hidden=failed)
        finally:
            self.state.fn = self.state.stage = None
            end_logging(self)

    # ---- copies ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this run for a copy of the Trainer, without its data, threads, files and components."""
        trainer, data = self.trainer, self.datamodule
        return {
            "own": {name: getattr(self, name) for name in COPIED},
            "optimizers": self.optimizers,
            "metrics": self.metrics.state_dict(),
            "sent": self.metrics.sent,
            "attached": (
                self.module is not None and self.module._trainer is trainer,
                data is not None and data.trainer is trainer,
            ),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        vars(self).update(state["own"])
        self.metrics = MetricStore(self.state, self.strategy, None)
        self.model = self.module
        self.optimizers = state["optimizers"]
        self.state.fn = self.state.stage = None
        self.metrics.load_state_dict(state["metrics"])
        self.metrics.sent = state["sent"]
        has_module, has_data = state["attached"]
        if has_module and self.module is not None:
            self.module.trainer = self.trainer
            self.module._end_run()
        if has_data and self.datamodule is not None:
            self.datamodule.trainer = self.trainer


#: Attributes of a run that a copy of its Trainer keeps unchanged.
COPIED = (
    *("module", "datamodule", "lr_scheduler_configs", "predictions", "predict_batch_indices"),
    *("current_batch_indices", "ckpt_path", "newest", "resumes", "saves", "child_data", "shared_log_dir"),
)


def _run_all(jobs: Iterable[Any], hidden: bool = True) -> None:
    """Run every job, even if some fail.

    Errors become warnings; if ``hidden`` is False, the first error is raised at the end instead.
    """
    first: Exception | None = None
    for job in jobs:
        try:
            job()
        except Exception as error:
            if not hidden and first is None:
                first = error
                continue
            messages.warn(f"While ending, the run also raised {type(error).__name__}: {error}")
    if first is not None:
        raise first

"""What can be asked of a Trainer: its counters, its parts, where the run stands."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from torch.optim import Optimizer

from .. import messages
from ..callbacks.base import Callback
from ..loggers.base import Logger
from .logged_values import bar_values, callback_values, sent_values
from .state import RunState

if TYPE_CHECKING:
    from ..callbacks.early_stopping import EarlyStopping
    from ..callbacks.model_checkpoint import ModelCheckpoint
    from ..callbacks.progress import ProgressBar
    from ..data.datamodule import DataModule
    from ..strategies.base import Strategy
    from ..strategies.precision.base import Precision
    from .checkpoint_contents import Left
    from .data_source import DataSource
    from .hooks import HookTable
    from .metrics import MetricStore
    from .module import TrainingModule
    from .optimizers import ManagedOptimizer, SchedulerConfig
    from .trainer import Trainer


class TrainerStatus:
    """The readable side of a Trainer. Attributes that share a name with an argument hold that argument."""

    state: RunState
    strategy: Strategy
    callbacks: list[Callback]
    loggers: list[Logger]
    datamodule: DataModule | None
    lr_scheduler_configs: list[SchedulerConfig]
    default_root_dir: str
    max_epochs: int | None
    max_steps: int
    min_epochs: int | None
    min_steps: int | None
    accumulate_grad_batches: int
    log_every_n_steps: int
    num_sanity_val_steps: int
    model: Any
    _module: TrainingModule | None
    _source: DataSource
    _hooks: HookTable
    _metrics: MetricStore
    _managed: list[ManagedOptimizer]
    _optimizers: list[Optimizer]
    _ckpt_path: Any
    _ckpt_asked: Any
    #: Whether this fit goes on where a checkpoint was written, with more of it than its weights.
    _resumes: bool
    #: What ``"last"`` or ``"auto"`` found for this fit, on rank 0.
    _newest: Any
    #: The number of the newest save, of this run or found in its folders.
    _saves: int
    #: What the ranks of a run in other processes left in this one for a checkpoint; None after a run in this process.
    _left: Left | None
    #: The run's folder as rank 0 has it; None outside of a run of several processes.
    _log_dir: str | None
    #: The module that brought callbacks, the trainer's own that they replaced, and the ones it brought.
    _brought: tuple[TrainingModule, list[Callback], list[Callback]] | None

    # ---- where the run stands --------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """The training epoch under way, 0-based; the number of finished epochs between epochs."""
        return self.state.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps made, over all optimizers and epochs."""
        return self.state.global_step

    @property
    def is_last_batch(self) -> bool:
        """Whether the training batch under way is the last of its epoch."""
        return self.state.is_last_batch

    @property
    def should_stop(self) -> bool:
        """Set to True to ask the training to stop after this batch (respected after min_epochs and min_steps)."""
        return self.state.should_stop

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self.state.should_stop = bool(stop)
        self.state.stop |= self.state.should_stop

    def may_stop(self) -> bool:
        """Whether ``should_stop`` counts by now: only after ``min_epochs`` and ``min_steps``."""
        if self.state.epoch >= (self.min_epochs or 0) and self.state.global_step >= (self.min_steps or 0):
            return True
        messages.info_once(
            f"Asked to stop, but training continues until min_epochs={self.min_epochs or 0} and "
            f"min_steps={self.min_steps or 0}."
        )
        return False

    @property
    def training(self) -> bool:
        """The training part of a fit is running."""
        return self.state.stage == "train"

    @property
    def validating(self) -> bool:
        """A validation is running, alone or inside a fit."""
        return self.state.stage == "validate"

    @property
    def testing(self) -> bool:
        """``test`` is running."""
        return self.state.stage == "test"

    @property
    def predicting(self) -> bool:
        """``predict`` is running."""
        return self.state.stage == "predict"

    @property
    def sanity_checking(self) -> bool:
        """The validation batches ahead of training are being tried."""
        return self.state.stage == "sanity_check"

    @sanity_checking.setter
    def sanity_checking(self, checking: bool) -> None:
        self.state.stage = "sanity_check" if checking else None

    @property
    def evaluating(self) -> bool:
        """A validation or test is running."""
        return self.state.stage in ("validate", "test", "sanity_check")

    @property
    def interrupted(self) -> bool:
        """The last run ended early."""
        return self.state.status == "interrupted"

    @property
    def received_sigterm(self) -> bool:
        """SIGTERM has come; the run ends after this batch."""
        return self.state.signum == 15

    @property
    def logs_this_step(self) -> bool:
        """Whether the update under way, or just made, is one whose values go to the loggers."""
        state = self.state
        return (state.updates if state.stepped else state.updates + 1) % self.log_every_n_steps == 0

    # ---- model and optimization ------------------------------------------------------------------------------------

    @property
    def training_module(self) -> TrainingModule:
        """The user's module, unwrapped."""
        if self._module is None:
            raise AttributeError("This Trainer has no module yet. Call fit, validate, test or predict first.")
        return self._module

    @property
    def lightning_module(self) -> TrainingModule | None:
        """Lightning's name for :attr:`training_module`; None before there is one."""
        return self._module

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the fit, as ``configure_optimizers`` made them. A new list counts from the next epoch."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        from .optimizers import ManagedOptimizer

        self._optimizers = list(optimizers)
        self._managed = [ManagedOptimizer(optimizer, cast("Trainer", self)) for optimizer in self._optimizers]

    @property
    def ckpt_path(self) -> Any:
        """The file that the last run loaded, or None. Set it and every entry point loads that one, until it is None."""
        return self._ckpt_path

    @ckpt_path.setter
    def ckpt_path(self, path: Any) -> None:
        self._ckpt_path = self._ckpt_asked = path

    @property
    def precision_plugin(self) -> Precision:
        """The Precision in use."""
        return self.strategy.precision

    @property
    def precision(self) -> str:
        """The name of the Precision in use."""
        return self.strategy.precision.name

    @property
    def scaler(self) -> Any:
        """fp16's loss scaler, or None."""
        return self.strategy.precision.scaler

    @property
    def accelerator(self) -> str:
        """The kind of device: ``"cpu"``, ``"cuda"`` or ``"mps"``."""
        return self.strategy.device.type

    @property
    def device_ids(self) -> list[int]:
        """Indices of the devices of this node's processes, one each; on the CPU 0, 1, ..."""
        return self.strategy.device_ids

    @property
    def num_devices(self) -> int:
        """Devices on this node."""
        return self.world_size // self.num_nodes

    @property
    def num_nodes(self) -> int:
        """Machines."""
        return self.strategy.num_nodes

    @property
    def world_size(self) -> int:
        """Processes over all machines."""
        return self.strategy.world_size

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self.strategy.global_rank

    @property
    def local_rank(self) -> int:
        """This process on its machine."""
        return self.strategy.local_rank

    @property
    def node_rank(self) -> int:
        """This process's machine."""
        return self.strategy.node_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes files and speaks to the user."""
        return self.strategy.is_global_zero

    # ---- data ------------------------------------------------------------------------------------------------------

    @property
    def train_dataloader(self) -> Any:
        """The training loader, or None before it was made."""
        return self._source.train_loader

    def _eval_loaders(self, kind: str) -> Any:
        loaders = self._source.eval.get(kind, ([], []))[0]
        return (loaders[0] if len(loaders) == 1 else loaders) if loaders else None

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader, the list of them, or None before they were made."""
        return self._eval_loaders("validate")

    @property
    def test_dataloaders(self) -> Any:
        """The test loader, the list of them, or None before they were made."""
        return self._eval_loaders("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The loader to predict from, the list of them, or None before they were made."""
        return self._eval_loaders("predict")

    @property
    def num_training_batches(self) -> int | float:
        """Training batches an epoch; inf for a loader without length."""
        return self._source.num_training_batches

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader."""
        return list(self._source.eval.get("validate", ([], []))[1])

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of each validation loader in the sanity check."""
        steps = self.num_sanity_val_steps
        return [n if steps == -1 else min(n, steps) for n in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each test loader."""
        return list(self._source.eval.get("test", ([], []))[1])

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Batches of each loader to predict from."""
        return list(self._source.eval.get("predict", ([], []))[1])

    @property
    def enable_validation(self) -> bool:
        """Whether this fit validates: there is a loader, a validation_step, and limit_val_batches is not 0."""
        return self._source.validates()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Arguments for a DistributedSampler, or None with one process."""
        return {"num_replicas": self.world_size, "rank": self.global_rank} if self.world_size > 1 else None

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps the fit will make, for schedules that need the total; makes the training loader.

        inf when neither epochs nor steps are limited, or the loader has no length.
        """
        if self.max_epochs in (None, -1) or self.max_steps == 0:
            return math.inf if self.max_steps == -1 else self.max_steps
        self._source.train()
        batches = self.num_training_batches
        if batches == math.inf:
            return math.inf if self.max_steps == -1 else self.max_steps
        total = sum(math.ceil(batches / self._accumulation(epoch)) for epoch in range(self.max_epochs or 0))
        return total if self.max_steps == -1 else min(total, self.max_steps)

    def _accumulation(self, epoch: int) -> int:
        """Micro-batches an update in an epoch."""
        from ..callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler

        schedule = next((c for c in self.callbacks if isinstance(c, GradientAccumulationScheduler)), None)
        return self.accumulate_grad_batches if schedule is None else schedule.get_accumulate_grad_batches(epoch)

    # ---- callbacks -------------------------------------------------------------------------------------------------

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """The ``ModelCheckpoint`` callbacks."""
        from ..callbacks.model_checkpoint import ModelCheckpoint

        return [c for c in self.callbacks if isinstance(c, ModelCheckpoint)]

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first ``ModelCheckpoint``, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """The ``EarlyStopping`` callbacks."""
        from ..callbacks.early_stopping import EarlyStopping

        return [c for c in self.callbacks if isinstance(c, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first ``EarlyStopping``, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The progress bar, or None."""
        from ..callbacks.progress import ProgressBar

        return next((c for c in self.callbacks if isinstance(c, ProgressBar)), None)

    # ---- logging ---------------------------------------------------------------------------------------------------

    @property
    def logger(self) -> Logger | None:
        """The first logger, or None."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [] if logger is None else [logger]

    @property
    def log_dir(self) -> str | None:
        """The folder of this run, the same on every rank."""
        if self._log_dir is None:
            found = self.loggers[0].log_dir if self.loggers else self.default_root_dir
            return None if found is None else os.fspath(found)
        return self._log_dir

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Every value logged so far, by name: scalar tensors. What callbacks monitor."""
        return callback_values(self._metrics)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values for the progress bar. On an accelerator they may be one refresh old: nothing waits for it."""
        return bar_values(self._metrics)

    @property
    def logged_metrics(self) -> dict[str, float]:
        """The values last sent to the loggers."""
        return sent_values(self._metrics)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Send numbers to all loggers, with the epoch; does nothing on other ranks than 0.

        Args:
            metrics: numbers by name.
            step: place on the x axis; the number of updates made if None.
        """
        if self.is_global_zero:
            values = {"epoch": self.state.epoch, **metrics}
            at = self.state.updates if step is None else step
            for logger in self.loggers:
                logger.log_metrics(values, at)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0, above the progress bar if there is one."""
        if not self.is_global_zero:
            return
        bar = self.progress_bar_callback
        if bar is not None:
            bar.print(*args, **kwargs)
        else:
            print(*args, **kwargs)  # noqa: T201 - it is what was asked for

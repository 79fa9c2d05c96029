"""``Trainer``: its arguments, entry points and attributes. Each entry point creates a ``Run``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from .. import messages
from ..callbacks.base import Callback, accumulation_of
from ..callbacks.early_stopping import EarlyStopping
from ..callbacks.model_checkpoint import ModelCheckpoint
from ..callbacks.progress import ProgressBar
from ..checkpoint.checkpoint_io import CheckpointIO, TorchCheckpointIO
from ..checkpoint.restore import PARTS, Part, check_parts
from ..data.datamodule import DataModule
from ..loggers.base import Logger
from ..processes.accelerators import Accelerator, AcceleratorRegistry
from ..processes.devices import AcceleratorName
from ..processes.launch import told_if_stopped_early
from ..processes.signals import Action, check_signals
from ..profilers.base import Profiler
from ..settings import Row
from ..settings.constructors import check_names
from ..strategies.base import Strategy
from ..strategies.choose import StrategyName, choose_strategy
from ..strategies.compile_networks import Scope
from ..strategies.precision.base import Precision
from ..strategies.precision.choose import PrecisionAlias, PrecisionName
from ..strategies.sync_batch_norm import TorchSyncBatchNorm
from . import arguments as check
from .arguments import Request
from .compiled_step_checks import check_trainer
from .default_callbacks import choose_callbacks, choose_loggers
from .evaluation import show_results
from .joint_optimizer import check_together
from .logged_values import bar_values, callback_values, sent_values
from .module import TrainingModule
from .plugins import Plugin, Plugins, sort_plugins
from .run import Run
from .settings_arguments import settled
from .state import RunState
from .states import RunningStage, TrainerStatus

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .checkpoint_saver import Saver
    from .optimizers import SchedulerConfig


class Trainer:
    """Runs a :class:`TrainingModule` with ``fit``, ``validate``, ``test`` and ``predict``.

    If ``accelerator``, ``strategy``, ``precision``, ``accumulate_grad_batches`` or ``compile`` is left out, its value
    comes from the settings of ``paceline launch``, the environment or the file that ``paceline config`` writes. Any
    argument that is left out is also read from the environment variable ``PL_TRAINER_<ARGUMENT>``, as in Lightning.

    Args:
        accelerator: the kind of device: ``"auto"`` (the best available), ``"gpu"`` (CUDA, MPS or XPU), ``"cuda"``,
            ``"mps"``, ``"xpu"``, ``"tpu"``, ``"cpu"``, or the name of another device that a package adds to torch.
        strategy: how processes share the work: a name, or a Strategy object. ``"auto"`` runs one process on one device,
            and uses ``"ddp"`` on several devices. ``"single_device"`` and ``"cpu"`` run one process. ``"ddp"``,
            ``"ddp_spawn"``, ``"ddp_fork"`` and ``"ddp_notebook"`` keep a copy of the model in each process; add
            ``_find_unused_parameters_true`` to the name if the loss does not depend on every parameter.
            ``"fsdp"``, ``"fsdp_cpu_offload"`` and ``"hybrid_shard"`` shard weights, gradients and optimizer state.
            ``"model_parallel"`` splits every layer. ``"deepspeed"``, ``"deepspeed_stage_1"``, ``"deepspeed_stage_2"``,
            ``"deepspeed_stage_2_offload"``, ``"deepspeed_stage_3"`` and ``"deepspeed_stage_3_offload"`` use DeepSpeed
            ZeRO. Installed packages may add more names.
        devices: the devices on this machine: a number (``2``, ``"2"``; ``-1`` means all), a list (``[0, 1]``,
            ``"0,1"``), or ``"auto"`` for all devices of this kind. On a CPU, this is the number of processes;
            ``"auto"`` means one.
        num_nodes: the number of machines.
        precision: ``"32-true"`` (the default), ``"64-true"``, ``"16-true"``, ``"bf16-true"``, ``"16-mixed"``,
            ``"bf16-mixed"``, ``"fp8-mixed"``, ``"transformer-engine"``, ``"transformer-engine-float16"``,
            ``"bnb.nf4"``, ``"bnb.nf4-dq"``, ``"bnb.fp4"``, ``"bnb.fp4-dq"``, ``"bnb.int8"`` or
            ``"bnb.int8-training"``; the short forms ``"32"``, ``"64"``, ``"16"``, ``"bf16"`` and ``"fp8"`` (the last
            three mixed); the numbers 64, 32 and 16; or a Precision object.
        logger: a Logger or a list of Loggers; TensorBoard if True or None; no logger if False.
        callbacks: a Callback or a list of Callbacks. A progress bar, a model summary and a ``ModelCheckpoint`` are
            added by default.
        fast_dev_run: run this many batches in each stage, without logging or saving. True means 1; False or 0 turns
            this off.
        max_epochs: the total number of epochs, including those before a resume; -1 means no limit. If None, the limit
            is 1000, or there is none if ``max_steps`` or ``max_time`` is given.
        min_epochs: the number of epochs before ``should_stop`` (set by ``EarlyStopping``, for example) takes effect; 0
            if None.
        max_steps: the total number of optimizer steps, including those before a resume; -1 means no limit.
        min_steps: the number of optimizer steps before ``should_stop`` takes effect; 0 if None.
        max_time: stop after this much training time: ``"DD:HH:MM:SS"``, a timedelta, or a dict of its arguments, such
            as ``{"hours": 12}``. No limit if None.
        grace_seconds: stop this many seconds before ``max_time`` is up, to leave time for the current step, a
            validation and the last checkpoint.
        limit_train_batches: use this many batches (int) or this fraction of them (float from 0.0 to 1.0) in each epoch;
            all if None, and no training if 0.
        limit_val_batches: the same for each validation loader; no validation if 0.
        limit_test_batches: the same for each test loader.
        limit_predict_batches: the same for each prediction loader.
        overfit_batches: train and validate only on the first batches, without shuffling; the value is their number
            (int) or their fraction of all batches (float). 0 turns this off.
        val_check_interval: validate after this many training batches (int), after this fraction of an epoch (float from
            0.0 to 1.0), or after this much time (as for ``max_time``). If None, validate at the end of the epoch (1.0).
        check_val_every_n_epoch: validate only in every n-th epoch. If None, the batches of ``val_check_interval`` are
            counted across epochs; without ``val_check_interval``, validation runs after every epoch.
        num_sanity_val_steps: the number of validation batches to run before training; -1 means all of them, and 0 means
            none; 2 if None.
        log_every_n_steps: send step values to the loggers at every n-th step; 0 means never; 50 if None.
        enable_checkpointing: if None or True, add a ``ModelCheckpoint`` unless ``callbacks`` has one.
        enable_progress_bar: if None or True, add a ``RichProgressBar`` unless ``callbacks`` has a progress bar.
        enable_model_summary: if None or True, add a ``ModelSummary`` unless ``callbacks`` has one.
        accumulate_grad_batches: the number of batches whose gradients are accumulated for one optimizer step; 1 if
            None. If the last window of an epoch is shorter, its gradients are averaged over the batches in it.
        gradient_clip_val: the maximum norm or value of the gradients at each step; no clipping if None or 0.
        gradient_clip_algorithm: ``"norm"`` (the default) scales all gradients together; ``"value"`` clips each element.
        deterministic: if True, use only deterministic algorithms and raise for operations without one; if ``"warn"``,
            warn instead of raising; if None, keep torch's setting.
        benchmark: let cuDNN benchmark its convolution algorithms and use the fastest
            (``torch.backends.cudnn.benchmark``); if None, keep torch's setting.
        inference_mode: run ``validate``, ``test`` and ``predict`` under ``torch.inference_mode`` if True, under
            ``torch.no_grad`` if False. The validation of a fit always runs under ``torch.no_grad``.
        use_distributed_sampler: give each process its own shard of the data; if False, leave all loaders unchanged.
        profiler: find out where time is spent: ``"doctor"`` (what is slow, why, and what to change), ``"simple"`` (a
            table of actions), ``"advanced"`` (cProfile), ``"pytorch"`` (operators, trace, memory), or a Profiler
            object; no profiling if None.
        detect_anomaly: use torch's anomaly mode, and raise on a loss that is not finite. This is slow.
        barebones: switch off loggers, callbacks that are added by default, the sanity check and ``self.log``, to
            measure the bare loop.
        plugins: objects that replace parts of the Trainer, at most one of each kind: a Precision, a CheckpointIO (how
            checkpoints are written and read), a ClusterEnvironment (how a launcher tells a process its rank), or a
            LayerSync (how layers use the batches of all processes; TorchSyncBatchNorm has the same effect as
            ``sync_batchnorm=True``).
        sync_batchnorm: compute BatchNorm over the batches of all processes.
        reload_dataloaders_every_n_epochs: recreate the loaders every n epochs; 0 means never.
        default_root_dir: the folder for logs and checkpoints, unless a logger or callback has its own; the working
            directory if None. A URL, such as ``s3://bucket/run``, is used for checkpoints only; logs then go to the
            working directory.
        enable_autolog_hparams: log the hyperparameters from ``save_hyperparameters`` when a fit starts.
        compile: True or ``"networks"`` compiles the networks in place, ``"step"`` compiles the whole training step with
            its update, and ``"graphs"`` runs the compiled step as a CUDA graph. A dict sets arguments for
            ``torch.compile``, with one of these words as ``"scope"``. With None or False, nothing is compiled.
        signals: the action for each signal (a name or a number), such as ``{"SIGUSR2": "stop"}``. ``"stop"`` finishes
            the step, saves and ends the run; ``"requeue"`` also returns the SLURM job to the queue; None leaves the
            signal unhandled. By default, SIGTERM and SIGINT stop the run, and SIGUSR1 requeues a SLURM job.
    """

    settings_in_force: list[Row]

    @check_names(check.MOVED)
    @settled
    def __init__(
        self,
        *,
        accelerator: AcceleratorName | Accelerator = "auto",
        strategy: StrategyName | str | Strategy = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        precision: PrecisionName | PrecisionAlias | Precision | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: Callback | list[Callback] | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | Mapping[str, int] | None = None,
        grace_seconds: float = 0.0,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | Mapping[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int | None = None,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: check.ClipAlgorithm | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: check.ProfilerName | Profiler | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Plugin | list[Plugin] | None = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        enable_autolog_hparams: bool = True,
        compile: bool | Scope | Mapping[str, Any] | None = None,
        signals: Mapping[str | int, Action | None] | None = None,
    ) -> None:
        self.limit_train_batches = check.check_limit("limit_train_batches", limit_train_batches)
        self.limit_val_batches = check.check_limit("limit_val_batches", limit_val_batches)
        self.limit_test_batches = check.check_limit("limit_test_batches", limit_test_batches)
        self.limit_predict_batches = check.check_limit("limit_predict_batches", limit_predict_batches)
        self.overfit_batches = check.check_limit("overfit_batches", overfit_batches)
        self.max_steps = check.check_count("max_steps", max_steps, unlimited=True)
        self.min_epochs = check.check_count("min_epochs", min_epochs, none=True)
        self.min_steps = check.check_count("min_steps", min_steps, none=True)
        self.fast_dev_run = check.check_fast_dev_run(fast_dev_run)
        every = check.check_count("check_val_every_n_epoch", check_val_every_n_epoch, least=1, none=True)
        self.check_val_every_n_epoch = every
        self.val_check_interval, self.val_check_seconds = check.check_val_interval(val_check_interval, every)
        sanity = 2 if num_sanity_val_steps is None else num_sanity_val_steps
        self.num_sanity_val_steps = check.check_count("num_sanity_val_steps", sanity, unlimited=True)
        self.accumulate_grad_batches = check.check_accumulation(accumulate_grad_batches)
        self.gradient_clip_val, self.gradient_clip_algorithm = gradient_clip_val or None, gradient_clip_algorithm
        check.check_clipping(self.gradient_clip_val, gradient_clip_algorithm)
        every = 50 if log_every_n_steps is None else log_every_n_steps
        self.log_every_n_steps = check.check_count("log_every_n_steps", every) or 2**62  # 0 means never
        reload = check.check_count("reload_dataloaders_every_n_epochs", reload_dataloaders_every_n_epochs)
        self.reload_dataloaders_every_n_epochs = reload
        self.inference_mode = check.check_switch("inference_mode", inference_mode)
        self.use_distributed_sampler = check.check_switch("use_distributed_sampler", use_distributed_sampler)
        self.detect_anomaly = check.check_switch("detect_anomaly", detect_anomaly)
        self.barebones = check.check_switch("barebones", barebones)
        self.sync_batchnorm = check.check_switch("sync_batchnorm", sync_batchnorm)
        self.enable_autolog_hparams = check.check_switch("enable_autolog_hparams", enable_autolog_hparams)
        self.enable_checkpointing = check.check_switch("enable_checkpointing", enable_checkpointing, none=True)
        self.enable_progress_bar = check.check_switch("enable_progress_bar", enable_progress_bar, none=True)
        self.enable_model_summary = check.check_switch("enable_model_summary", enable_model_summary, none=True)
        self.benchmark = check.check_switch("benchmark", benchmark, none=True)
        self.deterministic = check.check_deterministic(deterministic, benchmark)
        self.compile: bool | Scope | Mapping[str, Any] = check.check_compile(compile)
        limits = {"limit_train_batches": limit_train_batches, "limit_val_batches": limit_val_batches}
        check.check_overfitting(overfit_batches, fast_dev_run=fast_dev_run, **limits)
        if self.fast_dev_run:
            self._shorten(int(self.fast_dev_run))
        else:
            self.max_epochs = check.check_count("max_epochs", max_epochs, none=True, unlimited=True)
            check.check_range("epochs", min_epochs, max_epochs)
            check.check_range("steps", min_steps, max_steps)
        if barebones:
            off = {"enable_checkpointing": enable_checkpointing, "enable_progress_bar": enable_progress_bar}
            off |= {"enable_model_summary": enable_model_summary, "num_sanity_val_steps": num_sanity_val_steps}
            off |= {"fast_dev_run": fast_dev_run, "detect_anomaly": detect_anomaly, "profiler": profiler}
            check.check_barebones(logger=logger, **off, log_every_n_steps=log_every_n_steps)
            self.num_sanity_val_steps = 0
        self.profiler = check.check_profiler(profiler)
        self.signals = check_signals(signals or {})
        self._place(sort_plugins(plugins), strategy, accelerator, devices, num_nodes, precision)
        check_trainer(self)
        self.default_root_dir = check.check_folder("default_root_dir", default_root_dir)
        self.loggers = choose_loggers(logger, self)
        self.callbacks: list[Callback] = choose_callbacks(callbacks, max_time, grace_seconds, self)
        #: The path that was assigned to `trainer.ckpt_path`; every entry point loads it until it is cleared.
        self.asked_ckpt_path: Any = None
        #: The last module that added callbacks, the Trainer's callbacks that these replaced, and the added callbacks.
        self.brought_callbacks: tuple[TrainingModule, list[Callback], list[Callback]] | None = None
        self.state = RunState()
        self.current_run = Run(self)

    def _place(self, plugins: Plugins, *where: Any) -> None:
        """Choose the strategy for the device arguments in ``where``, and use the parts that ``plugins`` contains."""
        self.strategy = choose_strategy(*where, plugins=plugins.precision, environment=plugins.environment)
        #: The user's object that makes layers use the batches of all processes; None for ``sync_batchnorm``.
        self.layer_sync = plugins.layer_sync
        if type(self.layer_sync) is TorchSyncBatchNorm:
            self.sync_batchnorm, self.layer_sync = True, None
        elif self.layer_sync is not None and self.sync_batchnorm:
            raise ValueError(
                f"Trainer(sync_batchnorm=True, plugins=[{type(self.layer_sync).__name__}(...)]) asks for two ways to "
                "synchronize layers. Leave out sync_batchnorm or the plugin."
            )
        self.checkpoint_io: CheckpointIO = plugins.checkpoint_io or self.strategy.checkpoint_io or TorchCheckpointIO()
        self.strategy.checkpoint_io = self.checkpoint_io

    def _shorten(self, batches: int) -> None:
        """Make every run a dry run with this many batches in each stage."""
        self.max_epochs, self.max_steps, self.num_sanity_val_steps = 1, batches, 0
        self.check_val_every_n_epoch, self.val_check_interval, self.val_check_seconds = 1, 1.0, None
        self.limit_train_batches = self.limit_val_batches = batches
        self.limit_test_batches = self.limit_predict_batches = batches
        self.log_every_n_steps = 1

    # ---- entry points ----------------------------------------------------------------------------------------------

    def fit(
        self,
        model: TrainingModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: Literal["last", "auto", "best"] | str | Path | None = None,
        weights_only: bool | None = None,
        restore: Part | Iterable[Part] = PARTS,
    ) -> None:
        """Train the module.

        Args:
            model: the module.
            train_dataloaders: a DataLoader, any iterable of batches, a list or dict of those, or a DataModule. If None,
                ``train_dataloader()`` of the DataModule or, if there is none, of the module is called.
            val_dataloaders: a validation loader or a list of loaders. If None, ``val_dataloader()`` is called in the
                same way.
            datamodule: a DataModule to use instead of loaders.
            ckpt_path: resume from this checkpoint, a path or a URL. ``"last"`` resumes from the newest valid checkpoint
                in the folders of this run and of earlier runs of the same command; if there is none, the fit warns and
                starts fresh. ``"auto"`` does the same without the warning, for a command that may be running for the
                first time. ``"best"`` resumes from the best checkpoint of the previous run. None starts fresh or, in a
                job that SLURM requeued, means ``"auto"``.
            weights_only: if False, also load pickled objects; loading them can run code that the file specifies.
            restore: which parts of ``ckpt_path`` to restore. With all of them, the default, the fit continues bit for
                bit as the saved run would have. ``"model"`` restores the weights and the DataModule's state.
                ``"optimizer"`` restores the optimizers' state (such as momentum) and the loss scale. ``"schedulers"``
                restores the schedulers and the optimizers' settings (learning rate, weight decay, ...); without it, the
                settings from ``configure_optimizers`` apply. ``"loops"`` restores the epoch, the step, the position in
                the data and in the accumulation window, and the values logged so far in the epoch; without it, the fit
                starts at epoch 0. ``"rng"`` restores the RNG states, and ``"callbacks"`` the callbacks' states.

        Raises:
            ValueError: ``restore`` has an unknown name.
        """
        loaders = {"train": train_dataloaders, "validate": val_dataloaders}
        parts = check_parts(restore)
        self._begin(Request("fit", model, datamodule, loaders, ckpt_path, weights_only=weights_only, restore=parts))()
        self.profiler.ended()

    def validate(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        ckpt_path: Literal["last", "auto", "best"] | str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run ``validation_step`` over the validation data; return the logged values, one dict per loader.

        Args:
            model: the module; if None, the last run's module, with the weights of its best checkpoint.
            dataloaders: a loader or a list of loaders; if None, those of the DataModule or the module.
            ckpt_path: the checkpoint to load the weights from: a path, ``"best"``, ``"last"`` or ``"auto"``.
            verbose: print the values as a table.
            datamodule: a DataModule to use instead of loaders.
            weights_only: if False, also load pickled objects; loading them can run code that the file specifies.
        """
        loaders = {"validate": dataloaders}
        show = show_results if verbose else None
        return self._evaluate(
            Request("validate", model, datamodule, loaders, ckpt_path, show_results=show, weights_only=weights_only)
        )

    def test(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        ckpt_path: Literal["last", "auto", "best"] | str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Like :meth:`validate`, but run ``test_step`` over the test data."""
        loaders = {"test": dataloaders}
        show = show_results if verbose else None
        return self._evaluate(
            Request("test", model, datamodule, loaders, ckpt_path, show_results=show, weights_only=weights_only)
        )

    def _evaluate(self, request: Request) -> list[dict[str, float]]:
        results = self._begin(request)()
        if request.show_results is not None and self.is_global_zero:
            request.show_results(results, request.fn)
        return results

    @overload
    def predict(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: Literal[True] | None = None,
        ckpt_path: Literal["last", "auto", "best"] | str | Path | None = None,
        weights_only: bool | None = None,
        gather: bool = False,
    ) -> list[Any]: ...
    @overload
    def predict(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        *,
        return_predictions: Literal[False],
        ckpt_path: Literal["last", "auto", "best"] | str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None: ...
    @overload
    def predict(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: Literal["last", "auto", "best"] | str | Path | None = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None: ...

    def predict(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: Literal["last", "auto", "best"] | str | Path | None = None,
        weights_only: bool | None = None,
        gather: bool = False,
    ) -> list[Any] | None:
        """Run ``predict_step`` over the prediction data.

        Args:
            model: the module; if None, the last run's module, with the weights of its best checkpoint.
            dataloaders: a loader or a list of loaders; if None, those of the DataModule or the module.
            datamodule: a DataModule to use instead of loaders.
            return_predictions: whether to keep the predictions; None means True. If False, only callbacks such as
                ``BasePredictionWriter`` receive them, batch by batch.
            ckpt_path: the checkpoint to load the weights from: a path, ``"best"``, ``"last"`` or ``"auto"``.
            weights_only: if False, also load pickled objects; loading them can run code that the file specifies.
            gather: with several processes, return the predictions of all processes, in data order, on each process; if
                False, each process returns only its own predictions.

        Returns:
            The outputs of ``predict_step``, a list with one entry per batch (with several loaders, a list of such
            lists); None if ``return_predictions`` is False.
        """
        keep, loaders = return_predictions is not False, {"predict": dataloaders}
        if gather and not keep:
            raise ValueError(
                "Trainer.predict got return_predictions=False and gather=True, so there is nothing to gather. Leave "
                "out one of them."
            )
        self._begin(Request("predict", model, datamodule, loaders, ckpt_path, keep, gather, weights_only))()
        return self.predictions if keep else None

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, storage_options: Any = None) -> None:
        """Write a checkpoint of the run atomically, and return once it is on disk.

        Every rank must call this. If a background write is in progress, it is finished first.

        Args:
            filepath: a path or a URL such as ``s3://bucket/run/x.ckpt``; a folder if the strategy writes sharded
                checkpoints.
            weights_only: leave out optimizers, callbacks and RNG states; a run cannot resume from such a file.
            storage_options: passed to a custom CheckpointIO; must be None without a custom CheckpointIO.

        Raises:
            AttributeError: no module is attached yet.
            OSError: the file could not be written; an older file with that name is left unchanged.
        """
        if self.current_run.module is None:
            raise AttributeError(
                f"Trainer.save_checkpoint({str(filepath)!r}) was called before the Trainer had a module to save. Call "
                "fit, validate, test or predict first."
            )
        self.saver.save([filepath], bool(weights_only), storage_options=storage_options)

    @property
    def has_own_save(self) -> bool:
        """Whether a subclass or the program replaced :meth:`save_checkpoint`; if so, callbacks call it to save."""
        save: Any = self.save_checkpoint
        return inspect.unwrap(getattr(save, "__func__", save)) is not _save_checkpoint

    @property
    def saver(self) -> Saver:
        """The object that writes the run's checkpoints, one at a time."""
        return self.current_run.saver

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name != "current_run"}
        return {"own": own, "run": self.current_run.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state["own"])
        self.current_run = Run(self)
        self.current_run.load_state_dict(state["run"])

    def __copy__(self) -> Trainer:
        double = object.__new__(type(self))
        vars(double).update(vars(self))  # both share the run; a pickled Trainer has a copy of it
        return double

    def _begin(self, request: Request) -> Callable[[], Any]:
        """Return a function that runs the request, in this process or in those that the strategy's launcher starts."""
        check.check_request(self.state.fn, request)
        launcher = self.strategy.launcher
        if launcher is not None:
            return partial(self._run_in_processes, launcher, request)
        self.current_run = Run(self, request, self.current_run)
        return self.current_run.execute

    def _run_in_processes(self, launcher: Callable[..., Any], request: Request) -> Any:
        """Run the request in the processes that the launcher starts."""
        with told_if_stopped_early(len(self.strategy.device_ids)):
            from .multiprocess_run import run_in_processes

            return run_in_processes(self, launcher, request)

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Context manager in which new layers are created on the run's device and in its dtype.

        Args:
            empty_init: if True, do not initialize the weights, because they will be loaded. Under a strategy that
                shards weights, the layers use no memory until each process creates its own shard with the initial
                values.
        """
        return self.strategy.module_init_context(empty_init)

    # ---- state of the run ------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """The current training epoch, 0-based; between epochs, the number of finished epochs."""
        return self.state.epoch

    @property
    def global_step(self) -> int:
        """The number of optimizer steps in all epochs; manual optimization counts the steps of every optimizer."""
        return self.state.global_step

    @property
    def is_last_batch(self) -> bool:
        """Whether the current training batch is the last of its epoch."""
        return self.state.is_last_batch

    @property
    def should_stop(self) -> bool:
        """Whether a stop was requested. Set this property to True to stop training after the current batch.

        Training continues at least until ``min_epochs`` and ``min_steps``.
        """
        return self.state.should_stop

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self.state.should_stop = bool(stop)
        self.state.stop_requested |= self.state.should_stop

    def may_stop(self) -> bool:
        """Return True if ``should_stop`` takes effect now, that is, after ``min_epochs`` and ``min_steps``."""
        epochs, steps = self.min_epochs or 0, self.min_steps or 0
        if self.state.epoch >= epochs and self.state.global_step >= steps:
            return True
        messages.info_once(
            f"A stop was requested, but training continues until min_epochs={epochs} and min_steps={steps}."
        )
        return False

    @property
    def training(self) -> bool:
        """Whether the training part of a fit is running."""
        return self.state.stage == "train"

    @property
    def validating(self) -> bool:
        """Whether validation is running, on its own or as part of ``fit``."""
        return self.state.stage == "validate"

    @property
    def testing(self) -> bool:
        """Whether ``test`` is running."""
        return self.state.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether ``predict`` is running."""
        return self.state.stage == "predict"

    @property
    def sanity_checking(self) -> bool:
        """Whether the sanity check (a few validation batches before training) is running."""
        return self.state.stage == "sanity_check"

    @sanity_checking.setter
    def sanity_checking(self, checking: bool) -> None:
        self.state.stage = RunningStage.SANITY_CHECKING if checking else None

    @property
    def evaluating(self) -> bool:
        """Whether a validation or test is running."""
        return self.state.stage in ("validate", "test", "sanity_check")

    @property
    def interrupted(self) -> bool:
        """Whether the last run ended early."""
        return self.state.status is TrainerStatus.INTERRUPTED

    @property
    def received_sigterm(self) -> bool:
        """Whether SIGTERM was received; if so, the run ends after the current batch."""
        return self.state.signum == 15

    @property
    def logs_this_step(self) -> bool:
        """Whether the values of the current or just completed update go to the loggers."""
        state = self.state
        return (state.updates if state.stepped else state.updates + 1) % self.log_every_n_steps == 0

    # ---- model and optimization ------------------------------------------------------------------------------------

    @property
    def training_module(self) -> TrainingModule:
        """The user's module, unwrapped."""
        module = self.current_run.module
        if module is None:
            raise AttributeError("This Trainer has no module yet. Call fit, validate, test or predict first.")
        return module

    @property
    def lightning_module(self) -> TrainingModule | None:
        """Lightning's name for :attr:`training_module`; None if the Trainer has no module yet."""
        return self.current_run.module

    @property
    def model(self) -> Any:
        """The module as wrapped by the strategy, or None."""
        return self.current_run.model

    @model.setter
    def model(self, model: Any) -> None:
        self.current_run.model = model

    @property
    def datamodule(self) -> DataModule | None:
        """The DataModule of the last run, if it had one."""
        return self.current_run.datamodule

    @datamodule.setter
    def datamodule(self, datamodule: DataModule | None) -> None:
        self.current_run.datamodule = datamodule

    @property
    def optimizers(self) -> list[Optimizer]:
        """The fit's optimizers. A list assigned to this property takes effect in the next epoch."""
        return self.current_run.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        module = self.current_run.module
        if module is not None and module.automatic_optimization:
            check_together(module, optimizers, "trainer.optimizers was set to")
        self.current_run.optimizers = optimizers

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The learning rate schedulers of the fit, with their intervals."""
        return self.current_run.lr_scheduler_configs

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, configs: list[SchedulerConfig]) -> None:
        self.current_run.lr_scheduler_configs = configs

    @property
    def predictions(self) -> Any:
        """The predictions that the last ``predict`` collected; None if it kept none."""
        return self.current_run.predictions

    @property
    def predict_batch_indices(self) -> list[list[list[int]]]:
        """The sample indices of each batch so far, for each ``predict`` loader, if they are known."""
        return self.current_run.predict_batch_indices

    @property
    def current_batch_indices(self) -> list[int] | None:
        """The sample indices of the current ``predict`` batch; None if they are not known."""
        return self.current_run.current_batch_indices

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the last run loaded, or None. Entry points load a path assigned to this property."""
        path = self.current_run.ckpt_path
        return None if path is None else str(path)

    @ckpt_path.setter
    def ckpt_path(self, path: Any) -> None:
        self.current_run.ckpt_path = self.asked_ckpt_path = path

    @property
    def precision_plugin(self) -> Precision:
        """The Precision in use."""
        return self.strategy.precision

    @property
    def precision(self) -> str:
        """The name of the Precision in use."""
        return self.strategy.precision.precision

    @property
    def scaler(self) -> Any:
        """The fp16 loss scaler, or None."""
        return self.strategy.precision.scaler

    @property
    def accelerator(self) -> Accelerator:
        """The device type; it compares equal to its name, such as ``"cpu"`` or ``"cuda"``."""
        return AcceleratorRegistry[self.strategy.device.type]()

    @property
    def device_ids(self) -> list[int]:
        """The device index of each process on this node; on a CPU, 0, 1, ..."""
        return self.strategy.device_ids

    @property
    def num_devices(self) -> int:
        """The number of devices on this node."""
        return self.world_size // self.num_nodes

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return self.strategy.num_nodes

    @property
    def world_size(self) -> int:
        """The number of processes on all machines."""
        return self.strategy.world_size

    @property
    def global_rank(self) -> int:
        """This process's rank among all processes."""
        return self.strategy.global_rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its machine."""
        return self.strategy.local_rank

    @property
    def node_rank(self) -> int:
        """The rank of this process's machine."""
        return self.strategy.node_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this process has global rank 0 and therefore writes files and prints messages."""
        return self.strategy.is_global_zero

    # ---- data ------------------------------------------------------------------------------------------------------

    @property
    def train_dataloader(self) -> Any:
        """The training loader, a list or dict of loaders, or None before they are created."""
        return self.current_run.source.shown("train")

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader, a list or dict of loaders, or None before they are created."""
        return self.current_run.source.shown("validate")

    @property
    def test_dataloaders(self) -> Any:
        """The test loader, a list or dict of loaders, or None before they are created."""
        return self.current_run.source.shown("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loader, a list or dict of loaders, or None before they are created."""
        return self.current_run.source.shown("predict")

    @property
    def num_training_batches(self) -> int | float:
        """The number of training batches per epoch; inf for a loader without a length."""
        return self.current_run.source.num_training_batches

    @property
    def num_val_batches(self) -> list[int | float]:
        """The number of batches in each validation loader."""
        return list(self.current_run.source.eval.get("validate", ([], []))[1])

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """The number of batches that a fit's sanity check runs from each validation loader."""
        request = self.current_run.request
        if request is None or request.fn != "fit":
            return []
        steps = self.num_sanity_val_steps
        return [n if steps == -1 else min(n, steps) for n in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[int | float]:
        """The number of batches in each test loader."""
        return list(self.current_run.source.eval.get("test", ([], []))[1])

    @property
    def num_predict_batches(self) -> list[int | float]:
        """The number of batches in each prediction loader."""
        return list(self.current_run.source.eval.get("predict", ([], []))[1])

    @property
    def enable_validation(self) -> bool:
        """Whether this fit has a validation loader and a validation_step, and limit_val_batches is not 0.

        False before the first run.
        """
        return self.current_run.module is not None and self.current_run.source.validates()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Arguments for a DistributedSampler; None with a single process."""
        return {"num_replicas": self.world_size, "rank": self.global_rank} if self.world_size > 1 else None

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of optimizer steps in the fit, for schedules that need the total.

        Reading this property creates the training loader. If the number of batches is unknown (the loader has no
        length, and ``limit_train_batches`` is not given) or the epochs are not limited, the value is ``max_steps``, or
        inf without ``max_steps``.
        """
        if self.max_epochs in (None, -1) or self.max_steps == 0:
            return math.inf if self.max_steps == -1 else self.max_steps
        self.current_run.source.train()
        batches = self.num_training_batches
        if batches == math.inf:
            return math.inf if self.max_steps == -1 else self.max_steps
        windows = [accumulation_of(self.callbacks, epoch) for epoch in range(self.max_epochs or 0)]
        total = sum(math.ceil(batches / (window or self.accumulate_grad_batches)) for window in windows)
        return total if self.max_steps == -1 else min(total, self.max_steps)

    # ---- callbacks -------------------------------------------------------------------------------------------------

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """The ``ModelCheckpoint`` callbacks."""
        return [c for c in self.callbacks if isinstance(c, ModelCheckpoint)]

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first ``ModelCheckpoint``, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """The ``EarlyStopping`` callbacks."""
        return [c for c in self.callbacks if isinstance(c, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first ``EarlyStopping``, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The progress bar, or None."""
        return next((c for c in self.callbacks if isinstance(c, ProgressBar)), None)

    # ---- logging ---------------------------------------------------------------------------------------------------

    @property
    def loggers(self) -> list[Logger]:
        """The loggers; setting this property to None removes them."""
        return vars(self)["loggers"]

    @loggers.setter
    def loggers(self, loggers: Iterable[Logger] | None) -> None:
        vars(self)["loggers"] = list(loggers or ())

    @property
    def logger(self) -> Logger | None:
        """The first logger, or None."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [] if logger is None else [logger]

    @property
    def log_dir(self) -> str | None:
        """The folder for this run's logs, the same on every rank."""
        return self.current_run.log_dir

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """All values logged so far, by name, as scalar tensors. Callbacks monitor these values."""
        return callback_values(self.current_run.metrics)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values for the progress bar.

        On an accelerator, they may lag by one refresh of the progress bar, because reading them does not wait for the
        device.
        """
        return bar_values(self.current_run.metrics)

    @property
    def logged_metrics(self) -> dict[str, float]:
        """The values last sent to the loggers."""
        return sent_values(self.current_run.metrics)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Send numbers and the epoch to all loggers; does nothing on ranks other than 0.

        Args:
            metrics: numbers by name.
            step: the position on the x axis; the number of updates so far if None.
        """
        at = self.state.x_axis(self.state.updates) if step is None else step
        self.current_run.send_metrics({"epoch": self.state.epoch, **metrics}, at)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0, above the progress bar if there is one."""
        if not self.is_global_zero:
            return
        bar = self.progress_bar_callback
        if bar is not None:
            bar.print(*args, **kwargs)
        else:
            print(*args, **kwargs)  # noqa: T201 - printing is what the caller asked for


_save_checkpoint = Trainer.save_checkpoint

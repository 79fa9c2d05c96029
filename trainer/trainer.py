"""``Trainer``: its arguments, entry points and attributes. Each entry point makes a ``Run``."""

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
from ..callbacks.base import Callback, replaced
from ..callbacks.early_stopping import EarlyStopping
from ..callbacks.model_checkpoint import ModelCheckpoint
from ..callbacks.progress import ProgressBar
from ..checkpoint.checkpoint_io import CheckpointIO, TorchCheckpointIO
from ..checkpoint.restore import PARTS, Part, check_parts
from ..data.datamodule import DataModule
from ..loggers.base import Logger
from ..processes.accelerators import Accelerator, AcceleratorRegistry
from ..processes.devices import AcceleratorName
from ..processes.signals import Action, check_signals
from ..profilers.base import Profiler
from ..settings import Row
from ..settings.constructors import check_names
from ..strategies.base import Strategy
from ..strategies.choose import StrategyName, choose_strategy
from ..strategies.compile_networks import Scope
from ..strategies.precision.base import Precision
from ..strategies.precision.choose import PrecisionAlias, PrecisionName
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
    """Runs a :class:`TrainingModule`: ``fit``, ``validate``, ``test``, ``predict``.

    Without ``accelerator``, ``strategy``, ``precision``, ``accumulate_grad_batches`` or ``compile``, the settings of
    ``paceline launch``, the environment or the file that ``paceline config`` writes apply. Any argument that is left
    out is also read from the variable ``PL_TRAINER_<ARGUMENT>``, as in Lightning.

    Args:
        accelerator: kind of device: ``"auto"`` (CUDA, then MPS, then CPU), ``"gpu"`` (CUDA, then MPS), ``"cuda"``,
            ``"mps"`` or ``"cpu"``.
        strategy: how processes share the work: a name, or a Strategy object. ``"auto"``: one process for one device,
            ``"ddp"`` for several. ``"single_device"``, ``"cpu"``: one process. ``"ddp"``, ``"ddp_spawn"``,
            ``"ddp_fork"``, ``"ddp_notebook"``: a copy of the model in each process; with
            ``_find_unused_parameters_true`` (or ``_false``) after the name, for losses that do not reach every
            parameter. ``"fsdp"``, ``"fsdp_cpu_offload"``, ``"hybrid_shard"``: shards weights, gradients and optimizer
            state. ``"model_parallel"``: splits every layer. ``"deepspeed"``, ``"deepspeed_stage_1"``,
            ``"deepspeed_stage_2"``, ``"deepspeed_stage_2_offload"``, ``"deepspeed_stage_3"``,
            ``"deepspeed_stage_3_offload"``: DeepSpeed ZeRO. Installed packages may add names.
        devices: on this machine, how many (``2``, ``"2"``; ``-1``: all), which (``[0, 1]``, ``"0,1"``), or ``"auto"``:
            all CUDA GPUs, else one device. On a CPU, the number of processes.
        num_nodes: number of machines.
        precision: ``"32-true"`` (None means this), ``"64-true"``, ``"16-true"``, ``"bf16-true"``, ``"16-mixed"`` or
            ``"bf16-mixed"``; for short ``"32"``, ``"64"``, ``"16"`` (mixed), ``"bf16"`` (mixed), also as a number; or
            a Precision object.
        logger: True or None: TensorBoard; False: none; or one Logger or several.
        callbacks: one Callback or several. A progress bar, a model summary and a ``ModelCheckpoint`` are added.
        fast_dev_run: run this many batches of each kind, and neither log nor save. True: 1; False or 0: off.
        max_epochs: epochs to train in total, including those before a resume; -1: no limit. None: 1000, or no limit if
            ``max_steps`` or ``max_time`` is given.
        min_epochs: epochs to train before ``should_stop`` (from ``EarlyStopping``, say) takes effect. None: 0.
        max_steps: optimizer steps to make in total, including those before a resume; -1: no limit.
        min_steps: optimizer steps to make before ``should_stop`` takes effect. None: 0.
        max_time: stop after this much training time: ``"DD:HH:MM:SS"``, a timedelta, or its arguments in a dict, such
            as ``{"hours": 12}``. None: no limit.
        grace_seconds: stop this many seconds before ``max_time`` is up, to leave time for the current step, a
            validation and the last checkpoint.
        limit_train_batches: use this many batches (int) or this fraction of them (float from 0.0 to 1.0) in each epoch.
            None: all; 0: no training.
        limit_val_batches: the same for each validation loader; 0: no validation.
        limit_test_batches: the same for each test loader.
        limit_predict_batches: the same for each loader to predict from.
        overfit_batches: train and validate on the same first batches, unshuffled: this many (int), or this fraction
            (float). 0: off.
        val_check_interval: validate after this many training batches (int), after this fraction of an epoch (float from
            0.0 to 1.0), or after this much time (as for ``max_time``). None: 1.0, at the end of the epoch.
        check_val_every_n_epoch: validate only in every n-th epoch. None: the batches of ``val_check_interval`` are
            counted across epochs.
        num_sanity_val_steps: validation batches to run before training; -1: all; 0: none. None: 2.
        log_every_n_steps: send step values to the loggers at every n-th step; 0: never. None: 50.
        enable_checkpointing: None or True: add a ``ModelCheckpoint`` if ``callbacks`` has none; False: do not.
        enable_progress_bar: the same with a ``RichProgressBar``.
        enable_model_summary: the same with a ``ModelSummary``.
        accumulate_grad_batches: batches whose gradients make one optimizer step. A shorter last window of an epoch is
            averaged over the batches in it. None: 1.
        gradient_clip_val: the maximum norm or value of the gradients at each step. None or 0: no clipping.
        gradient_clip_algorithm: ``"norm"``: scale all gradients together; ``"value"``: cut each element. None:
            ``"norm"``.
        deterministic: True: only deterministic algorithms, with an error for an operation that has none; ``"warn"``:
            with a warning. None: keep torch's setting.
        benchmark: let cuDNN try which convolution is fastest (``torch.backends.cudnn.benchmark``). None: keep torch's
            setting.
        inference_mode: True: evaluate under ``torch.inference_mode``; False: under ``torch.no_grad``.
        use_distributed_sampler: give each process its part of the data. False: leave all loaders as they are.
        profiler: find where the time goes: ``"doctor"`` (what is slow, why, what to change), ``"simple"`` (a table of
            actions), ``"advanced"`` (cProfile), ``"pytorch"`` (operators, trace, memory), or a Profiler object. None:
            no profiling.
        detect_anomaly: use torch's anomaly mode, and raise on a loss that is not finite. Slow.
        barebones: switch off loggers, callbacks added by default, the sanity check and ``self.log``, to measure the
            bare loop.
        plugins: objects that replace parts, one of each kind: a Precision, a CheckpointIO (how checkpoints are
            written and read), a ClusterEnvironment (how a launcher tells a process its rank), a TorchSyncBatchNorm
            (as ``sync_batchnorm=True``).
        sync_batchnorm: compute BatchNorm over the batches of all processes.
        reload_dataloaders_every_n_epochs: re-create the loaders every n epochs; 0: never.
        default_root_dir: folder of logs and checkpoints, unless a logger or callback has its own. None: the working
            directory. A URL, such as ``s3://bucket/run``, is for checkpoints only; logs then go to the working
            directory.
        enable_autolog_hparams: log what ``save_hyperparameters`` kept when a fit starts.
        compile: True or ``"networks"``: compile the networks in place; ``"step"``: the whole training step with its
            update; ``"graphs"``: that as a CUDA graph. Or a dict of arguments for ``torch.compile``, with one of these
            words as ``"scope"``. None or False: do not compile.
        signals: what a signal does, by name or number, such as ``{"SIGUSR2": "stop"}``. ``"stop"``: finish the step,
            save, end the run; ``"requeue"``: also give the SLURM job back to the queue; None: leave the signal alone.
            By default SIGTERM and SIGINT stop, and SIGUSR1 in a SLURM job requeues.
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
        self.log_every_n_steps = check.check_count("log_every_n_steps", every) or 2**62
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
            self.max_epochs = check.check_max_epochs(max_epochs, max_steps, max_time)
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
        self.asked_ckpt_path: Any = None
        self.brought_callbacks: tuple[TrainingModule, list[Callback], list[Callback]] | None = None
        self.state = RunState()
        self.current_run = Run(self)

    def _place(self, plugins: Plugins, *where: Any) -> None:
        """Choose the strategy for the arguments in ``where``, and the parts that plugins replace."""
        self.strategy = choose_strategy(*where, plugins=plugins.precision, environment=plugins.environment)
        self.sync_batchnorm = self.sync_batchnorm or plugins.sync_batchnorm
        self.checkpoint_io: CheckpointIO = plugins.checkpoint_io or self.strategy.checkpoint_io or TorchCheckpointIO()
        self.strategy.checkpoint_io = self.checkpoint_io

    def _shorten(self, batches: int) -> None:
        """Make every run a dry run with this many batches of each kind."""
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
        """Train.

        Args:
            model: the module.
            train_dataloaders: a DataLoader, any iterable over batches, a list or dict of those, or a DataModule. None:
                the DataModule's, else the module's ``train_dataloader()``.
            val_dataloaders: a validation loader, or several. None: likewise.
            datamodule: a DataModule, instead of loaders.
            ckpt_path: resume from this checkpoint, a path or a URL. ``"last"``: from the newest valid one in the
                folders of this run and of earlier starts of the same command; if there is none, warn and start fresh.
                ``"auto"``: the same without the warning, for a command that may be its first start. ``"best"``: from
                the best one of the previous run. None: start fresh (in a job that SLURM requeued: ``"auto"``).
            weights_only: False also loads what the checkpoint holds as objects, which runs code that the file names.
            restore: which parts of ``ckpt_path`` to take. All of them, the default, continue bit for bit as the saved
                run would have. ``"model"``: weights and the DataModule's state. ``"optimizer"``: the optimizers' state
                (momentum, say) and the loss scale. ``"schedulers"``: schedulers, and the optimizers' settings (learning
                rate, weight decay, ...); without it, the settings from ``configure_optimizers`` apply. ``"loops"``:
                epoch, step, position in the data and in the accumulation window, and what was logged so far in the
                epoch; without it, the fit starts at epoch 0. ``"rng"``: random states. ``"callbacks"``: the callbacks'
                states.

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
        ckpt_path: Literal["best", "last"] | str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run ``validation_step`` over the validation data; returns the logged values, one dict for each loader.

        Args:
            model: the module. None: the last run's module, with the weights of its best checkpoint.
            dataloaders: one loader or several. None: from the DataModule or the module.
            ckpt_path: load the weights of this checkpoint first: a path, ``"best"`` or ``"last"``.
            verbose: print the values as a table.
            datamodule: a DataModule, instead of loaders.
            weights_only: False also loads what the checkpoint holds as objects, which runs code that the file names.
        """
        loaders = {"validate": dataloaders}
        request = Request("validate", model, datamodule, loaders, ckpt_path, weights_only=weights_only)
        return self._evaluate(request, verbose)

    def test(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        ckpt_path: Literal["best", "last"] | str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run ``test_step`` over the test data. Arguments and result as for :meth:`validate`."""
        loaders = {"test": dataloaders}
        request = Request("test", model, datamodule, loaders, ckpt_path, weights_only=weights_only)
        return self._evaluate(request, verbose)

    def _evaluate(self, request: Request, verbose: bool) -> list[dict[str, float]]:
        results = self._begin(request)()
        if verbose and self.is_global_zero:
            show_results(results, request.fn)
        return results

    @overload
    def predict(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: Literal[True] | None = None,
        ckpt_path: Literal["best", "last"] | str | Path | None = None,
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
        ckpt_path: Literal["best", "last"] | str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None: ...
    @overload
    def predict(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: Literal["best", "last"] | str | Path | None = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None: ...

    def predict(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: Literal["best", "last"] | str | Path | None = None,
        weights_only: bool | None = None,
        gather: bool = False,
    ) -> list[Any] | None:
        """Run ``predict_step`` over the data to predict from.

        Args:
            model: the module. None: the last run's module, with the weights of its best checkpoint.
            dataloaders: one loader or several. None: from the DataModule or the module.
            datamodule: a DataModule, instead of loaders.
            return_predictions: False: keep nothing; callbacks get each batch as it comes (``BasePredictionWriter``).
                None means True.
            ckpt_path: load the weights of this checkpoint first: a path, ``"best"`` or ``"last"``.
            weights_only: False also loads what the checkpoint holds as objects, which runs code that the file names.
            gather: with several processes, return the batches of all of them, in the order of the data, on each one.
                False: each process returns its own.

        Returns:
            What ``predict_step`` returned, a list with one entry for each batch (with several loaders a list of such
            lists); None with ``return_predictions=False``.
        """
        keep, loaders = return_predictions is not False, {"predict": dataloaders}
        if gather and not keep:
            raise ValueError("Trainer.predict(return_predictions=False, gather=True): there is nothing to gather.")
        self._begin(Request("predict", model, datamodule, loaders, ckpt_path, keep, gather, weights_only))()
        return self.predictions if keep else None

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, storage_options: Any = None) -> None:
        """Write a checkpoint of the run, whole or not at all, and return when it is on the disk.

        Every rank must call this. A background write is finished first.

        Args:
            filepath: a path or a URL such as ``s3://bucket/run/x.ckpt``; a folder under a strategy that writes
                sharded checkpoints.
            weights_only: leave out optimizers, callbacks and random states; such a file cannot be resumed from.
            storage_options: passed to your own CheckpointIO; otherwise it must be None.

        Raises:
            AttributeError: no module is attached yet.
            OSError: the file could not be written; an older file of that name is untouched.
        """
        if self.current_run.module is None:
            raise AttributeError(
                f"Trainer.save_checkpoint({str(filepath)!r}): there is no module to save yet. Call fit (or validate, "
                "test, predict) first."
            )
        self.saver.save([filepath], bool(weights_only), storage_options=storage_options)

    @property
    def has_own_save(self) -> bool:
        """Whether a subclass or the program replaced :meth:`save_checkpoint`; callbacks then save with that."""
        save: Any = self.save_checkpoint
        return inspect.unwrap(getattr(save, "__func__", save)) is not _save_checkpoint

    @property
    def saver(self) -> Saver:
        """Writes the checkpoints of the run, one at a time."""
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
        vars(double).update(vars(self))
        return double

    def _begin(self, request: Request) -> Callable[[], Any]:
        """Prepare a run of the request, here or in the processes that the strategy's launcher starts."""
        check.check_request(self.state.fn, request)
        launcher = self.strategy.launcher
        if launcher is not None:
            return partial(self._run_in_processes, launcher, request)
        self.current_run = Run(self, request, self.current_run)
        return self.current_run.execute

    def _run_in_processes(self, launcher: Callable[..., Any], request: Request) -> Any:
        """Run in the processes that the launcher starts."""
        from ..processes.launch import told_if_stopped_early

        with told_if_stopped_early(len(self.strategy.device_ids)):
            from .multiprocess_run import run_in_processes

            return run_in_processes(self, launcher, request)

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Context in which layers are created on the run's device and in its dtype.

        Args:
            empty_init: True leaves their initial values out, for weights that will be loaded; under a strategy that
                shards they have no memory either, until each process gets its part with the values.
        """
        return self.strategy.module_init_context(empty_init)

    # ---- state of the run ------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """The current training epoch, 0-based; between epochs, the number of finished epochs."""
        return self.state.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps made, over all epochs; under manual optimization also over all optimizers."""
        return self.state.global_step

    @property
    def is_last_batch(self) -> bool:
        """Whether the current training batch is the last of its epoch."""
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
        """Whether ``should_stop`` takes effect yet: only after ``min_epochs`` and ``min_steps``."""
        epochs, steps = self.min_epochs or 0, self.min_steps or 0
        if self.state.epoch >= epochs and self.state.global_step >= steps:
            return True
        messages.info_once(f"Asked to stop, but training continues until min_epochs={epochs} and min_steps={steps}.")
        return False

    @property
    def training(self) -> bool:
        """Whether the training part of a fit is running."""
        return self.state.stage == "train"

    @property
    def validating(self) -> bool:
        """Whether a validation is running, alone or inside a fit."""
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
        """Whether the validation batches before training are running."""
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
        """Whether SIGTERM was received; the run ends after this batch."""
        return self.state.signum == 15

    @property
    def logs_this_step(self) -> bool:
        """Whether the values of the current or just finished update go to the loggers."""
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
        """Lightning's name for :attr:`training_module`, or None if there is none yet."""
        return self.current_run.module

    @property
    def model(self) -> Any:
        """The module as the strategy wrapped it, or None."""
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
        """The optimizers of the fit, as ``configure_optimizers`` made them. A new list applies from the next epoch."""
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
        """What the last ``predict`` collected; None if it kept nothing."""
        return self.current_run.predictions

    @property
    def predict_batch_indices(self) -> list[list[list[int]]]:
        """For each loader of a ``predict``, the sample indices of each batch so far, if they are known."""
        return self.current_run.predict_batch_indices

    @property
    def current_batch_indices(self) -> list[int] | None:
        """The sample indices of the current ``predict`` batch; None if they are not known."""
        return self.current_run.current_batch_indices

    @property
    def ckpt_path(self) -> str | None:
        """The file that the last run loaded, or None. If set, every entry point loads it, until it is set to None."""
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
        return self.strategy.precision.name

    @property
    def scaler(self) -> Any:
        """fp16's loss scaler, or None."""
        return self.strategy.precision.scaler

    @property
    def accelerator(self) -> Accelerator:
        """The kind of device; it equals ``"cpu"``, ``"cuda"`` or ``"mps"``."""
        return AcceleratorRegistry[self.strategy.device.type]()

    @property
    def device_ids(self) -> list[int]:
        """Indices of the devices of this node's processes, one each; on the CPU 0, 1, ..."""
        return self.strategy.device_ids

    @property
    def num_devices(self) -> int:
        """Number of devices on this node."""
        return self.world_size // self.num_nodes

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self.strategy.num_nodes

    @property
    def world_size(self) -> int:
        """Number of processes on all machines."""
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
        """Whether this process writes files and messages."""
        return self.strategy.is_global_zero

    # ---- data ------------------------------------------------------------------------------------------------------

    @property
    def train_dataloader(self) -> Any:
        """The training loader, the list or dict of them, or None before they were made."""
        return self.current_run.source.shown("train")

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader, the list or dict of them, or None before they were made."""
        return self.current_run.source.shown("validate")

    @property
    def test_dataloaders(self) -> Any:
        """The test loader, the list or dict of them, or None before they were made."""
        return self.current_run.source.shown("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The loader to predict from, the list or dict of them, or None before they were made."""
        return self.current_run.source.shown("predict")

    @property
    def num_training_batches(self) -> int | float:
        """Training batches per epoch; inf for a loader without a length."""
        return self.current_run.source.num_training_batches

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader."""
        return list(self.current_run.source.eval.get("validate", ([], []))[1])

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of each validation loader in the sanity check of a fit."""
        request = self.current_run.request
        if request is None or request.fn != "fit":
            return []
        steps = self.num_sanity_val_steps
        return [n if steps == -1 else min(n, steps) for n in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each test loader."""
        return list(self.current_run.source.eval.get("test", ([], []))[1])

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Batches of each loader to predict from."""
        return list(self.current_run.source.eval.get("predict", ([], []))[1])

    @property
    def enable_validation(self) -> bool:
        """Whether this fit validates: there is a loader, a validation_step, and limit_val_batches is not 0."""
        return self.current_run.source.validates()

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
        self.current_run.source.train()
        batches = self.num_training_batches
        if batches == math.inf:
            return math.inf if self.max_steps == -1 else self.max_steps
        total = sum(math.ceil(batches / self._accumulation(epoch)) for epoch in range(self.max_epochs or 0))
        return total if self.max_steps == -1 else min(total, self.max_steps)

    def _accumulation(self, epoch: int) -> int:
        """Micro-batches an update in an epoch."""
        deciding = (replaced(callback, "get_accumulate_grad_batches", Callback) for callback in self.callbacks)
        found = (method(epoch) for method in deciding if method is not None)
        return next((batches for batches in found if batches is not None), self.accumulate_grad_batches)

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
        """The loggers; setting None removes them."""
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
        """The folder of this run, the same on every rank."""
        return self.current_run.log_dir

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Every value logged so far, as scalar tensors by name. Callbacks monitor these."""
        return callback_values(self.current_run.metrics)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values for the progress bar. On an accelerator they may be one refresh old, because nothing waits."""
        return bar_values(self.current_run.metrics)

    @property
    def logged_metrics(self) -> dict[str, float]:
        """The values last sent to the loggers."""
        return sent_values(self.current_run.metrics)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Send numbers to all loggers, with the epoch; does nothing on ranks other than 0.

        Args:
            metrics: numbers by name.
            step: position on the x axis; None: the number of updates made.
        """
        if self.is_global_zero:
            values = {"epoch": self.state.epoch, **metrics}
            at = self.state.updates if step is None else step
            for logger in self.loggers:
                logger.log_metrics(metrics=values, step=at)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0, above the progress bar if there is one."""
        if not self.is_global_zero:
            return
        bar = self.progress_bar_callback
        if bar is not None:
            bar.print(*args, **kwargs)
        else:
            print(*args, **kwargs)  # noqa: T201 - it is what was asked for


_save_checkpoint = Trainer.save_checkpoint

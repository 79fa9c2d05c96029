"""``Trainer``: its arguments, the four entry points, and what happens on an error, a signal or Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from .. import messages
from ..callbacks.base import Callback
from ..callbacks.loss_guard import Rollback
from ..checkpoint.restore_parts import PARTS, Part, check_parts
from ..data.worker_processes import explain_lost_worker, torchs_own
from ..doctor.script_arguments import overruled
from ..loggers.base import Logger
from ..memory.out_of_memory_error import out_of_memory
from ..processes import timings
from ..processes.cpu_memory import freed_memory_kept
from ..processes.devices import AcceleratorName
from ..processes.signals import Action, actions, check_signals, watch
from ..profilers.base import Profiler
from ..settings.constructors import check_names
from ..strategies.base import Strategy
from ..strategies.choose import StrategyName, choose_strategy
from ..strategies.compile_networks import Scope
from ..strategies.precision.base import Precision
from ..strategies.precision.choose import PrecisionAlias, PrecisionName
from . import arguments as check
from . import profiling
from .choose_profiler import ProfilerName, chosen
from .compiled_step_checks import check_trainer
from .default_callbacks import choose_callbacks, choose_loggers
from .evaluation import EvalLoop
from .loop import FitLoop
from .results_table import show_results
from .settings_arguments import with_origins
from .start_run import attach
from .state import Fn, RunState
from .status import TrainerStatus
from .stopping import Stops
from .torch_settings import numerics

if TYPE_CHECKING:
    from ..data.datamodule import DataModule
    from ..tuner.callbacks import Trials
    from .checkpoint_saver import Saver
    from .module import TrainingModule


@dataclass
class Request:
    """What an entry point was asked to do; ``again``: within its run, whose loggers go on.

    ``trial``: of a :class:`~.tuner.tuner.Tuner`, which starts from no checkpoint.
    """

    fn: Fn
    module: Any
    datamodule: Any = None
    loaders: dict[str, Any] = field(default_factory=dict)
    ckpt_path: Any = None
    keep_predictions: bool = False
    gather: bool = False
    weights_only: bool | None = None
    restore: tuple[str, ...] = PARTS
    again: bool = False
    trial: bool = False


class Trainer(TrainerStatus):
    """Runs a :class:`TrainingModule`: ``fit``, ``validate``, ``test``, ``predict``.

    Where ``accelerator``, ``strategy``, ``precision``, ``accumulate_grad_batches`` or ``compile`` is left out, the
    settings of ``paceline launch``, of the environment or of the file that ``paceline config`` writes count. Any
    argument that is left out is also read from the variable ``PL_TRAINER_<ARGUMENT>``, as in Lightning.

    Args:
        accelerator: kind of device: ``"auto"`` (CUDA, then MPS, then CPU), ``"gpu"`` (CUDA, then MPS), ``"cuda"``,
            ``"mps"`` or ``"cpu"``.
        strategy: how processes share the work: a name, or a Strategy object. ``"auto"``: one process for one device,
            ``"ddp"`` for several. ``"single_device"``, ``"cpu"``: one process. ``"ddp"``, ``"ddp_spawn"``,
            ``"ddp_fork"``, ``"ddp_notebook"``: a copy of the model in each process; with
            ``_find_unused_parameters_true`` (or ``_false``) after the name, for losses that do not reach every
            parameter. ``"fsdp"``, ``"fsdp_cpu_offload"``, ``"hybrid_shard"``: weights, gradients and optimizer state
            in shards. ``"model_parallel"``: every layer split. ``"deepspeed"``, ``"deepspeed_stage_1"``,
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
        max_epochs: epochs to train in all, those before a resume included; -1: no limit. None: 1000, or no limit if
            ``max_steps`` or ``max_time`` is given.
        min_epochs: epochs to train before ``should_stop`` (an ``EarlyStopping``, say) counts. None: 0.
        max_steps: optimizer steps to make in all, those before a resume included; -1: no limit.
        min_steps: optimizer steps to make before ``should_stop`` counts. None: 0.
        max_time: stop after so much time in training: ``"DD:HH:MM:SS"``, a timedelta, or its arguments in a dict, such
            as ``{"hours": 12}``. None: no limit.
        grace_seconds: stop so many seconds before ``max_time`` is up, to leave time for the current step, a validation
            and the last checkpoint.
        limit_train_batches: use so many batches (int) or this share of them (float from 0.0 to 1.0) in each epoch.
            None: all; 0: no training.
        limit_val_batches: the same for each validation loader; 0: no validation.
        limit_test_batches: the same for each test loader.
        limit_predict_batches: the same for each loader to predict from.
        overfit_batches: train and validate on the same first batches, unshuffled: so many (int), or a share (float).
            0: off.
        val_check_interval: validate after so many training batches (int), after this share of an epoch (float from 0.0
            to 1.0), or after so much time (as for ``max_time``). None: 1.0, at the end of the epoch.
        check_val_every_n_epoch: validate only in every n-th epoch. None: the batches of ``val_check_interval`` are
            counted across epochs.
        num_sanity_val_steps: validation batches to try before training; -1: all; 0: none. None: 2.
        log_every_n_steps: send step values to the loggers at every n-th step; 0: never. None: 50.
        enable_checkpointing: None or True: add a ``ModelCheckpoint`` if ``callbacks`` has none; False: do not.
        enable_progress_bar: the same with a ``RichProgressBar``.
        enable_model_summary: the same with a ``ModelSummary``.
        accumulate_grad_batches: batches whose gradients make one optimizer step. A shorter last window of an epoch is
            averaged over the batches in it. None: 1.
        gradient_clip_val: the largest norm or value that gradients keep before each step. None or 0: no clipping.
        gradient_clip_algorithm: ``"norm"``: scale all gradients together; ``"value"``: cut each element. None:
            ``"norm"``.
        deterministic: True: only deterministic algorithms, an operation that has none is an error; ``"warn"``: it is a
            warning. None: torch's setting stays.
        benchmark: let cuDNN try which convolution is fastest (``torch.backends.cudnn.benchmark``). None: torch's
            setting stays.
        inference_mode: True: evaluate under ``torch.inference_mode``; False: under ``torch.no_grad``.
        use_distributed_sampler: give each process its part of the data. False: leave all loaders as they are.
        profiler: find where the time goes: ``"doctor"`` (what is slow, why, what to change), ``"simple"`` (a table of
            actions), ``"advanced"`` (cProfile), ``"pytorch"`` (operators, trace, memory), or a Profiler object. None:
            no profiling.
        detect_anomaly: use torch's anomaly mode, and raise on a loss that is not finite. Slow.
        barebones: switch off loggers, callbacks added by default, the sanity check and ``self.log``, to measure the
            bare loop.
        plugins: a Precision object, or a list with one.
        sync_batchnorm: compute BatchNorm over the batches of all processes.
        reload_dataloaders_every_n_epochs: make the loaders again every n epochs; 0: never.
        default_root_dir: folder of logs and checkpoints, unless a logger or callback has its own. None: the working
            directory. An address, such as ``s3://bucket/run``, is for checkpoints only; logs then go to the working
            directory.
        enable_autolog_hparams: log what ``save_hyperparameters`` kept when a fit starts.
        compile: True or ``"networks"``: compile the networks in place; ``"step"``: the whole training step with its
            update; ``"graphs"``: that as a CUDA graph. Or a dict of arguments for ``torch.compile``, with one of these
            words as ``"scope"``. None or False: do not compile.
        signals: what a signal does, by name or number, such as ``{"SIGUSR2": "stop"}``. ``"stop"``: finish the step,
            save, end the run; ``"requeue"``: also give the SLURM job back to the queue; None: leave the signal alone.
            Unless said otherwise SIGTERM and SIGINT stop, and SIGUSR1 in a SLURM job requeues.
    """

    _from_variables: Mapping[str, str]

    @check_names(check.MOVED)
    @check.with_variables
    def __init__(
        self,
        *,
        accelerator: AcceleratorName = "auto",
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
        profiler: ProfilerName | Profiler | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Precision | list[Precision] | None = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        enable_autolog_hparams: bool = True,
        compile: bool | Scope | Mapping[str, Any] | None = None,
        signals: Mapping[str | int, Action | None] | None = None,
    ) -> None:
        defaults = check.defaults(Trainer.__init__)
        given, self.settings_in_force = with_origins(dict(locals()), defaults, self._from_variables)
        given = overruled(given)
        self.state = RunState()
        self._check_limits(given)
        self._check_steps(given)
        self._check_flags(given)
        where = (given[name] for name in ("strategy", "accelerator", "devices", "num_nodes", "precision", "plugins"))
        self.strategy = choose_strategy(*where)
        check_trainer(self)
        self.default_root_dir = check.check_folder("default_root_dir", default_root_dir)
        self.loggers = choose_loggers(logger, self)
        self.callbacks = choose_callbacks(callbacks, max_time, grace_seconds, self)
        self._clear()

    def _check_limits(self, given: Mapping[str, Any]) -> None:
        self.limit_train_batches = check.check_limit("limit_train_batches", given["limit_train_batches"])
        self.limit_val_batches = check.check_limit("limit_val_batches", given["limit_val_batches"])
        self.limit_test_batches = check.check_limit("limit_test_batches", given["limit_test_batches"])
        self.limit_predict_batches = check.check_limit("limit_predict_batches", given["limit_predict_batches"])
        self.overfit_batches = check.check_limit("overfit_batches", given["overfit_batches"])
        self.max_epochs = check.check_count("max_epochs", given["max_epochs"], none=True, unlimited=True)
        self.max_steps = check.check_count("max_steps", given["max_steps"], unlimited=True)
        self.min_epochs = check.check_count("min_epochs", given["min_epochs"], none=True)
        self.min_steps = check.check_count("min_steps", given["min_steps"], none=True)
        self.fast_dev_run = check.check_fast_dev_run(given["fast_dev_run"])
        every = check.check_count("check_val_every_n_epoch", given["check_val_every_n_epoch"], least=1, none=True)
        self.check_val_every_n_epoch = every
        self.val_check_interval, self.val_check_seconds = check.check_val_interval(given["val_check_interval"], every)
        if self.fast_dev_run:
            self.max_epochs, self.max_steps = 1, self.fast_dev_run
            self.check_val_every_n_epoch, self.val_check_interval, self.val_check_seconds = 1, 1.0, None
        sanity = 2 if given["num_sanity_val_steps"] is None else given["num_sanity_val_steps"]
        self.num_sanity_val_steps = check.check_count("num_sanity_val_steps", sanity, unlimited=True)
        if self.fast_dev_run or given["barebones"]:
            self.num_sanity_val_steps = 0

    def _check_steps(self, given: Mapping[str, Any]) -> None:
        self.accumulate_grad_batches = check.check_accumulation(given["accumulate_grad_batches"])
        self.gradient_clip_val: float | None = given["gradient_clip_val"] or None
        self.gradient_clip_algorithm: check.ClipAlgorithm | None = given["gradient_clip_algorithm"]
        check.check_clipping(self.gradient_clip_val, self.gradient_clip_algorithm)
        every = 50 if given["log_every_n_steps"] is None else given["log_every_n_steps"]
        self.log_every_n_steps = check.check_count("log_every_n_steps", every) or 2**62
        reload = given["reload_dataloaders_every_n_epochs"]
        self.reload_dataloaders_every_n_epochs = check.check_count("reload_dataloaders_every_n_epochs", reload)

    def _check_flags(self, given: Mapping[str, Any]) -> None:
        check.check_flags(given)
        self.enable_checkpointing: bool | None = given["enable_checkpointing"]
        self.enable_progress_bar: bool | None = given["enable_progress_bar"]
        self.enable_model_summary: bool | None = given["enable_model_summary"]
        self.deterministic: bool | Literal["warn"] | None = given["deterministic"]
        self.benchmark: bool | None = given["benchmark"]
        self.inference_mode: bool = given["inference_mode"]
        self.use_distributed_sampler: bool = given["use_distributed_sampler"]
        self.sync_batchnorm: bool = given["sync_batchnorm"]
        self.profiler: Profiler = chosen(given["profiler"])
        self.detect_anomaly: bool = given["detect_anomaly"]
        self.barebones: bool = given["barebones"]
        self.enable_autolog_hparams: bool = given["enable_autolog_hparams"]
        self.compile: bool | Scope | Mapping[str, Any] = given["compile"]
        self._signals = check_signals(given["signals"] or {})

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
            ckpt_path: resume from this checkpoint, a path or an address. ``"last"``: from the newest valid one in the
                folders of this run and of earlier starts of the same command; if there is none, warn and start fresh.
                ``"auto"``: the same without the warning, for a command that may be its first start. ``"best"``: from
                the best one of the previous run. None: start fresh (in a job that SLURM requeued: ``"auto"``).
            weights_only: no effect, since loading a file never runs code; False together with a checkpoint is refused.
            restore: which parts of ``ckpt_path`` to take. All of them, the default, continue to the bit as the run
                that wrote it would have. ``"model"``: weights and the DataModule's state. ``"optimizer"``: the
                optimizers' state (momentum, say) and the loss scale. ``"schedulers"``: schedulers, and the
                optimizers' settings (learning rate, weight decay, ...); without it those of ``configure_optimizers``
                hold. ``"loops"``: epoch, step, position in the data and in the accumulation window, and what was
                logged so far in the epoch; without it the fit starts at epoch 0. ``"rng"``: random states.
                ``"callbacks"``: the callbacks' states.

        Raises:
            ValueError: ``restore`` has an unknown name.
        """
        loaders = {"train": train_dataloaders, "validate": val_dataloaders}
        parts = check_parts(restore)
        self._start(Request("fit", model, datamodule, loaders, ckpt_path, weights_only=weights_only, restore=parts))
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
            model: the module. None: that of the last run, with the weights of its best checkpoint.
            dataloaders: one loader or several. None: those of the DataModule or the module.
            ckpt_path: load the weights of this checkpoint first: a path, ``"best"`` or ``"last"``.
            verbose: print the values as a table.
            datamodule: a DataModule, instead of loaders.
            weights_only: no effect, since loading a file never runs code; False together with a checkpoint is refused.
        """
        loaders = {"validate": dataloaders}
        results = self._start(Request("validate", model, datamodule, loaders, ckpt_path, weights_only=weights_only))
        if verbose and self.is_global_zero:
            show_results(results, "validate")
        return results

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
        results = self._start(Request("test", model, datamodule, loaders, ckpt_path, weights_only=weights_only))
        if verbose and self.is_global_zero:
            show_results(results, "test")
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
            model: the module. None: that of the last run, with the weights of its best checkpoint.
            dataloaders: one loader or several. None: those of the DataModule or the module.
            datamodule: a DataModule, instead of loaders.
            return_predictions: False: keep nothing; callbacks get each batch as it comes (``BasePredictionWriter``).
                None means True.
            ckpt_path: load the weights of this checkpoint first: a path, ``"best"`` or ``"last"``.
            weights_only: no effect, since loading a file never runs code; False together with a checkpoint is refused.
            gather: with several processes, return the batches of all of them, in the order of the data, on each one.
                False: each process returns those it made.

        Returns:
            What ``predict_step`` returned, a list with one entry for each batch (with several loaders a list of such
            lists); None with ``return_predictions=False``.
        """
        keep, loaders = return_predictions is not False, {"predict": dataloaders}
        if gather and not keep:
            raise ValueError("Trainer.predict(return_predictions=False, gather=True): nothing is kept to be gathered.")
        self._start(Request("predict", model, datamodule, loaders, ckpt_path, keep, gather, weights_only))
        return self.predictions if keep else None

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, storage_options: Any = None) -> None:
        """Write a checkpoint of the run as it stands, whole or not at all, and return when it is on the disk.

        Every rank must call. A write in the background that is still in flight is waited for first.

        Args:
            filepath: the file; the folder, under a strategy that writes sharded checkpoints; or an address of it, such
                as ``s3://bucket/run/x.ckpt``.
            weights_only: leave out optimizers, callbacks and random states; such a file cannot be resumed from.
            storage_options: must be None.

        Raises:
            AttributeError: no module is attached yet.
            OSError: the file could not be written; an older one of that name is untouched.
        """
        if self._module is None:
            raise AttributeError(
                f"Trainer.save_checkpoint({str(filepath)!r}): there is no module to save yet. Call fit (or validate, "
                "test, predict) first."
            )
        if storage_options is not None:
            raise ValueError(
                f"save_checkpoint(storage_options={storage_options!r}): these come from the environment and from "
                "fsspec's settings (FSSPEC_S3_..., ~/.config/fsspec), so that every reader has them. Leave it out."
            )
        self.saver.save([filepath], bool(weights_only))

    @cached_property
    def saver(self) -> Saver:
        """What writes the checkpoints of this trainer, one at a time."""
        from .checkpoint_saver import Saver

        return Saver(self)

    @cached_property
    def _trials(self) -> Trials:
        """What callbacks try within a run."""
        from ..tuner.callbacks import Trials

        return Trials(self)

    def __copy__(self) -> Trainer:
        double = object.__new__(type(self))
        vars(double).update(vars(self))
        return double

    def __getstate__(self) -> dict[str, Any]:
        from .pickling import state_of

        return state_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        from .pickling import put_back

        put_back(self, state)

    def _count_save(self) -> int:
        """The number of the save that begins: one more than the highest of this run and of those in its folders."""
        self._saves += 1
        return self._saves

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Context in which layers are made on the run's device and in its dtype.

        Args:
            empty_init: True makes them without memory, under a strategy that shards: each process then gets the part
                that it holds.
        """
        return self.strategy.empty_init_context() if empty_init else self.strategy.init_context()

    # ---- one run ---------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """No module, no data: the state between construction and the first run."""
        from ..checkpoint.folder_lock import Claims
        from .data_source import DataSource
        from .metrics import MetricStore

        self._claims = Claims()
        self._module = None
        self.model = None
        self.datamodule = None
        self.optimizers = []
        self.lr_scheduler_configs = []
        self._source = DataSource(self, {})
        self._metrics = MetricStore(self.state, self.strategy, None)
        self._hooks: Any = None
        self.predictions: Any = None
        self.predict_batch_indices: list[list[list[int]]] = []
        self.current_batch_indices: list[int] | None = None
        self._ckpt_path = self._ckpt_asked = self._newest = None
        self._resumes = False
        self._saves = 0
        self._fit: FitLoop | None = None
        self._left = None
        self._brought = None
        self._log_dir = None

    @property
    def _start(self) -> Callable[[Request], Any]:
        """What runs a request: this process, or the strategy's launcher in all of them."""
        launcher = self.strategy.launcher
        if launcher is None:
            return self._run
        return partial(self._run_elsewhere, launcher)

    def _run_elsewhere(self, launcher: Callable[..., Any], request: Request) -> Any:
        """Run in the processes that the launcher starts; what that takes is imported here."""
        from ..processes.launch import told_if_stopped_early

        with told_if_stopped_early(len(self.strategy.device_ids)):
            from .multiprocess_run import run_elsewhere

            return run_elsewhere(self, launcher, request)

    @property
    def _holder(self) -> Strategy:
        """What brings the states of a checkpoint together; after a run in other processes this one has them whole."""
        return self.strategy if self._left is None else Strategy()

    def _run(self, request: Request) -> Any:
        """Run until the end; again from a checkpoint as often as a callback wants to go back to one."""
        check.check_request(self.state.fn, request, self._ckpt_asked)
        given, at_start = request, self.state.state_dict()
        while True:
            self.state.begin(request.fn)
            result, failed, back, wanted = None, True, None, actions(self._signals)
            kept = freed_memory_kept(self.strategy.device)
            with watch(self.state, wanted), Stops(self, wanted) as self._stops, kept:
                try:
                    with timings.phase(request.fn), numerics(self):
                        resumed = attach(self, request)
                        loop = FitLoop(self, resumed) if request.fn == "fit" else self._evaluation(request)
                        result = loop.run()
                        for hook in self._hooks.on_fit_end if request.fn == "fit" else ():
                            hook()
                        self.saver.wait()
                        self._stops.at_end()
                        self.profiler.finish(self)
                    failed = False
                except Rollback as rollback:
                    self.saver.wait()
                    back, failed = rollback.with_traceback(None), False
                except BaseException as error:
                    better = explain_lost_worker(error, self.state.where(), self._source.name_of)
                    better = better or self.strategy.explain(error) or out_of_memory(self, error)
                    self._fail(better or error)
                    if better is not None:
                        raise better from torchs_own(error)
                    raise
                finally:
                    self._teardown(request.fn, failed)
            if back is None:
                return result
            request = self._gone_back(given, back, at_start)

    def _gone_back(self, given: Request, back: Rollback, at_start: dict[str, Any]) -> Request:
        """The fit from one of its checkpoints on, or once more as it was asked for."""
        parts = PARTS if back.own else given.restore
        if "loops" not in parts:
            self.state.load_state_dict(at_start)
        return replace(given, ckpt_path=back.path, restore=parts, again=True)

    def _evaluation(self, request: Request) -> EvalLoop:
        kind: Any = request.fn
        self.state.stage = kind
        return EvalLoop(self, kind, request.keep_predictions, request.gather)

    def _fail(self, error: BaseException) -> None:
        """Tell everybody who wants to know; nothing that goes wrong here hides the error itself."""
        self.state.status = "interrupted"
        if not self._stops.signum:
            self.strategy.abandon(error)
        self._run_all([self.profiler.interrupted, self._metrics.drain, partial(self.saver.wait, together=False)])
        if self._hooks is not None:
            self._run_all([lambda hook=hook: hook(error) for hook in self._hooks.on_exception])

    def _teardown(self, fn: str, failed: bool) -> None:
        jobs: list[Any] = [partial(profiling.report_split, self)] if self.profiler.active else []
        if self._hooks is not None:
            jobs += [lambda hook=hook: hook(fn) for hook in self._hooks.teardown]
        status = ("interrupted" if self.state.signum else "failed") if failed else "success"
        if self.is_global_zero:
            jobs += [lambda logger=logger: logger.finalize(status) for logger in self.loggers]
        jobs += [partial(profiling.teardown, self, fn)]
        jobs += [self.saver.close, self._claims.release, self._source.release, self.strategy.teardown]
        if not failed:
            self.state.status = "finished"
        try:
            self._run_all(jobs, hidden=failed)
        finally:
            self.state.fn = self.state.stage = None
            if self._module is not None:
                self._module._end_run()

    @staticmethod
    def _run_all(jobs: Iterable[Any], hidden: bool = True) -> None:
        """Run every job. Errors become warnings; unless ``hidden`` the first one is raised at the end."""
        first: Exception | None = None
        for job in jobs:
            try:
                job()
            except Exception as error:
                if not hidden and first is None:
                    first = error
                    continue
                messages.warn(f"While the run was ending, {type(error).__name__} came up as well: {error}")
        if first is not None:
            raise first

"""Paceline's replacement for each name of ``lightning.pytorch`` and ``lightning.fabric``, module by module."""

from __future__ import annotations

from typing import Any

from ..finder import Package, Target, placeholder

#: The version of Lightning whose names these are; programs see it as the installed one.
VERSION = "2.6.1"

#: Modules of Paceline, and the names of Lightning that they have.
_HOMES = {
    "callbacks.base": "Callback",
    "callbacks.checkpoint_retention": "Checkpoint",
    "callbacks.device_stats_monitor": "DeviceStatsMonitor",
    "callbacks.early_stopping": "EarlyStopping EarlyStoppingReason",
    "callbacks.finetuning": "BackboneFinetuning BaseFinetuning",
    "callbacks.gradient_accumulation_scheduler": "GradientAccumulationScheduler",
    "callbacks.lambda_callback": "LambdaCallback",
    "callbacks.lr_monitor": "LearningRateMonitor",
    "callbacks.model_checkpoint": "ModelCheckpoint",
    "callbacks.model_pruning": "ModelPruning",
    "callbacks.model_summary": "ModelSummary RichModelSummary",
    "callbacks.on_exception_checkpoint": "OnExceptionCheckpoint",
    "callbacks.prediction_writer": "BasePredictionWriter",
    "callbacks.progress": "ProgressBar",
    "callbacks.rich_progress": "RichProgressBar RichProgressBarTheme",
    "callbacks.stochastic_weight_averaging": "StochasticWeightAveraging",
    "callbacks.throughput_monitor": "ThroughputMonitor",
    "callbacks.timer": "Timer",
    "callbacks.tqdm_progress": "TQDMProgressBar",
    "callbacks.weight_averaging": "EMAWeightAveraging WeightAveraging",
    "checkpoint.checkpoint_io": "AsyncCheckpointIO CheckpointIO TorchCheckpointIO",
    "checkpoint.hyperparameters": "AttributeDict HyperparametersMixin",
    "data.combined_loader": "CombinedLoader",
    "loggers.base": "DummyLogger Logger",
    "loggers.csv": "CSVLogger",
    "loggers.tensorboard": "TensorBoardLogger",
    "loggers.wandb": "WandbLogger",
    "cli.argument_parser": "ArgsType LRSchedulerCallable OptimizerCallable ReduceLROnPlateau instantiate_class",
    "cli.trainer_cli": "SaveConfigCallback",
    "compat.lightning.exceptions": "MisconfigurationException SIGTERMException",
    "checkpoint.instantiate": "instantiate_module",
    "checkpoint.hparams_files": "load_hparams_from_tags_csv load_hparams_from_yaml save_hparams_to_yaml",
    "compat.lightning.private": "find_free_network_port",
    "processes.accelerators": "Accelerator AcceleratorRegistry CPUAccelerator CUDAAccelerator MPSAccelerator",
    "processes.devices": "num_cuda_devices",
    "processes.environments": (
        "ClusterEnvironment KubeflowEnvironment LSFEnvironment MPIEnvironment SLURMEnvironment TorchElasticEnvironment"
    ),
    "processes.seed": "isolate_rng reset_seed seed_everything",
    "profilers.advanced": "AdvancedProfiler",
    "profilers.base": "PassThroughProfiler Profiler",
    "profilers.pytorch": "PyTorchProfiler RegisterRecordFunction ScheduleWrapper",
    "profilers.simple": "SimpleProfiler",
    "strategies.base": "Strategy",
    "strategies.ddp": "DDPStrategy",
    "strategies.deepspeed.strategy": "DeepSpeedStrategy",
    "strategies.fsdp.strategy": "FSDPStrategy",
    "strategies.model_parallel.strategy": "ModelParallelStrategy",
    "strategies.sync_batch_norm": "TorchSyncBatchNorm",
    "strategies.precision": "DoublePrecision HalfPrecision MixedPrecision Precision",
    "trainer.states": "RunningStage TrainerFn TrainerStatus",
    "trainer.trainer": "Trainer",
    "tuner.batch_size_finder": "BatchSizeFinder",
    "tuner.lr_finder": "LearningRateFinder",
    "tuner.tuner": "Tuner",
    "utilities.data": "has_iterable_dataset has_len suggested_max_num_workers",
    "utilities.enums": "GradClipAlgorithmType",
    "utilities.gradients": "grad_norm",
    "utilities.overriding": "is_overridden",
    "utilities.parameter_tying": "find_shared_parameters set_shared_parameters",
    "utilities.rank_zero": (
        "WarningCache rank_prefixed_message rank_zero_debug rank_zero_deprecation rank_zero_info rank_zero_only "
        "rank_zero_warn"
    ),
    "utilities.types": (
        "EVAL_DATALOADERS LRSchedulerConfig LRSchedulerConfigType LRSchedulerPLType LRSchedulerTypeTuple "
        "LRSchedulerTypeUnion Optimizable OptimizerConfig OptimizerLRScheduler OptimizerLRSchedulerConfig STEP_OUTPUT "
        "TRAIN_DATALOADERS TrainingStep _DEVICE _EVALUATE_OUTPUT _MAP_LOCATION_TYPE _METRIC _NUMBER _PATH "
        "_PREDICT_OUTPUT"
    ),
}

#: Names that Paceline calls something else.
_RENAMED = {
    "LightningArgumentParser": Target("cli.argument_parser", "ArgumentParser"),
    "LightningCLI": Target("cli.trainer_cli", "TrainerCLI"),
    "LightningDataModule": Target("data.datamodule", "DataModule"),
    "LightningDeprecationWarning": Target("utilities.rank_zero", "RankZeroDeprecationWarning"),
    "LightningEnvironment": Target("processes.environments", "LocalEnvironment"),
    "LightningModule": Target("trainer.module", "TrainingModule"),
    "DummyExperiment": Target("loggers.base", "Nothing"),
    "LightningOptimizer": Target("trainer.optimizers", "ManagedOptimizer"),
    "PossibleUserWarning": Target("messages", "PacelineWarning"),
    "SingleDeviceStrategy": Target("strategies.base", "SingleDevice"),
    "TrainerState": Target("trainer.state", "RunState"),
    "_LRFinder": Target("tuner.learning_rate", "LRFinder"),
    "_runif_reasons": Target("compat.lightning.testing", "runif_reasons"),
    "extract_batch_size": Target("data.batches", "batch_size_of"),
    "from_compiled": Target("strategies.compile_networks", "uncompiled"),
    "get_cpu_stats": Target("callbacks.device_stats_monitor", "cpu_stats"),
    "to_uncompiled": Target("strategies.compile_networks", "uncompiled"),
    "move_data_to_device": Target("processes.device_transfer", "move"),
}
_NOT_HERE = {
    "use TorchSyncBatchNorm": "LayerSync",
    "use TorchCheckpointIO": "XLACheckpointIO",
    "Paceline has loggers for CSV files, TensorBoard and Weights & Biases": (
        "CometLogger LitLogger MLFlowLogger NeptuneLogger ExperimentWriter"
    ),
    "a Strategy sets up its precision itself": "DeepSpeedPrecision FSDPPrecision",
    "the loop has no closures": "Closure",
    "ask each rank": "has_len_all_ranks",
    "Paceline shards loaders in their own classes": "DistributedSamplerWrapper",
    "use torch.utils.flop_counter": "Throughput measure_flops",
    "Paceline does not support TPUs": "SingleDeviceXLAStrategy XLAEnvironment XLAStrategy",
    "Paceline trains in 16, 32 and 64 bits": "BitsandbytesPrecision TransformerEnginePrecision XLAPrecision",
}
UNSUPPORTED = {name: why for why, names in _NOT_HERE.items() for name in names.split()}
TARGETS = {name: Target(home, name) for home, names in _HOMES.items() for name in names.split()} | _RENAMED

_ACCELERATORS = "Accelerator AcceleratorRegistry CPUAccelerator CUDAAccelerator MPSAccelerator"
_CHECKPOINT_IO = "AsyncCheckpointIO CheckpointIO TorchCheckpointIO"
_ENVIRONMENTS = (
    "ClusterEnvironment KubeflowEnvironment LSFEnvironment LightningEnvironment MPIEnvironment SLURMEnvironment "
    "TorchElasticEnvironment"
)
_CALLBACKS = (
    "BackboneFinetuning BaseFinetuning BasePredictionWriter BatchSizeFinder Callback Checkpoint DeviceStatsMonitor "
    "EMAWeightAveraging EarlyStopping GradientAccumulationScheduler LambdaCallback LearningRateFinder "
    "LearningRateMonitor ModelCheckpoint ModelPruning ModelSummary OnExceptionCheckpoint ProgressBar RichModelSummary "
    "RichProgressBar StochasticWeightAveraging TQDMProgressBar ThroughputMonitor Timer WeightAveraging"
)
_STRATEGIES = "DDPStrategy DeepSpeedStrategy FSDPStrategy ModelParallelStrategy SingleDeviceStrategy Strategy"
_RANK_ZERO = (
    "LightningDeprecationWarning WarningCache rank_prefixed_message rank_zero_debug rank_zero_deprecation "
    "rank_zero_info rank_zero_only rank_zero_warn"
)
_TYPES = _HOMES["utilities.types"]
_UTILITIES = (
    "AttributeDict CombinedLoader GradClipAlgorithmType find_shared_parameters grad_norm is_overridden "
    "move_data_to_device rank_zero_deprecation rank_zero_info rank_zero_only rank_zero_warn set_shared_parameters"
)
_PRECISIONS = "DoublePrecision HalfPrecision MixedPrecision Precision"

#: Lightning's modules and their names. Every module is below ``lightning``.
_MODULES = {
    "": "Callback LightningDataModule LightningModule Trainer seed_everything",
    "pytorch": "Callback LightningDataModule LightningModule Trainer seed_everything",
    "pytorch.accelerators": _ACCELERATORS,
    "pytorch.accelerators.accelerator": "Accelerator",
    "pytorch.accelerators.cpu": "CPUAccelerator get_cpu_stats",
    "pytorch.accelerators.cuda": "CUDAAccelerator num_cuda_devices",
    "pytorch.accelerators.mps": "MPSAccelerator",
    "pytorch.accelerators.xla": "",
    "pytorch.callbacks": _CALLBACKS,
    "pytorch.callbacks.batch_size_finder": "BatchSizeFinder",
    "pytorch.callbacks.callback": "Callback",
    "pytorch.callbacks.checkpoint": "Checkpoint",
    "pytorch.callbacks.device_stats_monitor": "DeviceStatsMonitor",
    "pytorch.callbacks.early_stopping": "EarlyStopping EarlyStoppingReason",
    "pytorch.callbacks.finetuning": "BackboneFinetuning BaseFinetuning",
    "pytorch.callbacks.gradient_accumulation_scheduler": "GradientAccumulationScheduler",
    "pytorch.callbacks.lambda_function": "LambdaCallback",
    "pytorch.callbacks.lr_finder": "LearningRateFinder",
    "pytorch.callbacks.lr_monitor": "LearningRateMonitor",
    "pytorch.callbacks.model_checkpoint": "ModelCheckpoint",
    "pytorch.callbacks.model_summary": "ModelSummary",
    "pytorch.callbacks.on_exception_checkpoint": "OnExceptionCheckpoint",
    "pytorch.callbacks.pruning": "ModelPruning",
    "pytorch.callbacks.prediction_writer": "BasePredictionWriter",
    "pytorch.callbacks.progress": "ProgressBar RichProgressBar TQDMProgressBar",
    "pytorch.callbacks.progress.progress_bar": "ProgressBar",
    "pytorch.callbacks.progress.rich_progress": "RichProgressBar RichProgressBarTheme",
    "pytorch.callbacks.progress.tqdm_progress": "TQDMProgressBar",
    "pytorch.callbacks.rich_model_summary": "RichModelSummary",
    "pytorch.callbacks.stochastic_weight_avg": "StochasticWeightAveraging",
    "pytorch.callbacks.throughput_monitor": "ThroughputMonitor",
    "pytorch.callbacks.timer": "Timer",
    "pytorch.callbacks.weight_averaging": "EMAWeightAveraging WeightAveraging",
    "pytorch.core": "LightningDataModule LightningModule",
    "pytorch.core.datamodule": "LightningDataModule",
    "pytorch.core.hooks": "",
    "pytorch.core.mixins": "HyperparametersMixin",
    "pytorch.core.mixins.hparams_mixin": "HyperparametersMixin",
    "pytorch.core.module": "LightningModule LightningOptimizer",
    "pytorch.core.optimizer": "LightningOptimizer",
    "pytorch.core.saving": "load_hparams_from_tags_csv load_hparams_from_yaml save_hparams_to_yaml",
    "pytorch.loggers": "CSVLogger Logger TensorBoardLogger WandbLogger",
    "pytorch.loggers.csv_logs": "CSVLogger",
    "pytorch.loggers.logger": "DummyExperiment DummyLogger Logger",
    "pytorch.loggers.tensorboard": "TensorBoardLogger",
    "pytorch.loggers.utilities": "",
    "pytorch.loggers.wandb": "WandbLogger",
    "pytorch.loops": "",
    "pytorch.overrides": "",
    "pytorch.plugins": f"{_PRECISIONS} {_CHECKPOINT_IO} TorchSyncBatchNorm",
    "pytorch.cli": (
        "ArgsType LRSchedulerCallable LRSchedulerTypeTuple LRSchedulerTypeUnion LightningArgumentParser LightningCLI "
        "OptimizerCallable ReduceLROnPlateau SaveConfigCallback instantiate_class instantiate_module"
    ),
    "pytorch.plugins.environments": _ENVIRONMENTS,
    "pytorch.plugins.io.async_plugin": "AsyncCheckpointIO",
    "pytorch.plugins.io.checkpoint_plugin": "CheckpointIO",
    "pytorch.plugins.io.torch_plugin": "TorchCheckpointIO",
    "pytorch.plugins.layer_sync": "TorchSyncBatchNorm",
    "pytorch.plugins.precision.deepspeed": "",
    "pytorch.plugins.precision.double": "DoublePrecision",
    "pytorch.plugins.precision.fsdp": "",
    "pytorch.plugins.precision.half": "HalfPrecision",
    "pytorch.plugins.io": _CHECKPOINT_IO,
    "pytorch.plugins.precision": _PRECISIONS,
    "pytorch.plugins.precision.amp": "MixedPrecision",
    "pytorch.plugins.precision.precision": "Precision",
    "pytorch.profilers": "AdvancedProfiler PassThroughProfiler Profiler PyTorchProfiler SimpleProfiler",
    "pytorch.profilers.advanced": "AdvancedProfiler",
    "pytorch.profilers.base": "PassThroughProfiler",
    "pytorch.profilers.profiler": "Profiler",
    "pytorch.profilers.pytorch": "PyTorchProfiler RegisterRecordFunction ScheduleWrapper",
    "pytorch.profilers.simple": "SimpleProfiler",
    "pytorch.strategies": _STRATEGIES,
    "pytorch.strategies.ddp": "DDPStrategy",
    "pytorch.strategies.deepspeed": "DeepSpeedStrategy",
    "pytorch.strategies.fsdp": "FSDPStrategy",
    "pytorch.strategies.model_parallel": "ModelParallelStrategy",
    "pytorch.strategies.single_device": "SingleDeviceStrategy",
    "pytorch.strategies.strategy": "Strategy",
    "pytorch.trainer": "Trainer seed_everything",
    "pytorch.trainer.states": "RunningStage TrainerFn TrainerState TrainerStatus",
    "pytorch.trainer.trainer": "Trainer",
    "pytorch.tuner": "Tuner",
    "pytorch.tuner.lr_finder": "_LRFinder",
    "pytorch.tuner.tuning": "Tuner",
    "pytorch.utilities": _UTILITIES,
    "pytorch.utilities.compile": "from_compiled to_uncompiled",
    "pytorch.utilities.combined_loader": "CombinedLoader",
    "pytorch.utilities.data": "extract_batch_size has_iterable_dataset has_len",
    "pytorch.utilities.enums": "GradClipAlgorithmType",
    "pytorch.utilities.exceptions": "MisconfigurationException SIGTERMException",
    "pytorch.utilities.grads": "grad_norm",
    "pytorch.utilities.imports": "",
    "pytorch.utilities.memory": "",
    "pytorch.utilities.model_helpers": "is_overridden",
    "pytorch.utilities.model_summary": "",
    "pytorch.utilities.parameter_tying": "find_shared_parameters set_shared_parameters",
    "pytorch.utilities.parsing": "AttributeDict",
    "pytorch.utilities.rank_zero": _RANK_ZERO,
    "pytorch.utilities.seed": "isolate_rng",
    "pytorch.utilities.testing": "_runif_reasons",
    "pytorch.utilities.types": _TYPES,
    "pytorch.utilities.warnings": "PossibleUserWarning",
    "fabric": "seed_everything",
    "fabric.accelerators": _ACCELERATORS,
    "fabric.accelerators.accelerator": "Accelerator",
    "fabric.accelerators.cuda": "CUDAAccelerator num_cuda_devices",
    "fabric.accelerators.mps": "MPSAccelerator",
    "fabric.accelerators.xla": "",
    "fabric.plugins.environments": _ENVIRONMENTS,
    "fabric.plugins.environments.cluster_environment": "ClusterEnvironment",
    "fabric.plugins.environments.slurm": "SLURMEnvironment",
    "fabric.plugins.environments.torchelastic": "TorchElasticEnvironment",
    "fabric.plugins.environments.lightning": "LightningEnvironment find_free_network_port",
    "fabric.plugins.io": _CHECKPOINT_IO,
    "fabric.plugins.io.checkpoint_io": "CheckpointIO",
    "fabric.plugins.io.torch_io": "TorchCheckpointIO",
    "fabric.utilities.distributed": "",
    "fabric.utilities.throughput": "",
    "fabric.plugins": f"{_PRECISIONS} {_CHECKPOINT_IO} ClusterEnvironment",
    "fabric.strategies": _STRATEGIES,
    "fabric.utilities": "AttributeDict move_data_to_device rank_zero_info rank_zero_only rank_zero_warn",
    "fabric.utilities.apply_func": "move_data_to_device",
    "fabric.utilities.data": "AttributeDict has_iterable_dataset has_len suggested_max_num_workers",
    "fabric.utilities.enums": "",
    "fabric.utilities.exceptions": "MisconfigurationException",
    "fabric.utilities.imports": "",
    "fabric.utilities.rank_zero": _RANK_ZERO,
    "fabric.utilities.seed": "isolate_rng reset_seed seed_everything",
    "fabric.utilities.types": _TYPES,
    "fabric.utilities.warnings": "PossibleUserWarning",
}


#: Lightning's modules from which programs use only private names, if any.
_PRIVATE_ONLY = (
    "fabric.accelerators.cpu fabric.plugins.collectives fabric.strategies.launchers "
    "fabric.strategies.launchers.launcher fabric.strategies.launchers.multiprocessing "
    "fabric.strategies.launchers.subprocess_script fabric.strategies.ddp fabric.strategies.fsdp "
    "fabric.utilities.cloud_io fabric.utilities.device_parser fabric.utilities.init fabric.utilities.load "
    "fabric.utilities.logger fabric.utilities.optimizer fabric.utilities.registry fabric.utilities.spike "
    "pytorch._graveyard pytorch.loops.evaluation_loop pytorch.loops.fit_loop pytorch.loops.loop "
    "pytorch.loops.optimization pytorch.loops.optimization.automatic pytorch.loops.optimization.manual "
    "pytorch.loops.prediction_loop pytorch.loops.progress pytorch.loops.training_epoch_loop pytorch.loops.utilities "
    "pytorch.overrides.distributed pytorch.serve pytorch.strategies.launchers "
    "pytorch.strategies.launchers.launcher pytorch.strategies.launchers.multiprocessing "
    "pytorch.strategies.launchers.subprocess_script pytorch.trainer.call pytorch.trainer.configuration_validator "
    "pytorch.trainer.connectors pytorch.trainer.connectors.accelerator_connector "
    "pytorch.trainer.connectors.callback_connector pytorch.trainer.connectors.checkpoint_connector "
    "pytorch.trainer.connectors.data_connector pytorch.trainer.connectors.logger_connector "
    "pytorch.trainer.connectors.logger_connector.fx_validator "
    "pytorch.trainer.connectors.logger_connector.logger_connector "
    "pytorch.trainer.connectors.logger_connector.result pytorch.trainer.connectors.signal_connector "
    "pytorch.trainer.setup pytorch.utilities.consolidate_checkpoint "
    "pytorch.utilities.migration pytorch.utilities.upgrade_checkpoint"
)
_MODULES |= dict.fromkeys(_PRIVATE_ONLY.split(), "")


def _table() -> dict[str, dict[str, Target]]:
    table = {
        f"lightning.{module}".rstrip("."): {name: TARGETS[name] for name in names.split()}
        for module, names in _MODULES.items()
    }
    # The command line has schedulers of its own: its plateau scheduler knows its metric.
    table["lightning.pytorch.cli"]["LRSchedulerTypeTuple"] = Target("cli.argument_parser", "LRSchedulerTypeTuple")
    return table


def fallback(name: str) -> Any:
    """The value of a name that no module's table has."""
    from . import private

    if name in UNSUPPORTED:
        return placeholder(name, f"is not available: {UNSUPPORTED[name]}")
    return private.find(name)


def change_behaviours() -> None:
    """Let Paceline's classes behave as programs written for Lightning expect."""
    from . import behaviours

    behaviours.install()


CONSTANTS: dict[str, dict[str, Any]] = {}

PACKAGE = Package(
    name="lightning",
    version=VERSION,
    modules=_table(),
    constants=CONSTANTS,
    aliases={"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"},
    distributions=("lightning", "pytorch-lightning", "lightning-fabric"),
    fallback=fallback,
    on_import=change_behaviours,
    homepage="https://github.com/Lightning-AI/lightning",
)

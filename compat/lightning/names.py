"""Paceline's replacement for each name in ``lightning.pytorch`` and ``lightning.fabric``, module by module."""

from __future__ import annotations

from typing import Any

from ..finder import Package, Target, placeholder, surface

#: The version of Lightning that has these names; programs see this version as the installed one.
VERSION = "2.6.1"
SURFACE = surface("lightning")

#: Paceline's modules, and the Lightning names that they define.
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
    "callbacks.model_summary": "ModelSummary RichModelSummary summarize",
    "callbacks.on_exception_checkpoint": "OnExceptionCheckpoint",
    "callbacks.prediction_writer": "BasePredictionWriter WriteInterval",
    "callbacks.progress": "ProgressBar",
    "callbacks.rich_progress": "RichProgressBar RichProgressBarTheme",
    "callbacks.stochastic_weight_averaging": "StochasticWeightAveraging",
    "callbacks.throughput_monitor": "Throughput ThroughputMonitor measure_flops",
    "callbacks.timer": "Timer",
    "callbacks.tqdm_progress": "TQDMProgressBar",
    "callbacks.weight_averaging": "EMAWeightAveraging WeightAveraging",
    "checkpoint.checkpoint_io": "AsyncCheckpointIO CheckpointIO TorchCheckpointIO",
    "checkpoint.hyperparameters": "AttributeDict HyperparametersMixin",
    "data.combined_loader": "CombinedLoader",
    "loggers.base": "DummyLogger Logger rank_zero_experiment",
    "loggers.comet": "CometLogger",
    "loggers.csv": "CSVLogger ExperimentWriter",
    "loggers.mlflow": "MLFlowLogger",
    "loggers.tensorboard": "TensorBoardLogger",
    "loggers.wandb": "WandbLogger",
    "cli.argument_parser": "ArgsType LRSchedulerCallable OptimizerCallable ReduceLROnPlateau instantiate_class",
    "cli.trainer_cli": "SaveConfigCallback",
    "compat.lightning.exceptions": "MisconfigurationException SIGTERMException",
    "checkpoint.instantiate": "instantiate_module",
    "checkpoint.hparams_files": "load_hparams_from_tags_csv load_hparams_from_yaml save_hparams_to_yaml",
    "compat.lightning.demos": (
        "BoringDataModule BoringModel DemoModel IterableBoringDataModule ManualOptimBoringModel RandomDataset "
        "RandomDictDataset RandomIterableDataset RandomIterableDatasetWithLen"
    ),
    "compat.lightning.library_functions": (
        "find_usable_cuda_devices garbage_collection_cuda get_filesystem get_init_args is_cuda_available is_picklable "
        "lightning_getattr lightning_hasattr lightning_setattr recursive_detach save_hyperparameters "
        "Interval get_standard_metrics convert_inf multiplicative do_nothing_closure merge_dicts "
        "pl_worker_init_function LightningEnum is_shared_filesystem convert_to_tensors "
        "convert_tensors_to_scalars disable_possible_user_warnings is_param_in_hook_signature migrate_checkpoint"
    ),
    "compat.lightning.collectives": "CollectibleGroup Collective SingleDeviceCollective TorchCollective",
    "compat.lightning.fabric_wrappers": "is_wrapped",
    "compat.lightning.tqdm_class": "Tqdm",
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
    "strategies.registry": "StrategyRegistry",
    "strategies.sync_batch_norm": "LayerSync TorchSyncBatchNorm",
    "strategies.precision": (
        "BitsandbytesPrecision DoublePrecision HalfPrecision MixedPrecision Precision TransformerEnginePrecision"
    ),
    "trainer.states": "RunningStage TrainerFn TrainerStatus",
    "trainer.trainer": "Trainer",
    "tuner.batch_size_finder": "BatchSizeFinder",
    "tuner.lr_finder": "LearningRateFinder",
    "tuner.tuner": "Tuner",
    "utilities.data": "has_iterable_dataset has_len has_len_all_ranks suggested_max_num_workers",
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

#: Lightning names that differ from Paceline's.
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
    "Fabric": Target("compat.lightning.fabric", "Fabric"),
    "STRATEGY_REGISTRY": Target("strategies.registry", "StrategyRegistry"),
    "XLAAccelerator": Target("processes.accelerators", "TPUAccelerator"),
    "_AcceleratorConnector": Target("compat.lightning.views", "AcceleratorConnector"),
    "_EvaluationLoop": Target("compat.lightning.own_loops", "OwnEvaluationLoop"),
    "_FabricDataLoader": Target("accelerator.loaders", "PreparedLoader"),
    "_FabricModule": Target("compat.lightning.fabric_wrappers", "FabricModule"),
    "_FabricOptimizer": Target("accelerator.optimizers", "AcceleratedOptimizer"),
    "_LRFinder": Target("tuner.lr_range_test", "LRFinder"),
    "_unwrap_objects": Target("compat.lightning.fabric_wrappers", "unwrapped_in"),
    "_runif_reasons": Target("compat.lightning.testing", "runif_reasons"),
    "extract_batch_size": Target("compat.lightning.library_functions", "extract_batch_size"),
    "sized_len": Target("data.sample_order", "length_of"),
    "from_compiled": Target("strategies.compile_networks", "uncompiled"),
    "SpikeDetection": Target("compat.lightning.callbacks", "SpikeDetection"),
    "ThroughputMonitor": Target("compat.lightning.throughput", "ThroughputMonitor"),
    "TrainingSpikeException": Target("callbacks.loss_guard", "LossSpikeError"),
    "get_available_flops": Target("callbacks.throughput_monitor", "peak_flops"),
    "ACCELERATOR_REGISTRY": Target("processes.accelerators", "AcceleratorRegistry"),
    "ParallelStrategy": Target("strategies.distributed", "DistributedStrategy"),
    "is_cudnn_snafu": Target("memory.out_of_memory_retry", "is_out_of_memory"),
    "is_out_of_cpu_memory": Target("memory.out_of_memory_retry", "is_out_of_memory"),
    "is_cuda_out_of_memory": Target("memory.out_of_memory_retry", "is_out_of_memory"),
    "is_oom_error": Target("memory.out_of_memory_retry", "is_out_of_memory"),
    "get_cpu_stats": Target("callbacks.device_stats_monitor", "cpu_stats"),
    "to_uncompiled": Target("strategies.compile_networks", "uncompiled"),
    "get_human_readable_count": Target("callbacks.model_summary", "human_readable"),
    "move_data_to_device": Target("processes.device_transfer", "move"),
}
_NOT_HERE = {
    "use TorchCheckpointIO": "XLACheckpointIO",
    "choose one of the loggers in paceline.loggers": "LitLogger NeptuneLogger",
    "a Strategy sets up its own precision": "DeepSpeedPrecision FSDPPrecision",
    "the loop has no closures": "Closure",
    "Paceline shards loaders in their own classes": "DistributedSamplerWrapper",
    "Paceline does not support TPUs": "SingleDeviceXLAStrategy XLAEnvironment XLAPrecision XLAStrategy",
    "a Strategy shards models and averages gradients; use torch.distributed for your own collectives": (
        "DataParallelStrategy DistributedDataParallel UnrepeatedDistributedSampler "
        "UnrepeatedDistributedSamplerWrapper XLAFSDPStrategy prepare_for_backward remove_module_hooks"
    ),
    "the loop stores step results itself": (
        "AbstractClosure ClosureResult ManualResult OutputResult RestartStage check_finite_loss"
    ),
    "TrainingModule and DataModule have its methods": "CheckpointHooks DataHooks ModelHooks",
    "it belongs to Lightning's demos": (
        "BoringDataModuleNoLen Dictionary LightningLSTM LightningTransformer MNIST MNISTDataModule Net "
        "PositionalEncoding SequenceSampler SimpleLSTM Transformer WikiText2 get_torchvision_model tokenize"
    ),
    "use `paceline checkpoint export`": (
        "convert_zero_checkpoint_to_fp32_state_dict ds_checkpoint_dir main pl_legacy_patch"
    ),
    "use ModelSummary": (
        "DeepSpeedLayerSummary DeepSpeedSummary LayerSummary PARAMETER_NUM_UNITS UNKNOWN_SIZE NOT_APPLICABLE "
        "deepspeed_param_size get_formatted_model_size parse_batch_shape"
    ),
    "use DeviceStatsMonitor": "get_device_stats get_nvidia_gpu_stats",
    "use torch.profiler": "XLAProfiler",
    "RichProgressBar draws its rows itself; override get_metrics, or pass a theme": (
        "BatchesProcessedColumn CustomBarColumn CustomInfiniteTask CustomProgress CustomTimeColumn MetricsTextColumn "
        "ProcessingSpeedColumn"
    ),
    "Paceline does not serve models": "ServableModule ServableModuleValidator",
    "Paceline does not download models": "download_model_from_registry find_model_local_ckpt_path",
    "use save_hyperparameters": (
        "CHECKPOINT_PAST_HPARAMS_KEYS clean_namespace collect_init_args convert parse_class_init_keys "
        "save_hparams_to_tags_csv update_hparams"
    ),
    "seed_everything also seeds loader workers": "max_seed_value min_seed_value",
    "precision='64-true' converts the module itself": "LightningDoublePrecisionModule",
    "AcceleratorRegistry is a dict": "call_register_accelerators",
    "it has no meaning in Paceline": (
        "BType CONVERSION_DTYPES CPU_DEVICE FRAMEWORK_NAME LEFTOVER_PARAMS_NAME LOCAL_FILE_URI_PREFIX LRSchedulerType "
        "MODULE_OPTIMIZERS ModuleType Steppable TBroadcast TModel TReduce T_destination "
        "UntypedStorage comet_experiment"
    ),
}
UNSUPPORTED = {name: why for why, names in _NOT_HERE.items() for name in names.split()}
TARGETS = {name: Target(home, name) for home, names in _HOMES.items() for name in names.split()} | _RENAMED

_RANK_ZERO = (
    "LightningDeprecationWarning WarningCache rank_prefixed_message rank_zero_debug rank_zero_deprecation "
    "rank_zero_info rank_zero_only rank_zero_warn"
)
_TYPES = _HOMES["utilities.types"]
#: Private names that programs import nevertheless, by module.
_PRIVATE = {
    "pytorch.accelerators": "AcceleratorRegistry",
    "pytorch.accelerators.cuda": "num_cuda_devices",
    "pytorch.core.module": "LightningOptimizer",
    "pytorch.core.saving": "get_filesystem",
    "pytorch.loggers.logger": "DummyExperiment",
    "pytorch.loops": "_EvaluationLoop",
    "pytorch.loops.evaluation_loop": "_EvaluationLoop",
    "pytorch.plugins.io.checkpoint_plugin": "CheckpointIO",
    "pytorch.plugins.io.torch_plugin": "TorchCheckpointIO",
    "pytorch.strategies": "StrategyRegistry",
    "pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch.tuner.lr_finder": "_LRFinder",
    "pytorch.utilities": "is_overridden",
    "pytorch.utilities.data": "has_iterable_dataset has_len",
    "pytorch.utilities.exceptions": "MisconfigurationException",
    "pytorch.utilities.rank_zero": _RANK_ZERO,
    "pytorch.utilities.testing": "_runif_reasons",
    "pytorch.utilities.types": _TYPES,
    "pytorch.utilities.warnings": "PossibleUserWarning",
    "fabric.accelerators": "AcceleratorRegistry",
    "fabric.fabric": "_FabricDataLoader _FabricModule _FabricOptimizer _unwrap_objects is_wrapped",
    "fabric.utilities.rank_zero": _RANK_ZERO,
    "fabric.utilities.seed": "isolate_rng",
    "fabric.utilities.testing": "_runif_reasons",
    "fabric.utilities.types": _TYPES,
    "fabric.wrappers": "_FabricDataLoader _FabricModule _FabricOptimizer _unwrap_objects",
    "pytorch._graveyard": "",
}


def _table() -> dict[str, dict[str, Target]]:
    table = {
        module: {name: TARGETS[name] for name in names.split() if name in TARGETS} for module, names in SURFACE.items()
    }
    for module, names in _PRIVATE.items():
        table.setdefault(f"lightning.{module}", {}).update({name: TARGETS[name] for name in names.split()})
    # The command line has its own scheduler types, because its plateau scheduler also stores the metric's name.
    table["lightning.pytorch.cli"]["LRSchedulerTypeTuple"] = Target("cli.argument_parser", "LRSchedulerTypeTuple")
    for module in ("", ".csv_logs", ".tensorboard"):
        names = table[f"lightning.fabric.loggers{module}"]
        for name in names.keys() & {"CSVLogger", "TensorBoardLogger"}:
            names[name] = Target("compat.lightning.fabric_loggers", f"Fabric{name}")
    for module in ("", ".throughput"):
        names = table[f"lightning.fabric.utilities{module}"]
        names["ThroughputMonitor"] = Target("compat.lightning.fabric_loggers", "ThroughputMonitor")
    # In these modules, ModelSummary is the class that describes a module, not the callback that prints the description.
    for name in ("", ".model_summary"):
        of_summaries = table[f"lightning.pytorch.utilities.model_summary{name}"]
        of_summaries["ModelSummary"] = Target("callbacks.model_summary", "Summary")
    return table


def fallback(name: str) -> Any:
    """Return the value of a name that is in no module's table."""
    from . import private

    if name in UNSUPPORTED:
        return placeholder(name, f"is not available: {UNSUPPORTED[name]}")
    return private.find(name)


def change_behaviours() -> None:
    """Make Paceline's classes behave as programs written for Lightning expect."""
    from . import behaviours

    behaviours.install(VERSION)


CONSTANTS: dict[str, dict[str, Any]] = {}

PACKAGE = Package(
    name="lightning",
    version=VERSION,
    modules=_table(),
    everywhere=TARGETS,
    constants=CONSTANTS,
    aliases={"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"},
    distributions=("lightning", "pytorch-lightning", "lightning-fabric"),
    fallback=fallback,
    on_import=change_behaviours,
    homepage="https://github.com/Lightning-AI/lightning",
)

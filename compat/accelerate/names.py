"""Paceline's replacement for each name in ``accelerate`` and its modules.

Every module exposes all names, so a program can import ``set_seed`` from any of them.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

from ..finder import UNKNOWN, Package, Target, placeholder, surface
from . import probes

#: The version of Accelerate that has these names; programs see this version as the installed one.
VERSION = "1.15.0"
SURFACE = surface("accelerate")

MODULES = frozenset(module.removeprefix("accelerate").removeprefix(".") for module in SURFACE) - {""}

#: Paceline's modules, and the Accelerate names that they define.
_PLACES = {
    "compat.accelerate.accelerator": "Accelerator",
    "compat.accelerate.configs": "ParallelismConfig TorchDynamoPlugin",
    "accelerator.enums": (
        "ComputeEnvironment CustomDtype DDPCommunicationHookType DistributedType DynamoBackend EnumWithContains "
        "FP8BackendType LoggerType PrecisionType RNGType SageMakerDistributedType"
    ),
    "accelerator.kwargs_handlers": (
        "AORecipeKwargs AutocastKwargs DistributedDataParallelKwargs FP8RecipeKwargs GradScalerKwargs "
        "InitProcessGroupKwargs KwargsHandler MSAMPRecipeKwargs ProfileKwargs TERecipeKwargs"
    ),
    "accelerator.launchers": "debug_launcher notebook_launcher",
    "accelerator.loaders": "DataLoaderConfiguration skip_first_batches",
    "accelerator.local_sgd": "LocalSGD",
    "accelerator.logging": "MultiProcessAdapter get_logger",
    "accelerator.nested_tensors": (
        "ConvertOutputsToFp32 TensorInformation concatenate convert_outputs_to_fp32 convert_to_fp32 find_batch_size "
        "find_device get_data_structure honor_type ignorant_find_batch_size initialize_tensors is_namedtuple "
        "is_torch_tensor listify pad_input_tensors recursively_apply send_to_device slice_tensors"
    ),
    "accelerator.operations": "CannotPadNestedTensorWarning DistributedOperationException",
    "accelerator.parallelism_config": (
        "DeepSpeedSequenceParallelConfig TorchContextParallelConfig TorchTensorParallelConfig"
    ),
    "accelerator.plugins": "GradientAccumulationPlugin ProjectConfiguration",
    "accelerator.process_state": "AcceleratorState PartialState is_initialized",
    "accelerator.progress_bar": "tqdm",
    "accelerator.quantization": (
        "BnbQuantizationConfig get_keys_to_not_convert get_quantized_model_device_map has_4bit_bnb_layers "
        "load_and_quantize_model replace_with_bnb_layers"
    ),
    "accelerator.random_seeds": "set_seed synchronize_rng_state synchronize_rng_states",
    "accelerator.trackers": (
        "AimTracker ClearMLTracker CometMLTracker DVCLiveTracker GeneralTracker MLflowTracker SwanLabTracker "
        "TensorBoardTracker TrackioTracker WandBTracker filter_trackers get_available_trackers on_main_process "
        "register_tracker_class"
    ),
    "big_model.dispatch": (
        "attach_layerwise_casting_hooks cpu_offload cpu_offload_with_hook disk_offload dispatch_model"
    ),
    "big_model.empty_init": "init_empty_weights init_on_device",
    "big_model.hooks": (
        "AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook UserCpuOffloadHook "
        "add_hook_to_module remove_hook_from_module remove_hook_from_submodules"
    ),
    "big_model.loading": "load_checkpoint_and_dispatch load_checkpoint_in_model",
    "big_model.offload": (
        "OffloadedWeightsLoader PrefixedDataset load_offloaded_weight offload_state_dict offload_weight "
        "save_offload_index"
    ),
    "big_model.module_sizes": "compute_module_sizes find_tied_parameters",
    "memory.out_of_memory_retry": "clear_device_cache release_memory",
    "compat.accelerate.big_model": (
        "align_module_device attach_align_device_hook attach_align_device_hook_on_blocks "
        "attach_execution_device_hook calculate_maximum_sizes check_tied_parameters_in_config "
        "check_tied_parameters_on_same_device clean_device_map compute_module_total_buffer_size "
        "extract_submodules_state_dict get_balanced_memory get_max_layer_size get_max_memory "
        "get_module_size_with_ties get_non_persistent_buffers get_state_dict_from_offload "
        "get_state_dict_offloaded_model has_offloaded_params id_tensor_storage infer_auto_device_map "
        "load_offloaded_weights load_state_dict named_module_tensors retie_parameters set_module_tensor_to_device"
    ),
    "compat.accelerate.deepspeed": (
        "DeepSpeedPlugin DummyOptim DummyScheduler HfDeepSpeedConfig get_active_deepspeed_plugin"
    ),
    "compat.accelerate.details": (
        "AmaxComputeAlgorithm Backend CPUInformation ConversionStatus FP8Format OptLevel "
        "ProfilerActivity SharedDict TENSOR_INT_TO_DTYPE TENSOR_TYPE_TO_INT ThreadLocalSharedDict chained_operation "
        "check_cuda_p2p_ib_support check_device_same deepspeed_required disable_fsdp_ram_efficient_loading do_nothing "
        "enable_fsdp_ram_efficient_loading filter_linear_layers find_first_last_linear_layers gather_tensor_shape "
        "get_cpu_distributed_information get_free_port get_gpu_info get_model_tp_size get_module_class_from_name "
        "get_module_leaves get_parameter_device get_parameters_from_modules get_shape has_repeated_blocks "
        "is_repeated_blocks move_to_device override_numa_affinity patch_optimizer_step set_numa_affinity test_launch "
        "torch_version torchao_required verify_operation"
    ),
    "compat.accelerate.environment": (
        "are_libraries_initialized check_os_kernel clear_environment compare_versions convert_dict_to_env_variables "
        "default_config_file get_current_device_type get_int_from_env is_port_in_use is_torch_version "
        "load_config_from_file parse_choice_from_env parse_flag_from_env patch_environment "
        "purge_accelerate_environment str_to_bool write_basic_config"
    ),
    "compat.accelerate.fsdp_plugin": "FullyShardedDataParallelPlugin",
    "compat.accelerate.gradient_state": "GradientState",
    "compat.accelerate.inference": "prepare_pippy",
    "compat.accelerate.loader_classes": (
        "DataLoaderAdapter DataLoaderDispatcher DataLoaderShard SkipDataLoader get_sampler"
    ),
    "compat.accelerate.memory": "find_executable_batch_size",
    "compat.accelerate.models": (
        "clean_state_dict_for_safetensors compile_regions fsdp2_prepare_model get_module_children_bottom_up "
        "has_compiled_regions is_compiled_module load_fsdp_model load_fsdp_optimizer model_has_dtensor "
        "save_fsdp_model save_fsdp_optimizer"
    ),
    "compat.accelerate.processes": (
        "broadcast broadcast_object_list copy_tensor_to_devices gather gather_object load pad_across_processes "
        "prepare_data_loader reduce save wait_for_everyone"
    ),
    "compat.accelerate.samplers": "BatchSamplerShard IterableDatasetShard SeedableRandomSampler SkipBatchSampler",
    "compat.accelerate.wrappers": "AcceleratedOptimizer AcceleratedScheduler",
    "compat.accelerate.values": (
        "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING convert_bytes convert_file_size_to_int dtype_byte_size "
        "get_pretty_name is_tensor_information merge_dicts recursive_getattr"
    ),
}

#: Accelerate names that differ from Paceline's.
_RENAMED = {
    "BaseEnum": Target("accelerator.enums", "Word"),
    "LOGGER_TYPE_TO_CLASS": Target("accelerator.trackers", "_classes"),
    "check_device_map": Target("big_model.device_map", "check_coverage"),
    "extract_model_from_parallel": Target("accelerator.models", "unwrap_model"),
    "DataLoaderStateMixin": Target("compat.accelerate.loaders", "DataLoaderShard"),
    "should_reduce_batch_size": Target("memory.out_of_memory_retry", "is_out_of_memory"),
}

CONSTANTS: dict[str, Any] = {
    "BETA_CP_AVAILABLE_PYTORCH_VERSION": "2.6.0",
    "BETA_SP_AVAILABLE_DEEPSPEED_VERSION": "0.18.2",
    "BETA_TP_AVAILABLE_PYTORCH_VERSION": "2.3.0",
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION": "4.52.0",
    "CUDA_DISTRIBUTED_TYPES": ["MULTI_GPU", "FSDP", "MEGATRON_LM"],
    "DEEPSPEED_MULTINODE_LAUNCHERS": ["pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"],
    "DTENSOR_PYTORCH_VERSION": "2.5.0",
    "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION": "2.2.0",
    "FSDP2_PYTORCH_VERSION": "2.6.0",
    "FSDP_PYTORCH_VERSION": "2.1.0.a0+32f93b1",
    "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION": "2.1.0",
    "SAGEMAKER_PARALLEL_EC2_INSTANCES": ["ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4dn.24xlarge"],
    "SAGEMAKER_PYTHON_VERSION": "py38",
    "SAGEMAKER_PYTORCH_VERSION": "1.10.2",
    "SAGEMAKER_TRANSFORMERS_VERSION": "4.17.0",
    "STR_OPERATION_TO_FUNC": {
        ">": operator.gt,
        ">=": operator.ge,
        "==": operator.eq,
        "!=": operator.ne,
        "<=": operator.le,
        "<": operator.lt,
    },
    "TORCH_DISTRIBUTED_OPERATION_TYPES": ["DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP", "MULTI_CPU"],
    "TORCH_LAUNCH_PARAMS": [
        *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"),
        *("max_restarts", "monitor_interval", "start_method", "role", "module", "m", "no_python", "run_path"),
        *("log_dir", "r", "redirects", "t", "tee", "node_rank", "master_addr", "master_port"),
    ],
    "TORCH_SAFE_GLOBALS": [],
    "USE_TORCH_XLA": False,
    "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION": "2.4.0",
    "FSDP_AUTO_WRAP_POLICY": ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
    "FSDP_BACKWARD_PREFETCH": ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"],
    "FSDP_MODEL_NAME": "pytorch_model_fsdp",
    "FSDP_SHARDING_STRATEGY": ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"],
    "FSDP_STATE_DICT_TYPE": ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"],
    "FSDP2_STATE_DICT_TYPE": ["SHARDED_STATE_DICT", "FULL_STATE_DICT"],
    "MODEL_NAME": "pytorch_model",
    "OPTIMIZER_NAME": "optimizer",
    "PROFILE_PATTERN_NAME": "profile_{suffix}.json",
    "RNG_STATE_NAME": "random_states",
    "SAFE_MODEL_NAME": "model",
    "SAFE_WEIGHTS_INDEX_NAME": "model.safetensors.index.json",
    "SAFE_WEIGHTS_NAME": "model.safetensors",
    "SAFE_WEIGHTS_PATTERN_NAME": "model{suffix}.safetensors",
    "SAMPLER_NAME": "sampler",
    "SCALER_NAME": "scaler.pt",
    "SCHEDULER_NAME": "scheduler",
    "TORCH_DYNAMO_MODES": ["default", "reduce-overhead", "max-autotune"],
    "WEIGHTS_INDEX_NAME": "pytorch_model.bin.index.json",
    "WEIGHTS_NAME": "pytorch_model.bin",
    "WEIGHTS_PATTERN_NAME": "pytorch_model{suffix}.bin",
}

#: Error messages for names that can be imported but not called.
_LEFT_OUT = {
    "Use prepare_pippy(model, example_args=...), or dispatch_model": (
        "build_pipeline find_pippy_batch_size generate_device_map pippy_forward"
    ),
    "Run `paceline config`, or paceline.settings.write_file": (
        "SubcommandHelpFormatter default_command_parser default_config_command description get_cluster_input "
        "get_user_input update_command_parser update_config update_config_command"
    ),
    "Run `paceline estimate-memory`": (
        "add_timm_hub_prefix check_has_model create_ascii_table create_empty_model estimate_training_usage "
        "gather_data verify_on_hub"
    ),
    "Paceline reads FSDP 1 configuration files unchanged": (
        "ARGUMENT_KEY_MAPPING ARGUMENT_VALUE_MAPPING convert_config_to_fsdp2 load_config to_fsdp2_command"
    ),
    "Paceline does not start jobs on SageMaker or TPU pods. Run `paceline launch` on those machines": (
        "SageMakerConfig get_sagemaker_input sagemaker_launcher tpu_command_launcher tpu_launcher tpu_pod_launcher"
    ),
    "Run `paceline test`": "test_ops test_script test_sync",
    "This function compares Accelerate's own examples with each other. Compare files with difflib": (
        "clean_lines compare_against_test get_function_contents_by_name mocked_dataloaders_for_autoregressive_models"
    ),
    "Use infer_auto_device_map": "fallback_allocate",
    "Import it from NumPy": "np_core",
    "Paceline's checkpoints contain sharded states. Use accelerator.save_state() and accelerator.load_state(), and "
    "accelerator.get_state_dict(model) for full weights": (
        "compile_regions_fsdp2 ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names "
        "fsdp2_load_full_state_dict fsdp2_prepare_auto_wrap_policy "
        "fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler load_accelerator_state load_custom_state "
        "merge_fsdp_weights save_accelerator_state save_custom_state"
    ),
    "Paceline creates the DeepSpeed engine in accelerator.prepare. Pass a torch optimizer and scheduler to prepare": (
        "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper GatheredParameters "
        "compile_regions_deepspeed deepspeed_launcher map_pytorch_optim_to_deepspeed"
    ),
    "Paceline does not support Megatron-LM. Use Accelerator(parallelism_config=ParallelismConfig(tp_size=...))": (
        "AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader "
        "MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMPlugin MegatronLMSchedulerWrapper T5TrainStep "
        "add_model_config_to_megatron_parser avg_losses_across_data_parallel_group "
        "MODEL_CONFIGS_TO_MEGATRON_PARSERS finish_mpu_init gather_across_data_parallel_groups initialize "
        "megatron_lm_initialize megatron_lm_prepare_data_loader megatron_lm_prepare_model_optimizer_scheduler "
        "megatron_lm_prepare_optimizer megatron_lm_prepare_scheduler model_provider_func parse_bert_config "
        "parse_glm4_moe_config parse_gpt2_config parse_llama_config parse_t5_config "
        "prepare_model_optimizer_scheduler prepare_optimizer prepare_scheduler"
    ),
    "Accelerator(mixed_precision='fp8') converts the layers itself, through torchao or TransformerEngine": (
        "apply_fp8_autowrap check_cuda_fp8_capability contextual_fp8_autocast convert_model convert_model_to_fp8_ao "
        "filter_first_and_last_linear_layers has_ao_layers has_transformer_engine_layers setup_fp8_env"
    ),
    "Quantized layers cannot be offloaded. Use load_and_quantize_model": "quantize_and_offload_8bit",
    "Start processes with `paceline launch`, notebook_launcher or torchrun": (
        "CustomArgumentGroup CustomArgumentParser CustomHelpFormatter MpDeviceLoaderWrapper PrepareForLaunch "
        "clean_option env_var_path_add get_driver_version install_xla options_to_group prepare_deepspeed_cmd_env "
        "prepare_extend_env_parallelism_config prepare_sagemager_args_inputs prepare_tpu"
    ),
    "An Accelerator creates its own scaler and autocast. Use accelerator.backward(loss) and accelerator.autocast()": (
        "get_grad_scaler get_mixed_precision_context_manager"
    ),
    "Split layers with Accelerator(parallelism_config=ParallelismConfig(tp_size=...))": ("TorchTensorParallelPlugin"),
}
_REQUIREMENTS = {
    name for module in SURFACE if ".test_utils" in module for name in SURFACE[module].split() if name[:8] == "require_"
}
#: Names that only these modules have.
_ONLY_IN = {
    "commands": {
        "compat.accelerate.commands": (
            "BaseConfig ClusterConfig cache_dir config_command config_command_parser default_json_config_file "
            "default_yaml_config_file env_command env_command_parser estimate_command estimate_command_parser "
            "get_config_parser hf_cache_home launch_command launch_command_parser main merge_command "
            "merge_command_parser multi_gpu_launcher simple_launcher test_command test_command_parser "
            "to_fsdp2_command_parser tpu_command_parser DYNAMO_BACKENDS _validate_launch_command"
        ),
    },
    "big_modeling": {"compat.accelerate.details": "_refuse_recurrent_layers_under_sequence_parallelism"},
    "utils": {"compat.accelerate.commands": "prepare_multi_gpu_env prepare_simple_launcher_cmd_env"},
    "test_utils": {
        "compat.accelerate.testing": (
            "AccelerateTestCase DEFAULT_LAUNCH_COMMAND MockingTestCase RegressionDataset RegressionModel "
            "SubprocessCallException TempDirTestCase are_the_same_tensors assert_exception capture_call_output "
            "device_count execute_subprocess_async get_backend get_launch_command get_torch_dist_unique_port "
            "memory_allocated_func mocked_dataloaders path_in_accelerate_package pytest_xdist_worker_id "
            "require_torch_min_version run_command run_first skip slow torch_device " + " ".join(_REQUIREMENTS)
        ),
    },
}
TARGETS = {name: Target(place, name) for place, listed in _PLACES.items() for name in listed.split()} | _RENAMED
UNSUPPORTED = {name: why for why, listed in _LEFT_OUT.items() for name in listed.split()}
ALL = sorted({*TARGETS, *CONSTANTS, *UNSUPPORTED, *probes.ANSWERS})
_VALUES = CONSTANTS | probes.ANSWERS


@functools.cache
def fallback(name: str) -> Any:
    """Return a placeholder for a name that only Accelerate has; UNKNOWN if Accelerate does not have the name either."""
    return placeholder(name, f"is not available: {UNSUPPORTED[name]}") if name in UNSUPPORTED else UNKNOWN


def _targets(module: str) -> dict[str, Target]:
    """Return the names in one module."""
    found = dict(TARGETS)
    for where, places in _ONLY_IN.items():
        if f"{module}.".startswith(f"{where}."):
            found |= {name: Target(place, name) for place, listed in places.items() for name in listed.split()}
    return found


PACKAGE = Package(
    name="accelerate",
    version=VERSION,
    modules={f"accelerate.{module}".rstrip("."): _targets(module) for module in ("", *MODULES)},
    constants={f"accelerate.{module}".rstrip("."): _VALUES for module in ("", *MODULES)},
    distributions=("accelerate",),
    fallback=fallback,
    homepage="https://github.com/huggingface/accelerate",
    check_early=("transformers", "diffusers", "peft", "trl", "sentence_transformers"),
)

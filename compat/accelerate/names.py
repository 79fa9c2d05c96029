"""Paceline's replacement for each name in ``accelerate`` and its modules.

Every module exposes all names, so a program can import ``set_seed`` from any of them.
"""

from __future__ import annotations

import functools
from typing import Any

from ..finder import UNKNOWN, Package, Target, placeholder
from . import probes

#: The version of Accelerate that has these names; programs see it as the installed version.
VERSION = "1.15.0"

#: Modules by package; "" is accelerate itself.
_MODULES = {
    "": (
        "accelerator big_modeling checkpointing commands data_loader hooks inference launchers local_sgd logging "
        "memory_utils optimizer parallelism_config scheduler state tracking utils"
    ),
    "commands.": "config launch",
    "utils.": (
        "ao bnb constants dataclasses deepspeed environment fsdp_utils imports launch megatron_lm memory modeling "
        "offload operations other random torch_xla tqdm transformer_engine versions"
    ),
}
MODULES = frozenset(f"{package}{name}" for package, listed in _MODULES.items() for name in listed.split())

#: Paceline's modules, and the Accelerate names that they define.
_PLACES = {
    "compat.accelerate.accelerator": "Accelerator",
    "compat.accelerate.configs": "ParallelismConfig TorchDynamoPlugin",
    "accelerator.enums": (
        "ComputeEnvironment CustomDtype DDPCommunicationHookType DistributedType DynamoBackend FP8BackendType "
        "LoggerType PrecisionType RNGType SageMakerDistributedType"
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
    "accelerator.optimizers": "AcceleratedOptimizer",
    "accelerator.parallelism_config": (
        "DeepSpeedSequenceParallelConfig TorchContextParallelConfig TorchTensorParallelConfig"
    ),
    "accelerator.plugins": (
        "DeepSpeedPlugin FullyShardedDataParallelPlugin GradientAccumulationPlugin ProjectConfiguration"
    ),
    "accelerator.process_state": "AcceleratorState PartialState is_initialized",
    "accelerator.progress_bar": "tqdm",
    "accelerator.random_seeds": "set_seed synchronize_rng_state synchronize_rng_states",
    "accelerator.schedulers": "AcceleratedScheduler",
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
    "big_model.infer_device_map": "get_balanced_memory get_max_memory infer_auto_device_map",
    "big_model.module_sizes": "compute_module_sizes find_tied_parameters",
    "memory.out_of_memory_retry": "clear_device_cache release_memory",
    "compat.accelerate.big_model": (
        "align_module_device attach_align_device_hook attach_align_device_hook_on_blocks "
        "attach_execution_device_hook calculate_maximum_sizes check_tied_parameters_in_config "
        "check_tied_parameters_on_same_device clean_device_map compute_module_total_buffer_size "
        "extract_submodules_state_dict get_max_layer_size get_module_size_with_ties get_non_persistent_buffers "
        "get_state_dict_from_offload get_state_dict_offloaded_model has_offloaded_params id_tensor_storage "
        "load_offloaded_weights load_state_dict named_module_tensors retie_parameters set_module_tensor_to_device"
    ),
    "compat.accelerate.environment": (
        "are_libraries_initialized check_os_kernel clear_environment compare_versions convert_dict_to_env_variables "
        "default_config_file get_current_device_type get_int_from_env is_port_in_use is_torch_version "
        "load_config_from_file parse_choice_from_env parse_flag_from_env patch_environment "
        "purge_accelerate_environment str_to_bool write_basic_config"
    ),
    "compat.accelerate.gradient_state": "GradientState",
    "compat.accelerate.loader_classes": (
        "DataLoaderAdapter DataLoaderDispatcher DataLoaderShard SkipDataLoader get_sampler"
    ),
    "compat.accelerate.memory": "find_executable_batch_size",
    "compat.accelerate.models": (
        "clean_state_dict_for_safetensors compile_regions extract_model_from_parallel get_module_children_bottom_up "
        "has_compiled_regions is_compiled_module load_fsdp_model load_fsdp_optimizer model_has_dtensor "
        "save_fsdp_model save_fsdp_optimizer"
    ),
    "compat.accelerate.processes": (
        "broadcast broadcast_object_list copy_tensor_to_devices gather gather_object load pad_across_processes "
        "prepare_data_loader reduce save wait_for_everyone"
    ),
    "compat.accelerate.samplers": "BatchSamplerShard IterableDatasetShard SeedableRandomSampler SkipBatchSampler",
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
    "DataLoaderStateMixin": Target("accelerator.loaders", "PreparedLoader"),
    "should_reduce_batch_size": Target("memory.out_of_memory_retry", "is_out_of_memory"),
}

CONSTANTS: dict[str, Any] = {
    "BETA_CP_AVAILABLE_PYTORCH_VERSION": "2.6.0",
    "BETA_SP_AVAILABLE_DEEPSPEED_VERSION": "0.18.2",
    "BETA_TP_AVAILABLE_PYTORCH_VERSION": "2.3.0",
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION": "4.52.0",
    "CUDA_DISTRIBUTED_TYPES": ["MULTI_GPU", "FSDP", "MEGATRON_LM"],
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
    "Paceline has no inference-only pipelines. Spread the model with dispatch_model(model, device_map='auto')": (
        "prepare_pippy"
    ),
    "Paceline's checkpoints contain sharded states. Use accelerator.save_state() and accelerator.load_state(), and "
    "accelerator.get_state_dict(model) for full weights": (
        "compile_regions_fsdp2 disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading "
        "ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_load_full_state_dict "
        "fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler "
        "get_parameters_from_modules load_accelerator_state load_custom_state "
        "merge_fsdp_weights save_accelerator_state save_custom_state"
    ),
    "Paceline creates the DeepSpeed engine in accelerator.prepare. Pass it a torch optimizer and scheduler": (
        "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DummyOptim DummyScheduler "
        "GatheredParameters HfDeepSpeedConfig compile_regions_deepspeed get_active_deepspeed_plugin "
        "map_pytorch_optim_to_deepspeed"
    ),
    "Paceline does not support Megatron-LM. Use Accelerator(parallelism_config=ParallelismConfig(tp_size=...))": (
        "AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader "
        "MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMPlugin MegatronLMSchedulerWrapper T5TrainStep "
        "add_model_config_to_megatron_parser avg_losses_across_data_parallel_group "
        "gather_across_data_parallel_groups"
    ),
    "Paceline trains in 16 and 32 bits, without quantized weights. Use mixed_precision='bf16'": (
        "BnbQuantizationConfig apply_fp8_autowrap check_cuda_fp8_capability contextual_fp8_autocast convert_model "
        "convert_model_to_fp8_ao filter_first_and_last_linear_layers has_4bit_bnb_layers has_ao_layers "
        "has_transformer_engine_layers load_and_quantize_model"
    ),
    "Start processes with `paceline launch`, notebook_launcher or torchrun": (
        "PrepareForLaunch check_cuda_p2p_ib_support get_cpu_distributed_information get_gpu_info install_xla "
        "launch_command override_numa_affinity prepare_deepspeed_cmd_env prepare_multi_gpu_env "
        "prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu set_numa_affinity"
    ),
    "An Accelerator creates its own scaler and autocast. Use accelerator.backward(loss) and accelerator.autocast()": (
        "get_grad_scaler get_mixed_precision_context_manager"
    ),
    "Split layers with Accelerator(parallelism_config=ParallelismConfig(tp_size=...))": (
        "TorchTensorParallelPlugin get_model_tp_size"
    ),
}
TARGETS = {name: Target(place, name) for place, listed in _PLACES.items() for name in listed.split()} | _RENAMED
UNSUPPORTED = {name: why for why, listed in _LEFT_OUT.items() for name in listed.split()}
ALL = sorted({*TARGETS, *CONSTANTS, *UNSUPPORTED, *probes.ANSWERS})
_VALUES = CONSTANTS | probes.ANSWERS


@functools.cache
def fallback(name: str) -> Any:
    """Return a placeholder for a name that Paceline does not have; UNKNOWN if Accelerate does not have it either."""
    return placeholder(name, f"is not available: {UNSUPPORTED[name]}") if name in UNSUPPORTED else UNKNOWN


PACKAGE = Package(
    name="accelerate",
    version=VERSION,
    modules={f"accelerate.{module}".rstrip("."): TARGETS for module in ("", *MODULES)},
    constants={f"accelerate.{module}".rstrip("."): _VALUES for module in ("", *MODULES)},
    distributions=("accelerate",),
    fallback=fallback,
    homepage="https://github.com/huggingface/accelerate",
    check_early=("transformers", "diffusers", "peft", "trl", "sentence_transformers"),
)

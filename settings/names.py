"""The table of settings: their names, accepted values, defaults, environment variables and keys in files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .values import NOTHING, choice, count, positive, text, truth, word_or_truth

#: Prefix of Paceline's environment variables.
PREFIX = "PACELINE_"


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        name: the setting's name in code, as a flag and in a file.
        parse: function that returns the parsed value, or raises a ValueError whose text completes a sentence about the
            value.
        default: the value if the setting is not set; None if there is no default, or if the code that uses the setting
            determines the default.
        help: a one-line description.
        group: the topic under which the setting is listed.
        accepts: text that describes the accepted values.
        bare: whether the setting's flag takes no value.
        variables: Accelerate's environment variables for the setting, read after ``PACELINE_<NAME>``.
        keys: the setting's keys in Accelerate's config files, in addition to ``name``.
        objects: whether code may pass an object of another type, which is then used unchanged.
    """

    name: str
    parse: Callable[[Any], Any]
    default: Any
    help: str
    group: str
    accepts: str = "text"
    bare: bool = False
    variables: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    objects: bool = False

    @property
    def variable(self) -> str:
        """Paceline's own environment variable for this setting."""
        return PREFIX + self.name.upper()

    def parsed(self, value: Any, where: str) -> Any:
        """Parse a value.

        ``where`` describes the source of the value; error messages begin with it.

        Raises:
            ValueError: the value is not valid for this setting.
        """
        try:
            return self.parse(value)
        except ValueError as error:
            raise ValueError(f"{where}: {self.name} {value!r} {error}") from None

    def is_nothing(self, value: Any) -> bool:
        """Return True if a value in a file or variable means "not set"."""
        if not isinstance(value, str):
            return value is None
        word = value.strip().lower()
        return word in NOTHING and (not word or word not in self.accepts.split(", "))


def _switch(name: str, help: str, default: bool | None = False, **more: Any) -> Setting:
    return Setting(name, truth, default, help, accepts="true, false", **{"bare": True, "group": "run", **more})


def _truth(name: str, help: str, default: bool | None = False, **more: Any) -> Setting:
    return _switch(name, help, default, bare=False, **more)


def _count(name: str, help: str, default: int | None = None, least: int = 0, most: int | None = None, **more: Any):
    accepts = f"a whole number of {least} or more" if most is None else f"a whole number from {least} to {most}"
    return Setting(name, count(least, most), default, help, accepts=accepts, **{"group": "run", **more})


def _choice(name: str, help: str, default: str | None, *choices: str, **more: Any) -> Setting:
    how = {key: more.pop(key) for key in ("numbered",) if key in more}
    parse = choice(*choices, **how)
    return Setting(name, parse, default, help, accepts=", ".join(choices), **{"group": "run", **more})


def _text(name: str, help: str, default: str | None = None, **more: Any) -> Setting:
    return Setting(name, text, default, help, **{"group": "run", **more})


def _number(name: str, help: str, default: float | None = None, **more: Any) -> Setting:
    return Setting(name, positive, default, help, accepts="a number above 0", **{"group": "run", **more})


def _of(group: str, section: str, prefix: str, *settings: Setting) -> list[Setting]:
    """Add Accelerate's keys (in a section of its files) and its prefixed variables to the settings of a group."""
    made = []
    for one in settings:
        variables = one.variables or ((prefix + one.name.removeprefix(group + "_").upper(),) if prefix else ())
        keys = (*one.keys, f"{section}.{one.name}") if section else one.keys
        made.append(replace(one, group=group, variables=variables, keys=keys))
    return made


_RUN = [
    _choice(
        "mixed_precision",
        "the dtype of forward passes; weights stay float32",
        "no",
        "no",
        "fp16",
        "bf16",
        "fp8",
        variables=("ACCELERATE_MIXED_PRECISION",),
    ),
    _count(
        "gradient_accumulation_steps",
        "micro-batches per update",
        1,
        least=1,
        variables=("ACCELERATE_GRADIENT_ACCUMULATION_STEPS",),
        keys=("deepspeed_config.gradient_accumulation_steps",),
    ),
    _number(
        "gradient_clipping",
        "the norm that DeepSpeed clips gradients to",
        variables=("ACCELERATE_GRADIENT_CLIPPING",),
        keys=("deepspeed_config.gradient_clipping",),
        group="deepspeed",
    ),
    _switch("cpu", "train on the CPU, even if there are GPUs", variables=("ACCELERATE_USE_CPU",), keys=("use_cpu",)),
    _text(
        "device",
        "the device of this process, such as cuda:1; by default the best one",
        variables=("ACCELERATE_TORCH_DEVICE",),
    ),
    _text("strategy", "how processes share the work: ddp, fsdp, deepspeed, ...", objects=True),
    _switch(
        "debug",
        "print more messages, and compare shapes between processes before each collective",
        variables=("ACCELERATE_DEBUG_MODE",),
    ),
    _choice("output_dtype", "the dtype of a prepared model's outputs: float32, or as computed", "fp32", "fp32", "keep"),
    _choice(
        "scheduler_steps",
        "what a scheduler's step() counts: updates, or updates times processes",
        "per_update",
        "per_update",
        "per_sample",
    ),
    _text("log_with", "comma-separated trackers: tensorboard, wandb, ... or all", group="logging", objects=True),
    _text("project_dir", "the folder for logs and checkpoints", group="logging"),
]

_LAUNCH = _of(
    "launch",
    "",
    "",
    _switch("multi_gpu", "one process for each GPU"),
    _switch("tpu", "one process for each TPU"),
    _count(
        "num_processes", "number of processes on all machines; by default, one per GPU or TPU, or else one", least=1
    ),
    _count("num_machines", "number of machines", 1, least=1),
    _count("machine_rank", "index of this machine, from 0", 0),
    _text("main_process_ip", "the address of machine 0"),
    _count("main_process_port", "the port of machine 0; if 0 or not set, a free port is chosen", most=65535),
    _text("gpu_ids", "comma-separated ids of the GPUs to use, or all"),
    _count("num_cpu_threads_per_process", "CPU threads per process (OMP_NUM_THREADS)", least=1),
    _switch(
        "enable_cpu_affinity", "bind each process to the CPU cores near its GPU", variables=("ACCELERATE_CPU_AFFINITY",)
    ),
    _text("rdzv_backend", "how machines find each other: static or c10d", "static"),
    _text("rdzv_conf", "more rendezvous settings, as comma-separated key=value pairs"),
    _count("max_restarts", "how many times failed processes are restarted", 0),
    _number("monitor_interval", "seconds between checks of the processes", 0.1),
)

_DYNAMO = _of(
    "dynamo",
    "dynamo_config",
    "ACCELERATE_DYNAMO_",
    _choice(
        "dynamo_backend",
        "the backend of torch.compile; no disables it",
        "no",
        *("no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt"),
        *("onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm", "hpu_backend", "neuron"),
    ),
    _choice(
        "dynamo_mode",
        "the mode of torch.compile",
        "default",
        *("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    ),
    _switch("dynamo_use_fullgraph", "require that the model compiles into a single graph"),
    _switch("dynamo_use_dynamic", "compile for dynamic shapes; by default torch decides", None),
    _switch("dynamo_use_regional_compilation", "compile repeated blocks once, rather than the whole model"),
)

_FSDP = [
    _switch("use_fsdp", "shard weights over processes", group="fsdp", variables=("ACCELERATE_USE_FSDP",)),
    *_of(
        "fsdp",
        "fsdp_config",
        "FSDP_",
        _count("fsdp_version", "accepted; Paceline always uses version 2", 2, 1, 2),
        _choice(
            "fsdp_sharding_strategy",
            "what is sharded",
            "FULL_SHARD",
            *("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
            numbered=True,
        ),
        _truth("fsdp_offload_params", "keep weights in CPU memory between uses"),
        _count("fsdp_min_num_params", "the minimum number of parameters in a block, with SIZE_BASED_WRAP", 100_000_000),
        _choice(
            "fsdp_auto_wrap_policy",
            "which blocks are sharded as a unit; by default Paceline finds them",
            None,
            *("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
        ),
        _text(
            "fsdp_transformer_layer_cls_to_wrap",
            "comma-separated class names of the blocks",
            variables=("FSDP_TRANSFORMER_CLS_TO_WRAP",),
        ),
        _choice(
            "fsdp_backward_prefetch",
            "when the next block's weights are fetched in the backward pass",
            None,
            *("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
        ),
        _choice(
            "fsdp_state_dict_type",
            "how weights are saved",
            None,
            *("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
        ),
        _truth("fsdp_forward_prefetch", "fetch the next block's weights early in the forward pass"),
        _truth("fsdp_use_orig_params", "accepted; version 2 always uses them", True),
        _truth("fsdp_cpu_ram_efficient_loading", "read weights on one process only", True),
        _truth("fsdp_sync_module_states", "start from the weights of process 0", True),
        _truth("fsdp_activation_checkpointing", "recompute activations instead of keeping them"),
        _truth("fsdp_activation_checkpointing_offload", "keep the checkpointed inputs in CPU memory"),
        _text("fsdp_ignored_modules", "modules that are not sharded, as a regular expression"),
    ),
    Setting(
        "fsdp_reshard_after_forward",
        word_or_truth("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
        None,
        "free a block's weights after its forward pass; by default, fsdp_sharding_strategy decides",
        "fsdp",
        "true, false",
        variables=("FSDP_RESHARD_AFTER_FORWARD",),
        keys=("fsdp_config.fsdp_reshard_after_forward",),
    ),
]

_DEVICES = ("none", "cpu", "nvme")
_DEEPSPEED = [
    _switch("use_deepspeed", "train with DeepSpeed", group="deepspeed", variables=("ACCELERATE_USE_DEEPSPEED",)),
    *_of(
        "deepspeed",
        "deepspeed_config",
        "ACCELERATE_DEEPSPEED_",
        _text("deepspeed_config_file", "a DeepSpeed configuration"),
        _count("zero_stage", "what is sharded: 0 nothing, 1 optimizer, 2 gradients too, 3 weights too", 2, 0, 3),
        _choice("offload_optimizer_device", "where the optimizer's state is kept", "none", *_DEVICES),
        _choice("offload_param_device", "where weights are kept, with stage 3", "none", *_DEVICES),
        _text("offload_optimizer_nvme_path", "the folder for nvme"),
        _text("offload_param_nvme_path", "the folder for nvme"),
        _truth(
            "zero3_init_flag",
            "build the model in shards, with stage 3",
            variables=("ACCELERATE_DEEPSPEED_ZERO3_INIT",),
        ),
        _truth("zero3_save_16bit_model", "gather 16-bit weights for saving, with stage 3"),
        _text("deepspeed_hostfile", "a file that lists the machines"),
        _text("deepspeed_exclusion_filter", "machines and GPUs not to use"),
        _text("deepspeed_inclusion_filter", "machines and GPUs to use"),
        _text("deepspeed_multinode_launcher", "the program that starts processes on other machines"),
        _text(
            "deepspeed_moe_layer_cls_names",
            "comma-separated class names of mixture-of-experts layers",
            variables=("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",),
        ),
    ),
]

_SIZE = "processes along the {} dimension"
_PARALLELISM = [
    _switch(
        "use_parallelism_config",
        "combine several kinds of parallelism",
        group="parallelism_config",
        variables=("ACCELERATE_USE_PARALLELISM_CONFIG",),
    ),
    *_of(
        "parallelism_config",
        "parallelism_config",
        "PARALLELISM_CONFIG_",
        *(
            _count(f"parallelism_config_{name}_size", _SIZE.format(words), 1, 1)
            for name, words in (
                ("dp_replicate", "replicated data parallel"),
                ("dp_shard", "sharded data parallel"),
                ("tp", "tensor parallel"),
                ("cp", "context parallel"),
                ("sp", "sequence parallel"),
            )
        ),
        _choice("parallelism_config_cp_backend", "the backend of context parallelism", "torch", "torch"),
        _choice(
            "parallelism_config_cp_comm_strategy",
            "how context parallelism exchanges keys and values",
            "allgather",
            *("allgather", "alltoall"),
        ),
        _choice("parallelism_config_sp_backend", "the backend of sequence parallelism", "deepspeed", "deepspeed"),
        _count("parallelism_config_sp_seq_length", "the length of sequences", None, 1),
        _truth("parallelism_config_sp_seq_length_is_variable", "whether sequences differ in length", True),
        _text("parallelism_config_sp_attn_implementation", "the attention implementation of sequence parallelism"),
    ),
]

_DATA = _of(
    "data",
    "",
    "",
    _truth("split_batches", "split each batch of a loader into one part per process"),
    _truth("dispatch_batches", "process 0 reads the data and sends it to the others", None),
    _truth("even_batches", "give every process the same number of batches", True),
    _truth("use_seedable_sampler", "has no effect, because the order depends only on the seed and the epoch", True),
    _count("data_seed", "the seed for the order of the data; by default the run's seed"),
    _truth("non_blocking", "copy batches to the device without waiting"),
    _truth("use_stateful_dataloader", "read iterable datasets with torchdata's StatefulDataLoader"),
)

#: Every setting by its name, in the order in which they are printed.
SETTINGS: dict[str, Setting] = {
    one.name: one for one in (*_RUN, *_LAUNCH, *_DYNAMO, *_FSDP, *_DEEPSPEED, *_PARALLELISM, *_DATA)
}

"""The flags of ``paceline launch``: those of the settings, those of starting, and those that Paceline cannot follow."""

from __future__ import annotations

from argparse import REMAINDER, SUPPRESS, Action, ArgumentParser, Namespace
from typing import Any

from ..settings import SETTINGS, Setting

_GROUPS = {
    "run": "how to train",
    "launch": "processes and machines",
    "dynamo": "torch.compile",
    "fsdp": "sharding: FSDP",
    "deepspeed": "sharding: DeepSpeed",
    "parallelism_config": "processes in several dimensions",
    "data": "data",
    "logging": "logging",
}
_TPU = "Paceline runs on what torch itself drives: CPU, CUDA and ROCm GPUs, Apple MPS. Leave it out"
_MEGATRON = "Megatron-LM is not supported. Shard with --use_fsdp, or over tensors with --parallelism_config_tp_size"
_FP8 = "8-bit training is not supported. Take --mixed_precision bf16"
_AWS = "nothing is started on AWS from here. Type the command on the machine itself, as docs/commands.md shows"
_MPI = "processes need no mpirun. Write --cpu --num_processes N, or type mpirun -np N python train.py yourself"
#: Flags of Accelerate that have no meaning here, and what to do instead. Those with ``=`` take a value.
_REFUSED = {
    "tpu tpu_cluster no_tpu_cluster tpu_use_sudo vm= env= main_training_function= downcast_bf16": _TPU,
    "use_megatron_lm megatron_lm_tp_degree= megatron_lm_use_custom_fsdp= megatron_lm_no_load_optim= "
    "megatron_lm_eod_mask_loss= megatron_lm_overlap_cpu_optimizer_d2h_h2d= megatron_lm_no_save_optim= "
    "megatron_lm_optimizer_cpu_offload= megatron_lm_use_precision_aware_optimizer= "
    "megatron_lm_decoder_last_pipeline_num_layers= megatron_lm_pp_degree= megatron_lm_num_micro_batches= "
    "megatron_lm_sequence_parallelism= megatron_lm_recompute_activations= megatron_lm_use_distributed_optimizer= "
    "megatron_lm_gradient_clipping= megatron_lm_recompute_granularity= megatron_lm_recompute_method= "
    "megatron_lm_recompute_num_layers= megatron_lm_attention_backend= megatron_lm_expert_model_parallel_size= "
    "megatron_lm_context_parallel_size= megatron_lm_attention_dropout= megatron_lm_hidden_dropout= "
    "megatron_lm_attention_softmax_in_fp32= megatron_lm_expert_tensor_parallel_size= "
    "megatron_lm_calculate_per_token_loss= megatron_lm_use_rotary_position_embeddings=": _MEGATRON,
    "fp8_backend= fp8_use_autocast_during_eval fp8_margin= fp8_interval= fp8_format= fp8_amax_history_len= "
    "fp8_amax_compute_algo= fp8_override_linear_precision= fp8_opt_level= fp8_enable_fsdp_float8_all_gather= "
    "fp8_pad_inner_dim=": _FP8,
    "aws_access_key_id= aws_secret_access_key=": _AWS,
    "mpirun_hostfile=": _MPI,
}


class _Refuse(Action):
    """Notes a flag that cannot be followed; :func:`refuse` says so."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: Any = None) -> None:
        namespace.refused = f"{option_string}: {self.metavar}."


def add_flags(parser: ArgumentParser, script: bool = True) -> None:
    """Every flag.

    Args:
        parser: gets them.
        script: there is a script behind the flags, which may have arguments of its own.
    """
    if script:
        _add_script(parser)
    _add_own(parser)
    groups = {name: parser.add_argument_group(title) for name, title in _GROUPS.items()}
    for one in SETTINGS.values():
        _add(groups[one.group], one.name, **_setting(one))
    for names, reason in _REFUSED.items():
        for name in names.split():
            bare = not name.endswith("=")
            _add(parser, name.rstrip("="), action=_Refuse, nargs=0 if bare else None, metavar=reason, help=SUPPRESS)


def _add_script(parser: ArgumentParser) -> None:
    parser.usage = "paceline launch [flags] script.py [the script's arguments]"
    parser.epilog = (
        "Flags stand before the script; what comes behind it is the script's. A flag may be written with - for _.\n"
        "Known, but not supported, with a line that says what to do: --tpu, --use_megatron_lm, --megatron_lm_*, "
        "--fp8_*, --aws_*, --mpirun_hostfile."
    )
    parser.add_argument("script", help="what to run: a file, or with -m a module, or with --no_python any program")
    parser.add_argument("script_args", nargs=REMAINDER, help="its arguments, which are passed on untouched")
    _add(parser, "module", "-m", action="store_true", help="the script is a module, as for python -m")
    _add(parser, "no_python", action="store_true", help="the script is a program of its own, not Python's")


def _add_own(parser: ArgumentParser) -> None:
    """What concerns the start alone, and is no setting of the run."""
    _add(parser, "config_file", "--config", metavar="FILE", help="the file of settings; see paceline config")
    _add(parser, "quiet", action="store_true", help="do not say what was chosen")
    _add(parser, "log_dir", metavar="FOLDER", help="keep each process's output there too")
    _add(
        parser,
        "tee",
        "-t",
        metavar="STREAMS",
        help="which output --log_dir keeps: 1 standard output, 2 errors, 3 both (default), or 0:1,1:2 by local rank",
    )
    _add(parser, "role", default="default", metavar="NAME", help="what lines of --log_dir begin with")
    _add(parser, "same_network", action="store_true", help="accepted: machines meet at --main_process_ip either way")


def _add(parser: Any, name: str, *more: str, **how: Any) -> None:
    parser.add_argument(*more, f"--{name}", dest=name, **how)


def _setting(one: Setting) -> dict[str, Any]:
    default = "" if one.default in (None, False) else f" (default: {str(one.default).lower()})"
    how: dict[str, Any] = {"default": None, "help": (one.help + default).replace("%", "%%")}
    if one.bare:
        return how | {"action": "store_const", "const": "true"}
    words = "{" + one.accepts.replace(", ", "|") + "}" if len(one.accepts.split(", ")) > 1 else "VALUE"
    return how | {"metavar": words if len(words) < 60 else "NAME"}


def refuse(arguments: Namespace) -> None:
    """Raise for a flag that Paceline knows and cannot follow.

    Raises:
        ValueError: with what to do instead.
    """
    if getattr(arguments, "refused", None):
        raise ValueError(arguments.refused)


def given(arguments: Namespace) -> dict[str, str]:
    """The settings that stand on the command line."""
    return {name: value for name in SETTINGS if (value := getattr(arguments, name)) is not None}

"""The flags of ``paceline launch``: settings, flags that only affect how processes start, and unsupported flags."""

from __future__ import annotations

from argparse import REMAINDER, SUPPRESS, Action, ArgumentParser, Namespace
from typing import Any

from ..settings import SETTINGS, Setting, written

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
_TPU = (
    "Paceline starts processes only on this machine and needs no settings for TPUs besides --tpu. Remove this flag, "
    "and run 'paceline launch --tpu' on each machine"
)
_MEGATRON = "Megatron-LM is not supported. Shard with --use_fsdp, or split layers with --parallelism_config_tp_size"
_FP8 = (
    "8-bit training uses torchao. Use --mixed_precision fp8. To set options, pass AORecipeKwargs in the script, or "
    "TERecipeKwargs to use TransformerEngine instead"
)
_AWS = "launching on AWS is not supported. Run `paceline launch` on the machine itself, as docs/commands.md shows"
_MPI = "mpirun is not needed. Use --cpu --num_processes N, or run mpirun -np N python train.py yourself"
#: Accelerate's flags that are not supported, and what to do instead. Flags with ``=`` take a value.
_REFUSED = {
    "tpu_cluster no_tpu_cluster tpu_use_sudo vm= env= main_training_function= downcast_bf16": _TPU,
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
    """Records an unsupported flag, for which :func:`refuse` then raises an error."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: Any = None) -> None:
        namespace.refused = f"{option_string}: {self.metavar}."


def add_flags(parser: ArgumentParser, script: bool = True) -> None:
    """Add every flag.

    ``script`` specifies whether a script and its arguments follow the flags.
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
        "Flags come before the script, and everything after the script is passed to the script. A flag may use - "
        "instead of _.\nThese flags are not supported; an error message says what to use instead: --tpu_*, "
        "--use_megatron_lm, --megatron_lm_*, --fp8_*, --aws_*, --mpirun_hostfile."
    )
    parser.add_argument("script", help="the file to run (with -m, a module; with --no_python, any program)")
    parser.add_argument("script_args", nargs=REMAINDER, help="the script's arguments, passed on unchanged")
    _add(parser, "module", "-m", action="store_true", help="the script is a module, as with python -m")
    _add(parser, "no_python", action="store_true", help="the script is a program, not a Python file")


def _add_own(parser: ArgumentParser) -> None:
    """Add the flags that are not settings. They affect only how processes start."""
    _add(parser, "config_file", "--config", metavar="FILE", help="the settings file; see paceline config")
    _add(parser, "quiet", action="store_true", help="do not print what the launcher chose")
    _add(parser, "log_dir", metavar="FOLDER", help="also write each process's output to this folder")
    _add(
        parser,
        "tee",
        "-t",
        metavar="STREAMS",
        help="output to write to --log_dir: 1 for stdout, 2 for stderr, 3 for both (default), or 0:1,1:2 by local rank",
    )
    _add(
        parser,
        "role",
        default="default",
        metavar="NAME",
        help="prefix of lines in the terminal, with --log_dir or --tee",
    )
    _add(parser, "same_network", action="store_true", help="no effect; machines always connect to --main_process_ip")


def _add(parser: Any, name: str, *more: str, **how: Any) -> None:
    parser.add_argument(*more, f"--{name}", dest=name, **how)


def _setting(one: Setting) -> dict[str, Any]:
    default = "" if one.default in (None, False) else f" (default: {written(one.default)})"
    how: dict[str, Any] = {"default": None, "help": (one.help + default).replace("%", "%%")}
    if one.bare:
        return how | {"action": "store_const", "const": "true"}
    words = "{" + one.accepts.replace(", ", "|") + "}" if len(one.accepts.split(", ")) > 1 else "VALUE"
    return how | {"metavar": words if len(words) < 60 else "NAME"}


def refuse(arguments: Namespace) -> None:
    """Reject a command line that contains a flag that Paceline does not support.

    Raises:
        ValueError: if there is an unsupported flag; the message says what to do instead.
    """
    if getattr(arguments, "refused", None):
        raise ValueError(arguments.refused)


def given(arguments: Namespace) -> dict[str, str]:
    """Return the settings given on the command line."""
    values = {name: getattr(arguments, name) for name in SETTINGS}
    return {
        name: written(value)
        for name, value in values.items()
        if value is not None and not (SETTINGS[name].bare and value is False)
    }

"""The parsers and functions behind ``accelerate``'s commands, implemented with Paceline's own commands."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from ...accelerator.enums import DynamoBackend
from ...settings import FLAGS, SETTINGS, files, hand_over, resolve
from .environment import default_config_file

hf_cache_home = str(files.accelerates_file().parent.parent)
cache_dir = str(files.accelerates_file().parent)
default_json_config_file = str(Path(cache_dir) / "default_config.json")
default_yaml_config_file = str(Path(cache_dir) / "default_config.yaml")


class _Parser(ArgumentParser):
    """A parser whose result also contains the script and its arguments under Accelerate's names."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        found, rest = super().parse_known_args(*args, **kwargs)
        if hasattr(found, "script_args"):
            found.training_script, found.training_script_args = found.script, found.script_args
        return found, rest


def _parser(command: str, run: Callable[[Namespace], Any], subparsers: Any) -> ArgumentParser:
    add = _Parser if subparsers is None else subparsers.add_parser
    name = f"accelerate {command}" if subparsers is None else command
    parser = add(name, allow_abbrev=False)
    _module(command).add_arguments(parser)
    _module("main").accept_both_spellings(parser)
    parser.set_defaults(func=run)
    return parser


def _module(command: str) -> Any:
    package = __package__.partition(".")[0]  # type: ignore[union-attr]
    return import_module(f"{package}.cli.{command.replace('-', '_')}")


def _run(command: str, arguments: Namespace, **given: Any) -> None:
    status = _module(command).run(arguments, **given)
    if status:
        raise SystemExit(status)


def launch_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Return a parser with the flags of ``paceline launch``, which include Accelerate's flags.

    Values are converted to the types that they have in Accelerate, such as numbers.
    """
    parser = _parser("launch", launch_command, subparsers)
    for action in set(parser._option_string_actions.values()):
        setting = SETTINGS.get(action.dest)
        if setting is None or setting.name == "fsdp_version":  # text in Accelerate too
            continue
        if setting.bare:
            action.const, action.default = True, False
        elif setting.accepts.startswith(("a whole number", "a number")):
            action.type = _whole if "whole" in setting.accepts else _number
    return parser


def _whole(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # the command raises an error that says what is valid


def launch_command(args: Namespace) -> None:
    """Run a script as ``paceline launch`` does, wait for it to end, and raise SystemExit if it failed."""
    args.script = getattr(args, "training_script", args.script)
    args.script_args = getattr(args, "training_script_args", args.script_args)
    before = dict(os.environ)
    try:
        status = _module("launch").run(args, replace=False)
    finally:
        os.environ.clear()
        os.environ.update(before)
    if status:
        raise SystemExit(status)


def config_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Return the parser of ``paceline config``."""
    return _parser("config", config_command, subparsers)


get_config_parser = config_command_parser


def config_command(args: Namespace) -> None:
    """Prompt for the settings and write the settings file."""
    _run("config", args)


def env_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Return the parser of ``paceline env``."""
    return _parser("env", env_command, subparsers)


def env_command(args: Namespace) -> None:
    """Print versions, devices and settings."""
    _run("env", args)


def estimate_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Return the parser of ``paceline estimate-memory``."""
    return _parser("estimate-memory", estimate_command, subparsers)


def estimate_command(args: Namespace) -> None:
    """Estimate a model's memory."""
    _run("estimate-memory", args)


def merge_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Return the parser of ``paceline merge-weights``."""
    return _parser("merge-weights", merge_command, subparsers)


def merge_command(args: Namespace) -> None:
    """Write the weights of a sharded checkpoint as one file."""
    _run("merge-weights", args)


def test_command_parser(subparsers: Any = None) -> ArgumentParser:  # noqa: PT028 - the name is Accelerate's
    """Return the parser of ``paceline test``."""
    return _parser("test", test_command, subparsers)


def test_command(args: Namespace) -> None:
    """Check that this machine trains correctly."""
    _run("test", args, replace=False)


def to_fsdp2_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Return the parser of ``accelerate to-fsdp2``, which only says what to run instead."""
    return _parser_of_absent("to-fsdp2", subparsers)


def tpu_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Return the parser of ``accelerate tpu-config``, which only says what to run instead."""
    return _parser_of_absent("tpu-config", subparsers)


def _parser_of_absent(command: str, subparsers: Any) -> ArgumentParser:
    def explain(args: Namespace) -> None:
        raise NotImplementedError(f"`accelerate {command}` is not available: {_module('main').NOT_HERE[command]}.")

    name = f"accelerate {command}" if subparsers is None else command
    parser = (ArgumentParser if subparsers is None else subparsers.add_parser)(name)
    parser.set_defaults(func=explain)
    return parser


def main() -> None:
    """Run the command in ``sys.argv`` as ``paceline`` does."""
    raise SystemExit(_module("main").main(sys.argv[1:]))


# ---- configuration files ---------------------------------------------------------------------------------------------


@dataclass
class BaseConfig:
    """The settings in a configuration file, under Accelerate's names."""

    compute_environment: Any = "LOCAL_MACHINE"
    distributed_type: Any = "NO"
    mixed_precision: str | None = None
    use_cpu: bool = False
    debug: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that are neither None nor empty."""
        return {name: value for name, value in asdict(self).items() if value not in (None, {})}

    @classmethod
    def from_yaml_file(cls, yaml_file: str | os.PathLike[str] | None = None) -> Any:
        """Read a configuration file (by default, the file in use)."""
        content = cls.process_config(files.load(Path(yaml_file or default_config_file)))
        unknown = sorted(content.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            raise ValueError(
                f"The configuration file {str(yaml_file or default_config_file)!r} has keys that {cls.__name__} does "
                f"not support: {unknown}. Remove these keys, or read the file with paceline.settings.read_file."
            )
        return cls(**content)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str] | None = None) -> Any:
        """Read a configuration file (by default, the file in use)."""
        return cls.from_yaml_file(json_file)

    def to_yaml_file(self, yaml_file: str | os.PathLike[str]) -> None:
        """Write the settings to a file, in the format that the file's suffix indicates."""
        files.write_file(yaml_file, self.to_dict())

    def to_json_file(self, json_file: str | os.PathLike[str]) -> None:
        """Write the settings to a file, in the format that the file's suffix indicates."""
        self.to_yaml_file(json_file)

    @staticmethod
    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        """Replace old names and set missing values in ``config_dict``, and return ``config_dict``."""
        fp16, backend = config_dict.pop("fp16", False), config_dict.pop("dynamo_backend", None)
        if backend is not None:
            config_dict["dynamo_config"] = {} if backend == "NO" else {"dynamo_backend": backend}
        defaults = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "NO",
            "mixed_precision": "fp16" if fp16 else None,
            **dict.fromkeys(("use_cpu", "debug", "enable_cpu_affinity"), False),
        }
        found = {**defaults, **config_dict}
        if found["distributed_type"] == "NO":
            found.setdefault("num_processes", 1)
        config_dict.update(found)
        return config_dict


@dataclass
class ClusterConfig(BaseConfig):
    """The settings for the user's own machines."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] = field(default_factory=dict)
    deepspeed_config: dict[str, Any] = field(default_factory=dict)
    fsdp_config: dict[str, Any] = field(default_factory=dict)
    parallelism_config: dict[str, Any] = field(default_factory=dict)
    megatron_lm_config: dict[str, Any] = field(default_factory=dict)
    mpirun_config: dict[str, Any] = field(default_factory=dict)
    dynamo_config: dict[str, Any] = field(default_factory=dict)
    downcast_bf16: str | bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None


# ---- environments of processes ---------------------------------------------------------------------------------------


def prepare_multi_gpu_env(args: Namespace) -> dict[str, str]:
    """Return the environment variables of the processes that ``paceline launch`` would start with these arguments."""
    settings = resolve(flags=_module("launch_flags").given(args), config_file=args.config_file)
    return {**os.environ, **{name: value for name, value in hand_over(settings).items() if name != FLAGS}}


def prepare_simple_launcher_cmd_env(args: Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment variables for a single process."""
    return [sys.executable, args.training_script, *args.training_script_args], prepare_multi_gpu_env(args)


def simple_launcher(args: Namespace) -> None:
    """Run a script in one process."""
    command, environment = prepare_simple_launcher_cmd_env(args)
    subprocess.run(command, env=environment, check=True)


multi_gpu_launcher = launch_command
DYNAMO_BACKENDS = DynamoBackend.list()


def _validate_launch_command(args: Namespace) -> tuple[Namespace, None, bool]:
    """Return the arguments unchanged, because the launcher reads the configuration file and checks the arguments."""
    return args, None, str(getattr(args, "mixed_precision", None)) != "None"

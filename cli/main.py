"""The entry point, which finds a command and runs it. Showing help imports only the standard library."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module

from .. import messages

#: Each command's help line. The module named after the command has ``add_arguments(parser)`` and ``run(arguments)``,
#: which returns the exit status.
COMMANDS = {
    "config": "write the settings file, interactively or not",
    "launch": "run a script in one or more processes, on one or more machines",
    "doctor": "run a few steps of a script and report what is slow, why, and what to change",
    "test": "check that this machine trains correctly as configured",
    "env": "print versions, devices, and the current settings with their sources",
    "estimate-memory": "estimate the memory of a model before it is loaded or trained",
    "report": "write a run's report page, even for a killed run, or compare two runs",
    "merge-weights": "write the weights of a sharded checkpoint as one safetensors file",
    "checkpoint ls": "list the checkpoints in a folder",
    "checkpoint show": "describe a checkpoint and its contents",
    "checkpoint verify": "verify every byte against the checksums",
    "checkpoint prune": "delete all checkpoints except the newest and the best",
    "checkpoint export": "write a checkpoint in another format",
    "checkpoint convert": "convert another program's checkpoint to a file that contains only plain data",
}
_GROUPS = {"checkpoint": "list, verify, prune and convert checkpoints"}
#: Commands of Accelerate that Paceline does not need.
NOT_HERE = {
    "to-fsdp2": "Paceline uses FSDP 2, and reads Accelerate's FSDP 1 settings files unchanged: paceline launch "
    "--config_file FILE train.py",
    "tpu-config": "Paceline does not run commands on all machines of a TPU pod. Instead, run paceline launch --tpu on "
    "each machine, with --num_machines, --machine_rank and --main_process_ip",
}

#: Exit status of a command that failed.
FAILED = 2
#: Exit status of a command that was interrupted with Ctrl-C.
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. If ``arguments`` is None, ``sys.argv`` is used."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in NOT_HERE:
        messages.error(f"paceline {words[0]}: {_sentence(NOT_HERE[words[0]])}.")
        return FAILED
    parsed = _parser(next((name for name in COMMANDS if words[: len(name.split())] == name.split()), None))
    found, unknown = parsed.parse_known_args(words)
    if unknown:
        hint = messages.did_you_mean(unknown[0].partition("=")[0], found.flags)
        messages.error(f"paceline {found.command}: Unknown argument {unknown[0]!r}.{hint} --help lists all arguments.")
        return FAILED
    try:
        status = found.run(found)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, ValueError, TypeError, RuntimeError, ImportError) as error:
        messages.error(f"paceline {found.command}: {_sentence(error)}")
        return FAILED


def _parser(command: str | None) -> ArgumentParser:
    """Build the parser for all commands, with arguments only for the given command."""
    top = ArgumentParser("paceline", description="Tools for training with Paceline.")
    top.add_argument("--version", action="version", version=sys.modules[__name__.partition(".")[0]].__version__)
    places = {"": top.add_subparsers(metavar="COMMAND", required=True)}
    for name, line in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in places:
            inside = places[""].add_parser(group, help=_GROUPS[group], description=_sentence(_GROUPS[group]))
            places[group] = inside.add_subparsers(metavar="COMMAND", required=True)
        parser = places[group].add_parser(
            last,
            help=line,
            description=_sentence(line),
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == command:
            module = import_module(f".{name.replace(' ', '.').replace('-', '_')}", __package__)
            module.add_arguments(parser)
            accept_both_spellings(parser)
            parser.set_defaults(run=module.run, command=name, flags=list(parser._option_string_actions))
    return top


def accept_both_spellings(parser: ArgumentParser) -> None:
    """Accept ``--some-flag`` for ``--some_flag`` and vice versa; help shows only the declared spelling."""
    for written, action in list(parser._option_string_actions.items()):
        if written.startswith("--"):
            for spelled in (written[2:].replace("_", "-"), written[2:].replace("-", "_")):
                parser._option_string_actions.setdefault(f"--{spelled}", action)


def _sentence(said: str | Exception) -> str:
    if isinstance(said, OSError) and said.strerror:
        return f"{said.strerror}: {said.filename!r}" if said.filename else said.strerror
    text = str(said)
    return text[:1].upper() + text[1:] if isinstance(said, str) else text or repr(said)

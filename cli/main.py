"""Finds the command that was given and runs it. Nothing is imported for help but the standard library."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module

from .. import messages

#: What each command does. Its module has the same words; that has ``add_arguments(parser)`` and ``run(arguments)``,
#: which returns the exit status.
COMMANDS = {
    "config": "write the file of settings, asking or not",
    "launch": "run a script as one process or several, on this machine and others",
    "doctor": "run a script for some steps, and say what is slow, why, and what to change",
    "test": "check that this machine trains as it is configured to",
    "env": "versions, devices, and the settings in force with their origin",
    "estimate-memory": "how much memory a model takes, loaded and trained, before it does",
    "report": "the page about a run, also of one that was killed; or two runs side by side",
    "merge-weights": "write the weights of a checkpoint in parts as one file of safetensors",
    "checkpoint ls": "list the checkpoints in a folder",
    "checkpoint show": "what a checkpoint is, and what it holds",
    "checkpoint verify": "hold every byte against its checksum",
    "checkpoint prune": "delete all but the newest and the best",
    "checkpoint export": "write a checkpoint in another format",
}
_GROUPS = {"checkpoint": "look at, check, thin out and convert checkpoints"}
#: Commands of Accelerate that Paceline has no use for.
_NOT_HERE = {
    "to-fsdp2": "FSDP is version 2 here, and a file of Accelerate's for version 1 is read as it is: paceline launch "
    "--config_file FILE train.py",
    "tpu-config": "there is nothing to configure: Paceline runs on what torch itself drives (CPU, CUDA and ROCm GPUs, "
    "Apple MPS), not on TPUs. Run on one of those",
}

#: The exit status of a command that could not do its work.
FAILED = 2
#: Of one that Ctrl-C ended.
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    Args:
        arguments: those of the command line; ``sys.argv``'s if None.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _NOT_HERE:
        messages.error(f"paceline {words[0]}: {_sentence(_NOT_HERE[words[0]])}.")
        return FAILED
    parsed = _parser(next((name for name in COMMANDS if words[: len(name.split())] == name.split()), None))
    found, unknown = parsed.parse_known_args(words)
    if unknown:
        hint = messages.did_you_mean(unknown[0].partition("=")[0], found.flags)
        messages.error(f"paceline {found.command}: There is no {unknown[0]!r}.{hint} --help lists what there is.")
        return FAILED
    try:
        status = found.run(found)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as of `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, ValueError, TypeError, RuntimeError, ImportError) as error:
        messages.error(f"paceline {found.command}: {_sentence(error)}")
        return FAILED


def _parser(command: str | None) -> ArgumentParser:
    """The parser of all commands; only the one that was given knows its arguments."""
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
            _accept_both_spellings(parser)
            parser.set_defaults(run=module.run, command=name, flags=list(parser._option_string_actions))
    return top


def _accept_both_spellings(parser: ArgumentParser) -> None:
    """Let ``--some_flag`` also be written ``--some-flag``, and the other way round; help shows the one it was given."""
    for written, action in list(parser._option_string_actions.items()):
        if written.startswith("--"):
            for spelled in (written[2:].replace("_", "-"), written[2:].replace("-", "_")):
                parser._option_string_actions.setdefault(f"--{spelled}", action)


def _sentence(said: str | Exception) -> str:
    if isinstance(said, OSError) and said.strerror:
        return f"{said.strerror}: {said.filename!r}" if said.filename else said.strerror
    text = str(said)
    return text[:1].upper() + text[1:] if isinstance(said, str) else text or repr(said)

"""Finds the script in a ``paceline launch`` command line."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from .. import messages

#: A script whose text contains none of these words does not accept ``--config``.
_TAKES_ARGUMENTS = re.compile(
    r"config|argv|click|typer|\bfire\b|hydra|absl|tyro|docopt|HfArgumentParser", re.IGNORECASE
)
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?(\.exe)?")


@dataclass(frozen=True)
class Script:
    """A script, module or program to run, with its arguments.

    ``kind`` is ``"script"``, ``"module"`` or ``"program"``; ``target`` is the file or the module's name.
    """

    kind: str
    target: str
    arguments: list[str]

    def alone(self) -> list[str]:
        """Return the command that runs the script as a single process."""
        if self.kind == "program":
            return [self.target, *self.arguments]
        return [sys.executable, *(["-m"] if self.kind == "module" else []), self.target, *self.arguments]


def find_script(arguments: Namespace) -> Script:
    """Return the script that the command line specifies.

    Raises:
        ValueError: if ``-m`` and ``--no_python`` are both given, or neither a script nor ``-m`` follows ``python``.
        FileNotFoundError: if the file or program does not exist.
    """
    target, rest = arguments.script, list(arguments.script_args)
    if arguments.module and arguments.no_python:
        raise ValueError("-m and --no_python cannot be used together. Remove one of them.")
    if arguments.no_python:
        if shutil.which(target) is None:
            raise FileNotFoundError(
                f"The program {target!r} was not found. Pass a command that is on PATH, or the path of an executable."
            )
        return Script("program", target, rest)
    if arguments.module:
        return Script("module", target, rest)
    is_python = _PYTHON.fullmatch(os.path.basename(target)) and not Path(target).is_file()
    if is_python or target == sys.executable:
        return _behind_python(target, rest)
    return Script("script", _existing(target), rest)


def _behind_python(python: str, rest: list[str]) -> Script:
    """Interpret ``launch python train.py`` as ``launch train.py``."""
    if rest[:1] == ["-m"] and len(rest) > 1:
        return Script("module", rest[1], rest[2:])
    if not rest or rest[0].startswith("-"):
        raise ValueError(
            f"Remove {python!r}, because paceline launch runs Python itself. Pass only the script and its arguments."
        )
    return Script("script", _existing(rest[0]), rest[1:])


def _existing(target: str) -> str:
    path = Path(target)
    if path.exists():
        return target
    there = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, there, n=1)
    hint = f" Did you mean {str(path.parent / close[0])!r}?" if close else " Put flags before the script."
    raise FileNotFoundError(f"The script {target!r} was not found in {os.getcwd()!r}.{hint}")


def point_out_config(script: Script) -> None:
    """Print a note if a script does not seem to read its ``--config`` argument, which may be meant for the launcher."""
    for at, word in enumerate(script.arguments):
        flag, _, value = word.partition("=")
        value = value or "".join(script.arguments[at + 1 : at + 2])
        if flag not in ("--config", "--config_file", "--config-file") or script.kind != "script":
            continue
        if Path(script.target).is_file() and not _TAKES_ARGUMENTS.search(Path(script.target).read_text("utf-8")):
            messages.info(
                f"{script.target} does not seem to read {flag}, but arguments after the script are passed to the "
                f"script. If {value or 'the file'} is meant for the launcher, use paceline launch --config_file "
                f"{value or 'FILE'} {script.target}"
            )

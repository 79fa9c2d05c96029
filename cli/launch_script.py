"""The script of a ``paceline launch`` command line."""

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
    """A script, a module or a program, and its arguments.

    ``kind`` is ``"script"``, ``"module"`` or ``"program"``; ``target`` is the file or the module's name.
    """

    kind: str
    target: str
    arguments: list[str]

    def alone(self) -> list[str]:
        """Return the command that runs it as one process."""
        if self.kind == "program":
            return [self.target, *self.arguments]
        return [sys.executable, *(["-m"] if self.kind == "module" else []), self.target, *self.arguments]


def find_script(arguments: Namespace) -> Script:
    """Return the script of a command line.

    Raises:
        ValueError: for ``-m`` and ``--no_python`` together, or ``python`` with options.
        FileNotFoundError: if there is no such file or program.
    """
    target, rest = arguments.script, list(arguments.script_args)
    if arguments.module and arguments.no_python:
        raise ValueError("-m and --no_python contradict each other. Leave one of them out.")
    if arguments.no_python:
        if shutil.which(target) is None:
            raise FileNotFoundError(
                f"There is no program {target!r}. Pass a command that is on PATH, or the path of an executable."
            )
        return Script("program", target, rest)
    if arguments.module:
        return Script("module", target, rest)
    is_python = _PYTHON.fullmatch(os.path.basename(target)) and not Path(target).is_file()
    if is_python or target == sys.executable:
        return _behind_python(target, rest)
    return Script("script", _existing(target), rest)


def _behind_python(python: str, rest: list[str]) -> Script:
    """Read ``launch python train.py`` as ``launch train.py``."""
    if rest[:1] == ["-m"] and len(rest) > 1:
        return Script("module", rest[1], rest[2:])
    if not rest or rest[0].startswith("-"):
        raise ValueError(f"Remove {python!r}: paceline launch runs Python itself. Pass only what follows it.")
    return Script("script", _existing(rest[0]), rest[1:])


def _existing(target: str) -> str:
    path = Path(target)
    if path.exists():
        return target
    there = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, there, n=1)
    hint = f" Did you mean {str(path.parent / close[0])!r}?" if close else " Flags come before it, each with its value."
    raise FileNotFoundError(f"There is no script {target!r} in {os.getcwd()!r}.{hint}")


def point_out_config(script: Script) -> None:
    """Report a ``--config`` after a script that does not read it: the launcher's flags come before the script."""
    for at, word in enumerate(script.arguments):
        flag, _, value = word.partition("=")
        value = value or "".join(script.arguments[at + 1 : at + 2])
        if flag not in ("--config", "--config_file", "--config-file") or script.kind != "script":
            continue
        if Path(script.target).is_file() and not _TAKES_ARGUMENTS.search(Path(script.target).read_text("utf-8")):
            messages.info(
                f"{script.target} does not seem to read {flag}, and arguments after the script belong to the script. "
                f"If {value or 'the file'} is meant for the launcher, use paceline launch --config_file "
                f"{value or 'FILE'} {script.target}"
            )

"""Runs a program with Paceline in place of a package: ``python -m paceline.compat lightning train.py ...``."""

from __future__ import annotations

import os
import runpy
import sys
from types import ModuleType

from . import PACKAGES, install

_USAGE = (
    f"usage: python -m paceline.compat {{{','.join(PACKAGES)}}}[,...] (SCRIPT | -m MODULE | -c CODE) [ARGUMENTS ...]"
)


def main(arguments: list[str]) -> None:
    """Install the replacements, then run the program with its arguments in ``sys.argv``."""
    if len(arguments) < 2 or arguments[0] in ("-h", "--help"):
        raise SystemExit(_USAGE)
    packages, program, *rest = arguments
    if program in ("-m", "-c") and not rest:
        raise SystemExit(f"python -m paceline.compat: {program} must be followed by a module or by code.\n{_USAGE}")
    install(*packages.split(","))
    if program == "-m":
        sys.argv[:] = rest
        sys.path[0] = os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif program == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path[0] = ""
        sys.modules["__main__"] = ModuleType("__main__")  # where pickle looks for the code's classes
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv[:] = [program, *rest]
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])

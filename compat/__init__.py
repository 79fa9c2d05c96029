"""Replacements for other packages, so that programs written for them run on Paceline."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

from .. import messages
from . import finder

PACKAGES = ("lightning",)
#: Environment variable with the packages to replace, separated by commas, in this process and its child processes.
VARIABLE = "PACELINE_STANDS_IN"
#: Folder of modules named like the packages; they install the replacement in the Python processes that it starts.
_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "on_path")


def install(*names: str) -> None:
    """Make ``import lightning`` or ``import accelerate`` import Paceline, from now on in this process.

    Call it before anything imports the package, and before libraries that check for it. An installed package of that
    name is neither changed nor imported. Calling it again does nothing.

    Args:
        names: ``"lightning"``, ``"accelerate"``.

    Raises:
        RuntimeError: the real package has already been imported.
        ValueError: there is no replacement for a package of that name.
    """
    for name in names:
        if name not in PACKAGES:
            raise ValueError(messages.unknown("package", name, PACKAGES))
        if finder.install(_package(name)):
            _tell_children(name)


def install_from_environment() -> None:
    """:func:`install` the packages that the variable ``PACELINE_STANDS_IN`` lists."""
    install(*(name for name in map(str.strip, os.environ.get(VARIABLE, "").split(",")) if name))


def found_on_path(root: str) -> ModuleType:
    """Replace a package in a process that found it in the folder ``on_path``, and import it."""
    install(
        next(name for name in PACKAGES if root in importlib.import_module(f".{name}.names", __name__).PACKAGE.roots)
    )
    return importlib.import_module(root)


def _package(name: str) -> finder.Package:
    return importlib.import_module(f".{name}.names", __name__).PACKAGE


def _tell_children(name: str) -> None:
    """Let Python processes that this one starts find the replacement too."""
    named = [one for one in os.environ.get(VARIABLE, "").split(",") if one]
    if name not in named:
        os.environ[VARIABLE] = ",".join([*named, name])
    path = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    for folder in (os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER))), _FOLDER):
        if folder not in path:
            path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    if _FOLDER not in sys.path:
        sys.path.insert(1, _FOLDER)  # spawned processes inherit this one's path

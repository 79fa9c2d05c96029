"""Replacements for other packages, so that programs written for those packages run on Paceline."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

from .. import messages
from . import finder

PACKAGES = ("lightning", "accelerate")
#: Environment variable that lists the packages to replace in a process and its children, separated by commas.
VARIABLE = "PACELINE_STANDS_IN"
#: This folder has a subfolder for each package. The modules in a subfolder have the package's names, and install the
#: replacement in Python processes that a program starts.
_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "on_path")


def install(*names: str) -> None:
    """Make ``import lightning`` or ``import accelerate`` import Paceline, in this process and its child processes.

    Call this before the package is imported, and before importing libraries that check whether the package is
    installed. The real package, if installed, is neither changed nor imported. Repeated calls have no effect.

    Args:
        names: ``"lightning"``, ``"accelerate"`` or both.

    Raises:
        RuntimeError: the real package has already been imported.
        ValueError: Paceline has no replacement for a package.
    """
    for name in names:
        if name not in PACKAGES:
            raise ValueError(messages.unknown("package", name, PACKAGES))
        if finder.install(_package(name)):
            _tell_children(name)


def install_from_environment() -> None:
    """Call :func:`install` for the packages listed in the environment variable ``PACELINE_STANDS_IN``."""
    install(*(name for name in map(str.strip, os.environ.get(VARIABLE, "").split(",")) if name))


def found_on_path(root: str) -> ModuleType:
    """Replace the package that has the top-level module ``root``, and import the replacement.

    The modules in the folders of ``on_path`` call this function.
    """
    install(next(name for name in PACKAGES if root in _package(name).roots))
    return importlib.import_module(root)


def _package(name: str) -> finder.Package:
    return importlib.import_module(f".{name}.names", __name__).PACKAGE


def _tell_children(name: str) -> None:
    """Make Python processes that this process starts find the replacement too."""
    named = [one for one in os.environ.get(VARIABLE, "").split(",") if one]
    if name not in named:
        os.environ[VARIABLE] = ",".join([*named, name])
    path = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    names = os.path.join(_FOLDER, name)
    for folder in (os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER))), names):
        if folder not in path:
            path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    if names not in sys.path:
        sys.path.insert(1, names)  # spawned processes inherit this process's path

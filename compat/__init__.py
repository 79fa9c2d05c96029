"""Replacements for other packages, so that programs written for them run on Paceline."""

from __future__ import annotations

import importlib

from .. import messages
from . import finder

PACKAGES = ("lightning",)


def install(*names: str) -> None:
    """Make ``import lightning`` or ``import accelerate`` import Paceline, from now on and in this process.

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
        finder.install(importlib.import_module(f".{name}.names", __name__).PACKAGE)

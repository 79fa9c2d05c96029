"""Settings as flags of a command."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace, _ArgumentGroup
from collections.abc import Iterable
from typing import Any

from ..settings import SETTINGS


def add_settings(parser: ArgumentParser | _ArgumentGroup, names: Iterable[str]) -> None:
    """Give a parser a flag for each of some settings; what is not given is None.

    A switch stands alone: ``--cpu``, and ``--no_cpu`` for the opposite.
    """
    for name in names:
        one = SETTINGS[name]
        words = one.help.replace("%", "%%")
        if one.bare:
            parser.add_argument(f"--{name}", action=BooleanOptionalAction, default=None, help=words)
        else:
            parser.add_argument(f"--{name}", metavar="VALUE", help=f"{words} ({one.accepts})")


def given_settings(arguments: Namespace) -> dict[str, Any]:
    """The settings that a command line gave, by name, as they were written."""
    found = ((name, getattr(arguments, name, None)) for name in SETTINGS)
    return {name: value for name, value in found if value is not None}

"""``paceline test``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ..settings import resolve
from .launch import start
from .launch_flags import add_flags, given, refuse
from .launch_script import Script


def add_arguments(parser: ArgumentParser) -> None:
    """What the command takes: the flags of ``paceline launch``."""
    add_flags(parser, script=False)
    parser.epilog = "Starts the processes that paceline launch would start, and ends with status 0 if all checks pass."


def run(arguments: Namespace) -> int:
    """Start the self-check; its status is 0, or 1 where a check failed."""
    refuse(arguments)
    settings = resolve(flags=given(arguments), config_file=arguments.config_file, door="paceline test")
    return start(Script("module", f"{__package__}.self_check", []), settings, arguments)

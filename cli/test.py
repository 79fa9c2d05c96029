"""``paceline test``: check that this machine trains correctly as configured."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ..settings import resolve
from .launch import start
from .launch_flags import add_flags, given, refuse
from .launch_script import Script


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments to ``parser``: the flags of ``paceline launch``."""
    add_flags(parser, script=False)
    parser.epilog = "Starts the same processes as paceline launch and exits with status 0 if all checks pass."


def run(arguments: Namespace, replace: bool = True) -> int:
    """Run the self-check; return 0, or 1 if a check failed.

    ``replace`` specifies whether the self-check may replace this process if the check runs as a single process.
    """
    refuse(arguments)
    settings = resolve(flags=given(arguments), config_file=arguments.config_file, door="paceline test")
    return start(Script("module", f"{__package__}.self_check", []), settings, arguments, replace)

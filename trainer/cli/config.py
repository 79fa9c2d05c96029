"""``paceline config``: write the file of settings."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...loggers import messages
from ..settings import SETTINGS, find_file, own_file, read_file, resolve, write_file

#: The exit status where a file is there already.
REFUSED = 1

#: What ``paceline config default`` writes even if nobody asked for anything else.
USUAL = ("mixed_precision", "gradient_accumulation_steps", "cpu", "dynamo_backend", "use_fsdp", "use_deepspeed")


def add_arguments(parser: ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument(
        "what",
        nargs="?",
        choices=("default", "update"),
        help="default: write the defaults, without a question; update: change what --set names in a file that is there",
    )
    parser.add_argument("--config_file", metavar="PATH", help="the file to write; its suffix is the format: .yaml, .json or .toml")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting; may be given several times")
    parser.add_argument("--mixed_precision", metavar="VALUE", help="the same as --set mixed_precision=VALUE")
    parser.add_argument("--from_env", action="store_true", help="take over what environment variables say")
    parser.add_argument("--yes", action="store_true", help="ask nothing: defaults for what is not set")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    parser.epilog = (
        "Without arguments it asks; Enter takes the default. The names of settings are those of `paceline launch "
        "--help` and `paceline env`."
    )


def run(arguments: Namespace) -> int:
    """Write the file; prints its path last."""
    given = _given(arguments)
    if arguments.what == "update":
        path = Path(arguments.config_file or find_file() or own_file())
        values = read_file(path).values | given
        path = path if arguments.config_file or _is_ours(path) else own_file()
    else:
        path = Path(arguments.config_file or own_file()).expanduser()
        if path.exists() and not arguments.force:
            messages.error(
                f"paceline config: {path} is there already. Change it with `paceline config update --set NAME=VALUE`, "
                "or write over it with --force."
            )
            return REFUSED
        values = _chosen(arguments, given)
    write_file(path, values)
    messages.answer(f"Settings are in {path}" if False else str(path))
    return 0

"""``paceline config``: write the settings file."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .. import messages
from ..settings import CONFIG_VARIABLE, SETTINGS, find_file, own_file, read_file, resolve, write_file
from .config_wizard import ask

#: Exit status if the file already exists.
REFUSED = 1

#: Settings that every new file contains.
USUAL = ("mixed_precision", "gradient_accumulation_steps", "cpu", "dynamo_backend", "use_fsdp", "use_deepspeed")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.add_argument(
        "what",
        nargs="?",
        choices=("default", "update"),
        help="default: ask no questions; update: change only the settings given with --set in the existing file",
    )
    parser.add_argument(
        "--config_file",
        metavar="PATH",
        help="the settings file; its suffix (.yaml, .json, .toml) determines the format",
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting; can be repeated")
    parser.add_argument("--mixed_precision", metavar="VALUE", help="same as --set mixed_precision=VALUE")
    parser.add_argument("--from_env", action="store_true", help="use the values of environment variables")
    parser.add_argument(
        "--yes", action="store_true", help="ask no questions, and use the defaults of settings that are not specified"
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.epilog = (
        "Without arguments, the command asks questions. Enter accepts a question's default. `paceline env` lists all "
        "settings with their values."
    )


def run(arguments: Namespace) -> int:
    """Write the file and print its path."""
    given = _given(arguments)
    if arguments.what == "update":
        path, values = _updated(arguments.config_file, given)
    else:
        path = Path(arguments.config_file or _usual_place()).expanduser()
        if path.exists() and not arguments.force:
            messages.error(
                f"paceline config: {path} already exists. Change it with `paceline config update --set NAME=VALUE`, or "
                "overwrite it with --force."
            )
            return REFUSED
        values = _defaults() | given if arguments.yes or arguments.what else ask(given)
    write_file(path, {name: values[name] for name in SETTINGS if name in values})
    messages.answer(str(path))
    return 0


def _usual_place() -> Path:
    named = os.environ.get(CONFIG_VARIABLE, "none")
    return own_file() if named.lower() in ("", "none") else Path(named)


def _updated(config_file: str | None, given: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    found = config_file or find_file()
    if found is None:
        raise FileNotFoundError("There is no settings file to update. Run `paceline config` to create one.")
    path = Path(found).expanduser()
    values = read_file(path).values | given
    # A file that was found rather than passed may be Accelerate's, which must not be changed.
    return (path if config_file or not path.stem.startswith("default_config") else own_file()), values


def _given(arguments: Namespace) -> dict[str, Any]:
    """Return the parsed settings from the command line and, with --from_env, from environment variables."""
    written = [*arguments.set]
    if arguments.mixed_precision is not None:
        written.append(f"mixed_precision={arguments.mixed_precision}")
    return (_from_environment() if arguments.from_env else {}) | _parsed(written)


def _from_environment() -> dict[str, Any]:
    settings = resolve(environment={**os.environ, CONFIG_VARIABLE: "none"})
    return {row.name: row.value for row in settings.table() if row.place != "default"}


def _parsed(written: Iterable[str]) -> dict[str, Any]:
    found = {}
    for one in written:
        name, equals, value = one.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in SETTINGS:
            hint = messages.did_you_mean(name, SETTINGS) or " `paceline env` lists all settings."
            raise ValueError(f"--set {one} must have the form NAME=VALUE, where NAME is a setting.{hint}")
        if not SETTINGS[name].is_nothing(value):
            found[name] = SETTINGS[name].parsed(value.strip(), f"--set {one}")
    return found


def _defaults() -> dict[str, Any]:
    """Return the default settings for this machine."""
    from ..processes.devices import find_best

    kind, present = find_best()
    several = {"tpu" if kind == "tpu" else "multi_gpu": True} if present > 1 else {}
    return {"num_processes": max(present, 1), **several, **{name: SETTINGS[name].default for name in USUAL}}

"""``paceline env``: print versions, hardware and the current settings."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import Any

from .. import messages
from ..report import system_info
from ..settings import Settings, resolve


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.add_argument("--config_file", metavar="PATH", help="read this file instead of the default one")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: Namespace) -> int:
    """Print versions, hardware and settings."""
    settings = resolve(config_file=arguments.config_file)
    facts = {"versions": system_info.versions(), "machine": system_info.machine(), "config_file": settings.file}
    if arguments.json:
        table = [row._asdict() for row in settings.table()]
        messages.answer(json.dumps({**facts, "settings": table}, indent=2))
    else:
        messages.answer(_as_text(facts, settings))
    return 0


def _as_text(facts: dict[str, Any], settings: Settings) -> str:
    lines = []
    for title in ("versions", "machine"):
        lines += [title.capitalize(), *(f"  {name:13} {_shown(value)}" for name, value in facts[title].items()), ""]
    return "\n".join([*lines, settings.text()])


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return {None: "not installed", True: "yes", False: "no"}.get(value, str(value))

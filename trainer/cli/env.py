"""``paceline env``: what is installed, what the machine has, and which settings are in force."""

from __future__ import annotations

import json
import os
import platform
import sys
from argparse import ArgumentParser, Namespace
from importlib import metadata
from typing import Any

from ...loggers import messages
from ..settings import Settings, resolve

#: Packages whose version says something about a run.
PACKAGES = ("torch", "torchmetrics", "tensorboard", "wandb", "safetensors", "deepspeed", "transformers", "accelerate")


def add_arguments(parser: ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("--config_file", metavar="PATH", help="look at this file rather than the one in force")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: Namespace) -> int:
    """Print it all."""
    settings = resolve(config_file=arguments.config_file)
    facts = {"versions": _versions(), "machine": _machine(), "config_file": settings.file}
    if arguments.json:
        table = [row._asdict() for row in settings.table()]
        messages.answer(json.dumps({**facts, "settings": table}, indent=2))
    else:
        messages.answer(_as_text(facts, settings))
    return 0


def _versions() -> dict[str, str | None]:
    own = sys.modules[__name__.partition(".")[0]].__version__
    return {"paceline": own, "python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "mps": torch.backends.mps.is_available(),
    }


def _as_text(facts: dict[str, Any], settings: Settings) -> str:
    lines = []
    for title in ("versions", "machine"):
        lines += [title.capitalize(), *(f"  {name:13} {_shown(value)}" for name, value in facts[title].items()), ""]
    return "\n".join([*lines, settings.text()])


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return {None: "not installed", True: "yes", False: "no"}.get(value, str(value))

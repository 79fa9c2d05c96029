"""ClearML offline, with one folder per session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.loggers import ClearMLLogger

TRACKER = "clearml"
CONTINUES = False
CHECKPOINTS = ["s3", "s6"]
PLAIN = {
    "auto_connect_frameworks": False,
    "auto_connect_arg_parser": False,
    "auto_connect_streams": False,
    "auto_resource_monitoring": False,
}


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARML_CONFIG_FILE", str(Path(__file__).with_suffix(".conf")))
    from clearml import Task

    Task.set_offline(True)
    (folder / "none.txt").touch()
    Task.force_requirements_env_freeze(True, str(folder / "none.txt"))  # analyzing all imports is slow


def make(folder: Path, **options: Any) -> ClearMLLogger:
    return ClearMLLogger("digits", **PLAIN, **options)


def tracker_options(folder: Path) -> dict[str, Any]:
    return dict(PLAIN)


def _folder(logger: Any) -> Path:
    from clearml.config import get_offline_dir

    return Path(get_offline_dir(logger.version))


def points(folder: Path, logger: Any) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for line in (_folder(logger) / "metrics.jsonl").read_text().splitlines():
        for one in (one for one in json.loads(line) if one["type"] == "training_stats_scalar"):
            name = {"place": "train/place", "late": "test/late"}.get(one["metric"], one["metric"])
            found.setdefault(name, []).append((one["iter"], one["value"]))
    return found


def params(folder: Path, logger: Any) -> dict[str, Any]:
    task = json.loads((_folder(logger) / "task.json").read_text())
    return {name: one["value"] for name, one in task["hyperparams"]["Hyperparameters"].items()}


def checkpoints(folder: Path, logger: Any) -> list[str]:
    task = json.loads((_folder(logger) / "task.json").read_text())
    return [one["key"] for one in task["execution"]["artifacts"] if Path(one["uri"]).exists()]


def runs(folder: Path) -> list[str]:
    return []

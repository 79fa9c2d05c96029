"""Comet offline, with archives that have one JSON line per message."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from paceline.loggers import CometLogger

TRACKER = "comet_ml"
CONTINUES = True
SURVIVES_A_KILL = False
CHECKPOINTS = ["s3.ckpt", "s6.ckpt"]


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMET_LOGGING_CONSOLE", "ERROR")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(folder / "comet"))


def make(folder: Path, **options: Any) -> CometLogger:
    plain = {"log_code": False, "log_git_metadata": False, "log_env_details": False, "auto_output_logging": False}
    return CometLogger(project="digits", online=False, **plain, **options)


def tracker_options(folder: Path) -> dict[str, Any]:
    return {"online": False}


def _messages(folder: Path, logger: Any) -> list[Any]:
    found = []
    for path in sorted((folder / "comet").glob(f"{logger.version}*.zip"), key=lambda path: path.stat().st_mtime_ns):
        with zipfile.ZipFile(path) as archive:
            lines = archive.read("messages.json").splitlines() if archive.namelist() else []
            found += [json.loads(line) for line in lines]
    return found


def points(folder: Path, logger: Any) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for one in _messages(folder, logger):
        if one["type"] == "metric_msg":
            metric = one["payload"]["metric"]
            found.setdefault(metric["metricName"], []).append((metric["step"], metric["metricValue"]))
    return found


def params(folder: Path, logger: Any) -> dict[str, Any]:
    found = [one["payload"]["param"] for one in _messages(folder, logger) if one["type"] == "parameter_msg"]
    mine = [one for one in found if one["source"] == "manual"]
    return {one["paramName"].replace("|", "/"): one["paramValue"] for one in mine}


def checkpoints(folder: Path, logger: Any) -> list[str]:
    sent = [one["payload"] for one in _messages(folder, logger) if one["type"] == "file_upload"]
    return [one["additional_params"]["fileName"] for one in sent if one["upload_type"] == "model-element"]


def runs(folder: Path) -> list[str]:
    return sorted({path.stem.partition("-")[0] for path in (folder / "comet").glob("*.zip")})

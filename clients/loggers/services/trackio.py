"""Trackio with a local database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.loggers import TrackioLogger

TRACKER = "trackio"
CONTINUES = SURVIVES_A_KILL = True
CHECKPOINTS = ["s3.ckpt", "s6.ckpt"]


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up one folder for all tests, because Trackio reads ``TRACKIO_DIR`` only when it is imported."""


def make(folder: Path, **options: Any) -> TrackioLogger:
    return TrackioLogger(folder.name, auto_log_cpu=False, **options)


def tracker_options(folder: Path) -> dict[str, Any]:
    return {"auto_log_cpu": False}


def points(folder: Path, logger: Any) -> dict[str, list[tuple[int, float]]]:
    from trackio.sqlite_storage import SQLiteStorage

    found: dict[str, list[tuple[int, float]]] = {}
    for row in SQLiteStorage.get_logs(logger.name, logger.version):
        for name, value in row.items():
            found.setdefault(name, []).append((row["step"], value))
    return found


def params(folder: Path, logger: Any) -> dict[str, Any]:
    import trackio

    run = next(run for run in trackio.Api().runs(logger.name) if run.name == logger.version)
    from paceline.loggers.values import flat

    return flat({name: value for name, value in (run.config or {}).items() if not name.startswith("_")})


def checkpoints(folder: Path, logger: Any) -> list[str]:
    import trackio

    run = trackio.init(logger.name, logger.version, resume="must", embed=False)
    found = [run.use_artifact(f"model-{logger.version}:v{version}") for version in (0, 1)]
    run.finish()
    return [Path(entry["path"]).name for one in found for entry in one.manifest]


def runs(folder: Path) -> list[str]:
    import trackio

    return [run.name for run in trackio.Api().runs(folder.name)]

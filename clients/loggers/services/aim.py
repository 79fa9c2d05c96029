"""Aim with a local repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.loggers import AimLogger
from paceline.loggers.values import flat

TRACKER = "aim"
CONTINUES = SURVIVES_A_KILL = True
CHECKPOINTS = ["s3.ckpt", "s6.ckpt"]
PLAIN = {"system_tracking_interval": None, "capture_terminal_logs": False}


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIM_TELEMETRY", "0")


def make(folder: Path, **options: Any) -> AimLogger:
    return AimLogger(folder / "aim", "digits", **PLAIN, **options)


def tracker_options(folder: Path) -> dict[str, Any]:
    return dict(PLAIN)


def _run(logger: Any) -> Any:
    """Open the run for writing, because a reader sees only what ``aim up`` has indexed."""
    from aim import Run

    return Run(run_hash=logger.version, repo=logger.save_dir, **PLAIN)


def points(folder: Path, logger: Any) -> dict[str, list[tuple[int, float]]]:
    run, found = _run(logger), {}
    for metric in run.metrics():
        _, columns = metric.data.items_list()
        found[metric.name] = sorted(zip(metric.data.indices_list(), columns[0], strict=True))
    run.close()
    return found


def params(folder: Path, logger: Any) -> dict[str, Any]:
    run = _run(logger)
    found = run["hparams"]
    run.close()
    return flat(found)


def checkpoints(folder: Path, logger: Any) -> list[str]:
    run = _run(logger)
    found = [Path(one.uri.removeprefix("file://")) for one in run.artifacts.values()]
    run.close()
    return sorted(path.name for path in found if path.exists())


def runs(folder: Path) -> list[str]:
    return [path.name for path in (folder / "aim" / ".aim" / "meta" / "chunks").iterdir()]

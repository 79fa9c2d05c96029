"""DVCLive in a Git and DVC repository."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.loggers import DVCLiveLogger
from paceline.loggers.values import flat

TRACKER = "dvclive"
CONTINUES = SURVIVES_A_KILL = True
CHECKPOINTS = ["best", "latest"]


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dvc.repo import Repo

    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "tester@example.com")
    monkeypatch.setenv("DVC_NO_ANALYTICS", "true")
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    Repo.init().close()
    subprocess.run(["git", "commit", "--quiet", "--allow-empty", "-m", "first"], cwd=folder, check=True)


def make(folder: Path, **options: Any) -> DVCLiveLogger:
    return DVCLiveLogger(dir=folder / "live", save_dvc_exp=False, **options)


def tracker_options(folder: Path) -> dict[str, Any]:
    return {"dir": folder / "live", "save_dvc_exp": False}


def points(folder: Path, logger: Any) -> dict[str, list[tuple[int, float]]]:
    root, found = folder / "live" / "plots" / "metrics", {}
    for path in root.rglob("*.tsv"):
        with path.open() as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        found[str(path.relative_to(root).with_suffix(""))] = [(int(r["step"]), float(r[path.stem])) for r in rows]
    return found


def params(folder: Path, logger: Any) -> dict[str, Any]:
    import yaml

    return flat(yaml.safe_load((folder / "live" / "params.yaml").read_text()))


def checkpoints(folder: Path, logger: Any) -> list[str]:
    import yaml

    return sorted(yaml.safe_load((folder / "dvc.yaml").read_text())["artifacts"])


def runs(folder: Path) -> list[str]:
    return [path.read_text() for path in (folder / "live").glob(".*.run")]

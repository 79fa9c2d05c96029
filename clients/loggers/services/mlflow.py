"""MLflow with an SQLite database and with a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.loggers import MLFlowLogger

TRACKER = "mlflow"
CONTINUES = SURVIVES_A_KILL = True
CHECKPOINTS = ["aliases.txt", "metadata.yaml", "s3.ckpt", "aliases.txt", "metadata.yaml", "s6.ckpt"]


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    mlflow.set_tracking_uri(f"sqlite:///{folder}/tracked.db")


def make(folder: Path, **options: Any) -> MLFlowLogger:
    return MLFlowLogger("digits", save_dir=folder / "mlruns", **options)


def tracker_options(folder: Path) -> dict[str, Any]:
    return {"run_name": "first", "tags": {"kind": "test"}}


def _client(logger: Any) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(logger.tracking_uri)


def points(folder: Path, logger: Any) -> dict[str, list[tuple[int, float]]]:
    client, run = _client(logger), logger.version
    names = client.get_run(run).data.metrics
    return {name: [(one.step, one.value) for one in client.get_metric_history(run, name)] for name in names}


def params(folder: Path, logger: Any) -> dict[str, Any]:
    return _client(logger).get_run(logger.version).data.params


def checkpoints(folder: Path, logger: Any) -> list[str]:
    client, run, found = _client(logger), logger.version, "model/checkpoints"
    folders = [one.path for one in client.list_artifacts(run, found)]
    return [Path(one.path).name for inside in folders for one in client.list_artifacts(run, inside)]


def runs(folder: Path) -> list[str]:
    client = _client(make(folder))
    found = client.get_experiment_by_name("digits")
    return [run.info.run_id for run in client.search_runs([found.experiment_id])]

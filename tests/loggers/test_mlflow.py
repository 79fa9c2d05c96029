"""``MLFlowLogger`` with a folder of MLflow, read back with its client. ``make loggers`` tests it with a database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import TinyModule, tiny_loader

from paceline import Trainer, messages
from paceline.accelerator.trackers import Trackers, get_available_trackers
from paceline.callbacks import ModelCheckpoint
from paceline.loggers import MLFlowLogger
from paceline.messages import PacelineWarning

QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of the folder ``runs``, which is also where MLflow's own functions write."""
    import mlflow

    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/runs")
    yield mlflow.MlflowClient(f"file:{tmp_path}/runs")
    mlflow.end_run()


def points(client: Any, run_id: Any, name: str) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in client.get_metric_history(run_id, name)]


class Module(TinyModule):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 4, "optimizer": {"lr": 0.1, "betas": (0.9, 0.99)}})
        self.fails_at = fails_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.fails_at:
            raise ConnectionError("on purpose")
        self.log("place", float(self.global_step))
        return self.loss(batch)


def fit(folder: Path, fails_at: int | None = None) -> Any:
    logger = MLFlowLogger(
        "digits", run_name="first", tracking_uri=f"file:{folder}/runs", tags={"a": 1}, log_model="all"
    )
    keep = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1, filename="s{step}", auto_insert_metric_name=False)
    trainer = Trainer(logger=logger, callbacks=[keep], max_epochs=1, log_every_n_steps=1, **QUIET)
    trainer.fit(Module(fails_at), tiny_loader(4), ckpt_path="last")
    return logger


def test_a_run_that_failed_is_continued_with_each_value_once(tmp_path: Path, client: Any) -> None:
    with pytest.raises(ConnectionError):
        fit(tmp_path, fails_at=3)
    (experiment,) = (one for one in client.search_experiments() if one.name == "digits")
    (before,) = client.search_runs([experiment.experiment_id])
    assert before.info.status == "FAILED"
    assert points(client, before.info.run_id, "place") == [(1, 0.0), (2, 1.0), (3, 2.0)]
    logger = fit(tmp_path)
    (run,) = client.search_runs([experiment.experiment_id])
    assert (logger.version, logger.run_id, logger.name) == (run.info.run_id, run.info.run_id, experiment.experiment_id)
    assert (run.info.status, run.info.run_name, run.data.tags["a"]) == ("FINISHED", "first", "1")
    assert points(client, logger.version, "place") == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]
    assert run.data.params == {"width": "4", "optimizer/lr": "0.1", "optimizer/betas": "[0.9, 0.99]"}
    kept = "model/checkpoints"
    assert [one.path for one in client.list_artifacts(logger.version, kept)] == [f"{kept}/s2", f"{kept}/s4"]
    files = [Path(one.path).name for one in client.list_artifacts(logger.version, f"{kept}/s4")]
    assert files == ["aliases.txt", "metadata.yaml", "s4.ckpt"]
    assert logger.log_dir == f"{tmp_path}/runs/{experiment.experiment_id}/{logger.version}"
    assert (Path(logger.log_dir) / "checkpoints" / "s4.ckpt").exists()


def test_parameters_keep_their_first_value_and_names_get_allowed_characters(tmp_path: Path, client: Any) -> None:
    logger = MLFlowLogger(tracking_uri=f"file:{tmp_path}/runs")
    logger.log_hyperparams({"lr": 0.1, "long": "x" * 9000})
    with pytest.warns(PacelineWarning, match=r"earlier values for 'lr': lr is '0.1', not '0.2'. Start a new run"):
        logger.log_hyperparams({"lr": 0.2, "new": None})
    with pytest.warns(PacelineWarning, match=r"name 'acc@1', so it is logged as 'acc_1'"):
        logger.log_metrics(metrics={"acc@1": 0.5}, step=3)
    logger.close()
    run = client.get_run(logger.version)
    assert points(client, logger.version, "acc_1") == [(3, 0.5)]
    assert {name: len(value) for name, value in run.data.params.items()} == {"lr": 3, "long": 500, "new": 4}


def test_a_folder_of_mlflow_is_used_again_and_a_new_one_gets_a_database(
    tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.setattr(messages, "is_installed", lambda package: package != "sqlalchemy")
    assert "mlflow" not in get_available_trackers()
    with pytest.raises(ModuleNotFoundError, match=r"mlflow\.db needs the package 'sqlalchemy'"):
        MLFlowLogger(save_dir=tmp_path / "new")
    monkeypatch.setattr(messages, "is_installed", lambda package: True)
    assert "mlflow" in get_available_trackers()
    assert MLFlowLogger(save_dir=tmp_path / "new").tracking_uri == f"sqlite:///{tmp_path}/new/mlflow.db"
    client.create_experiment("old")
    assert MLFlowLogger(save_dir=tmp_path / "runs").tracking_uri == f"file:{tmp_path}/runs"


def test_the_tracker_is_mlflows_active_run_and_resumes_it(tmp_path: Path, client: Any) -> None:
    import mlflow

    def started(state: Any = None) -> Trackers:
        trackers = Trackers("mlflow")
        options = {"run_name": "mine", "description": "a try", "tags": '{"k": "v"}'}
        trackers.start("spirals", {"lr": 0.1}, {"mlflow": options})
        trackers.load_state_dict(state or {})
        return trackers

    trackers = started()
    trackers.log({"loss": 1.0}, step=1)
    state = trackers.state_dict()
    trackers.log({"loss": 2.0}, step=2)
    active = trackers.get("mlflow", unwrap=True)
    assert active.info.run_id == mlflow.active_run().info.run_id
    mlflow.log_metric("own", 5.0)
    trackers.get("mlflow").log_artifact(__file__, "code")
    trackers.finish()
    assert mlflow.active_run() is None
    again = started(state)
    again.log({"loss": 2.0}, step=2)
    again.log({"loss": 3.0}, step=3)
    assert again.get("mlflow").tracker.info.run_id == active.info.run_id
    again.finish()
    (run,) = client.search_runs([active.info.experiment_id])
    assert points(client, active.info.run_id, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert (run.info.run_name, run.data.tags["k"], run.data.tags["mlflow.note.content"]) == ("mine", "v", "a try")
    assert run.data.params == {"lr": "0.1"}
    assert [one.path for one in client.list_artifacts(active.info.run_id, "code")] == ["code/test_mlflow.py"]

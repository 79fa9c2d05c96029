"""The loggers under a real Trainer: what a run leaves on disk."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny import TinyModule, tiny_loader

from paceline import Callback, Trainer
from paceline.callbacks import ModelCheckpoint, RunReport
from paceline.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from paceline.messages import PacelineWarning
from paceline.report.history import read


class Module(TinyModule):
    """Logs a step and an epoch value in training; may raise; can be drawn as a graph."""

    def __init__(self, lr: float = 0.1, fail_at: int | None = None, error: type[BaseException] = RuntimeError) -> None:
        super().__init__(lr)
        self.save_hyperparameters(ignore=["error"])
        self.fail_at, self.error = fail_at, error
        self.example_input_array = torch.zeros(2, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == self.fail_at:
            raise self.error("the data is gone")
        loss = self.loss(batch)
        self.log("train_loss", loss)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True)
        return loss


def trainer(loggers: Any, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return Trainer(logger=loggers, log_every_n_steps=1, accelerator="cpu", **{**quiet, **options})


@pytest.fixture
def three(offline_wandb: Path) -> list[Logger]:
    """One logger of each kind, in one folder."""
    return [
        CSVLogger(offline_wandb, name="csv"),
        TensorBoardLogger(offline_wandb, name="tb", log_graph=True),
        WandbLogger(save_dir=offline_wandb, offline=True, settings={"x_transaction_log_flush_interval": 0.05}),
    ]


@pytest.fixture
def read_all(
    read_csv: Callable[..., Any], read_events: Callable[..., Any], wandb_history: Callable[..., Any]
) -> Callable[[list[Logger]], list[dict[str, list[tuple[int, float]]]]]:
    """What each of the three loggers has on disk: (step, value) by name."""

    def read(loggers: list[Logger]) -> list[dict[str, list[tuple[int, float]]]]:
        csv, tensorboard, wandb = loggers
        rows = [{**row, "at": row["step"]} for row in read_csv(str(csv.log_dir))]
        events = read_events(str(tensorboard.log_dir))
        (file,) = Path(str(wandb.save_dir)).glob(f"wandb/offline-run-*/run-{wandb.version}.wandb")
        rows_of_wandb = [{**row, "at": row["trainer/global_step"]} for row in wandb_history(file)]
        curves = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        return [_by_name(rows), curves, _by_name(rows_of_wandb)]

    return read


def _by_name(rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float | str):
                found.setdefault(name, []).append((int(row["at"]), float(value)))
    return found


def test_three_loggers_at_once_hold_the_same_values_at_the_same_steps(three: Any, read_all: Any) -> None:
    model = Module()
    run = trainer(three, max_epochs=2, val_check_interval=2)
    run.fit(model, tiny_loader(4), tiny_loader(2))
    csv, tensorboard, wandb = read_all(three)
    for name in ("train_loss", "epoch_loss", "val_loss"):
        steps = [step for step, _ in csv[name]]
        assert steps == [step for step, _ in tensorboard[name]] == [step for step, _ in wandb[name]]
        values = [value for _, value in csv[name]]
        assert values == pytest.approx([value for _, value in tensorboard[name]])
        assert values == pytest.approx([value for _, value in wandb[name]])
    assert len(csv["train_loss"]) == 8
    assert len(csv["epoch_loss"]) == 2
    assert csv["val_loss"][-1][1] == pytest.approx(run.callback_metrics["val_loss"].item())


def test_validation_stands_at_the_step_the_training_has_reached(three: Any, read_all: Any) -> None:
    trainer(three, max_epochs=2, val_check_interval=2).fit(Module(), tiny_loader(4), tiny_loader(2))
    for found in read_all(three):
        train = [step for step, _ in found["train_loss"]]
        assert train == sorted(set(train))
        assert [step for step, _ in found["val_loss"]] == train[1::2]
        assert [step for step, _ in found["epoch_loss"]] == train[3::4]


def test_values_of_one_step_are_one_row_although_checkpoints_flush_between(three: Any, read_csv: Any) -> None:
    run = trainer(three[:1], max_epochs=2, enable_checkpointing=True)
    run.fit(Module(), tiny_loader(3), tiny_loader(2))
    rows = read_csv(three[0].log_dir)
    assert [row["epoch"] for row in rows] == ["0", "0", "0", "1", "1", "1"]
    assert {"train_loss", "val_loss", "epoch_loss"} <= rows[2].keys()
    assert {"train_loss", "val_loss", "epoch_loss"} <= rows[5].keys()
    assert all(float(row["wall_time"]) > 1.6e9 for row in rows)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_training_step_that_raises_leaves_every_row_on_disk(three: Any, read_all: Any, error: Any) -> None:
    with pytest.raises(error):
        trainer(three, max_epochs=3).fit(Module(fail_at=6, error=error), tiny_loader(4), tiny_loader(1))
    for found in read_all(three):
        assert len(found["train_loss"]) == 6
        assert len(found["epoch_loss"]) == 1
        assert {value for _, value in found["epoch"]} == {0.0, 1.0}


def test_a_test_after_the_fit_adds_to_the_same_run(three: Any, read_all: Any) -> None:
    model = Module()
    run = trainer(three, max_epochs=1)
    run.fit(model, tiny_loader(4), tiny_loader(1))
    run.test(model, tiny_loader(2), verbose=False)
    for found in read_all(three):
        assert len(found["train_loss"]) == 4
        assert [value for _, value in found["test_loss"]] == pytest.approx([run.callback_metrics["test_loss"].item()])
    assert os.listdir(str(three[0].root_dir)) == ["version_0"]


def test_hyperparameters_and_graph_are_recorded_when_the_fit_starts(three: Any, read_events: Any) -> None:
    import wandb

    trainer(three, max_epochs=1).fit(Module(lr=0.05), tiny_loader(2), tiny_loader(1))
    for logger in three[:2]:
        saved = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())
        assert saved == {"lr": 0.05, "fail_at": None}
    events = read_events(three[1].log_dir)
    assert any("layer" in node.name for node in events.Graph().node)
    assert "_hparams_/session_start_info" in events.summary_metadata
    assert wandb.run is not None
    assert wandb.run.config["lr"] == 0.05


def test_logging_changes_no_weight(three: Any) -> None:
    weights = []
    for loggers in (False, three):
        torch.manual_seed(7)
        model = Module()
        trainer(loggers, max_epochs=2).fit(model, tiny_loader(4, shuffle=True), tiny_loader(2))
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_checkpoints_of_a_fit_become_artifacts_of_the_run(offline_wandb: Path, read_wandb: Any) -> None:
    logger = WandbLogger(save_dir=offline_wandb, offline=True, project="p", log_model="all")
    keeper = ModelCheckpoint(monitor="val_loss", save_top_k=-1, filename="{epoch}")
    run = trainer(logger, max_epochs=2, enable_checkpointing=True, callbacks=[keeper])
    run.fit(Module(), tiny_loader(2), tiny_loader(2))
    (file,) = offline_wandb.glob("wandb/offline-run-*/run-*.wandb")
    artifacts = [
        record.request.log_artifact.artifact if record.WhichOneof("record_type") == "request" else record.artifact
        for record in read_wandb(file)
        if record.HasField("artifact") or (record.HasField("request") and record.request.HasField("log_artifact"))
    ]
    assert len(artifacts) == 2
    assert all(a.name == f"model-{logger.version}" and a.type == "model" for a in artifacts)
    assert json.loads(artifacts[0].metadata)["ModelCheckpoint"]["monitor"] == "val_loss"
    assert keeper.best_model_path.startswith(str(Path(logger.log_dir) / "checkpoints"))


def test_the_default_logger_is_tensorboard_in_the_default_root_dir(tmp_path: Path, read_events: Any) -> None:
    run = trainer(None, max_epochs=1, default_root_dir=tmp_path)
    run.fit(Module(), tiny_loader(3), tiny_loader(1))
    assert isinstance(run.logger, TensorBoardLogger)
    assert run.log_dir == str(tmp_path / "paceline_logs" / "version_0")
    assert len(read_events(str(run.log_dir)).Scalars("train_loss")) == 3


def test_a_trial_run_writes_nothing(tmp_path: Path, three: Any) -> None:
    trainer(three, fast_dev_run=True).fit(Module(), tiny_loader(2), tiny_loader(2))
    assert list(tmp_path.iterdir()) == []


def test_step_counts_are_the_users_where_step_is_logged(tmp_path: Path, read_csv: Any) -> None:
    class OwnAxis(Module):
        def on_validation_epoch_end(self) -> None:
            self.log("val_acc", 1.0)
            self.log("step", float(self.current_epoch))

    logger = CSVLogger(tmp_path)
    trainer(logger, max_epochs=2).fit(OwnAxis(), tiny_loader(2), tiny_loader(2))
    assert [row["step"] for row in read_csv(logger.log_dir) if "val_acc" in row] == ["0", "1"]


class Deletes(Callback):
    """Deletes a folder before the step after ``step``."""

    def __init__(self, folder: str, step: int) -> None:
        self.folder, self.step = folder, step

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            if isinstance(trainer.logger, TensorBoardLogger):  # its thread may still hold the last value
                trainer.logger.experiment.flush()
            os.rename(self.folder, "deleted")  # at once: a thread that writes could make a file while a tree goes
            shutil.rmtree("deleted")


@pytest.mark.parametrize("kind", ["tensorboard", "csv", "report"])
def test_logging_continues_with_a_warning_where_the_folder_is_deleted_under_a_run(
    kind: str, read_csv: Any, read_events: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next start resumes the run as ever; only what was written before the deletion is gone."""

    def run(epochs: int, *callbacks: Callback) -> list[str]:
        module = TinyModule()
        module.save_hyperparameters({"width": 4})
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            Trainer(
                logger={"tensorboard": TensorBoardLogger, "csv": CSVLogger}.get(kind, lambda folder: False)("logs"),
                callbacks=[*callbacks, *([RunReport("logs/paceline_logs/version_0")] if kind == "report" else [])],
                max_epochs=epochs,
                log_every_n_steps=1,
                default_root_dir="logs",
                enable_progress_bar=False,
                enable_model_summary=False,
                accelerator="cpu",
            ).fit(module, tiny_loader(4), tiny_loader(1), ckpt_path="auto")
        return [str(one.message) for one in found if issubclass(one.category, PacelineWarning)]

    (said,) = run(2, Deletes("logs", 6))
    assert "logs/paceline_logs/version_0" in said
    assert "was deleted while the run was writing" in said
    assert run(3) == []
    folder = Path("logs/paceline_logs/version_0")
    if kind == "tensorboard":
        events = read_events(str(folder))
        assert [event.step for event in events.Scalars("train_loss")] == [*range(7, 13)]
        assert {"_hparams_/session_start_info", "_hparams_/session_end_info"} <= set(events.summary_metadata)
    elif kind == "csv":
        steps = [int(row["step"]) for row in read_csv(str(folder)) if "train_loss" in row]
        assert steps == [*range(5, 13)]  # 5 and 6 were still waiting to be written
    else:
        (record,) = folder.glob("*.jsonl")
        curve = read(record).curves()["train_loss"]
        assert [step for step, _ in curve] == [*range(1, 13)]
        assert (folder / "run_report.html").exists()
    assert kind == "report" or (folder / "hparams.yaml").exists()
    assert not list(Path("logs/paceline_logs").glob("version_1"))
    assert "Traceback" not in capfd.readouterr().err

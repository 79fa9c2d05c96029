"""A run that is killed and started again leaves the same rows as one that never was: each once, none missing."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from tiny import TinyModule, tiny_loader

from paceline import Callback, Trainer, seed_everything
from paceline.callbacks import LearningRateMonitor, ModelCheckpoint
from paceline.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

Read = Callable[[str], Any]
QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
RHYTHMS: dict[str, dict[str, Any]] = {
    "steps": {"every_n_train_steps": 3},
    "epochs": {},
    "validations": {"save_on_train_epoch_end": False},
}


class Module(TinyModule):
    """Logs at every step, at some steps, over the epoch and in validation."""

    def __init__(self) -> None:
        super().__init__(lr=0.05)
        self.save_hyperparameters({"width": 4})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True)
        if self.trainer.global_step >= 6:
            self.log("late", loss * 2)
        return loss

    def on_train_start(self) -> None:
        self.logger.log_hyperparams({"added": True})


class Killed(Callback):
    """Strikes before the step after ``step``, when all rows up to it are in the files."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            for logger in trainer.loggers:
                logger.save()
            os.kill(os.getpid(), signal.SIGKILL)


def loggers_in(folder: Path) -> list[Logger]:
    return [CSVLogger(folder, name="csv"), TensorBoardLogger(folder, name="tb")]


def fit(
    folder: Path, kill: int | None = None, rhythm: str = "steps", ckpt_path: Any = "last", **options: Any
) -> Trainer:
    """Three epochs of five steps; the same command for every start."""
    seed_everything(1, verbose=False)
    keeper = ModelCheckpoint(save_top_k=-1, filename="{epoch}-{step}", **RHYTHMS[rhythm])
    settings: dict[str, Any] = {"logger": loggers_in(folder), "max_epochs": 3, **options}
    trainer = Trainer(
        callbacks=[
            LearningRateMonitor("step"),
            LearningRateMonitor("epoch", log_key_prefix="at/"),
            Killed(kill),
            keeper,
        ],
        log_every_n_steps=1,
        val_check_interval=1.0 if rhythm == "epochs" else 2,
        **QUIET,
        **settings,
    )
    trainer.fit(Module(), tiny_loader(5), tiny_loader(2, seed=1), ckpt_path=ckpt_path)
    return trainer


def killed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Run ``function`` in a process of its own, which has to end by SIGKILL."""
    pid = os.fork()
    if pid == 0:
        try:
            function(*args, **kwargs)
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


@pytest.fixture(scope="session")
def rows(read_csv: Read, read_events: Read) -> Callable[..., Any]:
    """What the CSV and the TensorBoard logger of a folder hold, without the times."""

    def read(folder: Path, version: str = "version_0") -> Any:
        table = [{k: v for k, v in row.items() if k != "wall_time"} for row in read_csv(str(folder / "csv" / version))]
        events = read_events(str(folder / "tb" / version))
        return table, {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    return read


@pytest.mark.parametrize("rhythm", RHYTHMS)
def test_every_row_is_there_once_after_two_kills(tmp_path: Path, rows: Any, rhythm: str) -> None:
    fit(tmp_path / "whole", rhythm=rhythm)
    killed(fit, tmp_path / "killed", 7, rhythm)
    killed(fit, tmp_path / "killed", 13, rhythm)
    table, events = rows(tmp_path / "killed")
    assert max(int(row["step"]) for row in table) == 13
    fit(tmp_path / "killed", rhythm=rhythm)
    whole_table, whole_events = rows(tmp_path / "whole")
    table, events = rows(tmp_path / "killed")
    assert table == whole_table
    assert events == whole_events
    for kind in ("csv", "tb"):
        assert os.listdir(tmp_path / "killed" / kind) == ["version_0"]
        assert not list((tmp_path / "killed" / kind / "version_0").glob("hparams_*"))


def test_a_resumed_run_goes_on_in_its_folder_wherever_that_was_moved(tmp_path: Path, rows: Any) -> None:
    fit(tmp_path / "whole", max_epochs=2)
    killed(fit, tmp_path / "before", 7, max_epochs=2)
    shutil.move(tmp_path / "before", tmp_path / "elsewhere")
    trainer = fit(tmp_path / "elsewhere", max_epochs=2)
    assert rows(tmp_path / "elsewhere") == rows(tmp_path / "whole")
    assert trainer.log_dir == str(tmp_path / "elsewhere" / "csv" / "version_0")
    assert trainer.checkpoint_callback is not None
    assert trainer.checkpoint_callback.dirpath == f"{trainer.log_dir}/checkpoints"


def logged_run(folder: Path, **options: Any) -> tuple[CSVLogger, Path]:
    """A logger that has recorded five steps, and the checkpoint of the third."""
    logger = CSVLogger(folder, **options)
    fit(folder, logger=logger, max_epochs=1, ckpt_path=None)
    return logger, Path(logger.log_dir, "checkpoints", "epoch=0-step=3.ckpt")


def test_a_version_that_the_user_names_is_kept(tmp_path: Path, read_csv: Read) -> None:
    _, path = logged_run(tmp_path, version="a")
    before = read_csv(str(tmp_path / "paceline_logs" / "a"))
    again = fit(tmp_path, logger=CSVLogger(tmp_path, version="a"), max_epochs=1, ckpt_path=path)
    assert again.log_dir == str(tmp_path / "paceline_logs" / "a")
    assert [row["step"] for row in read_csv(str(again.log_dir)) if "train_loss_step" in row] == [
        "1",
        "2",
        "3",
        "4",
        "5",
    ]
    other = fit(tmp_path, logger=CSVLogger(tmp_path, version="b"), max_epochs=1, ckpt_path=path)
    assert other.log_dir == str(tmp_path / "paceline_logs" / "b")
    assert [row["step"] for row in read_csv(str(other.log_dir)) if "train_loss_step" in row] == ["3", "4", "5"]
    assert read_csv(str(again.log_dir))[:3] == before[:3]


@pytest.mark.parametrize("new", ["name", "save_dir", "another run's folder", "weights", "validate"])
def test_nothing_is_taken_over_for_a_new_purpose(tmp_path: Path, read_csv: Read, new: str) -> None:
    logger, path = logged_run(tmp_path)
    if new == "another run's folder":
        path = shutil.move(path, tmp_path / "kept.ckpt")
        shutil.rmtree(logger.root_dir)
        logger, _ = logged_run(tmp_path)
    before = read_csv(logger.log_dir)
    place = {"name": (tmp_path, "new"), "save_dir": (tmp_path / "new", "paceline_logs")}.get(
        new, (tmp_path, "paceline_logs")
    )
    fresh = CSVLogger(*place)
    if new == "validate":
        Trainer(logger=fresh, **QUIET).validate(Module(), tiny_loader(2), path, verbose=False)
    elif new == "weights":
        Trainer(logger=fresh, max_epochs=1, **QUIET).fit(Module.load_from_checkpoint(path), tiny_loader(2))
    else:
        fit(tmp_path, logger=fresh, max_epochs=1, ckpt_path=path)
    assert read_csv(logger.log_dir) == before
    assert fresh.log_dir == str(Path(*place) / ("version_0" if place[1] == "new" or new == "save_dir" else "version_1"))


def test_every_rank_goes_on_in_the_same_folder(tmp_path: Path, read_csv: Read) -> None:
    killed(fit, tmp_path, 4, logger=CSVLogger(tmp_path), max_epochs=1)

    def resumed() -> Any:
        trainer = fit(tmp_path, logger=CSVLogger(tmp_path), max_epochs=1, strategy="ddp", devices=2)
        return trainer.log_dir, trainer.loggers[0].version, trainer.checkpoint_callback.dirpath

    (first, second) = ranks(2, resumed)
    assert first == second == (str(tmp_path / "paceline_logs" / "version_0"), 0, f"{first[0]}/checkpoints")
    assert [row["step"] for row in read_csv(first[0]) if "train_loss_step" in row] == ["1", "2", "3", "4", "5"]


def test_a_torn_line_and_lost_rows_do_not_stop_a_resume(tmp_path: Path, read_csv: Read) -> None:
    logger = CSVLogger(tmp_path)
    for step in range(4):
        logger.log_metrics({"loss": step / 2, "epoch": 0}, step)
    state = logger.state_dict()
    logger.log_metrics({"loss": 9.0, "new": 1.0, "epoch": 0}, 4)
    logger.save()
    path = Path(logger.log_dir) / "metrics.csv"
    with open(path, "a") as file:
        file.write("5,0,17")
    path.with_name("metrics.csv.1.tmp").touch()

    def resumed() -> CSVLogger:
        logger = CSVLogger(tmp_path)
        assert logger.recognizes(state)
        logger.take_over(state)
        logger.load_state_dict(state)
        logger.log_metrics({"val": 0.5, "epoch": 0}, 3)
        logger.log_metrics({"loss": 2.0, "epoch": 0}, 4)
        logger.finalize("success")
        return logger

    resumed()
    assert sorted(os.listdir(logger.log_dir)) == [".CSVLogger.run", "hparams.yaml", "metrics.csv"]
    seen = [{k: v for k, v in row.items() if k != "wall_time"} for row in read_csv(resumed().log_dir)]
    assert seen[2:] == [
        {"step": "2", "epoch": "0", "loss": "1.0"},
        {"step": "3", "epoch": "0", "loss": "1.5", "val": "0.5"},
        {"step": "4", "epoch": "0", "loss": "2.0"},
    ]
    assert path.read_text().startswith("step,epoch,wall_time,loss,new,val\n")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    with pytest.warns(UserWarning, match="had written 4 rows to .*. Number of rows that are no longer in the file: 2"):
        resumed()
    assert [row["step"] for row in read_csv(logger.log_dir)] == ["0", "3", "4"]


def test_curves_of_a_plot_and_the_session_are_resumed_too(tmp_path: Path, read_events: Read) -> None:
    logger = TensorBoardLogger(tmp_path, sub_dir="part")
    logger.log_hyperparams({"lr": 0.1})
    for step in range(3):
        logger.log_metrics({"loss": {"train": step}}, step)
    state = logger.state_dict()
    logger.log_metrics({"loss": {"train": 9.0, "val": 9.0}}, 3)
    logger.finalize("failed")
    again = TensorBoardLogger(tmp_path, sub_dir="part", filename_suffix=".mine")
    assert again.recognizes(state)
    again.take_over(state)
    again.log_hyperparams({"lr": 0.1})
    again.load_state_dict(state)
    again.log_metrics({"loss": {"train": 3.0}}, 3)
    again.finalize("success")
    assert again.log_dir == logger.log_dir
    curve = read_events(os.path.join(logger.log_dir, "loss_train")).Scalars("loss")
    assert [(e.step, e.value) for e in curve] == [(step, float(step)) for step in range(4)]
    assert not list(Path(logger.log_dir).glob("loss_val/*"))
    tensors = read_events(logger.log_dir)
    for tag in ("_hparams_/session_start_info", "_hparams_/session_end_info"):
        assert len(tensors.Tensors(tag)) == 1 if tag in tensors.Tags()["tensors"] else tag in tensors.summary_metadata


def test_a_finished_run_that_is_started_again_stays_marked_as_ended(tmp_path: Path, read_events: Read) -> None:
    for _ in range(2):
        module = TinyModule()
        module.save_hyperparameters({"width": 4})
        trainer = Trainer(logger=TensorBoardLogger(tmp_path, name="tb"), max_epochs=1, **QUIET)
        trainer.fit(module, tiny_loader(), ckpt_path="auto")
        assert "_hparams_/session_end_info" in read_events(str(trainer.log_dir)).summary_metadata
    assert os.listdir(tmp_path / "tb") == ["version_0"]


def test_wandb_goes_on_with_the_run_of_the_checkpoint(offline_wandb: Path, wandb_history: Read) -> None:
    def run(kill: int | None) -> Trainer:
        logger = WandbLogger(save_dir=offline_wandb, offline=True)
        return fit(offline_wandb, kill, logger=logger, max_epochs=1)

    killed(run, 4)
    trainer = run(None)
    first, second = sorted(offline_wandb.glob(f"wandb/offline-run-*/run-{trainer.loggers[0].version}.wandb"))
    after = wandb_history(second)
    before = wandb_history(first)
    joined = [row for row in before if row["_step"] < after[0]["_step"]] + after
    assert [row["_step"] for row in joined] == list(range(len(joined)))
    assert [row["trainer/global_step"] for row in joined if "train_loss_step" in row] == [1, 2, 3, 4, 5]
    assert os.listdir(trainer.loggers[0].root_dir) == [trainer.loggers[0].version]


def test_wandb_loses_no_value_that_was_saved_before_a_kill(offline_wandb: Path, wandb_history: Read) -> None:
    # wandb's process ends with the one that started it, and does not write what it still has in memory.
    def log() -> None:
        logger = WandbLogger(save_dir=offline_wandb, offline=True)
        for step in range(300):
            logger.log_metrics({"loss": step}, step)
        logger.save()
        os.kill(os.getpid(), signal.SIGKILL)

    killed(log)
    (file,) = offline_wandb.glob("wandb/offline-run-*/run-*.wandb")
    assert len(wandb_history(file)) == 300


def test_a_run_resumed_from_an_older_checkpoint_is_logged_anew_and_nothing_of_the_newer_is_lost(tmp_path: Path) -> None:
    def run(epochs: int, **more: Any) -> ModelCheckpoint:
        keep = ModelCheckpoint(save_top_k=-1, save_last=True)
        silent = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        logger = CSVLogger(tmp_path, name="logs")
        trainer = Trainer(**silent, logger=logger, max_epochs=epochs, log_every_n_steps=1, callbacks=[keep])
        trainer.fit(TinyModule(), tiny_loader(), **more)
        return keep

    def rows(version: int) -> int:
        return len((tmp_path / "logs" / f"version_{version}" / "metrics.csv").read_text().splitlines())

    first = run(3)
    before = rows(0)
    run(2, ckpt_path=Path(first.dirpath or "") / "epoch=0-step=4.ckpt")
    assert rows(0) == before
    assert rows(1) < before
    assert torch.load(first.last_model_path, weights_only=True)["global_step"] == 12
    went_on = run(3, ckpt_path="auto")
    assert Path(went_on.dirpath or "").parent.name == "version_1"

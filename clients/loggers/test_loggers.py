"""Read back what a service's logger writes to its files. The tests are the same for all services."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Accelerator, Callback, Trainer, TrainingModule
from paceline.callbacks import ModelCheckpoint

QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


class Small(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 2, "optimizer": {"lr": 0.5}})
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train/place", float(self.global_step))
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", float(self.global_step))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Strike(Callback):
    """Ends the run after step ``step``, before the next one."""

    def __init__(self, step: int | None, how: Callable[[], None]) -> None:
        self.step, self.how = step, how

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.how()


def fail() -> None:
    raise ConnectionError("on purpose")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fit(logger: Any, folder: Path, at: int | None = None, how: Callable[[], None] = fail) -> Trainer:
    keep = ModelCheckpoint(
        dirpath=folder / "kept", every_n_train_steps=3, save_top_k=-1, filename="s{step}", auto_insert_metric_name=False
    )
    strike = Strike(at, how)
    steps = {"max_epochs": 1, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    trainer = Trainer(logger=logger, callbacks=[keep, strike], **steps, **QUIET)
    loader = [torch.ones(4, 2)] * 6
    trainer.fit(Small(), loader, loader[:1], ckpt_path="last" if (folder / "kept").exists() else None)
    return trainer


def test_a_fit_is_written_with_its_settings_and_checkpoints(service: Any, tmp_path: Path) -> None:
    logger = service.make(tmp_path, log_model="all")
    assert logger.version is not None
    fit(logger, tmp_path)
    logger.log_hyperparams(params={"added": "later"})
    logger.log_metrics(metrics={"test/late": 0.5}, step=6)
    logger.close()
    points = service.points(tmp_path, logger)
    assert points["train/place"] == [(step, step - 1.0) for step in range(1, 7)]
    assert points["seen"] == [(6, 6.0)]
    assert points["test/late"] == [(6, 0.5)]
    params = {name: str(value) for name, value in service.params(tmp_path, logger).items()}
    assert params == {"width": "2", "optimizer/lr": "0.5", "added": "later"}
    assert service.checkpoints(tmp_path, logger) == service.CHECKPOINTS


def test_a_resumed_run_continues_and_has_each_value_once(service: Any, tmp_path: Path, how: Any) -> None:
    if how is kill:
        struck(lambda: fit(service.make(tmp_path), tmp_path, 5, kill))
    else:
        with pytest.raises(ConnectionError):
            fit(service.make(tmp_path), tmp_path, 5)
    before = service.runs(tmp_path)
    logger = service.make(tmp_path)
    fit(logger, tmp_path)
    logger.close()
    steps = [step for step, _ in service.points(tmp_path, logger)["train/place"]]
    assert steps == sorted(set(steps))
    assert steps[-4:] == [3, 4, 5, 6]
    if not service.CONTINUES:
        assert logger.version not in before
        return
    assert service.runs(tmp_path) == [logger.version]
    if how is fail or service.SURVIVES_A_KILL:
        assert steps == [1, 2, 3, 4, 5, 6]


def struck(function: Callable[[], Any]) -> None:
    """Run ``function`` in its own process, which must end with SIGKILL."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_the_tracker_of_that_name_writes_the_same_and_resumes(service: Any, tmp_path: Path) -> None:
    def run(first: int, saved: bool) -> Any:
        accelerator = Accelerator(log_with=service.TRACKER, project_dir=tmp_path / "state")
        model = accelerator.prepare(nn.Linear(2, 1))
        options = {service.TRACKER: service.tracker_options(tmp_path)}
        accelerator.init_trackers("spirals", {"lr": 0.5, "shape": {"width": 2}}, options)
        if saved:
            accelerator.load_state(tmp_path / "state" / "one")
        for step in (first, first + 1):
            accelerator.log({"loss": float(step)}, step=step)
        if not saved:
            accelerator.save_state(tmp_path / "state" / "one")
            accelerator.log({"loss": 3.0}, step=3)
        found = accelerator.get_tracker(service.TRACKER)
        assert found.tracker is not None
        accelerator.end_training()
        del model
        return found.logger

    logger = run(1, saved=False)
    assert service.points(tmp_path, logger)["loss"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert {k: str(v) for k, v in service.params(tmp_path, logger).items()} == {"lr": "0.5", "shape/width": "2"}
    again = run(3, saved=True)
    after = service.points(tmp_path, again)["loss"]
    assert after == [(float(step), float(step)) for step in ((1, 2, 3, 4) if service.CONTINUES else (3, 4))]
    assert (again.version == logger.version) is service.CONTINUES

from __future__ import annotations

import logging
import math
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from rank_processes import ranks
from tiny import TinyModule, tiny_loader
from torch import Tensor

from paceline import Trainer
from paceline.callbacks import model_checkpoint as module_under_test
from paceline.callbacks.base import Callback
from paceline.callbacks.model_checkpoint import ModelCheckpoint
from paceline.checkpoint import atomic_write, owned_files
from paceline.checkpoint import single_file as checkpoint_file
from paceline.loggers.base import DummyLogger
from paceline.messages import PacelineWarning
from paceline.trainer.checkpoint_saver import Saver

NAN = math.nan


@pytest.fixture(autouse=True)
def notes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline")


class Scored(TinyModule):
    """Logs a given ``score`` in each epoch's validation."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.scores = scores

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.scores[self.current_epoch])


class Saves(Callback):
    """Counts the checkpoints that are written, by optimizer step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.steps.append(trainer.global_step)


def make_trainer(folder: Path, *callbacks: Callback, epochs: int = 3, **arguments: Any) -> Trainer:
    given = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(callbacks=list(callbacks), max_epochs=epochs, default_root_dir=folder, **(given | arguments))


def fit(
    folder: Path, *callbacks: Callback, module: TinyModule | None = None, resume: Any = None, **arguments: Any
) -> Trainer:
    trainer = make_trainer(folder, *callbacks, **arguments)
    trainer.fit(module or TinyModule(), tiny_loader(), tiny_loader(seed=1), ckpt_path=resume)
    return trainer


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def load(path: str | Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def by_score(folder: Path, **arguments: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{epoch}", monitor="score", **arguments)


# ---- which files are kept --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "kept", "best"), [("min", [1, 3], 3), ("max", [0, 2], 2)])
def test_the_k_best_are_kept(tmp_path: Path, mode: Any, kept: list[int], best: int) -> None:
    scores = (3.0, 2.0, 4.0, 1.0)
    checkpoint = by_score(tmp_path, mode=mode, save_top_k=2)
    fit(tmp_path, checkpoint, module=Scored(*scores), epochs=4)
    assert names(tmp_path) == [f"epoch={epoch}.ckpt" for epoch in kept]
    assert checkpoint.best_model_path == str(tmp_path / f"epoch={best}.ckpt")
    assert checkpoint.best_model_score == scores[best]
    assert {Path(path).stem: score.item() for path, score in checkpoint.best_k_models.items()} == {
        f"epoch={epoch}": scores[epoch] for epoch in kept
    }
    worst = next(epoch for epoch in kept if epoch != best)
    assert checkpoint.kth_best_model_path == str(tmp_path / f"epoch={worst}.ckpt")
    assert checkpoint.kth_value == scores[worst]
    assert checkpoint.current_score == scores[-1]


def test_the_newest_k_are_kept_by_the_step(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="step", mode="max", save_top_k=2, every_n_train_steps=1)
    fit(tmp_path, checkpoint, epochs=2)
    assert names(tmp_path) == ["epoch=1-step=7.ckpt", "epoch=1-step=8.ckpt"]
    assert checkpoint.best_model_path == str(tmp_path / "epoch=1-step=8.ckpt")


def test_a_nan_score_is_kept_while_there_is_room_but_is_never_the_best(tmp_path: Path) -> None:
    checkpoint = by_score(tmp_path, save_top_k=2)
    fit(tmp_path, checkpoint, module=Scored(NAN, 5.0, NAN, 7.0), epochs=4)
    assert names(tmp_path) == ["epoch=1.ckpt", "epoch=3.ckpt"]
    assert checkpoint.best_model_score == 5.0


def test_with_nothing_but_nan_there_is_a_file_and_no_best(tmp_path: Path) -> None:
    checkpoint = by_score(tmp_path)
    trainer = fit(tmp_path, checkpoint, module=Scored(NAN, NAN), epochs=2)
    assert names(tmp_path) == ["epoch=0.ckpt"]
    assert (checkpoint.best_model_path, checkpoint.best_model_score) == ("", None)
    with pytest.raises(ValueError, match="'best'"):
        trainer.test(TinyModule(), tiny_loader(), ckpt_path="best")


def test_among_equals_the_older_file_stays(tmp_path: Path) -> None:
    fit(tmp_path, by_score(tmp_path), module=Scored(2.0, 2.0, 2.0))
    assert names(tmp_path) == ["epoch=0.ckpt"]


@pytest.mark.parametrize(("k", "kept"), [(-1, ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt"]), (0, [])])
def test_minus_one_keeps_all_and_zero_none(tmp_path: Path, k: int, kept: list[str]) -> None:
    checkpoint = by_score(tmp_path, save_top_k=k)
    fit(tmp_path, checkpoint, module=Scored(2.0, 1.0, 3.0))
    assert names(tmp_path) == kept
    assert checkpoint.best_model_path == (str(tmp_path / "epoch=1.ckpt") if kept else "")


def test_without_a_monitor_the_newest_is_kept(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path)
    fit(tmp_path, checkpoint)
    assert names(tmp_path) == ["epoch=2-step=12.ckpt"]
    assert checkpoint.best_model_path == str(tmp_path / "epoch=2-step=12.ckpt")
    assert checkpoint.best_model_score is None


def test_by_default_files_go_below_the_log_dir_and_else_below_the_root(tmp_path: Path) -> None:
    class Logger(DummyLogger):
        log_dir = str(tmp_path / "logs" / "version_7")

    trainer = fit(tmp_path, logger=Logger(), epochs=1)
    assert names(tmp_path) == ["logs/version_7/checkpoints/epoch=0-step=4.ckpt"]
    assert trainer.checkpoint_callback is not None
    assert trainer.checkpoint_callback.dirpath == str(tmp_path / "logs/version_7/checkpoints")
    fit(tmp_path / "other", epochs=1)
    assert names(tmp_path / "other") == ["checkpoints/epoch=0-step=4.ckpt"]


def test_several_instances_save_side_by_side(tmp_path: Path) -> None:
    every_step = ModelCheckpoint(tmp_path / "steps", every_n_train_steps=5, save_top_k=-1)
    best = by_score(tmp_path / "best")
    trainer = fit(tmp_path, every_step, best, module=Scored(1.0, 2.0, 3.0))
    assert names(tmp_path) == ["best/epoch=0.ckpt", "steps/epoch=1-step=5.ckpt", "steps/epoch=2-step=10.ckpt"]
    assert trainer.checkpoint_callbacks == [every_step, best]
    assert {every_step.state_key, best.state_key} <= load(best.best_model_path)["callbacks"].keys()


def test_the_best_checkpoint_is_what_test_loads(tmp_path: Path) -> None:
    trainer = fit(tmp_path, by_score(tmp_path), module=Scored(1.0, 2.0, 3.0))
    trainer.test(dataloaders=tiny_loader(), ckpt_path="best", verbose=False)
    weights = load(tmp_path / "epoch=0.ckpt")["state_dict"]
    assert all(torch.equal(value, weights[name]) for name, value in trainer.training_module.state_dict().items())


# ---- when ------------------------------------------------------------------------------------------------------------


def test_without_a_step_rhythm_batches_cost_nothing(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    trainer = fit(tmp_path, checkpoint, epochs=1)
    assert checkpoint.on_train_batch_end is None
    assert trainer.current_run.hooks.on_train_batch_end == ()
    assert ModelCheckpoint(every_n_train_steps=1).on_train_batch_end is not None


def test_a_subclass_keeps_its_own_batch_hook(tmp_path: Path) -> None:
    seen = []

    class Mine(ModelCheckpoint):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            seen.append(batch_idx)

    fit(tmp_path, Mine(tmp_path, save_top_k=-1), epochs=1)
    assert seen == [0, 1, 2, 3]
    assert names(tmp_path) == ["epoch=0-step=4.ckpt"]


def test_step_rhythm_counts_optimizer_steps_and_saves_each_once(tmp_path: Path) -> None:
    saves = Saves()
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path, saves, checkpoint, accumulate_grad_batches=2, epochs=3)
    assert saves.steps == [2, 4, 6]
    assert names(tmp_path) == ["epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt", "epoch=2-step=6.ckpt"]


def test_step_rhythm_does_not_miss_a_multiple_that_two_optimizers_step_over(tmp_path: Path) -> None:
    class Pair(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([p], lr=0.1) for p in self.parameters()]

    saves = Saves()
    fit(tmp_path, saves, ModelCheckpoint(tmp_path, every_n_train_steps=3), module=Pair(), epochs=2)
    assert saves.steps == [4, 6, 10, 12, 16]


def test_time_rhythm_saves_when_the_interval_has_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(module_under_test, "perf_counter", lambda: clock[0])

    class Clock(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            clock[0] += 10

    saves = Saves()
    checkpoint = ModelCheckpoint(tmp_path, train_time_interval=timedelta(seconds=25), save_top_k=-1)
    fit(tmp_path, Clock(), saves, checkpoint, epochs=2)
    assert saves.steps == [3, 6]


@pytest.mark.parametrize("interval", [timedelta(0), "00:00:00:00", {"seconds": 0}])
def test_an_interval_of_zero_saves_every_step(tmp_path: Path, interval: Any) -> None:
    saves = Saves()
    fit(tmp_path, saves, ModelCheckpoint(tmp_path, train_time_interval=interval), epochs=1)
    assert saves.steps == [1, 2, 3, 4]


def test_epoch_rhythm_saves_every_nth_epoch_and_last_every_epoch(tmp_path: Path) -> None:
    saves = Saves()
    fit(tmp_path, saves, ModelCheckpoint(tmp_path, every_n_epochs=2, save_top_k=-1, save_last=True), epochs=5)
    assert names(tmp_path) == ["epoch=1-step=8.ckpt", "epoch=3-step=16.ckpt", "last.ckpt"]
    assert saves.steps == [4, 8, 12, 16, 20]  # the file and last are one save


def test_epochs_are_saved_after_their_end_when_validation_runs_once_in_each(tmp_path: Path) -> None:
    class Late(TinyModule):
        def on_train_epoch_end(self) -> None:
            self.log("known_at_the_end", float(self.current_epoch))

    checkpoint = ModelCheckpoint(tmp_path, "{known_at_the_end:d}", monitor="known_at_the_end", mode="max")
    fit(tmp_path, checkpoint, module=Late())
    assert names(tmp_path) == ["known_at_the_end=2.ckpt"]


def test_several_validations_an_epoch_are_each_saved(tmp_path: Path) -> None:
    saves = Saves()
    fit(tmp_path, saves, ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1), val_check_interval=0.5, epochs=2)
    assert saves.steps == [2, 4, 6, 8]


@pytest.mark.parametrize("interval", [1, timedelta(microseconds=1)], ids=["every batch", "by time"])
def test_a_validation_after_every_batch_is_no_validation_once_an_epoch(tmp_path: Path, interval: Any) -> None:
    saves = Saves()
    fit(tmp_path, saves, ModelCheckpoint(tmp_path), val_check_interval=interval, epochs=1)
    assert saves.steps == [1, 2, 3, 4]


def test_validation_in_some_epochs_saves_in_those(tmp_path: Path) -> None:
    saves = Saves()
    fit(tmp_path, saves, ModelCheckpoint(tmp_path, monitor="val_loss"), check_val_every_n_epoch=2, epochs=4)
    assert [step for step in saves.steps if step not in (8, 16)] == []
    assert 8 in saves.steps


def test_without_validation_data_epochs_are_saved_whatever_the_validation_rhythm(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, ModelCheckpoint(tmp_path), check_val_every_n_epoch=2)
    trainer.fit(TinyModule(), tiny_loader())
    assert names(tmp_path) == ["epoch=2-step=12.ckpt"]


def test_saving_after_validation_without_validation_is_said(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, ModelCheckpoint(tmp_path, save_on_train_epoch_end=False), epochs=1)
    with pytest.warns(PacelineWarning, match="this fit has no validation"):
        trainer.fit(TinyModule(), tiny_loader())
    assert names(tmp_path) == []


@pytest.mark.parametrize("arguments", [{"fast_dev_run": True}, {"max_steps": 0}], ids=["fast_dev_run", "no step"])
def test_trials_leave_no_files(tmp_path: Path, arguments: dict[str, Any]) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1), **arguments)
    assert names(tmp_path) == []


def test_the_sanity_check_saves_nothing(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        fit(tmp_path, Stop(), ModelCheckpoint(tmp_path, save_on_train_epoch_end=False, save_on_exception=True))
    assert names(tmp_path) == []


# ---- a validation's metric and a rhythm of steps ---------------------------------------------------------------------


def loss_of(path: str | Path) -> Tensor:
    module = TinyModule()
    module.load_state_dict(load(path)["state_dict"])
    losses = [module.loss(batch) for batch in tiny_loader(seed=1)]
    return torch.stack(losses).mean().detach()


def test_a_ranked_file_holds_the_weights_that_its_score_was_measured_on(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", every_n_train_steps=3, save_top_k=2)
    fit(tmp_path, checkpoint, val_check_interval=2, epochs=3)
    assert len(checkpoint.best_k_models) == 2
    for path, score in checkpoint.best_k_models.items():
        torch.testing.assert_close(loss_of(path), score)


def test_keeping_all_also_keeps_the_files_between_validations_without_a_score(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{step}", monitor="val_loss", every_n_train_steps=3, save_top_k=-1)
    fit(tmp_path, checkpoint, epochs=3)
    scored = {Path(path).stem: not math.isnan(score) for path, score in checkpoint.best_k_models.items()}
    assert scored == {
        "step=3": False,
        "step=4": True,
        "step=6": False,
        "step=8": True,
        "step=9": False,
        "step=12": True,
    }
    assert names(tmp_path) == sorted(f"{stem}.ckpt" for stem in scored)
    assert not math.isnan(checkpoint.best_model_score)
    torch.testing.assert_close(loss_of(checkpoint.best_model_path), checkpoint.best_model_score)


def test_last_does_not_wait_for_the_validation(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("enough")

    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", every_n_train_steps=2, save_last=True)
    with pytest.raises(RuntimeError, match="enough"):
        fit(tmp_path, checkpoint, Stop())
    assert names(tmp_path) == ["last.ckpt"]
    assert load(tmp_path / "last.ckpt")["global_step"] == 2


def test_a_monitor_not_known_before_the_first_validation_is_warned_about_once(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", every_n_train_steps=1)
    fit(tmp_path, checkpoint, num_sanity_val_steps=0, epochs=2)
    said = [str(w.message) for w in recwarn if issubclass(w.category, PacelineWarning)]
    assert sum("Until 'val_loss' is logged, there is no best checkpoint" in text for text in said) == 1
    assert names(tmp_path) == [Path(checkpoint.best_model_path).name]


def test_a_metric_of_training_is_ranked_at_the_step(tmp_path: Path) -> None:
    saves = Saves()
    checkpoint = ModelCheckpoint(tmp_path, "{step}", monitor="train_loss", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path, saves, checkpoint, epochs=3)
    assert saves.steps == [2, 4, 6, 8, 10, 12]
    assert not any(math.isnan(score) for score in checkpoint.best_k_models.values())


@pytest.mark.parametrize("rank_zero_only", [True, False])
def test_a_metric_of_training_and_of_validation_is_that_of_the_validation(tmp_path: Path, rank_zero_only: bool) -> None:
    class Shared(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("m", 100.0, rank_zero_only=rank_zero_only)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("m", float(self.trainer.global_step))

    checkpoint = ModelCheckpoint(tmp_path, "{step}", monitor="m", every_n_train_steps=4, save_top_k=-1)
    fit(tmp_path, checkpoint, module=Shared(), epochs=3)
    assert {Path(path).stem: float(score) for path, score in checkpoint.best_k_models.items()} == {
        f"step={step}": step for step in (4, 8, 12)
    }


def test_a_metric_of_the_training_epoch_is_ranked_when_the_epoch_ends(tmp_path: Path) -> None:
    class ByEpoch(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("epoch_loss", loss, on_step=False, on_epoch=True)
            return loss

    checkpoint = ModelCheckpoint(tmp_path, "{step}", monitor="epoch_loss", every_n_train_steps=3)
    trainer = make_trainer(tmp_path, checkpoint, epochs=1)
    with pytest.warns(PacelineWarning, match="epoch_loss"):
        trainer.fit(ByEpoch(), tiny_loader())
    assert names(tmp_path) == ["step=4.ckpt"]


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({}, 4),
        ({"val_check_interval": 0.5}, 2),
        ({"check_val_every_n_epoch": 2}, 8),
        ({"check_val_every_n_epoch": 2, "rhythm": 3}, 8),
        ({"limit_val_batches": 0}, 4),
        ({"limit_val_batches": 0, "rhythm": 3}, 4),
    ],
    ids=["epoch", "mid-epoch validation", "second epoch", "steps, validation", "no validation", "steps, no validation"],
)
def test_a_monitor_that_is_never_logged_is_an_error_as_soon_as_that_is_certain(
    tmp_path: Path, arguments: dict[str, Any], steps: int
) -> None:
    validates = arguments.get("limit_val_batches") is None
    right = "val_loss" if validates else "train_loss"
    checkpoint = ModelCheckpoint(tmp_path, monitor=right[:-1], every_n_train_steps=arguments.pop("rhythm", None))
    trainer = make_trainer(tmp_path, checkpoint, **arguments)
    message = rf"monitor='{right[:-1]}'.*not logged\. Did you mean '{right}'\? Logged so far: .*'{right}'.*self\.log"
    with pytest.raises(ValueError, match=message):
        trainer.fit(TinyModule(), tiny_loader(), tiny_loader(seed=1))
    assert names(tmp_path) == []
    assert trainer.global_step == steps


# ---- last ------------------------------------------------------------------------------------------------------------


def test_last_is_a_whole_file_of_its_own(tmp_path: Path) -> None:
    checkpoint = by_score(tmp_path, save_last=True)
    fit(tmp_path, checkpoint, module=Scored(1.0, 2.0, 3.0))
    last = tmp_path / "last.ckpt"
    assert checkpoint.last_model_path == str(last)
    assert not last.is_symlink()
    assert last.stat().st_nlink == 1
    os.remove(checkpoint.best_model_path)
    assert load(last)["global_step"] == 12
    trainer = fit(tmp_path, module=Scored(1.0, 2.0, 3.0, 4.0), resume=last, epochs=4)
    assert trainer.global_step == 16


def test_last_as_a_link_shows_the_ranked_file_of_the_newest_step_or_is_a_whole_file(tmp_path: Path) -> None:
    first, moved = tmp_path / "first", tmp_path / "moved"
    checkpoint = by_score(first, save_last="link")
    fit(tmp_path, checkpoint, module=Scored(3.0, 2.0, 1.0))
    assert checkpoint.last_model_path == str(first / "last.ckpt")
    assert os.readlink(first / "last.ckpt") == os.path.basename(checkpoint.best_model_path)
    kept = names(first)
    shutil.move(first, moved)
    last = moved / "last.ckpt"
    assert load(last)["global_step"] == 12
    trainer = fit(tmp_path, by_score(moved, save_last="link"), module=Scored(3, 2, 1, 4.0), resume="last", epochs=4)
    assert trainer.global_step == load(last)["global_step"] == 16
    assert names(moved) == kept
    assert not last.is_symlink()
    with pytest.raises(ValueError, match=r"save_last='link'\) is only supported for local file paths"):
        fit(tmp_path, ModelCheckpoint("memory://folder", save_last="link"), module=Scored(1.0), epochs=1)


def test_last_holds_the_step_at_which_the_training_ended(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path, every_n_train_steps=4, save_last=True), max_steps=6)
    assert names(tmp_path) == ["epoch=0-step=4.ckpt", "last.ckpt"]
    assert load(tmp_path / "last.ckpt")["global_step"] == 6


def test_last_knows_the_best_of_its_own_moment(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{step}", monitor="val_loss", every_n_train_steps=4, save_last=True)
    fit(tmp_path, checkpoint, epochs=1)
    state = load(tmp_path / "last.ckpt")["callbacks"][checkpoint.state_key]
    assert state["best_model_path"] == "step=4.ckpt"
    assert state["best_model_score"] == checkpoint.best_model_score


def test_a_last_name_with_the_epoch_in_it_leaves_one_file(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_top_k=0, save_last=True)
    checkpoint.CHECKPOINT_NAME_LAST = "{epoch}-last"
    fit(tmp_path, checkpoint)
    assert names(tmp_path) == ["epoch=2-last.ckpt"]


def test_a_step_is_not_saved_twice(tmp_path: Path) -> None:
    saves = Saves()
    fit(tmp_path, saves, ModelCheckpoint(tmp_path, save_last=True), epochs=1)
    assert saves.steps == [4]  # for the file and last


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "insert", "name"),
    [
        (None, True, "epoch=3-step=17"),
        ("{epoch:02d}-{val_loss:.2f}", True, "epoch=03-val_loss=0.12"),
        ("{epoch:02d}-{val_loss:.2f}", False, "03-0.12"),
        ("model", True, "model"),
        ("model.ckpt", True, "model"),
        ("{val/acc:.1f}", True, "val_acc=0.5"),
        ("run/{val/acc:.1f}", False, "run/0.5"),
        ("{m.f1:d}", True, "m.f1=2"),
        ("{epoch_test}-{epoch}", True, "epoch_test=9-epoch=3"),
        ("{{{step}}}", False, "{17}"),
        ("{absent:02d}-{absent:.2f}", True, "absent=nan-absent=nan"),
    ],
)
def test_names_are_filled_from_metrics(template: str | None, insert: bool, name: str) -> None:
    metrics = {
        "epoch": torch.tensor(3),
        "step": 17,
        "val_loss": torch.tensor(0.123456),
        "val/acc": 0.5,
        "m.f1": torch.tensor(2.0),
        "epoch_test": 9,
    }
    checkpoint = ModelCheckpoint(filename=template, auto_insert_metric_name=insert)
    assert checkpoint.format_checkpoint_name(metrics) == f"{name}.ckpt"


def test_names_take_a_version_a_prefix_and_the_folder(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{step}")
    assert checkpoint.format_checkpoint_name({"step": 1}, ver=2, prefix="a") == str(tmp_path / "a-step=1-v2.ckpt")
    assert checkpoint.format_checkpoint_name({"step": 1}, filename="x") == str(tmp_path / "x.ckpt")


def test_a_metric_in_the_name_that_is_not_logged_is_warned_about(tmp_path: Path) -> None:
    with pytest.warns(PacelineWarning, match=r"'absent'.*name contains nan.*'train_loss' or 'val_loss'"):
        fit(tmp_path, ModelCheckpoint(tmp_path, "{absent:.2f}-{val_loss:.0f}"), epochs=1)
    assert len(names(tmp_path)) == 1
    assert names(tmp_path)[0].startswith("absent=nan-val_loss=")


def test_a_name_that_exists_gets_a_version(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path, "model", save_top_k=-1))
    assert names(tmp_path) == ["model-v1.ckpt", "model-v2.ckpt", "model.ckpt"]


def test_a_fixed_name_is_used_again_for_the_file_that_gives_way(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path, "model"))
    assert names(tmp_path) == ["model.ckpt"]
    assert load(tmp_path / "model.ckpt")["global_step"] == 12


def test_without_the_version_counter_a_name_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").write_text("older")
    fit(tmp_path, ModelCheckpoint(tmp_path, "model", save_top_k=-1, enable_version_counter=False))
    assert names(tmp_path) == ["model.ckpt"]
    assert load(tmp_path / "model.ckpt")["global_step"] == 12


# ---- what is deleted, and when ---------------------------------------------------------------------------------------


def test_files_of_others_are_never_touched(tmp_path: Path) -> None:
    others = ["epoch=0.ckpt", "epoch=2.ckpt", "last.ckpt", "notes.txt", "deep/epoch=1.ckpt"]
    (tmp_path / "deep").mkdir()
    for name in others:
        (tmp_path / name).write_text(name)
    checkpoint = by_score(tmp_path, save_last=True)
    fit(tmp_path, checkpoint, module=Scored(3.0, 2.0, 1.0))
    assert all((tmp_path / name).read_text() == name for name in others)
    assert set(names(tmp_path)) - set(others) == {"epoch=2-v1.ckpt", "last-v1.ckpt"}


def test_a_second_run_in_the_same_folder_leaves_the_first_ones_files(tmp_path: Path) -> None:
    fit(tmp_path, by_score(tmp_path, save_last=True), module=Scored(1.0, 2.0, 3.0))
    first = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    fit(tmp_path, by_score(tmp_path, save_last=True), module=Scored(3.0, 2.0, 1.0))
    assert {name: (tmp_path / name).read_bytes() for name in first} == first
    assert set(names(tmp_path)) - set(first) == {"epoch=2.ckpt", "last-v1.ckpt"}


def test_a_file_is_deleted_only_when_its_successor_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = []
    remove = os.remove

    def watched(path: str) -> None:
        assert Path(checkpoint.best_model_path).is_file()
        assert load(checkpoint.best_model_path)["global_step"] > load(path)["global_step"]
        removed.append(Path(path).name)
        remove(path)

    checkpoint = by_score(tmp_path)
    monkeypatch.setattr(owned_files.os, "remove", watched)
    fit(tmp_path, checkpoint, module=Scored(3.0, 2.0, 1.0))
    assert removed == ["epoch=0.ckpt", "epoch=1.ckpt"]


def test_a_failed_write_keeps_the_older_file_and_the_ranking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint_file.write

    def full_disk(checkpoint: dict[str, Any], path: Any) -> None:
        if checkpoint["global_step"] > 8:
            raise OSError(28, "No space left on device", str(path))
        write(checkpoint, path)

    monkeypatch.setattr(checkpoint_file, "write", full_disk)
    checkpoint = by_score(tmp_path, save_last=True, save_on_exception=True)
    with pytest.warns(PacelineWarning, match="could not be saved"), pytest.raises(OSError, match="No space left"):
        fit(tmp_path, checkpoint, module=Scored(3.0, 2.0, 1.0))
    assert names(tmp_path) == ["epoch=1.ckpt", "last.ckpt"]
    assert checkpoint.best_model_path == str(tmp_path / "epoch=1.ckpt")
    assert checkpoint.best_model_score == 2.0
    assert list(checkpoint.best_k_models) == [checkpoint.best_model_path]
    assert load(tmp_path / "last.ckpt")["global_step"] == 8


# ---- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_resumed_run_goes_on_ranking_and_deletes_what_it_wrote_before(tmp_path: Path, weights_only: bool) -> None:
    folder = tmp_path / "files"
    arguments = {"save_top_k": 2, "save_weights_only": weights_only}
    whole = ModelCheckpoint(tmp_path / "whole")
    fit(tmp_path, by_score(folder, **arguments), whole, module=Scored(2.0, 4.0), epochs=2)
    assert names(folder) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    resumed = by_score(folder, **arguments)
    module = Scored(2.0, 4.0, 5.0, 3.0, 1.0)
    fit(tmp_path, resumed, ModelCheckpoint(tmp_path / "whole"), module=module, resume=whole.best_model_path, epochs=5)
    assert names(folder) == ["epoch=0.ckpt", "epoch=4.ckpt"]
    assert [score.item() for score in resumed.best_k_models.values()] == [2.0, 1.0]


def test_a_resumed_run_writes_on_in_its_own_last_file(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path, save_top_k=0, save_last=True), epochs=1)
    fit(tmp_path, ModelCheckpoint(tmp_path, save_top_k=0, save_last=True), resume=tmp_path / "last.ckpt", epochs=2)
    assert names(tmp_path) == ["last.ckpt"]
    assert load(tmp_path / "last.ckpt")["global_step"] == 8


def test_the_file_a_run_was_resumed_from_is_not_deleted(tmp_path: Path) -> None:
    fit(tmp_path, by_score(tmp_path), module=Scored(4.0), epochs=1)
    fit(tmp_path, by_score(tmp_path), module=Scored(4.0, 3.0, 2.0), resume=tmp_path / "epoch=0.ckpt")
    assert names(tmp_path) == ["epoch=0.ckpt", "epoch=2.ckpt"]


def test_a_moved_folder_goes_on_in_its_new_place(tmp_path: Path) -> None:
    fit(tmp_path, by_score(tmp_path / "old", save_top_k=2, save_last=True), module=Scored(2.0, 4.0), epochs=2)
    new = tmp_path / "new"
    shutil.move(tmp_path / "old", new)
    resumed = by_score(new, save_top_k=2, save_last=True)
    fit(tmp_path, resumed, module=Scored(2.0, 4.0, 3.0), resume=new / "last.ckpt")
    assert names(tmp_path) == ["new/epoch=0.ckpt", "new/epoch=2.ckpt", "new/last.ckpt"]
    assert resumed.best_model_path == str(new / "epoch=0.ckpt")


def test_another_folder_keeps_the_ranking_and_leaves_the_old_files(tmp_path: Path) -> None:
    fit(tmp_path, by_score(tmp_path / "a", save_top_k=2, save_last=True), module=Scored(2.0, 4.0), epochs=2)
    before = names(tmp_path / "a")
    resumed = by_score(tmp_path / "b", save_top_k=2, save_last=True)
    fit(tmp_path, resumed, module=Scored(2.0, 4.0, 3.0, 5.0), resume=tmp_path / "a" / "last.ckpt", epochs=4)
    assert names(tmp_path / "a") == before
    assert names(tmp_path / "b") == ["epoch=2.ckpt", "last.ckpt"]
    assert resumed.best_model_path == str(tmp_path / "a" / "epoch=0.ckpt")
    state = load(tmp_path / "b" / "last.ckpt")["callbacks"][resumed.state_key]
    assert state["best_model_path"] == "../a/epoch=0.ckpt"


def test_a_file_of_another_run_that_bears_the_name_of_one_of_ours_is_left_alone(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        fit(tmp_path, by_score(folder, save_last=True), module=Scored(4.0), epochs=1)
    others = {name: (b / name).read_bytes() for name in names(b)}
    fit(tmp_path, by_score(b, save_last=True), module=Scored(4.0, 3.0), resume=a / "last.ckpt", epochs=2)
    assert set(names(b)) - set(others) == {"epoch=1.ckpt", "last-v1.ckpt"}
    assert {name: (b / name).read_bytes() for name in others} == others


def test_files_that_are_gone_leave_the_ranking(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, by_score(tmp_path, save_top_k=2, save_last=True), module=Scored(1.0, 2.0), epochs=2)
    os.remove(tmp_path / "epoch=0.ckpt")
    resumed = by_score(tmp_path, save_top_k=2, save_last=True)
    fit(tmp_path, resumed, module=Scored(1.0, 2.0, 9.0), resume=tmp_path / "last.ckpt")
    assert "'epoch=0.ckpt'" in caplog.text
    assert names(tmp_path) == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
    assert resumed.best_model_score == 2.0


@pytest.mark.parametrize("there", [True, False], ids=["where they were", "moved"])
def test_absolute_paths_of_other_tools_are_understood(tmp_path: Path, there: bool) -> None:
    old = tmp_path / "old"
    checkpoint = by_score(old, save_top_k=2, save_last=True)
    fit(tmp_path, checkpoint, module=Scored(2.0, 4.0), epochs=2)
    content = load(old / "last.ckpt")
    content["callbacks"][checkpoint.state_key] = {
        "monitor": "score",
        "dirpath": str(old),
        "best_model_score": checkpoint.best_model_score,
        "best_model_path": checkpoint.best_model_path,
        "best_k_models": checkpoint.best_k_models,
        "last_model_path": checkpoint.last_model_path,
    }
    torch.save(content, old / "last.ckpt")
    folder = old if there else tmp_path / "new"
    if not there:
        shutil.move(old, folder)
    resumed = by_score(folder, save_top_k=2)
    fit(tmp_path, resumed, module=Scored(2.0, 4.0, 3.0), resume=folder / "last.ckpt")
    assert resumed.best_model_path == str(folder / "epoch=0.ckpt")
    assert [Path(path).name for path in resumed.best_k_models] == ["epoch=0.ckpt", "epoch=2.ckpt"]


def test_the_state_is_plain_and_holds_no_place_on_this_machine(tmp_path: Path) -> None:
    checkpoint = by_score(tmp_path, save_last=True)
    fit(tmp_path, checkpoint, module=Scored(1.0, 2.0, 3.0))
    state = load(tmp_path / "last.ckpt")["callbacks"][checkpoint.state_key]
    assert str(tmp_path) not in repr(state)
    assert (state["best_model_path"], state["last_model_path"]) == ("epoch=0.ckpt", "last.ckpt")
    assert state["best_k_models"] == {"epoch=0.ckpt": torch.tensor(1.0)}


def test_a_second_fit_saves_again_at_the_steps_it_reaches(tmp_path: Path) -> None:
    saves, checkpoint = Saves(), ModelCheckpoint(tmp_path, save_last=True)
    fit(tmp_path, saves, checkpoint, epochs=1)
    fit(tmp_path, saves, checkpoint, epochs=1)
    assert saves.steps == [4, 4]
    assert names(tmp_path) == ["epoch=0-step=4.ckpt", "last.ckpt"]


# ---- killed and started again ----------------------------------------------------------------------------------------

#: Functions that a run is killed in front of.
DEADLY: dict[str, tuple[Any, str]] = {
    "save": (Saver, "wait"),
    "rename": (atomic_write, "take_place"),
    "delete": (owned_files.RunFiles, "delete"),
}


def killed(place: str, call: int, work: Callable[[], Any]) -> bool:
    """Run ``work`` in a forked process that ends just before a function's n-th call; whether it came to that."""
    owner, name = DEADLY[place]
    original, calls = getattr(owner, name), count(1)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            os._exit(9)
        return original(*args, **kwargs)

    pid = os.fork()
    if pid == 0:
        setattr(owner, name, deadly)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1] != 0


def restarted(folder: Path, **arguments: Any) -> dict[str, float]:
    """Start a run, or go on with it; returns its ranking."""
    torch.manual_seed(1)
    checkpoint = ModelCheckpoint(folder, "{step}", **arguments)
    trainer = make_trainer(folder, checkpoint, epochs=2, val_check_interval=3, num_sanity_val_steps=0)
    trainer.fit(TinyModule(lr=0.01), tiny_loader(6), tiny_loader(seed=1), ckpt_path="auto")
    return {Path(path).name: score.item() for path, score in checkpoint.best_k_models.items()}


@pytest.mark.parametrize("place", DEADLY)
@pytest.mark.parametrize(
    "arguments",
    [
        {"every_n_train_steps": 2},
        {"every_n_train_steps": 2, "save_last": True, "monitor": "val_loss", "save_top_k": 2},
        {"every_n_train_steps": 3, "monitor": "val_loss", "save_top_k": -1},
        {"save_on_train_epoch_end": False, "monitor": "val_loss", "save_top_k": 2},
    ],
    ids=["newest", "waiting for the validation", "scored late", "after validations"],
)
def test_a_run_that_is_killed_keeps_the_files_of_one_left_alone(
    place: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    ranking = restarted(tmp_path / "whole", **arguments)
    for call in range(3, 9, 2):
        folder = tmp_path / str(call)
        if killed(place, call, partial(restarted, folder, **arguments)):
            killed(place, 2, partial(restarted, folder, **arguments))
            assert restarted(folder, **arguments) == ranking
            assert names(folder) == names(tmp_path / "whole")


def test_files_written_after_the_one_gone_on_from_get_no_twins(tmp_path: Path) -> None:
    def run(folder: Path) -> None:
        torch.manual_seed(1)
        light = ModelCheckpoint(folder, "light", save_weights_only=True, every_n_train_steps=1)
        whole = ModelCheckpoint(folder, "whole", every_n_train_steps=3)
        make_trainer(folder, light, whole, epochs=2).fit(TinyModule(), tiny_loader(4), ckpt_path="auto")

    folder = tmp_path / "killed"
    assert killed("rename", 7, lambda: run(folder))  # light at 1, 2, 3; whole at 3; light at 4, 5
    run(folder)
    run(tmp_path / "whole")
    assert names(folder) == names(tmp_path / "whole") == ["light.ckpt", "whole.ckpt"]


def test_what_others_save_in_the_folder_outlives_restarts(tmp_path: Path) -> None:
    class Mine(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step in (2, 3):
                trainer.save_checkpoint(tmp_path / f"mine-{trainer.global_step}.ckpt", trainer.global_step == 3)

    torch.manual_seed(1)
    fit(tmp_path, Mine(), ModelCheckpoint(tmp_path, save_weights_only=True), epochs=1)
    fit(tmp_path, ModelCheckpoint(tmp_path, save_weights_only=True), resume="auto")
    assert names(tmp_path) == ["epoch=2-step=12.ckpt", "mine-2.ckpt", "mine-3.ckpt"]


def test_the_file_of_a_signal_is_replaced_when_the_run_went_on(tmp_path: Path) -> None:
    class Ends(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 6:
                signal.raise_signal(signal.SIGTERM)

    def keeper() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, "{step}", monitor="score")

    with pytest.raises(SystemExit):
        fit(tmp_path, Ends(), keeper(), module=Scored(1.0, 3.0, 2.0))
    assert names(tmp_path) == ["step=4.ckpt", "step=6.ckpt"]
    fit(tmp_path, keeper(), module=Scored(1.0, 3.0, 0.5), resume="auto")
    assert names(tmp_path) == ["step=12.ckpt"]


@pytest.mark.parametrize("save_last", [True, "link"])
@pytest.mark.parametrize("save_top_k", [1, -1])
def test_a_signal_writes_one_file_and_says_which(
    save_last: Any, save_top_k: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Ends(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 6:
                signal.raise_signal(signal.SIGTERM)

    def keeper() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, "{step}", save_last=save_last, save_top_k=save_top_k)

    with caplog.at_level("INFO"), pytest.raises(SystemExit):
        fit(tmp_path, Ends(), keeper())
    assert names(tmp_path) == ["last.ckpt", "step=4.ckpt"]
    assert f"SIGTERM ends the fit after step 6. The state was saved in '{tmp_path / 'last.ckpt'}'." in caplog.text
    fit(tmp_path, keeper(), resume="auto")
    kept = ["step=12.ckpt"] if save_top_k == 1 else ["step=12.ckpt", "step=4.ckpt", "step=8.ckpt"]
    assert names(tmp_path) == ["last.ckpt", *kept]


def test_a_signal_after_a_failed_write_in_the_background_still_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, stopping = checkpoint_file.write, Event()

    def full_disk(checkpoint: dict[str, Any], path: Any) -> None:
        if checkpoint["global_step"] == 2:
            stopping.wait(120)
            raise OSError(28, "No space left on device", str(path))
        write(checkpoint, path)

    class Keeper(ModelCheckpoint):
        def save_on_signal(self, trainer: Any, name: str) -> None:
            stopping.set()
            super().save_on_signal(trainer, name)

    class Ends(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(checkpoint_file, "write", full_disk)
    checkpoint = Keeper(tmp_path, "{step}", every_n_train_steps=2, async_save=True)
    with pytest.raises(SystemExit):
        fit(tmp_path, Ends(), checkpoint)
    assert names(tmp_path) == ["step=3.ckpt"]
    assert "The last save before SIGTERM failed: OSError: [Errno 28]" in capsys.readouterr().err


def test_a_wait_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module_under_test, "perf_counter", lambda: now[0])
    first = ModelCheckpoint(tmp_path, train_time_interval=timedelta(seconds=10))
    fit(tmp_path, first, epochs=1)
    now[0] = 7.0
    state = first.state_dict()
    again = ModelCheckpoint(tmp_path, train_time_interval=timedelta(seconds=10))
    again.load_state_dict(state)
    again._begin(4)
    assert (state["seconds_left"], again._deadline) == (3.0, 10.0)


def test_another_runs_file_of_the_same_name_is_neither_replaced_nor_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "other", "model"), epochs=1)
    other = (tmp_path / "other" / "model.ckpt").read_bytes()
    folder, write = tmp_path / "shared", checkpoint_file.write

    def slow(checkpoint: dict[str, Any], path: Any) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "model.ckpt").write_bytes(other)
        write(checkpoint, path)

    monkeypatch.setattr(checkpoint_file, "write", slow)
    with pytest.raises(FileExistsError, match=r"another run saved a checkpoint with the same name.*dirpath"):
        fit(tmp_path, ModelCheckpoint(folder, "model"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"model.ckpt": other}


def test_a_file_of_ours_that_another_run_replaced_is_not_deleted(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "other", "{step}"), epochs=1)

    class Replaces(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                shutil.copy(tmp_path / "other" / "step=4.ckpt", tmp_path / "shared" / "step=4.ckpt")

    fit(tmp_path, Replaces(), ModelCheckpoint(tmp_path / "shared", "{step}"))
    assert names(tmp_path / "shared") == ["step=12.ckpt", "step=4.ckpt"]


# ---- on an exception -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("enough"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_an_exception_can_be_saved(tmp_path: Path, error: BaseException) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 6:
                raise error

    checkpoint = by_score(tmp_path, save_on_exception=True, save_last=True)
    with pytest.raises(type(error)):
        fit(tmp_path, Stop(), checkpoint, module=Scored(1.0, 2.0, 3.0))
    assert names(tmp_path) == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert load(tmp_path / "epoch=1.ckpt")["global_step"] == 6
    assert load(tmp_path / "last.ckpt")["global_step"] == 6
    assert checkpoint.best_model_path == str(tmp_path / "epoch=0.ckpt")


# ---- several processes -----------------------------------------------------------------------------------------------


class OwnScored(Scored):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.scores[self.current_epoch], sync_dist=False)


class OfRank0(DummyLogger):
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        assert os.environ["RANK"] == "0", "only rank 0 tells the loggers"


def ranking_of_a_fit(folder: Path) -> tuple[str, float]:
    scores = [(0.0, 3.0, 5.0), (5.0, 1.0, 0.0)][int(os.environ["RANK"])]
    checkpoint = by_score(folder)
    fit(folder, checkpoint, module=OwnScored(*scores), strategy="ddp", devices=2, logger=OfRank0())
    assert checkpoint.best_model_score is not None
    return checkpoint.best_model_path, checkpoint.best_model_score.item()


def test_processes_with_values_of_their_own_rank_by_the_mean_and_one_writes(tmp_path: Path) -> None:
    best = str(tmp_path / "epoch=1.ckpt"), 2.0
    assert ranks(2, ranking_of_a_fit, tmp_path) == [best, best]
    assert names(tmp_path) == ["epoch=1.ckpt"]


# ---- others ----------------------------------------------------------------------------------------------------------


def test_loggers_are_told_once_all_files_of_a_moment_are_there(tmp_path: Path) -> None:
    seen = []

    class Logger(DummyLogger):
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            seen.append((names(tmp_path), checkpoint_callback))

    checkpoint = by_score(tmp_path, save_last=True)
    fit(tmp_path, checkpoint, module=Scored(3.0, 2.0), epochs=2, logger=[Logger(), Logger()])
    first, second = (["epoch=0.ckpt", "last.ckpt"], checkpoint), (["epoch=1.ckpt", "last.ckpt"], checkpoint)
    assert seen == [first, first, second, second]


def test_weights_only_files_hold_no_optimizer(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_weights_only=True)
    fit(tmp_path, checkpoint, epochs=1)
    content = load(checkpoint.best_model_path)
    assert "state_dict" in content
    assert "optimizer_states" not in content


def test_verbose_says_what_is_saved_and_what_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, by_score(tmp_path, verbose=True), module=Scored(1.0, 2.5), epochs=2)
    said = caplog.text
    assert f"Step 4: 'score' is 1, saved '{tmp_path / 'epoch=0.ckpt'}'." in said
    assert "Step 8: 'score' is 2.5, which is not among the best 1." in said


def test_the_ranking_can_be_written_as_yaml(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    checkpoint = by_score(tmp_path, save_top_k=-1)
    fit(tmp_path, checkpoint, module=Scored(1.5, math.inf, NAN))
    checkpoint.to_yaml()
    written = yaml.safe_load((tmp_path / "best_k_models.yaml").read_text())
    assert list(written) == [str(tmp_path / f"epoch={epoch}.ckpt") for epoch in range(3)]
    assert list(written.values())[:2] == [1.5, math.inf]
    assert math.isnan(list(written.values())[2])


def test_yaml_without_a_folder_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"does not know where to write.*Pass filepath"):
        ModelCheckpoint().to_yaml()


def test_check_monitor_top_k_says_whether_a_score_would_be_kept(tmp_path: Path) -> None:
    checkpoint = by_score(tmp_path)
    trainer = fit(tmp_path, checkpoint, module=Scored(2.0), epochs=1)
    answers = [checkpoint.check_monitor_top_k(trainer, score) for score in (torch.tensor(1.0), torch.tensor(3.0), None)]
    assert answers == [True, False, False]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mode": "mn"}, ValueError, r"ModelCheckpoint mode 'mn'\. Did you mean 'min'\?.*'min' or 'max'"),
        ({"save_top_k": -2}, ValueError, r"save_top_k=-2.*must be a non-negative integer .the number of files to keep"),
        ({"save_top_k": 1.5}, ValueError, r"save_top_k=1\.5.*a non-negative integer"),
        ({"save_top_k": 3}, ValueError, r"save_top_k=3, monitor=None.*no metric.*Pass monitor"),
        ({"monitor": 3}, TypeError, r"monitor=3.*is not the name of a metric.*self\.log"),
        ({"save_last": "yes"}, ValueError, r"save_last='yes' must be True or False"),
        ({"every_n_epochs": -1}, ValueError, r"every_n_epochs=-1.*must be a whole number of at least 1"),
        ({"every_n_train_steps": 2.0}, ValueError, r"every_n_train_steps=2\.0.*at least 1"),
        (
            {"every_n_epochs": 1, "every_n_train_steps": 2},
            ValueError,
            r"every_n_epochs=1, every_n_train_steps=2.*one saving interval",
        ),
        ({"every_n_epochs": 1, "train_time_interval": timedelta(0)}, ValueError, r"more than one.*Keep one"),
        ({"train_time_interval": 30}, TypeError, r"train_time_interval=.*30 of type int.*timedelta"),
        ({"filename": "{epoch"}, ValueError, r"filename=.*'\{epoch', which is not a valid template.*'\{epoch:02d\}'"),
        ({"filename": "{}"}, ValueError, r"without a metric name"),
        ({"filename": "{loss:.2q}"}, ValueError, r"the format '\.2q' of 'loss' is not a number format"),
        ({"filename": "{loss!r}"}, ValueError, r"a conversion, '!r'"),
        ({"dirpath": "s4://bucket/x"}, ValueError, r"'s4://bucket/x': Unknown protocol 's4'.*Choose 's3'"),
    ],
)
def test_bad_arguments_are_errors_that_say_what_to_do(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ModelCheckpoint(**arguments)


def test_two_with_one_state_key_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="state_key"):
        fit(tmp_path, ModelCheckpoint(tmp_path / "a"), ModelCheckpoint(tmp_path / "b"))


def test_a_ranking_without_files_is_an_empty_mapping(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    ModelCheckpoint(dirpath=tmp_path).to_yaml()
    assert yaml.safe_load((tmp_path / "best_k_models.yaml").read_text()) == {}


def test_dirpath_may_be_set_before_the_fit(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "first")
    checkpoint.dirpath = tmp_path / "second"
    assert checkpoint.dirpath == str(tmp_path / "second")
    fit(tmp_path, checkpoint)
    assert Path(checkpoint.best_model_path).parent == tmp_path / "second"
    assert not (tmp_path / "first").exists()


def test_a_pickled_callback_has_equal_attributes(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path, monitor="score", save_top_k=1)
    assert vars(pickle.loads(pickle.dumps(checkpoint))) == vars(checkpoint)


def test_saves_go_through_a_save_checkpoint_of_the_programs_own(tmp_path: Path) -> None:
    saved: list[tuple[str, bool]] = []

    class Tells(Trainer):
        def save_checkpoint(self, filepath: Any, weights_only: bool = False, storage_options: Any = None) -> None:
            saved.append((Path(filepath).name, weights_only))
            super().save_checkpoint(filepath, weights_only, storage_options)

    checkpoint = ModelCheckpoint(dirpath=tmp_path, monitor="score", save_last=True)
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = Tells(max_epochs=3, default_root_dir=tmp_path, callbacks=[checkpoint], **quiet)
    trainer.fit(Scored(2.0, 3.0, 1.0), tiny_loader(), tiny_loader())
    first, best, last = "epoch=0-step=4.ckpt", "epoch=2-step=12.ckpt", "last.ckpt"
    assert saved == [(name, False) for name in (first, last, last, best, last)]
    assert names(tmp_path) == ["epoch=2-step=12.ckpt", "last.ckpt"]
    assert load(checkpoint.best_model_path)["callbacks"][checkpoint.state_key]["best_model_score"] == 1.0


def test_a_subclass_adds_values_and_writes_and_deletes_files(tmp_path: Path):
    done: list[tuple[str, str]] = []

    class Own(ModelCheckpoint):
        def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
            found = super()._monitor_candidates(trainer)
            return found | {"doubled": 2 * found["score"]}

        def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
            done.append(("save", Path(filepath).name))
            super()._save_checkpoint(trainer, filepath)

        def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
            done.append(("remove", Path(filepath).name))
            super()._remove_checkpoint(trainer, filepath)

    kept = Own(tmp_path, "{epoch}-{doubled:.0f}", monitor="doubled")
    fit(tmp_path, kept, module=Scored(2.0, 3.0, 1.0))
    first, second = "epoch=0-doubled=4.ckpt", "epoch=2-doubled=2.ckpt"
    assert done == [("save", first), ("save", second), ("remove", first)]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == [second] == [Path(kept.best_model_path).name]
    assert kept.best_model_score == 2


class Ranking(ModelCheckpoint):
    """Records the calls of its own methods."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        self.calls.append("candidates")
        return super()._monitor_candidates(trainer)

    def _update_best_and_save(self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        assert monitor_candidates.keys() == {"epoch", "step", "score", "train_loss"}
        self.calls.append(f"update {current:.0f}")
        super()._update_best_and_save(current, trainer, monitor_candidates)
        self.calls.append(f"updated {Path(self.best_model_path).stem}")

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self.calls.append(f"save {Path(filepath).stem}")
        super()._save_checkpoint(trainer, filepath)

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self.calls.append(f"remove {Path(filepath).stem}")
        super()._remove_checkpoint(trainer, filepath)


@pytest.mark.parametrize("save_last", [None, True, "link"])
def test_a_subclass_updates_the_ranking_itself(tmp_path: Path, save_last: Any) -> None:
    kept = Ranking(tmp_path, "{epoch}", monitor="score", save_top_k=2, save_last=save_last)
    fit(tmp_path, kept, module=Scored(3.0, 2.0, 1.0, 4.0), epochs=4)
    last = ["save last"] * (save_last is True)
    first = ["candidates", "update 3", "save epoch=0", "updated epoch=0", *last]
    second = ["candidates", "update 2", "save epoch=1", "updated epoch=1", *last]
    third = ["candidates", "update 1", "save epoch=2", "remove epoch=0", "updated epoch=2", *last]
    done = first + second + third
    assert kept.calls[: len(done)] == done
    assert "update 4" not in kept.calls
    assert {path.name for path in tmp_path.glob("epoch*")} == {"epoch=1.ckpt", "epoch=2.ckpt"}
    assert kept.best_model_score == 1
    assert kept.kth_value == 2
    state = load(kept.best_model_path)["callbacks"][kept.state_key]
    assert state["best_model_score"] == 1
    assert load(kept.best_model_path)["epoch"] == 2
    if save_last:
        assert load(kept.last_model_path)["global_step"] == 16


def test_an_update_of_the_programs_own_decides_about_the_file_and_the_score(tmp_path: Path) -> None:
    class Picky(ModelCheckpoint):
        def _update_best_and_save(self, current: Tensor, trainer: Trainer, monitor_candidates: Any) -> None:
            if trainer.current_epoch != 1:
                super()._update_best_and_save(current + 10, trainer, monitor_candidates)
                assert Path(self.best_model_path).exists()

    kept = Picky(tmp_path, "{epoch}-{score:.0f}", monitor="score", save_last=True, async_save=True)
    fit(tmp_path, kept, module=Scored(3.0, 2.0, 1.0))
    assert names(tmp_path) == ["epoch=2-score=11.ckpt", "last.ckpt"]
    assert kept.best_model_score == 11
    again = Picky(tmp_path, "{epoch}-{score:.0f}", monitor="score", save_last=True)
    fit(tmp_path, again, module=Scored(3.0, 2.0, 1.0, 0.0), epochs=4, resume=kept.last_model_path)
    assert names(tmp_path) == ["epoch=3-score=10.ckpt", "last.ckpt"]

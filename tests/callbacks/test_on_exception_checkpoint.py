from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader

from paceline import Trainer
from paceline.callbacks.base import Callback
from paceline.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from paceline.checkpoint import single_file as checkpoint_file
from paceline.messages import PacelineWarning


class Stop(Callback):
    """Raises after a number of optimizer steps."""

    def __init__(self, step: int, error: BaseException) -> None:
        self.step = step
        self.error = error

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            raise self.error

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        if self.step == 0:
            raise self.error


def make_trainer(*callbacks: Callback, **arguments: Any) -> Trainer:
    return Trainer(
        callbacks=list(callbacks),
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
        **arguments,
    )


@pytest.mark.parametrize("error", [RuntimeError("enough"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_the_state_at_the_exception_is_saved_and_can_be_resumed(tmp_path: Path, error: BaseException) -> None:
    callback = OnExceptionCheckpoint(tmp_path / "new")
    with pytest.raises(type(error)):
        make_trainer(callback, Stop(4, error)).fit(TinyModule(), tiny_loader(), tiny_loader())
    assert callback.ckpt_path == str(tmp_path / "new" / "on_exception.ckpt")
    assert torch.load(callback.ckpt_path, weights_only=True)["global_step"] == 4
    trainer = make_trainer(OnExceptionCheckpoint(tmp_path / "new"))
    trainer.fit(TinyModule(), tiny_loader(), ckpt_path="last")
    assert trainer.global_step == 8


def test_a_fit_without_an_exception_writes_nothing(tmp_path: Path) -> None:
    make_trainer(OnExceptionCheckpoint(tmp_path / "new")).fit(TinyModule(), tiny_loader())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("step", "arguments"),
    [(0, {}), (1, {"fast_dev_run": True})],
    ids=["before the first step", "fast_dev_run"],
)
def test_trials_write_nothing(tmp_path: Path, step: int, arguments: dict[str, Any]) -> None:
    trainer = make_trainer(OnExceptionCheckpoint(tmp_path / "new"), Stop(step, RuntimeError("enough")), **arguments)
    with pytest.raises(RuntimeError, match="enough"):
        trainer.fit(TinyModule(), tiny_loader(), tiny_loader())
    assert not (tmp_path / "new").exists()


def test_an_exception_outside_of_a_fit_writes_nothing(tmp_path: Path) -> None:
    class Broken(TinyModule):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("enough")

    trainer = make_trainer(OnExceptionCheckpoint(tmp_path / "new"))
    trainer.fit(Broken(), tiny_loader())
    with pytest.raises(RuntimeError, match="enough"):
        trainer.test(Broken(), tiny_loader())
    assert not (tmp_path / "new").exists()


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    callback = OnExceptionCheckpoint(tmp_path, filename="crash.ckpt")
    (tmp_path / "crash.ckpt").write_text("older")
    with pytest.raises(RuntimeError, match="enough"):
        make_trainer(callback, Stop(2, RuntimeError("enough"))).fit(TinyModule(), tiny_loader())
    assert torch.load(tmp_path / "crash.ckpt", weights_only=True)["global_step"] == 2


def test_a_failure_to_save_does_not_hide_the_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(checkpoint: dict[str, Any], path: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint_file, "write", full_disk)
    trainer = make_trainer(OnExceptionCheckpoint(tmp_path), Stop(2, RuntimeError("enough")))
    with (
        pytest.warns(PacelineWarning, match="could not be saved after the RuntimeError.*No space left"),
        pytest.raises(RuntimeError, match="enough"),
    ):
        trainer.fit(TinyModule(), tiny_loader())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dirpath": ".", "filename": ""}, r"filename=''.*have no name.*leave the argument out"),
        ({"dirpath": "s4://bucket"}, r"'s4://bucket': Unknown protocol 's4'.*Choose 's3'"),
    ],
)
def test_bad_arguments_are_errors_that_say_what_to_do(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OnExceptionCheckpoint(**arguments)

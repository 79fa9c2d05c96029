"""Runs that hang on purpose, in processes of their own: the detector ends them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from clocks import Clock
from tiny import TinyModule, tiny_loader

from paceline import Trainer
from paceline.callbacks import HangDetector, hang_detector

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, threading, time
from tiny import TinyModule, tiny_loader
from paceline import Trainer
from paceline.callbacks import HangDetector, hang_detector

class Clock:  # it begins to go when the last batch does: what comes before may take as long as it likes
    begun = 0.0

    def monotonic(self):
        return time.monotonic() - self.begun if self.begun else 0.0

hang_detector.time = clock = Clock()

class Net(TinyModule):
    def training_step(self, batch, batch_idx):
        clock.begun = time.monotonic() if self.trainer.is_last_batch else 0.0
        if self.trainer.is_last_batch and self.trainer.global_rank == self.trainer.world_size - 1:
            threading.Event().wait()  # for ever
        return super().training_step(batch, batch_idx)

Trainer(
    accelerator="cpu", strategy=sys.argv[1], devices=int(sys.argv[2]), max_epochs=1, logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    callbacks=HangDetector(timeout_seconds=int(sys.argv[3])),
).fit(Net(), tiny_loader(8))
"""


def hang(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT.parent), os.environ.get("PYTHONPATH", "")])
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=tmp_path,
        env=environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(("strategy", "devices", "batch", "seconds"), [("cpu", 1, 7, 1), ("ddp", 2, 3, 2)])
def test_a_run_that_hangs_ends_and_says_once_where_every_rank_is(
    strategy: str, devices: int, batch: int, seconds: int, tmp_path: Path
) -> None:
    done = hang(tmp_path, strategy, str(devices), str(seconds))
    assert done.returncode == hang_detector.HANG_STATUS, done.stderr
    assert done.stderr.count(f"has made no progress for {seconds} s (HangDetector)") == 1
    for rank in range(devices):
        (told,) = (part for part in done.stderr.split("\nRank ") if part.startswith(f"{rank}: "))
        assert told.startswith(f"{rank}: train, epoch 0, batch {batch}, step {batch}\n  MainThread:\n")
        assert ("in training_step" in told) == (rank == devices - 1)
        assert "in fit" in told


def test_without_abort_it_reports_once_and_goes_on(
    capsys: pytest.CaptureFixture[str], quiet: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told, report = threading.Event(), HangDetector._report

    def and_tell(self: HangDetector, trainer: Any) -> None:
        report(self, trainer)
        told.set()

    class Waits(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            while batch_idx == 2 and not told.wait(0.01):
                clock.sleep(1.0)
            return super().training_step(batch, batch_idx)

    clock = Clock()
    monkeypatch.setattr(hang_detector, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(HangDetector, "_report", and_tell)
    trainer = Trainer(**quiet, max_epochs=1, callbacks=HangDetector(0.3, abort=False))
    trainer.fit(Waits(), tiny_loader())
    assert trainer.global_step == 4
    assert "Rank 0: train, epoch 0, batch 2, step 2\n" in capsys.readouterr().err
    assert not any(thread.name == "paceline-hang-fit" for thread in threading.enumerate() if thread.is_alive())


def test_batches_of_every_kind_are_progress(quiet: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    marks: dict[str, set[Any]] = {}

    class Marks(TinyModule):
        def mark(self) -> None:
            marks.setdefault(str(self.trainer.state.stage), set()).add(hang_detector._mark(self.trainer))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mark()
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.mark()

        test_step = predict_step = validation_step

    trainer, module = Trainer(**quiet, max_epochs=2, accumulate_grad_batches=4), Marks()
    trainer.fit(module, tiny_loader(), tiny_loader())
    trainer.test(module, tiny_loader())
    trainer.predict(module, tiny_loader())
    counts = {stage: len(found) for stage, found in marks.items()}
    assert counts == {"sanity_check": 2, "train": 8, "validate": 8, "test": 4, "predict": 4}


@pytest.mark.parametrize("seconds", [0, -1, True, "60"])
def test_a_bad_time_is_an_error(seconds: Any) -> None:
    with pytest.raises(ValueError, match=r"HangDetector: timeout_seconds=.*Pass more seconds"):
        HangDetector(seconds)

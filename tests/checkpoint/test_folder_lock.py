"""Two runs, one folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import TinyModule, tiny_loader

from paceline import Trainer
from paceline.callbacks import ModelCheckpoint
from paceline.checkpoint import folder_lock

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be claimed on Windows")

HOLDS = """
import sys
from tiny import TinyModule, tiny_loader
from paceline import Trainer
from paceline.callbacks import Callback, ModelCheckpoint


class Waits(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            print("saved", flush=True)
            sys.stdin.readline()


keep = ModelCheckpoint(sys.argv[1])
trainer = Trainer(max_epochs=2, callbacks=[keep, Waits()], logger=False, enable_progress_bar=False, accelerator="cpu")
trainer.fit(TinyModule(), tiny_loader(), ckpt_path="auto")
"""


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """A run in another process that has saved and goes on when it is told to."""
    tests = Path(__file__).resolve().parents[1]
    environment = {"PYTHONPATH": f"{tests}:{tests.parents[1]}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=-1, stdout=-1, env=environment, text=True) as process:
        assert process.stdout.readline() == "saved\n"  # type: ignore[union-attr]
        yield process
        process.kill()


def fit(folder: Path, quiet: dict[str, Any], **more: Any) -> Trainer:
    keep = ModelCheckpoint(folder / "run", every_n_train_steps=1)
    trainer = Trainer(**{**quiet, "enable_checkpointing": True}, max_epochs=2, callbacks=[keep])
    trainer.fit(TinyModule(), tiny_loader(), **more)
    return trainer


def test_a_second_run_does_not_go_on_from_what_the_first_still_writes(
    holder: Any, tmp_path: Path, quiet: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "_WAIT_SECONDS", 0.2)
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    with pytest.raises(BlockingIOError, match="Another run is writing checkpoints to this folder"):
        fit(tmp_path, quiet, ckpt_path="auto")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    fit(tmp_path, quiet)  # one that starts afresh takes names that nobody has
    holder.communicate("\n")
    assert holder.returncode == 0
    assert fit(tmp_path, quiet, ckpt_path="auto").current_epoch == 2


def test_a_run_that_was_killed_holds_nothing(holder: Any, tmp_path: Path, quiet: dict[str, Any]) -> None:
    holder.kill()
    holder.wait()
    trainer = fit(tmp_path, quiet, ckpt_path="auto")
    assert trainer.global_step == 8
    fit(tmp_path, quiet, ckpt_path="auto")  # nor does one that has ended

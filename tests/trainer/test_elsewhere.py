"""Runs in processes that were started for them: what comes back to the Trainer that asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader

from paceline import Trainer
from paceline.callbacks import EarlyStopping, ModelCheckpoint

pytestmark = pytest.mark.cold

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def fit(folder: Path, strategy: str, devices: int, batch_size: int) -> tuple[Trainer, TinyModule]:
    torch.manual_seed(7)
    module, keeper = TinyModule(), ModelCheckpoint(folder, monitor="val_loss", save_top_k=2)
    stopper = EarlyStopping("val_loss", patience=9)
    trainer = Trainer(**QUIET, strategy=strategy, devices=devices, max_epochs=3, callbacks=[stopper, keeper])
    loader = tiny_loader(batches=24 // batch_size, batch_size=batch_size, shuffle=True)
    trainer.fit(module, loader, tiny_loader(batches=3))
    return trainer, module


def test_a_fit_in_forked_processes_leaves_its_trainer_as_a_fit_here_does(tmp_path: Path) -> None:
    here, expected = fit(tmp_path / "here", "cpu", 1, 4)
    there, module = fit(tmp_path / "there", "ddp_fork", 2, 2)
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-7)
    assert there.state.status == "finished"
    assert (there.current_epoch, there.global_step) == (here.current_epoch, here.global_step) == (3, 18)
    assert there.callback_metrics["val_loss"] == pytest.approx(here.callback_metrics["val_loss"].item(), rel=1e-5)
    best = there.checkpoint_callback.best_model_path
    assert Path(best).name == Path(here.checkpoint_callback.best_model_path).name
    assert Path(best).exists()
    assert there.early_stopping_callback.best_score == pytest.approx(
        here.early_stopping_callback.best_score.item(), rel=1e-5
    )
    found = there.predict(module, tiny_loader(batches=3), gather=True)
    torch.testing.assert_close(torch.cat(found), module.eval()(tiny_loader(batches=3).dataset.tensors[0]))


def test_an_error_in_a_forked_process_comes_back(tmp_path: Path) -> None:
    class Fails(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError(f"wrong on rank {self.global_rank}")

    with pytest.raises(RuntimeError, match=r"(?s)of 2 failed.*ValueError: wrong on rank \d"):
        Trainer(**QUIET, strategy="ddp_fork", devices=2, max_epochs=1).fit(Fails(), tiny_loader())


SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
import torch
from tiny import TinyModule, tiny_loader
from paceline import Trainer

if __name__ == "__main__":
    torch.manual_seed(7)
    module = TinyModule()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(**quiet, accelerator="cpu", strategy=sys.argv[1], devices=int(sys.argv[2]), max_epochs=3)
    trainer.fit(module, tiny_loader(batches=24 // int(sys.argv[3]), batch_size=int(sys.argv[3]), shuffle=True))
    if trainer.is_global_zero:
        print(json.dumps([trainer.global_step, module.layer.weight.flatten().tolist()]))
"""


def test_fresh_processes_shuffle_as_the_one_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).resolve().parent.parent)))

    def run(*options: str) -> Any:
        done = subprocess.run(
            [sys.executable, script, *options], capture_output=True, text=True, check=True, timeout=300
        )
        return json.loads(done.stdout.splitlines()[-1])

    steps, weights = run("cpu", "1", "4")
    for strategy in ("ddp_spawn", "ddp"):
        found = run(strategy, "2", "2")
        assert found[0] == steps
        assert found[1] == pytest.approx(weights, rel=1e-5)

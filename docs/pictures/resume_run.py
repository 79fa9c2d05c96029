"""Train on the handwritten digits: once without an interruption, and once killed twice and resumed. Keep every loss.

Usage: python docs/pictures/resume_run.py    # trains four times in new processes and writes resume.json
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Callback, Trainer, TrainingModule, seed_everything
from paceline.callbacks import ModelCheckpoint

RESULT = Path(__file__).resolve().with_name("resume.json")
SAVED_EVERY = 20
#: The run that is killed: after these steps, and the last process runs to the end.
KILLED_AFTER = (52, 91)


class Digits(TrainingModule):
    """A network with dropout, so that a resume must restore the random numbers too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


class Losses(Callback):
    """Writes each loss to a file at once, and ends the process without warning after a step."""

    def __init__(self, file: Path, killed_after: int) -> None:
        self.file, self.killed_after = file, killed_after

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.file.open("a") as file:
            file.write(f"{trainer.global_step} {outputs['loss'].item()!r}\n")
        if trainer.global_step == self.killed_after:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, name: str, killed_after: int) -> None:
    """Train in this process, from the last checkpoint in the folder if there is one."""
    seed_everything(len(name))  # resuming must not depend on the seed of the new process
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
    checkpoint = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=SAVED_EVERY)
    if not (folder / "checkpoints").exists():
        seed_everything(1)
    model = Digits()
    trainer = Trainer(
        max_steps=140,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Losses(folder / name, killed_after), checkpoint],
    )
    trainer.fit(model, DataLoader(data, batch_size=128, shuffle=True), ckpt_path="auto")
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in model.state_dict().values()))
    (folder / f"{name}.weights").write_text(digest.hexdigest())


def main() -> None:
    """Start the processes one after the other and gather what they wrote."""
    with tempfile.TemporaryDirectory() as root:
        whole, killed = Path(root, "whole"), Path(root, "killed")
        for folder, steps in ((whole, (0,)), (killed, (*KILLED_AFTER, 0))):
            folder.mkdir()
            for number, step in enumerate(steps):
                ended = subprocess.run([sys.executable, __file__, str(folder), f"part{number}", str(step)])
                if ended.returncode != (-signal.SIGKILL if step else 0):
                    raise RuntimeError(f"The process {number} of {folder.name} ended with {ended.returncode}.")
        found = {
            "saved_every": SAVED_EVERY,
            "weights_are_equal": (whole / "part0.weights").read_text() == (killed / "part2.weights").read_text(),
            "whole": losses(whole / "part0"),
            "parts": [losses(killed / f"part{number}") for number in range(3)],
        }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


def losses(file: Path) -> dict[str, Any]:
    """The first step of a process, and its losses from there."""
    lines = [line.split() for line in file.read_text().splitlines()]
    return {"first_step": int(lines[0][0]), "losses": [float(loss) for _, loss in lines]}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    else:
        main()

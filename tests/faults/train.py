"""A training that may be struck dead at any moment and started again with the same command, until it is done.

    python train.py FOLDER [--strategy ddp --devices 2] [--workers 2] [--async-save] [--accumulate 3]

What it leaves in FOLDER: ``logs`` (CSV rows, checkpoints), ``seen-<rank>.txt`` (a line a batch: its number in the run
and a digest of what was in it), and, when it came to its end, ``final.ckpt``. PACELINE_STRIKE=POINT:N kills a
process at the N-th time it comes to POINT.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline import Trainer, TrainingModule, seed_everything
from paceline.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from paceline.loggers import CSVLogger

EPOCHS, SAMPLES, BATCH = 3, 96, 4
MAX_STEPS = 31  # inside the last epoch


class Noisy(Dataset[Any]):
    """Samples that random numbers of all three libraries change each time they are loaded."""

    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        noise = torch.rand(8) + random.random() + float(numpy.random.rand())
        x = self.x[index] + 0.1 * noise
        return x, self.x[index].sum().reshape(1), index


class Net(TrainingModule):
    def __init__(self, seen: Path) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.seen = seen

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.004)  # a step worth striking in
        x, y, index = batch
        digest = hashlib.blake2b(x.numpy().tobytes() + index.numpy().tobytes(), digest_size=8).hexdigest()
        number = self.current_epoch * self.trainer.num_training_batches + batch_idx
        with open(f"{self.seen}-{self.global_rank}.txt", "a") as file:
            file.write(f"{number} {digest}\n")
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        strike("validation")
        x, y, _ = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9), "interval": "step"},
        }


# ---- strikes ---------------------------------------------------------------------------------------------------------

_point, _, _count = os.environ.get("PACELINE_STRIKE", "").partition(":")
_left = int(_count or 1)


def strike(point: str) -> None:
    """End this process by SIGKILL if this is the point, and the time, that it was told."""
    global _left
    if point != _point:
        return
    _left -= 1
    if not _left:
        Path(os.environ["PACELINE_STRIKE_NOTE"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def struck_before(owner: Any, name: str, point: str) -> None:
    """Make ``owner.name`` come by a point each time it is called."""
    original = getattr(owner, name)

    def come_by(*args: Any, **kwargs: Any) -> Any:
        strike(point)
        return original(*args, **kwargs)

    setattr(owner, name, come_by)


class Half:
    """A stream whose fourth write comes by a point, so that a part of the file is there."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.writes = 0

    def write(self, data: Any) -> int:
        self.writes += 1
        if self.writes == 4:
            strike("written")
        return self.stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def set_traps() -> None:
    from paceline.checkpoint import atomic_write

    save = torch.save
    torch.save = lambda value, stream, *args, **kwargs: save(value, Half(stream), *args, **kwargs)  # type: ignore
    struck_before(torch, "save", "save")
    struck_before(os, "fsync", "synced")
    struck_before(atomic_write, "take_place", "renamed")
    struck_before(os, "remove", "deleted")  # a file
    struck_before(shutil, "rmtree", "deleted")  # a folder, which is hidden by now
    struck_before(CSVLogger, "save", "logger")


class Struck(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        strike("start")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        strike("epoch")


# ---- the run ---------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--strategy", default="cpu")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    args = parser.parse_args()
    faulthandler.register(signal.SIGQUIT, chain=True)  # where it hangs, on standard error
    torch.set_num_threads(1)
    seed_everything(7, verbose=False)
    struck_rank = os.environ.get("PACELINE_STRIKE_RANK", "0")
    first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if struck_rank == os.environ.get("RANK", "0") and first_start:
        set_traps()
    else:
        globals().update(_point="")
    batch = BATCH * 2 // args.devices
    loader = DataLoader(Noisy(SAMPLES), batch, shuffle=True, num_workers=args.workers)
    keep = ModelCheckpoint(
        save_top_k=3, monitor="loss_step", save_last=True, every_n_train_steps=2, async_save=args.async_save
    )
    trainer = Trainer(
        accelerator="cpu",
        strategy=args.strategy,
        devices=args.devices,
        max_epochs=EPOCHS,
        max_steps=-1 if args.accumulate > 1 else MAX_STEPS,
        val_check_interval=0.5,
        accumulate_grad_batches=args.accumulate,
        log_every_n_steps=1,
        default_root_dir=args.folder,
        logger=CSVLogger(args.folder, name="logs"),
        callbacks=[keep, EMAWeightAveraging(decay=0.9), Struck()],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(args.folder / "seen"), loader, DataLoader(Noisy(12), 4), ckpt_path="auto")
    strike("end")
    trainer.save_checkpoint(args.folder / "final.ckpt")


if __name__ == "__main__":
    main()

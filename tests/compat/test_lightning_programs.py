"""Details of programs written for Lightning that run on Paceline: each program prints what it prints there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import paceline

ROOT = str(Path(paceline.__file__).absolute().parent.parent)

START = """
import os
import lightning.pytorch as pl
import torch
from torch.optim import SGD
from torch.utils.data import DataLoader

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()
    def validation_step(self, batch, batch_idx):
        self.log("val", 1.0)
    def predict_step(self, batch, batch_idx):
        return batch.sum()
    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1)

def trainer(**arguments):
    off = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    return pl.Trainer(**{"accelerator": "cpu", "max_epochs": 1, **off, **arguments})

def loader(batches):
    return DataLoader(torch.ones(batches, 4))
"""


CONTRADICTIONS = """
for arguments in (
    {"max_epochs": 2, "min_epochs": 5},
    {"max_steps": 3, "min_epochs": 2},
    {"max_steps": 3, "min_steps": 4},
    {"gradient_clip_algorithm": "value"},
):
    one = trainer(**arguments)
    one.fit(Net(), loader(4))
    print(one.global_step)
"""

VALIDATIONS = """
class Validates(Net):
    def on_validation_start(self):
        print(self.global_step)

trainer(check_val_every_n_epoch=None, max_epochs=2, num_sanity_val_steps=0).fit(Validates(), loader(4), loader(1))
"""

WITHOUT_A_STEP = """
class Skips(Net):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()
    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=1.0)
        return [optimizer], {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}

for arguments in ({}, {"accumulate_grad_batches": 2}, {"max_steps": 2}):
    one = trainer(**arguments)
    one.fit(Skips(), loader(5))
    print(one.global_step, one.optimizers[0].param_groups[0]["lr"])
"""
FOLDERS = """
class Own(pl.loggers.logger.Logger):
    def __init__(self, save_dir, name, version):
        super().__init__()
        self.given = save_dir, name, version
    save_dir = property(lambda self: self.given[0])
    name = property(lambda self: self.given[1])
    version = property(lambda self: self.given[2])
    def log_metrics(self, metrics, step):
        pass
    def log_hyperparams(self, params):
        pass

for given in (("out", "n", "v"), ("out", "n", 3), (None, "m", 1)):
    one = trainer(logger=Own(*given), enable_checkpointing=True)
    one.fit(Net(), loader(1))
    print(os.path.relpath(one.checkpoint_callback.dirpath), one.log_dir)

class Lazy(Own):
    made = None
    version = property(lambda self: self.made)
    @property
    def experiment(self):
        self.made = "run7"

one = trainer(logger=Lazy("out", "n", None), enable_checkpointing=True)
one.fit(Net(), loader(1))
print(os.path.relpath(one.checkpoint_callback.dirpath))
"""

NAMES = """
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException

pl.seed_everything(5, workers=True, verbose=False)
print(os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"])
stopping = pl.callbacks.EarlyStopping
print(stopping.mode_dict["max"] is torch.gt, stopping.order_dict["min"], PassThroughProfiler().local_rank)
print(pl.LightningDataModule().name)
one = trainer()
print(one.predict(Net(), loader(1), return_predictions=False), one.predict_loop.return_predictions)
for wrong in (
    lambda: pl.callbacks.BasePredictionWriter("never"),
    lambda: extract_batch_size(["a"]),
    lambda: pl.tuner.Tuner(trainer()).lr_find(Net(), loader(1), mode="x", update_attr=False),
    lambda: Net().clip_gradients(SGD([torch.ones(1)], lr=1.0), 1.0, "angle"),
):
    try:
        wrong()
    except MisconfigurationException as error:
        print("refused")
for convert in (Net().to_torchscript, Net().to_tensorrt):
    try:
        convert()
    except NotImplementedError as error:
        print("to_onnx" in str(error))
"""

PROGRESS = """
class Shows(Net):
    def show(self):
        loop = self.trainer.fit_loop.epoch_loop
        batches = loop.batch_progress
        print(batches.current.ready, batches.total.ready, batches.is_last_batch, loop.batch_idx, loop.total_batch_idx)
    def on_train_epoch_start(self):
        self.show()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.show()

one = trainer(max_epochs=2)
one.fit(Shows(), loader(2))
progress = one.fit_loop.epoch_loop.batch_progress
print(progress.current.completed, progress.total.completed, one.fit_loop.batch_idx)
steps = one.fit_loop.epoch_loop.automatic_optimization.optim_progress
print(steps.optimizer_steps, steps.optimizer.step.total.completed)
"""

#: Programs, and the lines that each prints under Lightning.
PROGRAMS = {
    "a minimum above the maximum, clipping without a value": (CONTRADICTIONS, ["8", "3", "3", "4"]),
    "validation by batches without an interval": (VALIDATIONS, ["4", "8"]),
    "a logger of the program": (
        FOLDERS,
        [
            *("out/n/v/checkpoints out", "out/n/version_3/checkpoints out", "m/version_1/checkpoints None"),
            "out/n/run7/checkpoints",
        ],
    ),
    "names": (NAMES, ["5 1", "True < 0", "None", "None False", *["refused"] * 4, "True", "True"]),
    "progress": (
        PROGRESS,
        [
            *("0 0 False -1 -1", "1 1 False 0 0", "2 2 True 1 1"),
            *("2 2 True 1 1", "1 3 False 0 2", "2 4 True 1 3"),
            *("2 4 1", "4 4"),
        ],
    ),
    "an optimizer_step that does not step": (WITHOUT_A_STEP, ["5 0.03125", "3 0.125", "2 0.25"]),
}


def test_programs_print_what_they_print_there(tmp_path: Path) -> None:
    text = START + "".join(f"\nprint('== {name}')\n{program}" for name, (program, _) in PROGRAMS.items())
    done = subprocess.run(
        [sys.executable, "-m", "paceline.compat", "lightning", "-c", text],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    printed: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("== "):
            lines = printed[line[3:]] = []
        else:
            lines.append(line)
    assert printed == {name: lines for name, (_, lines) in PROGRAMS.items()}

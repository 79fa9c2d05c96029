"""The stand-in for ``lightning``: programs written for it run on Paceline, in this process and in those it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.compat.lightning import names

ROOT = str(Path(paceline.__file__).absolute().parent.parent)


def run(*words: str, folder: Path, **variables: str) -> str:
    """What a program prints; the stand-in is installed by ``words`` or ``variables``."""
    environment = {name: value for name, value in os.environ.items() if name != "PACELINE_STANDS_IN"}
    environment |= {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


NAMES = """
import importlib, importlib.metadata
from paceline import compat
compat.install("lightning")
compat.install("lightning")  # does nothing
from paceline.compat.lightning import names
import lightning as L, lightning.pytorch as pl, pytorch_lightning, lightning_fabric, lightning.fabric
import paceline
assert pl is pytorch_lightning and lightning_fabric is lightning.fabric
assert L.Trainer is pl.Trainer is paceline.Trainer and pl.LightningModule is paceline.TrainingModule
for module, targets in names.PACKAGE.modules.items():
    for name in targets:
        getattr(importlib.import_module(module), name)
for package in ("lightning", "pytorch-lightning", "pytorch_lightning", "lightning_fabric"):
    assert importlib.metadata.version(package) == names.VERSION == pl.__version__
from lightning.pytorch.utilities.imports import _TORCH_GREATER_EQUAL_2_1, _RICH_AVAILABLE, _SOMETHING_AVAILABLE
assert _TORCH_GREATER_EQUAL_2_1 is True and _RICH_AVAILABLE is True and _SOMETHING_AVAILABLE is False
from lightning.pytorch.strategies import XLAStrategy
for call, text in ((lambda: XLAStrategy(), "does not support TPUs"), (lambda: pl.Trianer, "Did you mean 'Trainer'")):
    try:
        call()
    except (NotImplementedError, AttributeError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
"""

BEHAVIOUR = """
import os, sys
from unittest import mock
import torch
from paceline import compat
compat.install("lightning")
import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).sum()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

for wrong in (lambda: pl.Trainer(max_epochs="x"), lambda: pl.callbacks.ModelCheckpoint(mode="up")):
    try:
        wrong()
    except MisconfigurationException as error:
        assert isinstance(error, (TypeError, ValueError))
    else:
        raise AssertionError("no error")
trainer = pl.Trainer(max_epochs=1, log_every_n_steps=1, accelerator="cpu", enable_progress_bar=False)
trainer.fit(Net(), DataLoader(torch.ones(4, 4)))
assert set(trainer.logged_metrics) == {"loss"}, trainer.logged_metrics
assert isinstance(trainer.logged_metrics["loss"], torch.Tensor)
assert os.listdir() == ["lightning_logs"], os.listdir()
assert (trainer.state.fn, trainer.state.status) == (None, "finished"), trainer.state
with mock.patch("lightning.pytorch.accelerators.cuda.num_cuda_devices", return_value=3):
    assert pl.accelerators.CUDAAccelerator.auto_device_count() == 3, "patched"
assert pl.accelerators.CUDAAccelerator.auto_device_count() == torch.cuda.device_count()
"""


def test_every_name_is_there_under_every_name_of_its_module(tmp_path: Path) -> None:
    run("-c", NAMES, folder=tmp_path)


def test_errors_folders_and_values_are_those_that_programs_expect(tmp_path: Path) -> None:
    run("-c", BEHAVIOUR, folder=tmp_path)


CHILDREN = """
import multiprocessing, subprocess, sys
import lightning

def tell():
    import lightning
    print("spawned", lightning.Trainer.__module__, flush=True)

if __name__ == "__main__":
    print(sys.argv[1:], lightning.Trainer.__module__, flush=True)
    subprocess.run([sys.executable, "-c", "import pytorch_lightning as pl; print('child', pl.Trainer.__module__)"])
    one = multiprocessing.get_context("spawn").Process(target=tell)
    one.start()
    one.join()
"""
TOLD = ["['--lr', '1'] paceline.trainer.trainer", "child paceline.trainer.trainer", "spawned paceline.trainer.trainer"]


@pytest.mark.cold
@pytest.mark.parametrize("start", [["train.py"], ["-m", "train"]])
def test_a_program_and_the_processes_that_it_starts_find_it(start: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CHILDREN)
    told = run("-m", "paceline.compat", "lightning", *start, "--lr", "1", folder=tmp_path)
    assert told.splitlines() == TOLD


def test_code_can_be_run_too(tmp_path: Path) -> None:
    code = "import sys, lightning; print(sys.argv, lightning.__version__)"
    told = run("-m", "paceline.compat", "lightning", "-c", code, "x", folder=tmp_path)
    assert told == f"['-c', 'x'] {names.VERSION}\n"


@pytest.mark.cold
def test_the_variable_installs_it_where_paceline_is_imported_and_in_pytest(tmp_path: Path) -> None:
    code = "import paceline, lightning; print(lightning.Trainer is paceline.Trainer)"
    assert run("-c", code, folder=tmp_path, PACELINE_STANDS_IN="lightning") == "True\n"
    (tmp_path / "test_it.py").write_text(
        "def test_it():\n    import lightning\n    assert lightning.__version__ == '2.6.1'\n"
    )
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider")  # the plugin is an entry point of the package
    assert "1 passed" in run(*words, folder=tmp_path, PACELINE_STANDS_IN="lightning")


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    for words, text in (
        (["-m", "paceline.compat"], "usage: python -m paceline.compat"),
        (["-m", "paceline.compat", "lightnin", "x.py"], "Did you mean 'lightning'"),
        (["-m", "paceline.compat", "lightning", "-m"], "-m needs a module"),
        (
            ["-c", "import sys; sys.modules['lightning'] = sys; import paceline.compat as c; c.install('lightning')"],
            "Call it first",
        ),
    ):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": ROOT},
            capture_output=True,
            text=True,
        )
        assert done.returncode != 0
        assert text in done.stderr

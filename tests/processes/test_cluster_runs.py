"""Whole runs as srun, mpirun and a plain ``python train.py`` start them: the same weights, and each word once."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rank_processes import ranks, reserved

from paceline.processes.cluster_environment import find_cluster

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 180

SCRIPT = """
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Trainer, TrainingModule, seed_everything
from paceline.callbacks import EarlyStopping, ModelCheckpoint
from paceline.loggers import CSVLogger


class Net(TrainingModule):
    def __init__(self, odd):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(4, 1)
        self.asleep = nn.Dropout().eval()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.asleep(self.layer(x)), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


seed_everything(1)
x = torch.randn(16, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 2, shuffle=True)
saving = ModelCheckpoint("saved", filename="{epoch}-{nothing}", verbose=True, save_last=True)
stopping = EarlyStopping("loss", verbose=True)
given = {name: int(os.environ[name]) for name in ("devices", "num_nodes") if name in os.environ}
given |= {"accelerator": "cpu", "enable_progress_bar": False, "logger": CSVLogger(".")}
trainer = Trainer(max_epochs=1, callbacks=[saving, stopping], **given)
trainer.fit(Net(odd=lambda: 0), loader, ckpt_path="last")
trainer.print(f"{trainer.world_size} processes on {trainer.num_nodes} nodes made {trainer.global_step} steps")
"""

#: What the script has Paceline say.
SAID = (
    "Seed set to 1",
    "no valid checkpoint",
    "Trainable params",
    "no val_dataloader",
    "in eval mode, and the fit does not change that",
    "no step metrics reach the loggers",
    "improved from",
    "not been logged yet",
    "cannot be stored or pickled",
    "Step 4: saved",
)


@contextmanager
def free_job(address: Callable[[str], int]) -> Iterator[str]:
    """The name of a job whose port nobody has taken, nor another test that runs now."""
    for number in range(os.getpid(), os.getpid() + 1000):
        if token := reserved(address(str(number))):
            with token:
                yield str(number)
            return
    raise AssertionError("no port is free")


def srun(rank: int, job: str) -> dict[str, str]:
    """A task on each of two machines, which are this one twice."""
    return {
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost,other[1-3]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
        "WORLD_SIZE": "2",
        "num_nodes": "2",
    }


def mpirun(rank: int, job: str) -> dict[str, str]:
    return {
        "PMIX_NAMESPACE": job,
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
    }


def port_of(make: Callable[[int, str], dict[str, str]], job: str) -> int:
    cluster = find_cluster(make(0, job))
    assert cluster is not None
    return cluster.port


def run(folder: Path, environments: list[dict[str, str]]) -> str:
    """What processes with these variables print, all together."""
    (folder / "train.py").write_text(SCRIPT)
    mine = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    mine |= {"PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"}
    path = folder / "out"
    with path.open("w") as file:
        processes = [
            subprocess.Popen(
                [sys.executable, "train.py"], cwd=folder, env=mine | environment, stdout=file, stderr=subprocess.STDOUT
            )
            for environment in environments
        ]
        try:
            statuses = [process.wait(LIMIT_SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert statuses == [0] * len(processes), path.read_text()
    return path.read_text()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "saved" / "last.ckpt", weights_only=True)["state_dict"]


def assert_each_word_once(printed: str) -> None:
    for text in SAID:
        assert printed.count(text) == 1, f"{text!r}:\n{printed}"
    # The line of code that Python shows below a warning comes again; so do rules. What begins with [ is torch's.
    lines = [line for line in printed.splitlines() if not re.match(r"\s*$|  trainer\.fit|-+$|\[", line)]
    assert {line: times for line, times in Counter(lines).items() if times > 1} == {}


def test_a_script_that_starts_its_processes_says_everything_once(tmp_path: Path) -> None:
    printed = run(tmp_path, [{"devices": "2"}])
    assert "2 processes on 1 nodes made 4 steps" in printed
    assert_each_word_once(printed)


@pytest.mark.parametrize(("make", "nodes"), [(srun, 2), (mpirun, 1)])
def test_processes_of_a_cluster_train_together_and_say_everything_once(
    make: Callable[[int, str], dict[str, str]], nodes: int, tmp_path: Path
) -> None:
    with free_job(lambda job: port_of(make, job)) as job:
        printed = run(tmp_path, [make(rank, job) for rank in range(2)])
    assert f"2 processes on {nodes} nodes made 4 steps" in printed
    assert_each_word_once(printed)

    def train() -> None:
        (tmp_path / "torchrun").mkdir(exist_ok=True)
        os.chdir(tmp_path / "torchrun")
        runpy.run_path(str(tmp_path / "train.py"))

    ranks(2, train)
    found, expected = weights(tmp_path), weights(tmp_path / "torchrun")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

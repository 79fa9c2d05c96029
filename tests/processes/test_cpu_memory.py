"""What a step on the CPU frees is there for the next one, unless the user has said how memory is to be kept."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from paceline.processes.cpu_memory import SETTINGS, glibc

MODEL = """
import resource
import torch
from torch import nn
from paceline import Accelerator, Trainer, TrainingModule

class Wide(TrainingModule):
    faults = []

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(128, 128) for _ in range(40)])

    def training_step(self, batch, batch_idx):
        self.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

torch.manual_seed(0)
model, batches = Wide(), [torch.randn(1024, 128) for _ in range(16)]
"""
BY_TRAINER = """
Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False).fit(model, batches)
"""
BY_ACCELERATOR = """
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, model.configure_optimizers())
for batch in batches:
    accelerator.backward(model.training_step(batch, 0))
    optimizer.step()
    optimizer.zero_grad()
"""
#: Of most steps: a system short of memory takes pages away now and then, which come back as faults.
COUNT = """
from statistics import median
late = model.faults[6:]
print(median(after - before for before, after in zip(late, late[1:])))
"""
SIZE = """
def megabytes():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024
"""
#: Blocks of 28 MB in the heap, all of them freed.
GARBAGE = """
begun = megabytes()
blocks = [b"x" * (28 * 2**20) for _ in range(7)]
del blocks
left = megabytes() - begun
"""
#: Pages of one output of a layer.
PAGES = 1024 * 128 * 4 // resource.getpagesize()

pytestmark = [pytest.mark.cold, pytest.mark.skipif(glibc() is None, reason="another C library")]


def last_number(script: str, **environment: str) -> float:
    """What a script prints last, in a process of its own whose memory nobody has set."""
    foreign = (*SETTINGS, "GLIBC_TUNABLES", "LD_PRELOAD", "THP_MEM_ALLOC_ENABLE")
    own = {name: value for name, value in os.environ.items() if name not in foreign} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MODEL + script], env=own | environment, capture_output=True, text=True, check=True
    )
    return float(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("script", [BY_TRAINER, BY_ACCELERATOR], ids=["trainer", "accelerator"])
def test_a_step_uses_the_pages_that_the_one_before_has_freed(script: str) -> None:
    assert last_number(script + COUNT) < 4 * PAGES


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072")]
)
def test_thresholds_that_the_user_has_set_stay(name: str, value: str) -> None:
    """With them each of the 40 outputs of a forward takes new pages."""
    assert last_number(BY_TRAINER + COUNT, **{name: value}) > 20 * PAGES


def test_other_settings_of_the_library_are_no_thresholds() -> None:
    assert last_number(BY_TRAINER + COUNT, MALLOC_ARENA_MAX="2", GLIBC_TUNABLES="glibc.malloc.arena_max=2") < 4 * PAGES


def test_after_a_fit_the_process_keeps_no_more_than_by_itself() -> None:
    assert last_number(BY_TRAINER + SIZE + GARBAGE + "print(left)") < 100


def test_within_a_fit_in_a_fit_the_outer_one_goes_on_keeping() -> None:
    outer = "from paceline.processes.cpu_memory import keep_freed_memory\nkeep_freed_memory(torch.device('cpu'))\n"
    held = SIZE + outer + BY_TRAINER + GARBAGE
    assert last_number(held + "print(left)") > 150


def test_a_freed_accelerator_gives_back_what_its_process_kept() -> None:
    freed = SIZE + BY_ACCELERATOR + GARBAGE + "accelerator.free_memory()\nprint(left - (megabytes() - begun))"
    assert last_number(freed) > 150

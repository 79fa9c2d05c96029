"""Workers of loaders that die: which, of what, and what to change."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
import torch
from tiny import TinyModule
from torch.utils.data import DataLoader

from paceline import Accelerator, Trainer
from paceline.data.worker_failure import explain_lost_worker
from paceline.data.worker_processes import STARTED


class Deadly:
    """Ends the process that reads its sixth sample."""

    def __init__(self, end: Any) -> None:
        self.end = end

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            os.kill(os.getpid(), self.end) if isinstance(self.end, signal.Signals) else os._exit(self.end)
        return torch.ones(4), torch.ones(1)


CASES = [
    (
        signal.SIGKILL,
        r"killed by signal 9 \(SIGKILL\){}, .*ran out.*machine has .*B left now\. Lower num_workers \(now 2\)",
    ),
    (
        signal.SIGBUS,
        r"killed by signal 7 \(SIGBUS\){}, .*/dev/shm has .*B left of .*shm-size.*prefetch_factor \(now 2\)",
    ),
    (signal.SIGSEGV, r"killed by signal 11 \(SIGSEGV\){}, a crash in compiled code.*PYTHONFAULTHANDLER=1"),
    (signal.SIGALRM, r"killed by signal 14 \(SIGALRM\){}\. Another program or a person"),
    (3, r"ended with exit status 3{}, without an exception.*os\._exit.*num_workers=0"),
]


def loader(end: Any) -> Any:
    return DataLoader(Deadly(end), 2, num_workers=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(("end", "told"), CASES)
def test_the_trainer_says_which_loaders_worker_died_of_what(quiet: dict[str, Any], end: Any, told: str) -> None:
    trainer = Trainer(**quiet, max_epochs=1)
    at = r" while the run was at \w+(, epoch 0, batch -?\d)?(, step \d)?"
    with pytest.raises(
        RuntimeError, match=r"(Worker 0 of the 2|A worker) of train_dataloader \(process \d+\) .*" + told.format(at)
    ) as raised:
        trainer.fit(TinyModule(), loader(end))
    assert "DataLoader worker (pid" in str(raised.value.__cause__)


def test_one_of_several_validation_loaders_is_named(quiet: dict[str, Any]) -> None:
    class Several(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.loss(batch)

    fine = DataLoader(Deadly(0), 1, sampler=range(3))  # type: ignore[arg-type]
    with pytest.raises(
        RuntimeError, match=r"(Worker 0 of the 2|A worker) of val_dataloader 1 .* while the run was at validate, "
    ):
        Trainer(**quiet, max_epochs=1).validate(Several(), [fine, loader(signal.SIGKILL)])


@pytest.mark.parametrize(("end", "told"), CASES[::4])
def test_a_loop_of_ones_own_says_it_too(end: Any, told: str) -> None:
    batches = Accelerator(cpu=True).prepare(loader(end))
    with pytest.raises(RuntimeError, match=r"a Deadly \(process \d+\) " + f".*{told.format(' while .*')}") as raised:
        list(batches)
    assert "DataLoader worker (pid" in str(raised.value.__cause__)


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (
            "(pid 1) is killed by signal: Killed. ",
            r"A worker of a DataLoader of a Deadly \(process 1\) was killed by signal 9",
        ),
        ("(pid 1) exited unexpectedly with exit code 3. Details", "ended with exit status 3, without"),
        ("(pid(s) 1, 2) exited unexpectedly", "ended unexpectedly, without an exception"),
    ],
)
def test_a_worker_that_dies_while_the_others_start_is_that_of_the_loader_that_starts(raised: str, told: str) -> None:
    starts = loader(3)
    STARTED[starts] = []
    found = explain_lost_worker(RuntimeError(f"DataLoader worker {raised}"), "")
    assert re.search(told, str(found))
    assert explain_lost_worker(RuntimeError("Caught RuntimeError in DataLoader worker process 0."), "") is None

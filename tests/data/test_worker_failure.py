"""Workers of loaders that die: which, of what, and what to change."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_processes import until
from tiny import TinyModule
from torch.utils.data import DataLoader

from paceline import Accelerator, Trainer
from paceline.data.worker_processes import STARTED, explain_lost_worker


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
        r"killed by signal 9 \(SIGKILL\){}, .*ran out.*machine has .*B of memory left\. Lower num_workers \(now 2\)",
    ),
    (
        signal.SIGBUS,
        r"killed by signal 7 \(SIGBUS\){}, .*/dev/shm now has .*B of .*B left.*shm-size.*prefetch_factor \(now 2\)",
    ),
    (signal.SIGSEGV, r"killed by signal 11 \(SIGSEGV\){}, which means that compiled code.*PYTHONFAULTHANDLER=1"),
    (signal.SIGALRM, r"killed by signal 14 \(SIGALRM\){}\. Another program or a user sent"),
    (3, r"exited with status 3{}, without an exception.*os\._exit.*num_workers=0"),
]


def loader(end: Any) -> Any:
    return DataLoader(Deadly(end), 2, num_workers=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(("end", "told"), CASES)
def test_the_trainer_says_which_loaders_worker_died_of_what(quiet: dict[str, Any], end: Any, told: str) -> None:
    trainer = Trainer(**quiet, max_epochs=1)
    at = r" while the run was at \w+(, epoch 0, batch -?\d)?(, step \d)?"
    with pytest.raises(
        RuntimeError, match=r"(Worker 0 \(of 2\)|A worker) of train_dataloader \(process \d+\) .*" + told.format(at)
    ) as raised:
        trainer.fit(TinyModule(), loader(end))
    assert is_torchs_own(raised.value.__cause__)


def is_torchs_own(error: BaseException | None) -> bool:
    """The notice that a child has ended, or the broken connection, whichever comes first."""
    return "DataLoader worker (pid" in str(error) or isinstance(error, (EOFError, OSError))


def test_one_of_several_validation_loaders_is_named(quiet: dict[str, Any]) -> None:
    class Several(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.loss(batch)

    fine = DataLoader(Deadly(0), 1, sampler=range(3))  # type: ignore[arg-type]
    with pytest.raises(
        RuntimeError, match=r"(Worker 0 \(of 2\)|A worker) of val_dataloader 1 .* while the run was at validate, "
    ):
        Trainer(**quiet, max_epochs=1).validate(Several(), [fine, loader(signal.SIGKILL)])


@pytest.mark.parametrize(("end", "told"), CASES[::4])
def test_a_loop_of_ones_own_says_it_too(end: Any, told: str) -> None:
    batches = Accelerator(cpu=True).prepare(loader(end))
    with pytest.raises(RuntimeError, match=r"a Deadly \(process \d+\) " + f".*{told.format('( while .*)?')}") as raised:
        list(batches)
    assert is_torchs_own(raised.value.__cause__)


class WhenTold(Deadly):
    """Ends its process only once it is told to; its connection closes before."""

    def __init__(self, end: Any) -> None:
        super().__init__(end)
        self.told, self.closed, self.never = (multiprocessing.Event() for _ in range(3))

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            self.told.wait()
            multiprocessing.resource_sharer.stop()  # type: ignore[attr-defined]
            self.closed.set()
            self.never.wait(0.3)
        return super().__getitem__(index)


@pytest.fixture
def _signals_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


def one_worker(data: WhenTold) -> Any:
    return DataLoader(data, 1, sampler=[0, 0, 5, 5], num_workers=1, persistent_workers=True)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_signals_as_before")
def test_a_batch_whose_worker_is_ending_when_it_is_taken_says_so(quiet: dict[str, Any]) -> None:
    class Waits(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            until("a batch waits", lambda: not loader._iterator._data_queue.empty())
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            data.told.set()
            data.closed.wait()
            return super().training_step(batch, batch_idx)

    data = WhenTold(signal.SIGKILL)
    loader = one_worker(data)
    told = r"Worker 0 \(of 1\) of train_dataloader \(process \d+\) was killed by signal 9"
    with pytest.raises(RuntimeError, match=told) as raised:
        Trainer(**quiet, max_epochs=1).fit(Waits(), loader)
    assert isinstance(raised.value.__cause__, (EOFError, OSError))


@pytest.mark.usefixtures("_signals_as_before")
def test_a_loop_of_ones_own_says_it_wherever_the_notice_comes() -> None:
    loader = DataLoader(Deadly(9), 1, sampler=[0, 0, 5, 5], num_workers=1, prefetch_factor=1)  # type: ignore[arg-type]
    batches = iter(Accelerator(cpu=True).prepare(loader))
    next(batches)
    notice: Any = signal.getsignal(signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    next(batches)
    os.waitid(os.P_PID, STARTED[loader][0].pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(RuntimeError, match=r"Worker 0 \(of 1\) of a DataLoader of a Deadly .* with status 9"):
        notice(signal.SIGCHLD, None)


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (
            "(pid 1) is killed by signal: Killed. ",
            r"A worker of a DataLoader of a Deadly \(process 1\) was killed by signal 9",
        ),
        ("(pid 1) exited unexpectedly with exit code 3. Details", "exited with status 3, without"),
        ("(pid(s) 1, 2) exited unexpectedly", "exited unexpectedly, without an exception"),
    ],
)
def test_a_worker_that_dies_while_the_others_start_is_that_of_the_loader_that_starts(raised: str, told: str) -> None:
    starts = loader(3)
    STARTED[starts] = []
    found = explain_lost_worker(RuntimeError(f"DataLoader worker {raised}"), "")
    assert re.search(told, str(found))
    assert explain_lost_worker(RuntimeError("Caught RuntimeError in DataLoader worker process 0."), "") is None

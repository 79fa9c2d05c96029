"""Run each scenario in its own processes and record its losses in the JUnit report, which clients/run.py reads."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

#: A scenario takes a folder for its files and returns its losses in the order in which they were computed.
Scenario = Callable[[Path], list[float]]


@pytest.fixture
def record_losses(record_property: Callable[[str, object], None], tmp_path: Path) -> Callable[..., None]:
    """Return a function that runs a scenario in one or more processes and records the losses of rank 0."""

    def run(scenario: Scenario, processes: int = 1) -> None:
        record_property("losses", json.dumps(_in_processes(scenario, processes, tmp_path)))

    return run


def _in_processes(scenario: Scenario, count: int, folder: Path) -> list[float]:
    """Fork the ranks, with the environment variables that ``torchrun`` sets; return the losses of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(count):
        if not (pid := os.fork()):
            os._exit(_rank(scenario, rank, count, port, folder))
        ranks.append(pid)
    statuses = []
    try:
        while len(statuses) < count:
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(ranks[len(statuses)], 0)[1]))
    finally:  # some ranks are still running if the test timed out
        for pid in ranks[len(statuses) :]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    errors = [error.read_text() for error in sorted(folder.glob("error.*"))]
    assert not any(statuses), errors[0].splitlines()[-1] + "\n\n" + "\n".join(errors) if errors else statuses
    return json.loads((folder / "losses.json").read_text())


def _rank(scenario: Scenario, rank: int, count: int, port: int, folder: Path) -> int:
    """Run the scenario in this process; return the process's exit status."""
    world: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    if count > 1:
        os.environ.update({name: str(value) for name, value in world.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.chdir(folder)
    try:
        losses = scenario(folder)
        if rank == 0:
            (folder / "losses.json").write_text(json.dumps(losses))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
    except BaseException:
        (folder / f"error.{rank}").write_text(traceback.format_exc())
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0

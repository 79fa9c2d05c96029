"""Run each scenario in its own processes and record its losses in the JUnit report, which clients/run.py reads."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

#: A scenario takes a folder for its files and returns its losses in the order in which they were computed.
Scenario = Callable[[Path], list[float]]


@pytest.fixture
def record_losses(
    record_property: Callable[[str, object], None], tmp_path: Path, request: pytest.FixtureRequest
) -> Callable[..., None]:
    """Return a function that runs a scenario in one or more processes and records the losses of rank 0."""
    limit = 0.9 * (request.config.getoption("timeout") or 180)

    def run(scenario: Scenario, processes: int = 1) -> None:
        record_property("losses", json.dumps(_in_processes(scenario, processes, tmp_path, limit)))

    return run


def _in_processes(scenario: Scenario, count: int, folder: Path, limit: float) -> list[float]:
    """Fork the ranks, with the environment variables that ``torchrun`` sets; return the losses of rank 0.

    As with ``torchrun``, this process serves the store through which the ranks meet, so that no other program can take
    its port, and the failure of one rank ends the others. A rank that runs for longer than ``limit`` seconds fails.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: set[int] = set()
    failed = False
    for rank in range(count):
        if not (pid := os.fork()):
            os._exit(_rank(scenario, rank, count, store.port, folder, limit))
        ranks.add(pid)
    try:
        while ranks and not failed:
            pid, status = os.wait()
            failed = pid in ranks and status != 0
            ranks.discard(pid)
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    errors = [text for error in sorted(folder.glob("error.*")) if (text := error.read_text())]
    assert not failed, "\n\n".join([errors[0].splitlines()[-1], *errors]) if errors else "A rank ended silently."
    return json.loads((folder / "losses.json").read_text())


def _rank(scenario: Scenario, rank: int, count: int, port: int, folder: Path, limit: float) -> int:
    """Run the scenario in this process; return the process's exit status."""
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    if count > 1:
        os.environ.update({name: str(value) for name, value in (world | store | agent).items()})
    os.chdir(folder)
    with (folder / f"error.{rank}").open("w") as error:
        faulthandler.dump_traceback_later(limit, exit=True, file=error)
        try:
            losses = scenario(folder)
            if rank == 0:
                (folder / "losses.json").write_text(json.dumps(losses))
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
        except BaseException:
            traceback.print_exc(file=error)
            traceback.print_exc()
            return 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
    return 0

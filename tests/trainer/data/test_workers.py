"""Real workers of real runs: what is left when the run is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[3]

RUN = """
import os, signal, sys, time
from pathlib import Path
from torch.utils.data import DataLoader
from paceline.trainer.data.workers import start_iterating


class Slow:
    def __call__(self, worker_id):
        Path("worker").write_text(str(os.getpid()))
        while sys.argv[2] == "early" and os.getppid() == run:
            time.sleep(0.01)


if __name__ == "__main__":
    run = os.getpid()
    loader = DataLoader(range(9), num_workers=1, worker_init_fn=Slow(), multiprocessing_context=sys.argv[1])
    batches = start_iterating(loader)
    if sys.argv[2] == "late":
        next(batches)
    while not Path("worker").exists() or not Path("worker").read_text():
        time.sleep(0.01)
    os.kill(run, signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="finds the worker in /proc")
@pytest.mark.parametrize(("method", "when"), [("fork", "early"), ("fork", "late"), ("forkserver", "late")])
def test_no_worker_outlives_a_run_that_is_killed(tmp_path: Path, method: str, when: str) -> None:
    """Early: while the worker starts, which is before torch's own watch has noted who its parent is."""
    (tmp_path / "run.py").write_text(RUN)
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "run.py", method, when], cwd=tmp_path, env=environment, timeout=120)
    worker = int((tmp_path / "worker").read_text())
    deadline = time.monotonic() + 60
    try:
        while _command(worker):
            assert time.monotonic() < deadline, f"worker {worker} is still there"
            time.sleep(0.05)
    finally:
        if _command(worker):
            os.kill(worker, signal.SIGKILL)


def _command(pid: int) -> str:
    """Empty for a process that has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""

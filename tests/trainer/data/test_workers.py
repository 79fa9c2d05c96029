"""Real workers of real runs: what is left when the run is killed, and that nothing happens to them before."""

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
from paceline.trainer.data import workers


class Slow:
    def __call__(self, worker_id):
        Path("worker").write_text(str(os.getpid()))
        while sys.argv[2] == "early" and os.getppid() == run:
            time.sleep(0.01)


class Data:
    def __getitem__(self, index):
        time.sleep(0.3)  # many looks long
        return index

    def __len__(self):
        return 4


if __name__ == "__main__":
    run = os.getpid()
    method, when = sys.argv[1:]
    loader = DataLoader(Data(), None, num_workers=1, worker_init_fn=Slow(), multiprocessing_context=method)
    workers._LOOK, workers._GRACE = 0.01, 0.0 if when == "never" else 0.2
    batches = workers.start_iterating(loader)
    if when == "never":
        print(list(batches))
        sys.exit()
    if when == "late":
        next(batches)
    while not Path("worker").exists() or not Path("worker").read_text():
        time.sleep(0.01)
    os.kill(run, signal.SIGKILL)
"""


def run(folder: Path, method: str, when: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.py").write_text(RUN)
    command = [sys.executable, "run.py", method, when]
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    return subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, timeout=120)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_worker_of_a_run_that_goes_on_stays(tmp_path: Path, method: str) -> None:
    done = run(tmp_path, method, "never")
    assert (done.returncode, done.stdout) == (0, "[0, 1, 2, 3]\n")


@pytest.mark.skipif(sys.platform != "linux", reason="finds the worker in /proc")
@pytest.mark.parametrize(
    ("method", "when"), [("fork", "early"), ("fork", "late"), ("spawn", "late"), ("forkserver", "late")]
)
def test_no_worker_outlives_a_run_that_is_killed(tmp_path: Path, method: str, when: str) -> None:
    """Early: while the worker starts, which is before torch's own watch has noted who its parent is."""
    assert run(tmp_path, method, when).returncode == -signal.SIGKILL
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

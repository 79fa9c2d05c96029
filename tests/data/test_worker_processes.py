"""Real workers of real runs: what is left when the run is killed, and that nothing happens to them before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from rank_processes import until

PACKAGE = Path(__file__).resolve().parents[2]

RUN = """
import os, signal, sys
from pathlib import Path
from rank_processes import until
from torch.utils.data import DataLoader
from paceline.data import worker_processes

LOOKS, has_ended = [], worker_processes._Start._run_has_ended
worker_processes._Start._run_has_ended = lambda self: LOOKS.append(1) or has_ended(self)


class Slow:
    def __call__(self, worker_id):
        Path("worker").write_text(str(os.getpid()))
        if sys.argv[2] == "early":
            until("the run has ended", lambda: os.getppid() != run)


class Data:
    def __getitem__(self, index):
        enough = len(LOOKS) + 5
        until("the watch has looked some times", lambda: len(LOOKS) > enough)
        return index

    def __len__(self):
        return 4


if __name__ == "__main__":
    run = os.getpid()
    method, when = sys.argv[1:]
    loader = DataLoader(Data(), None, num_workers=1, worker_init_fn=Slow(), multiprocessing_context=method)
    worker_processes._LOOK, worker_processes._GRACE = 0.01, 0.0 if when == "never" else 0.2
    batches = worker_processes.start_iterating(loader)
    if when == "never":
        print(list(batches))
        sys.exit()
    if when == "late":
        next(batches)
    until("the worker is there", lambda: Path("worker").exists() and Path("worker").read_text())
    os.kill(run, signal.SIGKILL)
"""


def run(folder: Path, method: str, when: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.py").write_text(RUN)
    command = [sys.executable, "run.py", method, when]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), str(PACKAGE / "tests")])}
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
    try:
        until("the worker has ended", lambda: not _command(worker))
    finally:
        if _command(worker):
            os.kill(worker, signal.SIGKILL)


def _command(pid: int) -> str:
    """Empty for a process that has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""

"""A process whose gloo threads are not done yet ends as any other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 180

#: Its last collective keeps gloo's thread busy without the interpreter; Python, once it ends, goes on until it is done.
SCRIPT = """
import hashlib
import os
import threading

import torch
import torch.distributed as dist

from paceline.strategies import DistributedStrategy

busy, done = threading.Event(), threading.Event()


class Ending:
    def __del__(self, done=done):
        done.wait(120)


def work_on(_):
    if threading.get_native_id() != os.getpid():  # else the collective was over before it could be told what follows
        busy.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)
        done.set()


{user}
ending, strategy = Ending(), DistributedStrategy()
strategy.place([torch.device("cpu")])
strategy.setup_environment()
while not busy.wait(0.01):
    dist.all_reduce(torch.ones(1), group=strategy.host_group, async_op=True).get_future().then(work_on)
"""
USERS = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'


@pytest.mark.cold
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a thread does")
@pytest.mark.parametrize("user", ["", USERS], ids=["own group", "the user's group"])
def test_python_ends_after_gloo_has_let_go_of_what_is_pythons(user: str) -> None:
    mine = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(user=user)],
        env=mine | {"PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert (ended.returncode, ended.stderr) == (0, "")

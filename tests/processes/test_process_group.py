"""A process whose gloo threads are not done yet ends as any other."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import ranks
from torch import nn

from paceline.processes import process_group

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


def leaves_while_a_worker_computes() -> str:
    busy = threading.Event()

    def work_on(done: Any) -> None:
        if threading.get_native_id() != os.getpid():  # else this is the main thread
            busy.set()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)  # without the GIL, which it needs after that

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    while not busy.wait(0.01):
        dist.all_reduce(torch.ones(1), async_op=True).get_future().then(work_on)
    process_group.leave()
    del model
    return "left"


def test_leaving_the_group_waits_for_a_worker_that_needs_the_gil() -> None:
    """The last user of the group, here torch's reducer, joins the workers while it holds the GIL."""
    assert ranks(1, leaves_while_a_worker_computes, limit=20) == ["left"]

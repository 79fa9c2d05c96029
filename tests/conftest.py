"""What holds for every test: one thread, one seed, a folder of its own, and nothing left behind."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm
from tiny import QUIET
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from paceline import messages
from paceline.processes import launch
from paceline.processes.process_group import leave_alone
from paceline.strategies.deepspeed.package import use_device

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["PACELINE_CONFIG_FILE"] = "none"
# Torch's store asks for the names of the addresses it meets; where an answer is lost, do not wait 5 s for the next.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
if sys.version_info < (3, 11):
    sys.modules["tomllib"] = importlib.import_module("tomli")  # pytest requires it there
if sys.version_info >= (3, 14) and sys.platform == "linux":  # its forkserver cannot import the files of tests by name
    multiprocessing.set_start_method("fork")
torch.set_num_threads(1)
if not torch.cuda.is_available():
    # The first backward starts a thread for each device, after which a fork cannot run backward. Here it finds none;
    # after a FakeTensorMode, it would find 8, which a CUDA build without a GPU then pretends to have.
    torch.ones((), requires_grad=True).backward()
for name in warm.PRELOADED:  # else every forked rank imports it
    importlib.import_module(name)
launch.leave_garbage_alone_in_forks()  # such as a store that a traceback holds
pytest_plugins = ["rotation", "slow"]
FROZEN_AT = pytest.StashKey[tuple[Path, int]]()


def pytest_configure(config: pytest.Config) -> None:
    """Let everything temporary, of libraries and child processes too, lie in one folder that goes at the end."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a suite in the background of a shell; its children are not
        signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = tempfile.mkdtemp(prefix="paceline-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.environ.pop("PYTEST_ADDOPTS", None)  # meant for this run, not for a pytest that a test starts
    if config.getoption("dist", "no") == "no":  # this process collects: nearly all that it creates until then stays
        gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Take what was imported and collected out of the garbage collector's way: it is walked at every collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Do the same before each file of tests and after large imports: what they leave stays to the end."""
    now = item.path, len(sys.modules) // 100
    if now != item.config.stash.get(FROZEN_AT, None) and not multiprocessing.active_children():
        item.config.stash[FROZEN_AT] = now
        gc.collect()
        gc.freeze()


def end_workers() -> None:
    """End the workers of loaders. Left to the collector, which takes their queues first, each is waited for for 5 s."""
    for found in gc.get_objects():
        if type(found) is _MultiProcessingDataLoaderIter:
            found._shutdown_workers()
    gc.collect()


@pytest.fixture
def only_torchs_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide bitsandbytes' optimizers, which other tests import: with them, jsonargparse knows two of the name Adam."""
    from jsonargparse import _typehints

    every = _typehints.get_all_subclass_paths

    def torchs(*args: Any, **kwargs: Any) -> list[str]:
        return [path for path in every(*args, **kwargs) if not path.startswith("bitsandbytes.")]

    monkeypatch.setattr(_typehints, "get_all_subclass_paths", torchs)


@pytest.fixture(autouse=True)
def fresh_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run each test seeded, in its own folder, with every message unsaid; put the process back as it was."""
    monkeypatch.chdir(tmp_path)
    random.seed(0)
    torch.manual_seed(0)
    messages.forget()
    if multiprocessing.active_children():  # workers of a loader that an earlier test's traceback still holds
        end_workers()
    environment = dict(os.environ)
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
    messages.set_rank(0)


@pytest.fixture(autouse=True)
def warm_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the Python programs that a test starts have torch imported, unless it is marked ``cold``."""
    with nullcontext() if request.node.get_closest_marker("cold") else warm.programs():
        yield


@pytest.fixture
def fresh_wandb() -> None:
    """Let wandb read the environment anew: a process keeps to what that was when wandb was first used."""
    import wandb

    wandb.teardown()


@pytest.fixture(autouse=True)
def no_leftovers(fresh_start: None) -> Iterator[None]:
    """Fail a test that leaves a thread running, a process group open or a mode of torch switched."""
    threads = set(threading.enumerate())
    yield
    leave_alone()  # a sharded run on one process, which is not left before a process ends or starts others
    started = [t for t in threading.enumerate() if t not in threads and not t.daemon]
    for thread in started:  # one that was told to end may still be at it
        thread.join(120)
    leftovers = [t.name for t in started if t.is_alive()]
    assert not leftovers, f"still running: {leftovers}"
    try:
        assert torch.get_default_dtype() is torch.float32, "the default dtype was left changed"
        assert torch.is_grad_enabled(), "gradients were left off"
        assert not torch.is_inference_mode_enabled(), "inference mode was left on"
        assert not torch.is_anomaly_enabled(), "anomaly detection was left on"
        assert not torch.is_autocast_enabled("cpu"), "autocast was left on"
        assert not dist.is_initialized(), "a process group was left open"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.autograd.set_detect_anomaly(False)


@pytest.fixture(scope="session")
def deepspeed_imported() -> None:
    """DeepSpeed, where it is installed, in this process: each rank that it forks would take 2 s to import it.

    It chooses its device once, so where there are GPUs it is left to the ranks.
    """
    if importlib.util.find_spec("deepspeed") is not None and not torch.cuda.is_available():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DS_ACCELERATOR", "cpu")  # is as it was again for the tests that follow
            use_device("cpu")
        for name in ("engine", "zero.stage3", "zero.stage_1_and_2", "zero.muon.muon_optimizer"):
            importlib.import_module(f"deepspeed.runtime.{name}")


@pytest.fixture
def quiet() -> dict[str, Any]:
    """Trainer arguments that switch off everything optional."""
    return dict(QUIET)

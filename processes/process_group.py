"""The process group. A process joins it in its first run and leaves it on exit, and all of its strategies share it."""

from __future__ import annotations

import atexit
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..devices.kinds import kind_of
from . import launch
from .cluster_environment import Cluster
from .hang_watch import Watch
from .rendezvous_store import shared_store

_THREADS = Path("/proc/self/task")
_alone: Any = None


def join(
    cluster: Cluster | None, backend: str, timeout: timedelta, device: torch.device, init_method: str | None = None
) -> None:
    """Join the cluster's process group, or create a group for this process alone. Does nothing if a group exists."""
    global _alone
    if dist.is_initialized():
        return
    with_device: dict[str, Any] = {"device_id": device} if kind_of(device).binds_process_group else {}
    if cluster is None:
        store = dist.HashStore()  # type: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, **with_device)
        _alone = dist.group.WORLD
    else:
        cluster.export()
        where: dict[str, Any] = (
            {"init_method": init_method} if init_method else {"store": shared_store(cluster, timeout)}
        )
        rank, world_size = cluster.rank, cluster.world_size
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout, **where, **with_device)
        launch.note_joined()
    atexit.register(leave)


def leave() -> None:
    """Leave the process group. Called when the process exits.

    Waits for gloo's worker threads first. Otherwise, the last owner of the group, such as a wrapped model's reducer,
    would join these threads while holding the GIL, which a worker may need to release its tensors.
    """
    global _room
    if _room is not None:
        _room.watch.close()
        _room = None
    if dist.is_initialized():
        wait_for_gloo()
        dist.destroy_process_group()


def is_shared() -> bool:
    """Return True if this process is in a process group other than the one that :func:`join` creates for it alone."""
    return dist.is_initialized() and dist.group.WORLD is not _alone


def leave_alone() -> None:
    """If :func:`join` created a process group of a single process, leave that group."""
    if dist.is_initialized() and not is_shared():
        leave()


@dataclass
class _Room:
    """The objects that a process group's strategies share: its hang watch, and its gloo groups, keyed by timeout."""

    watch: Watch
    groups: dict[timedelta, Any] = field(default_factory=dict)

    def is_open(self) -> bool:
        """Return True if the process group that this object was created for still exists."""
        try:
            return all(dist.get_process_group_ranks(group) for group in self.groups.values())
        except KeyError:
            return False


_room: _Room | None = None


def host_room(timeout: timedelta) -> tuple[Any, Watch]:
    """Return the gloo group with the given timeout, and the process group's hang watch.

    Every rank creates both in its first run.
    """
    global _room
    if _room is None or not _room.is_open():
        if _room is not None:
            _room.watch.close()
        _room = _Room(Watch(dist.get_rank(), dist.get_world_size()))
        atexit.register(_end_threads, _room.watch)
    if timeout not in _room.groups:
        _room.groups[timeout] = dist.new_group(backend="gloo", timeout=timeout)
    return _room.groups[timeout], _room.watch


def _end_threads(watch: Watch) -> None:
    """Stop the threads before Python exits, because a torch thread that needs Python later would abort the process."""
    watch.close()
    wait_for_gloo()


def wait_for_gloo(seconds: float = 10.0) -> None:
    """Wait up to ``seconds`` for all of gloo's worker threads to be asleep and hold no Python object.

    A gloo worker first reports that a collective is done, and then releases its tensors. To release tensors that Python
    has seen, the worker needs the GIL. If Python exits at that moment, it kills the worker inside a C++ destructor,
    which aborts the process with "terminate called without an active exception". Destroying a group does not stop its
    workers while a strategy, a wrapped model or the user still holds the group.

    A worker that is waiting for the GIL gets it while this function sleeps. A worker that still does not wake up has
    nothing to do, or is waiting for another process. Only Linux lists threads; on other systems, this function returns
    quickly.
    """
    deadline, before = time.monotonic() + seconds, None
    while ((asleep := _asleep()) is None or asleep != before) and time.monotonic() < deadline:
        before = asleep
        time.sleep(0.002)


def _asleep() -> dict[str, str] | None:
    """Return how many times each worker has gone to sleep, by thread id; None if a worker is awake."""
    found = {}
    for thread in _THREADS.glob("*/status"):
        try:
            status = dict(line.split(":\t", 1) for line in thread.read_text().splitlines() if ":\t" in line)
        except OSError:  # the thread has just exited
            continue
        if status.get("Name", "").startswith("pt_gloo"):
            if not status["State"].startswith("S"):
                return None
            found[thread.parent.name] = status.get("voluntary_ctxt_switches", "")
    return found

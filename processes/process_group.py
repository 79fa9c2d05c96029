"""The process group: joined by the first run of a process, shared by all its strategies, left when the process ends."""

from __future__ import annotations

import atexit
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import gloo, launch
from .cluster_environment import Cluster
from .hang_watch import Watch
from .rendezvous_store import shared_store


def join(
    cluster: Cluster | None, backend: str, timeout: timedelta, device: torch.device, init_method: str | None = None
) -> None:
    """Join the process group of this process's cluster, or make one for this process alone, unless there is one."""
    if dist.is_initialized():
        return
    with_device: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    if cluster is None:
        store = dist.HashStore()  # type: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, **with_device)
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
    """Leave the process group; called when the process ends.

    Waits for gloo's workers first. The last owner of the group, such as the reducer of a wrapped model, joins them
    while it holds the GIL, which a worker may need to release its tensors.
    """
    global _room
    if _room is not None:
        _room.watch.close()
        _room = None
    if dist.is_initialized():
        gloo.let_go()
        dist.destroy_process_group()


@dataclass
class _Room:
    """What all strategies of a process group share.

    Attributes:
        watch: watches for hangs, in a thread of its own.
        groups: gloo groups by their timeout.
    """

    watch: Watch
    groups: dict[timedelta, Any] = field(default_factory=dict)

    def is_open(self) -> bool:
        """Whether the process group it was made for still exists."""
        try:
            return all(dist.get_process_group_ranks(group) for group in self.groups.values())
        except KeyError:
            return False


_room: _Room | None = None


def host_room(timeout: timedelta) -> tuple[Any, Watch]:
    """The gloo group and the watch of the process group; every rank creates them in its first run.

    Args:
        timeout: how long a collective of the gloo group waits.
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
    """Called when the process ends: a thread in torch that still needs Python would abort it."""
    watch.close()
    gloo.let_go()

"""The store over which the processes of one attempt find each other, free of what an earlier attempt left there.

When torchrun restarts the processes after a failure, its agent keeps the store, and with it the addresses that the
dead processes wrote. A rank that comes early would read them and call somebody who is gone. No variable tells attempts
apart on all machines (each agent counts its own restarts), so the ranks agree on a new prefix: each writes a word that
nobody used before, and rank 0 answers to that very word.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

from torch.distributed import (
    PrefixStore,  # type: ignore[reportPrivateImportUsage]
    TCPStore,  # type: ignore[reportPrivateImportUsage]
)

from .. import messages
from .cluster_environment import Cluster

_SHARED = "TORCHELASTIC_USE_AGENT_STORE"
_ROOM = "paceline/meeting"


def shared_store(cluster: Cluster, timeout: timedelta) -> Any:
    """The agent's store under a prefix of this attempt; None if no agent keeps one over attempts.

    Args:
        cluster: where this process stands.
        timeout: how long to wait for the other ranks.

    Raises:
        RuntimeError: other ranks did not come in time; the message names them.
    """
    if os.environ.get(_SHARED) != "True":
        return None
    store = TCPStore(cluster.address, cluster.port, is_master=False, timeout=timeout)
    room = PrefixStore(_ROOM, store)
    prefix = _invite(room, cluster, timeout) if cluster.rank == 0 else _ask(room, cluster, timeout)
    return PrefixStore(prefix, store)


def _ask(room: Any, cluster: Cluster, timeout: timedelta) -> str:
    word = uuid.uuid4().hex
    room.set(f"word/{cluster.rank}", word)
    try:
        room.wait([f"answer/{word}"], timeout)
    except RuntimeError as error:
        raise _late(cluster, "rank 0", timeout) from error
    prefix = room.get(f"answer/{word}").decode()
    room.set(f"{prefix}/{cluster.rank}", "here")
    return prefix


def _invite(room: Any, cluster: Cluster, timeout: timedelta) -> str:
    """Answer every word that is found, those of the dead too, until every rank has said that it read the answer."""
    prefix, answered = uuid.uuid4().hex, dict[int, bytes]()
    missing, deadline, pause = list(range(1, cluster.world_size)), time.monotonic() + timeout.total_seconds(), 0.002
    while True:
        missing = [rank for rank in missing if not room.check([f"{prefix}/{rank}"])]
        if not missing:
            return prefix
        for rank in missing:
            if room.check([f"word/{rank}"]) and (word := room.get(f"word/{rank}")) != answered.get(rank):
                room.set(f"answer/{word.decode()}", prefix)
                answered[rank] = word
        if time.monotonic() > deadline:
            raise _late(cluster, messages.ranks(missing), timeout)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.01 + 1e-4 * len(missing))  # a look at all of thousands takes long by itself


def _late(cluster: Cluster, who: str, timeout: timedelta) -> RuntimeError:
    return RuntimeError(
        f"Rank {cluster.rank} of {cluster.world_size} waited {timeout.total_seconds():.0f} s at "
        f"{cluster.address}:{cluster.port} for {who} to start. Look into the output of the machines that have not "
        "started theirs; if starting takes that long, set timeout=timedelta(...) of the strategy."
    )

"""The store through which the processes of one launch attempt find each other, free of an earlier attempt's data.

When torchrun restarts the processes after a failure, its agent keeps the store, including the addresses that the dead
processes wrote. A rank that starts early would read these addresses and try to connect to a dead process. No variable
identifies the attempt on all machines (each agent counts its own restarts), so the ranks agree on a new prefix: each
rank writes a unique token to the store, and rank 0 replies to each token with the prefix.
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
_MEETING = "paceline/meeting"


def shared_store(cluster: Cluster, timeout: timedelta) -> Any:
    """Return torchrun's store with a prefix for this attempt; None if torchrun keeps no store across attempts.

    Raises:
        RuntimeError: other ranks did not start within ``timeout``; the message lists these ranks.
    """
    if os.environ.get(_SHARED) != "True" or cluster.name != "torchrun":
        return None
    store = TCPStore(cluster.address, cluster.port, is_master=False, timeout=timeout)
    meeting = PrefixStore(_MEETING, store)
    prefix = _invite(meeting, cluster, timeout) if cluster.rank == 0 else _ask(meeting, cluster, timeout)
    return PrefixStore(prefix, store)


def _ask(meeting: Any, cluster: Cluster, timeout: timedelta) -> str:
    word = uuid.uuid4().hex
    meeting.set(f"word/{cluster.rank}", word)
    try:
        meeting.wait([f"answer/{word}"], timeout)
    except RuntimeError as error:
        raise _late(cluster, "rank 0", timeout) from error
    prefix = meeting.get(f"answer/{word}").decode()
    meeting.set(f"{prefix}/{cluster.rank}", "here")
    return prefix


def _invite(meeting: Any, cluster: Cluster, timeout: timedelta) -> str:
    """Reply to every token in the store, even tokens from dead processes, until every rank has read its reply."""
    prefix, answered = uuid.uuid4().hex, dict[int, bytes]()
    missing, deadline, pause = list(range(1, cluster.world_size)), time.monotonic() + timeout.total_seconds(), 0.002
    while True:
        missing = [rank for rank in missing if not meeting.check([f"{prefix}/{rank}"])]
        if not missing:
            return prefix
        for rank in missing:
            if meeting.check([f"word/{rank}"]) and (word := meeting.get(f"word/{rank}")) != answered.get(rank):
                meeting.set(f"answer/{word.decode()}", prefix)
                answered[rank] = word
        if time.monotonic() > deadline:
            raise _late(cluster, messages.ranks(missing), timeout)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.01 + 1e-4 * len(missing))  # each check of thousands of ranks is slow


def _late(cluster: Cluster, who: str, timeout: timedelta) -> RuntimeError:
    return RuntimeError(
        f"Rank {cluster.rank} of {cluster.world_size} waited {timeout.total_seconds():.0f} s at "
        f"{cluster.address}:{cluster.port} for {who} to start. Check the output of the machines that run {who}. If "
        "starting takes that long, increase the strategy's timeout=timedelta(...)."
    )

"""How the processes of one attempt find each other in a store that earlier attempts have written to."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from rank_processes import RanksError, ranks, until

from paceline.processes import rendezvous_store
from paceline.processes.cluster_environment import Cluster, find_cluster
from paceline.processes.rendezvous_store import shared_store

SOON = timedelta(seconds=120)


def place() -> Cluster:
    cluster = find_cluster()
    assert cluster is not None
    return cluster


def test_an_attempt_reads_nothing_of_those_before_it() -> None:
    def meet() -> list[Any]:
        cluster = place()
        first = shared_store(cluster, SOON)
        everything = dist.PrefixStore("paceline/meeting", dist.TCPStore(cluster.address, cluster.port, is_master=False))
        answer = f"answer/{everything.get('word/1').decode()}"
        old = everything.get(answer)
        first.set(f"address of {cluster.rank}", "of the first attempt")
        first.wait(["address of 0", "address of 1"])
        # Both begin again, and rank 1 only when rank 0 has answered the word that rank 1 left behind.
        if cluster.rank == 1:
            until("rank 0 answers anew", lambda: everything.get(answer) != old)
        second = shared_store(cluster, SOON)
        if cluster.rank == 1:
            second.set("address of 1", "of the second attempt")
        return [second.check(["address of 0"]), second.get("address of 1")]

    assert ranks(2, meet) == [[False, b"of the second attempt"]] * 2


def test_a_rank_that_does_not_come_is_named() -> None:
    def meet() -> None:
        cluster, looks = place(), 0
        if cluster.rank == 2:
            return
        store = dist.TCPStore(cluster.address, cluster.port, is_master=False)

        def monotonic() -> float:
            """Stands still until the two others have come, and rank 0 has looked once more."""
            nonlocal looks
            looks += store.check(["1 came", "3 came"])
            return 3.0 * (looks > 1)

        if cluster.rank == 0:
            rendezvous_store.time = SimpleNamespace(**{**vars(time), "monotonic": monotonic})  # type: ignore[assignment]
        shared_store(cluster, timedelta(seconds=2) if cluster.rank == 0 else SOON)
        store.set(f"{cluster.rank} came", "")

    with pytest.raises(RanksError) as caught:
        ranks(4, meet)
    first = str(caught.value.errors[0])
    assert "Rank 0 of 4 waited 2 s at 127.0.0.1:" in first
    assert "for rank 2 to start" in first
    assert caught.value.errors[1] is None


def test_without_a_store_that_outlives_an_attempt_torch_makes_its_own() -> None:
    def meet() -> bool:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        return shared_store(place(), SOON) is None

    assert ranks(2, meet) == [True, True]

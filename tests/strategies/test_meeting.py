"""How the processes of one attempt find each other in a store that earlier attempts have written to."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from processes import RanksError, ranks

from paceline.strategies.cluster import Cluster, find_cluster
from paceline.strategies.meeting import shared_store

SOON = timedelta(seconds=60)


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
        while cluster.rank == 1 and everything.get(answer) == old:
            time.sleep(0.01)
        second = shared_store(cluster, SOON)
        if cluster.rank == 1:
            second.set("address of 1", "of the second attempt")
        return [second.check(["address of 0"]), second.get("address of 1")]

    assert ranks(2, meet) == [[False, b"of the second attempt"]] * 2


def test_a_rank_that_does_not_come_is_named() -> None:
    def meet() -> None:
        cluster = place()
        if cluster.rank == 2:
            return
        shared_store(cluster, timedelta(seconds=2) if cluster.rank == 0 else SOON)

    with pytest.raises(RanksError) as caught:
        ranks(4, meet, limit=20)
    first = str(caught.value.errors[0])
    assert "Rank 0 of 4 waited 2 s at 127.0.0.1:" in first
    assert "for rank 2 to start" in first
    assert caught.value.errors[1] is None


def test_without_a_store_that_outlives_an_attempt_torch_makes_its_own() -> None:
    def meet() -> bool:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        return shared_store(place(), SOON) is None

    assert ranks(2, meet) == [True, True]

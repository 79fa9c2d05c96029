"""Two machines in one process: each has a rendezvous of its own, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters

from paceline.processes import rendezvous, torch_elastic

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


@pytest.fixture
def machines() -> tuple[rendezvous.Rendezvous, rendezvous.Rendezvous]:
    """Two that have met."""
    store = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    server = torch_elastic.serve(store, "127.0.0.1", 0)

    def met(rank: int) -> rendezvous.Rendezvous:
        endpoint = f"127.0.0.1:{server.port}"
        made = rendezvous.create(
            RendezvousParameters(rendezvous.register(), endpoint, "test", 2, 2, rank=rank, timeout=120)
        )
        made.next_rendezvous()
        return made

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(met, range(2))
    return first, second


def begin(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_the_machine_with_the_store_leaves_last(
    machines: tuple[rendezvous.Rendezvous, rendezvous.Rendezvous],
) -> None:
    first, second = machines
    leaving = begin(first.shutdown)
    leaving.join(0.3)
    assert leaving.is_alive()
    assert second.shutdown()
    leaving.join(120)
    assert not leaving.is_alive()


def test_a_machine_that_died_is_not_waited_for_long(
    machines: tuple[rendezvous.Rendezvous, rendezvous.Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_LEAVING", timedelta(seconds=0.1))
    assert machines[0].shutdown()


def test_one_that_never_met_the_others_just_leaves() -> None:
    parameters = RendezvousParameters(rendezvous.register(), "127.0.0.1:1", "test", 2, 2, rank=1, timeout=60)
    assert rendezvous.create(parameters).shutdown()

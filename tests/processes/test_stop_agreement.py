"""Where ranks stop: threads that stand for ranks, over a real store."""

from __future__ import annotations

import itertools
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from paceline.processes.stop_agreement import Stop, StopVote, chosen

BOUNDARIES = 25


class Counts:
    """What the threads of a rank share."""

    def __init__(self) -> None:
        self.boundaries = 0
        self.stop_requested = False


class Rank:
    """Goes from boundary to boundary, as the loop does; asks to stop at ``asks``."""

    def __init__(self, number: int, world: int, store: Any, asks: int, together: threading.Barrier | None) -> None:
        self.counts, self.asks, self.together = Counts(), asks, together
        self.vote = StopVote(self.counts, number, world, store)
        self.found: Stop | None = None
        self.stopped = 0
        self.over = threading.Event()

    def listen(self) -> None:
        while not self.over.wait(0.0002):
            self.vote.listen()

    def train(self) -> None:
        counts = self.counts
        for boundary in itertools.count(1):
            if self.together is not None:
                self.together.wait(120)  # the collective of the batch
            if boundary == self.asks:
                counts.stop_requested = True
            stops = self.at(boundary) if counts.stop_requested else False
            counts.boundaries += 1
            if counts.stop_requested:
                stops = self.at(boundary)
            if stops or boundary == BOUNDARIES:
                self.stopped = boundary
                return

    def at(self, boundary: int) -> bool:
        if self.found is None:
            self.found = self.vote.decide(boundary, 0, boundary == self.asks)
        return boundary >= self.found.boundary


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def rooms() -> Iterator[Any]:
    """Stores for one run each."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return (dist.PrefixStore(str(number), store) for number in itertools.count())


def run(store: Any, asks: list[int], lockstep: bool) -> list[Rank]:
    together = threading.Barrier(len(asks)) if lockstep else None
    found = [Rank(number, len(asks), store, at, together) for number, at in enumerate(asks)]
    mains = [threading.Thread(target=rank.train) for rank in found]
    listeners = [threading.Thread(target=rank.listen) for rank in found]
    for thread in listeners + mains:
        thread.start()
    for thread in mains:
        thread.join()
    for rank in found:
        rank.over.set()
    for thread in listeners:
        thread.join()
    return found


@pytest.mark.parametrize("lockstep", [True, False])
def test_all_stop_at_one_boundary_whoever_asks_when(lockstep: bool, rooms: Any, quick_switches: None) -> None:
    draw = random.Random(1)
    for _ in range(15):
        asks = [draw.choice([0, draw.randint(1, BOUNDARIES - 10)]) for _ in range(3)]
        asks[draw.randrange(3)] = draw.randint(1, BOUNDARIES - 10)
        ranks = run(next(rooms), asks, lockstep)
        assert len({rank.stopped for rank in ranks}) == 1, asks
        first = min(at for at in asks if at)
        assert first <= ranks[0].stopped
        if lockstep:
            assert ranks[0].stopped <= first + 1


def test_ranks_that_all_ask_at_one_boundary_stop_there(rooms: Any, quick_switches: None) -> None:
    for boundary in range(1, 16):
        assert [rank.stopped for rank in run(next(rooms), [boundary] * 3, lockstep=True)] == [boundary] * 3


def test_the_stop_says_who_asked_and_which_signal_counts(rooms: Any) -> None:
    (_, _, second) = run(next(rooms), [0, 0, 5], lockstep=True)
    assert second.found is not None
    assert second.found.ranks == (2,)
    assert chosen([0, 10, 15]) == 10
    assert chosen([0, 0]) == 0


def test_a_rank_that_is_gone_is_waited_for_a_short_time_only(rooms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.processes.stop_agreement.ANSWER_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match=r"Rank 0 asked .* got no reply from rank 1 within 0 s"):
        StopVote(Counts(), 0, 2, next(rooms)).decide(1, 15, False)

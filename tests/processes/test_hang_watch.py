"""What is said while ranks wait, and how many say it."""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import ranks, wait_at_most

from paceline import messages
from paceline.processes import hang_watch
from paceline.strategies import DistributedStrategy


def joined(size: int, **arguments: Any) -> DistributedStrategy:
    strategy = DistributedStrategy(**arguments)
    strategy.place([torch.device("cpu")] * size)
    strategy.setup_environment()
    return strategy


def test_of_many_ranks_that_wait_one_says_where_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> list[str]:
        said: list[str] = []
        strategy = joined(4)
        store: Any = dist.distributed_c10d._get_default_store()
        notice = hang_watch.Watch._notice

        def note(self: hang_watch.Watch) -> None:
            notice(self)
            if self._noticed:
                store.set(f"noticed {self.rank}", "")

        monkeypatch.setattr(messages, "info_anywhere", said.append)
        monkeypatch.setattr(hang_watch.Watch, "_notice", note)
        monkeypatch.setattr(hang_watch, "NOTICE_SECONDS", 0.5)
        if strategy.global_rank == 3:
            store.wait(["noticed 0", "noticed 1", "noticed 2"], timedelta(seconds=120))
        strategy.barrier("here")
        return said

    found = ranks(4, wait)
    (said,) = [text for texts in found for text in texts]
    waiting = {0, 1, 2} - {rank for rank, texts in enumerate(found) if texts}
    first, last = sorted(waiting)
    assert "(barrier 'here'). Rank" in said
    assert f"Ranks {first}{'-' if last == first + 1 else ', '}{last} are at {__file__}" in said
    assert f"Rank 3 is at {__file__}" in said


@pytest.mark.parametrize("limits", [(2.0, 2.0), (60.0, 2.0)], ids=["together", "one after the other"])
def test_ranks_that_give_up_all_name_the_missing_one(limits: tuple[float, float]) -> None:
    def wait() -> str:
        strategy, said = joined(3), ""
        wait_at_most((*limits, 60.0)[strategy.global_rank])
        elsewhere = dist.new_group(backend="gloo")
        dist.all_reduce(torch.zeros(1), group=elsewhere)
        if strategy.global_rank < 2:
            with pytest.raises(RuntimeError) as caught:
                strategy.barrier("here")
            said = str(caught.value)
        dist.all_reduce(torch.zeros(1), group=elsewhere)  # rank 2 is here all the while
        return said

    for rank, said in enumerate(ranks(3, wait)[:2]):
        assert f"Rank {rank} timed out waiting" in said
        assert f"Rank {1 - rank} is at {__file__}" in said
        assert f"Rank 2 is at {__file__}" in said


def test_the_thread_is_gone_when_python_ends() -> None:
    def end() -> list[bool]:
        atexit._clear()  # what the parent has registered
        thread = joined(2)._watch._thread  # type: ignore[union-attr]
        assert thread is not None
        before = thread.is_alive()
        atexit._run_exitfuncs()
        return [before, thread.is_alive()]

    assert ranks(2, end) == [[True, False]] * 2


def test_the_looks_of_all_ranks_together_are_bounded() -> None:
    assert hang_watch.poll_seconds(2) == hang_watch.poll_seconds(128) == 1.0
    assert 4096 / hang_watch.poll_seconds(4096) == 128

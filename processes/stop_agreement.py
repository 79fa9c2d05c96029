"""Agree on the step boundary at which all ranks stop when a signal, a time limit or a callback stops one of them.

Until a rank requests a stop, the ranks exchange nothing. After that, they use the process group's store, never a
collective. Each rank replies once with the first boundary at which it can stop, and all ranks stop at the latest of
these boundaries.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

from .. import messages

#: How long a rank waits for replies from the other ranks' threads. Launchers wait longer before they kill ranks.
ANSWER_SECONDS = 20.0
_LOOKS_PER_SECOND = 1000


class RunProgress(Protocol):
    """The part of a run's state that its main thread and the listening thread share.

    Attributes:
        boundaries: number of boundaries that the main thread has passed. All ranks reach the same boundaries in the
            same order.
        stop_requested: whether the main thread must call :meth:`StopVote.decide` before it passes the next boundary.
    """

    boundaries: int
    stop_requested: bool


@dataclass(frozen=True)
class Stop:
    """The boundary at which a run stops, and why; the same on all ranks.

    Attributes:
        boundary: the number of the boundary, counted from 1.
        signum: the signal that ends the run; 0 if the training should end as if it had reached its limits.
        ranks: the ranks that requested the stop.
    """

    boundary: int
    signum: int
    ranks: tuple[int, ...]


class StopVote:
    """Lets all ranks of one run agree on where to stop.

    The following explains why all ranks stop at the same boundary S and why no rank waits forever. At boundary n, the
    main thread reads ``run.stop_requested``, writes ``run.boundaries = n`` and reads ``run.stop_requested`` again. If
    the flag is set, the main thread replies with n and waits there for all replies. The listening thread sets
    ``run.stop_requested``, then reads ``run.boundaries`` and replies with ``run.boundaries + 1``. Each rank replies
    once, and S is the largest reply. If a main thread passed n without seeing ``run.stop_requested``, it read the flag
    before the flag was set. So ``run.boundaries`` was at least n when the listening thread read it, and S is larger
    than n. A waiting rank waits only for replies, and the other ranks' listening threads reply even while their main
    threads wait for this rank in a collective. If all main threads request a stop at the same boundary, each has seen
    its own request before it writes ``run.boundaries``: every reply is that boundary or an earlier one, and all ranks
    stop exactly there.

    Args:
        run: the state that this rank's two threads share.
        rank: rank of this process.
        world_size: number of processes.
        store: a store that all ranks share, with keys that no other run uses.
    """

    def __init__(self, run: RunProgress, rank: int, world_size: int, store: Any) -> None:
        self.run, self.rank, self.world_size = run, rank, world_size
        self.told = False
        self._store = store
        self._lock = threading.Lock()
        self._answered = False

    def listen(self) -> None:
        """If a rank has requested a stop, reply with the first boundary at which this rank can stop.

        The listening thread calls this regularly.
        """
        if not self._answered and self._store.check(["asked"]):
            self.told = self.run.stop_requested = True
            self._answer(self.run.boundaries + 1)

    def decide(self, boundary: int, signum: int, wants: bool) -> Stop:
        """Decide where to stop. If no rank has requested a stop yet, this rank first requests one.

        The main thread calls this at a boundary. ``signum`` is the signal that this rank received, or 0; ``wants`` says
        whether this rank wants to end the training.

        Raises:
            RuntimeError: a rank did not reply, probably because it has exited.
        """
        self._answer(boundary, signum, wants)
        self._store.set("asked", "")
        answers = self._answers()
        asked = tuple(rank for rank, (_, signum, wants) in enumerate(answers) if signum or wants)
        return Stop(max(answer[0] for answer in answers), chosen([answer[1] for answer in answers]), asked)

    def _answer(self, boundary: int, signum: int = 0, wants: bool = False) -> None:
        with self._lock:
            if not self._answered:
                self._answered = True
                self._store.set(str(self.rank), json.dumps([boundary, signum, wants]))

    def _answers(self) -> list[tuple[int, int, bool]]:
        """Return the replies of all ranks.

        This method polls the store, because ``store.wait`` would keep the listening thread from replying.
        """
        keys = [str(rank) for rank in range(self.world_size)]
        deadline, pause = time.monotonic() + ANSWER_SECONDS, 0.001
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = messages.ranks(rank for rank, key in enumerate(keys) if not self._store.check([key]))
                raise RuntimeError(
                    f"Rank {self.rank} asked the other ranks to stop, but got no reply from {missing} within "
                    f"{ANSWER_SECONDS:.0f} s. A rank that does not reply has exited, or native code is holding its "
                    "GIL. Check the output of each rank that did not reply."
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02 + self.world_size / _LOOKS_PER_SECOND)
        return [tuple(json.loads(answer)) for answer in self._store.multi_get(keys)]


def chosen(signums: list[int]) -> int:
    """Return the signal that ends the run on all ranks: the lowest rank's signal, or 0 if no rank received one."""
    return next((signum for signum in signums if signum), 0)

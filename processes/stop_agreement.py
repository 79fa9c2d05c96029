"""At which boundary all ranks stop, when one of them is asked to: by a signal, a clock, or a callback of its own.

Nothing is exchanged while nobody asks, and no collective ever: the ranks talk over the process group's store. Each
answers once with the first boundary at which it can stop, and all stop at the latest of these.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

from .. import messages

#: How long a rank waits for the answers of the others, which their threads give; less than launchers wait to kill.
ANSWER_SECONDS = 20.0
_LOOKS_PER_SECOND = 1000


class Run(Protocol):
    """The part of a run's state that its main thread and the thread that listens share.

    Attributes:
        passed: boundaries that the main thread has gone past. All ranks come to the same ones in the same order.
        stop: whether the main thread has to look before it goes past the next.
    """

    passed: int
    stop: bool


@dataclass(frozen=True)
class Stop:
    """Where a run stops, the same on all ranks.

    Attributes:
        boundary: the number of the boundary, from 1 on.
        signum: the signal that ends the run; 0: somebody wants the training to end as at its limits.
        ranks: those that asked.
    """

    boundary: int
    signum: int
    ranks: tuple[int, ...]


class StopVote:
    """The agreement of one run.

    Why no rank goes past the boundary S that all find, and none waits for ever. The main thread, at boundary n, looks
    at ``run.stop``, writes ``run.passed = n`` and looks again; seeing it set, it answers n and waits there for all
    answers. The listening thread sets ``run.stop``, then reads ``run.passed`` and answers one more. One answer counts
    for each rank, S is the latest. Had a main thread gone past n unseeing, its last look came before ``run.stop`` was
    set, so ``run.passed`` was n or more when it was read, and S is past n. Who waits, waits only for answers, which the
    others' threads give even while their main threads wait in a collective for this one. When all main threads ask at
    the same boundary, each has seen its own wish before writing ``run.passed``: every answer is that boundary or less,
    and they stop just there.

    Args:
        run: what the two threads of this rank share.
        rank: this process among all.
        world_size: number of processes.
        store: reaches all ranks; no other run uses its keys.
    """

    def __init__(self, run: Run, rank: int, world_size: int, store: Any) -> None:
        self.run, self.rank, self.world_size = run, rank, world_size
        self.told = False
        self._store = store
        self._lock = threading.Lock()
        self._answered = False

    def listen(self) -> None:
        """In the listening thread, now and then: answer if somebody asked."""
        if not self._answered and self._store.check(["asked"]):
            self.told = self.run.stop = True
            self._answer(self.run.passed + 1)

    def decide(self, boundary: int, signum: int, wants: bool) -> Stop:
        """In the main thread, at a boundary: where to stop. Asks the others if nobody has.

        Args:
            boundary: its number.
            signum: the signal that came to this rank, or 0.
            wants: whether this rank wants to end the training.

        Raises:
            RuntimeError: a rank has not answered; it has probably ended.
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
        """Those of all ranks. Looks now and then: a store's own wait would keep the other thread from answering."""
        keys = [str(rank) for rank in range(self.world_size)]
        deadline, pause = time.monotonic() + ANSWER_SECONDS, 0.001
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = messages.ranks(rank for rank, key in enumerate(keys) if not self._store.check([key]))
                raise RuntimeError(
                    f"Rank {self.rank} asked the others to stop, but got no answer from {missing} in "
                    f"{ANSWER_SECONDS:.0f} s. They have ended, or compiled code is holding their interpreter: look "
                    "at their output."
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02 + self.world_size / _LOOKS_PER_SECOND)
        return [tuple(json.loads(answer)) for answer in self._store.multi_get(keys)]


def chosen(signums: list[int]) -> int:
    """The signal that ends the run on all ranks: that of the lowest rank that got one; 0 if none did."""
    return next((signum for signum in signums if signum), 0)

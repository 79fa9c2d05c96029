"""Report the positions of all ranks if a rank waits too long for another one, so that no run hangs silently.

Ranks exchange nothing in normal operation. A thread in each rank checks every few seconds whether another rank has
requested this rank's position, and replies with the line of user code that the main thread is running. A rank sends
such a request when it has waited in one of the strategy's collectives for a long time, or when a collective failed. The
same thread replies when another rank wants the run to stop (see :mod:`.stop_agreement`).
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

from torch.distributed import distributed_c10d

from .. import messages
from ..torch_private import default_store
from .stop_agreement import RunProgress, StopVote
from .thread_stacks import stacks

#: How long a rank waits in a collective before it reports the wait.
NOTICE_SECONDS = 60.0
_LOOKS_PER_SECOND = 128
_ANSWER_SECONDS = 5.0
#: How long to wait for a note from a rank that timed out, which closes its connections before it leaves the note.
_GAVE_UP_SECONDS = 1.0
_GAVE_UP = "gave up"
_SILENT = "does not respond (it has exited, or its machine cannot be reached)"
_TIMED_OUT = ("timed out", "timeout")
_GONE = ("connection closed", "connection reset", "broken pipe", "socket closed", "connection refused")


def poll_seconds(world_size: int) -> float:
    """Return the number of seconds between checks for other ranks' requests: 1, or more if there are many ranks."""
    return max(1.0, world_size / _LOOKS_PER_SECOND)


class Watch:
    """Tells other ranks where this rank is and what its run is doing (``progress``), and asks for their positions."""

    def __init__(self, rank: int, world_size: int, progress: Callable[[], str] = str) -> None:
        self.rank, self.world_size, self.progress = rank, world_size, progress
        self._place = ""
        self._since = 0.0
        self._noticed = False
        self._answered = self._reported = 0
        self._poll_seconds = poll_seconds(world_size)
        self._answer_seconds = 2 * self._poll_seconds + _ANSWER_SECONDS
        self._closed = threading.Event()
        self._main = threading.main_thread().ident or 0
        self._thread: threading.Thread | None = None
        self._runs = 0
        self.vote: StopVote | None = None
        if world_size > 1:
            store: Any = default_store()
            self._store: Any = distributed_c10d.PrefixStore("paceline/where", store.clone())
            self._thread = threading.Thread(target=self._listen, name="paceline-watch", daemon=True)
            self._thread.start()

    def begin(self, run: RunProgress) -> None:
        """Start a run; every rank must call this. Any rank can then ask all ranks to stop through :attr:`vote`."""
        self._runs += 1
        if self._thread is not None:
            store = distributed_c10d.PrefixStore(f"stop/{self._runs}", self._store)
            self.vote = StopVote(run, self.rank, self.world_size, store)

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """Context manager for waiting at ``place``; if waiting fails, the error shows where every rank is."""
        self._place, self._since, self._noticed = place, time.monotonic(), False
        try:
            yield
        except RuntimeError as error:
            better = self.explain(error)
            if better is None:
                raise
            raise better from error
        finally:
            self._since = 0.0

    def explain(self, error: BaseException) -> RuntimeError | None:
        """Return a clearer error if a collective failed because another rank is missing; None for any other failure."""
        text = str(error).lower()
        if not isinstance(error, RuntimeError) or isinstance(error, _RankError) or self._thread is None:
            return None
        timed_out = any(sign in text for sign in _TIMED_OUT)
        gone = not timed_out and any(sign in text for sign in _GONE)
        if timed_out or (gone and self._another_gave_up()):
            return _RankError(
                f"Rank {self.rank} timed out waiting for another rank at {self._here()}. {self._where_all_are()} "
                "Every rank must make the same calls in the same order. Look for a call inside `if "
                "trainer.is_global_zero`, for ranks with different numbers of batches, and for a rank that takes "
                "longer than the time limit (the strategy's timeout=timedelta(...))."
            )
        if gone:
            return _RankError(
                f"Rank {self.rank} lost the connection to another rank, which has exited. Rank {self.rank} was at "
                f"{self._here()}. The error of the rank that exited first shows the cause. If no rank shows an error, "
                "the other rank exited without making this call. Look for a call inside `if trainer.is_global_zero` "
                "or `if accelerator.is_main_process`."
            )
        return None

    def reports(self) -> dict[int, str] | None:
        """Return each rank's activity and its threads' stack traces; an empty string for a rank that does not respond.

        If several ranks call this at the same time, one rank gets the reports and the others get None. All ranks
        get None if the rank that hosted the store has exited.
        """
        number, me = self._reported, str(self.rank)
        try:
            store = self._store.clone()
            if store.compare_set(f"report/{number}", "", me).decode() != me:
                _read(store, f"reported/{number}", time.monotonic() + 2 * self._answer_seconds)
                return None
            deadline = time.monotonic() + self._answer_seconds
            found = {rank: _read(store, f"report/{number}/{rank}", deadline) or "" for rank in range(self.world_size)}
            store.set(f"reported/{number}", "")
            return found
        except RuntimeError:
            return None

    def close(self) -> None:
        """Stop the thread that replies to other ranks."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(2 * self._answer_seconds)  # the thread may wait this long for a reply
        self.progress, self.vote = str, None  # both keep the run and its process groups alive

    # ---- answering -------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        pause = self._poll_seconds * (1 + self.rank / self.world_size)  # so that ranks do not all check at once
        while not self._closed.wait(pause):
            pause = self._poll_seconds
            try:
                while self._store.check([f"ask/{self._answered}"]):
                    self._store.set(f"answer/{self._answered}/{self.rank}", self._here())
                    self._answered += 1
                    self._noticed = bool(self._since)  # the requesting rank reports for all waiting ranks
                while self._store.check([f"report/{self._reported}"]):
                    self._store.set(f"report/{self._reported}/{self.rank}", f"{self.progress()}\n{stacks()}")
                    self._reported += 1
                self._notice()
                if self.vote is not None:
                    self.vote.listen()
            except Exception:  # the rank that hosted the store has exited, so the run is over
                return

    def _here(self) -> str:
        where = _users_line(sys._current_frames().get(self._main))
        about = ", ".join(filter(None, (self.progress(), self._place if self._since else "")))
        return f"{where} ({about})" if about else where

    # ---- asking ----------------------------------------------------------------------------------------------------

    def _notice(self) -> None:
        """Report that this rank is waiting, unless another rank has already reported the wait."""
        if not self._since or self._noticed or time.monotonic() - self._since < NOTICE_SECONDS:
            return
        self._noticed = True
        question = self._answered
        if self._is_mine(question, self._store):
            self._answered = question + 1
            waited, others = time.monotonic() - self._since, self._describe(self._ask_all(question, self._store))
            messages.info_anywhere(f"Rank {self.rank} has been waiting at {self._here()} for {waited:.0f} s. {others}")

    def _another_gave_up(self) -> bool:
        """Return True if another rank closed the connection because it timed out, not because it exited."""
        try:
            return _read(self._store.clone(), _GAVE_UP, time.monotonic() + _GAVE_UP_SECONDS) is not None
        except RuntimeError:  # the store's host has exited
            return False

    def _where_all_are(self) -> str:
        """Return sentences that describe where the other ranks are.

        If several ranks call this at once, only one of them collects the replies.
        """
        question = self._answered
        try:
            store = self._store.clone()  # waiting in the thread's own store would keep the thread from replying
            store.set(_GAVE_UP, str(self.rank))
            if self._is_mine(question, store):
                return self._describe(self._ask_all(question, store))
            answers = _read(store, f"told/{question}", time.monotonic() + 2 * self._answer_seconds)
        except RuntimeError:  # the store's host has exited
            answers = None
        return (
            self._describe(json.loads(answers))
            if answers is not None
            else "The positions of the other ranks are unknown."
        )

    def _is_mine(self, question: int, store: Any) -> bool:
        """Return True if this rank is the first to send this request."""
        me = str(self.rank)
        return store.compare_set(f"ask/{question}", "", me).decode() == me

    def _ask_all(self, question: int, store: Any) -> dict[str, list[int]]:
        """Return the ranks at each position, and write them to the store for other ranks that ask for the positions."""
        places: dict[str, list[int]] = {f"is at {self._here()}": [self.rank]}
        deadline = time.monotonic() + self._answer_seconds
        for rank in range(self.world_size):
            if rank != self.rank and not self._closed.is_set():
                place = _read(store, f"answer/{question}/{rank}", deadline)
                places.setdefault(_SILENT if place is None else f"is at {place}", []).append(rank)
        store.set(f"told/{question}", json.dumps(places))
        return places

    def _describe(self, places: dict[str, list[int]]) -> str:
        others = {place: [rank for rank in ranks if rank != self.rank] for place, ranks in places.items()}
        return " ".join(
            f"{messages.ranks(ranks).capitalize()} {place if len(ranks) == 1 else _plural(place)}."
            for place, ranks in others.items()
            if ranks
        )


def _read(store: Any, key: str, deadline: float) -> str | None:
    try:
        store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
        return store.get(key).decode()
    except RuntimeError:
        return None


def _plural(place: str) -> str:
    silent = "do not respond (they have exited, or their machines cannot be reached)"
    return silent if place == _SILENT else f"are{place[2:]}"


class _RankError(RuntimeError):
    """An error whose message already lists the ranks and their positions."""


_RankError.__name__ = _RankError.__qualname__ = "RuntimeError"
_RankError.__module__ = "builtins"


def _users_line(frame: FrameType | None) -> str:
    """Return the innermost line of user code on a stack, such as ``train.py:40 in training_step``."""
    innermost = frame
    while frame is not None:
        if messages.owner_of(frame) == "user":
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return f"{innermost.f_code.co_filename}:{innermost.f_lineno}" if innermost else "an unknown line"

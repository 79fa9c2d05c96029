"""Where every rank is just now: what turns a silent wait for a rank that does not come into a sentence.

Nothing is sent while all is well. A thread of each rank looks every few seconds whether somebody asks, and answers with
the user's line that the rank executes. A rank asks when a collective of the strategy's has waited for long, or failed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from torch.distributed import distributed_c10d

from ..loggers import messages

#: How long a rank waits in a collective before it says so.
NOTICE_SECONDS = 60.0
_POLL_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ROOMS = ("trainer", "callbacks", "strategies", "loggers")
#: Folders whose lines say nothing to the user: ours, torch's, Python's own.
_NOT_THE_USERS = (
    *(os.path.join(_OURS, room, "") for room in _ROOMS),
    os.path.dirname(os.path.abspath(torch.__file__)),
    os.path.dirname(os.path.abspath(threading.__file__)),
)
_TIMED_OUT = ("timed out", "timeout")
_GONE = ("connection closed", "connection reset", "broken pipe", "socket closed", "connection refused")


class Watch:
    """Answers where this rank is, and asks where the others are.

    Args:
        rank: this process among all.
        world_size: number of processes; with one there is nobody to ask.
        progress: what the run is doing, in words.
    """

    def __init__(self, rank: int, world_size: int, progress: Callable[[], str] = str) -> None:
        self.rank, self.world_size, self.progress = rank, world_size, progress
        self._place = ""
        self._since = 0.0
        self._noticed = False
        self._closed = threading.Event()
        self._main = threading.main_thread().ident or 0
        self._thread: threading.Thread | None = None
        if world_size > 1:
            store: Any = distributed_c10d._get_default_store()
            self._store: Any = distributed_c10d.PrefixStore("paceline/where", store.clone())
            self._thread = threading.Thread(target=self._listen, name="paceline-watch", daemon=True)
            self._thread.start()

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """This rank waits at ``place`` while the context is open; an error that comes of it names all places."""
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
        """A better error for a collective that failed because another rank did not come, or ended; None if not that."""
        text = str(error).lower()
        if not isinstance(error, RuntimeError) or isinstance(error, _RankError) or self._thread is None:
            return None
        if any(sign in text for sign in _TIMED_OUT):
            return _RankError(
                f"Rank {self.rank} waited in vain for another rank at {self._here()}. {self._where_all_are()} Every "
                "rank must make the same calls in the same order: look for one inside `if trainer.is_global_zero`, "
                "for ranks with different numbers of batches, and for a rank that is slower than the time limit "
                "(timeout=timedelta(...) of the strategy)."
            )
        if any(sign in text for sign in _GONE):
            return _RankError(
                f"Rank {self.rank} lost the connection to another rank, which has ended, at {self._here()}. The error "
                "of the rank that ended first says why."
            )
        return None

    def close(self) -> None:
        """Stop to answer."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_ANSWER_SECONDS)

    # ---- answering -------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        answered = 0
        while not self._closed.wait(_POLL_SECONDS):
            try:
                while self._store.check([f"ask/{answered}"]):
                    self._store.set(f"answer/{answered}/{self.rank}", self._here())
                    answered += 1
                self._notice()
            except Exception:  # the store has gone with the rank that held it: the run is over
                return

    def _here(self) -> str:
        where = _users_line(sys._current_frames().get(self._main))
        about = ", ".join(filter(None, (self.progress(), self._place if self._since else "")))
        return f"{where} ({about})" if about else where

    # ---- asking ----------------------------------------------------------------------------------------------------

    def _notice(self) -> None:
        if not self._since or self._noticed or time.monotonic() - self._since < NOTICE_SECONDS:
            return
        self._noticed = True
        messages.info_anywhere(
            f"Rank {self.rank} has waited {NOTICE_SECONDS:.0f} s at {self._here()}. {self._where_all_are()}"
        )

    def _where_all_are(self) -> str:
        """One sentence with the place of every other rank; ranks at one place are named together."""
        number = self._store.add("asked", 1) - 1
        self._store.set(f"ask/{number}", "?")
        places: dict[str, list[int]] = {}
        deadline = time.monotonic() + _POLL_SECONDS + _ANSWER_SECONDS
        for rank in range(self.world_size):
            if rank != self.rank:
                places.setdefault(self._answer(f"answer/{number}/{rank}", deadline), []).append(rank)
        return " ".join(
            f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} {place}."
            for place, ranks in places.items()
        )

    def _answer(self, key: str, deadline: float) -> str:
        try:
            left = max(deadline - time.monotonic(), 0.01)
            self._store.wait([key], timedelta(seconds=left))
            return f"is at {self._store.get(key).decode()}"
        except RuntimeError:
            return "does not answer (it has ended, or its machine is out of reach)"


class _RankError(RuntimeError):
    """An error that names ranks and places already."""


_RankError.__name__ = _RankError.__qualname__ = "RuntimeError"


def _users_line(frame: FrameType | None) -> str:
    """The innermost line of a stack that is neither ours nor torch's: ``train.py:40 in training_step``."""
    innermost = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(("<", *_NOT_THE_USERS)):
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return f"{innermost.f_code.co_filename}:{innermost.f_lineno}" if innermost else "an unknown place"

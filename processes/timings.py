"""Time the phases of a run. If PACELINE_DEBUG is set, rank 0 prints the times when the process ends.

A phase is a long part of a run, such as setup, a fit, a validation or a save. Nothing here is called for every batch.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .. import messages

#: Environment variable where a launcher stores its start time, in seconds since the epoch.
STARTED = "PACELINE_STARTED"
_VARIABLES = ("PACELINE_DEBUG", "ACCELERATE_DEBUG_MODE")

_begin = time.perf_counter()
_open: list[str] = []
_found: dict[tuple[str, ...], tuple[float, int]] = {}


def is_debugging() -> bool:
    """Return True if debug output is enabled in the environment."""
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in _VARIABLES)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Context manager or decorator that adds the time of a block or function to a phase; phases can be nested."""
    if not is_debugging() or threading.current_thread() is not threading.main_thread():
        yield
        return
    if not _found:
        atexit.register(_say)
    _open.append(name)
    key, start = tuple(_open), time.perf_counter()
    _found.setdefault(key, (0.0, 0))  # list this phase before the phases inside it
    try:
        yield
    finally:
        _open.pop()
        seconds, times = _found[key]
        _found[key] = seconds + time.perf_counter() - start, times + 1


def text() -> str:
    """Return a table of the phases so far, with the seconds spent in each phase and the number of times that it ran."""
    now = time.perf_counter()
    started = os.environ.get(STARTED)
    before = max(0.0, time.time() - float(started) - (now - _begin)) if started else 0.0
    total = now - _begin + before
    rows = [("start and imports", before, 1)] if started else []
    rows += [("  " * (len(key) - 1) + key[-1], seconds, times) for key, (seconds, times) in _found.items()]
    inside = before + sum(seconds for key, (seconds, _) in _found.items() if len(key) == 1)
    rows.append(("everything else", total - inside, 1))
    width = max(len(name) for name, _, _ in rows)
    lines = [
        f"  {name:{width}} {seconds:8.2f}{f'  ({times} times)' if times > 1 else ''}" for name, seconds, times in rows
    ]
    return "\n".join([f"Seconds that this process spent in each phase, {total:.2f} in total:", *lines])


def _say() -> None:
    messages.info(text())

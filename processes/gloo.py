"""The end of gloo's work, which comes a little after the end of a collective.

A worker thread of a gloo group lets go of a collective's tensors after it has told the waiting thread that all is done,
and needs the interpreter for those that Python has seen. Python that ends in that moment ends the worker too, inside a
destructor of C++, which aborts the process: "terminate called without an active exception". Destroying the groups does
not end their workers while a strategy, a wrapped model or the user still holds one.
"""

from __future__ import annotations

import time
from pathlib import Path

_THREADS = Path("/proc/self/task")
_NAME = "pt_gloo"
_PAUSE_SECONDS = 0.002


def let_go(seconds: float = 10.0) -> None:
    """Return when all workers of gloo are asleep and hold nothing of Python's; where Linux does not tell, soon.

    A worker that waited for the interpreter gets it during the pause. One that slept through it has nothing to do, or
    waits for another process.

    Args:
        seconds: how long to wait at most.
    """
    deadline, before = time.monotonic() + seconds, None
    while ((asleep := _asleep()) is None or asleep != before) and time.monotonic() < deadline:
        before = asleep
        time.sleep(_PAUSE_SECONDS)


def _asleep() -> dict[str, str] | None:
    """How often each worker has gone to sleep, by the thread's number; None if one is awake."""
    found = {}
    for thread in _THREADS.glob("*/status"):
        try:
            status = dict(line.split(":\t", 1) for line in thread.read_text().splitlines() if ":\t" in line)
        except OSError:  # it has just ended
            continue
        if status.get("Name", "").startswith(_NAME):
            if not status["State"].startswith("S"):
                return None
            found[thread.parent.name] = status.get("voluntary_ctxt_switches", "")
    return found

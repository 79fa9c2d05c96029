"""Wait until gloo's worker threads are idle, which is slightly later than the end of a collective.

A worker thread of a gloo group first reports that the collective is done, and then releases its tensors. It needs the
interpreter to release tensors that Python has seen. If Python exits at that moment, it ends the worker inside a C++
destructor, which aborts the process: "terminate called without an active exception". Destroying the groups does not
end their workers while a strategy, a wrapped model or the user still holds a group.
"""

from __future__ import annotations

import time
from pathlib import Path

_THREADS = Path("/proc/self/task")
_NAME = "pt_gloo"
_PAUSE_SECONDS = 0.002


def let_go(seconds: float = 10.0) -> None:
    """Return when all gloo workers sleep and hold no Python object; soon if this is not Linux, which lists threads.

    A worker that is waiting for the interpreter gets it during the pause. A worker that sleeps through the pause has
    nothing to do, or is waiting for another process.

    Args:
        seconds: how long to wait at most.
    """
    deadline, before = time.monotonic() + seconds, None
    while ((asleep := _asleep()) is None or asleep != before) and time.monotonic() < deadline:
        before = asleep
        time.sleep(_PAUSE_SECONDS)


def _asleep() -> dict[str, str] | None:
    """How often each worker has gone to sleep, by thread id; None if one is awake."""
    found = {}
    for thread in _THREADS.glob("*/status"):
        try:
            status = dict(line.split(":\t", 1) for line in thread.read_text().splitlines() if ":\t" in line)
        except OSError:  # the thread has just ended
            continue
        if status.get("Name", "").startswith(_NAME):
            if not status["State"].startswith("S"):
                return None
            found[thread.parent.name] = status.get("voluntary_ctxt_switches", "")
    return found

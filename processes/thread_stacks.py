"""Collect the stack traces of all threads in this process, to report on a run that hangs."""

from __future__ import annotations

import sys
import threading
import traceback

#: Name prefix of Paceline's own threads; their stack traces are irrelevant to the run.
OURS = "paceline-"


def stacks() -> str:
    """Return all threads' stack traces as text, the main thread's first; each trace ends with its innermost line."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        name = threads[ident].name if ident in threads else f"thread {ident}"
        if not name.startswith(OURS):
            found.append(f"  {name}:\n{''.join(traceback.format_stack(frame)).rstrip()}")
    return "\n".join(found)

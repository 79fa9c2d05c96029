"""Collect the stacks of all threads in this process, to report on a run that hangs."""

from __future__ import annotations

import sys
import threading
import traceback

#: Name prefix of Paceline's own threads; their stacks say nothing about the run.
OURS = "paceline-"


def stacks() -> str:
    """Return the stacks of all threads as text, with the main thread first and the innermost line last."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        name = threads[ident].name if ident in threads else f"thread {ident}"
        if not name.startswith(OURS):
            found.append(f"  {name}:\n{''.join(traceback.format_stack(frame)).rstrip()}")
    return "\n".join(found)

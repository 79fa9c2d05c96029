"""Signals only set a flag; the loop ends the run at the next step boundary."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from ..loggers import messages

if TYPE_CHECKING:
    from .state import RunState

WATCHED = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def watch(state: RunState) -> Iterator[None]:
    """Note Ctrl-C and SIGTERM in ``state.signum`` while the context is open, then put the old handlers back.

    A second Ctrl-C interrupts at once, as does the first one while no step runs (data are prepared, a file is read).
    Outside the main thread, where Python delivers no signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            if state.signum == signum or state.stage is None:
                raise KeyboardInterrupt
            messages.info("Ctrl-C: finishing this step, then ending the run. Press it again to stop at once.")
        state.signum = signum

    before = {s: signal.getsignal(s) for s in WATCHED}
    for s in WATCHED:
        signal.signal(s, note)
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler if handler is not None else signal.SIG_DFL)


def interruption(signum: int) -> BaseException:
    """What a signal becomes once the step is finished."""
    return KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum)

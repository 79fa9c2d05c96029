"""Handle signals. A signal only sets a flag; the run ends at the next step boundary (see :mod:`.stop_agreement`)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, get_args

from .. import messages

if TYPE_CHECKING:
    from ..trainer.state import RunState

#: What a signal can do: end the run with a checkpoint, or also requeue the SLURM job.
Action = Literal["stop", "requeue"]
ACTIONS: tuple[Action, ...] = get_args(Action)
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


def check_signals(given: Any) -> dict[int, str | None]:
    """Check the ``Trainer(signals=...)`` argument and return the actions by signal number.

    Raises:
        ValueError: a signal or an action is unknown, or no program can catch the signal.
        TypeError: ``given`` is not a mapping.
    """
    if not isinstance(given, Mapping):
        raise TypeError(
            f"Trainer(signals={given!r}) does not map signals to actions. Pass a dict such as "
            "{'SIGUSR2': 'stop'}, whose values are 'stop', 'requeue' or None."
        )
    found: dict[int, str | None] = {}
    for name, action in given.items():
        if action not in (*ACTIONS, None):
            text = messages.unknown(f"Trainer(signals={{{name!r}: ...}}) action", str(action), ACTIONS)
            raise ValueError(f"{text} Pass None as the action to leave the signal alone.")
        found[_number(name)] = action
    return found


def _number(name: Any) -> int:
    numbers = {s.name: s for s in signal.Signals}
    known = numbers.get(name) if isinstance(name, str) else next((s for s in signal.Signals if s == name), None)
    if known is None:
        raise ValueError(messages.unknown("Trainer(signals=...) signal", str(name), sorted(numbers)))
    if known.name in ("SIGKILL", "SIGSTOP"):
        raise ValueError(f"Trainer(signals={{{name!r}: ...}}): no program can catch {known.name}. Leave {name!r} out.")
    return int(known)


def actions(given: Mapping[int, str | None]) -> dict[int, str]:
    """Return the action of each signal in a run.

    By default, SIGINT and SIGTERM stop the run, and SLURM's SIGUSR1 also requeues the job. Signals that the program
    ignores, or whose handler was not set from Python, are left alone, and so is SLURM's SIGUSR1 if the user has a
    handler for it.
    """
    wanted: dict[int, str | None] = {signal.SIGINT: "stop", signal.SIGTERM: "stop"}
    requeue = getattr(signal, "SIGUSR1", None)
    if requeue is not None and "SLURM_JOB_ID" in os.environ and signal.getsignal(requeue) == signal.SIG_DFL:
        wanted[requeue] = "requeue"
    wanted |= given
    handled = {number: signal.getsignal(number) for number in wanted}
    return {n: action for n, action in wanted.items() if action and handled[n] not in (None, signal.SIG_IGN)}


@contextmanager
def watch(state: RunState, wanted: Mapping[int, str]) -> Iterator[None]:
    """Context manager that records the first of the ``wanted`` signals in ``state.signum``.

    The user's own handlers are called too, and restored on exit. A second Ctrl-C interrupts immediately, and so does
    the first one if no step is running (during data preparation, or while a file is read). If the first Ctrl-C
    triggered a checkpoint, that checkpoint is completed even after a second one. A signal that arrives too late for the
    loop to act on it is raised again for the previous handler. Outside the main thread, this does nothing, because
    Python delivers no signals there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    interrupted = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if signum == signal.SIGINT and not state.saving:
            if interrupted or state.stage is None:
                raise KeyboardInterrupt
            interrupted = True
            messages.info("Ctrl-C: the run stops after this step. Press Ctrl-C again to stop immediately.")
        state.signum, state.stop_requested = state.signum or signum, True
        theirs = before[signum]
        if callable(theirs) and theirs not in _DEFAULTS:
            theirs(signum, frame)

    try:
        for number in wanted:
            before[number] = signal.getsignal(number)
            signal.signal(number, note)
        yield
    finally:
        _put_back(before, note)
    if state.signum and before[state.signum] in _DEFAULTS:
        signal.raise_signal(state.signum)


def _put_back(before: Mapping[int, Any], ours: Callable[..., Any]) -> None:
    for number, handler in before.items():
        if signal.getsignal(number) is ours:  # otherwise the user set another handler during the run
            signal.signal(number, handler)


def interruption(signum: int) -> BaseException:
    """Return the exception to raise for a signal once the current step is finished."""
    return KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum)

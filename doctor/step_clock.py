"""A clock with hands for each part of a step: every moment of a run counts for exactly one of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

#: The parts of a step, and what they are called. ``other``: the loop's own code, and the rest of a user's own loop.
WORDS = {
    "data": "waiting for data",
    "copy": "copying to the device",
    "forward": "forward",
    "backward": "backward",
    "communication": "communication (exposed)",
    "optimizer": "optimizer",
    "callbacks": "callbacks and hooks",
    "logging": "logging",
    "evaluation": "validation",
    "checkpoint": "checkpoints",
    "compile": "compiling",
    "other": "everything else",
}
PARTS = tuple(WORDS)
INDEX = {name: index for index, name in enumerate(PARTS)}
#: Place of the number of steps begun in a row of the clock, behind the seconds of the parts.
STEPS = len(PARTS)
#: Parts in which nothing else counts: a validation has data and forwards of its own.
WHOLE = ("evaluation", "checkpoint")
#: Rows that are kept, the newest.
MOST_ROWS = 20_000


class Marks(Protocol):
    """Notes on a device's time line; see :class:`.device_clock.DeviceClock`."""

    def __call__(self, part: int) -> None:
        """From here on the device works for ``part``."""
        ...


class Clock:
    """Counts seconds for the part under way; a part inside of another interrupts it.

    Attributes:
        totals: seconds by part since the start, and the number of steps begun.
        rows: a copy of ``totals`` at each boundary between two steps.
        hooks: seconds by the hook that spent them, of the hooks that were given a name.
        marks: notes the same switches on the device's time line, in steps that are looked at; None in others.
    """

    __slots__ = ("current", "held", "hooks", "last", "marks", "rows", "totals")

    def __init__(self) -> None:
        self.totals: list[float] = [0.0] * (STEPS + 1)
        self.rows: deque[tuple[float, ...]] = deque(maxlen=MOST_ROWS)
        self.hooks: dict[str, float] = {}
        self.marks: Marks | None = None
        self.held = False
        self.current, self.last = INDEX["other"], perf_counter()

    def around(self, part: str, function: Callable[..., T]) -> Callable[..., T]:
        """``function``, whose time counts for ``part``."""
        index, totals = INDEX[part], self.totals

        def timed(*args: Any, **kwargs: Any) -> T:
            if self.held:
                return function(*args, **kwargs)
            before, now = self.current, perf_counter()
            totals[before] += now - self.last
            self.current, self.last = index, now
            if self.marks is not None:
                self.marks(index)
            try:
                return function(*args, **kwargs)
            finally:
                now = perf_counter()
                totals[self.current] += now - self.last
                self.current, self.last = before, now
                if self.marks is not None:
                    self.marks(before)

        return timed if part not in WHOLE else self._alone(index, function)

    def around_hook(self, part: str, name: str, function: Callable[..., T]) -> Callable[..., T]:
        """Like :meth:`around`; ``hooks`` also says what the hook of this name took itself, without other parts."""
        index, totals, hooks = INDEX[part], self.totals, self.hooks
        hooks.setdefault(name, 0.0)

        def timed(*args: Any, **kwargs: Any) -> T:
            if self.held:
                return function(*args, **kwargs)
            before = self.enter(index)
            begun = totals[index]
            try:
                return function(*args, **kwargs)
            finally:
                self.enter(before)
                hooks[name] += totals[index] - begun

        return timed

    def _alone(self, index: int, function: Callable[..., T]) -> Callable[..., T]:
        """For a part that nothing inside of it interrupts."""

        def timed(*args: Any, **kwargs: Any) -> T:
            if self.held:
                return function(*args, **kwargs)
            before, self.held = self.enter(index), True
            try:
                return function(*args, **kwargs)
            finally:
                self.held = False
                self.enter(before)

        return timed

    def enter(self, index: int) -> int:
        """Switch to a part; returns the one that was under way."""
        now, before = perf_counter(), self.current
        self.totals[before] += now - self.last
        self.current, self.last = index, now
        if self.marks is not None:
            self.marks(index)
        return before

    def boundary(self) -> None:
        """One step is over, and the next has not begun."""
        now, totals = perf_counter(), self.totals
        totals[self.current] += now - self.last
        self.last = now
        self.rows.append(tuple(totals))

    def cut(self) -> None:
        """The run ends here, maybe inside a step. Of that step only validations and checkpoints count."""
        self.enter(self.current)
        if self.rows:
            row = list(self.rows[-1])
            for name in WHOLE:
                row[INDEX[name]] = self.totals[INDEX[name]]
            self.rows.append(tuple(row))

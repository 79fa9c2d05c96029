"""A clock that assigns every moment of a run to exactly one part of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

T = TypeVar("T")

#: Parts of a step with their names in reports. ``other`` is the loop's own code, or the rest of a user's own loop.
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
#: Index in a clock's row of the number of steps begun, which follows the seconds of the parts.
STEPS = len(PARTS)
#: Parts that include everything inside them, because a validation has its own data and forward passes.
WHOLE = ("evaluation", "checkpoint")
#: Maximum number of rows to keep; the oldest rows are dropped.
MOST_ROWS = 20_000


class Clock:
    """Adds elapsed time to the current part; time in a nested part is not added to the surrounding part.

    Attributes:
        totals: seconds of each part since the start, followed by the number of steps that have begun.
        rows: a copy of ``totals`` at each boundary between two steps.
        hooks: seconds by hook name.
        marks: function (:class:`.device_clock.DeviceClock`) that records on the device when each part begins; None in
            steps that are not measured on the device.
    """

    __slots__ = ("current", "held", "hooks", "last", "marks", "rows", "totals")

    def __init__(self) -> None:
        self.totals: list[float] = [0.0] * (STEPS + 1)
        self.rows: deque[tuple[float, ...]] = deque(maxlen=MOST_ROWS)
        self.hooks: dict[str, float] = {}
        self.marks: Callable[[int], None] | None = None
        self.held = False
        self.current, self.last = INDEX["other"], perf_counter()

    def around(self, part: str, function: Callable[..., T]) -> Callable[..., T]:
        """Return a version of ``function`` whose duration counts toward ``part``."""
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
        """Like :meth:`around`, but also adds the hook's own time, without nested parts, to ``hooks``."""
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
        """Wrap ``function`` so that its full duration, including timed parts inside it, counts toward one part."""

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
        """Switch to a part; return the previous part."""
        now, before = perf_counter(), self.current
        self.totals[before] += now - self.last
        self.current, self.last = index, now
        if self.marks is not None:
            self.marks(index)
        return before

    def boundary(self) -> None:
        """Mark the boundary between two steps."""
        now, totals = perf_counter(), self.totals
        totals[self.current] += now - self.last
        self.last = now
        self.rows.append(tuple(totals))

    def cut(self) -> None:
        """End the run. If a step is unfinished, only its validations and checkpoints are included."""
        self.enter(self.current)
        if self.rows:
            row = list(self.rows[-1])
            for name in WHOLE:
                row[INDEX[name]] = self.totals[INDEX[name]]
            self.rows.append(tuple(row))

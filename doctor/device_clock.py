"""Measures how long the parts of a step take on a GPU, with events that the host never waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from .step_clock import PARTS

#: One step in this many is measured. An event costs the host about 2 microseconds, and a step needs about ten events.
EVERY = 8


class DeviceClock:
    """Uses events to record when the device reaches each part of a step.

    Events are queued in the stream between the kernels, so the time from one event to the next is the time that the
    device spent on a part, including waits for the host. A step's events are read some steps later, once the step's
    last event has completed.

    Args:
        event: function that creates an event with ``record()``, ``query()`` and ``elapsed_time(other)`` in ms.

    Attributes:
        seconds: seconds by part, summed over all steps that have been read.
        steps: number of steps that have been read.
    """

    def __init__(self, event: Callable[[], Any]) -> None:
        self._event = event
        self._open: list[tuple[int, Any]] = []
        self._waiting: deque[list[tuple[int, Any]]] = deque()
        self._free: list[Any] = []
        self.seconds: list[float] = [0.0] * len(PARTS)
        self.steps = 0

    def __call__(self, part: int) -> None:
        """Record the moment when the device begins ``part``."""
        event = self._free.pop() if self._free else self._event()
        event.record()
        self._open.append((part, event))

    def close(self) -> None:
        """End a measured step."""
        if len(self._open) > 1:
            self._waiting.append(self._open)
        self._open = []
        self.read()

    def read(self) -> None:
        """Read the steps that the device has finished."""
        while self._waiting and self._waiting[0][-1][1].query():
            marks = self._waiting.popleft()
            for (part, event), (_, following) in pairwise(marks):
                self.seconds[part] += event.elapsed_time(following) / 1000
            self.steps += 1
            self._free += [event for _, event in marks]

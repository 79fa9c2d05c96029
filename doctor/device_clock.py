"""The same parts on a GPU's time line, measured by events that the host never waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from .step_clock import PARTS

#: One step in so many is looked at: an event costs the host about 2 microseconds, a step takes some ten of them.
EVERY = 8


class DeviceClock:
    """Notes with events when the device comes to each part of a step.

    An event stands in the queue of the stream between the kernels, so that the time from one to the next is what the
    device spent on a part, waiting for the host included. They are read steps later, when the last one has passed.

    Args:
        event: makes an event that has ``record()``, ``query()`` and ``elapsed_time(other)`` in ms; CUDA's if None.

    Attributes:
        seconds: by part, of all steps that were read.
        steps: how many those are.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        self._event = event or _cuda_event
        self._open: list[tuple[int, Any]] = []
        self._waiting: deque[list[tuple[int, Any]]] = deque()
        self._free: list[Any] = []
        self.seconds: list[float] = [0.0] * len(PARTS)
        self.steps = 0

    def __call__(self, part: int) -> None:
        """From here on the device works for ``part``."""
        event = self._free.pop() if self._free else self._event()
        event.record()
        self._open.append((part, event))

    def close(self) -> None:
        """A step that was looked at is over."""
        if len(self._open) > 1:
            self._waiting.append(self._open)
        self._open = []
        self.read()

    def read(self) -> None:
        """Count the steps that the device is done with."""
        while self._waiting and self._waiting[0][-1][1].query():
            marks = self._waiting.popleft()
            for (part, event), (_, following) in pairwise(marks):
                self.seconds[part] += event.elapsed_time(following) / 1000
            self.steps += 1
            self._free += [event for _, event in marks]


def _cuda_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)

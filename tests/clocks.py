"""A clock that goes on only where a test says so, however busy the machine is: ``from clocks import Clock``."""

from __future__ import annotations


class Clock:
    """Stands for ``perf_counter`` or ``monotonic``. Of a process that is forked, it is another one from then on.

    Args:
        tick: seconds that each reading takes.

    Attributes:
        now: what it says.
    """

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let so much time pass, at once."""
        self.now += seconds

"""``profiler="simple"``: a table of the time that each action took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from .base import Profiler

#: Maximum number of actions that a split lists; the others are combined.
MOST_PARTS = 9


class _Running:
    """A running action: its start time, and the seconds spent in nested actions."""

    __slots__ = ("begun", "inside", "name")

    def __init__(self, name: str) -> None:
        self.name, self.inside, self.begun = name, 0.0, time.perf_counter()


class SimpleProfiler(Profiler):
    """Measures the total time of each action.

    Args:
        dirpath: see :class:`Profiler`.
        filename: see :class:`Profiler`.
        extended: also show each action's number of calls, mean time and percentage of the total.

    Attributes:
        recorded_durations: the duration of each call in seconds, by action.
        start_time: the ``time.perf_counter()`` value when the run began.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.recorded_durations: dict[str, list[float]] = {}
        self._running: list[_Running] = []
        self._own: dict[str, float] = {}
        self.start_time = time.perf_counter()

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | Path | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self.recorded_durations, self._running, self._own, self.start_time = {}, [], {}, time.perf_counter()

    def start(self, action_name: str) -> None:
        if any(one.name == action_name for one in self._running):
            raise ValueError(
                f"Profiler.start({action_name!r}): an action with that name is already running. Call "
                f"stop({action_name!r}) first, or give the inner action another name."
            )
        self._running.append(_Running(action_name))

    def stop(self, action_name: str) -> None:
        now, running = time.perf_counter(), self._running
        at = len(running) - 1
        while at >= 0 and running[at].name != action_name:
            at -= 1
        if at < 0:
            raise self._unknown(action_name)
        action = running.pop(at)
        seconds = now - action.begun
        self.recorded_durations.setdefault(action_name, []).append(seconds)
        self._own[action_name] = self._own.get(action_name, 0.0) + max(0.0, seconds - action.inside)
        if at:
            running[at - 1].inside += seconds

    def split(self) -> dict[str, float]:
        """Return each action's seconds, excluding nested actions, and the seconds outside all actions."""
        largest = sorted(self._own.items(), key=lambda item: -item[1])
        found = dict(largest[:MOST_PARTS])
        if len(largest) > MOST_PARTS:
            found["other actions"] = sum(seconds for _, seconds in largest[MOST_PARTS:])
        found["no action"] = max(0.0, time.perf_counter() - self.start_time - sum(self._own.values()))
        return found if largest else {}

    def summary(self) -> str:
        whole = time.perf_counter() - self.start_time
        times = sorted(self.recorded_durations.items(), key=lambda item: -sum(item[1]))
        if not self.extended:
            header = ("Action", "Mean duration (s)", "Total time (s)")
            rows = [(name, f"{sum(t) / len(t):.5}", f"{sum(t):.5}") for name, t in times]
        else:
            header = ("Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %")
            calls = sum(len(t) for _, t in times)
            rows = [("Total", "-", str(calls), f"{whole:.5}", "100 %")]
            rows += [
                (name, f"{sum(t) / len(t):.5}", str(len(t)), f"{sum(t):.5}", f"{100 * sum(t) / whole:.5}")
                for name, t in times
            ]
        title = f"{self._stage.upper()} Profiler Report" if self._stage else "Profiler Report"
        return f"{title}\n\n{_table(header, rows, total_first=self.extended)}\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, total_first: bool) -> str:
    """Draw a table; all columns but the first have the same width in every report."""
    longest = max(len(row[0]) for row in [header, *rows])
    widths = [(len("|  ") + longest) // 8 * 8 + 8, *[24] * (len(header) - 1)]
    drawn = [
        "".join(f"|  {text}".ljust(n) for text, n in zip(row, widths, strict=True)) + "|" for row in [header, *rows]
    ]
    rule = "-" * (len(drawn[0]) + 1)
    for at in (len(drawn), 2, 1, 0) if total_first else (len(drawn), 1, 0):
        drawn.insert(at, rule)
    return "\n".join(drawn)

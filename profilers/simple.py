"""``profiler="simple"``: a table of the time that each action took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from .. import messages
from .base import Profiler

#: Largest number of actions that a split names; the others are combined.
MOST_PARTS = 9


class _Running:
    """A running action: its start time, and the seconds of the actions nested in it."""

    __slots__ = ("begun", "inside", "name")

    def __init__(self, name: str) -> None:
        self.name, self.inside, self.begun = name, 0.0, perf_counter()


class SimpleProfiler(Profiler):
    """Add up the seconds of each action.

    Args:
        dirpath: see :class:`Profiler`.
        filename: see :class:`Profiler`.
        extended: also show each action's number of calls, mean time and percentage of the total.

    Attributes:
        recorded_durations: the seconds of each call, by action.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.recorded_durations: dict[str, list[float]] = {}
        self._running: list[_Running] = []
        self._own: dict[str, float] = {}
        self._begun = perf_counter()

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | Path | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self.recorded_durations, self._running, self._own, self._begun = {}, [], {}, perf_counter()

    def start(self, action_name: str) -> None:
        self._running.append(_Running(action_name))

    def stop(self, action_name: str) -> None:
        now, running = perf_counter(), self._running
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
        """Return each action's seconds without nested actions, and the seconds outside all actions."""
        largest = sorted(self._own.items(), key=lambda item: -item[1])
        found = dict(largest[:MOST_PARTS])
        if len(largest) > MOST_PARTS:
            found["other actions"] = sum(seconds for _, seconds in largest[MOST_PARTS:])
        found["no action"] = max(0.0, perf_counter() - self._begun - sum(self._own.values()))
        return found if largest else {}

    def summary(self) -> str:
        whole = perf_counter() - self._begun
        times = sorted(self.recorded_durations.items(), key=lambda item: -sum(item[1]))
        header = ("Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %")
        rows = [("Total", "-", str(sum(len(t) for _, t in times)), f"{whole:.5g}", "100 %")]
        rows += [
            (name, f"{sum(t) / len(t):.5g}", str(len(t)), f"{sum(t):.5g}", f"{100 * sum(t) / whole:.5g}")
            for name, t in times
        ]
        if not self.extended:
            header, *rows = [(name, mean, total) for name, mean, _, total, _ in (header, *rows[1:])]
        title = f"{self._stage.upper()} Profiler Report" if self._stage else "Profiler Report"
        return f"{title}\n{_table(header, rows)}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = messages.table([header, *rows]).splitlines()
    rule = "-" * max(map(len, lines))
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])

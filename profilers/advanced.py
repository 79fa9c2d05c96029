"""``profiler="advanced"``: cProfile for each action."""

from __future__ import annotations

import cProfile
import io
import pstats
from pathlib import Path

from .base import Profiler


class AdvancedProfiler(Profiler):
    """Records the number of calls and the time of every Python function that runs during an action.

    A call counts toward the innermost running action. The profiler makes a step several times slower, so compare
    functions with each other and do not rely on absolute times.

    Args:
        dirpath: see :class:`Profiler`.
        filename: see :class:`Profiler`.
        line_count_restriction: the number (int) or fraction (float) of lines to keep in an action's table.
        dump_stats: also write one ``.prof`` file per action with cProfile's results, for visualization tools.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self.profiled_actions: dict[str, cProfile.Profile] = {}
        self._open: list[str] = []

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | Path | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self._pause()
        self.profiled_actions, self._open = {}, []

    def start(self, action_name: str) -> None:
        self._pause()  # a process can have only one active profiler
        self._open.append(action_name)
        self.profiled_actions.setdefault(action_name, cProfile.Profile()).enable()

    def stop(self, action_name: str) -> None:
        if action_name not in self._open:
            raise self._unknown(action_name)
        self._pause()
        del self._open[len(self._open) - 1 - self._open[::-1].index(action_name)]
        if self._open:
            self.profiled_actions[self._open[-1]].enable()

    def _pause(self) -> None:
        if self._open:
            self.profiled_actions[self._open[-1]].disable()

    def summary(self) -> str:
        parts = []
        for name, profile in self.profiled_actions.items():
            if not profile.getstats():
                continue
            stats = pstats.Stats(profile, stream=(text := io.StringIO()))
            stats.strip_dirs().sort_stats("cumulative").print_stats(self.line_count_restriction)
            parts.append(f"Profile stats for: {name}\n{text.getvalue().rstrip()}")
        title = f"{self._stage.upper()} Profiler Report" if self._stage else "Profiler Report"
        return "\n\n".join([title, *parts]) if parts else ""

    def describe(self) -> None:
        super().describe()
        for name, profile in self.profiled_actions.items() if self.dump_stats else ():
            if profile.getstats():
                safe = "".join(c if c.isalnum() or c in "._" else "_" for c in name).strip("_")
                profile.dump_stats(self.path(".prof", safe))

    def teardown(self, stage: str | None) -> None:
        self._pause()
        self._open = []
        super().teardown(stage)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "profiled_actions": {}, "_open": []}

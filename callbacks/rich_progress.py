"""The default progress bar, drawn with rich."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from .. import messages
from .progress import (
    Bar,
    DrawnProgressBar,
    PlainLines,
    Surface,
    ending_line,
    filled,
    is_terminal,
    metric_texts,
    notebook_display,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleRenderable
    from rich.table import Table

#: Terminal columns that a row needs in addition to the bar.
_BESIDE_THE_BAR = 60


@dataclass(frozen=True)
class RichProgressBarTheme:
    """The look of a :class:`RichProgressBar`: rich styles (``"green"``, ``"bold #ff8800"``) and formats.

    Args:
        description: style of the text before the bar.
        progress_bar: style of the completed part.
        progress_bar_finished: style of a full bar.
        progress_bar_pulse: style of a bar whose length is unknown.
        batch_progress: style of the batch count.
        time: style of the elapsed and remaining time.
        processing_speed: style of the speed.
        metrics: style of the metrics.
        metrics_text_delimiter: text between two metrics.
        metrics_format: format of metrics that are floats; the default shows four significant digits.
    """

    description: str = ""
    progress_bar: str = "#6206E0"
    progress_bar_finished: str = "#6206E0"
    progress_bar_pulse: str = "#6206E0"
    batch_progress: str = ""
    time: str = "dim"
    processing_speed: str = "dim"
    metrics: str = "italic"
    metrics_text_delimiter: str = "  "
    metrics_format: str = "#.4g"

    def __post_init__(self) -> None:
        try:
            format(1.0, self.metrics_format)
        except ValueError as error:
            raise ValueError(
                f"RichProgressBarTheme: metrics_format={self.metrics_format!r} cannot format a float: {error}. "
                'Use a format such as ".3f".'
            ) from None


class RichProgressBar(DrawnProgressBar):
    """Progress bar drawn with rich in a terminal or notebook; to files and pipes, it writes occasional plain lines.

    Nested bars (validation inside an epoch) are drawn below each other, with the metrics at the bottom. A finished
    epoch leaves one line. Other output appears above the bars.

    Args:
        refresh_rate: minimum number of batches between two redraws; 0 disables the bar. Bars are drawn at most ten
            times a second.
        leave: keep the full bar of every epoch and evaluation on the screen instead of a single line per epoch.
        theme: colors and formats.
        console_kwargs: arguments of rich's ``Console``, such as ``{"stderr": True}`` or ``{"force_terminal": True}``.

    Example::

        class MyBar(RichProgressBar):
            def get_metrics(self, trainer, pl_module):
                metrics = super().get_metrics(trainer, pl_module)
                metrics.pop("v_num", None)
                return metrics

        trainer = Trainer(callbacks=[MyBar(leave=True)])
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(refresh_rate, leave)
        if theme is not None and not isinstance(theme, RichProgressBarTheme):
            raise TypeError(
                f"RichProgressBar: theme={theme!r} is {messages.a(theme)}. "
                'Pass a RichProgressBarTheme, such as RichProgressBarTheme(progress_bar="green").'
            )
        self._theme = theme or RichProgressBarTheme()
        self._console_kwargs = dict(console_kwargs or {})

    @property
    def theme(self) -> RichProgressBarTheme:
        """Colors and formats."""
        return self._theme

    def _make_surface(self) -> Surface:
        from rich.console import Console

        display = notebook_display()
        if display is not None:
            return _Notebook(display, self._theme, self._leave)
        console = Console(**self._console_kwargs)
        if console.is_dumb_terminal or not _moves_cursor(console, self._console_kwargs):
            return PlainLines(lambda: console.file, self.plain_seconds)
        return _Terminal(console, self._theme, self._leave)


def _moves_cursor(console: Console, asked: Mapping[str, Any]) -> bool:
    """Return True if the cursor can be moved. ``FORCE_COLOR``, which CI services set, does not imply that."""
    return console.is_terminal and (bool(asked.get("force_terminal")) or is_terminal(console.file))


class _Terminal(Surface):
    """Rows at the bottom of a terminal, redrawn in place without rich's refresh thread."""

    seconds = 0.1
    immediate = True

    def __init__(self, console: Console, theme: RichProgressBarTheme, leave: bool) -> None:
        from rich.live import Live

        self._console = console
        self._theme = theme
        self._leave = leave
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def draw(self, bars: Sequence[Bar], metrics: Mapping[str, Any]) -> None:
        self._live.update(_rows(bars, metrics, self._theme, self._console.width), refresh=True)

    def finish(self, bars: Sequence[Bar], metrics: Mapping[str, Any]) -> bool:
        if not self._leave:
            from rich.console import Group

            line = ending_line(bars, metrics, self._console.width, self._theme.metrics_format)
            if line:
                self._live.update(Group(), refresh=True)
                self.write(line)
            return bool(line)
        if bars[-1].stage == "sanity_check":
            return False
        self._live.update(_rows(bars[:-1], {}, self._theme, self._console.width))
        self._console.print(_rows(bars[-1:], metrics, self._theme, self._console.width))
        return True

    def write(self, text: str) -> None:
        self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


class _Notebook(Surface):
    """Rows in the output of a notebook cell, replaced in place, without widgets."""

    seconds = 0.25
    immediate = True

    def __init__(self, display: Callable[..., Any], theme: RichProgressBarTheme, leave: bool) -> None:
        self._display = display
        self._theme = theme
        self._leave = leave
        self._handle: Any = None

    @property
    def _width(self) -> int:
        from rich import get_console

        return get_console().width

    def draw(self, bars: Sequence[Bar], metrics: Mapping[str, Any]) -> None:
        self._show(_rows(bars, metrics, self._theme, self._width))

    def _show(self, rows: ConsoleRenderable) -> None:
        if self._handle is None:
            self._handle = self._display(rows, display_id=True)
        else:
            self._handle.update(rows)

    def finish(self, bars: Sequence[Bar], metrics: Mapping[str, Any]) -> bool:
        from rich.text import Text

        line = ending_line(bars, metrics, self._width, self._theme.metrics_format)
        if not line:
            return False
        if self._leave:
            self.draw(bars, metrics)
        else:
            self._show(Text(line, end=""))
        self._handle = None
        return True

    def write(self, text: str) -> None:
        sys.stdout.write(text)

    def close(self) -> None:
        self._handle = None


def _rows(bars: Sequence[Bar], metrics: Mapping[str, Any], theme: RichProgressBarTheme, width: int) -> Table:
    """Build a table of the bars, with the metrics below them."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    for bar in bars:
        picture = ProgressBar(
            total=bar.total,
            completed=min(bar.n, bar.total) if bar.total else bar.n,
            width=max(10, min(40, width - _BESIDE_THE_BAR)),
            pulse=bar.total is None,
            complete_style=theme.progress_bar,
            finished_style=theme.progress_bar_finished,
            pulse_style=theme.progress_bar_pulse,
        )
        texts = (
            (bar.count_text, theme.batch_progress),
            (bar.time_text, theme.time),
            (bar.speed_text, theme.processing_speed),
        )
        grid.add_row(Text(bar.description, theme.description), picture, *(Text(*each, no_wrap=True) for each in texts))
    whole = Table.grid()
    whole.add_row(grid)
    for line in filled(metric_texts(metrics, theme.metrics_format), theme.metrics_text_delimiter, width):
        whole.add_row(Text(line, theme.metrics))
    return cast("Table", whole)

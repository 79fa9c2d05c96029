"""Progress bar drawn with tqdm."""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

from .progress import (
    LEAST_SECONDS,
    Bar,
    DrawnProgressBar,
    PlainLines,
    Surface,
    ending_line,
    is_terminal,
    metric_texts,
    notebook_display,
)

if TYPE_CHECKING:
    from tqdm import tqdm


class TQDMProgressBar(DrawnProgressBar):
    """Progress bar drawn with tqdm in a terminal or as a notebook widget; plain lines in files and pipes.

    A finished epoch leaves one line. To change a bar, override its ``init_*_tqdm`` method: call the base method and
    change its result.

    Args:
        refresh_rate: minimum number of batches between two redraws; 0 disables the bar. The environment variable
            ``TQDM_MINITERS`` can raise this number. Bars are drawn at most ten times a second.
        process_position: for runs that share a terminal, the number of runs whose bars are above this run's bars; two
            lines are left free for each of them.
        leave: keep the full bar of every epoch and evaluation on the screen instead of a single line per epoch.

    Raises:
        ModuleNotFoundError: if tqdm is not installed.
    """

    #: Layout of every bar, for ``tqdm(bar_format=)``.
    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        try:
            missing = importlib.util.find_spec("tqdm") is None
        except ValueError:
            missing = sys.modules.get("tqdm") is None
        if missing:
            raise ModuleNotFoundError(
                "TQDMProgressBar needs the tqdm package, which is not installed. Run `pip install tqdm`, or use "
                "RichProgressBar, which needs no additional package."
            )
        super().__init__(refresh_rate, leave)
        if isinstance(process_position, bool) or not isinstance(process_position, int) or process_position < 0:
            raise ValueError(
                f"TQDMProgressBar: process_position={process_position!r} must be a non-negative integer (the number "
                "of runs in the same terminal whose bars are above this run's bars)."
            )
        if refresh_rate > 0:
            self._refresh_rate = max(refresh_rate, _miniters())
        self._process_position = process_position
        #: The last bar of each kind, which can be read after the run too.
        self._bars_made: dict[str, tqdm] = {}
        self._file: io.TextIOBase | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_bars_made": {}, "_file": None}

    @property
    def process_position(self) -> int:
        """The number of runs that share the terminal and whose bars are above this run's bars."""
        return self._process_position

    def init_sanity_tqdm(self) -> tqdm:
        """Create the sanity check bar."""
        return self._tqdm(self.sanity_check_description, leave=False)

    def init_train_tqdm(self) -> tqdm:
        """Create the training bar. All epochs share one bar unless ``leave`` is set."""
        return self._tqdm(self.train_description, leave=True)

    def init_validation_tqdm(self) -> tqdm:
        """Create the validation bar, below the training bar if there is one."""
        inside = self.trainer.state.fn == "fit"
        return self._tqdm(self.validation_description, leave=self._leave or not inside, below=int(inside))

    def init_test_tqdm(self) -> tqdm:
        """Create the test bar."""
        return self._tqdm(self.test_description, leave=True)

    def init_predict_tqdm(self) -> tqdm:
        """Create the prediction bar."""
        return self._tqdm(self.predict_description, leave=True)

    @property
    def train_progress_bar(self) -> tqdm:
        """The tqdm bar for training."""
        return self._made("train")

    @property
    def val_progress_bar(self) -> tqdm:
        """The tqdm bar for validation and for the sanity check."""
        return self._made("validate")

    @property
    def test_progress_bar(self) -> tqdm:
        """The tqdm bar for testing."""
        return self._made("test")

    @property
    def predict_progress_bar(self) -> tqdm:
        """The tqdm bar for prediction."""
        return self._made("predict")

    def _made(self, stage: str) -> tqdm:
        if stage not in self._bars_made:
            raise TypeError(
                f"{type(self).__name__} has not drawn the bar for {stage!r} yet. A bar is created when its loop "
                "runs. Override an init_*_tqdm method to change a bar."
            )
        return self._bars_made[stage]

    def _create(self, stage: str, visible: bool = True) -> tqdm:
        """Create a stage's tqdm bar; a bar that is not ``visible`` only counts batches."""
        self._file = None if visible else _Nowhere()
        make = {
            "sanity_check": self.init_sanity_tqdm,
            "train": self.init_train_tqdm,
            "validate": self.init_validation_tqdm,
            "test": self.init_test_tqdm,
            "predict": self.init_predict_tqdm,
        }[stage]
        made = self._bars_made["validate" if stage == "sanity_check" else stage] = make()
        return made

    def _tqdm(self, description: str, leave: bool, below: int = 0) -> tqdm:
        return tqdm_class()(
            desc=description,
            position=2 * self._process_position + below,
            leave=leave,
            dynamic_ncols=True,
            file=self._file or sys.stdout,
            bar_format=self.BAR_FORMAT,
            mininterval=0,
            miniters=1,
            smoothing=0.1,
        )

    def _make_surface(self) -> Surface:
        if notebook_display() is None and not is_terminal(sys.stdout):
            return _Plain(self)
        return _Tqdm(self, self._leave)


def _miniters() -> int:
    value = os.environ.get("TQDM_MINITERS", "1")
    try:
        return max(1, int(float(value)))
    except ValueError:
        raise ValueError(
            f"The environment variable TQDM_MINITERS={value!r} must be a number of batches. "
            "Set it to a number, or unset it."
        ) from None


def tqdm_class() -> Any:
    """Return tqdm's class for this output, changed to start no monitoring thread and not to show a speed too early."""
    if notebook_display() is not None and importlib.util.find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm as base
    else:
        from tqdm import tqdm as base
    return _changed(base)


@functools.cache
def _changed(base: Any) -> Any:
    def format_dict(self: Any) -> dict[str, Any]:
        known = base.format_dict.fget(self)  # type: ignore[attr-defined]
        too_short = known["elapsed"] < LEAST_SECONDS
        return {**known, "elapsed": 0, "rate": None} if too_short else known

    return type("tqdm", (base,), {"monitor_interval": 0, "format_dict": property(format_dict)})


class _Nowhere(io.TextIOBase):
    """Output for a bar that only counts: discards everything."""

    def write(self, text: str, /) -> int:
        return len(text)


class _Plain(PlainLines):
    """Writes plain lines and updates tqdm bars that only count, for programs that read the bars."""

    def __init__(self, callback: TQDMProgressBar) -> None:
        super().__init__(lambda: sys.stdout, callback.plain_seconds)
        self._callback = callback
        self._counting: dict[str, tqdm] = {}

    def draw(self, bars: Sequence[Bar], metrics: Mapping[str, Any]) -> None:
        self._count(bars)
        super().draw(bars, metrics)

    def _count(self, bars: Sequence[Bar]) -> None:
        for bar in bars:
            if bar.stage not in self._counting:
                self._counting[bar.stage] = self._callback._create(bar.stage, visible=False)
            counting = self._counting[bar.stage]
            counting.total, counting.n = bar.total, bar.n

    def finish(self, bars: Sequence[Bar], metrics: Mapping[str, Any]) -> bool:
        self._count(bars)
        if bars[-1].stage != "train":
            self._counting.pop(bars[-1].stage).close()
        return super().finish(bars, metrics)

    def close(self) -> None:
        for counting in self._counting.values():
            counting.close()
        self._counting.clear()


class _Tqdm(Surface):
    """Draws each progress bar with a tqdm bar, which is created when the progress bar is first drawn."""

    seconds = 0.1
    immediate = True

    def __init__(self, callback: TQDMProgressBar, leave: bool) -> None:
        self._leave = leave
        self._plain_descriptions = {
            "sanity_check": callback.sanity_check_description,
            "train": callback.train_description,
            "validate": callback.validation_description,
            "test": callback.test_description,
            "predict": callback.predict_description,
        }
        self._callback = callback
        #: For each stage, our bar (None once it has left its line) and the tqdm bar that shows it.
        self.drawn: dict[str, tuple[Bar | None, tqdm]] = {}

    def draw(self, bars: Sequence[Bar], metrics: Mapping[str, Any]) -> None:
        for bar in bars:
            drawn = self._tqdm_of(bar)
            if bar is bars[0]:
                drawn.set_postfix_str(_postfix(metrics, drawn), refresh=False)
            if bar.n > drawn.n:
                drawn.update(bar.n - drawn.n)
            else:
                drawn.refresh()

    def _tqdm_of(self, bar: Bar) -> tqdm:
        """Return the tqdm bar that shows ``bar``: its own, the previous epoch's, or a new one."""
        shown, drawn = self.drawn.get(bar.stage, (None, None))
        if drawn is None:
            drawn = self._callback._create(bar.stage)
        if shown is not bar:
            drawn.reset(bar.total)
            drawn.total = bar.total
            drawn.initial = drawn.n = drawn.last_print_n = bar.first
            drawn.start_t = drawn.last_print_t = time() - perf_counter() + bar.started
            if bar.description != self._plain_descriptions[bar.stage]:
                drawn.set_description(bar.description, refresh=False)
            self.drawn[bar.stage] = (bar, drawn)
        return drawn

    def finish(self, bars: Sequence[Bar], metrics: Mapping[str, Any]) -> bool:
        bar = bars[-1]
        if bar.stage == "train" and not self._leave:
            for stage, (_, drawn) in self.drawn.items():
                self.drawn[stage] = (None, drawn)
                drawn.clear()
            if "train" not in self.drawn:  # the epoch was too short to show
                self._callback._create("train", visible=False).close()
            counting = self._callback.train_progress_bar
            counting.total, counting.n = bar.total, bar.n
            sys.stdout.write(ending_line(bars, metrics, shutil.get_terminal_size().columns))
            return True
        if len(bars) > 1 and bar.stage not in self.drawn and not self._leave:
            return False  # too short to show
        self.draw(bars, metrics)
        self.drawn.pop(bar.stage)[1].close()
        for _, outer in self.drawn.values():
            outer.last_print_t = time()
        return True

    def write(self, text: str) -> None:
        tqdm_class().write(text, file=sys.stdout, end="")

    def close(self) -> None:
        for bar, drawn in self.drawn.values():
            if bar is None:
                drawn.leave = False
            drawn.close()
        self.drawn.clear()


def _postfix(metrics: Mapping[str, Any], drawn: tqdm) -> str:
    """Return the metrics that fit next to a bar of ten columns; if there were more, tqdm could cut a value in half."""
    texts, known = metric_texts(metrics), drawn.format_dict
    columns = known["ncols"]
    shown = ", ".join(texts)
    while texts and isinstance(columns, int):
        if len(drawn.format_meter(**{**known, "postfix": shown, "ncols": None})) <= columns:
            break
        texts.pop()
        shown = ", ".join([*texts, "..."])
    return shown

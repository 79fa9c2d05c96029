"""Base of all progress bars: what they show and when they are drawn.

``rich_progress.py`` and ``tqdm_progress.py`` define how bars look. A bar must not slow down training, so drawing is
limited: on a terminal, bars are drawn at most ten times a second, and drawing takes at most a tenth of the run's time.
A batch that draws nothing costs one call, one clock reading and two comparisons. No thread is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from math import exp, inf, isfinite
from time import perf_counter
from typing import IO, TYPE_CHECKING, Any, Protocol

from .. import messages
from .base import Callback

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer

#: The displayed speed is a moving average in which the weight of a batch falls to 37 % after this many seconds.
SPEED_SECONDS = 10.0
#: Shortest time in seconds from which a speed is computed.
LEAST_SECONDS = 0.1
#: Largest fraction of the time that drawing may take; above it, bars are drawn less often.
DRAW_FRACTION = 0.1


class ProgressBar(Callback):
    """Base class of all progress bars. A subclass's hooks read the batch counts and call :meth:`get_metrics`.

    To change only metrics or descriptions, subclass ``RichProgressBar`` instead.
    """

    monitors_metrics = True

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Trainer | None = None
        self._enabled = True
        self._dataloader_idx: int | None = None

    @property
    def trainer(self) -> Trainer:
        """The trainer whose run is shown."""
        if self._trainer is None:
            raise RuntimeError(
                f"{type(self).__name__}.trainer was read before a run began, so it is not set yet. Read it in setup() "
                "or a later hook."
            )
        return self._trainer

    @property
    def is_enabled(self) -> bool:
        """Whether anything is shown; False on all ranks except 0."""
        return self._enabled

    @property
    def is_disabled(self) -> bool:
        """The opposite of :attr:`is_enabled`."""
        return not self.is_enabled

    def enable(self) -> None:
        """Show the bars, starting with the next one."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing until :meth:`enable` is called."""
        self._enabled = False

    @property
    def sanity_check_description(self) -> str:
        """The text shown before the sanity check bar."""
        return "Sanity Checking"

    @property
    def train_description(self) -> str:
        """The text shown before the training bar, followed by the epoch number."""
        return "Epoch"

    @property
    def validation_description(self) -> str:
        """The text shown before the validation bar."""
        return "Validation"

    @property
    def test_description(self) -> str:
        """The text shown before the test bar."""
        return "Testing"

    @property
    def predict_description(self) -> str:
        """The text shown before the prediction bar."""
        return "Predicting"

    @property
    def total_train_batches(self) -> int | float:
        """The number of batches in a training epoch; ``inf`` if the loader has no length."""
        return self.trainer.num_training_batches

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """The number of batches in the current validation loader or sanity check; ``inf`` if the length is unknown."""
        trainer = self.trainer
        return self._of_loader(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    @property
    def total_test_batches_current_dataloader(self) -> int | float:
        """The number of batches in the current test loader; ``inf`` if the loader has no length."""
        return self._of_loader(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> int | float:
        """The number of batches in the current prediction loader; ``inf`` if the loader has no length."""
        return self._of_loader(self.trainer.num_predict_batches)

    @property
    def total_val_batches(self) -> int | float:
        """The total number of batches in all validation loaders; 0 if this epoch has no validation."""
        trainer, every = self.trainer, self.trainer.check_val_every_n_epoch or 1
        due = trainer.enable_validation and (trainer.current_epoch + 1) % every == 0
        return sum(trainer.num_val_batches) if due else 0

    def _of_loader(self, totals: Sequence[int | float]) -> int | float:
        idx = self._dataloader_idx or 0
        return totals[idx] if idx < len(totals) else inf

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Record the loader of a batch; return True if the previous batch came from a different loader."""
        changed = dataloader_idx != self._dataloader_idx
        self._dataloader_idx = dataloader_idx
        return changed

    def reset_dataloader_idx_tracker(self) -> None:
        """Forget the loader that :meth:`has_dataloader_changed` recorded."""
        self._dataloader_idx = None

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    def get_metrics(self, trainer: Trainer, pl_module: TrainingModule) -> dict[str, int | str | float]:
        """Return the metrics to show: values logged with ``prog_bar=True``, then ``v_num``, the logger's version.

        Override this method to add, remove or reformat metrics; you may change the dict that it returns. Numbers are
        formatted; strings are shown unchanged. The method is called only when the bar is drawn.
        """
        version = _version(trainer)
        standard: dict[str, int | str | float] = {} if version is None else {"v_num": version}
        return {**trainer.progress_bar_metrics, **standard}

    def print(
        self, *args: Any, sep: str | None = None, end: str | None = None, file: Any = None, flush: bool = False
    ) -> None:
        """Print above the bar, or to ``file`` if given, with the arguments of the built-in ``print``."""
        stream = sys.stdout if file is None else file
        if stream is not None:
            stream.write(_joined(args, sep, end))
            if flush:
                stream.flush()


def _joined(args: Sequence[Any], sep: str | None, end: str | None) -> str:
    return (" " if sep is None else sep).join(str(arg) for arg in args) + ("\n" if end is None else end)


def _version(trainer: Trainer) -> int | str | None:
    versions = [v for v in dict.fromkeys(logger.version for logger in trainer.loggers) if v not in (None, "")]
    if not versions:
        return None
    version = versions[0] if len(versions) == 1 else "_".join(map(str, versions))
    return version if isinstance(version, int) else str(version)[-4:]


class Bar:
    """One row of output: the progress and speed of a loop over batches. Times are ``perf_counter`` readings."""

    def __init__(self, stage: str, description: str, total: float, n: int, now: float) -> None:
        self.stage = stage
        self.description = description
        self.total: int | None = int(total) if isfinite(total) else None
        self.n = self.first = n
        self.started = now
        self._at = now
        self._batches = 0.0
        self._seconds = 0.0

    def advance(self, n: int, now: float) -> None:
        """Record that ``n`` batches are done."""
        weight = exp((self._at - now) / SPEED_SECONDS)
        self._batches = self._batches * weight + n - self.n
        self._seconds = self._seconds * weight + now - self._at
        self.n, self._at = n, now

    def resume(self, now: float) -> None:
        """Continue after a pause (such as validation) and exclude the pause from the speed."""
        self._at = now

    @property
    def speed(self) -> float | None:
        """Batches per second; None while the elapsed time is too short to measure the speed."""
        return self._batches / self._seconds if self._batches and self._seconds >= LEAST_SECONDS else None

    @property
    def count_text(self) -> str:
        """The batch count, such as ``"120/400"``, or ``"120"`` if the total is unknown."""
        return f"{self.n}" if self.total is None else f"{self.n}/{self.total}"

    @property
    def time_text(self) -> str:
        """The elapsed time and, if known, the remaining time, such as ``"0:12 < 0:28"``."""
        elapsed = clock_text(self._at - self.started)
        speed = self.speed
        if self.total is None or speed is None or self.n >= self.total:
            return elapsed
        return f"{elapsed} < {clock_text((self.total - self.n) / speed)}"

    @property
    def speed_text(self) -> str:
        """The speed, such as ``"10.2 it/s"``, or ``"12.5 s/it"`` if the speed is below one batch per second."""
        speed = self.speed
        if speed is None:
            return "-- it/s"
        return f"{speed:.1f} it/s" if speed >= 1 else f"{1 / speed:.1f} s/it"


def clock_text(seconds: float) -> str:
    """Format a duration: ``75`` becomes ``"1:15"``, and ``3700`` becomes ``"1:01:40"``."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def metric_text(value: Any, spec: str = "#.4g") -> str:
    """Format a float with constant width (four significant digits); other values are unchanged."""
    return format(value, spec) if isinstance(value, float) else str(value)


def metric_texts(metrics: Mapping[str, Any], spec: str = "#.4g") -> list[str]:
    """Format each metric as ``"name=value"``, in the same way for every surface."""
    return [f"{name}={metric_text(value, spec)}" for name, value in metrics.items()]


def filled(texts: Sequence[str], delimiter: str, width: int | None, indent: str = "") -> list[str]:
    """Join texts into lines of at most ``width`` columns without breaking a text; indent all lines but the first."""
    lines: list[str] = []
    for text in texts:
        longer = f"{lines[-1]}{delimiter}{text}" if lines else text
        if lines and width is not None and len(longer) > width:
            lines.append(indent + text)
        else:
            lines[-1:] = [longer]
    return lines


def ending_line(bars: Sequence[Bar], metrics: Mapping[str, Any], width: int | None = None, spec: str = "#.4g") -> str:
    """Return the line that a finished bar leaves behind, wrapped at ``width`` columns.

    A nested bar and the bar of the sanity check leave no line, so the result is an empty string.
    """
    ends_a_line = len(bars) == 1 and bars[0].stage != "sanity_check"
    return _line(bars[-1], metrics, width, spec) if ends_a_line else ""


def _line(bar: Bar, metrics: Mapping[str, Any], width: int | None = None, spec: str = "#.4g") -> str:
    percent = f" ({100 * bar.n // bar.total}%)" if bar.total else ""
    texts = [f"{bar.description}: {bar.count_text}{percent}", bar.time_text]
    texts += [bar.speed_text] if bar.speed is not None else []
    return "\n".join(filled([*texts, *metric_texts(metrics, spec)], "  ", width, indent="  ")) + "\n"


class Surface(Protocol):
    """Where bars are drawn: a terminal, a notebook, or lines in a file."""

    #: Shortest time between two drawings.
    seconds: float
    #: Whether a bar appears as soon as it is opened instead of after ``seconds``.
    immediate: bool

    def draw(self, bars: Sequence[Bar], metrics: Mapping[str, Any]) -> None:
        """Show the current state of the bars, outermost first."""
        ...

    def finish(self, bars: Sequence[Bar], metrics: Mapping[str, Any]) -> bool:
        """Finish the last of ``bars``, which is not drawn again; return True if it left something on the screen."""
        ...

    def write(self, text: str) -> None:
        """Print ``text`` above the bars."""
        ...

    def close(self) -> None:
        """Stop drawing and leave the terminal as other programs expect it. Can be called twice."""
        ...


class PlainLines(Surface):
    """Occasional plain lines, for output that goes to a file, a pipe or a batch system instead of a terminal.

    A line is written every ``seconds`` seconds and at the end of each training epoch, validation, test and prediction.
    The lines contain no control characters.
    """

    immediate = False

    def __init__(self, stream: Callable[[], IO[str] | None], seconds: float) -> None:
        self._stream = stream
        self.seconds = seconds

    def draw(self, bars: Sequence[Bar], metrics: Mapping[str, Any]) -> None:
        self.write(_line(bars[-1], metrics))

    def finish(self, bars: Sequence[Bar], metrics: Mapping[str, Any]) -> bool:
        line = ending_line(bars, metrics)
        if line:
            self.write(line)
        return bool(line)

    def write(self, text: str) -> None:
        stream = self._stream()
        if stream is None:
            return
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()

    def close(self) -> None:
        return None


class DrawnProgressBar(ProgressBar):
    """Progress bar drawn on the surface that a subclass creates in :meth:`_make_surface`.

    Args:
        refresh_rate: minimum number of batches between two redraws; 0 disables the bar. The surface also sets a minimum
            time between two redraws.
        leave: keep the full bar of every epoch and evaluation instead of a single line per epoch.
    """

    #: Seconds between two lines if the output is not a terminal.
    plain_seconds: float = 10.0

    def __init__(self, refresh_rate: int, leave: bool) -> None:
        super().__init__()
        if isinstance(refresh_rate, bool) or not isinstance(refresh_rate, int) or refresh_rate < 0:
            raise ValueError(
                f"{type(self).__name__}: refresh_rate={refresh_rate!r} must be a non-negative integer. Pass n to "
                "draw the bar at most once every n batches, or 0 for no bar."
            )
        self._refresh_rate = refresh_rate
        self._leave = bool(leave)
        self._surface: Surface | None = None
        self._train: Bar | None = None
        self._inner: Bar | None = None
        self._shown: Mapping[str, Any] = {}
        self._last = -1
        self._next = 0
        self._due = inf
        self._changed = 0.0
        if refresh_rate == 0:
            self._undefine(DrawnProgressBar, *_DRAWING_HOOKS)

    @property
    def refresh_rate(self) -> int:
        """Minimum number of batches between two redraws; 0 means no bar."""
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        return self._enabled and self._refresh_rate > 0

    def disable(self) -> None:
        super().disable()
        self._close()

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not trainer.is_global_zero:
            self._undefine(DrawnProgressBar, *_DRAWING_HOOKS)

    def print(
        self, *args: Any, sep: str | None = None, end: str | None = None, file: Any = None, flush: bool = False
    ) -> None:
        if self._surface is None or file is not None:
            super().print(*args, sep=sep, end=end, file=file, flush=flush)
        else:
            self._on_surface("write", _joined(args, sep, end))

    def _make_surface(self) -> Surface:
        """Return the surface for this run's bars. Called when the first bar opens."""
        raise NotImplementedError(f"{type(self).__name__} does not define where it draws. Define _make_surface().")

    # ---- the hooks of every batch -----------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._last = batch_idx
        if batch_idx >= self._next and perf_counter() >= self._due:
            self._draw()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if dataloader_idx != self._dataloader_idx:
            self._finish_inner()
            self._open_inner(dataloader_idx, 1)
        self._last = batch_idx
        if batch_idx >= self._next and perf_counter() >= self._due:
            self._draw()

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end

    # ---- the hooks of an epoch and of a run -------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        of = f"/{trainer.max_epochs - 1}" if trainer.max_epochs not in (None, -1) else ""
        description = f"{self.train_description} {trainer.current_epoch}{of}"
        self._train = self._open("train", description, self.total_train_batches, trainer.state.batch_idx + 1)
        self._draw_if_due()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if self._train is not None:
            if self._finish():
                self._train = None
            else:
                self._draw_if_due()

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._draw_last()
        self._close()

    def on_validation_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._open_inner(0, 0)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._finish_inner()
        if trainer.state.fn != "fit":
            self._close()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        if self._bars():
            self._draw(self._shown)
        self._close()

    def teardown(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        self._close()

    # ---- opening and finishing bars ---------------------------------------------------------------------------------

    def _bars(self) -> list[Bar]:
        return [bar for bar in (self._train, self._inner) if bar is not None]

    def _open(self, stage: str, description: str, total: float, n: int) -> Bar | None:
        if not self.is_enabled:
            return None
        now = perf_counter()
        if self._surface is None:
            self._surface = self._make_surface()
            self._due = now if self._surface.immediate else now + self._surface.seconds
        self._count_from(n)
        return Bar(stage, description, total, n, now)

    def _open_inner(self, dataloader_idx: int, n: int) -> None:
        """Start an evaluation loader's bar with ``n`` batches done, below the training bar if there is one."""
        self._dataloader_idx = dataloader_idx
        if self._train is not None:
            self._train.advance(self._last + 1, perf_counter())
        stage = self.trainer.state.stage or "validate"
        of_bar, of_trainer = _EVALUATIONS[stage]
        description, totals = getattr(self, of_bar), getattr(self.trainer, of_trainer)
        several = f" DataLoader {dataloader_idx}" if len(totals) > 1 else ""
        self._inner = self._open(stage, description + several, self._of_loader(totals), n)
        self._draw_if_due()

    def _finish_inner(self) -> None:
        """Finish the evaluation loader's bar and return to the training bar if there is one."""
        if self._inner is None:
            return
        if not self._finish() and self._train is None:
            self._draw_last()
        self._inner = None
        if self._train is not None:
            self._count_from(self._train.n)
            self._train.resume(perf_counter())
            self._draw_if_due()

    def _finish(self) -> bool:
        """Finish the innermost bar; return True if it left something on the screen and is not drawn again."""
        start = perf_counter()
        bars = self._bars()
        bars[-1].advance(self._last + 1, start)
        stays = bool(self._on_surface("finish", bars, self._metrics(bars[-1])))
        if stays:
            self._after_drawing(start)
        return stays

    def _count_from(self, n: int) -> None:
        self._last = n - 1
        self._next = self._multiple_after(n)

    def _multiple_after(self, n: int) -> int:
        """Return the index of the batch that completes the next multiple of ``refresh_rate`` after ``n`` batches."""
        return n + self._refresh_rate - n % self._refresh_rate - 1

    # ---- drawing ----------------------------------------------------------------------------------------------------

    def _metrics(self, bar: Bar) -> Mapping[str, Any]:
        if bar.stage in ("sanity_check", "predict"):
            return {}
        self._shown = self.get_metrics(self.trainer, self.trainer.training_module)
        return self._shown

    def _draw(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Draw the bars and set the earliest time of the next redraw."""
        start = perf_counter()
        bars = self._bars()
        bars[-1].advance(self._last + 1, start)
        self._on_surface("draw", bars, self._metrics(bars[-1]) if metrics is None else metrics)
        self._after_drawing(start)
        self._next = self._multiple_after(self._last + 1)

    def _draw_if_due(self) -> None:
        """Draw after a bar was opened or closed, if a redraw is due or enough time has passed since the last change."""
        now = perf_counter()
        surface = self._surface
        if surface is not None and (now >= self._due or (surface.immediate and now - self._changed >= surface.seconds)):
            self._draw()
        self._changed = now

    def _draw_last(self) -> None:
        """Draw the final state of the bars, except for plain lines, which are already written."""
        if self._surface is not None and self._surface.immediate and self._bars():
            self._draw()

    def _after_drawing(self, start: float) -> None:
        if self._surface is not None:
            end = perf_counter()
            self._due = end + max(self._surface.seconds, (end - start) / DRAW_FRACTION)

    def _on_surface(self, method: str, *args: Any) -> Any:
        """Call a method of the surface. If the output is gone (a closed pipe), warn once and continue without a bar."""
        if self._surface is None:
            return None
        try:
            return getattr(self._surface, method)(*args)
        except (OSError, ValueError) as error:
            self._surface = self._train = self._inner = None
            self._due = inf
            self._enabled = False
            messages.warn_once(
                f"{type(self).__name__} can no longer write its output ({error}), so it shows nothing more in "
                "this run. The run continues, and its metrics are still logged."
            )
            return None

    def _close(self) -> None:
        """Stop drawing until the next run."""
        self._on_surface("close")
        self._surface = self._train = self._inner = None
        self._dataloader_idx = None
        self._due = inf


#: For each stage, the bar's attribute for the description and the trainer's for the number of batches per loader.
_EVALUATIONS = {
    "sanity_check": ("sanity_check_description", "num_sanity_val_batches"),
    "validate": ("validation_description", "num_val_batches"),
    "test": ("test_description", "num_test_batches"),
    "predict": ("predict_description", "num_predict_batches"),
}
#: Hooks that only draw. They are removed from a bar that never draws.
_DRAWING_HOOKS = tuple(name for name in vars(DrawnProgressBar) if name.startswith("on_"))


def is_terminal(stream: IO[str] | None) -> bool:
    """Return True if ``stream`` is a terminal with a movable cursor."""
    isatty = getattr(stream, "isatty", None)
    return isatty is not None and isatty()


def notebook_display() -> Callable[..., Any] | None:
    """Return IPython's ``display`` in a notebook kernel, else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if ipython is None or getattr(shell, "kernel", None) is None:
        return None
    return ipython.display.display

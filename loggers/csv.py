"""``CSVLogger``: logs a run to a single CSV file."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Iterable, Mapping
from glob import escape, glob
from typing import Any, ClassVar

from .. import messages
from .folder import HPARAMS_FILE, FolderLogger, call_at_exit, to_disk
from .values import number, numbers


class CSVLogger(FolderLogger):
    """Logs to ``metrics.csv``: one row per step, with ``step``, ``epoch``, ``wall_time`` and a column per metric.

    ``wall_time`` is in seconds since 1970. Values logged at the same step share a row, and the cells of metrics that
    were not logged then are empty. If a metric is logged twice at one step, a new row starts, so no value is lost. A
    metric that has the same name as one of the first three columns is written as ``metric/<name>``.

    Rows are kept in memory and appended to the file every ``flush_logs_every_n_steps`` steps, before each checkpoint
    and at the end of the run. The file is rewritten, and replaced atomically, only when a new metric appears.

    Args:
        save_dir: the folder for all experiments.
        name: the experiment's name, used as a folder in ``save_dir``; with None, versions are directly in ``save_dir``.
        version: the run's version. None selects a new number; an existing version is continued.
        prefix: prefix for each metric's name, followed by a dash.
        flush_logs_every_n_steps: maximum number of steps between two writes to the file.

    Example:
        >>> trainer = Trainer(logger=CSVLogger("logs"))  # doctest: +SKIP
        >>> pandas.read_csv("logs/paceline_logs/version_0/metrics.csv")  # doctest: +SKIP
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "paceline_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        if flush_logs_every_n_steps < 1:
            raise ValueError(
                f"CSVLogger(flush_logs_every_n_steps={flush_logs_every_n_steps!r}) would never write a row. "
                "Pass 1 to write at every step, or a larger number."
            )
        self._flush_every_n_steps = flush_logs_every_n_steps

    @property
    def experiment(self) -> ExperimentWriter:
        """The :class:`ExperimentWriter` that writes the file."""
        return super().experiment

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log values for one step. ``step`` defaults to the last logged step plus 1."""
        self._add(numbers(metrics), step)

    def log_record(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log numbers and strings for one step."""
        if options:
            super().log_record(values, step, **options)
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        self._add(numbers({name: value for name, value in values.items() if name not in texts}) | texts, step)

    def _add(self, values: dict[str, Any], step: int | None) -> None:
        named = {name if name == "epoch" else self._prefix + name: value for name, value in values.items()}
        writer = self.experiment
        writer.add(named, self._next_step(step))
        if writer.is_due(self._flush_every_n_steps):
            self.save()

    def save(self) -> None:
        super().save()
        if self._experiment is not None:
            with self._writing():
                self.experiment.save()

    def finalize(self, status: str) -> None:
        self.save()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self.experiment.place()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.experiment.rewind(state["rows"], state["last"])

    def _is_deleted(self) -> bool:
        return self._experiment.is_deleted()

    def _begin_again(self) -> None:
        self._experiment.begin_again()

    def _open(self) -> ExperimentWriter:
        writer = ExperimentWriter(self.log_dir)
        call_at_exit(self, writer.save)
        return writer


class ExperimentWriter:
    """Writes rows to ``metrics.csv`` in a folder, adds columns when needed, and continues an existing file.

    Args:
        log_dir: the folder, which must exist.

    Attributes:
        metrics_file_path: path of the file.
        columns: the column names in the file's first line.
        metrics: the rows that the next :meth:`save` will write.
    """

    #: Columns at the start of every row, before the metrics.
    first_columns: ClassVar[tuple[str, ...]] = ("step", "epoch", "wall_time")
    NAME_METRICS_FILE = "metrics.csv"
    NAME_HPARAMS_FILE = HPARAMS_FILE

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self.metrics_file_path = path = os.path.join(log_dir, self.NAME_METRICS_FILE)
        self.columns: list[str] = []
        self.metrics: list[dict[str, Any]] = []
        self._flushed_step: int | None = None
        self._last: dict[str, Any] = {}
        self._last_start: int | None = None
        self._end = 0
        self._rows = 0
        if os.path.exists(path):
            self._continue()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add values for one step, including ``"epoch"``. ``step`` defaults to the last logged step plus 1."""
        self.add(numbers(metrics), self._last.get("step", -1) + 1 if step is None else step)

    def add(self, values: dict[str, Any], step: int) -> None:
        """Add numbers and strings to their step's row."""
        last, first = self._last, dict[str, float](step=step)
        if "epoch" in values:
            epoch = number("epoch", values.pop("epoch"))
            first["epoch"] = int(epoch) if float(epoch).is_integer() else epoch
        values = self._beside_first_columns(values)
        same_row = last.get("step") == step and last.get("epoch") in (None, first.get("epoch", last.get("epoch")))
        if same_row and values.keys().isdisjoint(last):
            last.update(first)
            last.update(values)
            if not self.metrics:
                self.metrics.append(last)
        else:
            timed = {"wall_time": time.time()} if "wall_time" in self.first_columns else {}
            self._last = {**first, **timed, **values}
            if not self.metrics:
                self._last_start = None
            self.metrics.append(self._last)
            self._rows += 1
        if self._flushed_step is None:
            self._flushed_step = step

    def _beside_first_columns(self, values: dict[str, Any]) -> dict[str, Any]:
        """Rename values that have the same names as the first columns."""
        for name in self.first_columns:
            if name in values:
                messages.warn_once(
                    f"The metric {name!r} is written to the column 'metric/{name}' in metrics.csv, because the column "
                    f"{name!r} is reserved. To choose another column, log the metric under another name."
                )
                values[f"metric/{name}"] = values.pop(name)
        return values

    def is_due(self, every_n_steps: int) -> bool:
        """Return True if ``every_n_steps`` steps or rows have been added since the last :meth:`save`."""
        steps = abs(self._last["step"] - (self._flushed_step or 0)) if self._last else 0
        return steps >= every_n_steps or len(self.metrics) >= every_n_steps

    def save(self) -> None:
        """Write the pending rows to the file."""
        if not self.metrics:
            return
        if self.is_deleted():
            os.makedirs(os.path.dirname(self.metrics_file_path), exist_ok=True)
            self.begin_again()
        new = dict.fromkeys(name for row in self.metrics for name in row if name not in self.columns)
        if new or not os.path.exists(self.metrics_file_path):
            self._widen(new)
        start = self._start
        lines = [_line(row.get(name, "") for name in self.columns) for row in self.metrics]
        with open(self.metrics_file_path, "r+b") as file:
            file.seek(start)
            file.write(b"".join(lines))
            file.truncate()
        self._end = start + sum(map(len, lines))
        self._last_start = self._end - len(lines[-1])
        self._flushed_step = self._last["step"]
        self.metrics = []

    def is_deleted(self) -> bool:
        """Return True if the file was written and then deleted."""
        return self._end > 0 and not os.path.exists(self.metrics_file_path)

    def begin_again(self) -> None:
        """Write the pending rows and all later ones to a new file."""
        self._end, self._last_start, self._rows = 0, None, len(self.metrics)
        if not self.metrics:
            self._last = {}

    def place(self) -> dict[str, Any]:
        """Save to disk and return the position: the number of rows, and the last row, which may still be extended."""
        self.save()
        to_disk(self.metrics_file_path)
        return {"rows": self._rows, "last": dict(self._last)}

    def rewind(self, rows: int, last: Mapping[str, Any]) -> None:
        """Go back to a position from :meth:`place`: drop later rows, keep the columns, and restore the last row."""
        # Left by a process that was killed while replacing the file.
        for torn in glob(f"{escape(self.metrics_file_path)}.*.tmp"):
            os.remove(torn)
        found = self._read()
        kept = found[: rows - 1 if last else rows]
        lost = rows - len(kept) - bool(last)
        if lost > 0:
            messages.warn(
                f"The resumed run had written {rows} rows to {self.metrics_file_path}. Number of rows that are no "
                f"longer in the file: {lost}. When you move checkpoints, move this file with them."
            )
        columns = list(dict.fromkeys([*self.columns, *last]))
        if last:
            kept.append([last.get(name, "") for name in columns])
        self.metrics, self._last, self._rows = [], dict(last), len(kept)
        self._flushed_step = last.get("step")
        if columns:
            self._replace(columns, kept)
            self._last_start = self._end - len(_line(kept[-1])) if last else None

    def _continue(self) -> None:
        """Read the columns and rows of an existing file, ignoring an incomplete last line."""
        with open(self.metrics_file_path, "rb") as file:
            self._end = file.read().rfind(b"\n") + 1
        self.columns = self._read(header=True)[0] if self._end else []
        self._rows = len(self._read())

    def _read(self, header: bool = False) -> list[list[Any]]:
        """Return the rows of the file."""
        if not os.path.exists(self.metrics_file_path):
            return []
        with open(self.metrics_file_path, "rb") as file:
            lines = list(csv.reader(io.StringIO(file.read(self._end).decode("utf-8"), newline="")))
        return lines if header else lines[1:]

    @property
    def _start(self) -> int:
        """Offset at which to write the pending rows.

        This is the end of the file or, if the last row has new values, the start of that row.
        """
        return self._end if self._last_start is None else self._last_start

    def _widen(self, new: Iterable[str]) -> None:
        """Replace the file with one that has more columns.

        If the last row is about to be rewritten, the new file does not contain it.
        """
        rows = self._read() if self._last_start is None else self._read()[:-1]
        self._replace(list(dict.fromkeys([*(self.columns or self.first_columns), *new])), rows)
        self._last_start = None

    def _replace(self, columns: list[str], rows: list[list[Any]]) -> None:
        """Replace the file atomically with these columns and rows."""
        lines = [_line(columns), *(_line([*row, *[""] * (len(columns) - len(row))]) for row in rows)]
        temporary = f"{self.metrics_file_path}.{os.getpid()}.tmp"
        with open(temporary, "wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.metrics_file_path)
        self.columns, self._end = columns, sum(map(len, lines))


def _line(cells: Iterable[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode("utf-8")

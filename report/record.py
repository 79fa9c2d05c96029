"""The record of a run, which consists of JSON lines written during the run. The run's report is created from it.

Written lines are never changed, because the process may be killed at any time. The first line of a resumed run contains
the length (``"after"``) that the file had when the checkpoint was written. The resumed run repeats the lines beyond
that length.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from .. import messages
from ..loggers.base import DummyLogger
from ..loggers.values import flat, mapping, numbers

#: File name and suffix of records.
NAME, SUFFIX = "run_report", ".jsonl"
FORMAT = 1
#: Parts of the time, in the report's order.
PARTS = ("setup", "data", "step", "evaluation", "checkpoint", "rest")


class RunClock:
    """Splits a run's time into parts that do not overlap, so that the parts add up to the total time.

    Attributes:
        seconds: seconds by part.
        part: the current part.
        mark: the ``perf_counter`` time up to which the run's time has been assigned to parts.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.part = "setup"
        self.mark = perf_counter()
        self._before_save = ""

    def to(self, part: str) -> None:
        """End the current part and begin ``part``."""
        now = perf_counter()
        self.seconds[self.part] += now - self.mark
        self.mark, self.part = now, part

    def was(self, part: str) -> None:
        """Count the time since the last mark toward ``part``, without ending the current part."""
        now = perf_counter()
        self.seconds[part] += now - self.mark
        self.mark = now

    def logged(self) -> None:
        """Count the time since the last mark toward ``rest`` if the loggers were called between two batches."""
        if self.part == "data":
            self.was("rest")

    def save(self) -> None:
        """Start counting time toward checkpointing."""
        if self.part != "checkpoint":
            self.logged()
            self._before_save = self.part
            self.to("checkpoint")

    def saved(self) -> float:
        """Record the end of a save, or of a wait for a background write; return how many seconds it took."""
        before = self.seconds["checkpoint"]
        if self.part == "checkpoint":
            self.to(self._before_save)
        elif self.part in ("data", "rest"):
            self.was("checkpoint")
        return self.seconds["checkpoint"] - before

    def so_far(self) -> dict[str, float]:
        """Return the seconds of each part so far."""
        self.to(self.part)
        return {part: round(seconds, 6) for part, seconds in self.seconds.items()}


class RunRecord(DummyLogger):
    """Logger that writes the record. During a run, this is the last of the trainer's loggers.

    Nothing is written before :meth:`settle` chooses between a new record and an existing one that the run continues.

    Args:
        folder: folder of the record; None on ranks that do not write a record.
        log_dir: the trainer's ``log_dir`` without this logger.
        now: function that returns the facts to add to each row, such as epoch, counters and learning rates.
        clock: the clock that measures this part of the run.
    """

    def __init__(
        self, folder: str | None, log_dir: str | None, now: Callable[[], dict[str, Any]], clock: RunClock
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.run = ""
        self.path: Path | None = None
        self._log_dir = log_dir
        self._now = now
        self._clock = clock
        self._waiting: list[dict[str, Any]] = []
        self._after: int | None = None
        self._file: Any = None

    @property
    def log_dir(self) -> str | None:
        return self._log_dir

    def run_dirs(self) -> list[str]:
        return [] if self._log_dir is None else [self._log_dir]

    # ---- logger methods ----------------------------------------------------------------------------------------------

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if self.folder is None:
            return
        self._clock.logged()
        values = numbers(metrics)
        values.pop("epoch", None)
        self.row(values, step)
        self._clock.logged()

    def log_record(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        kept = {name: value for name, value in values.items() if not isinstance(value, str)}
        super().log_record(kept, step, **options)

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        self.write("hyperparameters", values=flat(mapping(params)))

    def save(self) -> None:
        self._clock.save()

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        seconds = self._clock.saved()
        path = getattr(checkpoint_callback, "_saved_path", "") or getattr(checkpoint_callback, "last_model_path", "")
        step = getattr(checkpoint_callback, "_saved_step", -1)
        self.write("save", step=step, path=str(path), seconds=round(seconds, 6))

    # ---- resume ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self.folder is None:
            return {}
        self.settle()
        return {"run": self.run, "length": self._length()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.run, self._after = state["run"], state["length"]
        if self.path is not None:  # this process has returned to one of its own checkpoints
            self._go_on()

    def settle(self) -> None:
        """Start writing to the resumed run's record if that record is in the folder, otherwise to a new record."""
        if self.folder is None or self.path is not None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            found = None if self._after is None else _record_of(self.run, self.folder)
            self.path = found or _claim(self.folder)
            self._file = open(self.path, "a+b")  # noqa: SIM115 - open as long as the run lasts
            if found is None:
                header = (
                    {"run": uuid.uuid4().hex} if self._after is None else {"run": uuid.uuid4().hex, "from": self.run}
                )
                self.run = header["run"]
                self._put({"what": "record", "format": FORMAT, **header})
            else:
                if not found.read_bytes().endswith(b"\n"):
                    self._file.write(b"\n")  # after an incomplete line from a killed process
                self._go_on()
        except OSError as error:
            self._give_up(error)
        waiting, self._waiting = self._waiting, []
        for line in waiting:
            self._put(line)

    def _go_on(self) -> None:
        self._put({"what": "go on", "after": self._after})
        self._after = None

    def _length(self) -> int:
        return 0 if self._file is None else os.fstat(self._file.fileno()).st_size

    # ---- lines -------------------------------------------------------------------------------------------------------

    def row(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Write a line with the given values, the current time, the counters and the seconds of each part so far."""
        now = self._now()
        at = now["updates"] if step is None else step
        self.write("row", step=at, **now, values=dict(values), clock=self._clock.so_far())

    def write(self, what: str, **facts: Any) -> None:
        """Write a line with the given facts; ``what`` is the line's kind."""
        if self.folder is None:
            return
        line = {"what": what, "time": round(time.time(), 3), **facts}
        if self.path is None:
            self._waiting.append(line)
        else:
            self._put(line)

    def _put(self, line: Mapping[str, Any]) -> None:
        if self._file is None or self.path is None:
            return
        try:
            if not self.path.exists():
                self._write_again(self.path)
            self._file.write(json.dumps(line, default=str).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _write_again(self, path: Path) -> None:
        """Rewrite the entire file from the handle that is still open, after the file was deleted."""
        messages.warn(
            f"{messages.path(path)}, the record of the run report, was deleted while the run was writing to it, so "
            "the full record is written again."
        )
        self._file.seek(0)
        content = self._file.read()
        self._file.close()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b")  # noqa: SIM115 - open as long as the run lasts
        self._file.write(content)

    def _give_up(self, error: OSError) -> None:
        messages.warn(
            f"The run continues without a report, because its record in {str(self.folder)!r} cannot be written "
            f"({error.strerror or error}). Free disk space, or choose a different folder with RunReport(dirpath=...)."
        )
        self.folder = None
        self.close()

    def close(self) -> None:
        """Close the record's file. A later run can reopen the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def open_again(self, now: Callable[[], dict[str, Any]], clock: RunClock) -> None:
        """Reopen the record's file to continue the record in a new run of the same trainer."""
        self._now, self._clock = now, clock
        if self.path is not None and self.folder is not None:
            self._file = open(self.path, "a+b")  # noqa: SIM115 - open as long as the run lasts

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None, "_now": dict, "_waiting": []}


def _record_of(run: str, folder: Path) -> Path | None:
    """Return the path of a run's record in a folder; None if the folder does not contain it."""
    for path in sorted(folder.glob(f"{NAME}*{SUFFIX}")):
        with open(path, "rb") as file, suppress(ValueError, AttributeError):  # incomplete, or not a record
            if json.loads(file.readline()).get("run") == run:
                return path
    return None


def _claim(folder: Path) -> Path:
    """Create a new file without touching the files of other runs, and return its path."""
    number = 0
    while True:
        path = folder / f"{NAME}{f'-v{number}' if number else ''}{SUFFIX}"
        try:
            open(path, "xb").close()
        except FileExistsError:
            number += 1
        else:
            return path

"""The record of a run: what a report is made from, one line of JSON after the other, written during the run.

A written line stays, since a process may be killed at any moment. The line with which a resumed run continues marks
what it repeats (``"after"``: the length of the file when the checkpoint was written).
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

#: What records are called, and what they end in.
NAME, SUFFIX = "run_report", ".jsonl"
FORMAT = 1
#: Where the time goes, in the order of the report.
PARTS = ("setup", "data", "step", "evaluation", "checkpoint", "rest")


class Clock:
    """Splits the time of a run: each moment belongs to one part, so that the parts add up to the whole.

    Attributes:
        seconds: by part.
        part: the one that is running.
        mark: when its time was last counted.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.part = "setup"
        self.mark = perf_counter()
        self._before_save = ""

    def to(self, part: str) -> None:
        """What was running ends here, and ``part`` begins."""
        now = perf_counter()
        self.seconds[self.part] += now - self.mark
        self.mark, self.part = now, part

    def was(self, part: str) -> None:
        """The time since the last mark was ``part``'s; the running part continues."""
        now = perf_counter()
        self.seconds[part] += now - self.mark
        self.mark = now

    def logged(self) -> None:
        """Values were sent to the loggers: between two batches that is what the time since the last one was for."""
        if self.part == "data":
            self.was("rest")

    def save(self) -> None:
        """A checkpoint is gathered."""
        if self.part != "checkpoint":
            self.logged()
            self._before_save = self.part
            self.to("checkpoint")

    def saved(self) -> float:
        """A checkpoint is written, or one in the background has been waited for. Returns the seconds it took."""
        before = self.seconds["checkpoint"]
        if self.part == "checkpoint":
            self.to(self._before_save)
        elif self.part in ("data", "rest"):
            self.was("checkpoint")
        return self.seconds["checkpoint"] - before

    def so_far(self) -> dict[str, float]:
        """The seconds of each part until now."""
        self.to(self.part)
        return {part: round(seconds, 6) for part, seconds in self.seconds.items()}


class RunRecord(DummyLogger):
    """A logger that writes the record; among the trainer's loggers only while a run lasts, and the last of them.

    Nothing is in the folder before :meth:`settle`: only then is it known whether the run continues an existing record.

    Args:
        folder: of the record; None on ranks that write nothing.
        log_dir: what the trainer's folder was without this logger.
        now: what each row is given besides the values: epoch, counters, learning rates.
        clock: the time of this start.
    """

    def __init__(
        self, folder: str | None, log_dir: str | None, now: Callable[[], dict[str, Any]], clock: Clock
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

    # ---- what the trainer sends --------------------------------------------------------------------------------------

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
        if self.path is not None:  # the same process goes back to one of its checkpoints
            self._go_on()

    def settle(self) -> None:
        """From here on lines go to the file: the record of the resumed run if the folder has it, else a new one."""
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
                    self._file.write(b"\n")  # after a line that a killed process left torn
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
        """A line of numbers, with the time, the counters and where the time went so far."""
        now = self._now()
        at = now["updates"] if step is None else step
        self.write("row", step=at, **now, values=dict(values), clock=self._clock.so_far())

    def write(self, what: str, **facts: Any) -> None:
        """A line of some kind."""
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
        """Somebody deleted the file, which this process still has open: write all of it once more."""
        messages.warn(
            f"{messages.path(path)}, the record of the run report, was deleted while the run was writing to it. "
            "It is written again as a whole."
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
            f"({error.strerror or error}). Free space on the disk, or choose another folder: RunReport(dirpath=...)."
        )
        self.folder = None
        self.close()

    def close(self) -> None:
        """Close the file; a later run opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def open_again(self, now: Callable[[], dict[str, Any]], clock: Clock) -> None:
        """A further run of the same trainer continues the file."""
        self._now, self._clock = now, clock
        if self.path is not None and self.folder is not None:
            self._file = open(self.path, "a+b")  # noqa: SIM115 - open as long as the run lasts

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None, "_now": dict, "_waiting": []}


def _record_of(run: str, folder: Path) -> Path | None:
    """The record of a run in a folder."""
    for path in sorted(folder.glob(f"{NAME}*{SUFFIX}")):
        with open(path, "rb") as file, suppress(ValueError, AttributeError):  # torn, or somebody else's
            if json.loads(file.readline()).get("run") == run:
                return path
    return None


def _claim(folder: Path) -> Path:
    """A new file; another run's is left alone."""
    number = 0
    while True:
        path = folder / f"{NAME}{f'-v{number}' if number else ''}{SUFFIX}"
        try:
            open(path, "xb").close()
        except FileExistsError:
            number += 1
        else:
            return path

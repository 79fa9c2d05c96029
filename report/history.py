"""Reads a run's record, without repeated rows, and computes values from it. Does not need torch."""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..checkpoint import manifest
from . import system_info
from .record import FORMAT, NAME, PARTS, SUFFIX

#: Number of subfolder levels that are searched for checkpoints.
_DEPTH = 2
#: Parts of the time that count as training time.
_TRAINING = ("data", "step", "rest")
#: Maximum number of intervals in the speed chart.
_STRETCHES = 120

Points = list[tuple[float, float]]


@dataclass
class Start:
    """One start of a run: the part of the run that a single process executed.

    Attributes:
        facts: facts that were known when this part of the run began.
        rows: the rows of the record that no later start repeated.
        repeated: number of rows that a later start repeated.
        clock: the recorded seconds by part.
        end: facts about how this part of the run ended; empty if its end was not recorded.
        data: facts about the training batches; empty if training had not begun.
        last: the time at which the last line was written, in seconds since 1970.
    """

    facts: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    repeated: int = 0
    clock: dict[str, float] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    last: float = 0.0


@dataclass
class Saved:
    """A checkpoint that was saved and may have been deleted since."""

    path: str
    step: int
    epoch: int | None = None
    score: str = ""
    size_bytes: int | None = None
    written: str = ""
    stall_seconds: float | None = None


@dataclass
class History:
    """A run, as read from its record.

    Attributes:
        path: path of the record.
        run: the run's unique identifier.
        starts: the starts of the run, in order; a run that was never resumed has only one.
        hyperparameters: hyperparameters from ``save_hyperparameters``.
        splits: additional breakdowns of the run's time, keyed by their source.
        saves: the recorded checkpoints, keyed by path.
        torn: number of lines that are not valid JSON, because the process was killed while it was writing them.
    """

    path: Path
    run: str = ""
    starts: list[Start] = field(default_factory=list)
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    splits: dict[str, dict[str, float]] = field(default_factory=dict)
    saves: dict[str, dict[str, Any]] = field(default_factory=dict)
    torn: int = 0

    # ---- the course of the run ---------------------------------------------------------------------------------------

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that were known when the last start began."""
        return self.starts[-1].facts if self.starts else {}

    @property
    def name(self) -> str:
        """The log's name and version (or else the record's folder), and the record's name if it is not the default."""
        name = self.facts.get("experiment") or self.path.resolve().parent.name
        return name if self.path.stem == NAME else f"{name} / {self.path.stem}"

    @property
    def status(self) -> str:
        """The status of the run in words: how it ended, or that it is still running."""
        if not self.starts:
            return "nothing was recorded"
        last = self.starts[-1]
        if last.end:
            return str(last.end["status"])
        if _is_alive(last.facts.get("process", {})):
            return "running"
        return "ended without recording how: the process was killed, or the machine went down"

    @property
    def is_well(self) -> bool:
        """Whether the run has finished successfully or may still be running."""
        return self.status in ("finished", "running")

    @property
    def error(self) -> dict[str, str]:
        """The type, text and traceback of the exception that ended the run; empty if there was none."""
        return self.starts[-1].end.get("error", {}) if self.starts else {}

    @property
    def clock(self) -> dict[str, float]:
        """The seconds of each part, summed over all starts."""
        return {part: sum(start.clock.get(part, 0.0) for start in self.starts) for part in PARTS}

    @property
    def seconds(self) -> float:
        """The run's total running time in seconds, without the time between its starts."""
        return sum(self.clock.values())

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of all starts, without repeated rows."""
        return [row for start in self.starts for row in start.rows]

    @property
    def steps(self) -> int:
        """The number of optimizer updates."""
        return max((row["updates"] for row in self.rows), default=0)

    @property
    def epochs(self) -> int:
        """The epoch that the run has reached."""
        return max((row["epoch"] for row in self.rows), default=0)

    # ---- curves ------------------------------------------------------------------------------------------------------

    def curves(self) -> dict[str, Points]:
        """Return the (step, value) points of every metric."""
        return _curves((row["step"], row["values"]) for row in self.rows)

    def rates(self) -> dict[str, Points]:
        """Return the (step, value) points of every learning rate."""
        return _curves((row["updates"], row["lr"]) for row in self.rows)

    def repeated_rates(self) -> set[str]:
        """Return metrics that only repeat a learning rate from :meth:`rates`, such as LearningRateMonitor's metrics."""
        found: dict[str, set[float]] = {}
        others: set[str] = set()
        for row in self.rows:
            for name, value in row["values"].items():
                if any(math.isclose(value, rate, rel_tol=1e-6) for rate in row["lr"].values()):
                    found.setdefault(name, set()).add(value)
                else:
                    others.add(name)
        # A metric with a single value may equal the learning rate by chance.
        return {name for name in found.keys() - others if len(found[name]) > 1 or name.startswith("lr")}

    def speeds(self) -> tuple[Points, Points]:
        """Return the (step, value) points of updates per second and of samples per second of training.

        The list of samples per second is empty if the batch size is unknown.
        """
        steps: Points = []
        samples: Points = []
        for start in self.starts:
            size = _samples_in_batch(start)
            for at, seconds, updates, batches in _stretches(start):
                steps.append((at, updates / seconds))
                if size:
                    samples.append((at, batches * size / seconds))
        return steps, samples

    def speed(self) -> dict[str, float]:
        """Return updates and samples per second of training for the entire run, and the median updates per second."""
        seconds = updates = samples = 0.0
        for start in self.starts:
            found = list(_stretches(start))
            seconds += sum(stretch[1] for stretch in found)
            updates += sum(stretch[2] for stretch in found)
            samples += sum(stretch[3] for stretch in found) * (_samples_in_batch(start) or 0)
        if not seconds:
            return {}
        typical = [value for _, value in self.speeds()[0]]
        rates = {"steps per second": updates / seconds, "steps per second, median": statistics.median(typical)}
        return rates | ({"samples per second": samples / seconds} if samples else {})

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[Saved]:
        """Return the checkpoints in the record and the checkpoints on disk, with facts from their manifests."""
        found: dict[str, Saved] = {}
        for path, save in self.saves.items():
            found[path] = Saved(path, save["step"], stall_seconds=save["seconds"])
        marks: set[str] = set()
        known = {path: read for path in self._candidates() if (read := manifest.read_or_none(path)) is not None}
        for path in found:
            marks.update(known[path].runs if path in known else ())
        begin = min((start.facts["time"] for start in self.starts), default=0.0)
        for path, one in known.items():
            if path not in found and (_when(one.written) < begin - 1 or (marks and not marks & set(one.runs))):
                continue  # belongs to a different run
            save = found.setdefault(path, Saved(path, one.global_step))
            save.step, save.epoch, save.written = one.global_step, one.epoch, one.written
            save.size_bytes = sum(size for size, _ in one.files.values())
            save.score = "" if one.score is None else f"{one.monitor} = {one.score:.4g}"
        return sorted(found.values(), key=lambda save: (save.step, save.path))

    def _candidates(self) -> Iterator[str]:
        yield from self.saves
        folders = dict.fromkeys(folder for start in self.starts for folder in start.data.get("checkpoints", ()))
        for folder in folders:
            yield from (str(path) for path in manifest.checkpoints_in(folder, _DEPTH))


# ---- reading ---------------------------------------------------------------------------------------------------------


def find(path: str | os.PathLike[str]) -> Path:
    """Return the path of a record, given the record, its page, or a folder, whose newest record is then used.

    Raises:
        FileNotFoundError: if there is no record.
    """
    given = Path(path)
    if given.is_file():
        return given.with_suffix(SUFFIX) if given.suffix == ".html" else given
    if not given.is_dir():
        raise FileNotFoundError(f"{str(given)!r} does not exist. Pass the folder of a run, or the run's record.")
    for places in (given.glob(f"{NAME}*{SUFFIX}"), given.rglob(f"{NAME}*{SUFFIX}")):
        newest = max(places, key=lambda found: found.stat().st_mtime, default=None)
        if newest is not None:
            return newest
    raise FileNotFoundError(
        f"{str(given)!r} and its subfolders contain no record of a run ({NAME}{SUFFIX}). To record a run, use "
        "Trainer(callbacks=[RunReport()])."
    )


def read(path: str | os.PathLike[str]) -> History:
    """Read a record, dropping repeated rows.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is not a record, or was written by a later version.
    """
    history, offset = History(Path(path)), 0
    places: list[tuple[int, Start, dict[str, Any]]] = []
    with open(path, "rb") as file:
        for text in file:
            line = _line(text)
            if line is None:
                history.torn += 1
            elif not history.run and line["what"] != "record":
                break
            else:
                _take(history, line, offset, places)
            offset += len(text)
    if not history.run:
        raise ValueError(f"{os.fspath(path)!r} is not a record of a run. Pass the folder of a run that used RunReport.")
    return history


def _line(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "what" in found else None


def _take(history: History, line: dict[str, Any], offset: int, places: list[tuple[int, Start, dict[str, Any]]]) -> None:
    """Add a line of the record to the history. ``places`` contains the rows so far, with their offsets in the file."""
    what = line.pop("what")
    if what == "record":
        if line["format"] > FORMAT:
            raise ValueError(
                f"{str(history.path)!r} was written by a later version of Paceline (in format {line['format']}; this "
                f"version reads format {FORMAT}). Update Paceline."
            )
        history.run = line["run"]
    elif what == "go on":
        _drop(places, lambda at, _: at >= line["after"])
    elif what == "start":
        history.starts.append(Start(line, last=line["time"]))
    elif what == "hyperparameters":
        history.hyperparameters |= line["values"]
    elif what == "split":
        history.splits[line["source"]] = line["seconds"]
    elif what == "save":
        history.saves[line["path"]] = line
    elif history.starts:
        _take_of_start(history.starts[-1], what, line, offset, places)


def _take_of_start(
    start: Start, what: str, line: dict[str, Any], offset: int, places: list[tuple[int, Start, dict[str, Any]]]
) -> None:
    start.last = line["time"]
    if what == "row":
        if not start.rows and start.facts.get("fn") == "fit":
            _drop(places, lambda _, row: row["updates"] > line["updates"])
        start.rows.append(line)
        start.clock = line["clock"]
        places.append((offset, start, line))
    elif what == "data":
        start.data = line
    elif what == "end":
        start.end = line


def _drop(places: list[tuple[int, Start, dict[str, Any]]], made_again: Callable[[int, dict[str, Any]], bool]) -> None:
    """Drop rows that a later start repeated."""
    gone = [place for place in places if made_again(place[0], place[2])]
    if not gone:
        return
    ids = {id(row) for _, _, row in gone}
    for start in {id(start): start for _, start, _ in gone}.values():
        kept = [row for row in start.rows if id(row) not in ids]
        start.repeated += len(start.rows) - len(kept)
        start.rows = kept
    places[:] = [place for place in places if id(place[2]) not in ids]


def _curves(rows: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for step, values in rows:
        for name, value in values.items():
            found.setdefault(name, []).append((step, value))
    return {name: sorted(points, key=lambda point: point[0]) for name, points in found.items()}


def _samples_in_batch(start: Start) -> int | None:
    """Return the number of samples in a batch across all ranks; None if the batch size is unknown."""
    size = start.data.get("batch_size")
    return size * start.data.get("ranks", 1) if size else None


def _stretches(start: Start) -> Iterator[tuple[int, float, int, int]]:
    """Yield (last step, seconds of training, update count, batch count) for each interval of the speed chart."""
    rows = [row for row in start.rows if row["lr"] or start.data]
    every = max(1, math.ceil(len(rows) / _STRETCHES))
    before = rows[0] if rows else None
    for place, row in enumerate(rows):
        if before is None or row["updates"] <= before["updates"] or (place % every and place + 1 < len(rows)):
            continue
        seconds = sum(row["clock"][part] - before["clock"][part] for part in _TRAINING)
        if seconds > 0:
            yield row["updates"], seconds, row["updates"] - before["updates"], row["batches"] - before["batches"]
        before = row


def _when(written: str) -> float:
    try:
        found = datetime.fromisoformat(written)
    except ValueError:
        return 0.0
    return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()


def _is_alive(process: Mapping[str, Any]) -> bool:
    """Return True if the process that wrote the record is still running, as far as this machine can tell."""
    if process.get("host") != socket.gethostname() or not isinstance(process.get("pid"), int):
        return False
    try:
        os.kill(process["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return system_info.begun(process["pid"]) == process.get("begun")  # otherwise, a different process has this pid now

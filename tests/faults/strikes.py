"""Strikes a training dead, starts it again with the same command until it is done, and compares with one left alone.

PYTHONPATH=tests python tests/faults/strikes.py --kills 200

That is the whole matrix, with a table of what was struck and what was lost.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rank_processes import until
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_SECONDS = 240.0

#: What may be struck: any moment of the training, or one of the points of train.py.
POINTS = ("save", "written", "synced", "renamed", "deleted", "validation", "logger", "epoch", "start", "end")

#: What may happen at any batch: a process is killed, or the command is told to end; or at any time from the start of
#: the command on, while it reads what it goes on from, or when the training is done: a process is killed.
MOMENTS = (*["moment"] * 8, *["told to end"] * 2, *["any time"] * 4)
#: How a command that is told to end does: it has saved; or, before and after the training, the signal ends it at once.
TOLD = (128 + signal.SIGTERM, -signal.SIGTERM)
#: Those of the points that every rank comes by.
SHARED_POINTS = ("start", "validation", "epoch", "end")


@dataclass(frozen=True)
class Cell:
    """One way to train."""

    strategy: str
    workers: int
    async_save: bool
    accumulate: int

    def __str__(self) -> str:
        how = "in the background" if self.async_save else "at once"
        return f"{self.strategy}, {self.workers} workers, saved {how}, accumulation {self.accumulate}"

    def command(self, folder: Path) -> list[str]:
        several = ["--strategy", self.strategy, "--devices", "1" if self.strategy == "cpu" else "2"]
        counts = ["--workers", str(self.workers), "--accumulate", str(self.accumulate)]
        return [sys.executable, str(HERE / "train.py"), str(folder), *several, *counts, *self.flags]

    @property
    def flags(self) -> list[str]:
        return ["--async-save"] if self.async_save else []


CELLS = [Cell(*one) for one in itertools.product(("cpu", "ddp", "fsdp"), (0, 2), (False, True), (1, 3))]


@dataclass
class Result:
    """What came of one cell.

    Attributes:
        cell: what was examined.
        struck: how many strikes landed at which point.
        starts: how often the command was started under strikes.
        problems: what was lost or differed.
        seconds: how long the run took that was left alone.
    """

    cell: Cell
    struck: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def examine(cell: Cell, kills: int, seed: int, folder: Path) -> Result:
    """Train once left alone, then again and again under strikes, until ``kills`` of them have landed."""
    result, chance = Result(cell), random.Random(seed)
    alone = folder / "alone"
    began = time.monotonic()
    status, _, text = train(cell, alone)
    result.seconds = time.monotonic() - began
    if status != 0:
        result.problems.append(f"the run that was left alone failed with status {status}:\n{text}")
        return result
    while result.struck.total() < kills and not result.problems:
        struck = folder / f"struck{result.starts}"
        survive(cell, struck, kills - result.struck.total(), chance, result)
        result.problems += [] if result.problems else differences(alone, struck)
    return result


def survive(cell: Cell, folder: Path, kills: int, chance: random.Random, result: Result) -> None:
    """One training under at most ``kills`` strikes, started again after each; the last start is left alone."""
    told: list[int] = []
    while True:
        result.starts += 1
        point = "" if kills <= 0 else chance.choice((*POINTS, *MOMENTS))
        status, landed, text = train(cell, folder, point, chance, result.seconds)
        if status == 0:
            result.problems += repeated(folder / "seen-0.txt", told)
            return
        if not landed or (point == "told to end" and status not in TOLD):
            what = f"{point or 'a start'} after {dict(result.struck)} ended with status {status}"
            result.problems.append(f"{what}:\n{text[-3000:]}")
            return
        if point == "told to end" and status == TOLD[0]:
            told.append(len((folder / "seen-0.txt").read_text().splitlines()))
        result.struck[point] += 1
        kills -= 1


def repeated(seen: Path, told: list[int]) -> Iterator[str]:
    """The batches that were trained on again, although the command was told to end and saved after them."""
    numbers = [int(line.split()[0]) for line in seen.read_text().splitlines()]
    for index in told:
        if index < len(numbers) and numbers[index] != numbers[index - 1] + 1:
            yield f"told to end after batch {numbers[index - 1]}, the run went on with {numbers[index]}"


def train(
    cell: Cell, folder: Path, point: str = "", chance: random.Random | None = None, seconds: float = 0.0
) -> tuple[int, bool, str]:
    """Run the command once; at ``point``, if there is one, it or one of its processes is killed.

    ``seconds`` is how long it takes when left alone.

    Returns:
        The exit status, whether a process was killed, and what was said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / "struck"
    note.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"}
    if chance is not None and point in POINTS:
        rank = chance.choice((0, 1)) if cell.strategy != "cpu" and point in SHARED_POINTS else 0
        environment |= {"PACELINE_STRIKE": f"{point}:{chance.randint(1, 3)}", "PACELINE_STRIKE_RANK": str(rank)}
        environment["PACELINE_STRIKE_NOTE"] = str(note)
    with (folder / "said.txt").open("w+") as said:
        process = subprocess.Popen(cell.command(folder), stdout=said, stderr=subprocess.STDOUT, env=environment)
        if chance is not None and point in MOMENTS:
            if point == "any time":
                _wait(process, chance.random() * seconds)
            else:
                _wait_for_batches(process, folder / "seen-0.txt", chance)
            _strike(process, folder, chance, note, point)
        status = _end(process, folder)
        said.seek(0)
        return status, note.exists(), said.read()


def _wait(process: subprocess.Popen[Any], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _wait_for_batches(process: subprocess.Popen[Any], seen: Path, chance: random.Random) -> None:
    """Wait until some more batches have been trained on, and a random while."""
    batches, wait = chance.randint(0, 14), chance.random() * 0.012
    enough = _size(seen) + batches * 20
    with suppress(AssertionError):  # one that hangs is struck too
        until("enough was seen", lambda: process.poll() is not None or _size(seen) > enough, LIMIT_SECONDS)
    _wait(process, wait)


def _strike(process: subprocess.Popen[Any], folder: Path, chance: random.Random, note: Path, point: str) -> None:
    """Kill the command or one of its processes; or, where it is told to end, let it save first."""
    victim = chance.choice([process.pid, *(pid for pid in processes_of(folder) if pid != process.pid)])
    if process.poll() is None:
        with suppress(ProcessLookupError):
            if point == "told to end":
                os.kill(process.pid, signal.SIGTERM)
            else:
                os.kill(victim, signal.SIGKILL)
            note.touch()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def processes_of(folder: Path) -> list[int]:
    """The processes whose command line names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if str(folder).encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _end(process: subprocess.Popen[Any], folder: Path) -> int:
    """The exit status, once the command and all its processes have ended, as they must when one of them is killed."""

    def ended() -> bool:
        return process.poll() is not None and not processes_of(folder)

    try:
        until("all have ended", ended, LIMIT_SECONDS)
    except AssertionError:
        left = processes_of(folder)
        for number in (signal.SIGQUIT, signal.SIGKILL):  # the first writes the stacks of all threads, and ends
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            with suppress(AssertionError):
                until("they have ended", ended, 5)
        process.wait()
        said = (folder / "said.txt").read_text()
        raise RuntimeError(
            f"{len(left)} processes of {folder} were still there after {LIMIT_SECONDS:.0f} s. They said:\n{said}"
        ) from None
    return process.wait()


# ---- comparing -------------------------------------------------------------------------------------------------------


def differences(alone: Path, struck: Path) -> list[str]:
    """What differs between a run that was left alone and one that was struck; nothing may."""
    found = list(_unequal(_state(alone / "final.ckpt"), _state(struck / "final.ckpt"), ""))
    rows = [_rows(_versions(folder)[-1] / "metrics.csv") for folder in (alone, struck)]
    if rows[0] != rows[1]:
        found.append("metrics.csv differs:\n" + "\n".join(_lines(*rows)))
    kept = [sorted(os.listdir(_versions(folder)[-1] / "checkpoints")) for folder in (alone, struck)]
    if kept[0] != kept[1]:
        found.append(f"other checkpoints are kept: {kept[1]}, not {kept[0]}")
    for version in _versions(struck)[:-1]:  # of starts that were struck before they had saved anything
        saved = [path.name for path in (version / "checkpoints").glob("[!.]*")]
        if saved:
            found.append(f"the run did not go on in {version.name}, where it had saved {saved}")
    for file in sorted(alone.glob("seen-*.txt")):
        found += _unseen(file, struck / file.name)
    return found


def _versions(folder: Path) -> list[Path]:
    return sorted((folder / "logs").iterdir(), key=lambda path: int(path.name.removeprefix("version_")))


def _rows(path: Path) -> list[str]:
    """The rows of a CSV file without the time at which each was written."""
    with path.open(newline="") as file:
        return [str({name: text for name, text in row.items() if name != "wall_time"}) for row in csv.DictReader(file)]


def _lines(one: list[str], other: list[str]) -> list[str]:
    return list(difflib.unified_diff(one, other, "alone", "struck", n=0, lineterm=""))[:12]


def _state(file: Path) -> Any:
    """A checkpoint without what tells one start from another: marks, numbers of saves, the loggers' places.

    Nor does it matter which step a start saved last: that is forgotten at the next.
    """
    if file.is_dir():
        from paceline.checkpoint.read import read

        checkpoint = read(file)
    else:
        checkpoint = torch.load(file, weights_only=True)
    section = checkpoint.pop("paceline")
    wanted = {key: section[key] for key in ("progress", "ranks", "precision", "metrics") if key in section}
    for state in checkpoint["callbacks"].values():
        for mark in ("run", "line", "leftovers", "saved_step", "saved_path"):
            state.pop(mark, None)
    return {**checkpoint, "paceline": wanted}


def _unequal(one: Any, other: Any, place: str) -> Iterator[str]:
    """The places at which two states differ, to the bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or not torch.equal(one, other):
            yield f"{place} differs"
    elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from _unequal(one[key], other[key], f"{place}.{key}")
    elif all(isinstance(value, (list, tuple)) for value in (one, other)) and len(one) == len(other) < 100:
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _unequal(a, b, f"{place}[{index}]")
    elif one != other and not (one != one and other != other):
        yield f"{place}: {one!r:.80} became {other!r:.80}"


def _unseen(alone: Path, struck: Path) -> Iterator[str]:
    """Whether every batch was seen, with the same content each time, and none was passed over."""
    wanted = dict(line.split() for line in alone.read_text().splitlines())
    reached = -1
    for line in struck.read_text().splitlines():
        number, digest = line.split()
        if wanted.get(number) != digest:
            yield f"{struck.name}: batch {number} was another one"
        if int(number) > reached + 1:
            yield f"{struck.name}: batch {number} came after {reached}"
        reached = max(reached, int(number))
    if reached + 1 != len(wanted):
        yield f"{struck.name}: {reached + 1} of {len(wanted)} batches were seen"


# ---- the long form ---------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="strikes that must land, over all cells")
    parser.add_argument("--jobs", type=int, default=2, help="cells examined at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cells whose description contains this")
    args = parser.parse_args()
    cells = [cell for cell in CELLS if args.only in str(cell)]
    each = -(-args.kills // len(cells))
    with TemporaryDirectory(prefix="paceline_faults_") as folder, ThreadPoolExecutor(args.jobs) as pool:
        jobs = [
            pool.submit(examine, cell, each, args.seed + index, Path(folder) / str(index))
            for index, cell in enumerate(cells)
        ]
        results = [_told(job.result()) for job in jobs]
    struck = sum((result.struck for result in results), Counter())
    lost = [problem for result in results for problem in result.problems]
    print("\n| struck at | kills |\n|---|---:|")
    for point, count in struck.most_common():
        print(f"| {point} | {count} |")
    print(
        f"\nkills: {struck.total()}, starts: {sum(result.starts for result in results)}, lost or different: {len(lost)}"
    )
    sys.exit(bool(lost))


def _told(result: Result) -> Result:
    print(f"{result.cell}: {result.struck.total()} kills, {len(result.problems)} problems", flush=True)
    for problem in result.problems:
        print(f"    {problem}", flush=True)
    return result


if __name__ == "__main__":
    main()

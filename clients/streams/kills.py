"""Kill runs in the middle of an epoch while they read a stream, resume them, and count the samples.

    python kills.py --package datasets       prints a JSON line for each cell

Every rank is its own process, forked from this one, which has already imported the packages. A cell combines a form, a
door (Trainer or Accelerator), a number of workers, and the number of ranks before and after the kill.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from sources import FORMS, SAMPLES, Form
from torch import nn
from torch.utils.data import DataLoader

from paceline import Accelerator, Callback, Trainer, TrainingModule
from paceline.callbacks import ModelCheckpoint

#: Number of epochs, and of batches between checkpoints. With one or two ranks, each checkpoint is inside a shard.
EPOCHS, SAVE_EVERY = 3, 11
#: Index of the epoch and of the batch at which a run is killed.
KILL_AT = 1, 7
LIMIT_SECONDS = 90.0
DISCARDED = "were loaded and discarded"


class Cell(NamedTuple):
    """One cell of the table: how to read the stream, and what to change when the run resumes."""

    form: int
    door: str
    workers: int
    before: int
    after: int


class Diary:
    """The file to which a rank writes the samples of each batch."""

    def __init__(self, folder: Path, rank: int, kills: bool) -> None:
        self.file = (folder / f"rank{rank}.jsonl").open("a", buffering=1)
        self.kills = kills

    def enter(self, epoch: int, step: int, batch: Any) -> None:
        """Write the samples of a batch; ``step`` counts the batches since training began."""
        self.file.write(json.dumps({"epoch": epoch, "step": step, "numbers": batch["number"].tolist()}) + "\n")

    def strike(self, epoch: int, batch_idx: int) -> None:
        """Kill this process at the chosen batch."""
        if self.kills and (epoch, batch_idx) == KILL_AT:
            os.kill(os.getpid(), signal.SIGKILL)


class Small(TrainingModule):
    """A small model that records its samples in the diary."""

    def __init__(self, diary: Diary, make_loader: Callable[[], Any]) -> None:
        super().__init__()
        self.layer, self.diary, self.make_loader = nn.Linear(1, 1), diary, make_loader

    def train_dataloader(self) -> Any:
        return self.make_loader()  # some datasets read the number of ranks when they are created

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.diary.enter(self.trainer.current_epoch, self.trainer.global_step, batch)
        return self.layer(batch["number"][:, None] / SAMPLES).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Strike(Callback):
    """Kills the run at the chosen batch."""

    def __init__(self, diary: Diary) -> None:
        self.diary = diary

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.diary.strike(trainer.current_epoch, batch_idx)


def with_trainer(make_loader: Callable[[], Any], diary: Diary, kept: Path, world: int) -> None:
    """Run a fit, from the newest checkpoint if there is one."""
    saves = ModelCheckpoint(kept, every_n_train_steps=SAVE_EVERY, save_top_k=-1, filename="{step}")
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_epochs=EPOCHS,
        callbacks=[saves, Strike(diary)],
        **silent,
    )
    trainer.fit(Small(diary, make_loader), ckpt_path="last" if kept.exists() else None)


class Steps:
    """A step counter that is saved in the checkpoint."""

    done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def with_accelerator(make_loader: Callable[[], Any], diary: Diary, kept: Path, world: int) -> None:
    """Train in a custom loop, from the newest saved state if there is one."""
    accelerator, model, steps = Accelerator(cpu=True), nn.Linear(1, 1), Steps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
    if not isinstance(loader, DataLoader):
        raise TypeError(f"prepare() returns a {type(loader).__name__} unchanged, because it is not a DataLoader.")
    accelerator.register_for_checkpointing(steps)
    if kept.exists():
        accelerator.load_state(str(max(kept.iterdir(), key=lambda folder: int(folder.name))))
    for epoch in range(loader.epoch, EPOCHS):
        for batch in loader:
            diary.strike(epoch, loader.batches_done - 1)
            diary.enter(epoch, steps.done, batch)
            accelerator.backward(model(batch["number"][:, None] / SAMPLES).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            steps.done += 1
            if steps.done % SAVE_EVERY == 0:
                accelerator.save_state(str(kept / str(steps.done)))


DOORS = {"Trainer": with_trainer, "Accelerator": with_accelerator}


def rank_of(cell: Cell, data: Path, folder: Path, kept: Path, rank: int, world: int, kills: bool) -> None:
    """Train as one rank of a run."""
    make_loader = partial(FORMS[cell.form].loader, data, cell.workers, rank, world)
    DOORS[cell.door](make_loader, Diary(folder, rank, kills), kept, world)


def run(cell: Cell, data: Path, folder: Path, kept: Path, world: int, kills: bool = False) -> str:
    """Run all ranks in forked processes; return what went wrong, or an empty string."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    started = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            if world > 1:
                os.environ.update({name: str(value) for name, value in places.items()})
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            in_child(partial(rank_of, cell, data, folder, kept, rank, world, kills), folder / f"output{rank}.txt")
        started[pid] = rank
    return end_of(started, folder, -signal.SIGKILL if kills else 0)


def in_child(function: Callable[[], None], output: Path) -> NoReturn:
    """Call a function in a newly forked process, then exit the process."""
    status = 1
    try:
        os.setpgid(0, 0)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def end_of(started: dict[int, int], folder: Path, expected: int) -> str:
    """Wait for the ranks, by process ID; return what went wrong, or an empty string."""
    problem, deadline = "", time.monotonic() + LIMIT_SECONDS
    while started and not problem:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.01)
            problem = f"did not end within {LIMIT_SECONDS:.0f} s" if time.monotonic() > deadline else ""
            continue
        rank, code = started.pop(pid), os.waitstatus_to_exitcode(status)
        if code != expected:
            problem = last_line(folder / f"output{rank}.txt") or f"ended with {code} instead of {expected}"
    for left in started:
        os.kill(left, signal.SIGKILL)
        os.waitpid(left, 0)
    return problem


def last_line(output: Path) -> str:
    """Return the last line of the output, which names the error."""
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:400] if lines else ""


def entries(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the entries in each rank's diary."""
    found = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        found[int(path.stem[4:])] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def judge(whole: Path, killed: Path, resumed: Path) -> str:
    """Compare the killed and resumed run with an uninterrupted run."""
    before, after, expected = entries(killed), entries(resumed), entries(whole)
    if not any(after.values()):
        return "nothing after the resume"
    start = min(lines[0]["step"] for lines in after.values() if lines)
    kept = {rank: [line for line in lines if line["step"] < start] for rank, lines in before.items()}
    together = {rank: kept.get(rank, []) + after.get(rank, []) for rank in {**kept, **after}}
    counted = miscounts(together)
    if together == expected:
        return f"same; {counted}" if counted else "same"
    return counted or "each once"


def miscounts(found: dict[int, list[dict[str, Any]]]) -> str:
    """Return how many samples were lost or repeated in each epoch; empty if each appeared once."""
    told = []
    for epoch in range(EPOCHS):
        lines = [line for own in found.values() for line in own]
        counts = Counter(n for line in lines if line["epoch"] == epoch for n in line["numbers"])
        lost = sum(number not in counts for number in range(SAMPLES))
        again = sum(count - 1 for count in counts.values())
        if lost or again:
            told.append(f"epoch {epoch}: {lost} lost, {again} again")
    return "; ".join(told)


def cell_result(cell: Cell, data: Path, folder: Path) -> dict[str, Any]:
    """Run a cell; return its result."""
    kept, problem = folder / "kept", ""
    if cell.before == cell.after:
        problem = run(cell, data, folder / "whole", folder / "never", cell.before)
    for name, world, kills in (("killed", cell.before, True), ("resumed", cell.after, False)):
        problem = problem or run(cell, data, folder / name, kept, world, kills)
    said = "".join(path.read_text(errors="replace") for path in folder.glob("resumed/output*.txt"))
    result = problem or judge(folder / "whole", folder / "killed", folder / "resumed")
    return {**cell._asdict(), "result": result, "read_again": DISCARDED in said}


def write(form: Form, data: Path) -> None:
    """Write a form's samples in a separate process, because litdata changes the environment."""
    pid = os.fork()
    if pid == 0:
        in_child(partial(form.write, data), data.with_suffix(".txt"))
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(
            f"{form.package} could not write the samples; see {data.with_suffix('.txt')} (pass --folder to keep it)."
        )


def warm_up() -> None:
    """Import modules here that each forked process would otherwise import."""
    torch.compiler.reset()  # imports what DistributedDataParallel needs
    with tempfile.TemporaryDirectory() as folder:
        for name, door in DOORS.items():
            batches = [{"number": torch.ones(1)}] * SAVE_EVERY
            door(partial(DataLoader, batches, None), Diary(Path(folder), 0, kills=False), Path(folder) / name, 1)


def main() -> None:
    """Run the requested cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", required=True)
    parser.add_argument("--form", type=int, help="run only the form with this index in FORMS")
    parser.add_argument("--door", choices=list(DOORS))
    parser.add_argument("--workers", type=int)
    parser.add_argument("--worlds", help="number of ranks before and after the kill, for example 2-1")
    parser.add_argument("--folder", type=Path, help="folder in which to keep the files")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warm_up()
    base = chosen.folder or Path(tempfile.mkdtemp(prefix="streams-"))
    forms: list[tuple[int, Form]] = [
        (index, form)
        for index, form in enumerate(FORMS)
        if form.package == chosen.package and chosen.form in (None, index)
    ]
    worlds = [tuple(map(int, chosen.worlds.split("-")))] if chosen.worlds else [(1, 1), (2, 2), (2, 1)]
    for index, form in forms:
        data = base / f"data{index}"
        data.mkdir(parents=True)
        write(form, data)
        for door, workers, (before, after) in product(DOORS, (0, 2), worlds):
            if chosen.door in (None, door) and chosen.workers in (None, workers):
                cell = Cell(index, door, workers, before, after)
                folder = base / "-".join(map(str, cell))
                folder.mkdir()
                print(json.dumps(cell_result(cell, data, folder)), flush=True)


if __name__ == "__main__":
    main()

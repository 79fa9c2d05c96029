"""What Python's garbage collector costs a fit, and what GarbageCollection changes about it.

    python benchmarks/garbage_collection.py                  # every case, 5 rounds: some ten minutes on an idle machine
    python benchmarks/garbage_collection.py --cases list ddp --rounds 3
    python benchmarks/garbage_collection.py --smoke          # a few steps of everything: does it work?

A round makes one fit of each kind, in random order, each in a fresh process. Steps are timed by the CPU time of the
thread that trains, so that what else runs on the machine does not count; under DDP, where one process waits for the
other, by the wall clock too. The figures are medians over the rounds, "to python" that of the ratio of the means within
a round. ``gc`` is all the time that collections took from the second step on, ``full`` how many went over all objects.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from measuring import machine, progress, quiet_environment, spread, table
from torch import nn

from paceline import Trainer, TrainingModule
from paceline.callbacks import GarbageCollection
from paceline.loggers import TensorBoardLogger

SKIPPED = 200


class Case(NamedTuple):
    """What is trained: live objects beside the program's own, what a step keeps and what it leaves in cycles."""

    about: str
    live: int = 0
    keeps: int = 0
    cycles: int = 0
    processes: int = 1
    steps: int = 4_000


CASES = {
    "plain": Case("a step that logs three values"),
    "keeps": Case("... and keeps 10 dicts with a list in each", keeps=10),
    "cycles": Case("... and leaves 10 objects in reference cycles", cycles=10),
    "list": Case("a data set that is a list of 2 million objects", live=2_000_000),
    "list-keeps": Case("... and a step that keeps 100 such dicts", live=2_000_000, keeps=100),
    "ddp": Case("2 processes with lists of half a million, steps that keep 100", 500_000, 100, 0, 2, 1_500),
}
KINDS: dict[str, Any] = {
    "python": list,
    "freeze": lambda: [GarbageCollection(every_n_steps=None)],
    "every 50": lambda: [GarbageCollection()],
    "every 1000": lambda: [GarbageCollection(every_n_steps=1000)],
}


class Node:
    """Something to make a cycle of."""


class Steps(TrainingModule):
    """A small network that notes when its steps begin."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.layer = case, nn.Linear(8, 1)
        self.kept: list[Any] = []
        self.cpu: list[int] = []
        self.wall: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.cpu.append(time.thread_time_ns())
        self.wall.append(time.perf_counter_ns())
        found = self.layer(batch)
        loss = found.square().mean()
        self.log_dict({"loss": loss, "mean": found.mean(), "step": float(batch_idx)})
        self.kept += [{"step": batch_idx, "rows": [batch_idx]} for _ in range(self.case.keeps)]
        for _ in range(self.case.cycles):
            node = Node()
            node.itself = node  # type: ignore[attr-defined]
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Samples:
    """Batches of eight lists out of many."""

    def __init__(self, live: int, steps: int) -> None:
        self.samples = [[float(i % 7)] * 8 for i in range(max(live, 64))]
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        count = len(self.samples)
        for step in range(self.steps):
            yield torch.tensor([self.samples[(step * 8 + i) % count] for i in range(8)])


class Watch:
    """Adds up what collections take."""

    def __init__(self, module: Steps) -> None:
        self.module, self.seconds, self.full, self.begun = module, 0.0, 0, 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.begun = time.thread_time()
        elif len(self.module.cpu) >= 1:
            self.seconds += time.thread_time() - self.begun
            self.full += info["generation"] == 2


def fit(case: Case, kind: str) -> dict[str, float]:
    """One fit; microseconds a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, samples = Steps(case), Samples(case.live, case.steps)
    gc.callbacks.append(watch := Watch(module))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            strategy="ddp" if case.processes > 1 else "auto",
            max_epochs=1,
            callbacks=KINDS[kind](),
            logger=TensorBoardLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, samples)
    gc.callbacks.remove(watch)
    first = min(SKIPPED, case.steps // 2)
    found = {"gc": watch.seconds * 1e3, "full": float(watch.full)}
    for name, ticks, since in (("cpu", module.cpu, first), ("wall", module.wall, first), ("begin", module.cpu, 0)):
        times = sorted((after - before) / 1e3 for before, after in zip(ticks[since:], ticks[since + 1 :], strict=False))
        found |= {f"{name} mean": statistics.fmean(times), f"{name} median": statistics.median(times)}
        found |= {f"{name} p99": times[int(len(times) * 0.99)], f"{name} p99.9": times[int(len(times) * 0.999)]}
        found[f"{name} max"] = times[-1]
    found["weights"] = float(sum(p.detach().double().sum() for p in module.parameters()))
    return found


def measured(name: str, kind: str, smoke: bool) -> dict[str, float]:
    """The same, in fresh processes; of several, the rank that took most for each figure."""
    count, command = CASES[name].processes, [sys.executable, __file__, "--one", name, kind, *["--smoke"] * smoke]
    joined = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randint(20000, 60000)), "WORLD_SIZE": str(count)}
    started = []
    for rank in range(count):
        own = {**joined, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
        environment = {**quiet_environment(), **(own if count > 1 else {})}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
    found = []
    for process in started:
        out, _ = process.communicate(timeout=600)
        if process.returncode:
            raise RuntimeError(f"{name}, {kind} ended with status {process.returncode}: {' '.join(command)} shows why")
        found.append(json.loads(out.splitlines()[-1]))
    return {key: max(one[key] for one in found) for key in found[0]}


def report(name: str, rounds: dict[str, list[dict[str, float]]]) -> None:
    """A table of one case."""
    case = CASES[name]
    clock = "wall" if case.processes > 1 else "cpu"
    if len({run["weights"] for runs in rounds.values() for run in runs}) > 1:
        raise RuntimeError(f"{name}: the fits ended with other weights")
    rows = []
    for kind, runs in rounds.items():
        median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        pairs = zip(runs, rounds["python"], strict=True)
        ratios = [run[f"{clock} mean"] / other[f"{clock} mean"] for run, other in pairs]
        times = [median[f"{clock} {what}"] for what in ("mean", "median", "p99", "p99.9", "max")]
        ratio = f"{statistics.median(ratios):.3f} +- {spread(ratios):.3f}"
        rows.append([kind, ratio, *times, median["begin max"], median["gc"], int(median["full"])])
    print(f"\n{name}: {case.about} ({case.steps} steps, microseconds a step, {clock} time)\n")
    header = ["collector", "to python", "mean", "median", "p99", "p99.9", "max", "max, from step 1", "gc ms", "full"]
    print(table(header, rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--smoke", action="store_true", help="one round of a few steps")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        case = CASES[args.one[0]]
        print(json.dumps(fit(case._replace(steps=300, live=case.live // 100) if args.smoke else case, args.one[1])))
        return
    print(machine())
    order = random.Random(0)
    for name in args.cases:
        rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for number in range(1 if args.smoke else args.rounds):
            for kind in order.sample(list(KINDS), len(KINDS)):
                rounds[kind].append(measured(name, kind, args.smoke))
            progress(f"{name}: round {number + 1}, load {os.getloadavg()[0]:.1f}")
        report(name, rounds)


if __name__ == "__main__":
    main()

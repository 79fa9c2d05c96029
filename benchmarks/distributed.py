"""Two processes on this machine: what Paceline costs beside the same loop written by hand, and beside its peers.

    python benchmarks/distributed.py                            # everything but gpu: about half an hour
    python benchmarks/distributed.py time --rounds 10 --only "by hand" paceline
    python benchmarks/distributed.py count memory start
    python benchmarks/distributed.py gpu                        # one GPU: a transformer of 100 M parameters
    python benchmarks/distributed.py time count memory start gpu --smoke      # does it all work?

time         a step, replicated (ddp) and sharded (fsdp), tiny and of about 10 ms. A pair of processes per contestant
             stays warm; a round visits every pair in random order and times by hand, contestant, by hand back to back
             there, so that drifts of a shared machine cancel. Final weights are compared with the hand-written loop's.
count        how many torch.distributed operations a step issues, of which kind, seen by torch's profiler; and how many
             functions written in Python it calls. Exact: these figures need no quiet machine.
memory       peak resident memory of rank 0 while it shards and trains a transformer, in fresh processes.
start        from the start of the command to the end of the first step, on both ranks, in fresh processes.
gpu          steps of one process, plain and sharded over one, in bf16-mixed; on a machine without a GPU a tiny model
             on the CPU shows that it works.

With two GPUs the processes meet over NCCL and compute there; else over gloo, on the CPU.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from first_step import WAYS, command
from measuring import machine, progress, quiet_environment, spread, table
from pairs import Pair
from parallel import CONTESTANTS, Job

TINY = {"Tiny": Job(steps=300, warmup=50, block=50)}
TEN_MS = {"10 ms": Job(steps=40, warmup=10, block=10, layers=2, width=128, batch_size=8)}
LARGE = Job(parallel="fsdp", steps=4, warmup=2, block=4, tail=1, layers=12, width=512, vocabulary=4096, batch_size=2)
ON_GPU = Job(
    steps=60, warmup=20, block=20, layers=12, width=768, vocabulary=8192, context=1024, batch_size=16, device="cuda",
    precision="bf16-mixed",
)  # fmt: skip


def every(jobs: dict[str, Job], parallel: Sequence[str], **changes: Any) -> dict[str, Job]:
    return {f"{name}, {how}": replace(job, parallel=how, **changes) for name, job in jobs.items() for how in parallel}


class Rounds:
    """Asks every contestant in random order, round after round. One that breaks is left out from there on."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.broken: set[tuple[str, str]] = set()
        self.found: dict[tuple[str, str], list[Any]] = {}

    def run(self, rounds: int, jobs: Sequence[str], ask: Callable[[str, str], Any]) -> dict[tuple[str, str], list[Any]]:
        """What ``ask(name, job)`` returned, by both; it returns None where there is nothing to ask."""
        order = random.Random(0)
        for number in range(rounds):
            for job in jobs:
                for name in order.sample(self.names, len(self.names)):
                    if (job, name) not in self.broken:
                        self.visit(job, name, ask)
            progress(f"round {number + 1} of {rounds} done")
        return self.found

    def visit(self, job: str, name: str, ask: Callable[[str, str], Any]) -> None:
        try:
            answer = ask(name, job)
        except RuntimeError as error:
            self.broken.add((job, name))
            progress(f"{name}, {job}: {error}")
            return
        if answer is not None:
            self.found.setdefault((job, name), []).append(answer)


def time_steps(names: list[str], jobs: dict[str, Job], rounds: int, size: int) -> bool:
    """Print a table of step times for each job; the cheapest contestant first."""
    pairs = {name: Pair(name, size) for name in names}

    def ask(name: str, key: str) -> Any:
        return pairs[name].ask("time", jobs[key]) if CONTESTANTS[name].can(jobs[key]) else None

    visits = Rounds(names)
    found = visits.run(rounds, list(jobs), ask)
    for pair in pairs.values():
        pair.close()
    for key in jobs:
        rows = [time_row(name, found[key, name]) for name in names if (key, name) in found]
        rows.sort(key=lambda row: row[2])
        header = ["", "ms a step", "over by hand, us CPU", "ratio of CPU times", "+-", "of wall times", "+-"]
        print(f"\n### {key}\n\n{table(header, rows)}")
    return not visits.broken


def time_row(name: str, runs: list[dict[str, float]]) -> list[Any]:
    cpu, wall = [run["cpu"] / run["raw_cpu"] for run in runs], [run["wall"] / run["raw_wall"] for run in runs]
    over = statistics.median([run["cpu"] - run["raw_cpu"] for run in runs])
    ms = f"{statistics.median([run['wall'] for run in runs]) / 1e3:.2f}"
    ratios = [f"{value:.3f}" for ratio in (cpu, wall) for value in (statistics.median(ratio), spread(ratio))]
    return [name, ms, over, f"{ratios[0]}x", ratios[1], f"{ratios[2]}x", ratios[3]]


def count(names: list[str], jobs: dict[str, Job]) -> bool:
    """Print what a batch costs in figures that do not depend on the machine: collectives and Python calls."""
    rows, well = [], True
    for name in names:
        pair = Pair(name)
        for key, job in jobs.items():
            if not CONTESTANTS[name].can(job):
                continue
            try:
                kinds, calls = pair.ask("count", replace(job, steps=20, warmup=8, block=20, tail=8))
            except RuntimeError as error:
                progress(f"{name}, {key}: {error}")
                well = False
                break
            listed = ", ".join(f"{count:g} {kind}" for kind, count in kinds.items()) or "none"
            rows.append([key, name, listed, calls])
        pair.close()
    rows.sort(key=lambda row: list(jobs).index(row[0]))
    print(f"\n### What a batch issues\n\n{table(['', 'who', 'collectives of rank 0', 'Python calls'], rows)}")
    return well


def measure_memory(names: list[str], job: Job, rounds: int) -> bool:
    """Print peak resident memory: of all until the third step, and of the steps after it."""

    def ask(name: str, _: str) -> Any:
        if not CONTESTANTS[name].can(job):
            return None
        pair = Pair(name)
        try:
            return pair.ask("memory", job)
        finally:
            pair.close()

    visits = Rounds(names)
    found = visits.run(rounds, ["memory"], ask)
    medians = {
        name: [statistics.median([run[i] for run in runs]) for i in range(3)] for (_, name), runs in found.items()
    }
    base = medians.get("by hand")
    rows = []
    for name in names:
        if name in medians:
            before, begin, steps = medians[name]
            over = (
                [f"{mine / his - 1:+.1%}" for mine, his in zip((begin, steps), base[1:], strict=True)] if base else []
            )
            rows.append([name, before, begin, over[0] if over else None, steps, over[1] if over else None])
    header = [
        "",
        "before, MB",
        "peak until the third step, MB",
        "over by hand",
        "peak of later steps, MB",
        "over by hand",
    ]
    print(f"\n### Memory, fsdp\n\n{table(header, rows)}")
    return not visits.broken


def time_start(names: list[str], rounds: int) -> bool:
    """Print seconds from the start of a command to the end of its first step, and the CPU time of its processes."""
    visits = Rounds([way for way in WAYS if way.partition(",")[0] in names])

    def warm_up(way: str, _: str) -> None:
        start(way)  # fills the cache of the disk

    for way in visits.names:
        visits.visit("start", way, warm_up)
    found = {way: runs for (_, way), runs in visits.run(rounds, ["start"], lambda way, _: start(way)).items()}
    base = found.get(WAYS[0], [])
    rows = []
    for way, runs in found.items():
        row: list[Any] = [way]
        for i in range(2):
            ratios = [run[i] / one[i] for run, one in zip(runs, base, strict=False)] or [float("nan")]
            row += [
                statistics.median([run[i] for run in runs]),
                f"{statistics.median(ratios):.2f}x",
                f"{spread(ratios):.2f}",
            ]
        rows.append(row)
    rows.sort(key=lambda row: row[4])
    header = ["", "first step done after, s", "ratio", "+-", "CPU time of the whole, s", "ratio", "+-"]
    print(f"\n### Start\n\n{table(header, rows)}")
    return not visits.broken


def start(way: str) -> tuple[float, float]:
    """Run a command; seconds until both ranks have made their first step, and CPU seconds of all its processes."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, tempfile.TemporaryFile("w+") as log:
        began = time.time()
        process = subprocess.Popen(command(way, folder), env=quiet_environment(), stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
        stamps = [float(file.read_text()) for file in Path(folder).glob("stamp*")]
        if status or len(stamps) != 2:
            log.seek(0)
            raise RuntimeError((log.read().strip().splitlines() or ["no answer"])[-1])
        return max(stamps) - began, used.ru_utime + used.ru_stime


def gpu_jobs(smoke: bool) -> dict[str, Job]:
    job = ON_GPU
    if not torch.cuda.is_available():
        progress("there is no GPU: a tiny model on the CPU instead")
        job = replace(job, device="cpu", width=64, layers=2, context=32, batch_size=4, vocabulary=256)
    if smoke:
        job = replace(job, steps=8, warmup=4, block=4)
    return every({"Transformer": job}, ["none", "fsdp"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["time", "count", "memory", "start"]
    parser.add_argument("parts", nargs="*", default=parts, choices=[*parts, "gpu"], help="default: all but gpu")
    parser.add_argument("--rounds", type=int, default=20, help="of step times; memory and start take half as many")
    parser.add_argument("--only", nargs="*", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--smoke", action="store_true", help="one round of a few batches")
    args = parser.parse_args()
    names = [name for name in args.only if CONTESTANTS[name].available()]
    for name in set(args.only) - set(names):
        progress(f"{name} is not installed: left out")
    rounds = 1 if args.smoke else args.rounds
    two_gpus = torch.cuda.device_count() > 1
    few = {"steps": 8, "warmup": 4, "block": 4} if args.smoke else {}
    jobs = every(TINY | TEN_MS, ["ddp", "fsdp"], device="cuda" if two_gpus else "cpu", **few)
    print(machine())
    well = True
    if "time" in args.parts:
        well &= time_steps(names, jobs, rounds, size=2)
    if "count" in args.parts:
        four = {f"{key}, a step every 4": replace(job, accumulate=4) for key, job in jobs.items() if job.layers}
        well &= count(names, jobs | four)
    if "memory" in args.parts:
        well &= measure_memory(names, replace(LARGE, layers=2) if args.smoke else LARGE, max(1, rounds // 2))
    if "start" in args.parts:
        well &= time_start(names, max(1, rounds // 2))
    if "gpu" in args.parts:
        well &= time_steps(names, gpu_jobs(args.smoke), rounds, size=1)
    sys.exit(not well)


if __name__ == "__main__":
    main()

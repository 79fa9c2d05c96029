"""What a batch costs beside the same loop written by hand, and beside the peers that are installed.

    python benchmarks/step_overhead.py                          # every configuration, 5 rounds: a few minutes
    python benchmarks/step_overhead.py --configs off realistic --only raw paceline --rounds 3
    python benchmarks/step_overhead.py --smoke                  # a few batches of everything: does it work?

A round visits every contestant once, in random order, each in its own warm process, and times raw, contestant, raw back
to back there: drifts of a shared machine cancel. The figure is the median over the rounds of the ratio of CPU times;
raw against itself shows the noise. Bars are drawn to a (pseudo) terminal, as in real life. The final weights are
compared with the raw loop's.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import pty
import random
import statistics
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from contestants import CONTESTANTS, Raw
from measuring import CLOCK, Task, checksum, machine, progress, quiet_environment, spread, table

#: Configuration -> the hand-written loop that it is compared with, and what the row is about.
CONFIGS = {
    "off": ("off", "Everything optional off"),
    "log": ("off", "One value logged every step (against a loop that logs nothing)"),
    "realistic": ("off", "Three logged values, TensorBoard, progress bar, checkpoint (against a loop without any)"),
    "accumulate": ("accumulate", "A step every 4 batches"),
    "metric": ("metric", "A torchmetrics metric, logged (against updating it by hand)"),
    "manual": ("off", "Manual optimization (against the loop by hand)"),
    "validate": ("validate", "Validation (against evaluating by hand)"),
    "predict": ("predict", "Prediction, outputs kept (against a list of them by hand)"),
}


def start_worker(terminal: int) -> None:
    """Send everything a contestant prints to the terminal, and compute on one thread."""
    import torch

    os.dup2(terminal, 1)
    os.dup2(terminal, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    torch.set_num_threads(1)


def measure(name: str, task: Task) -> dict[str, Any]:
    """Raw, contestant, raw, back to back in this process: CPU and wall time of a batch."""

    def timed(who: Any, what: Task) -> tuple[float, float, float]:
        gc.collect()
        CLOCK.reset(what)
        net = who.run(what)
        if CLOCK.count + 1 != what.batches:
            raise RuntimeError(f"{name} ran {CLOCK.count + 1} batches of {what.batches}")
        return (*CLOCK.microseconds(), checksum(net))

    reference = replace(task, config=CONFIGS[task.config][0])
    before = timed(Raw(), reference)
    wall, cpu, weights = timed(CONTESTANTS[name](), task)
    after = timed(Raw(), reference)
    if abs(weights - after[2]) > 1e-4 * abs(after[2]):
        raise RuntimeError(f"{name} ended with other weights than the raw loop")
    raw_wall, raw_cpu = (before[0] + after[0]) / 2, (before[1] + after[1]) / 2
    return {"cpu": cpu, "raw_cpu": raw_cpu, "ratio": cpu / raw_cpu, "wall_ratio": wall / raw_wall}


class Terminal:
    """A pseudo terminal, 80 x 24, that somebody reads."""

    def __init__(self) -> None:
        self.reader, self.writer = pty.openpty()
        import fcntl
        import struct
        import termios

        fcntl.ioctl(self.writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.set_inheritable(self.writer, True)
        threading.Thread(target=self.drain, daemon=True).start()

    def drain(self) -> None:
        while os.read(self.reader, 65536):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--configs", nargs="*", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--only", nargs="*", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--smoke", action="store_true", help="one round of a few batches")
    args = parser.parse_args()
    size = {"steps": 40, "warmup": 10, "block": 10} if args.smoke else {}
    tasks = [Task(config=config, accumulate=4 if config == "accumulate" else 1, **size) for config in args.configs]
    names = [name for name in args.only if CONTESTANTS[name].available()]
    for name in set(args.only) - set(names):
        progress(f"{name} is not installed: left out")

    os.environ.update(quiet_environment(), TERM="xterm-256color")
    terminal = Terminal()
    # Started by fork, so that the workers share the terminal; nothing has computed in this process yet.
    fork = multiprocessing.get_context("fork")
    pools = {n: ProcessPoolExecutor(1, fork, initializer=start_worker, initargs=(terminal.writer,)) for n in names}
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    failed: set[tuple[str, str]] = set()
    order = random.Random(0)
    for number in range(1 if args.smoke else args.rounds):
        for task in tasks:
            for name in order.sample(names, len(names)):
                key = (task.config, name)
                if task.config not in CONTESTANTS[name].configs or key in failed:
                    continue
                try:
                    results.setdefault(key, []).append(pools[name].submit(measure, name, task).result())
                except Exception as error:  # a peer that breaks must not end the comparison
                    failed.add(key)
                    progress(f"{name}, {task.config}: {type(error).__name__}: {error}")
        progress(f"round {number + 1} done")
    for pool in pools.values():
        pool.shutdown()
    report(tasks, names, results)
    sys.exit(bool(failed))


def report(tasks: list[Task], names: list[str], results: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    """Print a table per configuration, the cheapest contestant first."""
    print(machine())
    for task in tasks:
        rows = []
        for name in names:
            runs = results.get((task.config, name), [])
            if runs:
                median = {key: statistics.median([run[key] for run in runs]) for key in runs[0]}
                noise = spread([run["ratio"] for run in runs])
                over = statistics.median([run["cpu"] - run["raw_cpu"] for run in runs])
                ratios = [f"{median['ratio']:.2f}x", f"{noise:.2f}", f"{median['wall_ratio']:.2f}x"]
                rows.append([name, median["cpu"], over, *ratios])
        rows.sort(key=lambda row: row[2])
        print(f"\n### {CONFIGS[task.config][1]}\n")
        print(table(["", "us a batch (CPU)", "over raw", "ratio", "+-", "ratio (wall)"], rows))


if __name__ == "__main__":
    main()

"""Resident memory of a training: its peak on a model of 100 million parameters, and whether a long run grows.

    python benchmarks/memory.py                 # about three minutes
    python benchmarks/memory.py --only raw paceline --rounds 5

Every figure comes from a fresh process. ``peak``: ten steps of the large model, everything optional off. ``growth``:
resident memory after 22,000 batches of a tiny model less that after 2,000, off and in the realistic set-up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys

from contestants import CONTESTANTS, Contestant
from measuring import CLOCK, Clock, Task, in_fresh_process, machine, progress, rss_mb, table

LARGE = Task(steps=8, warmup=1, block=4, tail=1, width=2048, depth=24)  # 24 layers of 2048 x 2048: 100.8 M parameters
FIRST, LAST = 2_000, 22_000
LONG = Task(steps=20_000, warmup=2_000, block=20_000)


def peak(contestant: Contestant) -> float:
    """Peak resident memory, MB."""
    contestant.run(LARGE)
    return rss_mb("VmHWM")


def growth(contestant: Contestant, config: str) -> float:
    """What 20,000 batches add to resident memory, MB."""
    found = []
    tick = Clock.tick

    def tick_and_look(clock: Clock) -> None:
        tick(clock)
        if clock.count in (FIRST, LAST):
            found.append(rss_mb())

    Clock.tick = tick_and_look
    CLOCK.reset(LONG)
    contestant.run(Task(config=config, steps=LONG.steps, warmup=LONG.warmup, block=LONG.block))
    return found[1] - found[0]


def child(name: str, what: str) -> None:
    """Measure one thing and print it as the last line of standard output."""
    import torch

    torch.set_num_threads(1)
    contestant = CONTESTANTS[name]()
    value = peak(contestant) if what == "peak" else growth(contestant, what)
    print("\n" + json.dumps(value), flush=True)


def ask(name: str, what: str) -> float:
    """Measure in a fresh process."""
    # By default glibc keeps freed blocks of up to 32 MB in its heap once it has seen one, so that the peak wobbles by
    # one or two of this model's weights. With a fixed threshold what is freed is gone: the peak is what was alive.
    return in_fresh_process(__file__, "--child", name, what, TERM="dumb", MALLOC_MMAP_THRESHOLD_=str(2**20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        sys.stdout.flush()
        os._exit(0)
    names = [name for name in args.only if CONTESTANTS[name].available()]
    what = ("peak", "off", "realistic")
    results: dict[str, dict[str, list[float]]] = {name: {w: [] for w in what} for name in names}
    order = random.Random(0)
    for number in range(args.rounds):
        for name in order.sample(names, len(names)):
            for w in what:
                try:
                    results[name][w].append(ask(name, w))
                except RuntimeError as error:
                    progress(f"{name}, {w}: {error}")
        progress(f"round {number + 1} done")
    report(results)


def report(results: dict[str, dict[str, list[float]]]) -> None:
    """Print the medians over the rounds."""
    median = {n: {w: statistics.median(v) if v else None for w, v in r.items()} for n, r in results.items()}
    raw = median.get("raw", {}).get("peak")
    rows = []
    for name, values in median.items():
        over = f"{values['peak'] / raw - 1:+.1%}" if raw and values["peak"] else None
        grown = [None if values[w] is None else f"{values[w]:+.2f}" for w in ("off", "realistic")]
        rows.append([name, values["peak"], over, *grown])
    print(machine(), end="\n\n")
    print(table(["", "peak, 100 M parameters, MB", "over raw", "growth off, MB", "growth realistic, MB"], rows))


if __name__ == "__main__":
    main()

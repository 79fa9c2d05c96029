"""Time to the first batch of a resumed epoch: does going on at batch 1,000,000 take longer than at batch 10?

    python benchmarks/resume.py [--batches 1000100] [--batch-size 8]

Each line: how the loader is read, seconds from the request to the first batch at batch 10 and at batch 1,000,000, and
of a fresh start. Nothing is trained; the data set's items are numbers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SubsetRandomSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paceline.data.batches import Batches
from paceline.data.loaders import seed_shuffling
from paceline.data.sharding import shard_training


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def seconds(loader: Any, start: int) -> float:
    seed_shuffling(loader, 0, 0)
    batches = Batches(loader, skip=start, seed=1)
    begun = perf_counter()
    next(iter(batches))
    spent = perf_counter() - begun
    batches.close()
    return spent


def loaders(size: int, batch: int) -> dict[str, Any]:
    data = Numbers(size)
    indices = range(size)
    subset = BatchSampler(SubsetRandomSampler(indices), batch, False)
    replaced = BatchSampler(RandomSampler(data, replacement=True), batch, False)
    return {
        "in order": DataLoader(data, batch_size=batch),
        "shuffled": DataLoader(data, batch_size=batch, shuffle=True),
        "shuffled, 2 workers": DataLoader(data, batch_size=batch, shuffle=True, num_workers=2),
        "subset": DataLoader(data, batch_sampler=subset),
        "with replacement": DataLoader(data, batch_sampler=replaced),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=1_000_100, help="batches of the epoch, on each process")
    parser.add_argument("--batch-size", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'loader':<36}{'fresh':>9}{'batch 10':>10}{'batch 1,000,000':>17}")
    for world in (1, 4):
        for name, loader in loaders(given.batches * given.batch_size * world, given.batch_size).items():
            part = shard_training(loader, world - 1, world)
            times = [seconds(part, start) for start in (0, 10, 1_000_000)]
            line = f"{name}{f', rank 3 of {world}' if world > 1 else '':<14}"
            print(f"{line:<36}{times[0]:>9.3f}{times[1]:>10.3f}{times[2]:>17.3f}", flush=True)


if __name__ == "__main__":
    main()

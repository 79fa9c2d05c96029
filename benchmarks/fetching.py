"""What fetching a batch costs: torch's DataLoader beside the same loader read by Paceline.

    python benchmarks/fetching.py             # a table; a minute
    python benchmarks/fetching.py --smoke

The data are 20,000 samples of 64 floats and a label in memory, shuffled, without workers. CPU time of a whole pass by
the number of its batches; each figure is the median of several passes, the two taken in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from measuring import machine, table
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from paceline.data.batches import Batches


class Own(Dataset):
    """Your own data set: its ``__getitem__`` is called for each sample, whoever fetches."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def passed(batches: Iterable[Any]) -> float:
    """CPU microseconds of a batch."""
    begun, count = time.process_time(), 0
    for _ in batches:
        count += 1
    return (time.process_time() - begun) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="one pass over few samples")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = 1000 if args.smoke else 20_000
    generator = torch.Generator().manual_seed(1)
    whole = TensorDataset(torch.randn(size, 64, generator=generator), torch.randint(10, (size,), generator=generator))
    part = random_split(whole, [0.75, 0.25], generator)[0]
    rows = []
    for name, data in (("TensorDataset", whole), ("random_split of it", part), ("your own data set", Own(whole))):
        for batch_size in (8, 32, 64, 256):
            loader = DataLoader(data, batch_size, shuffle=True, generator=torch.Generator())
            times = [(passed(loader), passed(Batches(loader))) for _ in range(1 if args.smoke else args.passes)]
            torchs, ours = (statistics.median(column) for column in zip(*times, strict=True))
            rows.append([name, batch_size, torchs, ours, f"{torchs / ours:.1f}x"])
    print(machine() + "\n")
    print(table(["", "batch size", "DataLoader, us a batch", "Paceline", "faster"], rows))


if __name__ == "__main__":
    main()

"""``accelerate``'s samplers and datasets that give each process its shard, for loops that use them directly.

``prepare`` does not use them. Like Accelerate's samplers, they repeat samples from the beginning if the last samples do
not fill a batch on every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler


class SeedableRandomSampler(RandomSampler):
    """A RandomSampler whose order depends only on a seed and the index of the pass.

    Args:
        *args: arguments of ``RandomSampler``.
        data_seed: the seed; None means torch's initial seed.
        **kwargs: arguments of ``RandomSampler``.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the index of the next pass; the index determines the sample order."""
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """The shard of a batch sampler's batches that one process reads.

    Args:
        batch_sampler: sampler that yields the batches of all processes.
        num_processes: number of processes.
        process_index: the process, 0-based.
        split_batches: whether each process gets a part of each batch; otherwise, it gets every ``num_processes``-th
            batch.
        even_batches: whether samples from the beginning are repeated, so that all processes get the same number of
            full batches; batches of varying size are repeated unchanged. If False, the last batches are missing or
            short on some processes.

    Raises:
        ValueError: ``split_batches`` is set and batches of this size cannot be split equally.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        size = getattr(batch_sampler, "batch_size", None)
        if split_batches and (size is None or size % num_processes):
            raise ValueError(
                f"BatchSamplerShard(split_batches=True) cannot split batches of {size} samples into {num_processes} "
                "equal parts. Choose a batch size that is divisible by the number of processes, or leave out "
                "split_batches."
            )
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: Any = size
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    @property
    def total_length(self) -> int:
        """Total number of batches across all processes."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        if self.split_batches:
            return self.total_length
        rounds, rest = divmod(self.total_length, self.num_processes)
        if not rest or self.drop_last:
            return rounds
        return rounds + (self.even_batches or self.process_index < rest)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._parts() if self.split_batches else self._turns()

    def _parts(self) -> Iterator[list[Any]]:
        """Yield this process's shard of each batch."""
        size, first = self.batch_size, None
        rows = size // self.num_processes
        start = rows * self.process_index
        for batch in self.batch_sampler:
            first = first or batch
            if len(batch) < size:
                if self.drop_last:
                    continue
                if self.even_batches:
                    batch = [*batch, *islice(cycle(first), size - len(batch))]
            part = batch[start : start + rows]
            if part:
                yield part

    def _turns(self) -> Iterator[list[Any]]:
        """Yield this process's batch from each round."""
        world, size, batches = self.num_processes, self.batch_size, iter(self.batch_sampler)
        first: list[list[Any]] = []
        while together := list(islice(batches, world)):
            first = first or together
            full = len(together) == world and (size is None or len(together[-1]) == size)
            if not full and self.drop_last:
                return
            if not full and self.even_batches and size is None:
                together = [*together, *islice(cycle(first), world - len(together))]
            elif not full and self.even_batches and size is not None:
                rows = list(islice(chain(*together, cycle(chain.from_iterable(first))), world * size))
                together = [rows[start : start + size] for start in range(0, world * size, size)]
            if self.process_index < len(together):
                yield together[self.process_index]


class SkipBatchSampler(BatchSampler):
    """Wraps a batch sampler and skips its first batches."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    @property
    def total_length(self) -> int:
        """Number of batches, including the skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(self.total_length - self.skip_batches, 0)

    def __iter__(self) -> Iterator[list[Any]]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)


class IterableDatasetShard(IterableDataset[Any]):
    """The shard of an iterable dataset that one process uses, although every process iterates over the entire dataset.

    Args:
        dataset: dataset that yields the samples of all processes.
        batch_size: number of samples in a batch of one process or, with ``split_batches``, of all processes together.
        drop_last: whether to drop samples that do not fill a batch on every process; otherwise samples from the
            beginning are repeated.
        num_processes: number of processes.
        process_index: the process, 0-based.
        split_batches: whether ``batch_size`` counts the samples of all processes.

    Raises:
        ValueError: ``split_batches`` is set and batches of this size cannot be split equally.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise ValueError(
                f"IterableDatasetShard(split_batches=True) cannot split batches of {batch_size} samples into "
                f"{num_processes} equal parts. Choose a batch size that is divisible by the number of processes, or "
                "leave out split_batches."
            )
        self.dataset: Any = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the index of the next pass; the index determines the sample order."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def _sizes(self) -> tuple[int, int]:
        """Number of samples per round for all processes together, and for one process."""
        if self.split_batches:
            return self.batch_size, self.batch_size // self.num_processes
        return self.batch_size * self.num_processes, self.batch_size

    def __len__(self) -> int:
        every, own = self._sizes
        rounds, rest = divmod(len(self.dataset), every)
        return (rounds + (rest > 0 and not self.drop_last)) * own

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator):
            generator.manual_seed(self.epoch)
        every, own = self._sizes
        samples, first, start = iter(self.dataset), None, own * self.process_index
        while rows := list(islice(samples, every)):
            first = first or rows
            if len(rows) < every:
                if self.drop_last:
                    return
                rows += islice(cycle(first), every - len(rows))
            yield from rows[start : start + own]

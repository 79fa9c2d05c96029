"""Batches are left out by counting indices: what comes after them is what would have come."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.data.batches import Batches
from paceline.data.combined_loader import CombinedLoader
from paceline.data.loaders import seed_shuffling
from paceline.data.sample_order import from_item
from paceline.data.sharding import shard_training


class Items(Dataset[Any]):
    def __init__(self, size: int = 23) -> None:
        self.size, self.loaded = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        return index


class Augmented(Items):
    def __getitem__(self, index: int) -> Any:
        return index, random.random(), torch.rand(()).item()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: SequentialSampler(Items()),
    "shuffled": lambda: RandomSampler(Items(), generator=generator()),
    "with replacement": lambda: RandomSampler(Items(), replacement=True, num_samples=70, generator=generator()),
    "more than once": lambda: RandomSampler(Items(), num_samples=50, generator=generator()),
    "subset": lambda: SubsetRandomSampler(range(3, 20), generator=generator()),
    "weighted": lambda: WeightedRandomSampler(torch.rand(9).tolist(), 30, generator=generator()),
    "list": lambda: [4, 2, 7, 1],
    "batches": lambda: BatchSampler(RandomSampler(Items(), generator=generator()), 4, False),
    "whole batches": lambda: BatchSampler(RandomSampler(Items(), generator=generator()), 4, True),
}


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_from_an_item_on_a_sampler_yields_and_draws_what_it_would_have(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    whole = make()
    expected = list(whole)
    for count in (0, 1, 3, len(expected), len(expected) + 2):
        torch.manual_seed(0)
        sampler = make()
        assert list(from_item(sampler, count)) == expected[count:]
        inner = getattr(sampler, "sampler", sampler)
        if getattr(inner, "generator", None) is not None:
            used = getattr(whole, "sampler", whole).generator
            assert torch.equal(inner.generator.get_state(), used.get_state())


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Items(), batch_size=2, shuffle=True),
    "dropped last": lambda: DataLoader(Items(), batch_size=2, shuffle=True, drop_last=True),
    "batch sampler": lambda: DataLoader(Items(), batch_sampler=[[1, 2], [3], [4, 5, 6], [7], [8], [9, 0], [2]]),
    "single": lambda: DataLoader(Items(), batch_size=None, shuffle=True),
}


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_rank_is_entered_anywhere_without_loading_what_was_before(make: Callable[[], Any], world: int) -> None:
    def batches(rank: int, skip: int) -> list[Any]:
        loader = make()
        part = shard_training(loader, rank, world)
        seed_shuffling(part, 1, 2)
        found = list(Batches(part, skip=skip))
        assert loader.dataset.loaded == sum(b.numel() if hasattr(b, "numel") else 1 for b in found)
        return [str(batch) for batch in found]

    for rank in range(world):
        whole = batches(rank, 0)
        for skip in (1, 2, len(whole)):
            assert batches(rank, skip) == whole[skip:]


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_combined_loaders_are_entered_anywhere_without_loading_what_was_before(mode: Any) -> None:
    def batches(skip: int) -> list[str]:
        sizes = (23, 5, 9)
        data = [Items(size) for size in sizes]
        loader = CombinedLoader([DataLoader(part, batch_size=2, shuffle=True) for part in data], mode)
        loader.limits = [float("inf"), float("inf"), 4]
        seed_shuffling(loader, 1, 2)
        batches = Batches(loader, skip=skip)
        iterator = iter(batches)
        assert [part.loaded for part in data] == [0, 0, 0]
        return [str(batch) for batch in iterator]

    whole = batches(0)
    for skip in range(len(whole) + 1):
        assert batches(skip) == whole[skip:]


@pytest.mark.parametrize("persistent", [False, True])
def test_the_number_of_workers_and_the_place_of_entry_change_no_sample(persistent: bool) -> None:
    def epochs(workers: int, skip: int = 0) -> list[str]:
        loader = DataLoader(Augmented(), 4, shuffle=True, num_workers=workers, persistent_workers=persistent)
        found = []
        for epoch in range(2):
            seed_shuffling(loader, 1, epoch)
            batches = Batches(loader, skip=skip, seed=epoch)
            found += [str(batch) for batch in batches]
            batches.close()
        return found

    expected = epochs(1)
    assert epochs(3) == expected
    assert epochs(2, skip=4) == expected[4:6] + expected[10:]
    assert len(set(expected)) == 12


def test_workers_without_a_seed_draw_as_torch_makes_them() -> None:
    def batches(how: Callable[[DataLoader[Any]], Any]) -> list[str]:
        torch.manual_seed(3)
        return [str(batch) for batch in how(DataLoader(Augmented(6), 2, num_workers=1))]

    assert batches(Batches) == batches(lambda loader: loader)


def test_skipping_says_once_what_it_costs_where_batches_have_to_be_loaded(caplog: pytest.LogCaptureFixture) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(range(10))

    caplog.set_level("INFO", logger="paceline")
    for _ in range(2):
        assert [batch.tolist() for batch in Batches(DataLoader(Stream(), 2), skip=4)] == [[8, 9]]
    assert caplog.text.count("To start after batch 4 of the epoch, all batches up to it were loaded and discarded") == 1
    assert list(islice(Batches([1, 2, 3], skip=2), 5)) == [3]

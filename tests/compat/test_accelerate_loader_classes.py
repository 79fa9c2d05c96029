"""Accelerate's loader classes: created by hand, and as the classes of prepared loaders."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from paceline import DataLoaderConfiguration, set_seed, skip_first_batches
from paceline.accelerator.loaders import PreparedLoader
from paceline.accelerator.process_state import AcceleratorState
from paceline.compat.accelerate.accelerator import Accelerator
from paceline.compat.accelerate.gradient_state import GradientState
from paceline.compat.accelerate.loader_classes import (
    DataLoaderAdapter,
    DataLoaderDispatcher,
    DataLoaderShard,
    SkipDataLoader,
    get_sampler,
)
from paceline.compat.accelerate.processes import prepare_data_loader
from paceline.compat.accelerate.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)

SAMPLES = list(range(10))


class Stream(IterableDataset[int]):
    """The numbers 0 to 9."""

    def __iter__(self) -> Iterator[int]:
        yield from SAMPLES


@pytest.fixture(autouse=True)
def no_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def rows(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


# ---- samplers --------------------------------------------------------------------------------------------------------


def parts(sampler: Any, world: int, **options: bool) -> list[list[list[int]]]:
    """The batches of each process."""
    found = [BatchSamplerShard(sampler, world, rank, **options) for rank in range(world)]
    assert [len(one) for one in found] == [len(list(one)) for one in found]
    assert {one.total_length for one in found} == {len(sampler)}
    return [list(one) for one in found]


def test_batches_are_dealt_to_processes() -> None:
    whole, short = BatchSampler(range(8), 2, False), BatchSampler(range(5), 2, False)
    assert parts(whole, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert parts(short, 2) == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    assert parts(short, 2, even_batches=False) == [[[0, 1], [4]], [[2, 3]]]
    assert parts(BatchSampler(range(5), 2, True), 2) == [[[0, 1]], [[2, 3]]]
    assert parts(BatchSampler(range(1), 2, False), 3) == [[[0, 0]]] * 3


def test_batches_are_split_among_processes() -> None:
    short = BatchSampler(range(5), 4, False)
    assert parts(short, 2, split_batches=True) == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    uneven = [list(BatchSamplerShard(short, 2, rank, True, even_batches=False)) for rank in range(2)]
    assert uneven == [[[0, 1], [4]], [[2, 3]]]
    with pytest.raises(ValueError, match="cannot split batches of 3 samples into 2 equal parts"):
        BatchSamplerShard(BatchSampler(range(5), 3, False), 2, 0, split_batches=True)


def test_batches_of_varying_size_are_dealt_as_they_are() -> None:
    sizes = [[0, 1], [2, 3, 4], [5]]
    assert parts(sizes, 2, even_batches=False) == [[[0, 1], [5]], [[2, 3, 4]]]
    assert parts(sizes, 2) == [[[0, 1], [5]], [[2, 3, 4], [0, 1]]]


def test_a_stream_is_dealt_to_processes() -> None:
    def own(**options: Any) -> list[list[int]]:
        return [list(IterableDatasetShard(Stream(), num_processes=2, process_index=i, **options)) for i in range(2)]

    assert own(batch_size=3) == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 0, 1]]
    assert own(batch_size=3, drop_last=True) == [[0, 1, 2], [3, 4, 5]]
    assert own(batch_size=4, split_batches=True) == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 0, 1]]
    assert [len(IterableDatasetShard(SAMPLES, 4, False, 2, 0, split)) for split in (True, False)] == [6, 8]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot split batches of 3"):
        own(batch_size=3, split_batches=True)


def test_a_seedable_sampler_has_the_order_of_a_prepared_loader() -> None:
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    set_seed(3)
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(SAMPLES, 2, shuffle=True))  # type: ignore[arg-type]
    sampler = SeedableRandomSampler(SAMPLES, data_seed=3)
    by_hand = DataLoader(SAMPLES, 2, sampler=sampler)  # type: ignore[arg-type]
    passes = [rows(by_hand) for _ in range(3)]
    assert passes == [rows(loader) for _ in range(3)]
    sampler.set_epoch(1)
    assert rows(by_hand) == passes[1]


def test_first_batches_are_skipped() -> None:
    sampler = SkipBatchSampler(BatchSampler(SAMPLES, 4, False), 1)
    assert (list(sampler), len(sampler), sampler.total_length) == ([[4, 5, 6, 7], [8, 9]], 2, 3)
    loader = SkipDataLoader(SAMPLES, batch_size=4, skip_batches=2)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, DataLoaderAdapter)
    assert [rows(loader), rows(loader), len(loader)] == [[[8, 9]], [[8, 9]], 1]


# ---- loaders ---------------------------------------------------------------------------------------------------------


def test_prepared_loaders_are_instances_of_the_class_that_reads_them() -> None:
    accelerator = Accelerator(cpu=True)
    kinds = [type(accelerator.prepare(DataLoader(data, 2))) for data in (SAMPLES, Stream())]  # type: ignore[arg-type]
    dispatching = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    kinds.append(type(dispatching.prepare(DataLoader(SAMPLES, 2))))  # type: ignore[arg-type]
    assert kinds == [DataLoaderShard, DataLoaderDispatcher, DataLoaderDispatcher]
    skipping = accelerator.skip_first_batches(accelerator.prepare(DataLoader(SAMPLES, 2)), 3)  # type: ignore[arg-type]
    assert type(pickle.loads(pickle.dumps(skipping))) is type(copy.copy(skipping)) is DataLoaderShard
    assert rows(skipping) == [[6, 7], [8, 9]]


def test_a_shard_created_by_hand_reads_its_data_and_knows_its_end() -> None:
    loader = DataLoaderShard(SAMPLES, device="cpu", batch_size=4, shuffle=False, skip_batches=1, _drop_last=False)
    ends = []
    for batch in loader:
        ends.append((batch.tolist(), loader.end_of_dataloader, GradientState().end_of_dataloader))
    assert ends == [([4, 5, 6, 7], False, False), ([8, 9], True, True)]
    assert (loader.total_batch_size, loader.total_dataset_length, loader.remainder) == (4, 10, 2)
    sampler = BatchSamplerShard(BatchSampler(RandomSampler(SAMPLES), 2, False), 2, 1)
    other = DataLoaderShard(SAMPLES, batch_sampler=sampler, rng_types=["torch"])
    assert len(rows(other)) == len(other) == 3
    assert isinstance(get_sampler(DataLoader(SAMPLES, 2, shuffle=True)), RandomSampler)  # type: ignore[arg-type]
    loader = DataLoaderShard(SAMPLES, batch_size=4)
    next(iter(loader))
    assert rows(skip_first_batches(loader, 2)) == [[8, 9]]


def dispatched() -> list[Any]:
    Accelerator(cpu=True)
    whole = DataLoaderDispatcher(list(range(8)), batch_size=2)
    split = DataLoaderDispatcher(list(range(8)), batch_size=4, split_batches=True, skip_batches=1)
    return [rows(whole), rows(split)]


def test_a_dispatcher_created_by_hand_is_read_by_process_0_for_all() -> None:
    assert ranks(2, dispatched) == [[[[0, 1], [4, 5]], [[4, 5]]], [[[2, 3], [6, 7]], [[6, 7]]]]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_part_of_any_process_can_be_prepared(workers: int) -> None:
    def part(data: Any, rank: int, **options: Any) -> list[list[int]]:
        loader = DataLoader(data, batch_size=2, num_workers=workers)
        return rows(prepare_data_loader(loader, num_processes=2, process_index=rank, **options))

    eight = list(range(8))
    assert [part(eight, rank) for rank in range(2)] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [part(eight, rank, split_batches=True)[0] for rank in range(2)] == [[0], [1]]


class Shards(IterableDataset[int]):
    """A stream with the attributes of ``datasets.IterableDataset`` that a loader reads."""

    def __init__(self, shards: list[list[int]], split: Any = None) -> None:
        self.shards, self.num_shards, self._distributed = shards, len(shards), split

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(*self.shards)


def split_dataset_by_node(dataset: Shards, rank: int, world_size: int) -> Shards:
    own = len(dataset.shards) // world_size
    return Shards(dataset.shards[rank * own : (rank + 1) * own], SimpleNamespace(rank=rank, world_size=world_size))


def test_each_process_reads_its_own_shards_of_a_stream_of_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shards, "__module__", "datasets.iterable_dataset")
    function = SimpleNamespace(split_dataset_by_node=split_dataset_by_node)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(distributed=function))
    monkeypatch.setitem(sys.modules, "datasets.distributed", function)
    opened: list[list[int]] = []

    def part(shards: list[list[int]], rank: int) -> list[int]:
        loader = prepare_data_loader(DataLoader(Shards(shards), 2), num_processes=2, process_index=rank)
        opened.append(list(loader.dataset))
        return [x for batch in loader for x in batch.tolist()]

    two, three = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [part(two, rank) for rank in range(2)] == two == opened
    assert sorted(part(three, 0) + part(three, 1)) == list(range(8))


def test_a_stateful_loader_is_torchdatas() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    for data in (SAMPLES, Stream()):
        loader = accelerator.prepare(DataLoader(data, 2))  # type: ignore[arg-type]
        assert isinstance(loader, stateful)
        assert isinstance(loader, PreparedLoader)
        assert loader.use_stateful_dataloader
        iterator = iter(loader)
        seen = [next(iterator).tolist(), next(iterator).tolist()]
        other = accelerator.prepare(DataLoader(data, 2))  # type: ignore[arg-type]
        other.load_state_dict(loader.state_dict())
        assert [*seen, *rows(other)] == rows(DataLoader(data, 2))  # type: ignore[arg-type]
        assert type(pickle.loads(pickle.dumps(accelerator.prepare(DataLoader(data, 2))))) is type(loader)  # type: ignore[arg-type]
    for kind in (DataLoaderShard, DataLoaderDispatcher, SkipDataLoader):

        class Own(kind):
            pass

        for one in (kind, Own):
            loader = one(SAMPLES, batch_size=4, skip_batches=1, use_stateful_dataloader=True)
            assert isinstance(loader, stateful)
            assert isinstance(loader, one)
            assert rows(loader) == [[4, 5, 6, 7], [8, 9]]
            assert loader.state_dict()


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher, SkipDataLoader])
def test_a_loader_created_by_hand_holds_a_plain_loader(kind: Any) -> None:
    loader = kind(SAMPLES, batch_size=4)
    assert type(loader.base_dataloader) is DataLoader
    assert loader.base_dataloader.dataset is loader.dataset
    assert not loader.use_stateful_dataloader


def test_a_model_trains_on_a_shard_created_by_hand() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    steps = 0
    for batch in DataLoaderShard(torch.ones(3, 1), batch_size=1):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
    assert steps == 2

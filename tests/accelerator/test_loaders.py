"""What prepared loaders yield, say about themselves, and remember."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import pickle
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_processes import ranks
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from paceline import messages
from paceline.accelerator.loaders import (
    DataLoaderConfiguration,
    PreparedLoader,
    prepare_data_loader,
    skip_first_batches,
)
from paceline.accelerator.operations import gather_for_metrics
from paceline.processes.seed import host_random_states, set_random_states
from paceline.strategies import DDPStrategy, Strategy

CPU = torch.device("cpu")


class OneOf(Strategy):
    """One rank of several, as far as the arithmetic of dividing asks: nothing is sent."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self._place = (rank, world)

    @property
    def world_size(self) -> int:
        return self._place[1]

    @property
    def global_rank(self) -> int:
        return self._place[0]

    def gather_objects(self, obj: Any, group: Any = None) -> list[Any]:
        return [obj] * self.world_size


class Spy:
    """A gradient state that writes down what it is told."""

    observers = ()

    def __init__(self) -> None:
        self.active_dataloader: Any = None
        self.told: list[str] = []

    def begin(self, loader: Any) -> None:
        self.told.append("begin")

    def end(self, loader: Any) -> None:
        self.told.append("end")
        self.active_dataloader = None

    def on_pass(self, loader: Any) -> None:
        self.told.append("on_pass")


def joined(world: int = 2) -> DDPStrategy:
    strategy = DDPStrategy()
    strategy.place([CPU] * world)
    strategy.setup_environment()
    return strategy


class Numbers(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return index


class Augmented(Numbers):
    """Draws from all three libraries."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random(), float(np.random.rand()), float(torch.rand(()))])


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.count):
            yield torch.tensor([index, random.random(), float(torch.rand(()))])


def prepared(
    loader: Any, rank: int = 0, world: int = 1, state: Any = None, seed: int = 3, **config: Any
) -> PreparedLoader:
    strategy = Strategy() if world == 1 else OneOf(rank, world)
    return prepare_data_loader(loader, strategy, DataLoaderConfiguration(**config), gradient_state=state, seed=seed)


def rounds_of(loaders: list[PreparedLoader]) -> list[list[tuple[list[int], int, float]]]:
    """Round by round what each rank gets: indices, how many count, and the share of the last."""
    found = []
    for loader in loaders:
        passed = [(batch.tolist(), loader.rows, loader.share) for batch in loader]
        found.append(passed)
    return [list(entry) for entry in zip(*found, strict=True)]


# ---- division --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(
    count=st.integers(1, 33),
    size=st.integers(1, 8),
    world=st.integers(1, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    kind=st.sampled_from(["map", "stream", "batches", "ready made"]),
)
def test_h1_over_all_ranks_each_sample_counts_once_in_order(
    count: int, size: int, world: int, shuffle: bool, drop_last: bool, kind: str
) -> None:
    def make() -> DataLoader:
        cut = [list(range(count))[i : i + size] for i in range(0, count, size)]
        if kind == "batches":
            return DataLoader(Numbers(count), batch_sampler=cut)
        if kind == "ready made":
            return DataLoader([torch.tensor(batch) for batch in cut], None, shuffle=False)  # type: ignore[arg-type]
        stream = kind == "stream"
        data: Any = Stream(count) if stream else Numbers(count)
        column = (lambda rows: torch.stack(rows)[:, 0].int()) if stream else None
        return DataLoader(data, size, shuffle=shuffle and not stream, drop_last=drop_last, collate_fn=column)

    whole = [i for batch in prepared(make()) for i in batch.tolist()]
    rounds = rounds_of([prepared(make(), rank, world) for rank in range(world)])
    counted = [i for part in rounds for batch, rows, _ in part for i in batch[:rows]]
    if drop_last and kind in ("map", "stream"):
        assert counted == whole[: len(whole) // (size * world) * size * world]
    else:
        assert counted == whole
        assert sorted(counted) == list(range(count))
    for part in (
        rounds if kind in ("map", "stream") else ()
    ):  # weighed by its share, the mean of the ranks' means is the mean of the samples
        weighed = sum(share * sum(batch) / len(batch) for batch, _, share in part) / world
        samples = [i for batch, rows, _ in part for i in batch[:rows]]
        assert weighed == pytest.approx(sum(samples) / len(samples))


@pytest.mark.parametrize("stream", [False, True])
def test_without_even_batches_nothing_is_repeated_and_some_ranks_have_fewer_batches(stream: bool) -> None:
    def loader() -> DataLoader:
        return DataLoader(
            Stream(5) if stream else Numbers(5),
            2,
            collate_fn=lambda rows: [int(torch.as_tensor(r).flatten()[0]) for r in rows],
        )

    passes = [list(prepared(loader(), rank, 2, even_batches=False)) for rank in range(2)]
    assert passes == [[[0, 1], [4]], [[2, 3]]]
    assert stream or [len(prepared(loader(), rank, 2, even_batches=False)) for rank in range(2)] == [2, 1]


@pytest.mark.parametrize("count", [8, 9, 11])
def test_split_batches_cuts_each_batch_in_as_many_parts_as_there_are_ranks(count: int) -> None:
    loaders = [prepared(DataLoader(Numbers(count), 4, shuffle=True), rank, 2, split_batches=True) for rank in range(2)]
    whole = list(prepared(DataLoader(Numbers(count), 4, shuffle=True)))
    rounds = rounds_of(loaders)
    assert [[i for batch, rows, _ in part for i in batch[:rows]] for part in rounds] == [
        batch.tolist() for batch in whole
    ]
    assert len(loaders[0]) == len(whole)
    assert loaders[0].total_batch_size == 4
    assert loaders[0].remainder == count % 4


def test_split_batches_refuses_a_batch_that_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="must be divisible by 2, but batch_size is 3"):
        prepared(DataLoader(Numbers(9), 3), 0, 2, split_batches=True)
    with pytest.raises(ValueError, match="must be divisible by 2, but batch_size is None"):
        prepared(DataLoader(Numbers(9), None), 0, 2, split_batches=True)

    class Mine(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            return reversed(list(super().__iter__()))

    with pytest.raises(ValueError, match="cannot split the batches of a Mine"):
        prepared(
            DataLoader(Numbers(8), batch_sampler=Mine(SequentialSampler(range(8)), 2, False)), 0, 2, split_batches=True
        )


def test_b6_with_shuffling_the_ranks_use_one_permutation_and_each_epoch_another() -> None:
    loaders = [prepared(DataLoader(Numbers(12), 2, shuffle=True), rank, 2) for rank in range(2)]
    epochs = [[i for part in rounds_of(loaders) for batch, _, _ in part for i in batch] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]
    assert [loader.epoch for loader in loaders] == [2, 2]


def test_b6_real_processes_agree_on_an_order_even_if_their_generators_differ() -> None:
    def read() -> Any:
        strategy = joined()
        generator = torch.Generator().manual_seed(strategy.global_rank)
        loader = prepare_data_loader(DataLoader(Numbers(9), 2, shuffle=True, generator=generator), strategy)
        return [[gather_for_metrics(batch, strategy, loader).tolist() for batch in loader] for _ in range(2)]

    first, second = ranks(2, read)
    assert first == second
    for epoch in first:
        assert sorted(i for batch in epoch for i in batch) == list(range(9))
    assert first[0] != first[1]


def test_u15_a_loader_with_a_distributed_sampler_is_not_split_twice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    loaders = [
        prepared(DataLoader(Numbers(9), 2, sampler=DistributedSampler(Numbers(9), 2, rank)), rank, 2)
        for rank in range(2)
    ]
    epochs = [[i for part in rounds_of(loaders) for batch, rows, _ in part for i in batch[:rows]] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(9))
    assert epochs[0] != epochs[1]  # set_epoch reached it
    assert "already split by rank" in caplog.text


def test_u15_what_a_distributed_sampler_repeats_does_not_count() -> None:
    for count in range(1, 14):
        for size in (1, 2, 4):
            for world in (1, 2, 3):
                data = Numbers(count)
                loaders = [
                    prepared(
                        DataLoader(data, size, sampler=DistributedSampler(data, world, r, shuffle=False)), r, world
                    )
                    for r in range(world)
                ]
                counted = [i for part in rounds_of(loaders) for batch, rows, _ in part for i in batch[:rows]]
                assert sorted(counted) == list(range(count)), (count, size, world)


def test_ranks_whose_own_samplers_have_different_lengths_end_together(recwarn: pytest.WarningsRecorder) -> None:
    def read() -> Any:
        strategy = joined()
        data = Numbers(12)
        sampler = DistributedSampler(data, 2, strategy.global_rank, shuffle=False)
        sampler.num_samples = sampler.total_size = 6 - 2 * strategy.global_rank
        sampler.__class__ = type("Own", (DistributedSampler,), {"__iter__": lambda self: iter(range(self.num_samples))})
        loader = prepare_data_loader(DataLoader(data, 2, sampler=sampler), strategy)
        flags = [(batch.tolist(), loader.end_of_dataloader) for batch in loader]
        return len(loader), flags

    expected = (2, [([0, 1], False), ([2, 3], True)])
    assert ranks(2, read) == [expected, expected]


class Split(Stream):
    """Every worker has its own numbers."""

    def __iter__(self) -> Iterator[Tensor]:
        worker: Any = torch.utils.data.get_worker_info()
        return iter([torch.tensor(i) for i in range(self.count)][worker.id :: worker.num_workers])


def test_h1_streams_of_several_workers_count_each_sample_once() -> None:
    for count, size, workers in ((9, 2, 2), (10, 2, 2), (13, 2, 2), (5, 1, 2), (11, 1, 2)):
        rounds = rounds_of([prepared(DataLoader(Split(count), size, num_workers=workers), r, 2) for r in range(2)])
        counted = [i for part in rounds for batch, rows, _ in part for i in batch[:rows]]
        assert sorted(counted) == list(range(count)), (count, size, workers)


# ---- identity --------------------------------------------------------------------------------------------------------


def collate(rows: list[Any]) -> Tensor:
    return torch.tensor(rows)


def start_worker(number: int) -> None:
    pass


def test_j14_settings_of_the_users_loader_survive() -> None:
    generator = torch.Generator().manual_seed(1)
    given: dict[str, Any] = {
        "num_workers": 2,
        "persistent_workers": True,
        "prefetch_factor": 3,
        "collate_fn": collate,
        "worker_init_fn": start_worker,
        "generator": generator,
        "timeout": 60,
        "in_order": False,
        "multiprocessing_context": "fork",
    }
    loader = DataLoader(Numbers(8), 2, **given)
    mine = prepared(loader, 0, 2)
    assert isinstance(mine, DataLoader)
    for name in given.keys() - {"multiprocessing_context"}:
        assert getattr(mine, name) is getattr(loader, name), name
        assert getattr(mine._source, name) is getattr(loader, name), name
    assert mine.multiprocessing_context is loader.multiprocessing_context
    assert mine.dataset is loader.dataset
    assert mine.batch_size == 2
    assert mine.batch_sampler is loader.batch_sampler


def test_what_is_set_on_it_reaches_what_reads() -> None:
    for world in (1, 2):
        mine = prepared(DataLoader(Numbers(4), 1), 0, world)
        mine.collate_fn = lambda rows: [i + 100 for i in rows]
        assert next(i for batch in mine for i in batch) == 100
        mine.set_sampler([3, 2, 1, 0])
        assert next(iter(mine)) == [103]


def test_u27_it_is_a_loader_that_can_be_pickled_also_in_the_middle_of_a_pass() -> None:
    loader = prepared(DataLoader(Numbers(8), 2, shuffle=True), 1, 2, Spy())
    iterator = iter(loader)
    next(iterator)
    copy = pickle.loads(pickle.dumps(loader))
    assert isinstance(copy, DataLoader)
    assert len(copy) == len(loader) == 2
    assert len(list(copy)) == 2


def test_u27_it_goes_with_its_last_reference() -> None:
    gc.disable()
    try:
        makes = (lambda: DataLoader(Numbers(4), 2, shuffle=True), lambda: DataLoader(Stream(4), 2))
        for make, state in itertools.product(makes, (None, Spy())):
            loader = prepared(make(), state=state)
            for _ in loader:
                pass
            for _ in loader:
                break
            kept = weakref.ref(loader)
            del loader
            assert kept() is None
    finally:
        gc.enable()


def test_h2_one_loader_gives_one_loader_and_is_prepared_only_once() -> None:
    with pytest.raises(TypeError, match="got a list, but only"):
        prepared([1, 2])
    strategy = Strategy()
    once = prepare_data_loader(DataLoader(Numbers(4)), strategy)
    assert prepare_data_loader(once, strategy) is once
    other = prepare_data_loader(once, OneOf(1, 2))
    assert other.base is once.base
    assert len(other) == 2
    assert len(once) == 4


def test_u27_what_it_says_of_its_size() -> None:
    loader = prepared(DataLoader(Numbers(11), 2), 0, 2)
    assert (loader.total_batch_size, loader.total_dataset_length, loader.remainder, len(loader)) == (4, 11, 3, 3)
    unknown = prepared(DataLoader(Stream(11), 2), 0, 2)
    assert (unknown.total_batch_size, unknown.total_dataset_length, unknown.remainder) == (4, None, -1)
    with pytest.raises(TypeError):
        len(unknown)


@pytest.mark.parametrize("device_placement", [True, False])
def test_b5_batches_of_any_structure_arrive_on_the_device(device_placement: bool) -> None:
    batch = ({"images": torch.zeros(2, 3), "names": ["a", "b"]}, [{"boxes": torch.ones(1, 4), "id": 7}])
    strategy = Strategy("meta")
    loader = prepare_data_loader(
        DataLoader([batch], None, collate_fn=lambda made: made), strategy, device_placement=device_placement
    )
    (found,) = loader
    expected = "meta" if device_placement else "cpu"
    assert found[0]["images"].device.type == found[1][0]["boxes"].device.type == expected
    assert found[0]["names"] == ["a", "b"]
    assert found[1][0]["id"] == 7
    assert isinstance(found, tuple)


# ---- a pass ----------------------------------------------------------------------------------------------------------


def lying(count: int, says: int) -> DataLoader:
    class Estimate(BatchSampler):
        def __len__(self) -> int:
            return says

    return DataLoader(Numbers(count), batch_sampler=Estimate(SequentialSampler(range(count)), 2, False))


@pytest.mark.parametrize(
    "make",
    [lambda: DataLoader(Numbers(7), 2), lambda: DataLoader(Stream(7), 2), lambda: lying(7, 2), lambda: lying(7, 9)],
    ids=["map", "stream", "says too few", "says too many"],
)
def test_the_end_is_known_with_the_last_batch(make: Callable[[], DataLoader]) -> None:
    spy = Spy()
    loader = prepared(make(), state=spy)
    flags = []
    for _ in loader:
        assert spy.active_dataloader is loader
        flags.append((loader.end_of_dataloader, loader.batches_done, loader.batch_rows))
    assert flags == [(False, 1, 2), (False, 2, 2), (False, 3, 2), (True, 4, 1)]
    assert spy.told == ["on_pass", "begin", "end"]
    assert (loader.epoch, loader.batches_done) == (1, 0)


def test_a_pass_that_is_left_or_fails_is_over_and_the_next_has_another_order() -> None:
    spy = Spy()
    loader = prepared(DataLoader(Numbers(16), 2, shuffle=True), state=spy)
    firsts = []
    for _ in range(3):
        for batch in loader:
            firsts.append(batch.tolist())
            break
    assert spy.told == ["on_pass", "begin", "end"] * 3
    assert loader.epoch == 3
    assert len({tuple(first) for first in firsts}) == 3


def test_workers_of_a_pass_that_is_left_end_at_once() -> None:
    gc.disable()
    try:
        loader = prepared(DataLoader(Split(40), 2, num_workers=2))
        for _ in loader:
            assert len(multiprocessing.active_children()) == 2
            break
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()


def test_set_epoch_and_the_seed_decide_on_the_order() -> None:
    def order(epoch: int, **given: Any) -> list[int]:
        loader = prepared(DataLoader(Numbers(16), 4, shuffle=True), **given)
        loader.set_epoch(epoch)
        return [i for batch in loader for i in batch.tolist()]

    assert order(2) == order(2) != order(1)
    assert order(2, use_seedable_sampler=True, non_blocking=True) == order(2)
    assert order(2, data_seed=5) != order(2)
    assert order(2, data_seed=5) == order(2, seed=5)


def test_set_epoch_reaches_the_data_set_and_the_sampler() -> None:
    class Told(Numbers):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    data = Told(4)
    loader = prepared(DataLoader(data, 2), 0, 2)
    loader.set_epoch(4)
    assert data.epoch == 4
    list(loader)
    list(loader)
    assert data.epoch == 5


def test_a_batch_costs_one_call() -> None:
    import paceline

    home = paceline.__file__.rpartition("/")[0]
    rooms = tuple(f"{home}/{room}/" for room in ("accelerator", "data", "strategies"))
    calls: list[str] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(rooms):
            calls.append(frame.f_code.co_name)

    def cost(batches: int, world: int) -> int:
        loader = prepared(DataLoader(Numbers(4 * batches), 4 // world, shuffle=True), 0, world, Plain())
        iterator = iter(loader)
        next(iterator)
        calls.clear()
        sys.setprofile(count)
        for _ in range(batches - 2):
            next(iterator)
        sys.setprofile(None)
        return len(calls)

    class Plain:
        active_dataloader: Any = None
        on_pass = None
        observers = ()

        def begin(self, loader: Any) -> None: ...
        def end(self, loader: Any) -> None: ...

    assert cost(102, 1) == 100


# ---- its place -------------------------------------------------------------------------------------------------------


def stop_and_go(make: Callable[[], DataLoader], after: int, seed: int = 3) -> tuple[list[Any], list[Any]]:
    """What follows batch number ``after``, of this pass and the next: without a stop, and in a fresh loader.

    The loop draws a number a batch, as a dropout would.
    """

    def rest(iterator: Iterator[Any], loader: Any) -> list[Any]:
        found = []
        for batches in (iterator, loader):
            for batch in batches:
                found += [batch, torch.rand(())]
        return found

    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    loader = prepared(make(), seed=seed)
    list(loader)
    iterator = iter(loader)
    for _ in range(after):
        next(iterator)
        torch.rand(3), random.random()
    state, present = pickle.loads(pickle.dumps(loader.state_dict())), host_random_states()
    whole = rest(iterator, loader)
    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    fresh = prepared(make(), seed=77)
    fresh.load_state_dict(state)
    set_random_states(present)
    over = fresh.epoch == 2  # nothing was left of the pass: the next one begins
    assert fresh.batches_done == (0 if over else after)
    return whole, rest(iter(() if over else fresh), fresh)


class GlobalSampler(torch.utils.data.Sampler):
    """Draws from the process's random states, a number at a time."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(11):
            yield random.randrange(11)

    def __len__(self) -> int:
        return 11


KINDS: dict[str, Callable[[], DataLoader]] = {
    "shuffled": lambda: DataLoader(Augmented(11), 2, shuffle=True),
    "generator": lambda: DataLoader(Augmented(11), 2, shuffle=True, generator=torch.Generator().manual_seed(8)),
    "full batches": lambda: DataLoader(Augmented(12), 2, shuffle=True, generator=torch.Generator().manual_seed(8)),
    "workers": lambda: DataLoader(Augmented(11), 2, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(Augmented(11), 2, shuffle=True, num_workers=2, persistent_workers=True),
    "sampler": lambda: DataLoader(Augmented(11), 2, sampler=GlobalSampler()),
    "stream": lambda: DataLoader(Stream(11), 2),
}


@pytest.mark.parametrize("after", [0, 2, 5, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_g2_u6_a_fresh_loader_goes_on_to_the_bit(kind: str, after: int) -> None:
    whole, continued = stop_and_go(KINDS[kind], after)
    assert len(whole) == len(continued) == 2 * (6 - after + 6)
    for one, other in zip(whole, continued, strict=True):
        assert torch.equal(one, other)


def test_u6_between_two_passes_the_next_is_the_same() -> None:
    for kind in ("shuffled", "generator"):
        loader = prepared(KINDS[kind]())
        list(loader)
        state, present = loader.state_dict(), host_random_states()
        expected = list(loader)
        fresh = prepared(KINDS[kind](), seed=50)
        fresh.load_state_dict(state)
        set_random_states(present)
        for one, other in zip(expected, fresh, strict=True):
            assert torch.equal(one, other)


def test_u6_two_ranks_go_on_as_one_at_the_same_sample() -> None:
    def one_rank(state: Any = None) -> PreparedLoader:
        loader = prepared(DataLoader(Numbers(22), 2, shuffle=True), seed=4)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    two = [prepared(DataLoader(Numbers(22), 2, shuffle=True), rank, 2) for rank in range(2)]
    iterators = [iter(loader) for loader in two]
    seen = [i for _ in range(3) for iterator in iterators for i in next(iterator).tolist()]
    alone = one_rank(two[0].state_dict())
    assert alone.derived == "the position, batch 6 of the epoch (batch 3 in the saved run)"
    rest = [i for batch in alone for i in batch.tolist()]
    assert seen + rest == [i for batch in prepared(DataLoader(Numbers(22), 2, shuffle=True)) for i in batch.tolist()]

    source = prepared(DataLoader(Numbers(22), 2, shuffle=True))
    iterator = iter(source)
    seen = [i for _ in range(5) for i in next(iterator).tolist()]
    again = [prepared(DataLoader(Numbers(22), 2, shuffle=True), rank, 2) for rank in range(2)]
    for loader in again:
        loader.load_state_dict(source.state_dict())
    assert "samples that do not fill a complete batch are read again" in again[0].derived
    rest = [i for part in zip(*again, strict=True) for batch in part for i in batch.tolist()]
    assert seen[:8] + rest == [i for batch in one_rank(None) or () for i in batch.tolist()] or len(rest) == 14


def test_u6_a_state_that_is_loaded_and_saved_again_says_the_same() -> None:
    loader = prepared(DataLoader(Numbers(8), 2, shuffle=True))
    iterator = iter(loader)
    next(iterator)
    fresh = prepared(DataLoader(Numbers(8), 2, shuffle=True), seed=9)
    fresh.load_state_dict(loader.state_dict())
    state = fresh.state_dict()
    other = prepared(DataLoader(Numbers(8), 2, shuffle=True), seed=10)
    other.load_state_dict(state)
    assert [b.tolist() for b in other] == [b.tolist() for b in iterator]


# ---- leaving batches out ---------------------------------------------------------------------------------------------


class Counting(Numbers):
    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.loaded = 0

    def __getitem__(self, index: int) -> int:
        self.loaded += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("world", [1, 2])
def test_skip_first_batches_loads_only_the_rest_and_counts_passes_together(world: int) -> None:
    data = Counting(16)
    expected = [
        [b.tolist() for b in p]
        for one in [prepared(DataLoader(Numbers(16), 2, shuffle=True), 0, world)]
        for p in (one, one)
    ]
    loader = prepared(DataLoader(data, 2, shuffle=True), 0, world)
    skipping = skip_first_batches(loader, 3)
    assert len(skipping) == len(expected[0]) - 3
    assert len(loader) == len(expected[0])
    assert [b.tolist() for b in skipping] == expected[0][3:]
    assert data.loaded == 2 * len(skipping)
    assert [b.tolist() for b in loader] == expected[1]


def test_skip_first_batches_after_loading_a_place_does_not_leave_out_twice() -> None:
    loader = prepared(DataLoader(Augmented(12), 2, shuffle=True))
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    rest, second = list(iterator), list(loader)
    fresh = prepared(DataLoader(Augmented(12), 2, shuffle=True), seed=5)
    fresh.load_state_dict(state)
    skipping = skip_first_batches(fresh, 2)
    for one, other in zip([*rest, *second], [*skipping, *fresh], strict=True):
        assert torch.equal(one, other)


def test_another_number_than_the_loaded_place_counts() -> None:
    loader = prepared(DataLoader(Numbers(12), 2, shuffle=True))
    iterator = iter(loader)
    next(iterator), next(iterator)
    fresh = prepared(DataLoader(Numbers(12), 2, shuffle=True), seed=5)
    fresh.load_state_dict(loader.state_dict())
    skipping = skip_first_batches(fresh, 4)
    with pytest.warns(
        messages.PacelineWarning, match=r"the pass skips batches 3 to 4\. To continue after batch 2, delete"
    ):
        found = [b.tolist() for b in skipping]
    assert found == [b.tolist() for b in iterator][2:]


def test_the_place_of_a_skipping_loader_is_the_place_of_the_whole_one() -> None:
    loader = prepared(DataLoader(Numbers(16), 2, shuffle=True))
    iterator = iter(skip_first_batches(loader, 3))
    next(iterator)
    assert loader.batches_done == 4
    fresh = prepared(DataLoader(Numbers(16), 2, shuffle=True), seed=8)
    fresh.load_state_dict(loader.state_dict())
    assert [b.tolist() for b in fresh] == [b.tolist() for b in iterator]


def test_skip_first_batches_of_a_plain_or_an_iterable_loader() -> None:
    torch.manual_seed(4)
    expected = list(DataLoader(Numbers(9), 2, shuffle=True))
    torch.manual_seed(4)
    skipping = skip_first_batches(DataLoader(Numbers(9), 2, shuffle=True), 2)
    assert len(skipping) == 3
    for one, other in zip(expected[2:], skipping, strict=True):
        assert torch.equal(one, other)
    found = skip_first_batches(prepared(DataLoader(Stream(9), 2)), 3)
    assert [batch[:, 0].tolist() for batch in found] == [[6.0, 7.0], [8.0]]
    assert list(skip_first_batches(prepared(DataLoader(Numbers(4), 2)), 5)) == []
    assert len(skip_first_batches(prepared(DataLoader(Numbers(4), 2)), 5)) == 0
    with pytest.raises(ValueError, match="num_batches=-1 is negative"):
        skip_first_batches(prepared(DataLoader(Numbers(4), 2)), -1)


def test_set_epoch_to_another_one_leaves_the_loaded_place_and_says_so() -> None:
    loader = prepared(DataLoader(Numbers(8), 2))
    list(loader)
    iterator = iter(loader)
    next(iterator)
    fresh = prepared(DataLoader(Numbers(8), 2))
    fresh.load_state_dict(loader.state_dict())
    fresh.set_epoch(1)
    with pytest.warns(
        messages.PacelineWarning, match=r"set_epoch\(0\) discards the loaded position \(batch 1 of epoch 1\)"
    ):
        fresh.set_epoch(0)
    assert len(list(fresh)) == 4


def test_torchdata_that_is_asked_for_but_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "is_installed", lambda package: False)
    with pytest.raises(ModuleNotFoundError, match="pip install torchdata"):
        prepared(DataLoader(Stream(4), 2), use_stateful_dataloader=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_with_torchdata_the_place_in_a_stream_is_kept_with_workers_too(workers: int) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    made = DataLoader(Stream(11), 2, num_workers=workers)
    loader = prepared(made, use_stateful_dataloader=True)
    iterator = iter(loader)
    next(iterator), next(iterator)
    fresh = prepared(DataLoader(Stream(11), 2, num_workers=workers), use_stateful_dataloader=True)
    fresh.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))
    assert [b[:, 0].tolist() for b in fresh] == [b[:, 0].tolist() for b in iterator]


def test_tensor_data_sets_are_read_as_they_are() -> None:
    x = torch.arange(6.0)
    (found,) = prepared(DataLoader(TensorDataset(x, x + 1), 6))
    assert torch.equal(found[0], x)


class Sized(Stream):
    """Raises when it is read past its length."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        yield from map(torch.tensor, range(self.count))
        raise ValueError("past the end")


class Raises(Sampler[Any]):
    """Raises when it is read past its length."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        yield from self.items
        raise ValueError("past the end")


class Own(DataLoader):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()
        raise ValueError("past the end")


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Sized(4), batch_size=2),
        lambda: DataLoader(Sized(4), batch_size=2, num_workers=1),
        lambda: Own(Numbers(4), batch_size=2),
        lambda: DataLoader(Numbers(4), batch_size=2, sampler=Raises([0, 1, 2, 3])),
        lambda: DataLoader(Numbers(4), batch_sampler=Raises([[0, 1], [2, 3]]), num_workers=1),
    ],
    ids=["stream", "worker", "own", "sampler", "batch_sampler"],
)
def test_a_loader_is_not_read_past_its_length(make: Any) -> None:
    loader = prepared(make())
    for _ in range(2):
        passed = [(batch.tolist(), loader.end_of_dataloader) for batch in loader]
        assert passed == [([0, 1], False), ([2, 3], True)]
    if not isinstance(loader.base, Own):
        assert [[batch.tolist() for batch in prepared(make(), rank, 2)] for rank in range(2)] == [[[0, 1]], [[2, 3]]]


class FailsAtLast(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == len(self) - 1:
            raise ValueError("within")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_the_last_batch_of_a_prepared_loader_is_raised(workers: int) -> None:
    loader = prepared(DataLoader(FailsAtLast(4), 2, sampler=Raises([0, 1, 2, 3]), num_workers=workers))
    found = []
    with pytest.raises(ValueError, match="within"):
        found.extend(batch.tolist() for batch in loader)
    assert found == [[0, 1]]

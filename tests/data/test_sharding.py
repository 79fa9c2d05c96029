from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from paceline import messages
from paceline.data import CombinedLoader
from paceline.data.batches import Batches
from paceline.data.loaders import (
    count_batches,
    load_loader_state,
    loader_state,
    release_shuffling,
    seed_shuffling,
)
from paceline.data.sharding import batch_indices, last_share, shard_evaluation, shard_training, surplus, unweighted

Make = Callable[[], Any]


class Stream(IterableDataset):
    """Numbers from 0 on; with ``split`` every worker has its own."""

    def __init__(self, count: int, split: bool = False) -> None:
        self.count = count
        self.split = split

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        if worker is None or not self.split:
            return iter(range(self.count))
        return iter(range(worker.id, self.count, worker.num_workers))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.count


class ShuffledStream(Stream):
    """Its order comes from the process's own random states, those of all three libraries."""

    def __iter__(self) -> Iterator[int]:
        numbers = list(super().__iter__())
        random.shuffle(numbers)
        for _ in numbers:
            yield numbers[np.random.randint(len(numbers))] + 100 * int(torch.randint(100, ()))


class Drawn(Sampler):
    """A sampler that draws from one of the process's own generators, and may know its length."""

    def __init__(self, count: int, source: str) -> None:
        self.count = count
        self.source = source

    def __iter__(self) -> Iterator[int]:
        if self.source == "random":
            yield from random.sample(range(self.count), self.count)
        elif self.source == "numpy":
            yield from np.random.permutation(self.count).tolist()
        else:
            for _ in range(self.count):  # a draw at a time
                yield int(torch.randint(self.count, ()))


class SizedDrawn(Drawn):
    def __len__(self) -> int:
        return self.count


class EagerDrawn(Drawn):
    """Draws everything at the moment iteration starts."""

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__()))


class Unsized(Sampler):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Backwards(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield batch[::-1]


class Knowing(BatchSampler):
    num_replicas, rank = 2, 1


class Rebalanced(BatchSampler):
    """As transformers' Trainer has it for ``train_sampling_strategy="batch_rebalance"``."""

    dp_size, rank = 2, 1


class MyLoader(DataLoader):
    """A user's subclass whose constructor is its own."""

    def __init__(self, data: Any, note: str) -> None:
        super().__init__(data, batch_size=3)
        self.note = note


class Augmented(Dataset):
    """Samples that show the random state they are made under."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return torch.initial_seed() % 2**40


def numbers(batches: Any) -> list[list[int]]:
    """Batches as lists of plain numbers."""
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def one(make: Make, epoch: int = 0) -> list[list[int]]:
    """What a single process sees."""
    loader = make()
    seed_shuffling(loader, 7, epoch)
    return numbers(loader)


def on_ranks(shard: Any, make: Make, world: int = 2, epoch: int = 0) -> tuple[list[Any], list[list[list[int]]]]:
    """The loaders and batches of each rank, as if each were a process: its own loader and random states."""
    loaders, batches = [], []
    for rank in range(world):
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        loader = shard(make(), rank, world)
        seed_shuffling(loader, 7, epoch)
        loaders.append(loader)
        batches.append(numbers(loader))
    return loaders, batches


def joined(loaders: list[Any], batches: list[list[list[int]]]) -> list[list[int]]:
    """The ranks' batches put together step by step, without those that are only repetitions."""
    assert len({len(rank) for rank in batches}) == 1, "ranks differ in the number of their batches"
    steps = []
    for step, parts in enumerate(zip(*batches, strict=True)):
        last = step == len(batches[0]) - 1
        kept = [
            part
            for loader, part in zip(loaders, parts, strict=True)
            if not (last and (last_share(loader) == 0 or surplus(loader)))
        ]
        steps.append(flat(kept))
    return steps


def training(make: Make, world: int = 2, epoch: int = 0) -> list[list[int]]:
    return joined(*on_ranks(shard_training, make, world, epoch))


def evaluation(make: Make, world: int = 2, epoch: int = 0) -> list[int]:
    return flat(joined(*on_ranks(shard_evaluation, make, world, epoch)))


# ---- loaders with a sampler ----------------------------------------------------------------------------------------

SIZES = {"count": st.integers(1, 50), "size": st.integers(1, 5), "world": st.integers(2, 5)}


@given(**SIZES, drop_last=st.booleans(), shuffle=st.booleans(), epoch=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_ranks_train_on_the_batches_of_one_process(count, size, world, drop_last, shuffle, epoch):
    def make(batch_size: int = size) -> DataLoader:
        return DataLoader(range(count), batch_size, shuffle=shuffle, drop_last=drop_last)

    loaders, batches = on_ranks(shard_training, make, world, epoch)
    expected = one(lambda: make(size * world), epoch)
    assert joined(loaders, batches) == expected
    assert {len(loader) for loader in loaders} == {len(expected)}


@given(**SIZES, drop_last=st.booleans(), sized=st.booleans())
@settings(max_examples=150, deadline=None)
def test_shares_make_the_mean_over_ranks_the_mean_over_samples(count, size, world, drop_last, sized):
    def make() -> DataLoader:
        sampler = SequentialSampler(range(count)) if sized else Unsized(count)
        return DataLoader(range(count), size, sampler=sampler, drop_last=drop_last)

    loaders, batches = on_ranks(shard_training, make, world)
    expected = numbers(DataLoader(range(count), size * world, drop_last=drop_last))
    if not expected:
        assert not any(batches)
        return
    losses = [last_share(loader) * np.mean(rank[-1]) for loader, rank in zip(loaders, batches, strict=True)]
    assert np.mean(losses) == pytest.approx(np.mean(expected[-1]))
    if len(expected[-1]) % world == 0:
        assert [last_share(loader) for loader in loaders] == [1.0] * world


@given(**SIZES, drop_last=st.booleans(), shuffle=st.booleans(), sized=st.booleans())
@settings(max_examples=150, deadline=None)
def test_ranks_evaluate_every_sample_once_in_order(count, size, world, drop_last, shuffle, sized):
    def make() -> DataLoader:
        sampler = None if sized else Unsized(count)
        return DataLoader(range(count), size, shuffle=shuffle and sized, sampler=sampler, drop_last=drop_last)

    expected = flat(one(make))
    assert evaluation(make, world) == expected
    for loader, batches in zip(*on_ranks(shard_evaluation, make, world), strict=True):
        assert all(len(batch) == size if drop_last else 1 <= len(batch) <= size for batch in batches)
        if sized:
            assert len(loader) == len(batches)


def test_a_limit_on_evaluation_batches_covers_the_first_samples():
    loaders = [shard_evaluation(DataLoader(range(20), 2), rank, 3) for rank in range(3)]
    taken = [numbers(Batches(loader, limit=2)) for loader in loaders]
    assert sorted(flat(flat(taken))) == list(range(12))


def test_only_ranks_without_a_sample_have_a_surplus_batch():
    def surpluses(count: int, size: int, world: int) -> list[bool]:
        return [surplus(shard_evaluation(DataLoader(range(count), size), rank, world)) for rank in range(world)]

    assert surpluses(4, 1, 3) == [False, True, True]
    assert surpluses(2, 8, 3) == [False, False, True]
    assert surpluses(7, 2, 3) == [False, False, False]
    assert surpluses(6, 1, 3) == [False, False, False]


def test_a_training_batch_is_never_surplus_and_an_evaluation_batch_weighs_one():
    trained, evaluated = (shard(DataLoader(range(1), 1), 1, 2) for shard in (shard_training, shard_evaluation))
    assert (last_share(trained), surplus(trained)) == (0.0, False)
    assert (last_share(evaluated), surplus(evaluated)) == (1.0, True)


def test_loaders_that_are_not_shared_have_whole_shares_and_no_surplus():
    for loader in (DataLoader(range(3)), [1, 2], CombinedLoader([DataLoader(range(3))])):
        assert (last_share(loader), surplus(loader)) == (1.0, False)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
        {"batch_size": 2, "shuffle": False},
    ],
)
@pytest.mark.parametrize("shard", [shard_training, shard_evaluation])
def test_workers_change_nothing(shard, options):
    plain = {"batch_size": 3, "shuffle": True, "num_workers": 0, **options}
    without = {key: value for key, value in plain.items() if key in ("batch_size", "shuffle")}
    mine, reference = (shard(DataLoader(range(31), **kind), 1, 2) for kind in (plain, without))
    for epoch in range(2):
        for loader in (mine, reference):
            seed_shuffling(loader, 3, epoch)
        assert numbers(mine) == numbers(reference)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [3, None])
def test_a_resumed_epoch_goes_on_behind_the_batches_that_were_done(workers, batch_size):
    def loader() -> DataLoader:
        made = shard_training(DataLoader(range(31), batch_size, shuffle=True, num_workers=workers), 1, 2)
        seed_shuffling(made, 3, 1)
        return made

    assert numbers(Batches(loader(), skip=2)) == numbers(loader())[2:]


def test_order_differs_between_epochs_and_seeds():
    loader = shard_training(DataLoader(range(64), 4, shuffle=True), 0, 2)
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0)):
        seed_shuffling(loader, seed, epoch)
        orders.append(numbers(loader))
    assert orders[0] == orders[3]
    assert orders[0] not in orders[1:3]
    assert orders[1] != orders[2]


def test_one_process_gets_its_own_loader():
    for loader in (DataLoader(range(4)), [1, 2], CombinedLoader([[1]]), DataLoader(Stream(4))):
        assert shard_training(loader, 0, 1) is loader
        assert shard_evaluation(loader, 0, 1) is loader


# ---- samplers of every kind ----------------------------------------------------------------------------------------

WEIGHTS = torch.linspace(1, 2, 23)


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: RandomSampler(range(23)),
        lambda: RandomSampler(range(23), replacement=True, num_samples=40),
        lambda: SubsetRandomSampler(range(3, 20)),
        lambda: WeightedRandomSampler(WEIGHTS, 30),
        lambda: [3, 1, 2, 22, 7, 7, 9],
        lambda: DataLoader(range(23), generator=torch.Generator().manual_seed(5), shuffle=True).sampler,
    ],
    ids=["random", "replacement", "subset", "weighted", "list", "own generator"],
)
def test_every_sampler_gives_the_order_of_one_process(sampler):
    def make(size: int = 3) -> DataLoader:
        return DataLoader(range(23), size, sampler=sampler())

    assert training(make, 2) == one(lambda: make(6))
    assert evaluation(make, 3) == flat(one(make))


@pytest.mark.parametrize("kind", [Drawn, SizedDrawn, EagerDrawn])
@pytest.mark.parametrize("source", ["random", "numpy", "torch"])
def test_a_sampler_that_draws_from_the_process_draws_alike_on_all_ranks(source, kind):
    def make() -> DataLoader:
        return DataLoader(range(19), 2, sampler=kind(19, source))

    def alone(epoch: int) -> list[list[int]]:
        return training(make, 2, epoch)

    assert [len(step) for step in alone(0)] == [4, 4, 4, 4, 3]
    if source != "torch":
        assert sorted(flat(alone(0))) == list(range(19))
    assert alone(0) == alone(0) == training(lambda: DataLoader(range(19), 1, sampler=kind(19, source)), 4)
    assert alone(0) != alone(1)


@pytest.mark.parametrize("kind", ["sampler", "eager sampler", "stream"])
def test_drawing_alike_leaves_the_random_states_of_the_process_alone(kind):
    loader = {
        "sampler": DataLoader(range(19), 2, sampler=Drawn(19, "torch")),
        "eager sampler": DataLoader(range(19), 2, sampler=EagerDrawn(19, "torch")),
        "stream": DataLoader(ShuffledStream(19), 2),
    }[kind]
    sharded = shard_training(loader, 0, 2)
    seed_shuffling(sharded, 3, 0)
    generator = torch.Generator()
    sharded.generator = generator  # the loader draws its workers' seed, here from elsewhere
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    assert len(list(sharded)) >= 3
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


def test_an_endless_sampler_is_read_as_it_is_used():
    class Endless(Sampler):
        read = 0

        def __iter__(self) -> Iterator[int]:
            for number in itertools.count():
                self.read += 1
                yield number % 5

    sampler = Endless()
    loader = shard_training(DataLoader(range(5), 2, sampler=sampler), 1, 2)
    seed_shuffling(loader, 0, 0)
    assert numbers(itertools.islice(loader, 3)) == [[2, 3], [1, 2], [0, 1]]
    assert sampler.read == 12


def test_a_sampler_with_set_epoch_is_told():
    class Told(Sampler):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([(self.epoch + number) % 8 for number in range(8)])

    assert training(lambda: DataLoader(range(8), 2, sampler=Told()), 2, epoch=3) == [[3, 4, 5, 6], [7, 0, 1, 2]]


def test_a_plain_batch_sampler_is_cut_anew_wherever_it_stands():
    def given_as_batch_sampler() -> DataLoader:
        return DataLoader(range(11), batch_sampler=BatchSampler(SequentialSampler(range(11)), 2, drop_last=False))

    def given_as_sampler() -> DataLoader:
        sampler = BatchSampler(SequentialSampler(range(11)), 2, drop_last=False)
        return DataLoader(torch.arange(11), batch_size=None, sampler=sampler)

    for make in (given_as_batch_sampler, given_as_sampler):
        assert training(make) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
        assert evaluation(make) == list(range(11))


@pytest.mark.parametrize("as_sampler", [False, True], ids=["batch_sampler", "sampler"])
def test_batches_of_a_custom_batch_sampler_are_dealt_whole(as_sampler):
    def make() -> DataLoader:
        batches = Backwards(RandomSampler(range(14)), 3, drop_last=False)
        if as_sampler:
            return DataLoader(torch.arange(14), batch_size=None, sampler=batches)
        return DataLoader(range(14), batch_sampler=batches)

    dealt = one(make)
    loaders, batches = on_ranks(shard_training, make, 2)
    assert batches == [dealt[0::2], [*dealt[1::2], dealt[-1]]]
    assert [last_share(loader) for loader in loaders] == [2.0, 0.0]
    assert [len(loader) for loader in loaders] == [3, 3]
    loaders, batches = on_ranks(shard_evaluation, make, 2)
    assert [surplus(loader) for loader in loaders] == [False, True]
    assert joined(loaders, batches) == [dealt[0] + dealt[1], dealt[2] + dealt[3], dealt[4]]


def test_shares_of_whole_batches_count_those_that_have_one():
    loaders = [shard_training(DataLoader(range(5), batch_size=None), rank, 3) for rank in range(3)]
    assert numbers(map(list, loaders)) == [[0, 3], [1, 4], [2, 4]]
    assert [last_share(loader) for loader in loaders] == [1.5, 1.5, 0.0]


# ---- what survives -------------------------------------------------------------------------------------------------


def collate(samples: list[Any]) -> list[Any]:
    return samples


def start_worker(worker: int) -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("data", [range(20), Stream(20)], ids=["map", "stream"])
@pytest.mark.parametrize("shard", [shard_training, shard_evaluation])
def test_every_setting_of_the_loader_survives(shard, data):
    original = DataLoader(
        data,
        batch_size=3,
        num_workers=2,
        collate_fn=collate,
        pin_memory=True,
        drop_last=True,
        timeout=40,
        worker_init_fn=start_worker,
        multiprocessing_context="spawn",
        generator=torch.Generator(),
        prefetch_factor=5,
        persistent_workers=True,
        in_order=False,
    )
    before = dict(vars(original))
    sharded = shard(original, 1, 2)
    assert type(sharded) is DataLoader
    assert vars(original) == before, "the user's loader was changed"
    replaced = {"paceline_whole", "batch_sampler"} | ({"dataset"} if isinstance(data, Stream) else set())
    for name, value in vars(sharded).items():
        if name not in replaced:
            assert value is before[name], name
    assert vars(sharded).keys() == before.keys() | {"paceline_whole"}


def test_a_loader_of_a_subclass_keeps_its_class_and_attributes():
    sharded = shard_training(MyLoader(range(10), "mine"), 1, 2)
    assert (type(sharded), sharded.note) == (MyLoader, "mine")
    assert numbers(sharded) == [[3, 4, 5], [8, 9]]


def test_running_workers_of_the_users_loader_are_not_taken_over():
    original = DataLoader(range(9), 2, num_workers=1, persistent_workers=True)
    assert len(list(original)) == 5
    assert numbers(shard_training(original, 1, 2)) == [[2, 3], [6, 7], [8]]


def test_the_sampler_that_was_given_can_be_seen():
    original = DataLoader(range(10), 3, shuffle=True, drop_last=True)
    sharded = shard_training(original, 0, 2)
    assert sharded.sampler is sharded.batch_sampler.sampler is original.sampler
    assert (sharded.batch_sampler.batch_size, sharded.batch_sampler.drop_last) == (3, True)
    with pytest.raises(AttributeError, match="colour"):
        sharded.batch_sampler.colour  # noqa: B018


def test_generators_that_paceline_gave_are_taken_back():
    original = DataLoader(range(10), 3, shuffle=True)
    sharded = shard_training(original, 0, 2)
    seed_shuffling(sharded, 0, 0)
    assert original.sampler.generator is not None
    release_shuffling(sharded)
    assert original.sampler.generator is None
    assert original.generator is None


def test_a_generator_of_the_users_is_saved_and_restored():
    def loader() -> DataLoader:
        return shard_training(DataLoader(range(20), 2, shuffle=True, generator=torch.Generator().manual_seed(4)), 1, 2)

    first, second = loader(), loader()
    list(first)
    state = loader_state(first)
    load_loader_state(second, state)
    assert numbers(second) == numbers(first)


class Stateful(DataLoader):
    """Knows how many batches it gave, and goes on behind them."""

    done = start = 0

    def __iter__(self) -> Iterator[Any]:
        self.done, self.start = self.start, 0
        for batch in itertools.islice(super().__iter__(), self.done, None):
            self.done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["done"]


def test_a_loader_that_knows_its_position_goes_on_there():
    def loader() -> DataLoader:
        made = shard_training(Stateful(range(20), 2, shuffle=True, generator=torch.Generator().manual_seed(4)), 1, 2)
        seed_shuffling(made, 0, 0)
        return made

    whole, interrupted, resumed = numbers(loader()), loader(), loader()
    next(itertools.islice(interrupted, 1, None))
    assert load_loader_state(resumed, loader_state(interrupted), mid_epoch=True)
    assert numbers(resumed) == whole[2:]


def test_workers_augment_differently_on_each_rank():
    seeds = []
    for rank in range(2):
        loader = shard_training(DataLoader(Augmented(), 2, num_workers=1), rank, 2)
        seed_shuffling(loader, 0, 0)
        seeds.append(set(flat(numbers(loader))))
    assert not seeds[0] & seeds[1]


def test_what_is_split_already_is_left_alone():
    distributed = DistributedSampler(range(8), num_replicas=2, rank=1)
    stream = Stream(8)
    stream._distributed = SimpleNamespace(rank=0, world_size=2)
    own = Stream(8)
    own.rank, own.world_size = 0, 2
    for loader in (
        DataLoader(range(8), 2, sampler=distributed),
        DataLoader(range(8), batch_sampler=BatchSampler(distributed, 2, False)),
        DataLoader(range(8), batch_sampler=Knowing(SequentialSampler(range(8)), 2, False)),
        DataLoader(range(8), batch_sampler=Rebalanced(SequentialSampler(range(8)), 2, False)),
        DataLoader(stream, 2),
        DataLoader(own, 2),
        DataLoader(IterableWrapper(range(8)).sharding_filter(), 2),
    ):
        assert shard_training(loader, 0, 2) is loader
        assert shard_evaluation(loader, 0, 2) is loader


def test_a_data_set_that_was_written_for_one_process_is_split():
    own = Stream(4)
    own.rank, own.world_size = 0, 1
    assert training(lambda: DataLoader(own, 1)) == [[0, 1], [2, 3]]


def test_what_was_split_for_training_is_split_anew_for_evaluation():
    for original in (DataLoader(range(5), 1), DataLoader(Stream(5), 1), [[0], [1], [2], [3], [4]]):
        assert evaluation(lambda original=original: shard_training(original, 0, 2)) == [0, 1, 2, 3, 4]


def test_too_few_samples_to_fill_a_batch_of_every_process_are_said_so():
    loader = shard_training(DataLoader(range(5), 3, drop_last=True), 0, 2)
    with pytest.raises(ValueError, match="5 samples do not fill one batch of batch_size=3 on each of 2 processes"):
        count_batches(loader, None, "train_dataloader")


# ---- indices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_the_indices_of_each_batch_are_known(workers):
    loader = shard_evaluation(DataLoader(range(50, 63), 2, num_workers=workers, shuffle=True), 1, 3)
    for epoch in range(2):
        seed_shuffling(loader, 0, epoch)
        indices = batch_indices(loader)
        assert all([index + 50 for index in next(indices)] == batch.tolist() for batch in loader)
        list(loader)  # a pass that nobody asked about
        assert not list(indices)


def test_the_indices_of_whole_batches_and_single_samples_are_known():
    batches = shard_evaluation(DataLoader(range(9), batch_sampler=[(0, 1), (2,), (3, 4)]), 0, 2)
    lists = BatchSampler(SequentialSampler(range(7)), 2, drop_last=False)
    bulk = shard_evaluation(DataLoader(torch.arange(7), batch_size=None, sampler=lists), 1, 2)
    single = shard_evaluation(DataLoader({"ab": 1, "cd": 2}, batch_size=None, sampler=["ab", "cd"]), 1, 2)
    for loader, expected in ((batches, [[0, 1], [3, 4]]), (bulk, [[2, 3], [6]]), (single, [["cd"]])):
        indices = batch_indices(loader)
        assert [next(indices) for _ in loader] == expected


def test_the_indices_of_one_process_are_known_where_they_are_in_order():
    assert list(batch_indices(DataLoader(range(5), 2))) == [[0, 1], [2, 3], [4]]
    assert batch_indices(DataLoader(range(5), 2, shuffle=True)) is None
    assert batch_indices(DataLoader(Stream(5), 2)) is None
    assert batch_indices(shard_evaluation(DataLoader(Stream(5), 2), 0, 2)) is None
    assert batch_indices([1, 2]) is None


# ---- streams -------------------------------------------------------------------------------------------------------


@given(**SIZES, drop_last=st.booleans(), sized=st.booleans())
@settings(max_examples=100, deadline=None)
def test_ranks_train_on_a_stream_as_one_process_does(count, size, world, drop_last, sized):
    def make(batch_size: int = size) -> DataLoader:
        return DataLoader((SizedStream if sized else Stream)(count), batch_size, drop_last=drop_last)

    loaders, batches = on_ranks(shard_training, make, world)
    expected = one(lambda: make(size * world))
    assert joined(loaders, batches) == expected
    if expected:
        losses = [last_share(loader) * np.mean(rank[-1]) for loader, rank in zip(loaders, batches, strict=True)]
        assert np.mean(losses) == pytest.approx(np.mean(expected[-1]))
    if sized:
        assert {len(loader) for loader in loaders} == {len(expected)}


@given(**SIZES, drop_last=st.booleans(), sized=st.booleans())
@settings(max_examples=100, deadline=None)
def test_ranks_evaluate_a_stream_once(count, size, world, drop_last, sized):
    def make() -> DataLoader:
        return DataLoader((SizedStream if sized else Stream)(count), size, drop_last=drop_last)

    loaders, batches = on_ranks(shard_evaluation, make, world)
    assert flat(joined(loaders, batches)) == flat(one(make))
    if sized:
        assert [len(loader) for loader in loaders] == [len(rank) for rank in batches]


def test_the_samples_of_a_sized_stream_are_counted():
    lengths = [len(shard_training(DataLoader(SizedStream(11), 2), rank, 3).dataset) for rank in range(3)]
    assert lengths == [4, 4, 3]
    with pytest.raises(TypeError):
        len(shard_training(DataLoader(Stream(11), 2), 0, 3).dataset)


@pytest.mark.parametrize("split", [True, False])
def test_every_workers_stream_is_shared(split):
    def make(size: int = 2) -> DataLoader:
        return DataLoader(SizedStream(22, split), size, num_workers=2, persistent_workers=size == 2)

    assert training(make) == one(lambda: make(4))
    loaders, batches = on_ranks(shard_training, make)
    assert [last_share(loader) for loader in loaders] == ([4 / 3, 2 / 3] if split else [1.0, 1.0])
    assert numbers(loaders[1]) == batches[1]  # once more, with the same workers


@pytest.mark.parametrize("count", [1, 3, 5, 8])
def test_with_workers_a_stream_is_evaluated_once_whatever_is_left_over(count):
    def make() -> DataLoader:
        return DataLoader(Stream(count, split=True), 1, num_workers=2)

    loaders, batches = on_ranks(shard_evaluation, make, 3)
    assert sorted(flat(flat(batches))) == list(range(count))
    assert not any(surplus(loader) for loader in loaders)


@pytest.mark.parametrize(("count", "shares"), [(9, [2.0, 0.0]), (11, [4 / 3, 2 / 3]), (12, [1.0, 1.0])])
def test_with_workers_the_last_batch_of_a_stream_is_weighed(count, shares):
    loaders, batches = on_ranks(shard_training, lambda: DataLoader(Stream(count), 2, num_workers=1))
    assert [last_share(loader) for loader in loaders] == shares
    assert joined(loaders, batches)[-1] == list(range(8, count))


@pytest.mark.parametrize(("lengths", "shares"), [((3, 5), [2.0, 0.0]), ((6, 7), [4 / 3, 2 / 3]), ((7, 6), [1.0, 1.0])])
def test_the_worker_that_ends_last_has_the_last_batch(lengths, shares):
    class Uneven(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(lengths[get_worker_info().id]))

    loaders, _ = on_ranks(shard_training, lambda: DataLoader(Uneven(), 2, num_workers=2))
    assert [last_share(loader) for loader in loaders] == shares


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_draws_from_the_process_draws_alike_on_all_ranks(workers):
    def make(size: int = 2) -> DataLoader:
        return DataLoader(ShuffledStream(16), size, num_workers=workers)

    assert training(make) == training(lambda: make(1), 4)
    assert training(make) != training(make, epoch=1)
    if workers:
        assert training(make) == one(lambda: make(4))


def test_samples_of_a_stream_that_are_batches_are_dealt():
    loaders, batches = on_ranks(shard_training, lambda: DataLoader(Stream(5), batch_size=None), 3)
    assert batches == [[0, 3], [1, 4], [2, 4]]
    assert [last_share(loader) for loader in loaders] == [1.5, 1.5, 0.0]
    loaders, batches = on_ranks(shard_evaluation, lambda: DataLoader(SizedStream(5), batch_size=None), 3)
    assert [surplus(loader) for loader in loaders] == [False, False, True]
    assert [len(loader) for loader in loaders] == [2, 2, 2]


def split_in_worker(worker: int) -> None:
    dataset = get_worker_info().dataset
    dataset.start = dataset.start + 10 * worker


def test_what_a_worker_sets_on_a_stream_reaches_the_data_set():
    class From(IterableDataset):
        start = 0

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.start, self.start + 4))

    def make(size: int = 1) -> DataLoader:
        return DataLoader(From(), size, num_workers=2, worker_init_fn=split_in_worker)

    assert training(make) == one(lambda: make(2)) == [[0, 1], [10, 11], [2, 3], [12, 13]]


def test_what_belongs_to_the_data_set_is_found_on_its_share():
    class Stateful(Stream):
        seed = 5
        position = epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

    dataset = Stateful(8)
    sharded = shard_training(DataLoader(dataset, 2), 0, 2)
    seed_shuffling(sharded, 1, 4)
    sharded.dataset.position = 3
    assert (dataset.epoch, dataset.position, dataset.seed) == (4, 3, 5)
    assert (sharded.dataset.seed, sharded.dataset.state_dict()) == (5, {"position": 3})
    assert isinstance(sharded.dataset, IterableDataset)
    with pytest.raises(AttributeError):
        sharded.dataset.colour  # noqa: B018


def test_a_stream_travels_to_a_spawned_worker(tmp_path, monkeypatch):
    source = "from torch.utils.data import IterableDataset\nclass Five(IterableDataset):\n"
    (tmp_path / "a_users_module.py").write_text(source + "    def __iter__(self):\n        return iter(range(5))\n")
    monkeypatch.syspath_prepend(tmp_path)
    stream = importlib.import_module("a_users_module").Five()
    sharded = shard_training(DataLoader(stream, 1, num_workers=1, multiprocessing_context="spawn"), 1, 2)
    assert numbers(sharded) == [[1], [3], [4]]
    assert last_share(sharded) == 0.0


def test_that_every_process_reads_everything_is_said_once(caplog):
    messages.forget()
    with caplog.at_level("INFO", logger="paceline"):
        for shard in (shard_training, shard_evaluation):
            shard(DataLoader(Stream(4), 2), 0, 2)
        shard_training(DataLoader(range(4)), 0, 2)
        shard_training([[1], [2]], 0, 2)
    (record,) = caplog.records
    assert "Each of the 2 processes reads everything that Stream yields" in record.message
    assert "use_distributed_sampler=False" in record.message


# ---- everything else that can be iterated over ---------------------------------------------------------------------


class Reread:
    """Batches in an order that the process's own random states decide."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        for number in torch.randperm(self.count).tolist():
            yield [number, random.randrange(1000)]


@pytest.mark.parametrize(("rank", "expected"), [(0, [[0], [2], [4]]), (1, [[1], [3], [4]])])
def test_a_list_of_batches_is_dealt(rank, expected):
    batches = [[number] for number in range(5)]
    for shard in (shard_training, shard_evaluation):
        loader = shard(batches, rank, 2)
        assert list(loader) == list(loader) == expected
        assert len(loader) == 3
    assert last_share(shard_training(batches, rank, 2)) == [2.0, 0.0][rank]
    assert surplus(shard_evaluation(batches, rank, 2)) == [False, True][rank]


def test_an_iterable_of_ones_own_is_left_alone_since_it_may_know_its_rank(caplog):
    caplog.set_level("INFO", "paceline")
    generator = ([number] for number in itertools.count())
    for loader in (Reread(7), generator):
        for shard in (shard_training, shard_evaluation):
            assert shard(loader, 1, 2) is loader
    said = caplog.text
    assert said.count("each of the 2 processes uses all the batches") == 2
    assert "Reread is not a DataLoader" in said


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_the_loaders_of_a_combined_loader_are_shared_one_by_one(mode):
    def make(scale: int = 1) -> CombinedLoader:
        return CombinedLoader({"a": DataLoader(range(16), 2 * scale, shuffle=True), "b": [[1], [2], [3], [4]]}, mode)

    original = make()
    original.limits = 3
    sharded = shard_training(original, 0, 2)
    assert (sharded.mode, sharded.limits) == (mode, [3, 3])
    assert original.flattened[1] == [[1], [2], [3], [4]]
    whole = make(2)
    seed_shuffling(whole, 0, 0)
    expected = [batch.tolist() for batch in whole.flattened[0]]
    ranks = []
    for rank in range(2):
        loader = shard_training(make(), rank, 2)
        seed_shuffling(loader, 0, 0)
        ranks.append(list(loader.batches()))
    assert [len(batches) for batches in ranks] == [len(loader), len(loader)]
    for step, (first, second) in enumerate(zip(*ranks, strict=True)):
        assert first["a"].tolist() + second["a"].tolist() == expected[step]
        if step < 2 or mode == "max_size_cycle":
            assert (first["b"], second["b"]) == ([1 + 2 * (step % 2)], [2 + 2 * (step % 2)])


def test_a_combined_loader_has_the_share_of_those_that_end_with_it():
    long, short, even = DataLoader(range(5), 2), DataLoader(range(1), 2), DataLoader(range(8), 2)

    def share(rank: int, *loaders: DataLoader) -> float:
        return last_share(shard_training(CombinedLoader(list(loaders), "max_size_cycle"), rank, 2))

    assert [share(rank, long, short) for rank in range(2)] == [2.0, 0.0]
    assert [share(rank, long, even) for rank in range(2)] == [1.0, 1.0]
    assert [share(rank, long, long) for rank in range(2)] == [2.0, 0.0]


def test_uneven_last_batches_that_cannot_get_their_own_weight_are_found():
    long, short, even = DataLoader(range(29), 2), DataLoader(range(13), 2), DataLoader(range(32), 2)

    def found(mode: str, *loaders: DataLoader, limits: Any = None) -> list[int]:
        loader = shard_training(CombinedLoader(list(loaders), mode), 0, 2)
        loader.limits = limits
        return unweighted(loader, len(loader))

    assert found("max_size_cycle", long, short) == [0, 1]
    assert found("max_size_cycle", long, short, limits=[3, 5]) == [1]
    assert found("max_size_cycle", even, short) == [1]
    assert found("max_size_cycle", long, long) == found("max_size_cycle", even, even) == []
    assert found("max_size_cycle", even, DataLoader(range(13), 2, drop_last=True)) == []
    assert found("min_size", long, even) == [0]
    assert found("min_size", long, DataLoader(range(12), 2)) == []
    assert found("min_size", DataLoader(range(27), 2), long) == [0]


def test_a_combined_loader_is_surplus_where_all_that_end_with_it_are():
    short = DataLoader(range(3), 1)

    def is_surplus(*loaders: DataLoader) -> bool:
        return surplus(shard_evaluation(CombinedLoader(list(loaders), "max_size"), 1, 2))

    assert is_surplus(short, short)
    assert is_surplus(short, DataLoader(range(2), 1))
    assert not is_surplus(short, DataLoader(range(4), 1))

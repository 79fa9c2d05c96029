from __future__ import annotations

import copy
import pickle
import warnings
from collections import namedtuple
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
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from paceline import messages
from paceline.data import CombinedLoader
from paceline.data.batches import Batches
from paceline.data.loaders import (
    advise,
    count_batches,
    eval_loaders,
    is_loader_collection,
    load_loader_state,
    loader_state,
    seed_shuffling,
    train_loader,
    users_generators,
    without_shuffling,
)

INF = float("inf")


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.count


class Seeds(Dataset):
    """Samples that show what the random state in the loading process is."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return torch.initial_seed() % 2**31


class Everything(BatchSampler):
    """A batch sampler that turns each batch around."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch[::-1]


def loader(count: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(range(count), **{"batch_size": 2, **options})


def order(source: Any) -> Any:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in Batches(source)]


# ---- what counts as a loader


X = torch.zeros(2)
Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([loader(), loader()], True),
        ((loader(), loader()), True),
        ({"a": loader(), "b": loader()}, True),
        ({"a": [loader()], "b": {"c": loader()}}, True),
        (Pair(loader(), loader()), True),
        ([iter([1]), (i for i in range(2))], True),
        ([CombinedLoader([range(2)])], True),
        ({"a": [X, X], "b": [X]}, True),
        (loader(), False),
        ([X, X], False),
        ([(X, X), (X, X)], False),
        ([{"x": X}, {"x": X}], False),
        ([{"ids": [1, 2]}, {"ids": [3]}], False),
        ([np.zeros(2), np.zeros(2)], False),
        (["a", "b"], False),
        ([1, 2.0], False),
        ([], False),
        ((), False),
        ({}, False),
        ([range(2), range(3)], False),
        ([torch.nn.Sequential()], False),
        (X, False),
        (None, False),
    ],
)
def test_a_collection_of_loaders_is_told_from_a_list_of_batches(value, expected):
    assert is_loader_collection(value) is expected


def test_training_from_a_collection_ends_with_the_longest():
    combined = train_loader({"a": loader(4), "b": loader(8)})
    assert isinstance(combined, CombinedLoader)
    assert combined.mode == "max_size_cycle"
    assert len(combined) == 4
    assert len(train_loader({"a": [X, X, X], "b": [X]})) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("single", [loader(), [X, X], (i for i in range(3)), CombinedLoader([loader()]), Stream(3)])
def test_a_single_loader_stays_as_it_is(single):
    assert train_loader(single) is single
    assert eval_loaders(single) == [single]


def test_training_from_loaders_in_sequence_is_refused():
    with pytest.raises(ValueError, match=r"mode='sequential'.*'max_size_cycle'"):
        train_loader(CombinedLoader([loader()], "sequential"))


@pytest.mark.parametrize("wrong", [5, None, "text", {"x": X}, DataLoader, object()])
def test_what_cannot_be_iterated_over_for_batches_is_refused(wrong):
    with pytest.raises(TypeError, match=r"was passed as a loader.*Pass a DataLoader"):
        train_loader(wrong)
    if wrong is not None:
        with pytest.raises(TypeError, match="was passed as a loader"):
            eval_loaders(wrong)


def test_a_tensor_is_no_loader():
    with pytest.raises(TypeError, match=r"A tensor of shape \(8, 3\) was passed as a loader, .*TensorDataset.*list\("):
        train_loader(torch.randn(8, 3))
    assert len(train_loader(list(torch.randn(8, 3)))) == 8  # type: ignore[arg-type]


def test_evaluation_takes_loaders_one_after_the_other():
    a, b = loader(), loader()
    assert eval_loaders([a, b]) == [a, b]
    assert eval_loaders({"x": a, "y": b}) == [a, b]
    assert eval_loaders([a, [b]]) == [a, b]
    assert eval_loaders(CombinedLoader([a, b], "sequential")) == [a, b]
    together = CombinedLoader([a, b], "max_size")
    assert eval_loaders(together) == [together]
    assert eval_loaders(None) == eval_loaders([]) == []


# ---- how many batches


@pytest.mark.parametrize(
    ("source", "limit", "expected"),
    [
        (loader(10), None, 5),
        (loader(10), 1.0, 5),
        (loader(10), 1, 1),
        (loader(10), 3, 3),
        (loader(10), 99, 5),
        (loader(10), 0.5, 2),
        (loader(10), 0, 0),
        (loader(10), 0.0, 0),
        (range(100), 0.29, 29),
        ([X, X, X], None, 3),
        (CombinedLoader([range(4), range(6)]), None, 4),
        (DataLoader(Stream(5)), None, INF),
        (DataLoader(Stream(5)), 1.0, INF),
        (DataLoader(Stream(5)), 3, 3),
        (DataLoader(Stream(5)), 0, 0),
        (DataLoader(SizedStream(5), batch_size=2), None, 3),
        (DataLoader(SizedStream(5), batch_size=2), 0.34, 1),
        ((i for i in range(3)), None, INF),
        (CombinedLoader([range(4), Stream(3)]), None, INF),
        ([], 0, 0),
    ],
)
def test_batches_are_counted_under_a_limit(source, limit, expected):
    count = count_batches(source, limit, "train_dataloader")
    assert count == expected
    assert type(count) is type(expected)


@given(length=st.integers(1, 1000), batches=st.integers(1, 1000))
@settings(max_examples=200, deadline=None, database=None, derandomize=True)
def test_a_fraction_that_means_whole_batches_gives_exactly_these(length, batches):
    batches = min(batches, length)
    assert count_batches(range(length), batches / length, "train_dataloader") == batches


@pytest.mark.parametrize(
    ("source", "limit", "error", "text"),
    [
        (loader(10), 1.5, ValueError, r"limit_val_batches=1.5 .*between 0.0 and 1.0\.$"),
        (loader(10), 20.0, ValueError, r"limit_val_batches=20.0 .*; for 20 batches, use 20\."),
        (loader(10), -0.1, ValueError, r"limit_val_batches=-0.1"),
        (loader(10), float("nan"), ValueError, r"limit_val_batches=nan"),
        (loader(10), -1, ValueError, r"limit_val_batches=-1 is negative"),
        (loader(10), "all", TypeError, r"limit_val_batches='all' is a str"),
        (loader(10), True, TypeError, r"limit_val_batches=True is a bool"),
        (loader(10), 0.1, ValueError, r"0.1 of the 5 batches of val_dataloader .*at least 0.2"),
        (DataLoader(Stream(5)), 0.5, ValueError, r"fraction of val_dataloader.*DataLoader without __len__"),
        ([], None, ValueError, r"val_dataloader is empty.*list is 0.*limit_val_batches=0"),
        (loader(0, shuffle=False), 5, ValueError, r"val_dataloader is empty.*DataLoader"),
        (
            loader(1, drop_last=True),
            None,
            ValueError,
            r"1 samples do not fill one batch of batch_size=2.*drop_last=False",
        ),
        (CombinedLoader([[], [X]]), None, ValueError, r"mode 'min_size'.*\[list: 0, list: 1\]"),
    ],
)
def test_a_limit_or_loader_without_batches_is_an_error_that_says_which(source, limit, error, text):
    with pytest.raises(error, match=text):
        count_batches(source, limit, "val_dataloader")


# ---- shuffling

SHUFFLED = {
    "shuffle": lambda **o: loader(12, shuffle=True, **o),
    "sampler": lambda **o: loader(12, sampler=RandomSampler(range(12), replacement=True, num_samples=20), **o),
    "subset": lambda **o: loader(12, sampler=SubsetRandomSampler(range(3, 11)), **o),
    "weighted": lambda **o: loader(12, sampler=WeightedRandomSampler([1.0, 2.0] * 6, 12), **o),
    "batch sampler": lambda **o: loader(
        12, batch_sampler=BatchSampler(RandomSampler(range(12)), 3, True), batch_size=1, **o
    ),
    "own batch sampler": lambda **o: loader(
        12, batch_sampler=Everything(RandomSampler(range(12)), 3, True), batch_size=1, **o
    ),
    "batch size None": lambda **o: loader(12, shuffle=True, **{**o, "batch_size": None}),
    "split": lambda **o: DataLoader(
        random_split(range(24), [12, 12], generator=torch.Generator().manual_seed(0))[0],  # type: ignore[arg-type]
        batch_size=2,
        shuffle=True,
        **o,
    ),
    "combined": lambda **o: CombinedLoader({"a": loader(12, shuffle=True, **o), "b": loader(12, shuffle=True, **o)}),
}


def seeded_order(source: Any, seed: int, epoch: int) -> str:
    seed_shuffling(source, seed, epoch)
    return repr(order(source))


@pytest.mark.parametrize("kind", SHUFFLED)
def test_the_order_is_a_function_of_seed_and_epoch_alone(kind):
    make = SHUFFLED[kind]
    torch.manual_seed(1)
    first = make()
    orders = {(seed, epoch): seeded_order(first, seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)}
    assert len(set(orders.values())) == 6
    torch.manual_seed(2)
    again = make()
    for (seed, epoch), expected in reversed(orders.items()):
        torch.rand(3)
        assert seeded_order(again, seed, epoch) == expected


@pytest.mark.parametrize("kind", ["shuffle", "own batch sampler", "combined"])
def test_the_number_of_workers_does_not_change_the_order(kind):
    make = SHUFFLED[kind]
    assert seeded_order(make(num_workers=2), 3, 1) == seeded_order(make(), 3, 1)


def test_the_global_random_state_is_neither_read_nor_changed():
    source = loader(12, shuffle=True)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    seeded_order(source, 0, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_two_combined_loaders_of_one_size_do_not_march_in_step():
    source = CombinedLoader([loader(12, shuffle=True), loader(12, shuffle=True)])
    seed_shuffling(source, 0, 0)
    assert any(a.tolist() != b.tolist() for a, b in source.batches())


def test_the_seeds_of_workers_are_a_function_of_seed_and_epoch():
    seeds = {}
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        source = DataLoader(Seeds(), num_workers=2)
        for epoch in (0, 1):
            seed_shuffling(source, 4, epoch)
            seeds[global_seed, epoch] = order(source)
    assert seeds[1, 0] == seeds[2, 0]
    assert seeds[1, 1] == seeds[2, 1]
    assert seeds[1, 0] != seeds[1, 1]


def test_the_loader_is_not_made_anew():
    source = loader(12, shuffle=True)
    sampler, batch_sampler = source.sampler, source.batch_sampler
    seed_shuffling(source, 0, 0)
    generator = sampler.generator
    seed_shuffling(source, 0, 1)
    assert source.sampler is sampler
    assert source.batch_sampler is batch_sampler
    assert sampler.generator is generator


def test_persistent_workers_see_the_new_order_every_epoch():
    source = loader(12, shuffle=True, num_workers=1, persistent_workers=True)
    orders = [seeded_order(source, 0, epoch) for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    CombinedLoader(source).reset()


def test_a_generator_of_the_users_is_left_alone():
    def run(seeded: bool) -> list[Any]:
        source = loader(12, shuffle=True, generator=torch.Generator().manual_seed(9))
        orders = []
        for epoch in range(2):
            if seeded:
                seed_shuffling(source, 0, epoch)
            orders.append(order(source))
        return orders

    assert run(seeded=True) == run(seeded=False)


def test_loaders_stay_copyable_and_a_copy_is_still_seeded():
    source = loader(12, shuffle=True)
    expected = seeded_order(source, 0, 3)
    for clone in (copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
        assert seeded_order(clone, 0, 3) == expected


def test_the_epoch_is_told_to_loader_sampler_and_data_set():
    told: dict[str, int] = {}

    class Data(Stream):
        def set_epoch(self, epoch):
            told["data"] = epoch

    class Loader(DataLoader):
        def set_epoch(self, epoch):
            told["loader"] = epoch

    seed_shuffling(CombinedLoader([Loader(Data(3))]), 0, 4)
    assert told == {"data": 4, "loader": 4}
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)  # type: ignore[arg-type]
    seed_shuffling(loader(8, sampler=sampler), 0, 6)
    assert sampler.epoch == 6


@pytest.mark.parametrize("source", [[X, X], (i for i in range(2)), DataLoader(Stream(3)), loader()])
def test_loaders_without_shuffling_are_taken_too(source):
    seed_shuffling(source, 0, 0)


# ---- states


class Positioned:
    """A loader that knows its own position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self):
        while self.position < 5:
            self.position += 1
            yield self.position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def with_generator(seed: int) -> DataLoader[Any]:
    return loader(12, shuffle=True, generator=torch.Generator().manual_seed(seed))


def test_a_loader_without_state_has_none():
    source = loader(8, shuffle=True)
    seed_shuffling(source, 0, 0)
    assert loader_state(source) is None
    load_loader_state(source, None)


def test_the_users_generator_continues_where_it_was(tmp_path):
    source = with_generator(1)
    order(source)
    torch.save(loader_state(source), tmp_path / "state.pt")
    expected = [order(source), order(source)]
    other = with_generator(2)
    load_loader_state(other, torch.load(tmp_path / "state.pt", weights_only=True))
    assert [order(other), order(other)] == expected


def test_states_go_round_through_a_combined_loader():
    source = CombinedLoader({"a": Positioned(), "b": with_generator(1), "c": range(3)})
    next(source.batches())
    state = loader_state(source)
    expected = order(source.flattened[1])
    other = CombinedLoader({"a": Positioned(), "b": with_generator(5), "c": range(3)})
    load_loader_state(other, state)
    assert list(other.flattened[0]) == [2, 3, 4, 5]
    assert order(other.flattened[1]) == expected


def test_in_the_middle_of_an_epoch_the_users_generator_goes_back_to_its_start():
    source = with_generator(1)
    order(source)
    seed_shuffling(source, 0, 1)
    second = order(source)
    state = loader_state(source)
    other = with_generator(2)
    seed_shuffling(other, 0, 1)
    assert load_loader_state(other, state, mid_epoch=True) is False
    again = loader_state(other)
    assert again is not None
    assert state is not None
    kept = "generators_at_epoch_start"
    assert torch.equal(again["loaders"][0][kept][0], state["loaders"][0][kept][0])
    assert [batch.tolist() for batch in Batches(other, skip=2)] == second[2:]
    assert order(other) == order(source)


def test_a_loader_that_restored_its_position_says_so():
    assert load_loader_state(Positioned(), loader_state(Positioned()), mid_epoch=True) is True
    assert load_loader_state(loader(), None) is False


def test_a_state_that_finds_no_place_is_told():
    state = loader_state(CombinedLoader([Positioned(), with_generator(0)]))
    with pytest.warns(messages.PacelineWarning, match="different number of loaders .2 instead of 1"):
        load_loader_state(loader(), state)
    with pytest.warns(messages.PacelineWarning, match="random generators .1 in total, but this loader has 0"):
        load_loader_state(loader(), loader_state(with_generator(0)))
    with pytest.warns(messages.PacelineWarning, match="this loader has no load_state_dict"):
        load_loader_state(loader(), loader_state(Positioned()))


# ---- overfitting


@pytest.mark.parametrize("kind", [kind for kind in SHUFFLED if kind not in ("own batch sampler", "combined", "split")])
def test_without_shuffling_the_same_data_come_in_order_every_epoch(kind):
    source = without_shuffling(SHUFFLED[kind]())
    first = order(source)
    assert first == order(source)
    flat = torch.as_tensor(first).flatten().tolist()
    assert flat == list(range(3, 11) if kind == "subset" else range(12))


def test_without_shuffling_keeps_everything_else_of_a_subclass():
    class Own(DataLoader):
        def __init__(self, data, note, **options):
            super().__init__(data, **options)
            self.note = note

    source = Own(range(5), "mine", batch_size=2, shuffle=True, drop_last=True, collate_fn=list)
    ordered = without_shuffling(source)
    assert isinstance(ordered, Own)
    assert ordered.note == "mine"
    assert order(ordered) == [[0, 1], [2, 3]]
    assert isinstance(source.sampler, RandomSampler)
    assert isinstance(source.batch_sampler.sampler, RandomSampler)


def test_without_shuffling_a_loader_whose_workers_are_running_gets_its_own():
    source = loader(6, shuffle=True, num_workers=1, persistent_workers=True)
    order(source)
    ordered = without_shuffling(source)
    assert order(ordered) == order(ordered) == [[0, 1], [2, 3], [4, 5]]
    CombinedLoader([source, ordered]).reset()


def test_without_shuffling_keeps_a_batch_samplers_own_ways():
    source = loader(6, batch_sampler=Everything(RandomSampler(range(6)), 3, False), batch_size=1)
    assert order(without_shuffling(source)) == [[2, 1, 0], [5, 4, 3]]


def test_without_shuffling_works_in_a_combined_loader_and_leaves_other_loaders_alone():
    source = CombinedLoader({"a": loader(4, shuffle=True), "b": [7, 8]}, "max_size")
    source.limits = [1, 2]
    ordered = without_shuffling(source)
    assert [(row["a"].tolist() if row["a"] is not None else None, row["b"]) for row in ordered.batches()] == [
        ([0, 1], 7),
        (None, 8),
    ]
    stream = DataLoader(Stream(3))
    assert without_shuffling(stream) is stream
    batches = [1, 2]
    assert without_shuffling(batches) is batches
    assert order(without_shuffling(loader(12, sampler=[3, 1], batch_size=2))) == [[3, 1]]


def test_without_shuffling_turns_a_distributed_sampler_in_order():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=1, shuffle=True)  # type: ignore[arg-type]
    assert order(without_shuffling(loader(8, sampler=sampler))) == [[1, 3], [5, 7]]
    assert sampler.shuffle


def test_a_batch_sampler_that_cannot_be_put_in_order_is_an_error():
    class Opaque:
        def __iter__(self):
            return iter([[1, 0]])

    with pytest.raises(ValueError, match=r"overfit_batches needs.*Opaque.*shuffle=False"):
        without_shuffling(DataLoader(range(2), batch_sampler=Opaque()))  # type: ignore[arg-type]


# ---- advice


def test_shuffling_in_evaluation_is_told_once():
    messages.forget()
    with pytest.warns(messages.PacelineWarning, match="val_dataloader shuffles.*shuffle=False"):
        advise(loader(shuffle=True), "val_dataloader")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advise(loader(shuffle=True), "val_dataloader")


@pytest.mark.parametrize(
    ("source", "what"),
    [(loader(shuffle=True), "train_dataloader"), (loader(), "val_dataloader"), ([X], "test_dataloader")],
)
def test_there_is_no_advice_where_nothing_is_wrong(source, what):
    messages.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advise(source, what)


def test_an_ordered_sampler_is_kept():
    source = loader()
    assert isinstance(without_shuffling(source).sampler, SequentialSampler)


def test_a_tensor_data_set_split_by_indices_keeps_its_samples():
    data = TensorDataset(torch.arange(10))
    source = DataLoader(data, sampler=SubsetRandomSampler([7, 2]), batch_size=1)
    assert [batch[0].item() for batch in without_shuffling(source)] == [7, 2]


def test_the_users_generators_are_found_once_each_and_ours_are_not():
    own, other = torch.Generator(), torch.Generator()
    shuffled = loader(shuffle=True, generator=own)  # the loader and its sampler share it
    sampled = loader(sampler=RandomSampler(range(8), generator=other))
    combined = CombinedLoader([shuffled, sampled, loader(shuffle=True)])
    seed_shuffling(combined, 0, 0)
    assert users_generators(combined) == [own, other]

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from paceline import messages
from paceline.data.batches import Batches, batch_size_of, conflicting_sizes
from paceline.data.combined_loader import CombinedLoader


class Recorded:
    """An iterable that notes what was fetched and whether its iterator was closed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.fetched: list[int] = []
        self.closed = 0

    def __iter__(self) -> Iterator[int]:
        try:
            for index in range(self.count):
                self.fetched.append(index)
                yield index
        finally:
            self.closed += 1


class Loads(Dataset[int]):
    """A data set that notes which samples were loaded."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


def values(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def python_calls(function: Any, *args: Any) -> list[str]:
    calls: list[str] = []

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("limit", [float("inf"), 900])
def test_a_batch_costs_no_python_call_without_move_and_lookahead(limit):
    def consume(batches):
        for _ in batches:
            pass

    batches = iter(Batches(list(range(1000)), None, False, limit))
    assert python_calls(consume, batches) == ["consume"]


def test_without_move_lookahead_and_limit_the_loaders_own_iterator_is_handed_out():
    loader = DataLoader(Loads(4))
    assert type(iter(Batches(loader))) is type(iter(loader))


def test_looking_ahead_costs_one_python_call_a_batch():
    def consume(batches):
        for _ in batches:
            pass

    batches = iter(Batches(list(range(1000)), None, True))
    assert len(python_calls(consume, batches)) <= 1000 + 3


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("move", [None, lambda batch: batch * 10])
def test_every_batch_comes_once_and_in_order(lookahead, move):
    factor = 10 if move else 1
    assert list(Batches(Recorded(5), move, lookahead)) == [i * factor for i in range(5)]
    assert list(Batches(Recorded(0), move, lookahead)) == []


def test_lookahead_knows_the_last_batch_of_a_loader_without_length():
    batches = Batches(Recorded(3), None, lookahead=True)
    assert [(batch, batches.exhausted) for batch in batches] == [(0, False), (1, False), (2, True)]


def test_lookahead_knows_the_last_batch_under_a_limit_without_fetching_more():
    source = Recorded(10)
    batches = Batches(source, None, lookahead=True, limit=3)
    assert [(batch, batches.exhausted) for batch in batches] == [(0, False), (1, False), (2, True)]
    assert source.fetched == [0, 1, 2]


def test_without_lookahead_nothing_is_said_about_the_last_batch():
    batches = Batches(Recorded(2))
    assert list(batches) == [0, 1]
    assert not batches.exhausted


def test_a_second_pass_starts_over():
    batches = Batches(Recorded(3), None, lookahead=True)
    assert list(batches) == list(batches) == [0, 1, 2]
    iterator = iter(batches)
    next(iterator)
    assert not batches.exhausted


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_batch_is_moved_before_the_one_in_front_of_it_is_handed_out_only_with_lookahead(lookahead):
    moved: list[int] = []
    batches = iter(Batches(Recorded(3), lambda batch: moved.append(batch) or batch, lookahead))
    next(batches)
    assert moved == ([0, 1] if lookahead else [0])


@given(
    count=st.integers(0, 8),
    skip=st.integers(0, 10),
    limit=st.one_of(st.integers(0, 10), st.just(float("inf"))),
    lookahead=st.booleans(),
)
@settings(max_examples=150, deadline=None, database=None, derandomize=True)
def test_the_batches_are_those_from_skip_to_limit(count, skip, limit, lookahead):
    source = Recorded(count)
    batches = Batches(source, None, lookahead, limit, skip)
    expected = [i for i in range(count) if skip <= i < limit]
    seen = [(batch, batches.exhausted) for batch in batches]
    batches.close()
    assert [batch for batch, _ in seen] == expected
    assert [last for _, last in seen] == [lookahead and batch == expected[-1] for batch in expected]
    assert source.fetched == ([] if skip >= limit else [i for i in range(count) if i < limit])
    assert source.closed == (skip < limit and bool(source.fetched or count == 0))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [2, None])
@pytest.mark.parametrize("lookahead", [False, True])
def test_skipping_in_a_map_style_loader_gives_the_rest_of_the_same_order(workers, batch_size, lookahead):
    def loader():
        generator = torch.Generator().manual_seed(3)
        return DataLoader(range(9), batch_size=batch_size, shuffle=True, num_workers=workers, generator=generator)

    whole = [torch.as_tensor(batch).tolist() for batch in loader()]
    rest = Batches(loader(), None, lookahead, skip=3)
    assert [torch.as_tensor(batch).tolist() for batch in rest] == whole[3:]


def test_skipping_in_a_map_style_loader_loads_nothing_that_is_skipped():
    data = Loads(10)
    loader = DataLoader(data, batch_size=2)
    sampler = loader.batch_sampler
    assert values(Batches(loader, skip=3, limit=4)) == [[6, 7]]
    assert data.loaded == [6, 7]
    assert loader.batch_sampler is sampler
    assert values(Batches(loader))[0] == [0, 1]


def test_skipping_jumps_once_with_persistent_workers():
    loader = DataLoader(range(6), batch_size=2, num_workers=1, persistent_workers=True)
    assert values(Batches(loader, skip=1)) == [[2, 3], [4, 5]]
    assert values(Batches(loader)) == [[0, 1], [2, 3], [4, 5]]
    assert values(Batches(loader, skip=2)) == [[4, 5]]
    CombinedLoader(loader).reset()


def test_skipping_fetches_and_drops_where_there_is_no_sampler_to_jump_in():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(6))

    class Own(DataLoader):
        def __iter__(self):
            return iter([torch.tensor([7]), torch.tensor([8])])

    assert values(Batches(DataLoader(Stream(), batch_size=2), skip=2)) == [[4, 5]]
    assert values(Batches(Own(range(4)), skip=1)) == [[8]]
    assert list(Batches(CombinedLoader([range(3), range(3)]), skip=2)) == [[2, 2]]


def test_dropped_batches_are_reported_with_advice_that_fits_the_loader(caplog):
    caplog.set_level("INFO", logger="paceline")

    class Keeps:
        def __iter__(self):
            return iter(range(3))

    class Saves(Keeps):
        def state_dict(self):
            return {}

    for loader, advice in (
        (Keeps(), "such as torchdata's StatefulDataLoader"),
        (Saves(), "it saved none for this epoch"),
    ):
        messages.forget()
        caplog.clear()
        assert list(Batches(loader, skip=1)) == [1, 2]
        assert f"this {type(loader).__name__} cannot start in the middle of an epoch. " in caplog.text
        assert advice in caplog.text


def test_a_failing_fetch_hands_out_the_batch_before_it_first():
    def source():
        yield 1
        yield 2
        raise OSError("disk gone")

    batches = Batches(source(), None, lookahead=True)
    iterator = iter(batches)
    assert [next(iterator), next(iterator)] == [1, 2]
    with pytest.raises(OSError, match="disk gone"):
        next(iterator)
    assert not batches.exhausted


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("limit", [float("inf"), 8])
def test_closing_early_closes_the_loaders_generator(lookahead, limit):
    source = Recorded(10)
    batches = Batches(source, None, lookahead, limit)
    iterator = iter(batches)
    next(iterator)
    assert source.closed == 0
    batches.close()
    assert source.closed == 1
    batches.close()


def test_closing_leaves_an_iterator_alone_that_was_given_as_loader():
    numbers = (i for i in range(10))
    first = Batches(numbers, None, lookahead=True, limit=3)
    assert list(first) == [0, 1, 2]
    first.close()
    assert list(Batches(numbers, limit=2)) == [3, 4]


@pytest.mark.parametrize("lookahead", [False, True])
def test_closing_early_shuts_the_workers_down(lookahead):
    before = set(multiprocessing.active_children())
    batches = Batches(DataLoader(range(50), num_workers=2), None, lookahead)
    iterator = iter(batches)
    next(iterator)
    assert len(set(multiprocessing.active_children()) - before) == 2
    batches.close()
    assert not set(multiprocessing.active_children()) - before


def test_closing_early_keeps_persistent_workers():
    loader = DataLoader(range(50), num_workers=1, persistent_workers=True)
    batches = Batches(loader)
    next(iter(batches))
    batches.close()
    assert next(iter(Batches(loader))).tolist() == [0]
    workers = loader._iterator._workers
    assert all(worker.is_alive() for worker in workers)
    CombinedLoader(loader).reset()
    assert not any(worker.is_alive() for worker in workers)


def test_a_combined_loader_gives_its_batches_alone():
    combined = CombinedLoader({"a": [1, 2], "b": [3]}, "max_size_cycle")
    assert list(Batches(combined)) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    assert list(Batches(combined, limit=1)) == [{"a": 1, "b": 3}]


@dataclasses.dataclass
class Graph:
    name: str
    x: torch.Tensor


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 2), 3),
        (torch.tensor(1.0), 1),
        ((torch.zeros(4), torch.zeros(5)), 4),
        ([torch.zeros(4, 1)], 4),
        ({"x": torch.zeros(5)}, 5),
        (OrderedDict(n=1, x=torch.zeros(5)), 5),
        ({"name": "abc", "inner": {"n": 3, "x": [None, torch.zeros(6)]}}, 6),
        (("text", (torch.zeros(7), 1)), 7),
        (Pair(torch.zeros(2), torch.zeros(3)), 2),
        (Graph("a", torch.zeros(8, 1)), 8),
        (SimpleNamespace(n=1, x=torch.zeros(9)), 9),
        (SimpleNamespace(x=torch.zeros(90), num_graphs=4), 4),
        (SimpleNamespace(x=torch.zeros(90), batch_size=torch.Size([5, 2])), 5),
        (pack_sequence([torch.ones(3), torch.ones(2)]), 2),
        ((), None),
        ({}, None),
        (None, None),
        ("text", None),
        ([1, 2.5], None),
        (torch.nn.ReLU, None),
    ],
)
def test_the_batch_size_is_the_first_dimension_of_the_first_tensor(batch, size):
    assert batch_size_of(batch) == size


def test_an_object_that_refers_to_itself_has_an_end():
    batch = SimpleNamespace()
    batch.me = batch
    batch.parts = [batch, torch.zeros(3)]
    assert batch_size_of(batch) == 3


def test_different_first_dimensions_are_told_and_equal_ones_are_not():
    assert conflicting_sizes((torch.zeros(4), torch.zeros(4, 2), torch.tensor(0.1))) == ()
    assert conflicting_sizes({"x": torch.zeros(6, 2), "y": [torch.zeros(3), torch.zeros(6)]}) == (6, 3)
    assert conflicting_sizes("nothing") == ()


def test_a_sampler_that_is_shuffled_by_a_generator_is_jumped_in_without_another_draw():
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(Loads(6), sampler=RandomSampler(range(6), generator=generator), batch_size=2)
    batches = values(Batches(loader))
    generator.manual_seed(0)
    assert values(Batches(loader, skip=1)) == batches[1:]

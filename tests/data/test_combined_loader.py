from __future__ import annotations

import dataclasses
import multiprocessing
from collections import OrderedDict, namedtuple
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SequentialSampler

from paceline.data import CombinedLoader

MODES = ["min_size", "max_size", "max_size_cycle", "sequential"]


class Unsized:
    """An iterable without a length."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __iter__(self):
        return iter(self.values)


class Stateful:
    def __init__(self) -> None:
        self.position = 0

    def __iter__(self):
        return iter(range(3))

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def reference(lists: list[list[Any]], mode: str) -> list[tuple[Any, int, int]]:
    """What a pass must yield, written as plainly as possible."""
    if mode == "sequential":
        return [(x, index, which) for which, values in enumerate(lists) for index, x in enumerate(values)]
    sizes = [len(values) for values in lists]
    total = min(sizes) if mode == "min_size" else max(sizes)
    rows = []
    for step in range(total):
        if mode == "max_size_cycle":
            row = [values[step % len(values)] for values in lists]
        else:
            row = [values[step] if step < len(values) else None for values in lists]
        rows.append((row, step, 0))
    return rows


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    mode=st.sampled_from(MODES),
    limits=st.one_of(st.none(), st.lists(st.one_of(st.integers(0, 7), st.just(float("inf"))), min_size=4, max_size=4)),
    sized=st.lists(st.booleans(), min_size=4, max_size=4),
)
@settings(max_examples=400, deadline=None, database=None, derandomize=True)
def test_every_mode_yields_what_the_plain_reference_yields(sizes, mode, limits, sized):
    lists = [[f"{which}-{index}" for index in range(size)] for which, size in enumerate(sizes)]
    loaders = [values if known else Unsized(values) for values, known in zip(lists, sized, strict=False)]
    combined = CombinedLoader(loaders, mode)
    if limits is not None:
        combined.limits = limits[: len(lists)]
        lists = [
            values if limit == float("inf") else list(islice(values, int(limit)))
            for values, limit in zip(lists, limits, strict=False)
        ]
    if mode == "max_size_cycle" and not all(lists) and any(lists):
        with pytest.raises(ValueError, match="cannot cycle"):
            list(combined)
        return
    expected = reference(lists, mode)
    assert list(combined) == expected
    assert list(combined.batches()) == [batch for batch, _, _ in expected]
    if all(isinstance(loader, list) for loader in loaders):
        assert len(combined) == len(expected)
    else:
        with pytest.raises(TypeError, match="unknown"):
            len(combined)


def test_a_batch_has_the_structure_of_the_loaders():
    @dataclasses.dataclass
    class Both:
        a: Any
        b: Any

    Pair = namedtuple("Pair", "x y")
    iterables = {
        "list": [Unsized([1]), [Unsized([2])]],
        "pair": Pair(Unsized([3]), Unsized([4])),
        "ordered": OrderedDict(z=Unsized([5])),
        "own": Both(Unsized([6]), (Unsized([7]),)),
        "bare list": [8],
    }
    (batch,) = CombinedLoader(iterables).batches()
    assert batch == {
        "list": [1, [2]],
        "pair": Pair(3, 4),
        "ordered": OrderedDict(z=5),
        "own": Both(6, (7,)),
        "bare list": 8,
    }
    assert isinstance(batch["pair"], Pair)
    assert isinstance(batch["ordered"], OrderedDict)


def test_lists_without_loaders_are_loaders_themselves():
    combined = CombinedLoader([[1, 2], range(3)])
    assert combined.flattened == [[1, 2], range(3)]
    assert list(combined.batches()) == [[1, 0], [2, 1]]
    nested = CombinedLoader([[Unsized([1]), Unsized([2])], [5, 6]])
    assert list(nested.batches()) == [[[1, 2], 5]]


def test_one_loader_alone_gives_its_own_batches():
    assert list(CombinedLoader(Unsized([1, 2]))) == [(1, 0, 0), (2, 1, 0)]


def test_a_shuffled_loader_that_starts_over_draws_a_new_order():
    short = DataLoader(range(4), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    rows = [batch[0].tolist() for batch in CombinedLoader([short, range(3)], "max_size_cycle").batches()]
    assert [sorted(row) for row in rows] == [[0, 1, 2, 3]] * 3
    assert len({tuple(row) for row in rows}) > 1


def test_nothing_is_fetched_past_the_end_of_the_longest_loader():
    fetched = []

    class Noted(Unsized):
        def __iter__(self):
            for value in self.values:
                fetched.append(value)
                yield value

        def __len__(self):
            return len(self.values)

    assert len(list(CombinedLoader([Noted(["a", "b"]), Noted([1, 2, 3])], "max_size_cycle"))) == 3
    assert fetched == ["a", 1, "b", 2, 3, "a"]


def test_iterators_of_one_length_that_can_be_read_once_need_not_start_over():
    pair = CombinedLoader([(i for i in range(2)), (i for i in range(2))], "max_size_cycle")
    assert list(pair.batches()) == [[0, 0], [1, 1]]


def test_an_iterator_that_can_be_read_once_cannot_cycle():
    with pytest.raises(ValueError, match=r"Loader 0 \(generator\).*cannot cycle.*mode='max_size'"):
        list(CombinedLoader([(i for i in range(2)), range(3)], "max_size_cycle"))


def test_sequential_opens_a_loader_only_when_its_turn_comes():
    opened = []

    class Noted(Unsized):
        def __iter__(self):
            opened.append(self.values)
            return iter(self.values)

    iterator = iter(CombinedLoader([Noted([1]), Noted([2])], "sequential"))
    assert next(iterator) == (1, 0, 0)
    assert opened == [[1]]
    assert next(iterator) == (2, 0, 1)


@pytest.mark.parametrize("mode", MODES)
def test_dropping_a_half_read_pass_shuts_the_workers_down(mode):
    before = set(multiprocessing.active_children())
    combined = CombinedLoader([DataLoader(range(20), num_workers=1), DataLoader(range(30), num_workers=1)], mode)
    batches = combined.batches()
    next(batches)
    assert set(multiprocessing.active_children()) - before
    batches.close()  # type: ignore[attr-defined]
    assert not set(multiprocessing.active_children()) - before


def test_a_loader_that_fails_takes_the_workers_of_the_others_along():
    def fails():
        yield 1
        raise OSError("disk gone")

    before = set(multiprocessing.active_children())
    batches = CombinedLoader([DataLoader(range(20), num_workers=1), fails()]).batches()
    next(batches)
    with pytest.raises(OSError, match="disk gone") as held:
        next(batches)
    assert not set(multiprocessing.active_children()) - before
    assert held.traceback


def test_one_limit_holds_for_all_loaders_and_none_lifts_it():
    combined = CombinedLoader([range(5), range(3)], "sequential")
    combined.limits = 2
    assert combined.limits == [2, 2]
    assert len(combined) == len(list(combined)) == 4
    combined.limits = None
    assert len(combined) == 8


@pytest.mark.parametrize(("limits", "text"), [([1], r"1 instead of 2"), ([1, -2], r"\[1, -2\].*negative")])
def test_limits_that_do_not_fit_are_refused(limits, text):
    combined = CombinedLoader([range(5), range(3)])
    with pytest.raises(ValueError, match=text):
        combined.limits = limits


def test_samplers_come_in_the_structure_of_the_loaders():
    loader = DataLoader(range(4), batch_size=2)
    combined = CombinedLoader({"a": loader, "b": Unsized([1])})
    assert isinstance(combined.sampler["a"], SequentialSampler)
    assert combined.sampler["b"] is None
    assert combined.batch_sampler == {"a": loader.batch_sampler, "b": None}
    assert combined.iterables["a"] is loader


def test_the_loaders_can_be_replaced_in_place():
    combined = CombinedLoader({"a": Unsized([1]), "b": Unsized([2])})
    combined.flattened = [range(3), range(4)]
    assert combined.iterables == {"a": range(3), "b": range(4)}
    assert next(combined.batches()) == {"a": 0, "b": 0}
    with pytest.raises(ValueError, match=r"different number of loaders \(3 instead of 2\)"):
        combined.flattened = [1, 2, 3]


def test_states_of_loaders_go_round():
    combined = CombinedLoader([Stateful(), Unsized([1])])
    combined.flattened[0].position = 7
    state = combined.state_dict()
    other = CombinedLoader([Stateful(), Unsized([1])])
    other.load_state_dict(state)
    assert other.flattened[0].position == 7
    with pytest.raises(ValueError, match="from 2 loaders, but this CombinedLoader has 1"):
        CombinedLoader([Stateful()]).load_state_dict(state)


def test_an_unknown_mode_is_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match=r"'max_sise'. Did you mean 'max_size'\?.*'sequential'"):
        CombinedLoader([range(2)], "max_sise")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [5, None, "text", {"x": 1}])
def test_what_is_no_loader_is_refused_with_its_place(wrong):
    with pytest.raises(TypeError, match=r"iterables\['a'\]\[1\].* is not a loader"):
        CombinedLoader({"a": [Unsized([1]), wrong]})

"""Batches cut into micro-batches, and results put together."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.strategies.model_parallel.microbatches import cut, form_of, join

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: Any
    name: list[str]


@given(size=st.integers(1, 20), count=st.integers(1, 8))
def test_pieces_hold_every_sample_once_and_in_order(size: int, count: int) -> None:
    batch = {"x": torch.arange(size), "pair": (torch.arange(2 * size).view(size, 2), ["s"] * size)}
    pieces, sizes = cut(batch, count)
    assert sizes == [len(piece["x"]) for piece in pieces]
    assert len(pieces) == min(size, count)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    joined = join(pieces, sizes)
    assert torch.equal(joined["x"], batch["x"])
    assert torch.equal(joined["pair"][0], batch["pair"][0])
    assert joined["pair"][1] == batch["pair"][1]


@pytest.mark.parametrize("make", [Pair, Sample, lambda x, name: [x, name], lambda x, name: {"x": x, "name": name}])
def test_containers_keep_their_kind(make: Any) -> None:
    batch = make(torch.arange(4), ["a", "b", "c", "d"])
    pieces, _ = cut(batch, 2)
    assert [type(piece) for piece in pieces] == [type(batch)] * 2
    assert form_of(pieces[0]) == form_of(pieces[1])


def test_what_has_no_sample_dimension_goes_into_every_piece() -> None:
    weights, scale = torch.ones(3), torch.tensor(2.0)
    pieces, _ = cut((torch.zeros(4, 2), weights, scale, "name", None), 2)
    for piece in pieces:
        assert piece[0].shape == (2, 2)
        assert piece[1] is weights
        assert piece[2] is scale
        assert piece[3:] == ("name", None)


def test_a_batch_that_is_not_cut_stays_the_object_it_is() -> None:
    batch = {"x": torch.zeros(3)}
    assert cut(batch, 1) == ([batch], [3])
    assert cut(batch, 1)[0][0] is batch


@pytest.mark.parametrize("batch", ["text", {"a": 1}, torch.tensor(1.0), []])
def test_a_batch_without_samples_is_refused(batch: Any) -> None:
    with pytest.raises(TypeError, match="cannot be split into micro-batches"):
        cut(batch, 2)


def test_single_numbers_are_averaged_by_samples() -> None:
    joined = join([{"a": torch.tensor(1.0), "b": 4.0}, {"a": torch.tensor(4.0), "b": 1.0}], [2, 1])
    assert joined["a"] == 2.0
    assert joined["b"] == 3.0


def test_of_what_cannot_be_joined_the_first_counts() -> None:
    assert join([None, None], [1, 1]) is None
    assert join([{"k": "x"}, {"k": "y"}], [1, 1]) == {"k": "x"}

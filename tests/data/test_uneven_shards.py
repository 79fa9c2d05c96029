from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.uneven_shards import Division

NUMBERS = {
    "total": st.integers(0, 60),
    "size": st.integers(1, 5),
    "world": st.integers(1, 5),
    "drop_last": st.booleans(),
}


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def divide(total: int, size: int, world: int, **options: bool) -> list[list[tuple[list[int], float]]]:
    """Each rank's parts of ``range(total)``, with their shares."""
    return [
        [(list(items), share) for items, share in Division(rank, world, size, **options).parts(iter(range(total)))]
        for rank in range(world)
    ]


@given(**NUMBERS, evaluation=st.booleans())
@settings(max_examples=300, deadline=None)
def test_what_is_computed_from_the_length_is_what_comes_out(total, size, world, drop_last, evaluation):
    for rank in range(world):
        division = Division(rank, world, size, drop_last, evaluation)
        parts = list(division.parts(iter(range(total))))
        assert division.count(total) == len(parts)
        assert division.items(total) == sum(len(part.items) for part in parts)
        assert division.share(total) == (parts[-1].share if parts else 1.0)
        assert all(part.share == 1.0 for part in parts[:-1])


@given(**NUMBERS)
@settings(max_examples=300, deadline=None)
def test_training_rounds_are_the_batches_of_one_process(total, size, world, drop_last):
    chunk = world * size
    expected = [list(range(start, min(start + chunk, total))) for start in range(0, total, chunk)]
    if drop_last:
        expected = [batch for batch in expected if len(batch) == chunk]
    ranks = divide(total, size, world, drop_last=drop_last)
    assert {len(parts) for parts in ranks} == {len(expected)}
    for number, batch in enumerate(expected):
        parts = [rank[number] for rank in ranks]
        assert flat(items for items, share in parts if share) == batch
        sizes = [len(items) if share else 0 for items, share in parts]
        assert max(sizes) - min(sizes) <= 1
        mean = sum(share * sum(items) / len(items) for items, share in parts) / world
        assert mean == pytest.approx(sum(batch) / len(batch))
        assert all(set(items) <= set(batch) for items, share in parts)  # a repeated one is of the same round


@given(**{**NUMBERS, "drop_last": st.just(False)})
@settings(max_examples=300, deadline=None)
def test_evaluation_takes_every_item_once_and_in_order(total, size, world, drop_last):
    ranks = divide(total, size, world, evaluation=True)
    rounds = list(zip(*ranks, strict=True))  # as many parts on every rank
    assert flat(items for parts in rounds for items, share in parts if share) == list(range(total))
    assert all(1 <= len(items) <= size for parts in rounds for items, _ in parts)
    assert len(rounds) == -(-total // (world * size))
    surplus = sum(share == 0 for parts in rounds for _, share in parts)
    assert not surplus or size == 1 or total < world, "a repeated item, although all could have had one"
    for number, parts in enumerate(rounds[:-2]):
        assert parts[0][0][0] == number * world * size
        assert all(len(items) == size for items, _ in parts)


@given(**{**NUMBERS, "drop_last": st.just(True)})
@settings(max_examples=300, deadline=None)
def test_evaluation_that_drops_leaves_out_what_one_process_would(total, size, world, drop_last):
    ranks = divide(total, size, world, evaluation=True, drop_last=True)
    rounds = list(zip(*ranks, strict=True))
    assert flat(items for parts in rounds for items, share in parts if share) == list(range(total // size * size))
    assert all(len(items) == size for parts in rounds for items, _ in parts)


def test_two_last_evaluation_rounds_share_their_items_where_the_last_has_too_few():
    ranks = divide(13, 3, 4, evaluation=True)  # 12 in the first round would leave 1 for 4 ranks
    assert ranks == [
        [([0, 1, 2], 1.0), ([9], 1.0)],
        [([3, 4], 1.0), ([10], 1.0)],
        [([5, 6], 1.0), ([11], 1.0)],
        [([7, 8], 1.0), ([12], 1.0)],
    ]


def test_a_rank_without_an_item_of_the_last_round_repeats_one():
    assert divide(7, 2, 3) == [
        [([0, 1], 1.0), ([6], 3.0)],
        [([2, 3], 1.0), ([6], 0.0)],
        [([4, 5], 1.0), ([6], 0.0)],
    ]


def test_a_training_round_is_read_only_when_it_is_asked_for():
    read: list[int] = []
    parts = Division(0, 2, 3).parts(iter(lambda: read.append(len(read)) or len(read), None))
    next(parts)
    assert len(read) == 6


def test_an_evaluation_round_reads_on_only_as_far_as_it_has_to():
    read: list[int] = []
    parts = Division(0, 2, 3, evaluation=True).parts(iter(lambda: read.append(len(read)) or len(read), None))
    next(parts)
    assert len(read) == 6 + 2

"""Batches that are indexed at once are those that torch collates sample by sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from paceline.data import sample_order
from paceline.data.in_memory import rows_of
from paceline.data.sample_order import iterate
from paceline.data.sharding import shard_evaluation, shard_training


class Own(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(tensor + 1 for tensor in super().__getitem__(index))


class Once(TensorDataset):
    """Equal to a ``TensorDataset``, but of another type, so that its samples are fetched one by one."""


def tensors(size: int = 23, kind: type[TensorDataset] = TensorDataset) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(size, 2, 3, generator=generator).transpose(1, 2)
    return kind(pixels, torch.arange(size), torch.rand(size, generator=generator).bool(), torch.zeros(size, 0))


def nested_in(data: Any, subsets: int) -> Any:
    for number in range(subsets):
        chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(number))[:-2]
        data = Subset(data, chosen.tolist() if number else chosen)  # type: ignore[arg-type]
    return data


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert type(found) is type(expected) is list
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape, a.stride(), a.storage_offset()) == (b.dtype, b.shape, b.stride(), b.storage_offset())
        assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
        assert torch.equal(a, b)


def walked(batches: Iterator[Any], generator: torch.Generator) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
    """Each batch with the random states after it was fetched; last those after the end."""
    found = [(batch, generator.get_state(), torch.get_rng_state()) for batch in batches]
    return [*found, (None, generator.get_state(), torch.get_rng_state())]


SIZES = [{}, {"drop_last": True}, {"batch_size": 1}, {"batch_size": 40}, {"batch_size": 21}]


@pytest.mark.parametrize("more", SIZES)
@pytest.mark.parametrize("shuffle", [False, True, "generator", "replacement", "some"])
@pytest.mark.parametrize("subsets", [0, 1, 2])
def test_batches_and_random_states_are_those_of_torch(subsets: int, shuffle: Any, more: dict[str, Any]) -> None:
    generator = torch.Generator()
    found = []
    for kind, start in ((TensorDataset, iterate), (Once, iter)):
        data: Any = nested_in(tensors(kind=kind), subsets)
        sampler = {
            "generator": lambda data: RandomSampler(data, generator=generator),
            "replacement": lambda data: RandomSampler(data, replacement=True, generator=generator),
            "some": lambda data: RandomSampler(data, num_samples=2 * len(data) + 3, generator=generator),
        }.get(shuffle)
        how = {"shuffle": shuffle} if sampler is None else {"sampler": sampler(data)}
        loader = DataLoader(data, **{"batch_size": 4, **how, **more})
        assert (rows_of(loader) is None) == (kind is Once)
        torch.manual_seed(5)
        generator.manual_seed(6)
        found.append([walked(start(loader), generator) for _ in range(2)])
    for one, other in zip(*found, strict=True):
        assert len(one) == len(other)
        for (batch, state, host), (expected, torchs, torchs_host) in zip(one, other, strict=True):
            assert torch.equal(state, torchs)
            assert torch.equal(host, torchs_host)
            assert batch is expected is None or assert_same(batch, expected) is None


@pytest.mark.parametrize("start", [0, 1, 4, 5, 6, 9])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pass_can_be_entered_anywhere(
    shuffle: bool, drop_last: bool, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_order, "_PIECES", 2)
    generator = torch.Generator()
    data = tensors()
    sampler = RandomSampler(data, generator=generator) if shuffle else SequentialSampler(data)
    loader = DataLoader(data, batch_size=4, drop_last=drop_last, sampler=sampler)
    generator.manual_seed(6)
    whole = walked(iterate(loader), generator)
    generator.manual_seed(6)
    rest = walked(iterate(loader, start), generator)
    for (found, _, _), (expected, _, _) in zip(rest[:-1], whole[start:-1], strict=True):
        assert_same(found, expected)
    assert torch.equal(rest[-1][1], whole[-1][1])


@pytest.mark.parametrize("shard", [shard_training, shard_evaluation])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_process_indexes_its_part_at_once(rank: int, shard: Any) -> None:
    found = []
    for kind in (TensorDataset, Once):
        loader = DataLoader(tensors(kind=kind), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3))
        loader.sampler.generator = torch.Generator().manual_seed(4)  # type: ignore[attr-defined]
        part = shard(loader, rank, 3)
        assert (rows_of(part) is None) == (kind is Once)
        found.append(list(iterate(part)))
    for one, other in zip(*found, strict=True):
        assert_same(one, other)


def found_and_expected(data: Any, batch_sampler: Any) -> tuple[Any, Any]:
    """The batches, or the kind of error, with Paceline and with torch."""
    found: list[Any] = []
    for read in (iterate, iter):
        try:
            found.append(list(read(DataLoader(data, batch_sampler=batch_sampler()))))  # type: ignore[operator]
        except Exception as error:
            found.append(type(error))
    return found[0], found[1]


@pytest.mark.parametrize(
    "batch_sampler",
    [
        lambda: [[0, -1, 3], [-23]],
        lambda: [(5, 2), (1,)],
        lambda: [torch.tensor([4, 7]), torch.tensor([-2]), torch.tensor([3], dtype=torch.int16)],
        lambda: [map(int, "123"), iter([4])],
        lambda: [numpy.array([4, 1]), [numpy.int64(3), 2]],
        lambda: [[True, False]],
        lambda: [[]],
        lambda: [[0, 1], ["a"]],
        lambda: [[0, 1], [25]],
        lambda: BatchSampler([3, -4, 5], 2, False),  # type: ignore[arg-type]
        lambda: BatchSampler(WeightedRandomSampler([1.0] * 23, 9, generator=torch.Generator().manual_seed(2)), 2, True),
    ],
    ids=[
        "lists",
        "tuples",
        "tensors",
        "iterators",
        "numpy",
        "bools",
        "empty",
        "text",
        "beyond",
        "a list cut",
        "weighted",
    ],
)
@pytest.mark.parametrize("subsets", [0, 1])
def test_indices_of_any_kind_mean_what_they_mean_to_torch(batch_sampler: Any, subsets: int) -> None:
    data: Any = tensors(25)
    found, expected = found_and_expected(Subset(data, list(range(24, 0, -1))) if subsets else data, batch_sampler)
    if isinstance(expected, type):
        assert found is expected
        return
    assert expected
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


class Modular:
    """Indices that never end, read by position."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index % 3


@pytest.mark.parametrize(
    ("indices", "at_once"),
    [
        ([3, -1, 2, 2], True),
        ((3, 1), True),
        (range(7, 1, -2), True),
        (torch.tensor([4, 2]), True),
        (torch.tensor([4, 2], dtype=torch.int32), True),
        (torch.tensor([4, 2], dtype=torch.int8), False),
        (numpy.array([4, 2, 0]), True),
        ({0: 5, 1: 3}, False),
        (Modular(), False),
    ],
    ids=["list", "tuple", "range", "tensor", "int32", "int8", "numpy", "dict", "modular"],
)
def test_a_subset_may_have_indices_of_any_kind(indices: Any, at_once: bool) -> None:
    loader = DataLoader(Subset(tensors(), indices), batch_size=2)
    assert (rows_of(loader) is not None) == at_once
    for one, other in zip(iterate(loader), iter(loader), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("kind", [torch.uint16, torch.uint32, torch.float8_e4m3fn], ids=str)
def test_tensors_that_cannot_be_indexed_at_once_are_read_sample_by_sample(kind: torch.dtype) -> None:
    loader = DataLoader(TensorDataset(torch.arange(6).to(kind)), batch_size=4)
    assert [[t.view(torch.uint8).tolist() for t in batch] for batch in iterate(loader)] == [
        [t.view(torch.uint8).tolist() for t in batch] for batch in loader
    ]


def test_a_loader_with_an_iterator_of_its_own_keeps_it() -> None:
    class Scaling(DataLoader[Any]):
        def _get_iterator(self) -> Any:
            return ([10 * tensor for tensor in batch] for batch in super()._get_iterator())

    loader = Scaling(TensorDataset(torch.arange(4)), batch_size=2)
    assert [batch[0].tolist() for batch in iterate(loader)] == [[0, 10], [20, 30]]


def test_a_batch_does_not_share_memory_with_the_data_and_keeps_the_graph() -> None:
    weight = torch.randn(6, 2, requires_grad=True)
    loader = DataLoader(TensorDataset(weight * 2), batch_size=3)
    first, second = (batch[0] for batch in iterate(loader))
    first.detach().zero_()
    second.sum().backward()
    assert torch.equal(weight.grad, torch.tensor([[0.0] * 2] * 3 + [[2.0] * 2] * 3))
    assert loader.dataset.tensors[0].abs().sum() > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Own(torch.arange(6)), batch_size=2),
        DataLoader(tensors(), batch_size=2, collate_fn=lambda samples: default_collate(samples)),
        DataLoader(tensors(), batch_size=None),
        DataLoader(TensorDataset(torch.nn.Parameter(torch.zeros(4))), batch_size=2),
        DataLoader(list(range(6)), batch_size=2),  # type: ignore[arg-type]
    ],
    ids=["a data set of one's own", "own collate", "no batches", "a parameter", "a list"],
)
def test_what_is_collated_in_another_way_stays_as_it_is(loader: DataLoader[Any]) -> None:
    assert rows_of(loader) is None
    for found, expected in zip(iterate(loader), iter(loader), strict=True):
        assert type(found) is type(expected)


@pytest.mark.parametrize("subsets", [0, 1])
def test_an_index_that_is_not_there_is_an_error(subsets: int) -> None:
    data: Any = Subset(tensors(9), [0, 1, 2, 8]) if subsets else tensors(4)
    loader = DataLoader(data, batch_sampler=[[0, 1], [3, 4]])
    with pytest.raises(IndexError):
        list(iterate(loader))


def test_no_samples_are_no_batches() -> None:
    assert list(iterate(DataLoader(Subset(tensors(), []), batch_size=2))) == []

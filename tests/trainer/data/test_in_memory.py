"""Batches that are indexed at once are those that torch collates sample by sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from paceline.trainer.data.in_memory import _Indexer
from paceline.trainer.data.workers import start_iterating


class Own(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(tensor + 1 for tensor in super().__getitem__(index))


def tensors(size: int = 23) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(size, 2, 3, generator=generator).transpose(1, 2)
    return TensorDataset(pixels, torch.arange(size), torch.rand(size, generator=generator).bool(), torch.zeros(size, 0))


def batches(loader: DataLoader[Any], start: Any) -> tuple[list[Any], Any]:
    torch.manual_seed(5)
    return list(start(loader)), torch.get_rng_state()


@pytest.mark.parametrize("more", [{}, {"shuffle": True}, {"drop_last": True}, {"batch_size": 1}, {"batch_size": 40}])
@pytest.mark.parametrize("nested", [0, 1, 2])
def test_batches_and_random_states_are_those_of_torch(nested: int, more: dict[str, Any]) -> None:
    data: Any = tensors()
    for _ in range(nested):
        data = Subset(data, torch.randperm(len(data)).tolist()[:-2])
    loader = DataLoader(data, **{"batch_size": 4, **more})
    assert type(start_iterating(loader)._dataset_fetcher) is _Indexer  # type: ignore[attr-defined]
    (found, state), (expected, other) = batches(loader, start_iterating), batches(loader, iter)
    assert torch.equal(state, other)
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        assert type(one) is type(two) is list
        for a, b in zip(one, two, strict=True):
            assert (a.dtype, a.shape, a.stride(), a.is_contiguous()) == (
                b.dtype,
                b.shape,
                b.stride(),
                b.is_contiguous(),
            )
            assert torch.equal(a, b)


def test_a_batch_does_not_share_memory_with_the_data_and_keeps_the_graph() -> None:
    weight = torch.randn(6, 2, requires_grad=True)
    loader = DataLoader(TensorDataset(weight * 2), batch_size=3)
    first, second = (batch[0] for batch in start_iterating(loader))
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
    assert type(start_iterating(loader)._dataset_fetcher) is not _Indexer  # type: ignore[attr-defined]
    for found, expected in zip(start_iterating(loader), iter(loader), strict=True):
        assert type(found) is type(expected)


def test_an_index_that_is_not_there_is_an_error() -> None:
    loader = DataLoader(tensors(4), batch_sampler=[[0, 1], [3, 4]])
    with pytest.raises(IndexError):
        list(start_iterating(loader))

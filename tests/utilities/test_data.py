"""Facts about data loaders."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.strategies.base import SingleDevice
from paceline.utilities.data import has_iterable_dataset, has_len, has_len_all_ranks, suggested_max_num_workers


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(3))


def test_a_stream_has_no_length() -> None:
    assert has_iterable_dataset(DataLoader(Stream()))
    assert not has_iterable_dataset(DataLoader(torch.ones(2)))
    assert has_len(DataLoader(torch.ones(2)))
    assert not has_len(DataLoader(Stream()))


def test_a_length_of_0_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="has length 0"):
        assert has_len([])


class Sized(Stream):
    def __len__(self):
        return 3


class OneOfTwo(SingleDevice):
    """This rank's loader has no batch, the other rank's has three."""

    def gather_objects(self, value):
        return [value, 3]


def test_a_length_is_known_if_every_rank_knows_it() -> None:
    alone = SingleDevice("cpu")
    assert has_len_all_ranks(DataLoader(torch.ones(2)), alone)
    assert not has_len_all_ranks(DataLoader(Stream()), alone)
    with pytest.warns(UserWarning, match="IterableDataset with a __len__"):
        assert has_len_all_ranks(DataLoader(Sized()), alone)
    with pytest.warns(UserWarning, match="0 on every rank"):
        assert has_len_all_ranks([], alone)
    with pytest.raises(RuntimeError, match=r"0 on rank 0\. The lengths are 0, 3"):
        has_len_all_ranks([], OneOfTwo("cpu"))
    assert has_len_all_ranks([], OneOfTwo("cpu"), allow_zero_length_dataloader_with_multiple_devices=True)


def test_processes_of_a_machine_share_its_cores() -> None:
    assert suggested_max_num_workers(10**6) == 1
    with pytest.raises(ValueError, match="1 or more"):
        suggested_max_num_workers(0)

"""Facts about data loaders."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.utilities.data import has_iterable_dataset, has_len, suggested_max_num_workers


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


def test_processes_of_a_machine_share_its_cores() -> None:
    assert suggested_max_num_workers(10**6) == 1
    with pytest.raises(ValueError, match="1 or more"):
        suggested_max_num_workers(0)

"""Bytes of modules, and which parameters are one."""

from __future__ import annotations

import pytest
import torch
from big_models import Net
from torch import nn

from paceline import compute_module_sizes
from paceline.big_model.module_sizes import Sizes, find_tied_parameters, named_tensors, size_in_bytes


def test_each_tensor_counts_once_under_each_name() -> None:
    net = Net(1, width=4)
    sizes = compute_module_sizes(net)
    assert sizes["start"] == sizes["head"] == (16 + 4) * 4
    assert sizes["blocks.0.scale"] == 16
    assert sizes["blocks"] == sizes["blocks.0"] == (8 + 4 * 8 + 8 + 8 * 4 + 4 + 4) * 4
    assert sizes[""] == sizes["start"] + 16 + sizes["blocks"] + sizes["shift"]
    assert sizes[""] == Sizes(net).of(net)


def test_types_change_floating_point_tensors_only() -> None:
    model = nn.BatchNorm1d(4)
    sizes = compute_module_sizes(model, "bfloat16", {"weight": torch.float64})
    assert (sizes["weight"], sizes["bias"], sizes["num_batches_tracked"]) == (32, 8, 8)
    assert compute_module_sizes(model, buffers_only=True)[""] == 4 * 4 * 2 + 8
    assert compute_module_sizes(nn.ReLU()) == {"": 0}


def test_ties_are_found() -> None:
    assert find_tied_parameters(Net(1)) == [["head.weight", "start.weight"]]
    assert find_tied_parameters(nn.Linear(2, 2)) == []


def test_buffers_that_are_not_saved_can_be_left_out() -> None:
    model = nn.Module()
    model.inner = nn.Module()
    model.inner.register_buffer("kept", torch.zeros(1))
    model.inner.register_buffer("computed", torch.zeros(1), persistent=False)
    assert [name for name, _ in named_tensors(model, persistent_only=True)] == ["inner.kept"]
    assert len(list(named_tensors(model))) == 2
    assert list(named_tensors(model, buffers=False)) == []


@pytest.mark.parametrize(("text", "size"), [("2KB", 2000), ("1.5 GiB", 1610612736), (7, 7), ("1tb", 10**12)])
def test_sizes_are_numbers_or_text(text: int | str, size: int) -> None:
    assert size_in_bytes(text, "limit") == size


@pytest.mark.parametrize("wrong", ["2", "GB", -1, 0, True, "1 PB", "0GB"])
def test_what_is_no_size_is_named(wrong: int | str) -> None:
    with pytest.raises(ValueError, match=r"limit=.* is not a valid size"):
        size_in_bytes(wrong, "limit")


def test_what_is_no_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="dtype='bf16' is not a torch dtype"):
        compute_module_sizes(nn.Linear(2, 2), "bf16")

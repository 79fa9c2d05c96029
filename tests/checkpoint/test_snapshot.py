"""Copies of a state in memory that is kept."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.checkpoint import single_file
from paceline.checkpoint.snapshot import Buffers, size_bytes


def addresses(state: dict[str, Tensor]) -> list[int]:
    return [tensor.untyped_storage().data_ptr() for tensor in state.values()]


def test_a_copy_has_the_values_of_its_moment_and_none_of_the_memory():
    weight = torch.arange(6.0)
    state: dict[str, Any] = {
        "a": weight,
        "b": [weight[2:4], {"c": torch.tensor(3)}],
        "d": (1, "x"),
        "e": bytearray(b"1"),
    }
    found = Buffers().copy(state)
    weight.zero_()
    state["b"].append("later")
    state["e"] += b"2"
    assert torch.equal(found["a"], torch.arange(6.0))
    assert torch.equal(found["b"][0], torch.tensor([2.0, 3.0]))
    assert len(found["b"]) == 2
    assert (found["b"][1]["c"].item(), found["d"], found["e"]) == (3, (1, "x"), bytearray(b"1"))


def test_shared_memory_stays_shared_and_is_in_the_file_once(tmp_path: Any):
    weight = torch.randn(1000, 100)
    state = {"state_dict": {"one": weight, "tied": weight, "part": weight[10:20], "turned": weight.t()}}
    found = Buffers().copy(state)["state_dict"]
    assert found["one"] is found["tied"]
    assert len(set(addresses(found))) == 1
    assert all(torch.equal(found[name], tensor) for name, tensor in state["state_dict"].items())
    single_file.write({"state_dict": found}, tmp_path / "x.ckpt")
    assert (tmp_path / "x.ckpt").stat().st_size < 1.1 * weight.nbytes


def test_the_memory_is_used_again_whatever_the_order():
    buffers = Buffers()
    state = {"a": torch.randn(100), "b": torch.randn(50), "c": torch.randn(100)}
    first = addresses(buffers.copy(state))
    second = addresses(buffers.copy(dict(reversed(state.items()))))
    assert sorted(first) == sorted(second)


def test_the_memory_follows_a_state_that_changes_its_size():
    buffers = Buffers()
    first = buffers.copy({"a": torch.zeros(100), "b": torch.zeros(7)})
    second = buffers.copy({"a": torch.ones(100), "b": torch.ones(9), "new": torch.ones(3)})
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert [tensor.sum().item() for tensor in second.values()] == [100, 9, 3]
    buffers.copy({"b": torch.ones(9)})
    assert sum(len(kept) for kept in buffers._kept.values()) == 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.tensor(True),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(4, 4).to_sparse(),
        torch.randn(4).bfloat16(),
        torch.randn(2, 3)[:, 1],
    ],
)
def test_tensors_of_every_form_are_copied(tensor: Tensor):
    found = Buffers().copy({"x": tensor})["x"]
    assert (found.dtype, found.shape, found.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(found.to_dense(), tensor.to_dense()) if tensor.is_sparse else torch.equal(found, tensor)


def test_parameters_stay_parameters_and_attributes_are_kept():
    parameter = nn.Parameter(torch.ones(2), requires_grad=False)
    parameter.note = "kept"  # type: ignore[attr-defined]
    state = OrderedDict(weight=parameter)
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    found = Buffers().copy({"state_dict": state})["state_dict"]
    assert isinstance(found["weight"], nn.Parameter)
    assert (found["weight"].requires_grad, found["weight"].note) == (False, "kept")
    assert found._metadata == {"": {"version": 1}}


def test_the_size_counts_shared_memory_once():
    weight = torch.zeros(1000)
    assert size_bytes({"a": weight, "b": [weight[:10], torch.zeros(5)], "c": 1}) == 4020


@pytest.mark.gpu
def test_a_copy_from_a_gpu_lies_in_pinned_memory_that_is_used_again():
    buffers, weight = Buffers(), torch.randn(1 << 20, device="cuda")
    expected = weight.cpu()
    first = buffers.copy({"a": weight, "b": weight[5:9]})
    weight.zero_()
    assert first["a"].device.type == "cpu"
    assert first["a"].untyped_storage().is_pinned()
    assert torch.equal(first["a"], expected)
    assert torch.equal(first["b"], expected[5:9])
    assert addresses(buffers.copy({"a": weight})) == addresses(first)[:1]


def test_the_memory_serves_saves_inside_and_outside_of_inference_mode():
    buffers, state = Buffers(), {"weight": torch.zeros(3)}
    with torch.inference_mode():
        buffers.copy({**state, "metric": torch.ones(1)})
    state["weight"] += 1
    with torch.enable_grad():
        found = buffers.copy({"weight": state["weight"].requires_grad_()})
    assert found["weight"].tolist() == [1, 1, 1]

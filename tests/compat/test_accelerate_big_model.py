"""Functions of Accelerate around models that are spread, under its names: what they give for the same models."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from big_models import Block, Net, empty, write
from torch import nn

from paceline import compute_module_sizes, load_checkpoint_and_dispatch
from paceline.compat.accelerate import big_model as compat

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))


def test_maps_are_shortened_below_a_module_only() -> None:
    assert compat.clean_device_map({"model.layers.0": 0, "model.layers.1": 0, "head": 1}) == {"model": 0, "head": 1}
    found = {"model.layers.0": 0, "model.layers.1": 0, "model.head": 0, "x": 1}
    assert compat.clean_device_map(found, "model.layers") == {"model.layers": 0, "model.head": 0, "x": 1}
    assert compat.clean_device_map({"a.0": 0, "a.1": 0, "ab": 0, "b": 1}, "a") == {"a": 0, "ab": 0, "b": 1}


@pytest.mark.filterwarnings("error")
def test_the_largest_parts_are_named() -> None:
    net = Net(2)
    sizes = compute_module_sizes(net)
    blocks = (sizes["blocks.0"], ["blocks.0", "blocks.1"])
    assert compat.get_max_layer_size(list(net.named_children()), sizes, ["Block"]) == blocks
    assert compat.calculate_maximum_sizes(net) == (sizes[""], blocks)
    assert compat.calculate_maximum_sizes(nn.Linear(1, 1)) == (8, (4, ["weight", "bias"]))
    assert compat.compute_module_total_buffer_size(net) == 2 * 64 * 4


def test_limits_and_maps_have_accelerates_keys_and_class() -> None:
    assert list(compat.get_max_memory()) == ["cpu"]
    assert list(compat.get_max_memory({0: "1GB", "cpu": 5})) == [0, "cpu"]
    assert compat.get_max_memory({"cpu": 5, "disk": 7}) == {"cpu": 5, "disk": 7}
    assert list(compat.get_balanced_memory(Net(1), {0: 10**6, 1: 10**6})) == [0, 1]
    assert compat.infer_auto_device_map(Net(1), {"cpu": 10**9}) == OrderedDict({"": "cpu"})
    assert "clean_result" in inspect.signature(compat.infer_auto_device_map).parameters


def test_modules_inside_a_preloaded_one_get_no_hook() -> None:
    net = Net(1)
    compat.attach_execution_device_hook(net, "cpu", preload_module_classes=["Block"])
    assert hasattr(net.blocks[0], "_hf_hook")
    assert not hasattr(net.blocks[0].up, "_hf_hook")
    assert hasattr(net.head, "_hf_hook")


def test_sizes_with_ties_count_a_tied_tensor_once() -> None:
    net = Net(1)
    sizes = compute_module_sizes(net)
    others = [(name, child) for name, child in net.named_children() if name != "start"]
    size, names, modules = compat.get_module_size_with_ties(["head.weight"], sizes["start"], sizes, others)
    assert (names, modules) == (["head"], [net.head])
    assert size == sizes["start"] + sizes["head"] - sizes["start.weight"]
    tied = ["head.weight", "blocks.0.up.weight"]
    assert compat.get_module_size_with_ties(tied, 0, sizes, others)[1] == ["head", "blocks"]


def test_a_tensor_is_set_by_name() -> None:
    net = empty(Net, 1)
    with pytest.raises(ValueError, match="no value yet"):
        compat.set_module_tensor_to_device(net, "blocks.0.up.weight", "cpu")
    value = torch.ones(128, 64)
    compat.set_module_tensor_to_device(net, "blocks.0.up.weight", "cpu", value, torch.float16)
    assert net.blocks[0].up.weight.dtype == torch.float16
    assert isinstance(net.blocks[0].up.weight, nn.Parameter)
    compat.set_module_tensor_to_device(net, "blocks.0.scale", "meta")
    assert net.blocks[0].scale.is_meta
    with pytest.raises(ValueError, match=r"has shape \(128, 64\), but the value has shape \(3,\)"):
        compat.set_module_tensor_to_device(net, "blocks.0.up.weight", "cpu", torch.ones(3))
    with pytest.raises(ValueError, match="no parameter or buffer 'wieght'"):
        compat.set_module_tensor_to_device(net, "start.wieght", "cpu")


def test_ties_are_made_again() -> None:
    net = Net(1)
    net.head.weight = nn.Parameter(torch.zeros(64, 64, device="meta"))
    compat.retie_parameters(net, [["head.weight", "start.weight"]])
    assert net.head.weight is net.start.weight
    assert not net.head.weight.is_meta


def test_states_are_read_and_taken_apart(tmp_path: Path) -> None:
    net = Net(1)
    file = write(net.state_dict(), tmp_path / "m.safetensors")
    assert torch.equal(compat.load_state_dict(file)["shift"], net.shift)
    assert compat.load_state_dict(file, {"": "cpu", "blocks": "disk"}).keys() == net.state_dict().keys() - {
        "head.weight"
    }
    assert list(compat.extract_submodules_state_dict(net.state_dict(), ["start", "shift"])) == [
        "shift", "start.weight", "start.bias",
    ]  # fmt: skip
    state = compat.get_state_dict_from_offload(net.start, "start.weight", {})
    assert list(state) == ["start.weight", "start.bias"]
    assert compat.get_state_dict_offloaded_model(net).keys() == net.state_dict().keys()


@pytest.mark.parametrize("offload", [False, True])
def test_hooks_bring_weights_from_a_mapping(offload: bool) -> None:
    torch.manual_seed(2)
    net = Net(2)
    expected = net(X)
    values = {f"model.{name}": value.detach().clone() for name, value in net.state_dict().items()}
    compat.attach_align_device_hook(net, "cpu", offload, values, module_name="model")
    assert torch.equal(net(X), expected)
    assert compat.has_offloaded_params(net.blocks[0]) is False  # nothing to bring: they run where they lie


def test_hooks_for_blocks_by_name() -> None:
    torch.manual_seed(2)
    net = Net(2)
    expected = net(X)
    compat.attach_align_device_hook_on_blocks(net, {"blocks.0": "cpu", "blocks.1": "cpu"}, {"blocks.1": True})
    assert torch.equal(net(X), expected)


def test_values_are_where_they_run_within(tmp_path: Path) -> None:
    write(Net(1).state_dict(), tmp_path / "m.safetensors", misaligned=True)
    net = load_checkpoint_and_dispatch(empty(Net, 1), tmp_path, {"": "disk"})
    assert compat.has_offloaded_params(net.start)
    before = net.start.weight.clone()
    with compat.align_module_device(net.start):
        assert net.start.weight.data_ptr() % 64 == 0
        with torch.no_grad():
            net.start.weight.add_(1)
    assert net.start.weight.data_ptr() % 64 == 8
    assert torch.equal(net.start.weight, before + 1)
    block: Any = Block()
    with compat.align_module_device(block.up, "cpu"):
        block.up.bias.data.fill_(3)
    assert block.up.bias[0] == 3

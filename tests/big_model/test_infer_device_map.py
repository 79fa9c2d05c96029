"""Which part of a model lies where."""

from __future__ import annotations

import math
import random
from types import MappingProxyType
from typing import Any

import pytest
import torch
from big_models import Block, Net, empty
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline import compute_module_sizes, infer_auto_device_map, plan_device_map
from paceline.big_model import device_map as maps
from paceline.big_model.device_map import check_device_map, device_of, join_neighbors
from paceline.big_model.infer_device_map import DevicePlan, get_balanced_memory, get_max_memory, smallest_parts
from paceline.big_model.module_sizes import Sizes, named_tensors

BLOCK = compute_module_sizes(Block())[""]
BUFFER = 64 * 4
NET = compute_module_sizes(Net())[""]


def plan_of(model: nn.Module, limits: dict[Any, Any], word: str = "sequential", **rest: Any) -> DevicePlan:
    return plan_device_map(model, word, limits, verbose=False, **rest)


# ---- any model, any limits -------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """Modules in one that is called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.own = nn.Parameter(torch.zeros(3))


@st.composite
def models(draw: Any) -> nn.Module:
    """Nested containers of blocks and layers of several sizes, some tied, some with buffers."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    linears: list[nn.Linear] = []

    def layer() -> nn.Module:
        made = nn.Linear(rng.randint(1, 9), rng.randint(1, 9), bias=rng.random() < 0.5)
        linears.append(made)
        return rng.choice([made, nn.BatchNorm1d(rng.randint(1, 30)), made])

    def grow(depth: int) -> nn.Module:
        kind = rng.random()
        if kind < 0.35:
            return Block(rng.randint(1, 8))
        if depth == 0 or kind < 0.55:
            return layer()
        if kind < 0.65:
            return nn.MultiheadAttention(4, 2)
        if kind < 0.8:
            return Holder(grow(depth - 1))
        return nn.ModuleList(grow(depth - 1) for _ in range(rng.randint(1, 4)))

    with torch.device("meta"):
        model = nn.ModuleList(grow(2) for _ in range(rng.randint(1, 6)))
    for one in linears:
        other = rng.choice(linears)
        if rng.random() < 0.3 and other.weight.shape == one.weight.shape:
            one.weight = other.weight
    return model


NAMES: list[Any] = ["Block", Block, ["Block"], ("Block", "Holder"), {"Block"}, [Block]]


@settings(max_examples=200, deadline=None)
@given(
    model=models(),
    shares=st.dictionaries(st.sampled_from([0, 1, 2, "cpu"]), st.floats(0, 1.2), min_size=1),
    whole=st.sampled_from(NAMES),
    word=st.sampled_from(["auto", "balanced", "balanced_low_0", "sequential"]),
    offload_buffers=st.booleans(),
    fallback=st.booleans(),
)
def test_i5_no_block_is_split_and_no_limit_passed(
    model: nn.Module, shares: dict[Any, float], whole: Any, word: str, offload_buffers: bool, fallback: bool
) -> None:
    sizes = Sizes(model)
    limits: dict[Any, int | str] = {device: int(share * sizes.of(model)) for device, share in shares.items()}
    rest = {"offload_buffers": offload_buffers, "fallback_allocation": fallback, "no_split_module_classes": whole}
    try:
        plan = plan_of(model, limits, word, **rest)
    except ValueError as error:
        said = str(error)
        assert "max_memory" in said
        assert any(
            part in said for part in ("is too small by", "buffers of offloaded", "no device for the model to run on")
        )
        return
    check_names(model, plan.device_map)
    for name, module in model.named_modules():
        if isinstance(module, (Block, nn.MultiheadAttention)):
            below = {device_of(name, plan.device_map)}
            below |= {device for key, device in plan.device_map.items() if key.startswith(f"{name}.")}
            assert len(below) == 1
    check_limits(model, plan, sizes, offload_buffers)
    assert str(plan).count("\n") >= 1


def check_names(model: nn.Module, device_map: dict[str, Any]) -> None:
    """Any number of devices is there."""
    check_device_map(model, {name: "cpu" if isinstance(device, int) else device for name, device in device_map.items()})


def check_limits(model: nn.Module, plan: DevicePlan, sizes: Sizes, offload_buffers: bool) -> None:
    """Count again, tensor by tensor."""
    buffers = set() if offload_buffers else {id(buffer) for buffer in model.buffers()}
    used: dict[Any, int] = dict.fromkeys(plan.limits, 0)
    for name, tensor in {id(tensor): (name, tensor) for name, tensor in reversed(list(named_tensors(model)))}.values():
        device = device_of(name, plan.device_map)
        away = maps.is_offloaded(device, plan.main_device)
        used[plan.main_device if away and id(tensor) in buffers else device] += sizes.bytes[id(tensor)]
    used[plan.main_device] += plan.reserved
    assert all(used[device] <= limit for device, limit in plan.limits.items()), (used, plan.limits)
    used[plan.main_device] -= plan.reserved
    assert plan.used == used
    fetched = [part for name, part in smallest_parts(model, "Block") if device_of(name, plan.device_map) == "disk"]
    for part in fetched if plan.main_device == "cpu" else ():
        ids = (sizes.within(part) if isinstance(part, nn.Module) else {id(part)}) - buffers
        assert sizes.sum(ids) <= plan.reserved


# ---- what lies where -------------------------------------------------------------------------------------------------


def test_i4_devices_are_filled_in_order_and_the_table_says_what_went_where(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "paceline")
    limits = {"cpu": 2 * BLOCK, 1: 2 * BLOCK, 0: 4 * BLOCK}
    plan = plan_device_map(empty(Net, 8), "sequential", limits)
    places = [device_of(f"blocks.{number}", plan.device_map) for number in range(8)]
    assert places == sorted(places, key=[0, 1, "cpu", "disk"].index)
    assert set(places) == {0, 1, "cpu", "disk"}
    assert plan.main_device == 0
    assert plan.reserved == 2 * (BLOCK - BUFFER)
    assert plan.offloaded == [name for name, device in plan.device_map.items() if device in ("cpu", "disk")]
    said = caplog.text
    for text in ("module", "size", "why", "blocks.", "Block", "disk", "no room on 1", "Used: ", "kept free"):
        assert text in said


def test_i4_what_fits_is_one_line() -> None:
    plan = plan_of(empty(Net), {0: NET})
    assert plan.device_map == {"": 0}
    assert (plan.used, plan.reserved, plan.offloaded) == ({0: NET, "disk": 0}, 0, [])
    assert "(all)" in str(plan)


def test_i7_an_even_share_for_each_of_three_devices() -> None:
    model = empty(Net, 12)
    limits: dict[Any, Any] = dict.fromkeys((0, 1, 2), "1GB")
    for word in ("auto", "balanced"):
        used = plan_of(model, limits, word).used
        assert max(used[device] for device in (0, 1, 2)) - min(used[device] for device in (0, 1, 2)) <= 3 * BLOCK
    low = plan_of(model, limits, "balanced_low_0").used
    assert low[0] == 0
    assert abs(low[1] - low[2]) <= 2 * BLOCK
    assert plan_of(model, limits, "sequential").used[0] == Sizes(model).of(model)
    map_ = plan_of(model, limits, "balanced").device_map
    places = [device_of(f"blocks.{number}", map_) for number in range(12)]
    assert places == sorted(places)  # type: ignore[type-var]


def test_i7_low_zero_gives_the_first_only_what_the_others_cannot_take() -> None:
    model = empty(Net, 12)
    total = Sizes(model).of(model)
    plan = plan_of(model, {0: total, 1: total // 3, 2: total // 3, "cpu": total}, "balanced_low_0")
    assert 0 < plan.used[0] <= total // 2
    assert sum(plan.used[device] for device in (0, 1, 2)) + plan.used["cpu"] == total


def test_balanced_limits_can_be_limits_again() -> None:
    model = empty(Net, 12)
    limits = get_balanced_memory(model, {0: "1MB", 1: "1MB", "cpu": "1GB"})
    assert limits[0] < 10**6 == limits[1]
    assert limits["disk"] == math.inf
    assert infer_auto_device_map(model, limits) == plan_of(model, {0: "1MB", 1: "1MB", "cpu": "1GB"}, "auto").device_map
    assert infer_auto_device_map(model, {key: value * 0.9 for key, value in limits.items()})


def test_without_limits_what_is_free_is_taken_less_a_tenth() -> None:
    found = get_max_memory()
    assert [device for device in found if not isinstance(device, int)][-2:] == ["cpu", "disk"]
    assert 0 < found["cpu"] < 2**50
    assert list(get_max_memory({"disk": "1GB", "cpu": 0, "cuda:1": "1GB", 0: 5})) == [0, 1, "cpu", "disk"]


def test_sizes_given_as_text_become_bytes_in_the_callers_dict_too() -> None:
    """Transformers compares the numbers it gets with those of its own dict."""
    for ask in (get_max_memory, lambda limits: get_balanced_memory(Net(), limits)):
        limits = {"cuda:1": "1MB", "cpu": "12KB", "disk": 0}
        found = ask(limits)
        assert limits == {"cuda:1": 10**6, "cpu": 12_000, "disk": 0}
        assert all(size == found[1 if device == "cuda:1" else device] for device, size in limits.items())
    assert get_max_memory(MappingProxyType({"cpu": "12KB"}))["cpu"] == 12_000  # cannot be changed


def test_as_little_is_kept_free_as_is_fetched() -> None:
    """The largest part stays where it runs, so that only the small ones after it are fetched."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1000, 64)
            self.blocks = nn.ModuleList(Block() for _ in range(6))

    large = 1000 * 64 * 4
    plan = plan_of(empty(Wide), {"cpu": large + 3 * BLOCK})
    assert plan.device_map["embed"] == "cpu"
    assert plan.reserved == BLOCK - BUFFER
    assert plan.used["cpu"] + plan.reserved <= large + 3 * BLOCK
    assert plan_of(empty(Wide), {0: large + 4 * BLOCK, "cpu": "1GB"}).device_map["embed"] == 0


def test_buffers_that_stay_are_made_room_for() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(100))
            self.register_buffer("table", torch.zeros(30))

    model = nn.ModuleList(Kept() for _ in range(10))
    plan = plan_of(model, {"cpu": 10 * 120 + 400}, no_split_module_classes=Kept)
    assert plan.used["cpu"] + plan.reserved <= 10 * 120 + 400
    assert plan.buffers > 0
    with pytest.raises(ValueError, match=r"too small, because the buffers of offloaded parts .* offload_buffers=True"):
        plan_of(model, {"cpu": 10 * 120 + 300}, no_split_module_classes=Kept)
    assert plan_of(model, {"cpu": 600}, no_split_module_classes=Kept, offload_buffers=True).buffers == 0


def test_i5_names_and_classes_say_what_is_whole() -> None:
    model = empty(Net)
    maps_ = [infer_auto_device_map(model, {"cpu": 3 * BLOCK}, whole) for whole in (*NAMES, None)]
    assert all(found == maps_[0] for found in maps_)
    finer = infer_auto_device_map(model, {"cpu": 3 * BLOCK}, [])
    assert len(finer) > len(maps_[0])
    model._no_split_modules = ["Block"]  # type: ignore[assignment]
    assert infer_auto_device_map(model, {"cpu": 3 * BLOCK}) == maps_[0]


def test_what_comes_later_goes_to_the_same_device_or_a_later_one_unless_told_otherwise() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(100, 100), nn.Linear(4, 4))
    limits: dict[Any, Any] = {0: 4000, 1: 50_000, "cpu": 0}
    assert list(infer_auto_device_map(model, limits, []).values()) == [0, 1, 1]
    assert list(infer_auto_device_map(model, limits, [], fallback_allocation=True).values()) == [0, 1, 0]


def test_types_change_what_fits() -> None:
    model = empty(Net)
    assert plan_of(model, {"cpu": NET // 2 + 1000}, dtype=torch.bfloat16).device_map == {"": "cpu"}
    assert plan_of(model, {"cpu": NET // 2 + 1000}).device_map != {"": "cpu"}


def test_tied_parameters_count_once_and_say_so() -> None:
    plan = plan_of(nn.Sequential(nn.Linear(8, 8, bias=False), *[nn.Linear(8, 8)] * 2), {0: 300, 1: 300})
    rows = {row.module: row for row in plan.rows}
    assert rows["1"].bytes == 288
    assert sum(plan.used.values()) == 256 + 288


# ---- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "word", "said"),
    [
        ({"cpu": BLOCK // 2}, "auto", r"is too small by 32\.5 KiB: fetching 'blocks\.0' \(Block\) takes"),
        ({0: BLOCK, "cpu": "1GB"}, "auto", r"\{0: \d+\} .* \(Block\) while the previous part runs"),
        ({"cpu": "2GB", "disk": 10, 0: 0}, "automatic", "automatic"),
        ({"cpu": 3 * BLOCK, "disk": 1000}, "auto", r"does not fit on any device.* not enough room on cpu \(.*disk \("),
        ({"disk": "1GB"}, "auto", "no device for the model to run on"),
        ({}, "auto", "no device for the model to run on"),
        ({"gpu": "1GB"}, "auto", "max_memory device"),
        ({"cpu": "much"}, "auto", "max_memory.'cpu'.='much' is not a valid size"),
        ({"cpu": -1}, "auto", "is not a valid size"),
        ({"cpu": -0.5}, "auto", "is not a valid size"),
        ({True: "1GB"}, "auto", "invalid device True"),
    ],
)
def test_limits_that_cannot_be_kept_are_named(limits: Any, word: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_of(empty(Net), limits, word)


@pytest.mark.parametrize(
    ("device_map", "said"),
    [
        ({"start": "cpu"}, r"does not cover \d+ of the \d+ tensors in Net: shift"),
        ({"": "cpu", "bloks.0": "disk"}, r"entry for 'bloks\.0', which is not in Net\..*blocks\.0"),
        ({"": "gpu"}, "unknown|Unknown|gpu"),
        ({"": 99}, "but this process sees"),
        ({"": "cuda:99"}, "but this process sees"),
        ({"": -1}, "-1"),
        ({"": True}, "True"),
        ({"": None}, "does not cover"),
    ],
)
def test_maps_that_cannot_be_kept_are_named(device_map: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_device_map(Net(), device_map)


def test_neighbors_are_joined() -> None:
    assert join_neighbors({"a.0": 0, "a.1": 0, "b": 1}) == {"a": 0, "b": 1}
    assert join_neighbors({"a.0": 0, "a.1": 0}) == {"": 0}
    assert join_neighbors({"a.0": 0, "a.1": 1, "b.0.x": 1, "b.0.y": 1}) == {"a.0": 0, "a.1": 1, "b": 1}


def test_the_host_has_one_place_however_it_is_written() -> None:
    assert maps.is_offloaded("cpu:0", 0)
    assert not maps.is_offloaded(torch.device("cpu", 0), "cpu")
    assert maps.main_device_of({"a": "disk", "b": "cpu:0", "c": 3}) == 3
    assert get_max_memory({"cpu:0": 5})["cpu"] == 5

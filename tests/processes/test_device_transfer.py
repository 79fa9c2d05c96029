from __future__ import annotations

import collections
import dataclasses
import gc
import types
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from paceline.processes.device_transfer import Mover, ahead, move, mover

META = torch.device("meta")


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str = "a"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    inner: Sample
    derived: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "derived", self.x + 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor


class MovesItself:
    def __init__(self) -> None:
        self.x = torch.zeros(2)

    def to(self, device: torch.device) -> MovesItself:
        result = MovesItself()
        result.x = self.x.to(device)
        return result


class MovesInPlace:
    def __init__(self) -> None:
        self.x = torch.zeros(2)

    def to(self, device: torch.device, non_blocking: bool = False) -> None:
        self.x = self.x.to(device, non_blocking=non_blocking)


class Words(collections.UserDict[str, Any]):
    def to(self, device: torch.device) -> Words:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


def test_there_is_nothing_to_bind_on_the_cpu_without_a_dtype():
    assert mover("cpu") is None
    assert mover(torch.device("cpu"), torch.float64) is not None
    assert mover("meta") is not None


def test_tensors_in_nested_tuples_lists_and_dicts_move_and_the_rest_stays():
    batch = {"a": [torch.zeros(2), (torch.ones(3), "text")], "b": (1, None, 2.5), 3: b"bytes"}
    moved = move(batch, META)
    assert moved["a"][0].device == META
    assert moved["a"][1][0].device == META
    assert moved["a"][1][1] == "text"
    assert moved["b"] == (1, None, 2.5)
    assert moved[3] == b"bytes"
    assert [type(moved), type(moved["a"]), type(moved["a"][1])] == [dict, list, tuple]
    assert batch["a"][0].device.type == "cpu"  # type: ignore[index, union-attr]


def test_a_bare_tensor_and_a_tensor_subclass_move():
    assert move(torch.zeros(2), META).device == META
    moved = move(torch.nn.Parameter(torch.zeros(2)), META)
    assert moved.device == META


def test_named_tuples_keep_their_type():
    moved = move(Pair(torch.zeros(2), Pair(1, torch.zeros(1))), META)
    assert isinstance(moved, Pair)
    assert moved.x.device == META
    assert isinstance(moved.y, Pair)
    assert moved.y.y.device == META


def test_results_of_torch_functions_that_are_tuples_keep_their_type():
    result = torch.max(torch.zeros(2, 2), dim=0)
    moved = move(result, META)
    assert type(moved) is type(result)
    assert moved.values.device == META
    size = torch.Size([1, 2])
    assert move(size, META) is size


def test_mappings_keep_their_type_and_order():
    ordered = collections.OrderedDict(b=torch.zeros(1), a=torch.zeros(1))
    moved = move(ordered, META)
    assert type(moved) is collections.OrderedDict
    assert list(moved) == ["b", "a"]
    assert moved["a"].device == META
    assert ordered["a"].device.type == "cpu"
    default = collections.defaultdict(list, x=torch.zeros(1))
    moved = move(default, META)
    assert moved["x"].device == META
    assert moved["new"] == []
    proxy = move(types.MappingProxyType({"x": torch.zeros(1)}), META)
    assert isinstance(proxy, types.MappingProxyType)
    assert proxy["x"].device == META


def test_lists_of_other_kinds_keep_their_type():
    queue = move(collections.deque([torch.zeros(1), 2], maxlen=3), META)
    assert queue.maxlen == 3
    assert queue[0].device == META
    user = move(collections.UserList([torch.zeros(1)]), META)
    assert isinstance(user, collections.UserList)
    assert user[0].device == META


def test_dataclasses_move_frozen_and_slotted_ones_too():
    batch = Frozen(torch.zeros(2), Sample(torch.zeros(3), "b"))
    moved = move(batch, META)
    assert isinstance(moved, Frozen)
    assert [moved.x.device, moved.inner.x.device, moved.derived.device] == [META] * 3
    assert moved.inner.name == "b"
    assert batch.x.device.type == "cpu"
    assert batch.inner.x.device.type == "cpu"
    slotted = move(Slotted(torch.zeros(1)), META)
    assert slotted.x.device == META


def test_objects_with_a_to_method_move_themselves_also_in_place():
    assert move(MovesItself(), META).x.device == META
    in_place = MovesInPlace()
    assert move([in_place], META)[0] is in_place
    assert in_place.x.device == META


def test_a_mapping_with_a_to_method_is_asked_itself_unless_a_dtype_is_wanted():
    moved = move(Words(x=torch.zeros(1)), META)
    assert moved["x"].device == META
    moved = move(Words(x=torch.zeros(1), ids=torch.zeros(1, dtype=torch.long)), "cpu", torch.float64)
    assert isinstance(moved, Words)
    assert moved["x"].dtype == torch.float64
    assert moved["ids"].dtype == torch.long


def test_packed_sequences_keep_their_lengths_on_the_cpu():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = move(packed, META)
    assert isinstance(moved, PackedSequence)
    assert moved.data.device == META
    assert moved.batch_sizes.device.type == "cpu"
    assert move(packed, "cpu", torch.float64).data.dtype == torch.float64


def test_a_dtype_changes_floating_point_tensors_only():
    batch = (torch.zeros(2), torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.bool), "x")
    moved = mover("cpu", torch.bfloat16)(batch)
    assert [value.dtype for value in moved[:3]] == [torch.bfloat16, torch.long, torch.bool]
    assert moved[3] == "x"
    moved = move(batch, META, torch.float16)
    assert moved[0].dtype == torch.float16
    assert moved[0].device == META


def test_tensors_in_place_are_not_copied():
    x = torch.zeros(2)
    assert move((x, 1), "cpu")[0] is x
    assert mover("cpu", torch.float32)([x])[0] is x


def test_sparse_tensors_move():
    moved = move(torch.eye(3).to_sparse(), META)
    assert moved.device == META
    assert moved.layout == torch.sparse_coo


def test_a_type_is_looked_into_once_only(monkeypatch):
    asked = []
    choose = Mover._choose
    monkeypatch.setattr(Mover, "_choose", lambda self, kind: asked.append(kind) or choose(self, kind))
    bound = Mover(META)
    for _ in range(3):
        bound((torch.zeros(1), Sample(torch.zeros(1)), 3))
    assert asked == [Sample, str, int]


def test_a_moved_batch_is_freed_as_soon_as_it_is_dropped():
    bound = Mover(META)
    batch = bound({"x": [torch.zeros(1)]})
    moved = weakref.ref(batch["x"][0])
    gc.disable()
    try:
        del batch
        assert moved() is None
    finally:
        gc.enable()


def test_no_side_stream_without_a_gpu_or_for_a_function_of_the_users():
    assert ahead(None) is None
    assert ahead(lambda batch: batch) is None
    assert ahead(mover("meta")) is None


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
def test_pageable_tensors_reach_the_gpu_without_a_device_sync():
    device = torch.device("cuda", 0)
    batch = {"x": torch.arange(1000.0), "pinned": torch.arange(10.0).pin_memory(), "n": torch.arange(10)}
    bound = mover(device, torch.bfloat16)
    bound(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = bound(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert moved["x"].dtype == torch.bfloat16
    assert moved["n"].dtype == torch.long
    torch.testing.assert_close(moved["pinned"].cpu(), torch.arange(10.0).bfloat16())
    torch.testing.assert_close(moved["n"].cpu(), torch.arange(10))


@pytest.mark.gpu
@needs_cuda
def test_batches_copied_on_a_side_stream_arrive_whole_while_the_gpu_is_busy():
    from paceline.data.batches import Batches

    device = torch.device("cuda", 0)
    source = [(torch.full((1 << 20,), float(i)), torch.full((7,), i)) for i in range(20)]
    weights = torch.randn(2048, 2048, device=device)
    sums, numbers = [], []
    torch.cuda.synchronize()
    batches = Batches(source, mover(device), lookahead=True)
    for x, n in batches:
        for _ in range(5):
            weights = torch.tanh(weights @ weights)
        sums.append(x.sum())
        numbers.append(n.max())
        del x, n
    assert torch.stack(sums).tolist() == [float(i << 20) for i in range(20)]
    assert torch.stack(numbers).tolist() == list(range(20))
    assert batches.exhausted

"""Lightning's collectives: among several processes, in a process on its own, and on a single device."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import ranks

from paceline.compat.lightning.collectives import Collective, SingleDeviceCollective, TorchCollective


def every_operation() -> dict[str, Any]:
    """What one of two processes gets from each operation."""
    one = TorchCollective().setup(backend="gloo").create_group()
    rank = dist.get_rank()
    mine = torch.tensor([rank + 1.0])
    objects: list[Any] = [{"rank": rank}]
    parts: list[Any] = [None]
    found = {
        "place": (one.rank, one.world_size),
        "broadcast": one.broadcast(mine.clone(), src=1).item(),
        "all_reduce": one.all_reduce(mine.clone()).item(),
        "largest": one.all_reduce(mine.clone(), op="MAX").item(),
        "native": one.all_reduce(mine.clone(), op=dist.ReduceOp.PRODUCT).item(),
        "all_gather": [value.item() for value in one.all_gather([torch.zeros(1), torch.zeros(1)], mine)],
        "scatter": one.scatter(torch.zeros(1), [mine * 10, mine * 20] if rank == 0 else []).item(),
        "object": one.broadcast_object_list(objects, src=1),
        "objects": one.all_gather_object([None, None], rank),
        "part": one.scatter_object_list(parts, ["a", "b"] if rank == 0 else [], src=0),
    }
    if rank == 0:
        one.send(mine, dst=1)
        found["reduce"] = one.reduce(mine.clone(), dst=0).item()
        found["gather"] = [value.item() for value in one.gather(mine, [torch.zeros(1), torch.zeros(1)])]
    else:
        found["received"] = one.recv(torch.zeros(1), src=0).item()
        one.reduce(mine.clone(), dst=0)
        one.gather(mine, [])
    one.barrier()
    one.teardown()
    assert not dist.is_initialized()
    return found


def test_two_processes_share_tensors_and_objects() -> None:
    first, second = ranks(2, every_operation)
    alike = {
        "broadcast": 2.0,
        "all_reduce": 3.0,
        "largest": 2.0,
        "native": 2.0,
        "all_gather": [1.0, 2.0],
        "object": [{"rank": 1}],
        "objects": [0, 1],
    }
    assert first == alike | {"place": (0, 2), "scatter": 10.0, "part": ["a"], "reduce": 3.0, "gather": [1.0, 2.0]}
    assert second == alike | {"place": (1, 2), "scatter": 20.0, "part": ["b"], "received": 1.0}


def test_a_process_on_its_own_joins_and_leaves_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    one = TorchCollective()
    assert isinstance(one, Collective)
    assert not one.is_initialized()
    one.setup(backend="gloo", rank=0, world_size=1)
    try:
        assert one.manages_default_group
        assert "MASTER_ADDR" not in os.environ
        assert one.setup() is one
        assert one.world_size == 1
        one.create_group()
        with pytest.raises(RuntimeError, match="Call teardown"):
            one.create_group()
        with pytest.raises(ValueError, match="Unknown reduction 'summ'"):
            one.all_reduce(torch.ones(1), op="summ")
    finally:
        one.teardown()
    assert not one.is_initialized()
    assert not one.manages_default_group


def test_a_single_device_gives_back_what_it_gets() -> None:
    one, tensor = SingleDeviceCollective().setup(), torch.ones(2)
    with pytest.raises(RuntimeError, match="Call create_group"):
        _ = one.group
    one.create_group()
    assert (one.rank, one.world_size) == (0, 1)
    assert one.all_reduce(tensor, op="sum") is tensor
    assert one.broadcast(tensor, src=0) is tensor
    assert one.all_gather([], tensor) == [tensor]
    assert one.scatter(tensor, [tensor]) is tensor
    one.teardown()
    with pytest.raises(RuntimeError, match="before teardown"):
        one.teardown()

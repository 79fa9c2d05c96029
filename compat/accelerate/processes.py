"""``accelerate``'s functions that work without an Accelerator, on the processes of ``PartialState``."""

from __future__ import annotations

import os
from typing import Any

import torch

from ... import messages
from ...accelerator import loaders, operations
from ...accelerator.model_weights import save_object
from ...accelerator.process_state import PartialState
from ...strategies.base import Strategy
from .loader_classes import prepared


def _strategy() -> Strategy:
    return PartialState().strategy


class _OtherProcess(Strategy):
    """Stands for a (possibly nonexistent) process whose shard of the data a loader reads."""

    def __init__(self, device: torch.device, rank: int, world: int) -> None:
        super().__init__(device)
        self._rank, self._world = rank, world

    @property
    def global_rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world


def gather(tensor: Any) -> Any:
    """Gather tensors as ``accelerator.gather`` does."""
    return operations.gather(tensor, _strategy())


def gather_object(object: Any) -> Any:
    """Gather every process's list of objects into one list, in rank order."""
    return operations.gather_object(object, _strategy())


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Broadcast one process's tensors to every process."""
    return operations.broadcast(tensor, _strategy(), from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace a list's entries with those of one process."""
    return operations.broadcast_object_list(object_list, _strategy(), from_process)


def reduce(tensor: Any, reduction: operations.Reduction = "mean", scale: float = 1.0) -> Any:
    """Reduce tensors across all processes, by default to their mean."""
    tell_scale("reduce", scale)
    return operations.reduce(tensor, _strategy(), reduction)


def tell_scale(where: str, scale: float) -> None:
    """Report once that a reduction ignores ``scale``."""
    messages.ignored(where, "Accelerate itself uses scale only with torch_xla", scale=scale if scale != 1.0 else None)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pad tensors along a dimension to the largest size on any process."""
    return operations.pad_across_processes(tensor, _strategy(), dim, pad_index, pad_first)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Broadcast the main process's tensor to every process; other processes pass None."""
    found: Any = _strategy().broadcast(None if tensor is None else tensor.cpu())
    return found.to(_strategy().device)


def wait_for_everyone() -> None:
    """Wait until every process has called this."""
    PartialState().wait_for_everyone()


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write an object as ``accelerator.save`` does.

    The main process writes it or, with ``save_on_each_node``, the first process of each machine.
    """
    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        save_object(obj, f, safe_serialization)


def load(f: str | os.PathLike[str], map_location: Any = None, **kwargs: Any) -> Any:
    """Call ``torch.load``, limited to tensors and plain data unless ``weights_only=False`` is passed."""
    return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def prepare_data_loader(
    dataloader: Any,
    device: Any = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    put_on_device: bool = False,
    rng_types: Any = None,
    **options: Any,
) -> Any:
    """Return a loader that yields one process's shard of the data (by default, this process's shard).

    Batches are moved to this process's device. ``options`` are arguments of ``DataLoaderConfiguration``.
    """
    strategy = _strategy()
    world = strategy.world_size if num_processes is None else num_processes
    rank = strategy.global_rank if process_index is None else process_index
    if (world, rank) != (strategy.world_size, strategy.global_rank):
        strategy = _OtherProcess(strategy.device, rank, world)
    if put_on_device and device is not None and torch.device(device) != strategy.device:
        messages.ignored(
            "prepare_data_loader", f"batches are moved to this process's device, {strategy.device}", device=device
        )
    mesh = options.pop("torch_device_mesh", None)
    messages.ignored("prepare_data_loader", "the loader uses the run's processes", torch_device_mesh=mesh)
    slice_fn = options.pop("slice_fn_for_dispatch", None)
    config = loaders.DataLoaderConfiguration(**options)
    found = loaders.prepare_data_loader(
        dataloader,
        strategy,
        config,
        prepared,
        device_placement=put_on_device,
        rng_types=list(map(str, rng_types or ())),
    )
    loaders.refuse_slice_fn("prepare_data_loader", found, slice_fn_for_dispatch=slice_fn)
    return found

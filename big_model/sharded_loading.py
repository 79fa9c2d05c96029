"""Load weights into a sharded model; each process copies its own shards from the files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..torch_private import local_shape_and_offset
from .empty_init import put
from .weight_files import Pages, copy_into

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

#: Attribute in which a module sharded by FSDPStrategy stores the FSDP module that gathers it.
HOLDER = "_paceline_fsdp"


def in_parts(tensor: Any) -> bool:
    """Return True if a tensor is a DTensor, without importing DTensor if no other code has imported it."""
    torch_tensors = sys.modules.get("torch.distributed.tensor")
    return torch_tensors is not None and isinstance(tensor, torch_tensors.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if in_parts(tensor) else tensor  # type: ignore[attr-defined]


def part_of(whole: Tensor, like: DTensor) -> Tensor:
    """Return the shard that this process would hold if a full tensor were sharded like ``like``.

    The result is a view if the shard is contiguous.

    Raises:
        NotImplementedError: torch would shard the tensor differently from ``like``.
    """
    part, held = whole, local(like)
    placements: list[Any] = list(like.placements)
    if any(hasattr(placement, "split_factor") for placement in placements):
        for dim in {placement.dim for placement in placements if hasattr(placement, "dim")}:
            part = _pick(part, dim, _indices(like, dim))
    else:
        shape, offset = local_shape_and_offset(like)
        for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
            part = part.narrow(dim, start if length else 0, length)
    if part.shape != held.shape:
        raise NotImplementedError(
            f"A tensor of shape {tuple(like.shape)} is sharded as {like.placements} on a mesh of shape "
            f"{tuple(like.device_mesh.shape)}. This process has a shard of shape {tuple(held.shape)}, but torch "
            f"{torch.__version__} would give it shape {tuple(part.shape)}. Choose sizes that are divisible by the "
            "number of processes."
        )
    return part


def _indices(like: DTensor, dim: int) -> Tensor:
    """Return the indices that torch assigns to this process along a dimension, as a 1-D tensor."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def along(placement: Any) -> Any:
        if getattr(placement, "dim", None) != dim:
            return Replicate()
        factor = getattr(placement, "split_factor", None)
        return Shard(0) if factor is None else type(placement)(0, split_factor=factor)

    numbers = torch.arange(like.shape[dim], device=like.device_mesh.device_type)
    spread = distribute_tensor(numbers, like.device_mesh, [along(p) for p in like.placements], src_data_rank=None)
    return spread.to_local().cpu()


def _pick(whole: Tensor, dim: int, indices: Tensor) -> Tensor:
    count = len(indices)
    first = int(indices[0]) if count else 0
    if not count or int(indices[-1]) - first == count - 1:
        return whole.narrow(dim, first, count)
    return whole.index_select(dim, indices)


@torch.no_grad()
def fill(own: Tensor, value: Tensor, dtype: torch.dtype | None, pages: Pages) -> None:
    """Copy a value, or this process's shard of the value, into ``own``.

    Floating-point values are first converted to ``dtype``; None means the dtype of ``own``. Pages that were read are
    freed.
    """
    whole = value
    if in_parts(own):
        value, own = part_of(value, own), local(own)  # type: ignore[arg-type]
    if dtype is not None and value.is_floating_point():
        value = value.to(dtype)
    copy_into(own, value, pages)
    pages.give_back(whole)


def fill_parts(
    model: nn.Module, names: list[str], own: DTensor, value: Tensor, dtype: torch.dtype | None, pages: Pages
) -> None:
    """Set a sharded parameter's value under all its names, after allocating memory if it is on the meta device.

    Raises:
        ValueError: ``dtype`` differs from the parameter's dtype, in which its shards are gathered.
    """
    if own.is_meta:
        kept = (dtype if value.is_floating_point() else None) or value.dtype
        made = memory_for(own, own.device_mesh.device_type, kept)
        if isinstance(own, nn.Parameter):
            made = nn.Parameter(made, requires_grad=own.requires_grad)
        put(model, names, made)
        own = made  # type: ignore[assignment]
    elif dtype is not None and value.is_floating_point() and own.dtype != dtype:
        raise ValueError(
            f"load_checkpoint_in_model(dtype={dtype}): {names[0]} is already sharded as {own.dtype}, and its shards "
            "are gathered in that dtype. Convert the model before it is sharded (call model.to(dtype) before "
            "prepare()), or leave out dtype."
        )
    fill(own, value, dtype, pages)


def memory_for(own: Tensor, device: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate uninitialized memory for a tensor on the meta device, or for this process's shard of it."""
    return torch.empty_like(own, device=device, dtype=dtype or own.dtype)


def reshard(model: nn.Module) -> None:
    """Reshard a model's parameters, because some stay unsharded after a forward pass without a backward pass."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for module in model.modules():
        for part in (module, vars(module).get(HOLDER)):
            if isinstance(part, kind):
                part.reshard()  # type: ignore[attr-defined]


@contextmanager
def together(model: nn.Module) -> Iterator[None]:
    """Context manager that raises an error on all processes that share the sharded model if one of them fails."""
    meshes: list[DeviceMesh] = []
    for tensor in (*model.parameters(), *model.buffers()):
        if in_parts(tensor) and tensor.device_mesh not in meshes:  # type: ignore[attr-defined]
            meshes.append(tensor.device_mesh)  # type: ignore[attr-defined]
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        if not meshes:
            raise
        problem = error
    text = problem and f"{type(problem).__name__}: {problem}"
    for mesh in meshes:
        for axis in range(mesh.ndim):
            text = next(filter(None, _gather(text, mesh.get_group(axis))), None)
    raise_first(problem, [text])


def _gather(text: str | None, group: Any) -> list[str | None]:
    import torch.distributed as dist

    found: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, text, group=group)
    return found


def raise_first(problem: Exception | None, problems: list[str | None]) -> None:
    """Raise this process's error or, if only another process failed, an error that reports that failure."""
    if problem is not None:
        raise problem
    for text in filter(None, problems):
        raise RuntimeError(f"The weights were not loaded, because another rank failed: {text}")


def all_or_none(work: Callable[[], None], gather: Callable[[Any], list[Any]]) -> None:
    """Call ``work``. If it fails on any process, raise an error on all processes, so that none waits forever.

    ``gather`` returns the values that all processes pass to it.
    """
    problem: Exception | None = None
    try:
        work()
    except Exception as error:
        problem = error
    raise_first(problem, gather(problem and f"{type(problem).__name__}: {problem}"))

"""Weights of a model that lies in parts on several processes: each copies its own part of what a file holds."""

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

#: Where a module that FSDPStrategy has sharded keeps what gathers it.
HOLDER = "_paceline_fsdp"


def in_parts(tensor: Any) -> bool:
    """Whether a tensor is a DTensor; costs no import where there is none."""
    torch_tensors = sys.modules.get("torch.distributed.tensor")
    return torch_tensors is not None and isinstance(tensor, torch_tensors.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What of a tensor lies in this process."""
    return tensor.to_local() if in_parts(tensor) else tensor  # type: ignore[attr-defined]


def part_of(whole: Tensor, like: DTensor) -> Tensor:
    """What this process holds of a whole tensor that is laid out as ``like``: a view of it where the part is one piece.

    Raises:
        NotImplementedError: torch would lay it out in another way than ``like`` is.
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
            f"A tensor of shape {tuple(like.shape)} lies as {like.placements} on a mesh of shape "
            f"{tuple(like.device_mesh.shape)}: this process holds {tuple(held.shape)}, but torch {torch.__version__} "
            f"would give it {tuple(part.shape)}. Choose sizes that divide by the number of processes."
        )
    return part


def _indices(like: DTensor, dim: int) -> Tensor:
    """Which indices along a dimension this process holds, as torch distributes them: a 1-D tensor."""
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
    """Copy a value, or this process's part of it, to where ``own`` is.

    Args:
        own: a parameter or buffer that has memory, whole or in parts.
        value: the whole, of the same shape.
        dtype: what a floating-point value becomes on its way; None: what ``own`` is.
        pages: the mapped files, whose pages are given back.
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
    """Give a parameter that lies in parts its value, at all the names that it has; one without memory gets some.

    Raises:
        ValueError: ``dtype`` is another one than it has, which what gathers it has been told.
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
            f"load_checkpoint_in_model(dtype={dtype}): {names[0]} is {own.dtype} and lies in parts on several "
            "processes already, which are gathered as what they are. Build the model in that dtype (model.to(dtype) "
            "before it is prepared), or leave dtype out."
        )
    fill(own, value, dtype, pages)


def memory_for(own: Tensor, device: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Memory without values for a tensor that has none, or for this process's part of it."""
    return torch.empty_like(own, device=device, dtype=dtype or own.dtype)


def reshard(model: nn.Module) -> None:
    """Let a model have its parameters in parts: after a forward without a backward some are still whole."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for module in model.modules():
        for part in (module, vars(module).get(HOLDER)):
            if isinstance(part, kind):
                part.reshard()  # type: ignore[attr-defined]


@contextmanager
def together(model: nn.Module) -> Iterator[None]:
    """An error that one of the processes has among which a model lies is an error on all of them."""
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
    told = problem and f"{type(problem).__name__}: {problem}"
    for mesh in meshes:
        for axis in range(mesh.ndim):
            told = next(filter(None, _gather(told, mesh.get_group(axis))), None)
    raise_first(problem, [told])


def _gather(text: str | None, group: Any) -> list[str | None]:
    import torch.distributed as dist

    found: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, text, group=group)
    return found


def raise_first(problem: Exception | None, told: list[str | None]) -> None:
    """Raise this process's error, or that of another one."""
    if problem is not None:
        raise problem
    for text in filter(None, told):
        raise RuntimeError(f"The weights were not loaded, because another rank failed: {text}")


def all_or_none(work: Callable[[], None], gather: Callable[[Any], list[Any]]) -> None:
    """Do something on every process; if it fails on one of them, raise on all, so that nobody waits.

    Args:
        work: what to do.
        gather: returns what every process passes.
    """
    problem: Exception | None = None
    try:
        work()
    except Exception as error:
        problem = error
    raise_first(problem, gather(problem and f"{type(problem).__name__}: {problem}"))

"""What each rank has of its own in a checkpoint, and what becomes of it on another number of ranks."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import messages
from ..strategies.base import Strategy
from ..torch_private import unsaved_buffers


def entry_of(ranks: Sequence[Mapping[str, Any]], strategy: Strategy, alike: bool) -> Any:
    """What this rank goes on with: its own, or that of whoever saw its share of the data; None if nobody did.

    Args:
        ranks: what each rank kept, with its ``rank`` and ``data_rank``.
        strategy: of the run that goes on.
        alike: it has as many ranks, and shares of the data, as the run had.
    """
    key, mine = ("rank", strategy.global_rank) if alike else ("data_rank", strategy.data_rank)
    return next((kept for kept in ranks if kept[key] == mine), None)


def without_entry(ranks: Iterable[Mapping[str, Any]], world_size: int) -> str:
    """The ranks of a run of which a checkpoint keeps nothing, in words; empty if there is none."""
    known = {kept["rank"] for kept in ranks}
    lacking = [rank for rank in range(world_size) if rank not in known]
    return messages.ranks(lacking) if lacking else ""


def tell_derived(derived: Sequence[str], alike: bool, then: int, now: int) -> None:
    """Say in one message what was derived rather than restored; nothing if nothing was.

    Args:
        derived: each thing, with how.
        alike: the run has the ranks of then.
        then: how many ranks wrote the checkpoint.
        now: how many there are.
    """
    if derived:
        other = f" was written on {_count(then)}, and this run has {_count(now)}: it"
        messages.info(
            f"The checkpoint{'' if alike else other} does not hold everything that this run continues with. "
            f"Derived rather than restored: {'; '.join(derived)}."
        )


def _count(ranks: int) -> str:
    return f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"


# ---- buffers ---------------------------------------------------------------------------------------------------------


def buffers_apart(module: nn.Module, strategy: Strategy) -> dict[str, Tensor]:
    """The module's buffers that differ from rank 0's, such as the running statistics of a batch norm, on the CPU.

    Every rank must call.
    """
    if strategy.world_size == 1:
        return {}
    own = {name: buffer.detach().cpu() for name, buffer in whole_buffers(module).items()}
    sums = {name: digest(buffer) for name, buffer in own.items()}
    first = strategy.gather_objects(sums)[0]
    return {name: buffer for name, buffer in own.items() if sums[name] != first.get(name)}


@torch.no_grad()
def put_back_buffers(module: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Take back :func:`buffers_apart`."""
    buffers = whole_buffers(module) if kept else {}
    for name in kept.keys() & buffers.keys():
        buffers[name].copy_(kept[name])


def whole_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state_dict has, by name, as far as they are whole on this process."""
    saved = {
        f"{place}.{name}" if place else name: buffer
        for place, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in unsaved_buffers(part)
    }
    return {name: one for name, one in saved.items() if type(one) is Tensor and one.numel() and not one.is_meta}


def digest(tensor: Tensor) -> bytes:
    """A checksum of the numbers in a tensor on the CPU."""
    flat = tensor.contiguous()
    return hashlib.blake2b(ctypes.string_at(flat.data_ptr(), flat.nbytes), digest_size=8).digest()

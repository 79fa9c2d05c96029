"""Per-rank entries of a checkpoint, and how a run with a different number of ranks uses them."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import messages
from ..strategies.base import Strategy
from ..torch_private import pytree, unsaved_buffers


def entry_of(ranks: Sequence[Mapping[str, Any]], strategy: Strategy, alike: bool) -> Any:
    """Return the saved entry from which this rank resumes; None if there is none.

    This is the rank's own entry, or the entry of the rank with the same share of the data. ``alike`` is True if the
    saved run and this run have the same number of ranks and the same number of data shares.
    """
    key, mine = ("rank", strategy.global_rank) if alike else ("data_rank", strategy.data_rank)
    return next((kept for kept in ranks if kept[key] == mine), None)


def without_entry(ranks: Iterable[Mapping[str, Any]], world_size: int) -> str:
    """Return the ranks of a saved run that have no entry in its checkpoint, as text; empty if there are none."""
    known = {kept["rank"] for kept in ranks}
    lacking = [rank for rank in range(world_size) if rank not in known]
    return messages.ranks(lacking) if lacking else ""


def tell_derived(derived: Sequence[str], alike: bool, then: int, now: int) -> None:
    """If any states were derived instead of restored, print one message that lists these states.

    ``alike`` is the same as for :func:`entry_of`; ``then`` and ``now`` are the numbers of ranks
    in the saved run and in this run.
    """
    if derived:
        other = f" was written by {_count(then)}, but this run has {_count(now)}, so the checkpoint"
        messages.info(
            f"The checkpoint{'' if alike else other} does not contain everything that this run needs to resume. The "
            f"following were derived instead of restored: {'; '.join(derived)}."
        )


def _count(ranks: int) -> str:
    return f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"


def on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with copies on the CPU of its tensors."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), state)


# ---- gradients -------------------------------------------------------------------------------------------------------


def merged_gradients(ranks: Sequence[Mapping[str, Any]], factor: float, in_parts: bool) -> dict[str, Any]:
    """Return gradients for each rank of a run with a different number of ranks: the saved ones' sum times ``factor``.

    Args:
        ranks: what :meth:`Strategy.window_gradients` returned on each rank of the saved run. Shards are left out.
        factor: number by which the sum is multiplied, such as ``1 / len(ranks)`` for the mean.
        in_parts: whether the strategy of this run shards parameters.
    """
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for gradients in ranks for name in gradients):
        whole = [whole_gradient(gradients[name]) for gradients in ranks if name in gradients]
        total = sum(one * factor for one in whole if one is not None)
        found[name] = {"whole": total, "part": None} if in_parts else total
    return found


def whole_gradient(value: Any) -> Tensor | None:
    """Return the full gradient that a rank has accumulated, or None if the rank holds only a shard."""
    if isinstance(value, dict):
        return value["whole"] if value["part"] is None else None
    return value


# ---- tensors that differ between the ranks ---------------------------------------------------------------------------


def tensors_apart(tensors: Mapping[str, Tensor], strategy: Strategy) -> dict[str, Tensor]:
    """Return copies on the CPU of this rank's tensors that differ from rank 0's, such as batch norm statistics.

    Every rank must call this.
    """
    if strategy.world_size == 1:
        return {}
    own = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    sums = {name: digest(tensor) for name, tensor in own.items()}
    first = strategy.gather_objects(sums)[0]
    return {name: tensor for name, tensor in own.items() if sums[name] != first.get(name)}


@torch.no_grad()
def put_back(tensors: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
    """Copy what :func:`tensors_apart` returned into the current tensors of the same names."""
    for name in kept.keys() & tensors.keys():
        tensors[name].copy_(kept[name])


def replica(module: nn.Module, strategy: Strategy) -> dict[str, Tensor]:
    """Return a module's tensors that may differ between ranks: its buffers, and its weights if ranks trained apart."""
    return whole_buffers(module) | (dict(module.named_parameters()) if strategy.replicas_differ else {})


def optimizer_apart(optimizer: Optimizer, strategy: Strategy) -> dict[str, Any] | None:
    """Return a copy on the CPU of this rank's optimizer state if ranks trained apart and it differs from rank 0's.

    Every rank must call this.
    """
    if strategy.world_size == 1 or not strategy.replicas_differ:
        return None
    own = on_cpu(optimizer.state_dict())
    marks = repr(pytree.tree_map_only(Tensor, digest, own))
    return None if marks == strategy.broadcast(marks) else own


def mean_of_replicas(
    module: nn.Module, ranks: Sequence[Mapping[str, Tensor]], first: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the means of the module's weights that differ between the saved ranks.

    Args:
        module: a module with the same weights.
        ranks: what :func:`tensors_apart` returned for :func:`replica` on each saved rank.
        first: rank 0's weights.
    """
    apart = {name for kept in ranks for name in kept} & {name for name, _ in module.named_parameters()}
    return {
        name: torch.stack([kept.get(name, first[name].cpu()) for kept in ranks]).mean(0)
        for name in apart & first.keys()
    }


def whole_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers in the ``state_dict`` by name, except those that are sharded, empty or on the meta device."""
    saved = {
        f"{place}.{name}" if place else name: buffer
        for place, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in unsaved_buffers(part)
    }
    return {name: one for name, one in saved.items() if type(one) is Tensor and one.numel() and not one.is_meta}


def digest(tensor: Tensor) -> bytes:
    """Return a checksum of the values in a CPU tensor."""
    flat = tensor.contiguous()
    return hashlib.blake2b(ctypes.string_at(flat.data_ptr(), flat.nbytes), digest_size=8).digest()

"""Keep or reject changes that the user's code makes to parameters while FSDP holds the real values elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...torch_private import change_count, gathered_parameter, local_part, placement_of, storage_id

#: Number of steps in which changes through ``.data`` are looked for; later steps skip this, because it takes time.
STEPS = 4


class ChangedParameters:
    """Keeps changes that a step makes to gathered parameters, and raises an error if values would be lost.

    Args:
        sharded: entries of ``fsdp_parameters``.
        names: the name of each entry's parameter.
    """

    def __init__(self, sharded: Sequence[Any], names: Sequence[str]) -> None:
        self.sharded = sharded
        self.names = names
        self.steps_left = STEPS
        self._counts = [0] * len(sharded)  # torch gathers values without counting that as a change
        self._shards = [self._identity(one) for one in sharded]

    def keep(self) -> None:
        """Write values that a step has changed in gathered parameters back to their shards.

        Raises:
            RuntimeError: the change cannot be kept.
        """
        for index, one in enumerate(self.sharded):
            full, is_gathered = gathered_parameter(one)
            if full is None or (count := change_count(full)) == self._counts[index]:
                continue
            self._counts[index] = count or 0
            if not is_gathered or not _is_like_shard(full, one):
                raise RuntimeError(
                    f"{self.names[index]} was changed in place during a step, but FSDP discards the gathered values "
                    "after use, so the change would be lost. Change the parameter in a hook such as on_train_batch_end "
                    "instead."
                )
            with torch.no_grad():
                mine, own = self._mine(one, full)
                mine.copy_(own)

    def find_lost(self) -> None:
        """Raise an error if ``parameter.data = ...`` has set values that torch does not read.

        Raises:
            RuntimeError: torch still uses the earlier values.
        """
        for index, one in enumerate(self.sharded):
            now, before = self._identity(one), self._shards[index]
            self._shards[index] = now
            if now[0] != before[0] and now[1] is before[1]:
                raise RuntimeError(_lost(self.names[index]))

    def find_lost_in_step(self) -> None:
        """In the first :data:`STEPS` steps, raise an error if a step changes gathered parameters through ``.data``."""
        self.steps_left -= 1
        for index, one in enumerate(self.sharded):
            full, is_gathered = gathered_parameter(one)
            if full is None or not is_gathered or not _is_like_shard(full, one):
                continue
            with torch.no_grad():
                mine, own = self._mine(one, full)
                if not bool(((mine == own) | ((mine != mine) & (own != own))).all()):
                    raise RuntimeError(_lost(self.names[index]))

    @staticmethod
    def _identity(one: Any) -> tuple[int, Tensor]:
        return storage_id(one.sharded_param), local_part(one.sharded_param)

    @staticmethod
    def _mine(one: Any, full: Tensor) -> tuple[Tensor, Tensor]:
        """Return this process's shard, and the same part of the gathered parameter."""
        shard: DTensor = one.sharded_param
        mesh, dim = shard.device_mesh, placement_of(one).dim
        mine = local_part(shard)
        rank, size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        parts = full.detach().chunk(size, dim)
        own = parts[rank] if rank < len(parts) else full.detach().narrow(dim, 0, 0)
        return mine, own.to(mine.device)


def _is_like_shard(full: Tensor, one: Any) -> bool:
    """Return True if the gathered parameter is a plain tensor of the same dtype as its shards."""
    plain = type(full) is nn.Parameter and type(local_part(one.sharded_param)) is Tensor
    return plain and full.dtype == one.sharded_param.dtype


def _lost(name: str) -> str:
    return (
        f"{name}.data was changed or set, but FSDP keeps the values elsewhere, so the change would be "
        "lost. Write `with torch.no_grad(): parameter.copy_(values)`, or mul_, clamp_ and so on, without .data."
    )

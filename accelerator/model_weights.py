"""Gathers the full weights of prepared models and writes them to files that other tools can read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..big_model.module_sizes import size_in_bytes
from ..checkpoint import atomic_write, safetensors_export
from ..checkpoint.sharded_folder import together
from ..checkpoint.storage import location
from ..checkpoint.weight_shards import SAFETENSORS, TORCH, write_shards
from .models import unwrapped

if TYPE_CHECKING:
    from ..strategies.base import Strategy
    from .plugins import ProjectConfiguration
    from .prepare import Prepared


@dataclass(eq=False)
class ModelWeights:
    """Gathers the weights of prepared models and writes them to files."""

    strategy: Strategy
    prepared: Prepared
    project: ProjectConfiguration

    def state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of a model; see :meth:`.Accelerator.get_state_dict`."""
        module = unwrapped(model) if unwrap else model
        placement = self.prepared.placements.get(id(module))
        if placement is None:
            return module.state_dict()
        state = placement.strategy.model_state(module)
        elsewhere = any(isinstance(value, Tensor) and value.is_meta for value in state.values())
        return {} if elsewhere and not self.strategy.is_global_zero else state

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights to a folder; :meth:`.Accelerator.save_model` describes the arguments."""
        limit = size_in_bytes(max_shard_size, "max_shard_size")
        strategy = self.strategy
        folder = location(save_directory)
        strategy.barrier(f"save_model({str(folder)!r})")
        module = unwrapped(model)
        state = self.state_dict(module)
        tied = getattr(module, "_tied_weights_keys", None) or ()
        writes = self.project.writes(strategy) and bool(state)

        def write() -> None:
            if writes:
                write_shards(state, folder, limit, SAFETENSORS if safe_serialization else TORCH, list(tied))

        together(strategy, "saved", write)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object on rank 0 (or on local rank 0 of every node, with ``save_on_each_node``).

        :meth:`.Accelerator.save` describes the arguments.
        """
        if self.project.writes(self.strategy):
            save_object(obj, f, safe_serialization)


def save_object(obj: Any, f: Any, safe_serialization: bool) -> None:
    """Write an object; see :meth:`ModelWeights.save`."""
    if not isinstance(f, (str, os.PathLike)):
        torch.save(obj, f)
        return
    found = safetensors_export.bare(obj) if safe_serialization and isinstance(obj, Mapping) else None
    if safe_serialization and (found is None or found.others):
        odd = f"also has non-tensor values ({', '.join(found.others)})" if found else f"is of type {type(obj).__name__}"
        raise TypeError(
            f"save(..., {str(f)!r}, safe_serialization=True): the object {odd}, but the safetensors format can only "
            "store dicts of tensors. Leave out safe_serialization."
        )
    with atomic_write.written_aside(location(f)) as path:
        if found is None:
            safetensors_export.write_torch(obj, path)
        else:
            safetensors_export.write_safetensors(found.tensors, path, found.twins)

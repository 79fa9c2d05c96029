"""Whole weights of prepared models, and files of them that other tools read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import messages
from ..big_model.module_sizes import size_in_bytes
from ..checkpoint import atomic_write, safetensors_export
from ..checkpoint.sharded_folder import together
from ..checkpoint.storage import Location, location
from .models import unwrapped

if TYPE_CHECKING:
    from ..strategies.base import Strategy
    from .plugins import ProjectConfiguration
    from .prepare import Prepared


class Layout(NamedTuple):
    """Names of weight files.

    Attributes:
        stem: the name before the numbers.
        suffix: the file suffix.
        listing: the index that maps tensors to files if there are several.
    """

    stem: str
    suffix: str
    listing: str

    def name(self, number: int, count: int) -> str:
        """The name of file ``number`` (from 1) of ``count``."""
        return f"{self.stem}{self.suffix}" if count == 1 else f"{self.stem}-{number:05d}-of-{count:05d}{self.suffix}"

    def has(self, name: str) -> bool:
        """Whether a file name belongs to this layout."""
        numbers = r"(-\d{5}-of-\d{5})?"
        pattern = f"{re.escape(self.stem)}{numbers}{re.escape(self.suffix)}"
        return name == self.listing or re.fullmatch(pattern, name) is not None


SAFETENSORS = Layout("model", ".safetensors", "model.safetensors.index.json")
TORCH = Layout("pytorch_model", ".bin", "pytorch_model.bin.index.json")


@dataclass(eq=False)
class ModelWeights:
    """Gathers the weights of prepared models, and writes them to files."""

    strategy: Strategy
    prepared: Prepared
    project: ProjectConfiguration

    def state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole ``state_dict`` of a model. Every rank must call this.

        If the weights are sharded, rank 0 gets them on the CPU, and the others get an empty dict.

        Args:
            model: the model, prepared or not, possibly compiled.
            unwrap: omit the prefixes that wrappers such as ``torch.compile`` add to names.
        """
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
        """Write a model's weights, in several files with an index if they are large. Every rank must call this.

        Each file appears complete or not at all, the index last; then files of an earlier call in the same format are
        removed. Tied tensors are written once.

        Args:
            model: the prepared model.
            save_directory: path or address of a folder, which is created if it does not exist.
            max_shard_size: bytes, or text such as ``"5GB"``; a single larger tensor gets a larger file.
            safe_serialization: write ``model*.safetensors``; False: ``pytorch_model*.bin``.

        Raises:
            ValueError: the size is not valid.
            OSError: a file could not be written; raised on every rank.
        """
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
                write_model(state, folder, limit, SAFETENSORS if safe_serialization else TORCH, list(tied))

        together(strategy, "saved", write)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object on rank 0 (with ``save_on_each_node``, on the first rank of every machine).

        A file appears complete or not at all.

        Args:
            obj: anything that ``torch.save`` accepts; with ``safe_serialization`` a dict of tensors.
            f: a path, or an open binary file.
            safe_serialization: use the safetensors format.

        Raises:
            TypeError: the safetensors format cannot hold the object.
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
        odd = f"has other values ({', '.join(found.others)})" if found else f"is of type {type(obj).__name__}"
        raise TypeError(
            f"save(..., {str(f)!r}, safe_serialization=True): the object {odd}, but the safetensors format only holds "
            "dicts of tensors. Leave safe_serialization out."
        )
    with atomic_write.written_aside(location(f)) as path:
        if found is None:
            safetensors_export.write_torch(obj, path)
        else:
            safetensors_export.write_safetensors(found.tensors, path, found.twins)


def write_model(state: Mapping[str, Any], folder: Location, limit: int, layout: Layout, tied: list[str]) -> None:
    """Write a whole ``state_dict``; see :meth:`ModelWeights.save_model`."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"save_model({str(folder)!r}): this is a file. Pass a folder.")
    safe = layout is SAFETENSORS
    found = safetensors_export.bare(state, tied)
    if safe:
        _say_left_out(found.others)
    groups = _groups(found.tensors if safe else state)
    plan = _shards(groups, limit)
    names = [layout.name(number + 1, len(plan)) for number in range(len(plan))]
    with ExitStack() as stack:  # files get their names in reverse order, the index last
        if len(plan) > 1:
            index = stack.enter_context(atomic_write.written_aside(folder / layout.listing))
            _write_index(index, dict(zip(names, plan, strict=True)), state)
        for name, keys in zip(names, plan, strict=True):
            path = stack.enter_context(atomic_write.written_aside(folder / name))
            if safe:
                twins = {twin: key for twin, key in found.twins.items() if key in keys}
                safetensors_export.write_safetensors({key: found.tensors[key] for key in keys}, path, twins)
            else:
                safetensors_export.write_torch({key: state[key] for key in keys}, path)
    current = {*names, *([layout.listing] if len(plan) > 1 else [])}
    for old in list(folder.iterdir()):
        if layout.has(old.name) and old.name not in current:
            old.unlink()


def _say_left_out(others: dict[str, str]) -> None:
    if others:
        listed = ", ".join(f"{name} ({kind})" for name, kind in others.items())
        messages.warn_once(
            f"save_model leaves out values that are not tensors: {listed}. The safetensors format cannot hold it; pass "
            "safe_serialization=False to keep it."
        )


def _groups(state: Mapping[str, Any]) -> list[tuple[list[str], int]]:
    """Groups of names that share memory and so belong in one file, with the bytes of each group."""
    groups: dict[Any, list[str]] = {}
    for name, value in state.items():
        groups.setdefault(safetensors_export.memory_of(value) if isinstance(value, Tensor) else name, []).append(name)
    return [(names, _bytes(state, names)) for names in groups.values()]


def _bytes(state: Mapping[str, Any], names: list[str]) -> int:
    tensors = [value for name in names if isinstance(value := state[name], Tensor)]
    return max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)


def _shards(groups: list[tuple[list[str], int]], limit: int) -> list[list[str]]:
    """The names in each file."""
    shards: list[list[str]] = [[]]
    filled = 0
    for names, size in groups:
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1] += names
        filled += size
    return shards


def _write_index(path: Path, files: dict[str, list[str]], state: Mapping[str, Any]) -> None:
    where = {key: name for name, keys in files.items() for key in keys}
    total = sum(_bytes(state, [key]) for key in where)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    safetensors_export.sync(path)

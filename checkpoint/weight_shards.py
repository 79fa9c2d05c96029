"""Write weights to one file, or to several files and an index, with the same names and formats as transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from .. import messages
from . import atomic_write, safetensors_export
from .storage import Location


class Layout(NamedTuple):
    """Names of weight files.

    Attributes:
        stem: part of the name before the numbers.
        suffix: the file suffix.
        listing: name of the index, which maps tensors to files if there are several files.
    """

    stem: str
    suffix: str
    listing: str

    def name(self, number: int, count: int) -> str:
        """Return the name of file ``number`` (counted from 1) of ``count`` files."""
        return f"{self.stem}{self.suffix}" if count == 1 else f"{self.stem}-{number:05d}-of-{count:05d}{self.suffix}"

    def has(self, name: str) -> bool:
        """Return True if a file name belongs to this layout."""
        numbers = r"(-\d{5}-of-\d{5})?"
        pattern = f"{re.escape(self.stem)}{numbers}{re.escape(self.suffix)}"
        return name == self.listing or re.fullmatch(pattern, name) is not None


SAFETENSORS = Layout("model", ".safetensors", "model.safetensors.index.json")
TORCH = Layout("pytorch_model", ".bin", "pytorch_model.bin.index.json")


def write_shards(state: Mapping[str, Any], folder: Location, limit: int, layout: Layout, tied: list[str]) -> None:
    """Write a full ``state_dict``, then remove files that an earlier call wrote in the same layout.

    Args:
        state: tensors by name. It may also contain other values, which only ``TORCH`` can store.
        folder: the folder, which is created if it does not exist.
        limit: maximum number of bytes per file; a larger tensor gets its own, larger file.
        layout: ``SAFETENSORS`` or ``TORCH``.
        tied: regular expressions. If a tensor has several names, those that match one of these are dropped.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"save_model needs a folder, but {str(folder)!r} is a file.")
    safe = layout is SAFETENSORS
    found = safetensors_export.bare(state, tied)
    if safe:
        _say_left_out(found.others)
    groups = _groups(found.tensors if safe else state)
    plan = _shards(groups, limit)
    names = [layout.name(number + 1, len(plan)) for number in range(len(plan))]
    with ExitStack() as stack:  # files are renamed in reverse order, so the index comes last
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
            f"save_model leaves out values that are not tensors ({listed}), because the safetensors format cannot "
            "store them. Pass safe_serialization=False to keep them."
        )


def _groups(state: Mapping[str, Any]) -> list[tuple[list[str], int]]:
    """Return groups of names whose tensors share memory and so must be in one file, with each group's size in bytes."""
    groups: dict[Any, list[str]] = {}
    for name, value in state.items():
        groups.setdefault(safetensors_export.memory_of(value) if isinstance(value, Tensor) else name, []).append(name)
    return [(names, _bytes(state, names)) for names in groups.values()]


def _bytes(state: Mapping[str, Any], names: list[str]) -> int:
    tensors = [value for name in names if isinstance(value := state[name], Tensor)]
    return max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)


def _shards(groups: list[tuple[list[str], int]], limit: int) -> list[list[str]]:
    """Distribute the groups across files of at most ``limit`` bytes; return the names in each file."""
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

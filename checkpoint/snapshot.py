"""Snapshot of a checkpoint in reusable host memory, so that training can continue while the checkpoint is written."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from ..devices.kinds import kind_of
from ..torch_private import local_part, storage_key, with_local_part

#: The kind of a host buffer: its size in bytes, and whether a GPU can write to it directly.
_Kind = tuple[int, bool]
_LEAVES = (int, str, float, bool, bytes, type(None))


class Buffers:
    """Host memory that every snapshot reuses. It is reallocated only if the sizes of the tensors change."""

    def __init__(self) -> None:
        self._kept: dict[_Kind, list[Tensor]] = {}

    @torch.inference_mode(False)  # buffers from a save during evaluation must stay writable for later saves
    @torch.no_grad()
    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy plain data and tensors to the host. The copy is valid until the next call.

        Tensors that share memory also share it in the copy, and a file stores that memory only once. Copies from a GPU
        run concurrently, and the host waits once for all of them, at the end. ``state`` must be the result of
        ``plain``.
        """
        storages: dict[int, Any] = {}
        for tensor in _tensors(state):
            if _is_simple(tensor):
                storage = local_part(tensor).untyped_storage()
                storages.setdefault(storage_key(storage), storage)
        room = self._room({key: _kind(storage) for key, storage in storages.items()})
        devices = set()
        for key, storage in storages.items():
            room[key].copy_(_bytes(storage), non_blocking=True)
            devices.add(storage.device)
        for device in devices:
            kind_of(device).finish_copies(device)
        return _copied(state, room, {})

    def _room(self, wanted: dict[int, _Kind]) -> dict[int, Tensor]:
        """Return a buffer for each storage. Buffers that are no longer needed are freed before any are allocated."""
        counts = Counter(wanted.values())
        free = {kind: self._kept.get(kind, [])[:count] for kind, count in counts.items()}
        self._kept = {}
        found = {}
        for key, kind in wanted.items():
            size, pinned = kind
            found[key] = free[kind].pop() if free[kind] else torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            self._kept.setdefault(kind, []).append(found[key])
        return found


def size_bytes(state: Any) -> int:
    """Return the number of bytes that the tensors in a state use in this process."""
    storages = (local_part(tensor).untyped_storage() for tensor in _tensors(state) if _is_simple(tensor))
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())


def _tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield value
        for attribute in vars(value).values() if _is_simple(value) else ():
            yield from _tensors(attribute)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)


def _is_simple(tensor: Tensor) -> bool:
    """Return True if a tensor can be copied as bytes. All other tensors, which are rare, are cloned."""
    local = local_part(tensor)
    plain = local.layout == torch.strided and not local.is_meta and not local.is_quantized
    return plain and not local.is_conj() and not local.is_neg()


def _kind(storage: Any) -> _Kind:
    return storage.nbytes(), kind_of(storage.device).overlaps_copies()


def _bytes(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copied(value: Any, room: dict[int, Tensor], known: dict[int, Any]) -> Any:
    """Return the state with its tensors replaced by views of the buffers. No object is copied more than once."""
    if type(value) in _LEAVES:
        return value
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Tensor):
        found: Any = _copied_tensor(value, room, known)
    elif isinstance(value, dict):
        found = copy.copy(value)
        known[id(value)] = found
        for key, inner in value.items():
            found[key] = _copied(inner, room, known)
    elif type(value) in (list, tuple):
        found = type(value)(_copied(inner, room, known) for inner in value)
    else:
        found = copy.deepcopy(value)
    known[id(value)] = found
    return found


def _copied_tensor(value: Tensor, room: dict[int, Tensor], known: dict[int, Any]) -> Tensor:
    if not _is_simple(value):
        return value if value.is_meta else value.detach().clone().cpu()
    local = local_part(value)
    place = room[storage_key(local.untyped_storage())].untyped_storage()
    view = torch.empty(0, dtype=local.dtype)
    view.set_(place, local.storage_offset(), local.size(), local.stride())  # pyright: ignore[reportCallIssue,reportArgumentType]
    if local is not value:
        return with_local_part(value, view)
    if isinstance(value, nn.Parameter):
        view = nn.Parameter(view, value.requires_grad)
    elif value.requires_grad:
        view.requires_grad_()
    for name, attribute in vars(value).items():
        setattr(view, name, _copied(attribute, room, known))
    return view

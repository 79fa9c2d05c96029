"""Records the lifetimes of tensors in a program that runs on simulated tensors, which have no memory."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..torch_private import (
    DataDependentOutputException,
    TorchDispatchMode,
    grouped_mm,
    local_part,
    pytree,
    read_number,
    storage_key,
)

#: Kinds of memory. ``gathered`` means other processes' weights and gradient buckets; ``temporary`` means short-lived
#: tensors in operations and backward passes.
KINDS: tuple[str, ...] = ("weights", "gradients", "optimizer", "activations", "gathered", "temporary")

_PATCHING = threading.RLock()


class MemoryUse(NamedTuple):
    """The memory in use at one moment.

    Attributes:
        bytes: total bytes.
        by_kind: bytes by kind of memory.
        phase: ``"setup"``, ``"inference"``, ``"forward"``, ``"backward"``, ``"optimizer step"``, ...
    """

    bytes: int
    by_kind: dict[str, int]
    phase: str


class Ledger(TorchDispatchMode):
    """Records when storages are created, resized and freed. Use it inside FakeTensorMode.

    Inside this context, tensors have no values, so reading a value (``.item()``, ``if tensor:``) returns a placeholder
    (False, 1 or 1.0, depending on the dtype) and sets ``guessed``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.guessed = False
        self.phases: list[tuple[int, str]] = [(0, "setup")]
        self._events: list[tuple[int, int]] = []  # (storage number, growth in bytes)
        self._born: list[str] = []
        self._kinds: dict[int, str] = {}
        self._living: dict[int, list[int]] = {}  # storage -> [number, bytes]

    # ---- recording -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor resolve this to operations on local tensors and communication first
        kwargs = kwargs or {}
        if func is grouped_mm.default:
            result = _grouped(*args, **kwargs)
        else:
            try:
                result = func(*args, **kwargs)
            except DataDependentOutputException:
                if func is not read_number.default:
                    raise
                self.guessed = True
                dtype = args[0].dtype
                return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                self._see(value)
        return result

    def _see(self, tensor: Tensor) -> int:
        storage = local_part(tensor).untyped_storage()
        key = storage_key(storage)
        if key not in self._living:
            self._living[key] = [len(self._born), 0]
            self._born.append(self.phases[-1][1])
            self._resized(storage)
            weakref.finalize(storage, self._freed, key).atexit = False
        return self._living[key][0]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        entry = self._living.get(storage_key(storage))
        size = storage.nbytes()
        if entry is not None and size != entry[1]:
            self._events.append((entry[0], size - entry[1]))
            entry[1] = size

    def _freed(self, key: int) -> None:
        number, size = self._living.pop(key)
        self._events.append((number, -size))

    def begin(self, phase: str) -> None:
        """Begin a phase."""
        self.phases.append((len(self._events), phase))

    def claim(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of each tensor that does not have one yet."""
        for tensor in tensors:
            self._kinds.setdefault(self._see(tensor), kind)

    def claim_living(self, born: str, kind: str) -> None:
        """Set the kind of each live tensor that was created in a phase and does not have a kind yet."""
        for number, _ in self._living.values():
            if self._born[number] == born:
                self._kinds.setdefault(number, kind)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager that records operations and resized storages."""
        resize = torch.UntypedStorage.resize_

        def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            entry = self._living.get(storage_key(storage))
            if entry is not None:
                self._kinds.setdefault(entry[0], "gathered")  # FSDP frees and refills gathered storages
                self._resized(storage)
            return result

        with _PATCHING:
            torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore[method-assign]
            try:
                with self:
                    yield
            finally:
                torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    # ---- reading ---------------------------------------------------------------------------------------------------

    @property
    def most(self) -> dict[str, int]:
        """The peak use of each kind of memory during training."""
        now, most = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        start = max((index for index, phase in self.phases if phase == "ready"), default=0)
        for index, (number, grown) in enumerate(self._events):
            kind = self._kinds.get(number, "temporary")
            now[kind] += grown
            if index <= start:
                most = dict(now)
            else:
                most[kind] = max(most[kind], now[kind])
        return most

    def peak(self, counts: Callable[[str], bool], constant: dict[str, int] | None = None) -> MemoryUse:
        """Return the moment with the highest memory use.

        Args:
            counts: function that returns True for each phase to include.
            constant: bytes that are in use all the time, by kind; these replace the recorded bytes of the same kinds.
        """
        constant = constant or {}
        now = dict.fromkeys(KINDS, 0) | constant
        total = sum(constant.values())
        best = MemoryUse(0, dict(now), "")
        starts, names = zip(*self.phases, strict=True)
        for index, (number, grown) in enumerate(self._events):
            kind = self._kinds.get(number, "temporary")
            if kind in constant:
                continue
            now[kind] += grown
            total += grown
            if total > best.bytes and counts(names[bisect_right(starts, index) - 1]):
                best = MemoryUse(total, dict(now), names[bisect_right(starts, index) - 1])
        return best


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """Return an empty result for a grouped matrix product; torch's own shape function supports only bfloat16."""
    if a.dim() == 2 and b.dim() == 2:
        groups = 1 if offs is None else offs.shape[0]
        shape = (groups, a.shape[0], b.shape[1])
    else:
        shape = (*a.shape[:-1], b.shape[-1])
    return a.new_empty(shape, dtype=out_dtype or a.dtype)

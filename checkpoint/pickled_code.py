"""Find out which code would run if a pickled file were loaded, without running any of that code."""

from __future__ import annotations

import pickle
import zipfile
from contextlib import suppress
from typing import IO, Any

import torch

from ..torch_private import REBUILD_TENSORS

#: How a name is used.
CALLS, CREATES, REFERS = "calls", "creates", "refers to"
#: Number of pickles in a file from before the zip format: magic number, version, system information and contents.
_PICKLES = 4
#: Functions that create an object of the class in their first argument, which is recorded instead of the function.
_BUILDERS = ("copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__")

#: Modules that old pickle protocols call by their Python 2 names.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_PLAIN = {
    *("collections.OrderedDict", "collections.Counter", "_codecs.encode"),
    *("torch.storage.TypedStorage", "torch.storage.UntypedStorage", "torch.nn.parameter.Parameter"),
    *("builtins.object", "builtins.set", "builtins.frozenset", "builtins.complex", "builtins.bytearray"),
    *_BUILDERS,
}


def uses(file: IO[bytes]) -> dict[str, str]:
    """Return how loading a file would use each function and class that the file references.

    Returns:
        :data:`CALLS`, :data:`CREATES` or :data:`REFERS` by full name; empty if the file contains only plain data.
    """
    found: dict[str, str] = {}
    zipped = _zipped(file)
    streams = [zipped.open(name) for name in zipped.namelist() if name.endswith("/data.pkl")] if zipped else [file]
    with suppress(Exception):  # the file is damaged from here on
        for stream in streams:
            stream.seek(0)
            for _ in range(1 if zipped else _PICKLES):
                _Reader(stream, found).load()
    return {name: use for name, use in sorted(found.items()) if not _is_plain(name)}


def _zipped(file: IO[bytes]) -> zipfile.ZipFile | None:
    file.seek(0)
    return zipfile.ZipFile(file) if zipfile.is_zipfile(file) else None


def _is_plain(name: str) -> bool:
    """Return True if a name serves only to build tensors or plain data (``torch.FloatStorage``, ``torch.float32``)."""
    module, _, last = name.rpartition(".")
    if module == "torch":
        kinds = torch.dtype, torch.layout, torch.memory_format
        value = getattr(torch, last, None)
        return last.endswith(("Storage", "Tensor")) or last in ("Size", "device") or isinstance(value, kinds)
    if name.startswith(REBUILD_TENSORS):
        return True
    allowed = torch.serialization.get_safe_globals()
    return name in _PLAIN or name in (
        one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}" for one in allowed
    )


class _Kind(type):
    """Metaclass of stand-in classes. Each stand-in only records how the file uses the name that it replaces."""

    name: str
    found: dict[str, str]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.name in _BUILDERS:
            first = args[0] if args and isinstance(args[0], _Kind) else cls
            first.found[first.name] = CREATES
        else:
            cls.found[cls.name] = CALLS
        return object.__new__(cls)


class _StandIn(metaclass=_Kind):
    name = ""
    found: dict[str, str] = {}  # noqa: RUF012, replaced in each subclass

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.found.get(cls.name) != CALLS:
            cls.found[cls.name] = CREATES
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...

    def add(self, value: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...


class _Reader(pickle.Unpickler):
    """Unpickles a file with a stand-in for each name, so that no code is imported or run."""

    def __init__(self, stream: IO[bytes], found: dict[str, str]) -> None:
        super().__init__(stream)
        self._found = found

    def find_class(self, module: str, name: str, /) -> Any:
        """Return the stand-in for a name."""
        full = f"{_RENAMED.get(module, module)}.{name}"
        self._found.setdefault(full, REFERS)
        return _Kind(name, (_StandIn,), {"name": full, "found": self._found})

    def persistent_load(self, pid: Any) -> None:
        """Skip a tensor's storage."""

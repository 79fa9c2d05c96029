"""Offloaded weights: stored on disk or in host memory, and fetched to the device that runs them, one part ahead."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import messages
from ..torch_private import change_count
from .module_sizes import as_dtype
from .weight_files import Pages, advise_needed, copy_into, is_aligned, map_file, short_lived, tensors_of_safetensors

_INDEX = "index.json"
_CHUNK = 16 * 2**20


# ---- a folder of weights ---------------------------------------------------------------------------------------------


def offload_weight(
    weight: Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Write a tensor's bytes to a file in a folder. The file appears complete or not at all.

    The folder is created if it does not exist. Returns ``index``, with a new entry for the tensor's dtype and shape.

    Raises:
        OSError: it could not be written.
    """
    index = {} if index is None else index
    folder = Path(offload_folder)
    path = folder / f"{weight_name}.dat"
    dtype = dtype or weight.dtype
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    pages = Pages()
    flat = weight.detach().reshape(-1)
    step = max(1, _CHUNK // max(flat.element_size(), dtype.itemsize))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            for start in range(0, flat.numel(), step):
                part = flat[start : start + step]
                file.write(part.to("cpu", dtype).contiguous().view(torch.uint8).numpy().data)
                pages.give_back(part)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        size = flat.numel() * dtype.itemsize
        raise OSError(
            error.errno, f"{weight_name!r} ({size} bytes) cannot be offloaded: {error.strerror}", str(path)
        ) from error
    index[weight_name] = {"dtype": str(dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


def save_offload_index(index: Mapping[str, Any], offload_folder: str | os.PathLike[str]) -> None:
    """Add entries to a folder's index."""
    if index:
        path = Path(offload_folder) / _INDEX
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps({**known, **index}, indent=2), encoding="utf-8")
        temporary.replace(path)


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Write all tensors of a ``state_dict`` to a folder, with an index."""
    index: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> Tensor:
    """A tensor that :func:`offload_weight` wrote, mapped into memory.

    Raises:
        ValueError: the file's size does not match the index.
    """
    path, shape = Path(weight_file), tuple(weight_info["shape"])
    dtype = as_dtype(weight_info["dtype"]) or torch.float32
    expected = torch.Size(shape).numel() * dtype.itemsize
    if path.stat().st_size != expected:
        raise ValueError(
            f"{str(path)!r} has {path.stat().st_size} bytes, but a tensor of {dtype} and shape {shape} has {expected}. "
            "The folder was changed or belongs to another model: offload the weights again."
        )
    return map_file(path, dtype, shape)


class Stored(NamedTuple):
    """A tensor as it is stored, before it is moved to its device.

    Attributes:
        value: the stored values.
        dtype: the dtype that it should have.
        in_file: whether it is mapped from a file.
    """

    value: Tensor
    dtype: torch.dtype
    in_file: bool


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Tensors by name, from a ``state_dict`` in memory and from files, which are mapped on first use.

    Args:
        state_dict: tensors in memory.
        save_folder: a folder that :func:`offload_state_dict` wrote.
        index: entries of its index, or for a tensor of a safetensors file ``{"safetensors_file": path, "weight_name":
            name}``; None for the folder's index.
        device: accepted and ignored: tensors are on the CPU.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("OffloadedWeightsLoader needs a state_dict, a save_folder or an index. Pass one of them.")
        self.state_dict = dict(state_dict or {})
        self.save_folder = save_folder
        if index is None and save_folder is not None:
            index = json.loads((Path(save_folder) / _INDEX).read_text(encoding="utf-8"))
        self.index = dict(index or {})
        self.device = device
        self._unread: dict[Path, dict[str, Tensor]] = {}

    def __getitem__(self, key: str) -> Tensor:
        found = self.stored(key)
        return found.value.to(found.dtype)

    def stored(self, key: str) -> Stored:
        """A tensor as it is stored, before it is converted to the dtype that the index asks for."""
        if key in self.state_dict:
            value = self.state_dict[key]
            return Stored(value, value.dtype, in_file=False)
        entry = self.index[key]
        if entry.get("safetensors_file") is None:
            value = load_offloaded_weight(Path(self.save_folder or ".") / f"{key}.dat", entry)
        else:
            value = self._map(Path(entry["safetensors_file"]), entry.get("weight_name", key))
        return Stored(value, as_dtype(entry.get("dtype")) or value.dtype, in_file=True)

    def _map(self, file: Path, name: str) -> Tensor:
        """A tensor of a file, which is mapped once for all its tensors.

        If the same tensor is requested twice, the file is mapped again: changing one must not change the other.
        """
        if name not in self._unread.get(file, ()):
            self._unread[file] = dict(tensors_of_safetensors(file))
        if name not in self._unread[file]:
            near = messages.did_you_mean(name, self._unread[file])
            raise ValueError(
                f"The index of offloaded weights looks for {name!r} in {str(file)!r}, which does not have it.{near} "
                "The file was changed or belongs to another model: create the index again."
            )
        return self._unread[file].pop(name)

    def __iter__(self) -> Iterator[str]:
        return iter({**self.state_dict, **self.index})

    def __len__(self) -> int:
        return len({**self.state_dict, **self.index})


class PrefixedDataset(Mapping[str, Tensor]):
    """The tensors of a mapping whose names begin with a prefix, by their names without it."""

    def __init__(self, dataset: Mapping[str, Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self.prefix) for name in self.dataset if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


# ---- while the model runs --------------------------------------------------------------------------------------------


class _Fetched(NamedTuple):
    """The values that a tensor has while it runs (None for its stored ones), and its version when they were read."""

    values: Tensor | None
    version: int | None


class _OffloadedTensor:
    """An offloaded tensor of a part, which is fetched to the device on which it runs.

    A tensor that is mapped from a file, and that the CPU can compute with, is used in place: fetching it reads its
    pages, leaving it frees them. Any other tensor is copied. The tensor's ``data`` is stored on
    disk or in host memory.
    """

    __slots__ = ("_fetched", "_pages", "copied", "device", "home", "mapped", "tensor")

    def __init__(self, tensor: Tensor, device: torch.device, pages: Pages) -> None:
        self.tensor = tensor
        self.device = device
        self._store_current(pages)

    def _store_current(self, pages: Pages) -> None:
        """Make the tensor's current values its stored ones."""
        self.home = self.tensor.data
        self.mapped = pages.holds(self.home)
        self.copied = self.home.device != self.device or (self.mapped and not is_aligned(self.home))
        self._pages = pages
        self._fetched = _Fetched(None, 0)

    def fetch(self) -> _Fetched:
        """Read the tensor, and copy it if it cannot run where it is stored. May be called in another thread."""
        version = change_count(self.tensor)
        if not self.copied:
            if self.mapped:
                advise_needed(self.home)
            return _Fetched(None, version)
        if not self.mapped:
            return _Fetched(self.home.to(self.device, copy=True, non_blocking=True), version)
        made = short_lived(self.home.shape, self.home.dtype, self.device)
        copy_into(made, self.home, self._pages)
        return _Fetched(made, version)

    def enter(self, fetched: _Fetched) -> None:
        """Set the tensor to the fetched values, or to its current values if it was changed since they were fetched."""
        if not _same_memory(self.tensor.data, self.home):
            self._store_current(Pages())
            fetched = self.fetch()
        elif fetched.version != change_count(self.tensor):
            fetched = self.fetch()
        self._fetched = fetched
        if fetched.values is not None:
            self.tensor.data = fetched.values

    def leave(self) -> None:
        """Set the tensor to its stored values again, after saving changes that were made while it ran."""
        (values, version), self._fetched = self._fetched, _Fetched(None, 0)
        if values is not None:
            if not _same_memory(self.tensor.data, values):  # its data was replaced
                self._store_current(Pages())
                return
            if self._was_changed(values, version):
                with torch.inference_mode():
                    self.home.copy_(values)
            self.tensor.data = self.home
        self.give_back()

    def _was_changed(self, values: Tensor, version: int | None) -> bool:
        if isinstance(self.tensor, nn.Parameter) and version is not None:
            return change_count(self.tensor) != version
        return values.device.type != "cpu" or not torch.equal(values, self.home)  # batch statistics: same version

    def give_back(self) -> None:
        """Free pages that can be read from the file again."""
        if self.mapped:
            self._pages.give_back(self.home, around=True)

    def release(self) -> None:
        """Set the tensor to values that can be used from now on without :meth:`enter`."""
        if self.mapped and self.copied and _same_memory(self.tensor.data, self.home):
            self.tensor.data = self.home.clone(memory_format=torch.contiguous_format)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and (one.shape, one.dtype) == (other.shape, other.dtype)


class Part:
    """Tensors that are fetched and freed together: a block, or a layer outside of blocks.

    ``fetcher`` is shared by all parts of a model.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, fetcher: Fetcher) -> None:
        self.device = device
        self.following: Part | None = None
        self._tensors = [_OffloadedTensor(tensor, device, fetcher.pages) for tensor in tensors]
        self._fetcher = fetcher
        self._depth = 0

    def enter(self) -> None:
        """Fetch the tensors, and start to fetch the part that followed this one the last time."""
        if not self._depth:
            try:
                for tensor, fetched in zip(self._tensors, self._fetcher.take(self), strict=True):
                    tensor.enter(fetched)
            except BaseException:
                for tensor in self._tensors:
                    tensor.leave()
                raise
            self._fetcher.begin(self.following)
        self._depth += 1

    def leave(self) -> None:
        """Free the memory. Values that were changed while it ran are saved."""
        self._depth -= 1
        if not self._depth:
            for tensor in self._tensors:
                tensor.leave()

    def fetch(self) -> list[_Fetched]:
        """Fetch the values for :meth:`enter`. Called in the fetcher's thread."""
        return [tensor.fetch() for tensor in self._tensors]

    def give_back(self) -> None:
        """Free fetched values that were not used."""
        for tensor in self._tensors:
            tensor.give_back()

    def release(self) -> None:
        """Leave the tensors with values that can be used without this object."""
        for tensor in self._tensors:
            tensor.release()


class _Advance(NamedTuple):
    part: Part
    tensors: Future[list[_Fetched]]


class Fetcher:
    """Fetches the parts of a model in a separate thread while it runs, one part ahead."""

    def __init__(self) -> None:
        self.pages = Pages()
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._advance: _Advance | None = None
        self._last: Part | None = None
        self._running = self._runner = 0

    def __reduce__(self) -> Any:
        raise TypeError(
            "A model with offloaded weights cannot be copied or pickled: its weights are mapped from files. Save it "
            "(model.state_dict() reads them), or call remove_hook_from_submodules(model) first."
        )

    def start(self) -> None:
        """Record that the model begins to run.

        Raises:
            RuntimeError: it is already running in another thread.
        """
        if self._running and self._runner != threading.get_ident():
            raise RuntimeError(
                "A model with offloaded weights was called in a thread while it runs in another, but its weights are "
                "fetched and freed as it runs. Call it in one thread at a time."
            )
        self._runner = threading.get_ident()
        self._running += 1

    def stop(self) -> None:
        """Record that the model has run, and fetch nothing more ahead: weights may change before the next run."""
        self._running -= 1
        if not self._running:
            self._last = None
            self._drop()
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    def begin(self, part: Part | None) -> None:
        """Start to fetch a part if the model is running."""
        if part is not None and self._advance is None and self._running:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="paceline-fetch")
            self._advance = _Advance(part, self._thread.submit(self._fetch, part))

    def take(self, part: Part) -> list[_Fetched]:
        """Return the fetched tensors of a part, and remember that it followed the part that was taken before."""
        if self._last is not None:
            self._last.following = part if part is not self._last else None
        self._last = part
        if self._advance is not None and (self._advance.part is not part or self._advance.tensors.exception()):
            self._drop()
        advance, self._advance = self._advance, None
        found = self._fetch(part) if advance is None else advance.tensors.result()
        stream = self._streams.get(part.device)
        if stream is not None:
            current = torch.cuda.current_stream(part.device)
            current.wait_stream(stream)
            for tensor, _ in found:
                if tensor is not None:
                    tensor.record_stream(current)
        return found

    def _drop(self) -> None:
        """Discard the part that was fetched ahead. If that failed, it is tried again when the part is needed."""
        advance, self._advance = self._advance, None
        if advance is not None and advance.tensors.exception() is None:
            advance.part.give_back()

    def _fetch(self, part: Part) -> list[_Fetched]:
        with torch.inference_mode(False), torch.no_grad():
            if part.device.type != "cuda":
                return part.fetch()
            stream = self._streams.setdefault(part.device, torch.cuda.Stream(part.device))
            with torch.cuda.stream(stream):
                return part.fetch()

"""Find the files that contain a model's weights, and map their tensors into memory."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import messages

#: Names of files that contain all of a model's weights; the first one that exists in the folder is used.
_NAMES = ("model.safetensors", "pytorch_model.bin")
_ENDINGS = (".safetensors", ".bin", ".pt", ".pth")
#: Constants from Linux's <sys/mman.h>; the last one needs Linux 5.14.
_MADV_DONTNEED, _MADV_POPULATE_READ = 4, 22
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Maximum number of bytes that are loaded when one page is read: the largest block that operating systems use for a
#: file's pages.
_AROUND = 2 * 2**20
#: Number of bytes to copy before freeing the pages that they came from.
_CHUNK = 16 * 2**20
#: Address alignment for bit-identical matrix products. CPU kernels sum in a different order if a matrix does not begin
#: at such a boundary (observed with oneMKL for float32 and float64). Torch aligns its own memory in the same way.
ALIGNMENT = 64


def weight_files(path: Path) -> list[Path]:
    """Return the files that contain a model's weights.

    Raises:
        FileNotFoundError: there are no weights, or an index lists a file that does not exist.
        ValueError: the index cannot be read.
    """
    if path.is_dir():
        path = path / _in_folder(path)
    if not path.exists():
        near = messages.did_you_mean(path.name, os.listdir(path.parent) if path.parent.is_dir() else [])
        raise FileNotFoundError(
            f"There are no weights at {str(path)!r} (in {os.getcwd()}).{near} Pass a local file or folder; weights are "
            "never downloaded."
        )
    if path.suffix != ".json":
        return [path]
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        is_map = index and "weight_map" not in index
        names = sorted({Path(name) for name in (index if is_map else index["weight_map"]).values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(path)!r} is not a valid weight index ({type(error).__name__}: {error}). An index is a JSON file "
            "that contains a 'weight_map' from names to files, or that consists of such a map. Download or write the "
            "index again, or pass a single weight file."
        ) from error
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"The index {str(path)!r} lists {len(names)} files, of which {len(missing)} could not be found: "
            f"{', '.join(map(str, missing[:5]))}. Copy the missing files to the index's folder."
        )
    return [path.parent / name for name in names]


def _in_folder(path: Path) -> str:
    entries = sorted(entry.name for entry in path.iterdir())
    index = [name for name in entries if name.endswith(".index.json")]
    whole = [name for name in _NAMES if name in entries]
    others = [name for name in entries if name.endswith(_ENDINGS)]
    chosen = (whole or index or (others if len(others) == 1 else []))[:1]
    if not chosen:
        contents = f"which contains {', '.join(entries[:10])}" if entries else "which is empty"
        raise FileNotFoundError(
            f"Cannot tell which weights to load from {str(path)!r}, {contents}. Pass a weight file, or a folder with "
            f"{' or '.join(map(repr, _NAMES))} or an index (.index.json)."
        )
    return chosen[0]


def mapped_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors in a file, mapped into memory so that each page is read on first access.

    Changes to a tensor stay in memory and are never written to the file.

    Raises:
        ValueError: the file is damaged.
    """
    if file.suffix == ".safetensors":
        yield from tensors_of_safetensors(file)
        return
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise _damaged(file, error) from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict):
        kind = type(state).__name__
        raise ValueError(
            f"{str(file)!r} contains a {kind}, not a dict that maps names to tensors. Save the model's state_dict()."
        )
    for name, value in state.items():
        if isinstance(value, Tensor):
            yield name, value


def tensors_of_safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a safetensors file, regardless of its file name; see :func:`mapped_tensors`."""
    with _opened(file) as opened:
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            yield name, opened.get_tensor(name)


def kinds_and_shapes(file: Path) -> dict[str, tuple[str, list[int]]]:
    """Return each tensor's dtype (in the format's own naming) and shape from a safetensors file's header."""
    with _opened(file) as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()}


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except SafetensorError as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> ValueError:
    why = str(error).splitlines()[0] if str(error) else repr(error)
    return ValueError(
        f"The weights in {str(file)!r} cannot be read: {why}. The file is damaged or has another format. Download or "
        "write the file again."
    )


def is_aligned(tensor: Tensor) -> bool:
    """Return True if the CPU gets bit-identical results from a tensor and from a copy that torch allocates."""
    computed = tensor.is_floating_point() or tensor.is_complex()
    return tensor.is_contiguous() and (not computed or tensor.data_ptr() % ALIGNMENT == 0)


def map_file(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Map a file that contains only one tensor's bytes into memory."""
    size = torch.Size(shape).numel()
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(str(path), shared=False, size=size, dtype=dtype).view(shape)


def short_lived(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor whose memory is returned to the system as soon as the tensor is freed.

    The default allocator may keep freed memory in each thread, which can add up to the size of several tensors.
    """
    size = shape.numel() * dtype.itemsize
    if device.type != "cpu" or size < _PAGE:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).view(dtype).view(shape)


# ---- pages -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def copy_into(target: Tensor, source: Tensor, pages: Pages | None = None) -> None:
    """Copy a tensor from a mapped file to a target on any device and in any dtype; free the pages that were read.

    ``pages`` describes the mapped files. Pass the same object when you copy many tensors; if it is None, the files are
    looked up.
    """
    if not (source.is_contiguous() and target.is_contiguous()) or source.numel() == 0:
        target.copy_(source)
        return
    pages = pages or Pages()
    flat, into = source.view(-1), target.view(-1)
    step = max(1, _CHUNK // source.element_size())
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step]
        into[start : start + step].copy_(part)
        pages.give_back(part)


class Pages:
    """Finds the memory that is currently mapped from files, and frees pages of that memory.

    Only mapped memory may be freed, because the system would fill any other memory with zeros. On systems other than
    Linux, mapped memory cannot be found, so pages stay until memory runs short.
    """

    def __init__(self) -> None:
        self._ranges = _mapped_ranges()

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a tensor is entirely in a mapped file."""
        return self._range_of(tensor) is not None

    def _range_of(self, tensor: Tensor) -> tuple[int, int] | None:
        if tensor.device.type != "cpu" or not tensor.numel():
            return None
        start, end = _span(tensor)
        return next(((low, high) for low, high in self._ranges if low <= start and end <= high), None)

    def give_back(self, tensor: Tensor, around: bool = False) -> None:
        """Free the pages that contain only this tensor, if it is in a mapped file; the next access reads them again.

        Args:
            tensor: any tensor.
            around: whether to also free the pages before and after the tensor, which the system may have read with it.
                Tensors on those pages must not be written to at the same time.
        """
        mapped = self._range_of(tensor)
        if mapped is None:
            return
        start, end = _span(tensor)
        inner = -(-start // _PAGE) * _PAGE, max(end // _PAGE, -(-start // _PAGE)) * _PAGE
        _drop(*inner)
        if around:
            _drop(max(mapped[0], inner[0] - _AROUND), inner[0])
            _drop(inner[1], min(mapped[1], inner[1] + _AROUND))


def _drop(start: int, end: int) -> None:
    """Free full pages that are known to be mapped from a file; free none of them if any page was written to."""
    if end > start and _is_as_in_file(start, end):
        _madvise()(start, end - start, _MADV_DONTNEED)


def advise_needed(tensor: Tensor) -> None:
    """Load the pages of a tensor that is known to be mapped from a file. The call blocks, but releases the GIL."""
    start, end = _span(tensor)
    start, end = start // _PAGE * _PAGE, -(-end // _PAGE) * _PAGE
    _madvise()(start, end - start, _MADV_POPULATE_READ)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a non-empty tensor's first byte and of the byte after its last byte."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _is_as_in_file(start: int, end: int) -> bool:
    """Return True if no page between two addresses has been written to since its file was mapped.

    Writing to a page makes a private copy of it. This function queries the operating system, because torch does not
    notice every change: writing through ``.data`` or NumPy, or updating batch statistics, does not change a tensor's
    version. The result is False if the query fails.
    """
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(start // _PAGE * 8)
            found = bytearray(file.read((end - start) // _PAGE * 8))
    except OSError:
        return False
    if len(found) != (end - start) // _PAGE * 8:
        return False
    flags = torch.frombuffer(found, dtype=torch.int64)
    present, swapped, of_file = flags < 0, (flags >> 62 & 1).bool(), (flags >> 61 & 1).bool()
    return not bool((swapped | (present & ~of_file)).any())


@cache
def _madvise() -> Callable[[int, int, int], int]:
    found = ctypes.CDLL(None, use_errno=True).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found


def _mapped_ranges() -> list[tuple[int, int]]:
    """Return the address ranges of mapped files; the ranges of a file that is listed in several pieces are merged."""
    if not sys.platform.startswith("linux"):
        return []
    found: list[tuple[int, int]] = []
    before: tuple[int, str, str] | None = None
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, offset, device, inode, *name = line.split(maxsplit=5)
        if inode != "0" and rights.startswith("r") and not (name and name[0].startswith(("/dev/", "/memfd:"))):
            low, high = (int(number, 16) for number in addresses.split("-"))
            if found and found[-1][1] == low and before == (int(offset, 16), device, inode):
                found[-1] = (found[-1][0], high)
            else:
                found.append((low, high))
            before = (int(offset, 16) + high - low, device, inode)
    return found

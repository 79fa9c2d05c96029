"""The files that hold a model's weights: which they are, and their tensors mapped into memory."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .. import messages

#: What the weights of a whole model are called in a folder, the first that is there counts.
_NAMES = ("model.safetensors", "pytorch_model.bin")
_ENDINGS = (".safetensors", ".bin", ".pt", ".pth")
#: From <sys/mman.h> of Linux; the last needs Linux 5.14.
_MADV_DONTNEED, _MADV_POPULATE_READ = 4, 22
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Bytes that one page may bring along: the largest that systems keep a file's pages in.
_AROUND = 2 * 2**20
#: Bytes that are copied before the pages they came from are given back.
_CHUNK = 16 * 2**20
#: Of addresses, for matrix products that give the same bits: the kernels of a CPU sum up in another order where a
#: matrix does not begin at such a boundary (seen with oneMKL for float32 and float64; torch's own memory does).
ALIGNMENT = 64


def weight_files(path: Path) -> list[Path]:
    """The files that hold a model's weights.

    Raises:
        FileNotFoundError: there are none, or an index names one that is not there.
        ValueError: the index cannot be read.
    """
    if path.is_dir():
        path = path / _in_folder(path)
    if not path.exists():
        near = messages.did_you_mean(path.name, os.listdir(path.parent) if path.parent.is_dir() else [])
        raise FileNotFoundError(
            f"There are no weights at {str(path)!r} (in {os.getcwd()}).{near} Name a local file or folder; nothing is "
            "downloaded."
        )
    if path.suffix != ".json":
        return [path]
    try:
        names = sorted({Path(name) for name in json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(path)!r} is no index of weights ({type(error).__name__}: {error}). It holds JSON with 'weight_map', "
            "a file for each name; download or write it again, or name one file of weights."
        ) from error
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"The index {str(path)!r} names {len(names)} files, of which {len(missing)} are not there: "
            f"{', '.join(map(str, missing[:5]))}. Bring them to its folder."
        )
    return [path.parent / name for name in names]


def _in_folder(path: Path) -> str:
    entries = sorted(entry.name for entry in path.iterdir())
    index = [name for name in entries if name.endswith(".index.json")]
    whole = [name for name in _NAMES if name in entries]
    others = [name for name in entries if name.endswith(_ENDINGS)]
    chosen = (whole or index or (others if len(others) == 1 else []))[:1]
    if not chosen:
        listed = ", ".join(entries[:10]) or "nothing: it is empty"
        raise FileNotFoundError(
            f"There are no weights of one model in {str(path)!r}, only {listed}. Name the file, or a folder with "
            f"{' or '.join(map(repr, _NAMES))} or an index (.index.json) of several."
        )
    return chosen[0]


def mapped_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file by name, mapped into memory: a page is read when it is first looked at.

    What a tensor is changed to stays in memory and never reaches the file.

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
        raise ValueError(f"{str(file)!r} holds a {kind}, no dict of tensors by name. Save the model's state_dict().")
    for name, value in state.items():
        if isinstance(value, Tensor):
            yield name, value


def tensors_of_safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a safetensors file, whatever it is called; see :func:`mapped_tensors`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> ValueError:
    why = str(error).splitlines()[0] if str(error) else repr(error)
    return ValueError(
        f"The weights in {str(file)!r} cannot be read: {why}. The file is damaged or of another kind; download or "
        "write it again."
    )


def is_aligned(tensor: Tensor) -> bool:
    """Whether the CPU computes the same bits with a tensor as with a copy of it in memory of torch's own."""
    computed = tensor.is_floating_point() or tensor.is_complex()
    return tensor.is_contiguous() and (not computed or tensor.data_ptr() % ALIGNMENT == 0)


def map_file(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A file that holds the bytes of one tensor and nothing else, mapped into memory."""
    size = torch.Size(shape).numel()
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(str(path), shared=False, size=size, dtype=dtype).view(shape)


def short_lived(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor whose memory goes back to the system at once when it goes.

    That of an allocator may stay with the process, in each of its threads, and add up to several of them.
    """
    size = shape.numel() * dtype.itemsize
    if device.type != "cpu" or size < _PAGE:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).view(dtype).view(shape)


# ---- pages -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def copy_into(target: Tensor, source: Tensor, pages: Pages | None = None) -> None:
    """Copy a tensor of a file to its place and type; what was read does not stay in memory.

    Args:
        target: any device and dtype, of the same shape.
        source: as it came from the file.
        pages: the mapped files, looked up where many tensors are copied; None: looked up now.
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
    """Which memory is mapped from files at this moment, and what the system is told about it.

    Only such memory may be given back: the system would fill any other with zeros. On systems other than Linux nothing
    is mapped as far as this knows, and pages stay until memory runs short.
    """

    def __init__(self) -> None:
        self._ranges = _mapped_ranges()

    def holds(self, tensor: Tensor) -> bool:
        """Whether all of a tensor lies in a mapped file."""
        return self._range_of(tensor) is not None

    def _range_of(self, tensor: Tensor) -> tuple[int, int] | None:
        if tensor.device.type != "cpu" or not tensor.numel():
            return None
        start, end = _span(tensor)
        return next(((low, high) for low, high in self._ranges if low <= start and end <= high), None)

    def give_back(self, tensor: Tensor, around: bool = False) -> None:
        """Drop the pages that hold nothing but this tensor, if a file has them; they are read again when looked at.

        Args:
            tensor: any.
            around: also those before and after it that may have come with it, as systems map many pages at a time.
                Nobody may be writing to tensors there at this moment.
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
    """Drop whole pages that are known to be mapped from a file; none if one of them was written to."""
    if end > start and _is_as_in_file(start, end):
        _madvise()(start, end - start, _MADV_DONTNEED)


def advise_needed(tensor: Tensor) -> None:
    """Bring the pages of a tensor that is known to be mapped from a file into memory. Blocks, without the GIL."""
    start, end = _span(tensor)
    start, end = start // _PAGE * _PAGE, -(-end // _PAGE) * _PAGE
    _madvise()(start, end - start, _MADV_POPULATE_READ)


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses from the first to behind the last byte of a tensor that is not empty."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _is_as_in_file(start: int, end: int) -> bool:
    """Whether no page was written to since it was mapped: such a page is the process's own and in no file.

    The system is asked, as torch does not see each change: what goes through ``.data``, numpy or batch statistics
    leaves a tensor's version as it was. Where the system does not tell, the answer is no.
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
    """Where files are mapped; one that the system lists in pieces is one range."""
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

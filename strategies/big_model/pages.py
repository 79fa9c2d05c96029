"""Pages of files that are mapped into memory, given back once what they held was copied."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

#: Not worth the asking below.
_LEAST = 1 << 20


def give_back(tensor: Tensor) -> None:
    """Let go of the pages that lie wholly in a tensor, if a file is mapped there; who reads it again gets them back."""
    size, start = tensor.nbytes, tensor.data_ptr()
    if size < _LEAST or not sys.platform.startswith("linux") or not _is_mapped(start, start + size):
        return
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _is_mapped(start: int, end: int) -> bool:
    """Whether a file lies at these addresses: memory of another kind would lose what it holds."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
        low, high = (int(address, 16) for address in addresses.split("-"))
        if low <= start < high:
            return end <= high and inode != "0"
    return False


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)

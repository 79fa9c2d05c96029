"""Make a process keep the memory that a CPU training step frees, so that the next step can reuse it.

glibc returns the free memory at the end of its heap to the kernel once that memory exceeds a threshold, and a backward
pass frees far more than that. The next step then requests the same pages again, and the kernel has to clear each of
them first.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

#: Parameter numbers from glibc's malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
#: Minimum size in bytes of blocks that glibc gets from the kernel instead of the heap. glibc accepts no larger value.
OWN_PAGES = 32 * 2**20
#: Free bytes to keep at the end of the heap: the largest value that glibc accepts, and the largest that it chooses by
#: itself.
KEPT, KEPT_BY_ITSELF = 2**31 - 1, 2 * OWN_PAGES
#: Environment variables that let users set these thresholds.
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_TUNABLE = re.compile(r"glibc\.malloc\.(trim_threshold|mmap_threshold|mmap_max|top_pad)")
_runs = 0


def keep_freed_memory(device: torch.device) -> None:
    """Make this process keep the memory that it frees, if it trains on a CPU.

    Does nothing if the C library is not glibc, or if the user has set the thresholds.
    """
    global _runs
    if device.type != "cpu":
        return
    _runs += 1
    libc = _adjustable_glibc()
    if libc is not None:
        libc.mallopt(MMAP_THRESHOLD, OWN_PAGES)
        libc.mallopt(TRIM_THRESHOLD, KEPT)


@contextmanager
def freed_memory_kept(device: torch.device) -> Iterator[None]:
    """Context manager in which a CPU run keeps freed memory; on exit, this memory is returned to the kernel."""
    global _runs
    keep_freed_memory(device)
    try:
        yield
    finally:
        if device.type == "cpu":
            _runs -= 1
            libc = _adjustable_glibc()
            if libc is not None and not _runs:
                libc.mallopt(TRIM_THRESHOLD, KEPT_BY_ITSELF)
            give_back_memory()


def give_back_memory() -> None:
    """Return free memory to the kernel, unless the user has set the thresholds."""
    libc = _adjustable_glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _adjustable_glibc() -> Any:
    """Return this process's C library if it is glibc and the user has not set its thresholds; None otherwise."""
    own = any(name in os.environ for name in SETTINGS) or _TUNABLE.search(os.environ.get("GLIBC_TUNABLES", ""))
    return None if own else glibc()


@cache
def glibc() -> Any:
    """Return this process's C library; None if it is not glibc."""
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return libc if all(hasattr(libc, name) for name in ("mallopt", "malloc_trim")) else None

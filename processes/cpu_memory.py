"""Memory that a step on the CPU frees stays with the process, for the next step.

glibc gives free memory at the end of its heap back to the kernel as soon as there is more of it than a threshold, which
is small beside what a backward pass frees. The next step then asks for the same pages again, and the kernel clears each
before it hands it out.
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

#: Names in glibc's malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
#: Bytes from which on a block is no part of the heap, but comes from the kernel and goes there: the most glibc takes.
OWN_PAGES = 32 * 2**20
#: Bytes of free memory that the end of the heap may keep: the most glibc takes, and the most it comes to by itself.
KEPT, KEPT_BY_ITSELF = 2**31 - 1, 2 * OWN_PAGES
#: Where users set the same themselves.
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_TUNABLE = re.compile(r"glibc\.malloc\.(trim_threshold|mmap_threshold|mmap_max|top_pad)")
_runs = 0


def keep_freed_memory(device: torch.device) -> None:
    """Let the process keep what it frees while it trains on a CPU, until as many :func:`keep_no_longer` have followed.

    Does nothing with another C library, or where the user has set its thresholds.
    """
    global _runs
    if device.type != "cpu":
        return
    _runs += 1
    libc = _open_to_us()
    if libc is not None:
        libc.mallopt(MMAP_THRESHOLD, OWN_PAGES)
        libc.mallopt(TRIM_THRESHOLD, KEPT)


def keep_no_longer(device: torch.device) -> None:
    """Give back what is free now, and if nothing else runs, what will be free from now on."""
    global _runs
    if device.type != "cpu":
        return
    _runs -= 1
    libc = _open_to_us()
    if libc is not None and not _runs:
        libc.mallopt(TRIM_THRESHOLD, KEPT_BY_ITSELF)
    give_back_memory()


@contextmanager
def freed_memory_kept(device: torch.device) -> Iterator[None]:
    """Context of a run, in which the process keeps what it frees if the run is one on the CPU."""
    keep_freed_memory(device)
    try:
        yield
    finally:
        keep_no_longer(device)


def give_back_memory() -> None:
    """Give back what is free now, unless the user has said how much is to be kept."""
    libc = _open_to_us()
    if libc is not None:
        libc.malloc_trim(0)


def _open_to_us() -> Any:
    """The C library of this process, if it is glibc and the user has left its thresholds alone."""
    own = any(name in os.environ for name in SETTINGS) or _TUNABLE.search(os.environ.get("GLIBC_TUNABLES", ""))
    return None if own else glibc()


@cache
def glibc() -> Any:
    """The C library of this process; None: another one."""
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return libc if all(hasattr(libc, name) for name in ("mallopt", "malloc_trim")) else None

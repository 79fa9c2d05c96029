"""A finished file or folder takes the name of an older one, and at no moment is there neither."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def temporary_name(name: str) -> str:
    """A hidden name beside ``name`` that nobody else has."""
    longest_name = 255
    ending = f".{uuid4().hex[:12]}.tmp"
    return f".{name}{ending}" if len(os.fsencode(name)) + len(ending) < longest_name else f".checkpoint{ending}"


def take_place(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target`` and delete what had that name.

    A file replaces a file in one step, as rename does. Where one of them is a folder the two change names, in one step
    on Linux; elsewhere the old one is moved aside first, and a crash just then leaves it under its hidden name.
    """
    if not target.is_dir() and not temporary.is_dir():
        temporary.replace(target)
        return
    if not os.path.lexists(target):
        temporary.rename(target)
        return
    if not _exchange(temporary, target):
        aside = target.with_name(temporary_name(target.name))
        target.rename(aside)
        temporary.rename(target)
        temporary = aside
    remove(temporary)


def _exchange(one: Path, other: Path) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    with suppress(AttributeError):
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        return rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0
    return False


def remove(path: Path) -> None:
    """Delete a file or folder as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)

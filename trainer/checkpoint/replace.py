"""A finished file or folder takes the name of an older one, and at no moment is there neither."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from ...callbacks import locations, manifest
from ...callbacks.locations import Location, Remote

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def written_aside(target: Location) -> Iterator[Path]:
    """A path of this machine to write a file at, synced; when the block ends it takes the place of ``target``.

    If the block raises, nothing of it is left and ``target`` is as it was.
    """
    temporary = beside(target, temporary_name(target.name))
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        take_place(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def beside(target: Location, name: str) -> Path:
    """Where to write first: in the same folder; for an upload in the machine's folder for temporary files (TMPDIR)."""
    return Path(tempfile.gettempdir(), name) if isinstance(target, Remote) else target.with_name(name)


def temporary_name(name: str) -> str:
    """A hidden name beside ``name`` that nobody else has."""
    longest_name = 255
    ending = f".{uuid4().hex[:12]}.tmp"
    return f".{name}{ending}" if len(os.fsencode(name)) + len(ending) < longest_name else f".checkpoint{ending}"


def take_place(temporary: Path, target: Location) -> None:
    """Give what is at ``temporary`` the name ``target``, delete what had that name, and sync the folder.

    A file is uploaded if ``target`` is an address.
    """
    if isinstance(target, Path):
        _rename(temporary, target)
        sync_folder(target.parent)
        return
    target.upload(temporary)
    temporary.unlink()
    if manifest.is_folder(target):  # behind an address both can be there
        locations.remove_all(target.files_below())


def _rename(temporary: Path, target: Path) -> None:
    """Rename.

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


def sync_folder(folder: Path) -> None:
    """Make the new name last through a power cut, where the file system can."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)

"""A finished file or folder takes the name of an older one, and at no moment is there neither."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from . import manifest, storage
from .storage import Location, Remote

_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2
#: What :func:`temporary_name` makes, and ``storage.remove``.
_TEMPORARY = re.compile(r"\.(.+\.[0-9a-f]{12}|[0-9a-f]{32})\.tmp")


@contextmanager
def written_aside(target: Location, new: bool = False) -> Iterator[Path]:
    """A path of this machine to write a file at, synced; when the block ends it takes the place of ``target``.

    If the block raises, nothing of it is left and ``target`` is as it was. ``new`` as for :func:`take_place`.
    """
    temporary = beside(target, temporary_name(target.name))
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        take_place(temporary, target, new)
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


def remove_temporaries(folder: Location) -> None:
    """Delete what saves that were killed left in a folder of this machine. No run may be saving there."""
    for path in folder.iterdir() if isinstance(folder, Path) else ():
        if _TEMPORARY.fullmatch(path.name):
            remove(path)


def take_place(temporary: Path, target: Location, new: bool = False) -> None:
    """Give what is at ``temporary`` the name ``target``, delete what had that name, and sync the folder.

    A file is uploaded if ``target`` is an address.

    Args:
        temporary: a file or folder of this machine.
        target: where it belongs.
        new: nothing is to be replaced.

    Raises:
        FileExistsError: it is ``new``, but something came there meanwhile. That is left as it is.
    """
    if isinstance(target, Path):
        (_rename_new if new else _rename)(temporary, target)
        sync_folder(target.parent)
        return
    if new and target.exists():
        raise _came_meanwhile(target)
    target.upload(temporary)
    temporary.unlink()
    if manifest.is_folder(target):  # behind an address both can be there
        storage.remove_all(target.files_below())


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


def _rename_new(temporary: Path, target: Path) -> None:
    """Rename to a name that is free, in one step; where neither Linux nor hard links do that, look first."""
    try:
        problem = _renameat2(temporary, target, _RENAME_NOREPLACE)
        if problem == errno.EEXIST:
            raise FileExistsError
        if problem and not temporary.is_dir():
            _link(temporary, target)
        elif problem:  # a folder replaces none that has anything in it
            _rename_if_free(temporary, target)
    except FileExistsError:
        raise _came_meanwhile(target) from None


def _link(temporary: Path, target: Path) -> None:
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:  # there are no links here
        _rename_if_free(temporary, target)
    else:
        temporary.unlink()


def _rename_if_free(temporary: Path, target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError
    temporary.rename(target)


def _came_meanwhile(target: Location) -> FileExistsError:
    return FileExistsError(
        errno.EEXIST,
        "The checkpoint was not saved: while it was being written, another run saved one of the same name, which is "
        "left as it is. Give each run its own folder (dirpath, default_root_dir). Checkpoint",
        str(target),
    )


def _exchange(one: Path, other: Path) -> bool:
    return _renameat2(one, other, _RENAME_EXCHANGE) == 0


def _renameat2(one: Path, other: Path, flag: int) -> int:
    """Linux's call; 0 or what is wrong, ``ENOSYS`` where there is no such call."""
    if not sys.platform.startswith("linux"):
        return errno.ENOSYS
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return errno.ENOSYS
    failed = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), flag)
    return ctypes.get_errno() if failed else 0


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

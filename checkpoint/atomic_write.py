"""Replace files and folders atomically: at any time, either the old version or the complete new one exists."""

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
#: Names created by :func:`temporary_name` and ``storage.remove``.
_TEMPORARY = re.compile(r"\.(.+\.[0-9a-f]{12}|[0-9a-f]{32})\.tmp")


@contextmanager
def written_aside(target: Location, new: bool = False) -> Iterator[Path]:
    """Context manager that yields a local path; the file written there replaces ``target`` when the block ends.

    The block must sync the file to disk. If the block raises, the file is deleted and ``target`` is unchanged. ``new``
    has the same meaning as in :func:`take_place`.
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
    """Return the path to write to before ``target`` is replaced: in the same folder, or in TMPDIR for a URL."""
    return Path(tempfile.gettempdir(), name) if isinstance(target, Remote) else target.with_name(name)


def temporary_name(name: str) -> str:
    """Return a unique hidden name derived from ``name``."""
    longest_name = 255
    ending = f".{uuid4().hex[:12]}.tmp"
    return f".{name}{ending}" if len(os.fsencode(name)) + len(ending) < longest_name else f".checkpoint{ending}"


def remove_temporaries(folder: Location) -> None:
    """Delete temporary files that interrupted saves left in a local folder. No run may be saving to that folder."""
    for path in folder.iterdir() if isinstance(folder, Path) else ():
        if _TEMPORARY.fullmatch(path.name):
            remove(path)


def take_place(temporary: Path, target: Location, new: bool = False) -> None:
    """Rename ``temporary`` to ``target``, replacing any existing ``target``, and sync the parent folder.

    If ``target`` is a URL, the file is uploaded. With ``new``, ``target`` must not exist yet.

    Raises:
        FileExistsError: if ``new`` is set and ``target`` exists; ``target`` is left unchanged.
    """
    if isinstance(target, Path):
        (_rename_new if new else _rename)(temporary, target)
        sync_folder(target.parent)
        return
    if new and target.exists():
        raise _saved_meanwhile(target)
    target.upload(temporary)
    temporary.unlink()
    if manifest.is_folder(target):  # at a URL, a file and a folder can have the same name
        storage.remove_all(target.files_below())


def _rename(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target``, replacing any existing file or folder.

    A file replaces a file in one step, with an ordinary rename. If either path is a folder, the two swap names, which
    is a single step on Linux. On other systems, the old ``target`` is first renamed to a hidden name; if a crash
    follows immediately, the old version only exists under the hidden name, and there is no ``target``.
    """
    if not target.is_dir() and not temporary.is_dir():
        temporary.replace(target)
        return
    if not os.path.lexists(target):
        temporary.rename(target)
        return
    if _renameat2(temporary, target, _RENAME_EXCHANGE) != 0:
        aside = target.with_name(temporary_name(target.name))
        target.rename(aside)
        temporary.rename(target)
        temporary = aside
    remove(temporary)


def _rename_new(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target``, which must not exist.

    On Linux, or with hard links, this is one atomic step. Otherwise, this function first checks that ``target`` does
    not exist, and another process could still create ``target`` before the rename.
    """
    try:
        problem = _renameat2(temporary, target, _RENAME_NOREPLACE)
        if problem == errno.EEXIST:
            raise FileExistsError
        if problem and not temporary.is_dir():
            _link(temporary, target)
        elif problem:  # renaming a folder never replaces one that is not empty
            _rename_if_free(temporary, target)
    except FileExistsError:
        raise _saved_meanwhile(target) from None


def _link(temporary: Path, target: Path) -> None:
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:  # no hard links on this file system
        _rename_if_free(temporary, target)
    else:
        temporary.unlink()


def _rename_if_free(temporary: Path, target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError
    temporary.rename(target)


def _saved_meanwhile(target: Location) -> FileExistsError:
    return FileExistsError(
        errno.EEXIST,
        "The checkpoint was not saved, because another run saved a checkpoint with the same name at the same time. "
        "The other run's checkpoint is unchanged. Use a separate folder for each run (dirpath, default_root_dir). "
        "Checkpoint",
        str(target),
    )


def _renameat2(one: Path, other: Path, flag: int) -> int:
    """Call Linux's ``renameat2``. Returns 0 or the error number, which is ``ENOSYS`` if the call does not exist."""
    if not sys.platform.startswith("linux"):
        return errno.ENOSYS
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return errno.ENOSYS
    failed = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), flag)
    return ctypes.get_errno() if failed else 0


def remove(path: Path) -> None:
    """Delete as much of a file or folder as possible, without ever raising an error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def put_link(path: Path, target: Path) -> None:
    """Make ``path`` a relative symbolic link to ``target``, or a copy of ``target`` if links are not supported."""
    with written_aside(path) as temporary:
        try:
            temporary.symlink_to(os.path.relpath(target, path.parent), target_is_directory=target.is_dir())
        except OSError:
            (shutil.copytree if target.is_dir() else shutil.copyfile)(target, temporary)


def sync_folder(folder: Path) -> None:
    """Make new names in ``folder`` survive a power failure, if the file system supports that."""
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

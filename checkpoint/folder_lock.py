"""Lock folders, so that no run resumes from checkpoints that another run is still writing."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

try:
    import fcntl
except ImportError:  # on Windows, folders cannot be locked
    fcntl = None

#: How long a killed run's processes may still hold its folder. Data loader workers exit with a delay.
_WAIT_SECONDS = 15.0


class FolderLocks:
    """Locks on the folders that a run writes to; the operating system releases them when the process exits.

    A run that starts from scratch can share a folder with other runs, because it only uses new file names. A run that
    resumes from the newest checkpoint in a folder needs an exclusive lock when it begins. On file systems that do not
    support locks (some network file systems), any run can resume.
    """

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    def take(self, folders: Iterable[str], alone: bool = False) -> bool:
        """Lock folders until :meth:`release` is called.

        Folders that do not exist yet and remote URLs are skipped. With ``alone``, this method also checks that no other
        run holds the folders' locks, and returns True if that is certain; otherwise it returns False.

        Raises:
            BlockingIOError: if another run holds the lock on a folder and does not release it in time.
        """
        certain = alone
        for folder in folders:
            if fcntl is None or not os.path.isdir(folder):
                certain = False
                continue
            handle = self._held.get(folder)
            if handle is None:
                handle = self._held[folder] = os.open(folder, os.O_RDONLY)
            if alone:
                certain = _wait_for(fcntl, folder, handle) and certain
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return certain

    def release(self) -> None:
        """Release the locks on all folders."""
        while self._held:
            os.close(self._held.popitem()[1])


def _wait_for(fcntl: Any, folder: str, handle: int) -> bool:
    """Wait until no other process holds the folder's lock. Return False if the file system has no locks, else True."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return False
            if time.monotonic() > deadline:
                raise BlockingIOError(
                    error.errno,
                    "Another run is writing checkpoints to this folder. This run cannot resume from these "
                    "checkpoints, because both runs would train the same steps. Wait for the other run to end, stop "
                    "it, or use a different folder for this run (default_root_dir, dirpath). Folder",
                    folder,
                ) from None
            time.sleep(0.05)
        else:
            return True

"""One run at a time goes on in a folder: a second that would resume what the first still writes is refused."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: folders cannot be claimed there
    fcntl = None

#: How long the processes of a run that was just killed may hold its folder: loader workers look for their parent.
_WAIT_SECONDS = 15.0


class Claims:
    """Folders that a run writes to, held by locks which the system takes back whenever the process ends.

    A run that starts afresh shares a folder with others, since it takes names that nobody has. One that goes on from
    the newest checkpoint in a folder must have it alone when it begins. Where the file system has no such locks (some
    network ones), nothing is refused.
    """

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    def take(self, folders: Iterable[str], alone: bool = False) -> bool:
        """Hold folders until :meth:`release`; those that do not exist yet are left out.

        Args:
            folders: those behind addresses are left out too.
            alone: no other run may hold them at this moment.

        Returns:
            Whether it is certain that no other run did.

        Raises:
            BlockingIOError: another run does, and went on doing so.
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
        """Let go of all folders."""
        while self._held:
            os.close(self._held.popitem()[1])


def _wait_for(fcntl: Any, folder: str, handle: int) -> bool:
    """Wait until nobody else holds the folder; False if that cannot be known here."""
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
                    "Another run is writing checkpoints to this folder, so this one cannot continue from them: both "
                    "would train the same steps. Wait for the other run or end it, or give this one another folder "
                    "(default_root_dir, dirpath). Folder",
                    folder,
                ) from None
            time.sleep(0.05)
        else:
            return True

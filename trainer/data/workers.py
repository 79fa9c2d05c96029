"""Worker processes of loaders outlive the signals that a terminal or a scheduler sends to all processes of a group.

A run that is told to stop finishes its step and saves; it cannot if its workers have died of the same signal.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

#: Whoever sends SIGTERM can be told apart on Linux; where it cannot, workers must go on obeying it.
_KNOWS_SENDER = hasattr(signal, "sigwaitinfo")
_NAMES = ("SIGINT", "SIGUSR1", "SIGUSR2", *(["SIGTERM", "SIGHUP"] if _KNOWS_SENDER else []))


class _Start:
    """The ``worker_init_fn`` of a worker: it ends when its parent says so, and then the user's own."""

    def __init__(self, users: Callable[[int], Any] | None) -> None:
        self.users = users

    def __call__(self, worker_id: int) -> None:
        if _KNOWS_SENDER:
            threading.Thread(target=_obey_parent, name="paceline-worker-signals", daemon=True).start()
        if self.users is not None:
            self.users(worker_id)


def _obey_parent() -> None:
    parent = multiprocessing.parent_process()
    while parent is not None:
        if signal.sigwaitinfo({signal.SIGTERM}).si_pid == parent.pid:
            os._exit(0)


def start_iterating(loader: Iterable[Any]) -> Iterator[Any]:
    """``iter(loader)``; worker processes that this starts do not die of a signal that their whole group gets."""
    if not isinstance(loader, DataLoader) or not loader.num_workers or not hasattr(signal, "pthread_sigmask"):
        return iter(loader)
    users, numbers = loader.worker_init_fn, {getattr(signal, name) for name in _NAMES}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    loader.worker_init_fn = _Start(users)
    try:
        return iter(loader)
    finally:
        loader.worker_init_fn = users
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

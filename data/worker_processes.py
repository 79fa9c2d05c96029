"""Worker processes of loaders outlive the signals that a terminal or a scheduler sends to all processes of a group.

A run that is told to stop finishes its step and saves; it cannot if its workers have died of the same signal.
Nor do workers outlive the run: torch's own watch does not see that a parent died before the worker was ready.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from ..processes.main_guard import require_main_guard

#: Whoever sends SIGTERM can be told apart on Linux; where it cannot, workers must go on obeying it.
_KNOWS_SENDER = hasattr(signal, "sigwaitinfo")
_NAMES = ("SIGINT", "SIGUSR1", "SIGUSR2", *(["SIGTERM", "SIGHUP"] if _KNOWS_SENDER else []))
#: Seconds between two looks at the run, and those that torch has for ending a worker whose run is gone: it looks every
#: 5 s.
_LOOK, _GRACE = 1.0, 10.0
#: The worker processes of each loader, those started last; empty while they start.
STARTED: WeakKeyDictionary[DataLoader[Any], list[Any]] = WeakKeyDictionary()


class _Start:
    """The ``worker_init_fn`` of a worker: it ends when its parent says so or is gone, and then the user's own.

    Args:
        users: the user's own.
        served: whether a fork server starts the worker, not the run itself.
    """

    def __init__(self, users: Callable[[int], Any] | None, served: bool) -> None:
        self.users = users
        self.served = served
        self.run = os.getpid()
        self.seconds = _LOOK, _GRACE

    def __call__(self, worker_id: int) -> None:
        if os.getpid() != self.run:  # else it is a thread of the run
            threading.Thread(target=self._obey, name="paceline-worker-signals", daemon=True).start()
        if self.users is not None:
            self.users(worker_id)

    def _obey(self) -> None:
        look, grace = self.seconds
        while True:
            if not _KNOWS_SENDER:
                time.sleep(look)
            elif (told := signal.sigtimedwait({signal.SIGTERM}, look)) and told.si_pid == self.run:
                os._exit(0)
            if self._is_left():
                time.sleep(grace)
                os._exit(1)

    def _is_left(self) -> bool:
        if not self.served:
            return os.getppid() != self.run
        run = multiprocessing.parent_process()
        return run is not None and not run.is_alive()


def start_iterating(loader: Iterable[Any]) -> Iterator[Any]:
    """``iter(loader)``; worker processes that this starts do not die of a signal that their whole group gets."""
    if not isinstance(loader, DataLoader) or not loader.num_workers or not hasattr(signal, "pthread_sigmask"):
        return iter(loader)
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method != "fork":
        require_main_guard(f"DataLoader(num_workers={loader.num_workers}) with {method!r}")
    users, numbers = loader.worker_init_fn, {getattr(signal, name) for name in _NAMES}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    STARTED[loader] = []
    loader.worker_init_fn = _Start(users, served=method == "forkserver")
    try:
        iterator = iter(loader)
    finally:
        loader.worker_init_fn = users
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    STARTED[loader] = getattr(iterator, "_workers", [])
    return iterator

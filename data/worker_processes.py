"""Shields data loader workers from signals, stops them when the run ends, and explains errors from lost workers.

A run that receives a signal finishes its step and saves, which is impossible if the same signal has killed its workers.
Workers must also not outlive the run, but torch's own check misses a parent that died before the worker was ready.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Generator, initial_seed
from torch.utils.data import DataLoader, dataloader

from .. import messages
from ..processes.devices import available_memory
from ..processes.main_guard import require_main_guard
from ..processes.rank_failure import signal_name
from ..torch_private import workers_of

#: Whether the sender of SIGTERM is known, as on Linux. If not, workers must obey every SIGTERM.
_KNOWS_SENDER = hasattr(signal, "sigwaitinfo")
_NAMES = ("SIGINT", "SIGUSR1", "SIGUSR2", *(["SIGTERM", "SIGHUP"] if _KNOWS_SENDER else []))
#: Seconds between checks that the run still exists, and seconds that torch has to stop the worker itself once the run
#: is gone (torch checks every 5 s).
_LOOK, _GRACE = 1.0, 10.0
#: The most recently started worker processes of each loader; empty while they start.
STARTED: WeakKeyDictionary[DataLoader[Any], list[Any]] = WeakKeyDictionary()
#: Loaders whose persistent workers had already been started at the position of a resumed run. When they start again,
#: their seed must not come from the loader's generator, which has already drawn one and now draws the samples' order.
SEEDED: WeakSet[DataLoader[Any]] = WeakSet()

_LOST = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) "
    r"(?:is killed by signal: (.*?)\. |exited unexpectedly(?: with exit code (\d+))?)"
)
_SHARED_MEMORY = "/dev/shm"
#: Seconds that a worker has to exit after its connection has closed.
_ENDING_SECONDS = 5.0


class WorkerLostError(RuntimeError):
    """Raised when a data loader worker has died; the message says how to fix the problem."""


class _Start:
    """A ``worker_init_fn`` that starts watching for the end of the run and then calls the user's own function.

    Args:
        users: the user's ``worker_init_fn``.
        served: whether a fork server, rather than the run's own process, starts the worker.
    """

    def __init__(self, users: Callable[[int], Any] | None, served: bool) -> None:
        self.users = users
        self.served = served
        self.run = os.getpid()
        self.seconds = _LOOK, _GRACE

    def __call__(self, worker_id: int) -> None:
        if os.getpid() != self.run:  # otherwise the worker is a thread of the run
            threading.Thread(target=self._obey, name="paceline-worker-signals", daemon=True).start()
        if self.users is not None:
            self.users(worker_id)

    def _obey(self) -> None:
        look, grace = self.seconds
        while True:
            if not _KNOWS_SENDER:
                time.sleep(look)
            elif (received := signal.sigtimedwait({signal.SIGTERM}, look)) and received.si_pid == self.run:
                os._exit(0)
            if self._run_has_ended():
                time.sleep(grace)
                os._exit(1)

    def _run_has_ended(self) -> bool:
        if not self.served:
            return os.getppid() != self.run
        run = multiprocessing.parent_process()
        return run is not None and not run.is_alive()


def start_iterating(loader: Iterable[Any]) -> Iterator[Any]:
    """Return ``iter(loader)``, and protect the worker processes that it starts from signals to the process group."""
    if not isinstance(loader, DataLoader) or not loader.num_workers or not hasattr(signal, "pthread_sigmask"):
        return iter(loader)
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method != "fork":
        require_main_guard(f"DataLoader(num_workers={loader.num_workers}) with {method!r}")
    users, numbers = loader.worker_init_fn, {getattr(signal, name) for name in _NAMES}
    generator = loader.generator
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    STARTED[loader] = []
    loader.worker_init_fn = _Start(users, served=method == "forkserver")
    if loader in SEEDED:
        SEEDED.remove(loader)
        loader.generator = Generator().manual_seed(initial_seed())
    try:
        iterator = iter(loader)
    finally:
        loader.worker_init_fn, loader.generator = users, generator
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    STARTED[loader] = workers_of(iterator)
    if threading.current_thread() is threading.main_thread():
        _explain_ended_children()
    return iterator


def _explain_ended_children() -> None:
    """Improve the error that torch's SIGCHLD handler raises, at any point in the program, when a child exits."""
    handler: Any = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and getattr(handler, "func", None) is not _child_ended:
        signal.signal(signal.SIGCHLD, partial(_child_ended, handler))


def _child_ended(handler: Callable[[int, FrameType | None], Any], signum: int, frame: FrameType | None) -> None:
    try:
        handler(signum, frame)
    except RuntimeError as error:
        better = explain_lost_worker(error, "")
        if better is None:
            raise
        raise better from error


def explain_lost_worker(
    error: BaseException, where: str, name: Callable[[Any], str | None] = lambda loader: None
) -> WorkerLostError | None:
    """Return a clearer error if ``error`` was raised because a data loader worker died; None for any other error.

    Args:
        error: the error that was raised.
        where: text that describes what the run was doing; may be empty.
        name: function that returns the user's name for a loader, or None if the loader has no name.
    """
    lost = _lost(error)
    if lost is None:
        return None
    process, code = lost
    at = f" while the run was at {where}" if where else ""
    who, loader = "A loader's worker", None
    for one, workers in list(STARTED.items()):
        index = next((index for index, worker in enumerate(workers) if worker.pid == process), None)
        if index is not None:
            workers[index].join(1.0)
            code, loader = workers[index].exitcode, one
            who = f"Worker {index} (of {len(workers)}) of {name(one) or _described(one)}"
            break
        if not workers and loader is None:
            who, loader = f"A worker of {name(one) or _described(one)}", one
    return WorkerLostError(f"{who} (process {process}) {_cause(code, at, loader)}")


def torchs_own(error: BaseException) -> BaseException:
    """Return torch's own error, to be set as the cause of the clearer error."""
    return error.__cause__ or error if isinstance(error, WorkerLostError) else error


def _lost(error: BaseException) -> tuple[int, int | None] | None:
    """Return the process ID and, if known, the exit code of the worker that an error reports; None for other errors."""
    error = torchs_own(error)
    found = _LOST.search(str(error)) if type(error) is RuntimeError else None
    if found is not None:
        return int(found.group(1).split(",")[0]), _code(found.group(2), found.group(3))
    if isinstance(error, (EOFError, OSError)):
        return _ended(_workers_in(error.__traceback__))
    return None


def _workers_in(trace: TracebackType | None) -> list[Any]:
    """Return the workers of the loader that was fetching a batch when an error was raised; empty if no loader was."""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == dataloader.__file__:
            return workers_of(trace.tb_frame.f_locals.get("self"))
        trace = trace.tb_next
    return []


def _ended(workers: list[Any]) -> tuple[int, int] | None:
    """Return the process ID and exit code of the worker that failed, or None.

    If no worker has failed yet, wait for one to exit, because a worker's connection closes before its process exits.
    """
    if workers and not any(worker.exitcode for worker in workers):
        with suppress(RuntimeError):  # torch's own error about the worker
            ending = wait([worker.sentinel for worker in workers if worker.exitcode is None], _ENDING_SECONDS)
            for worker in workers:
                if worker.sentinel in ending:
                    worker.join()
    return next(((worker.pid, worker.exitcode) for worker in workers if worker.exitcode), None)


def _described(loader: Any) -> str:
    return f"a DataLoader of {messages.a(loader.dataset)}"


def _code(killed: str | None, ended: str | None) -> int | None:
    """Return a process's exit code, given its exit status or the description of the signal that killed it."""
    if ended is not None:
        return int(ended)
    return next((-number for number in signal.valid_signals() if signal.strsignal(number) == killed), None)


def _cause(code: int | None, at: str, loader: DataLoader[Any] | None) -> str:
    here = "num_workers=0 runs the dataset in this process"
    if code is None or code >= 0:
        ended = "exited unexpectedly" if code is None else f"exited with status {code}"
        return (
            f"{ended}{at}, without an exception. Either something in the dataset ended the process (sys.exit, "
            f"os._exit), or the process could not start. Its output is above. {here} and shows where this happens."
        )
    killed, fewer = f"was killed by signal {-code} ({signal_name(-code)}){at}", _fewer(loader)
    if -code == getattr(signal, "SIGKILL", 9):
        return (
            f"{killed}, probably by the system because memory ran out. Check the system log (dmesg). This machine has "
            f"{messages.size(available_memory())} of memory left. {fewer}, use smaller batches, or keep samples in a "
            "tensor, an array or files, because over time each worker gets its own copy of Python objects."
        )
    if -code == getattr(signal, "SIGBUS", 7):
        return (
            f"{killed}, probably because the shared memory through which workers send their batches is "
            f"full{_shared_memory()}. Increase the shared memory (docker run --shm-size=8g, or --ipc=host), or "
            f"{fewer[0].lower()}{fewer[1:]}."
        )
    if -code in (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL):
        return (
            f"{killed}, which means that compiled code called by the dataset crashed. {here}, and PYTHONFAULTHANDLER=1 "
            "shows where it crashes."
        )
    return f"{killed}. Another program or a user sent that signal."


def _fewer(loader: DataLoader[Any] | None) -> str:
    if loader is None:
        return "Lower num_workers or prefetch_factor"
    return f"Lower num_workers (now {loader.num_workers}) or prefetch_factor (now {loader.prefetch_factor})"


def _shared_memory() -> str:
    try:
        total, _, free = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:  # not Linux
        return ""
    return f" ({_SHARED_MEMORY} now has {messages.size(free)} of {messages.size(total)} left)"

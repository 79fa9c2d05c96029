"""What is said when a worker process of a loader is gone: which, of what it died, and what to change."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from .. import messages
from ..processes.devices import available_memory
from ..processes.rank_failure import signal_name
from .worker_processes import STARTED

_LOST = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) "
    r"(?:is killed by signal: (.*?)\. |exited unexpectedly(?: with exit code (\d+))?)"
)
_SHARED_MEMORY = "/dev/shm"


def explain_lost_worker(
    error: BaseException, where: str, name: Callable[[Any], str | None] = lambda loader: None
) -> RuntimeError | None:
    """A better error for torch's that a loader's worker is gone; None for any other.

    Args:
        error: what was raised.
        where: where the run was, in words; may be empty.
        name: what the person calls a loader; None if it has no name.
    """
    found = _LOST.search(str(error)) if type(error) is RuntimeError else None
    if found is None:
        return None
    process, code = int(found.group(1).split(",")[0]), _code(found.group(2), found.group(3))
    at = f" while the run was at {where}" if where else ""
    who, loader = "A loader's worker", None
    for one, workers in list(STARTED.items()):
        index = next((index for index, worker in enumerate(workers) if worker.pid == process), None)
        if index is not None:
            workers[index].join(1.0)
            code, loader = workers[index].exitcode, one
            who = f"Worker {index} of the {len(workers)} of {name(one) or _described(one)}"
            break
        if not workers and loader is None:
            who, loader = f"A worker of {name(one) or _described(one)}", one
    return RuntimeError(f"{who} (process {process}) {_cause(code, at, loader)}")


def _described(loader: Any) -> str:
    return f"a DataLoader of {messages.a(loader.dataset)}"


def _code(killed: str | None, ended: str | None) -> int | None:
    """The exit code of a process that died of the signal with this description, or that ended with this status."""
    if ended is not None:
        return int(ended)
    return next((-number for number in signal.valid_signals() if signal.strsignal(number) == killed), None)


def _cause(code: int | None, at: str, loader: DataLoader[Any] | None) -> str:
    here = "num_workers=0 runs the data set in this process"
    if code is None or code >= 0:
        ended = "ended unexpectedly" if code is None else f"ended with exit status {code}"
        return (
            f"{ended}{at}, without an exception: something in the data set ended the process (sys.exit, os._exit), or "
            f"it could not start; what it printed is above. {here} and shows where."
        )
    killed, fewer = f"was killed by signal {-code} ({signal_name(-code)}){at}", _fewer(loader)
    if -code == getattr(signal, "SIGKILL", 9):
        return (
            f"{killed}, probably by the system because memory ran out: its log says so (dmesg). This machine has "
            f"{messages.size(available_memory())} left now. {fewer}, take smaller batches, or keep the samples in a "
            "tensor, an array or files: each worker comes to hold a copy of Python objects."
        )
    if -code == getattr(signal, "SIGBUS", 7):
        return (
            f"{killed}, probably because the shared memory is full by which workers hand over their batches"
            f"{_shared_memory()}. Make it larger (docker run --shm-size=8g, or --ipc=host). Or: {fewer[0].lower()}"
            f"{fewer[1:]}."
        )
    if -code in (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL):
        return f"{killed}, a crash in compiled code that the data set calls. {here}; PYTHONFAULTHANDLER=1 shows where."
    return f"{killed}. Another program or a person sent it that signal."


def _fewer(loader: DataLoader[Any] | None) -> str:
    if loader is None:
        return "Lower num_workers or prefetch_factor"
    return f"Lower num_workers (now {loader.num_workers}) or prefetch_factor (now {loader.prefetch_factor})"


def _shared_memory() -> str:
    try:
        total, _, free = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:  # another system
        return ""
    return f": {_SHARED_MEMORY} has {messages.size(free)} left of {messages.size(total)} now"

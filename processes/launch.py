"""Start processes through torch elastic: run a command several times, or call a function in new processes.

:func:`run` runs a command several times. :func:`rerun` does that with this process's own command, so that a plain
``python train.py`` acts like ``torchrun``. :func:`start` calls a function, for notebooks and for callers that need its
result. This module chooses the number of threads and prints the messages; :mod:`.torch_elastic` starts the processes.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any, NoReturn

from .. import messages
from ..devices.kinds import kind_of
from . import hydra_program
from .host_program import find_host, fork_obstacle, has_file, refusal_to_fork
from .main_guard import require_main_guard
from .output_relay import Relay
from .rank_failure import LAUNCHED, end_with, failures, note_crash, signal_name, write_failure
from .rank_failure import note_failure as note_failure
from .rank_failure import register_failure_hook as register_failure_hook
from .torch_elastic import (
    SIGNALS,
    ElasticOptions,
    RendezvousPoint,
    StartMethod,
    environment,
    is_ignored,
    launch,
    numa_of,
    signals_restored,
)

#: The folder in which this process was started. Relative paths on its command line start here.
_DIRECTORY = os.getcwd()
#: Environment variable for processes that a strategy starts: the file to create once they have joined their group.
JOINED = "PACELINE_JOINED"
_PICKLE_FIX = (
    "Define this object at the top level of a file (not inside a function or as a lambda), or create it in a hook. Or "
    "use strategy='ddp_fork', which forks this process, or 'ddp', which runs the script again."
)


def rerun(num_processes: int, num_nodes: int = 1, devices_kind: str = "cpu", numa: bool = False) -> NoReturn:
    """Run this process's command ``num_processes`` times, wait, and exit with the status of the first failure.

    With several machines, the user runs the same command on each machine, with the variables that :func:`find_place`
    reads. Ctrl-C, SIGTERM and SLURM's SIGUSR1 are passed on to the processes, which then have as long as torch elastic
    allows (30 seconds, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT) to finish their step. After a second signal, this process
    stops waiting, and the others exit as if this process had been killed (see :func:`register_failure_hook`).

    Args:
        num_processes: number of processes on this machine.
        num_nodes: number of machines.
        devices_kind: the kind of device that the processes use.
        numa: whether torch elastic binds each process to the NUMA node of its GPU.
    """
    command, folder = hydra_program.for_ranks([sys.executable, *sys.orig_argv[1:]], _DIRECTORY)
    place = find_place(num_nodes)
    os.chdir(folder)
    sys.exit(run(command, num_processes, place, devices_kind, numa))


def run(
    command: list[str],
    num_processes: int,
    place: RendezvousPoint,
    devices_kind: str = "cpu",
    numa: bool = False,
    options: ElasticOptions | None = None,
) -> int:
    """Run a command ``num_processes`` times on this machine, wait, and return the status of the first failure.

    Prints only the first failure, or all failures if ``options.quiet`` is False. This function changes this process's
    environment, so that the new processes know how to report failures.

    Args:
        command: the command line; each process also gets torchrun's variables.
        num_processes: the same as for :func:`rerun`.
        place: the rendezvous point; see :func:`find_place`.
        devices_kind: the same as for :func:`rerun`.
        numa: the same as for :func:`rerun`.
        options: optional settings for torch elastic.
    """
    options = options or ElasticOptions()
    os.environ[LAUNCHED] = str(os.getpid())
    os.environ[messages.SAID] = messages.spoken()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of(num_processes)))
    with TemporaryDirectory(prefix="paceline_") as temporary:
        folder = options.log_dir or temporary
        # Torch elastic treats its arguments as templates.
        arguments = [argument.replace("$", "$$") for argument in command[1:]]
        options_for_numa = numa_of(devices_kind, numa)
        kind_of(devices_kind).prepare_launch(num_processes)
        exits, number = launch(command[0], arguments, num_processes, place, folder, "spawn", options_for_numa, options)
        # After a failed run, processes that are not in `exits` exited normally, even if they wrote an error file.
        files = [Path(seen.error_file) for seen in exits.values()] if exits else Path(temporary).rglob("error.json")
        failed = failures(exits, [file for file in files if file.exists()])
    status = 128 + number if number else 0
    if failed and (number is None or failed[0].order()[0] == 0):
        status = status or failed[0].status
        for failure in failed[: 1 if options.quiet else None]:
            messages.error(failure.describe(num_processes * place.num_nodes))
    return status


def start(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    num_processes: int,
    start_method: StartMethod,
    devices_kind: str = "cpu",
    numa: bool = False,
    place: RendezvousPoint | None = None,
) -> Any:
    """Call ``function(*args)`` in ``num_processes`` new processes and return rank 0's result, with tensors on the CPU.

    Forked processes use one CPU thread each, because OpenMP's threads do not survive a fork.

    Args:
        function: the function that each process calls; it reads its rank from torchrun's variables.
        args: the function's arguments. Each process gets its own copies, even of tensors.
        num_processes: number of processes on this machine.
        start_method: ``"fork"`` copies this process; other methods start fresh processes and pickle the arguments.
        devices_kind: the same as for :func:`rerun`.
        numa: the same as for :func:`rerun`.
        place: the rendezvous point of several machines, each of which must call ``start``; None if there is only one
            machine. On machines without rank 0, None is returned.

    Raises:
        RuntimeError: a process failed (the message contains the first failure's traceback); this process cannot be
            forked; or fresh processes would start more processes, because the program has no main guard.
        TypeError: the function or an argument cannot be pickled.
        KeyboardInterrupt: the user pressed Ctrl-C; raised after the processes have exited.
    """
    if start_method == "fork":
        obstacle = fork_obstacle(devices_kind)
        if obstacle:
            raise RuntimeError(refusal_to_fork(find_host(), obstacle))
        leave_garbage_alone_in_forks()
    else:
        require_main_guard(f"start_method={start_method!r}")
    with TemporaryDirectory(prefix="paceline_") as folder, ExitStack() as stack:
        threads = None if "OMP_NUM_THREADS" in os.environ else threads_of(num_processes)
        work = _Work(function, args)
        if start_method == "fork":
            job = _Job(folder, start_method, work, stack.enter_context(Relay(num_processes)))
        else:
            _refuse_definitions(work)
            _save(work, Path(folder) / "work.pt", "Everything that the run needs", _PICKLE_FIX)
            job = _Job(folder, start_method)
        with environment(threads):
            options_for_numa = numa_of(devices_kind, numa)
            kind_of(devices_kind).prepare_launch(num_processes)
            exits, number = launch(
                _run, [job], num_processes, place or RendezvousPoint(), folder, start_method, options_for_numa
            )
        failed = failures(exits, list(Path(folder).glob("rank*.json")), list(Path(folder).glob("rank*.crash")))
        if number is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        if failed:
            raise RuntimeError(failed[0].describe(num_processes))
        result = Path(folder) / "result.pt"
        return _load(result, "cpu") if result.exists() else None


@contextmanager
def told_if_stopped_early(num_processes: int) -> Iterator[None]:
    """Context manager that reports a signal that stops the processes while they are starting, before any training.

    A process counts as starting until it has joined the process group. A signal that stops this process before it has
    started the others is reported too. Signals keep their usual effect.
    """
    with TemporaryDirectory(prefix="paceline_") as folder:
        joined = Path(folder) / "joined"

        def tell(number: int) -> None:
            if not joined.exists():
                messages.error(
                    f"{signal_name(number)} stopped the run's processes ({num_processes} in total) while they were "
                    "starting, so nothing has been trained or saved."
                )

        def end(number: int, frame: Any) -> None:
            with suppress(RuntimeError):  # the signal arrived during a print
                tell(number)
            rmtree(folder, ignore_errors=True)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        try:
            with environment(None, **{JOINED: str(joined)}), signals_restored(end):
                yield
        except BaseException as error:
            number = _ended_by(error)
            if number is not None:
                tell(number)
            raise


def _ended_by(error: BaseException) -> int | None:
    """Return the signal that ended the processes if it is one that users or schedulers send; None otherwise."""
    if isinstance(error, KeyboardInterrupt):
        return int(signal.SIGINT)
    killed = re.search(r"^Rank \d+ of \d+ was killed by signal (\d+) ", str(error))
    code = error.code if isinstance(error, SystemExit) else 128 + int(killed[1]) if killed else None
    requested = {128 + getattr(signal, name) for name in SIGNALS if hasattr(signal, name)}
    return code - 128 if isinstance(code, int) and code in requested else None


def note_joined() -> None:
    """Record that this process has joined the process group."""
    if JOINED in os.environ:
        with suppress(OSError):
            Path(os.environ[JOINED]).touch()


def threads_of(num_processes: int) -> int:
    """Return the number of CPU threads for each process if ``num_processes`` processes share this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_processes)


# ---- the rendezvous point --------------------------------------------------------------------------------------------


def find_place(
    num_nodes: int,
    node_rank: int | None = None,
    address: str | None = None,
    port: int | None = None,
    names: tuple[str, str, str] = RendezvousPoint.names,
    line: str = "",
) -> RendezvousPoint:
    """Determine the machines' rendezvous point from the arguments and the environment.

    Args:
        num_nodes: number of machines.
        node_rank: index of this machine; NODE_RANK if None. Used only with several machines.
        address: address of machine 0; MASTER_ADDR if None. Used only with several machines.
        port: port on machine 0; MASTER_PORT if None. A single machine uses a free port if neither is set.
        names: what the user calls the address, the port and the node rank, for error messages.
        line: the command for each machine, with the placeholders ``{address}``, ``{port}`` and ``{node}``.

    Raises:
        RuntimeError: address, port or node rank is not set.
        ValueError: a number is out of range.
        OSError: the address cannot be resolved.
    """
    address_name, port_name, node_name = names
    port_text = str(port) if port is not None else os.environ.get("MASTER_PORT")
    if num_nodes == 1:
        return RendezvousPoint(port=_whole(port_name, port_text or "0", 65536), names=names)
    address = address or os.environ.get("MASTER_ADDR")
    node_text = str(node_rank) if node_rank is not None else os.environ.get("NODE_RANK")
    given = {address_name: address, port_name: port_text, node_name: node_text}
    missing = [name for name, value in given.items() if not value]
    if missing or not (address and port_text and node_text):
        typed = shlex.join(["python", *sys.orig_argv[1:]]).replace("{", "{{").replace("}", "}}")
        line = line or f"MASTER_ADDR={{address}} MASTER_PORT={{port}} NODE_RANK={{node}} {typed}"
        values = {"address": address or "<host of machine 0>", "port": port_text or 29500}
        raise RuntimeError(
            f"There are {num_nodes} machines, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
            "set, so the machines cannot find each other. On the first machine, run:\n"
            f"  {line.format(**values, node=0)}\nand so on, up to the last machine:\n"
            f"  {line.format(**values, node=num_nodes - 1)}\nor start the script with torchrun, srun or mpirun."
        )
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        raise OSError(
            f"{address_name}={address} is not the name or address of a machine ({error.strerror or error}). Set "
            f"{address_name} to a name or address of machine 0 that the other machines can reach."
        ) from error
    return RendezvousPoint(
        num_nodes, _whole(node_name, node_text, num_nodes), address, _whole(port_name, port_text, 65536), names
    )


def _whole(name: str, text: str, below: int) -> int:
    if not text.isdecimal() or int(text) >= below:
        raise ValueError(f"{name}={text} must be a whole number from 0 to {below - 1}.")
    return int(text)


# ---- a function in new processes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """The function call that each new process makes."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True)
class _Job:
    """Everything that a new process needs, as one object, because torch elastic treats plain strings as templates."""

    folder: str
    start_method: StartMethod
    work: _Work | None = None
    relay: Relay | None = None
    agent: int = field(default_factory=os.getpid)


def _run(job: _Job) -> None:
    """Call the function, and save rank 0's result or this rank's failure. Runs in a new process."""
    import torch

    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C arrives only once, from the launcher
    child = job.start_method != "forkserver"  # forkserver processes are the server's children
    end_with(job.agent, ask=not child or sys.platform != "linux", child=child)  # on Linux torch arranges a SIGINT
    if job.start_method == "fork":
        _forget_handlers()
        torch.set_num_threads(1)
    rank, folder = int(os.environ["RANK"]), Path(job.folder)
    note_crash(folder / f"rank{rank}.crash")
    if job.start_method == "fork":
        _wait_for_all(folder, rank)
    try:
        if job.relay is not None:
            job.relay.enter(int(os.environ["LOCAL_RANK"]))
        work = job.work or _load_work(folder / "work.pt")
        result = work.function(*work.args)
        if rank == 0:
            _save(
                result,
                folder / "result.pt",
                f"The return value of {_name(work.function)}",
                "Return plain data or tensors.",
            )
    except SystemExit as error:
        if error.code:
            raise
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        write_failure(error, folder / f"rank{rank}.json")
        sys.exit(1)


def _load_work(file: Path) -> _Work:
    """Load this process's work; loading imports the functions and classes that the work uses."""
    try:
        return _load(file, None)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"A fresh process cannot import a definition that the run uses ({error}). Such a process can import "
            "definitions at the top level of a .py file in a folder on sys.path, but not those under a main guard or "
            "in a test file that pytest loads with --import-mode=importlib. Move the definition to a "
            ".py file that can be imported (pytest's setting `pythonpath` adds folders), or use strategy='ddp_fork', "
            "which forks this process."
        ) from error


@cache
def leave_garbage_alone_in_forks() -> None:
    """Prevent later forks of this process from collecting garbage that existed before the fork.

    A fork copies an object such as a store server without its thread, but with the pipe through which the thread is
    told to stop. Collecting the copy would crash the child or stop the parent's thread.
    """
    enabled: list[bool] = []

    def hold() -> None:
        enabled.append(gc.isenabled())
        gc.disable()

    def release() -> None:
        if enabled.pop():
            gc.enable()

    def leave() -> None:
        gc.freeze()
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=leave)


def _wait_for_all(folder: Path, rank: int) -> None:
    """Wait until every process is forked.

    The agent's store runs in a thread. If that thread is busy during a fork, its locks stay held in the child forever.
    """
    (folder / f"forked{rank}").touch()
    while len(list(folder.glob("forked*"))) < int(os.environ["LOCAL_WORLD_SIZE"]):
        time.sleep(0.005)


def _forget_handlers() -> None:
    """Restore the default signal handlers; a fork copies torch elastic's handlers, which only the launcher needs."""
    for name in SIGNALS:
        if hasattr(signal, name) and not is_ignored(getattr(signal, name)):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _load(file: Path, device: str | None) -> Any:
    import torch

    return torch.load(file, map_location=device, weights_only=False)


def _save(value: Any, file: Path, what: str, fix: str) -> None:
    """Pickle a value with ``torch.save``, because multiprocessing would make processes share the tensors' memory."""
    import torch

    try:
        torch.save(value, file)
    except OSError:
        raise
    except Exception as error:
        name, culprit = _culprit(value)
        raise TypeError(
            f"{what} must be pickled to be sent to another process, but {name} ({culprit!r:.200}) cannot be pickled: "
            f"{error}. {fix}"
        ) from error


def _refuse_definitions(work: _Work) -> None:
    """Reject definitions from a prompt or a notebook cell, because a fresh process cannot import them."""
    finder = _Finder(_NoOutput())
    if not has_file():
        with suppress(Exception):  # _save reports objects that cannot be pickled
            finder.dump(work)
    if finder.found is not None:
        name, where = _name(finder.found), find_host().name
        raise TypeError(
            f"{name} is defined in {where}, and a fresh process cannot import it from there. Use strategy='ddp', "
            f"which forks the current process, or move {name} to a .py file and import it."
        )


class _Finder(pickle.Pickler):
    """A pickler that finds a class or function defined in ``__main__``."""

    found: Any = None

    def reducer_override(self, obj: Any) -> Any:
        if self.found is None and isinstance(obj, (type, FunctionType)) and obj.__module__ == "__main__":
            self.found = obj
        return NotImplemented


def _culprit(value: Any) -> tuple[str, Any]:
    """Return the path to the innermost object that cannot be pickled (``Net.transforms[1].fn``), and that object."""
    seen: set[int] = set()
    name = _name(value)
    while id(value) not in seen:
        seen.add(id(value))
        found = next(
            ((step, part) for step, part in _parts(value) if id(part) not in seen and not _can_pickle(part)), None
        )
        if found is not None:
            step, value = found
            name = name + step if step else _name(value)
    return name, value


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__name__


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _Work):
        yield from (("", part) for part in (value.function, *value.args))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif getattr(value, "__self__", None) is not None:
        yield "", value.__self__
    with suppress(TypeError):
        yield from ((f".{key}", part) for key, part in vars(value).items())


class _NoOutput:
    def write(self, data: bytes) -> int:
        return len(data)


def _can_pickle(value: Any) -> bool:
    try:
        pickle.Pickler(_NoOutput()).dump(value)
    except Exception:
        return False
    return True

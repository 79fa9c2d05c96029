"""Starts the other processes, through torch elastic: run the command again, or call a function in new processes.

:func:`rerun` does what typing ``torchrun`` would have done, from inside a plain ``python train.py``. :func:`start` is
for notebooks and for whoever wants the function's result back. Torch elastic starts, watches and stops the processes;
this file chooses the port, the number of threads and the words.
"""

from __future__ import annotations

import builtins
import errno
import logging
import os
import pickle
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ..loggers import messages
from .failure import LAUNCHED, end_with, first_failure, write_failure
from .failure import note_failure as note_failure
from .failure import register_failure_hook as register_failure_hook

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

StartMethod = Literal["spawn", "fork", "forkserver"]

#: Where this process was started: a relative path on the command line is meant from here.
_DIRECTORY = os.getcwd()
_PICKLE_FIX = (
    "Define it at the top level of a file rather than inside a function or as a lambda, or create it in a hook; or use "
    "strategy='ddp_fork', which copies this process, or 'ddp', which runs the script again."
)
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
_ATTEMPTS = 10
_NOISY = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


@dataclass(frozen=True)
class _Place:
    """Where the machines meet, and which of them this is."""

    num_nodes: int = 1
    node_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0


def rerun(
    num_processes: int,
    num_nodes: int = 1,
    node_rank: int | None = None,
    address: str | None = None,
    port: int | None = None,
    devices_kind: str = "cpu",
    numa: bool = False,
) -> NoReturn:
    """Run this process's command ``num_processes`` times, wait, and exit with the status of what failed first.

    Ctrl-C, SIGTERM and SLURM's SIGUSR1 are passed on; the processes get the time torch elastic gives them (30 seconds,
    or TORCH_ELASTIC_SHUTDOWN_TIMEOUT) to finish their step. A second signal ends the wait; the processes then end as
    when this one is killed (see :func:`register_failure_hook`).

    Args:
        num_processes: on this machine.
        num_nodes: machines; the same command is typed on each.
        node_rank: this machine; NODE_RANK from the environment if None. Only for several machines.
        address: of machine 0; MASTER_ADDR if None. Only for several machines.
        port: there; MASTER_PORT if None, and without that a free one when there is one machine.
        devices_kind: what the processes compute on.
        numa: bind each process to the NUMA node of its GPU, by torch elastic.

    Raises:
        RuntimeError: there is no command to run again, or the machines do not know where to meet.
        OSError: the address or the port cannot be used.
    """
    command = _command()
    place = _place(num_nodes, node_rank, address, port)
    os.chdir(_DIRECTORY)
    os.environ[LAUNCHED] = str(os.getpid())
    os.environ[messages.SAID] = messages.spoken()
    os.environ.setdefault("OMP_NUM_THREADS", str(_threads(num_processes)))
    world_size = num_processes * num_nodes
    with TemporaryDirectory(prefix="paceline_") as folder:
        # Torch elastic reads its arguments as templates.
        arguments = [argument.replace("$", "$$") for argument in command[1:]]
        exits, number = _launch(command[0], arguments, num_processes, place, folder, "spawn", devices_kind, numa)
        # Who is not among the exits of a failed run ended well, whatever it wrote on the way.
        written = [Path(seen.error_file) for seen in exits.values()] if exits else Path(folder).rglob("error.json")
        failure = first_failure(exits, [file for file in written if file.exists()])
    status = 128 + number if number else 0
    if failure is not None and (number is None or failure.order()[0] == 0):
        status = status or failure.status
        messages.error(failure.describe(world_size))
    sys.exit(status)


def start(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    num_processes: int,
    start_method: StartMethod,
    devices_kind: str = "cpu",
    numa: bool = False,
    port: int = 0,
) -> Any:
    """Call ``function(*args)`` in ``num_processes`` new processes and return what rank 0 returned, tensors on the CPU.

    Forked processes compute with one CPU thread each: OpenMP's threads do not survive a fork.

    Args:
        function: what each process calls; torchrun's variables tell it its rank.
        args: its arguments. Each process gets its own copy, also of tensors.
        num_processes: how many, on this machine.
        start_method: ``"fork"`` copies this process; the others start fresh ones and send the arguments by pickling.
        devices_kind: what the processes compute on.
        numa: bind each process to the NUMA node of its GPU, by torch elastic.
        port: where they meet; 0: a free one.

    Raises:
        RuntimeError: a process failed, with the traceback of the first; or CUDA was used before a fork.
        TypeError: the function or an argument cannot be pickled.
        KeyboardInterrupt: on Ctrl-C, after the processes ended.
    """
    if start_method == "fork":
        _refuse_used_cuda(devices_kind)
    with TemporaryDirectory(prefix="paceline_") as folder:
        threads = None if "OMP_NUM_THREADS" in os.environ else _threads(num_processes)
        work = _Work(function, args)
        if start_method == "fork":
            job = _Job(folder, start_method, work)
        else:
            _save(work, Path(folder) / "work.pt", "The work for new processes", _PICKLE_FIX)
            job = _Job(folder, start_method)
        with _environment(threads):
            exits, number = _launch(
                _run, [job], num_processes, _Place(port=port), folder, start_method, devices_kind, numa
            )
        failure = first_failure(exits, list(Path(folder).glob("rank*.json")))
        if number is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        if failure is not None:
            raise RuntimeError(failure.describe(num_processes))
        result = Path(folder) / "result.pt"
        return _load(result, "cpu") if result.exists() else None


# ---- torch elastic -------------------------------------------------------------------------------------------------


def _launch(
    entrypoint: Any,
    arguments: list[Any],
    num_processes: int,
    place: _Place,
    folder: str,
    start_method: StartMethod,
    devices_kind: str,
    numa: bool,
) -> tuple[dict[int, Any], int | None]:
    """Start the processes and wait; returns the failed ones by rank, and the signal that ended the wait, if any."""
    from torch.distributed import (
        DistError,
        TCPStore,  # type: ignore[reportPrivateImportUsage]
    )
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    port = place.port
    try:
        with _quiet(), _signals():
            if place.num_nodes == 1:
                # Torch elastic meets on this very server, found by its port: no moment in which another can take it.
                server = _serve(TCPStore, place.address, port)
                port = server.port
            config = _config(num_processes, place, port, folder, start_method, _numa_options(devices_kind, numa))
            elastic_launch(config, entrypoint)(*arguments)
    except ChildFailedError as error:
        return error.failures, None
    except SignalException as error:
        return {}, int(error.sigval)
    except KeyboardInterrupt:
        return {}, int(signal.SIGINT)
    except DistError as error:
        raise _cannot_meet(error, place) from error
    return {}, None


def _serve(store: Any, address: str, port: int) -> Any:
    """A store that serves at ``port``, or where it is free for 0.

    Two things make a free port unusable: the system gave it to two programs at one moment, or an earlier server of
    this process had it, under whose entry torch no longer finds the new one. Then the next free port is taken.
    """
    for _ in range(0 if port else _ATTEMPTS):
        try:
            server = store(address, 0, is_master=True, multi_tenant=True, wait_for_workers=False)
            return store(address, server.port, is_master=True, multi_tenant=True, wait_for_workers=False)
        except Exception as error:
            if "EADDRINUSE" not in str(error):
                raise
    return store(address, port, is_master=True, multi_tenant=True, wait_for_workers=False)


def _config(
    num_processes: int, place: _Place, port: int, folder: str, start_method: StartMethod, numa_options: Any
) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    # A program under nohup ignores SIGHUP, and should go on doing so. SIGUSR1 is SLURM's word before it ends a job.
    handled = [name for name in _SIGNALS if hasattr(signal, name) and not _is_ignored(getattr(signal, name))]
    if "SLURM_JOB_ID" not in os.environ:
        handled = [name for name in handled if name != "SIGUSR1"]
    with _environment(None, PYTORCH_NVML_BASED_CUDA_CHECK="1"):  # or the check for CUDA makes a later fork unusable
        return LaunchConfig(
            min_nodes=place.num_nodes,
            max_nodes=place.num_nodes,
            nproc_per_node=num_processes,
            run_id="paceline",
            rdzv_backend="static",
            rdzv_endpoint=f"{place.address}:{port}",
            rdzv_configs={"rank": place.node_rank},
            max_restarts=0,
            start_method=start_method,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=",".join(handled),
            numa_options=numa_options,
        )


def _is_ignored(number: int) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN


def _numa_options(devices_kind: str, numa: bool) -> Any:
    if not numa:
        return None
    nodes = Path("/sys/devices/system/node")
    count = sum(re.fullmatch(r"node\d+", path.name) is not None for path in nodes.iterdir()) if nodes.is_dir() else 1
    if devices_kind != "cuda" or count < 2:
        why = (
            f"the processes compute on {devices_kind!r}" if devices_kind != "cuda" else "this machine has one NUMA node"
        )
        messages.info_once(f"numa=True binds nothing: {why}.")
        return None
    from torch.numa.binding import AffinityMode, NumaOptions

    return NumaOptions(affinity_mode=AffinityMode.NODE)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch elastic's log to itself: what a person needs is said once, by us."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    before = [logger.propagate for logger in loggers]
    handler = logging.NullHandler()
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate


@contextmanager
def _signals() -> Iterator[None]:
    """Put back the signal handlers that torch elastic replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def _environment(threads: int | None, **more: str) -> Iterator[None]:
    """Variables for the processes to come; those of this one are as before afterwards."""
    before = dict(os.environ)
    os.environ.update(more)
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _threads(num_processes: int) -> int:
    """CPU threads for each of the processes that share this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_processes)


# ---- the command and the place -------------------------------------------------------------------------------------


def _command() -> list[str]:
    """What was typed to start this process."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None) or "<stdin>"
    if hasattr(builtins, "__IPYTHON__"):
        session = "a notebook or an IPython session"
    elif sys.flags.inspect or sys.flags.interactive or hasattr(sys, "ps1"):
        session = "an interactive Python session"
    elif file == "<stdin>" and getattr(main, "__spec__", None) is None and sys.argv[:1] != ["-c"]:
        session = "a program read from standard input"
    elif not sys.executable:
        session = "a Python inside another program (sys.executable is empty)"
    else:
        return [sys.executable, *sys.orig_argv[1:]]
    raise RuntimeError(
        f"Several processes are started by running the script again, but this is {session}, so there is no script. "
        "Use strategy='ddp_notebook' (forks this process) or 'ddp_spawn', or put the code into a file and run that."
    )


def _place(num_nodes: int, node_rank: int | None, address: str | None, port: int | None) -> _Place:
    port_text = str(port) if port is not None else os.environ.get("MASTER_PORT")
    if num_nodes == 1:
        return _Place(port=_whole("MASTER_PORT", port_text or "0", 65536))
    address = address or os.environ.get("MASTER_ADDR")
    node_text = str(node_rank) if node_rank is not None else os.environ.get("NODE_RANK")
    given = {"MASTER_ADDR": address, "MASTER_PORT": port_text, "NODE_RANK": node_text}
    missing = [name for name, value in given.items() if not value]
    if missing or not (address and port_text and node_text):
        line = (
            f"MASTER_ADDR={address or '<host of machine 0>'} MASTER_PORT={port_text or 29500} NODE_RANK={{}} "
            f"{shlex.join(['python', *sys.orig_argv[1:]])}"
        )
        raise RuntimeError(
            f"num_nodes={num_nodes}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, so "
            f"the machines cannot find each other. Type on the first:\n  {line.format(0)}\nand so on to the last:\n"
            f"  {line.format(num_nodes - 1)}\nor start the script with torchrun, srun or mpirun."
        )
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        raise OSError(
            f"MASTER_ADDR={address} is not the name or address of a machine ({error.strerror or error}). Set it to "
            "one of machine 0 that the others reach."
        ) from error
    return _Place(
        num_nodes, _whole("NODE_RANK", node_text, num_nodes), address, _whole("MASTER_PORT", port_text, 65536)
    )


def _whole(name: str, text: str, below: int) -> int:
    if not text.isdecimal() or int(text) >= below:
        raise ValueError(f"{name}={text} is not a whole number from 0 to {below - 1}. Set it to one.")
    return int(text)


def _cannot_meet(error: Exception, place: _Place) -> OSError:
    where = f"{place.address}:{place.port}"
    if "EADDRINUSE" in str(error):
        others = "" if place.num_nodes > 1 else ", or unset it and a free one is chosen"
        return OSError(
            errno.EADDRINUSE,
            f"Port {place.port} (MASTER_PORT) is in use by another program on this machine, so the processes cannot "
            f"meet there. Set MASTER_PORT to a free port{others}",
        )
    return OSError(
        f"The machines could not meet at {where} (MASTER_ADDR:MASTER_PORT): this is NODE_RANK={place.node_rank} of "
        f"{place.num_nodes}. Start the same command on all of them within 15 minutes, with an address of machine 0 "
        f"that the others reach and a port that no firewall closes. ({str(error).splitlines()[0]})"
    )


# ---- a function in new processes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """What each new process calls."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True)
class _Job:
    """What a new process is told: one object, because torch elastic reads bare strings as templates."""

    folder: str
    start_method: StartMethod
    work: _Work | None = None
    agent: int = field(default_factory=os.getpid)


def _run(job: _Job) -> None:
    """In a new process: call the function, keep rank 0's result, or write down the failure."""
    import torch

    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C comes once, from the process that waits
    child = job.start_method != "forkserver"  # else the server is in between
    end_with(job.agent, ask=not child or sys.platform != "linux", child=child)  # Linux asks by SIGINT, through torch
    if job.start_method == "fork":
        _forget_handlers()
        torch.set_num_threads(1)
    rank, folder = int(os.environ["RANK"]), Path(job.folder)
    if job.start_method == "fork":
        _wait_for_all(folder, rank)
    try:
        work = job.work or _load(folder / "work.pt", None)
        result = work.function(*work.args)
        if rank == 0:
            _save(
                result, folder / "result.pt", f"What {_name(work.function)} returned", "Return plain data or tensors."
            )
    except SystemExit as error:
        if error.code:
            raise
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        write_failure(error, folder / f"rank{rank}.json")
        sys.exit(1)


def _wait_for_all(folder: Path, rank: int) -> None:
    """Return when every process is forked.

    The agent's store serves from a thread: one that works while a process is forked leaves it locks that stay taken.
    """
    (folder / f"forked{rank}").touch()
    while len(list(folder.glob("forked*"))) < int(os.environ["LOCAL_WORLD_SIZE"]):
        time.sleep(0.005)


def _forget_handlers() -> None:
    """A fork copies torch elastic's signal handlers, which are for the process that waits."""
    for name in _SIGNALS:
        if hasattr(signal, name) and not _is_ignored(getattr(signal, name)):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _load(file: Path, device: str | None) -> Any:
    import torch

    return torch.load(file, map_location=device, weights_only=False)


def _refuse_used_cuda(devices_kind: str) -> None:
    import torch

    if devices_kind == "cuda" and torch.cuda.is_initialized():
        raise RuntimeError(
            "CUDA was already used in this process, and a forked copy of it cannot use CUDA again. Restart, and do "
            "nothing on the GPU before fit (no .cuda(), no .to('cuda')); or use strategy='ddp_spawn', which starts "
            "fresh processes."
        )


def _save(value: Any, file: Path, what: str, fix: str) -> None:
    """Pickle by ``torch.save``: multiprocessing itself would make all processes share one memory for a tensor."""
    import torch

    try:
        torch.save(value, file)
    except OSError:
        raise
    except Exception as error:
        name, culprit = _culprit(value)
        raise TypeError(
            f"{what} goes from process to process by pickling, and {name} ({culprit!r:.200}) cannot be pickled: "
            f"{error}. {fix}"
        ) from error


def _culprit(value: Any) -> tuple[str, Any]:
    """The innermost thing that cannot be pickled, with the way to it: ``MyModule.transforms[1].fn``."""
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


class _Nowhere:
    def write(self, data: bytes) -> int:
        return len(data)


def _can_pickle(value: Any) -> bool:
    try:
        pickle.Pickler(_Nowhere()).dump(value)
    except Exception:
        return False
    return True

"""Start, watch and stop processes with torch elastic, and report processes that cannot find each other."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from .. import messages
from .cluster_environment import RUN_ID
from .cpu_affinity import nodes

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

StartMethod = Literal["spawn", "fork", "forkserver"]

#: Signals that are passed on to the processes.
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
_ATTEMPTS = 10
_NOISY = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


@dataclass(frozen=True)
class RendezvousPoint:
    """The machines' rendezvous point (an address and a port on machine 0), and the index of this machine.

    Args:
        port: 0 picks a free port, which works only on a single machine.
        names: what the user calls the address, the port and the node rank, for error messages.
    """

    num_nodes: int = 1
    node_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    names: tuple[str, str, str] = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


@dataclass(frozen=True)
class ElasticOptions:
    """Optional settings for torch elastic.

    Args:
        max_restarts: maximum number of times that all processes are restarted after a failure.
        monitor_interval: seconds between checks of the processes.
        log_dir: folder for the processes' output, with a subfolder per run, attempt and rank; if None, no files are
            written.
        tee: the streams to show and also write to ``log_dir``: ``"1"`` for standard output, ``"2"`` for standard error,
            ``"3"`` for both, ``"0"`` for none, or a value per local rank, such as ``"0:1,1:2"``.
        role: name of the processes in the lines that ``tee`` shows.
        rdzv_backend: the rendezvous method of several machines: ``"static"``, or ``"c10d"``, which lets a run restart
            on different machines.
        rdzv_conf: settings of the rendezvous.
        quiet: whether to hide torch elastic's own log.
        serving: function that is called with the rendezvous port of a single machine.
    """

    max_restarts: int = 0
    monitor_interval: float = 0.1
    log_dir: str | None = None
    tee: str = "0"
    role: str = "default"
    rdzv_backend: str = "static"
    rdzv_conf: Mapping[str, Any] = field(default_factory=dict)
    quiet: bool = True
    serving: Callable[[int], None] | None = None


def launch(
    entrypoint: Any,
    arguments: list[Any],
    num_processes: int,
    place: RendezvousPoint,
    folder: str,
    start_method: StartMethod,
    numa_options: Any = None,
    options: ElasticOptions | None = None,
) -> tuple[dict[int, Any], int | None]:
    """Start the processes and wait for them.

    Returns the failed processes, keyed by rank, and the signal that ended the wait, if any. The processes write their
    failures to ``folder``; ``start_method`` applies only if ``entrypoint`` is a function.

    Raises:
        OSError: the machines or processes cannot find each other.
    """
    from torch.distributed import (
        DistError,
        TCPStore,  # type: ignore[reportPrivateImportUsage]
    )
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    options = options or ElasticOptions()
    try:
        with _quiet() if options.quiet else nullcontext(), signals_restored():
            if place.num_nodes == 1:
                # Torch elastic finds this server by its port and uses it, so no other program can take the port.
                server = serve(TCPStore, place.address, place.port)
                place = replace(place, port=server.port)
                if options.serving is not None:
                    options.serving(server.port)
            config = _config(num_processes, place, folder, start_method, numa_options, options)
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


def serve(store: Any, address: str, port: int) -> Any:
    """Start a store server on ``port``; 0 picks a free port.

    A free port can be unusable for two reasons: the system gave the port to two programs at the same time, or torch
    still has an entry for an earlier server of this process on that port. In both cases, another free port is tried.
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
    num_processes: int,
    place: RendezvousPoint,
    folder: str,
    start_method: StartMethod,
    numa_options: Any,
    options: ElasticOptions,
) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    from . import rendezvous

    # A program under nohup ignores SIGHUP and must keep ignoring it. SLURM sends SIGUSR1 before it ends a job.
    handled = [name for name in SIGNALS if hasattr(signal, name) and not is_ignored(getattr(signal, name))]
    if "SLURM_JOB_ID" not in os.environ:
        handled = [name for name in handled if name != "SIGUSR1"]
    static = place.num_nodes == 1 or options.rdzv_backend == "static"
    with environment(None, PYTORCH_NVML_BASED_CUDA_CHECK="1"):  # torch's other check for CUDA breaks later forks
        return LaunchConfig(
            min_nodes=place.num_nodes,
            max_nodes=place.num_nodes,
            nproc_per_node=num_processes,
            run_id=RUN_ID,
            role=options.role,
            rdzv_backend=rendezvous.register() if static else options.rdzv_backend,
            rdzv_endpoint=f"{place.address}:{place.port}",
            rdzv_configs={**options.rdzv_conf, **({"rank": place.node_rank} if static else {})},
            max_restarts=options.max_restarts,
            monitor_interval=options.monitor_interval,
            start_method=start_method,
            logs_specs=DefaultLogsSpecs(log_dir=folder, tee=Std.from_str(options.tee)),
            signals_to_handle=",".join(handled),
            numa_options=numa_options,
        )


def is_ignored(number: int) -> bool:
    """Return True if this process ignores a signal."""
    return signal.getsignal(number) == signal.SIG_IGN


def numa_of(devices_kind: str, numa: bool) -> Any:
    """Return options that bind processes to their GPUs' NUMA nodes; None if ``numa`` is False.

    If binding is impossible, this function prints a message and returns None.
    """
    if not numa:
        return None
    if devices_kind != "cuda" or len(nodes()) < 2:
        why = f"the processes run on {devices_kind!r}" if devices_kind != "cuda" else "this machine has one NUMA node"
        messages.info_once(f"numa=True has no effect: {why}.")
        return None
    from torch.numa.binding import AffinityMode, NumaOptions

    return NumaOptions(affinity_mode=AffinityMode.NODE)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch elastic's log, because Paceline itself reports everything that the user needs to know."""
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
def signals_restored(handler: Callable[[int, Any], None] | None = None) -> Iterator[None]:
    """Context manager that restores signal handlers on exit, because torch elastic replaces some of them.

    Args:
        handler: function that is called for signals that would otherwise end this process silently.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if handler is not None and before[number] == signal.SIG_DFL:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            if old is not None:
                signal.signal(number, old)


@contextmanager
def environment(threads: int | None, **more: str) -> Iterator[None]:
    """Context manager that sets environment variables for new processes and restores the environment on exit."""
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


def _cannot_meet(error: Exception, place: RendezvousPoint) -> OSError:
    where = f"{place.address}:{place.port}"
    address, port, node = place.names
    if "EADDRINUSE" in str(error):
        others = "" if place.num_nodes > 1 else f", or omit {port} to use a free one"
        return OSError(
            errno.EADDRINUSE,
            f"Port {place.port} ({port}) is already in use on this machine, so the processes cannot use it. Set "
            f"{port} to a free port{others}",
        )
    return OSError(
        f"The machines could not find each other at {where} ({address}:{port}): this machine has "
        f"{node}={place.node_rank}, and there are {place.num_nodes} machines in total. Start the same command on all "
        "machines within 15 minutes, with an address of machine 0 that the other machines can reach and a port that "
        f"no firewall blocks. ({str(error).splitlines()[0]})"
    )

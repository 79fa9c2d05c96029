"""Find the program that runs in this process: a script, which every rank can run again, or a host such as pytest.

:func:`find_host` collects the facts, :func:`recognize` derives the host from them, and :func:`start_method_in` chooses
how a run's ranks start in that host.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .hydra_program import is_sweep

StartMethod = Literal["auto", "popen", "spawn", "fork", "forkserver"]
START_METHODS = ("auto", "popen", "spawn", "fork", "forkserver")

_USE_A_FILE = "put the code in a file and run `python file.py`"


@dataclass(frozen=True)
class Host:
    """A kind of program that can run in this process.

    Args:
        name: the program's name in error messages.
        is_script: whether a rank that runs the same command again does the same work as this process.
        can_spawn: whether a fresh process can import definitions from this program.
        restart: text that tells the user how to get a process that has not used the GPU.
    """

    name: str
    is_script: bool = False
    can_spawn: bool = False
    restart: str = "Start again"


SCRIPT = Host("a script", is_script=True, can_spawn=True)
NOTEBOOK = Host("a notebook", restart="Restart the kernel")
IPYTHON = Host("an IPython session")
INTERACTIVE = Host("an interactive Python session")
FROZEN = Host("a frozen program")
PYTEST = Host("pytest", can_spawn=True)
UNITTEST = Host("unittest", can_spawn=True)
DOCTEST = Host("doctest")
WORKER = Host("a process started by multiprocessing", can_spawn=True)
SWEEP = Host("a Hydra sweep", can_spawn=True)
COMMAND = Host("`python -c`")
STANDARD_INPUT = Host("a program read from standard input")
EMBEDDED = Host("Python embedded in another program (sys.executable is empty)")

#: Modules that are on the call stack while the host runs the user's code.
_RUNNING = {
    "_pytest": PYTEST,
    "unittest.case": UNITTEST,
    "unittest.suite": UNITTEST,
    "unittest.main": UNITTEST,
    "doctest": DOCTEST,
}


@dataclass(frozen=True)
class HostFacts:
    """Facts about this process that identify its host.

    ``running`` contains the modules on the call stack, ``file`` is the file of ``__main__`` (None or ``"<stdin>"`` if
    it has none), ``module`` is the module passed to ``python -m``, and ``options`` are the options before the script.
    ``frozen`` says whether PyInstaller or a similar tool packed the program, ``worker`` whether multiprocessing started
    this process, and ``sweep`` whether this process runs a Hydra sweep.
    """

    running: frozenset[str] = frozenset()
    file: str | None = None
    module: str | None = None
    options: tuple[str, ...] = ()
    executable: str = "python"
    kernel: bool = False
    ipython: bool = False
    interactive: bool = False
    frozen: bool = False
    worker: bool = False
    sweep: bool = False

    @property
    def has_file(self) -> bool:
        """Whether ``__main__`` is a file or a module, rather than code that was typed in."""
        return self.module is not None or not (self.file is None or self.file.startswith("<"))


def recognize(facts: HostFacts) -> Host:
    """Return the host that the facts describe."""
    candidates = (
        (facts.kernel, NOTEBOOK),
        (facts.ipython, IPYTHON),
        (facts.frozen, FROZEN),
        *((module in facts.running, host) for module, host in _RUNNING.items()),
        (facts.worker, WORKER),
        (facts.sweep, SWEEP),
        (facts.interactive, INTERACTIVE),
        (not facts.executable, EMBEDDED),
    )
    typed = COMMAND if "-c" in facts.options else STANDARD_INPUT
    return next((host for applies, host in candidates if applies), SCRIPT if facts.has_file else typed)


def find_host() -> Host:
    """Find this process's host; the result is not cached, because the host can change."""
    return recognize(_facts())


def has_file() -> bool:
    """Return True if ``__main__`` is a file or a module, whose definitions a fresh process can import."""
    return _facts().has_file


def _facts() -> HostFacts:
    main = sys.modules.get("__main__")
    module = getattr(getattr(main, "__spec__", None), "name", None)
    shell = _shell()
    return HostFacts(
        running=frozenset((*_running(), module or "")),
        file=getattr(main, "__file__", None),
        module=module,
        options=tuple(sys.orig_argv[1:]),
        executable=sys.executable or "",
        kernel=getattr(shell, "kernel", None) is not None,
        ipython=shell is not None,
        interactive=bool(sys.flags.inspect or sys.flags.interactive or hasattr(sys, "ps1")),
        frozen=bool(getattr(sys, "frozen", False)) or hasattr(main, "__compiled__"),
        worker=multiprocessing.parent_process() is not None,
        sweep=is_sweep(),
    )


def start_method_in(
    host: Host, asked: StartMethod, obstacle: str | None, num_nodes: int = 1
) -> Literal["popen", "spawn", "fork", "forkserver"]:
    """Choose how the ranks of a run start in this host.

    Args:
        host: the program that runs this process.
        asked: the strategy's ``start_method``.
        obstacle: why this process cannot be forked, from :func:`fork_obstacle`.
        num_nodes: number of machines.
    """
    if host.is_script:
        return "popen" if asked == "auto" else asked
    if num_nodes > 1:
        raise RuntimeError(
            f"A run on {num_nodes} machines needs the same command on each machine, but this program is {host.name}, "
            f"which has no command to repeat. Instead, {_USE_A_FILE} on each machine."
        )
    if asked == "popen":
        raise RuntimeError(
            "start_method='popen' starts several processes by running the script again, but this program is "
            f"{host.name}, so there is no script. Omit start_method to fork this process instead, or {_USE_A_FILE}."
        )
    if asked == "auto":
        return "spawn" if obstacle and host.can_spawn else "fork"
    return asked


def fork_obstacle(devices_kind: str) -> str | None:
    """Return why a fork of this process could not use the device; None if it could."""
    from ..devices.kinds import kind_of

    if not hasattr(os, "fork"):
        return f"{sys.platform} cannot fork a process"
    return kind_of(devices_kind).fork_obstacle()


def refusal_to_fork(host: Host, obstacle: str) -> str:
    """Return the error message for a process that cannot be forked; it lists alternatives that work in this host."""
    fixes = []
    if "CUDA" not in obstacle and "used in this process" in obstacle:
        fixes.append(f"{host.restart}, and do not use the device before the run")
    if "CUDA" in obstacle:
        fixes.append(f"{host.restart}, and do not use the GPU before the run (no .cuda(), no .to('cuda'))")
    if host.can_spawn:
        fixes.append("use strategy='ddp_spawn' (or a strategy's start_method='spawn'), which starts fresh processes")
    if not host.is_script:
        fixes.append(_USE_A_FILE)
    text = "; or ".join(fixes)
    return f"The run starts its processes by forking this process, but {obstacle}. {text[0].upper()}{text[1:]}."


def _running() -> Iterator[str]:
    """Yield the names of modules and their top-level packages on the call stacks of this thread and the main thread."""
    here = inspect.currentframe()
    for innermost in (here, sys._current_frames().get(threading.main_thread().ident or 0, here)):
        for frame, _ in traceback.walk_stack(innermost):
            name = str(frame.f_globals.get("__name__", ""))
            yield name
            yield name.partition(".")[0]


def _shell() -> Any:
    """Return IPython's shell, or None. Asks IPython itself, because a closed shell leaves traces in ``builtins``."""
    ipython: Any = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None

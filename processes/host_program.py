"""What runs this process: a script, which can run again for each rank, or another program, such as pytest.

:func:`find_host` collects the facts, :func:`recognize` tells the host by them, and :func:`start_method_in` says how
ranks start there.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .hydra_program import is_sweep

StartMethod = Literal["auto", "popen", "spawn", "fork", "forkserver"]
START_METHODS = ("auto", "popen", "spawn", "fork", "forkserver")

_A_FILE = "put the code into a file and run `python file.py`"


@dataclass(frozen=True)
class Host:
    """A program that runs this process.

    Args:
        name: in a sentence.
        is_script: whether the same command gives each rank what this process does.
        can_spawn: whether a fresh process can import what is defined here.
        restart: how to begin with a process that has not used the GPU.
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
WORKER = Host("a process that multiprocessing started", can_spawn=True)
SWEEP = Host("a Hydra sweep", can_spawn=True)
COMMAND = Host("`python -c`")
STANDARD_INPUT = Host("a program read from standard input")
EMBEDDED = Host("a Python inside another program (sys.executable is empty)")

#: Modules whose functions are under way while the host runs the user's code.
_RUNNING = {
    "_pytest": PYTEST,
    "unittest.case": UNITTEST,
    "unittest.suite": UNITTEST,
    "unittest.main": UNITTEST,
    "doctest": DOCTEST,
}


@dataclass(frozen=True)
class Facts:
    """What tells hosts apart.

    Args:
        running: modules whose functions are under way.
        file: that of ``__main__``; None or ``"<stdin>"`` where it has none.
        module: what ``python -m`` was given.
        options: those of the command line, up to the script.
        executable: ``sys.executable``.
        kernel: in a Jupyter kernel.
        ipython: under IPython.
        interactive: at a prompt.
        frozen: packed into a program by PyInstaller and its like.
        worker: started by multiprocessing.
        sweep: Hydra runs one job after another.
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
        """Whether ``__main__`` is a file or a module, and not text that was typed."""
        return self.module is not None or not (self.file is None or self.file.startswith("<"))


def recognize(facts: Facts) -> Host:
    """The host that the facts speak of."""
    lent = (
        (facts.kernel, NOTEBOOK),
        (facts.ipython, IPYTHON),
        (facts.frozen, FROZEN),
        *((module in facts.running, host) for module, host in _RUNNING.items()),
        (facts.worker, WORKER),
        (facts.sweep, SWEEP),
        (facts.interactive, INTERACTIVE),
        (not facts.executable, EMBEDDED),
    )
    found = next((host for is_it, host in lent if is_it), None)
    if found is not None:
        return found
    if not facts.has_file:
        return COMMAND if "-c" in facts.options else STANDARD_INPUT
    return SCRIPT


def find_host() -> Host:
    """The host of this process, as it stands now."""
    return recognize(_facts())


def has_file() -> bool:
    """Whether a fresh process can import what ``__main__`` defines, because it is a file or a module."""
    return _facts().has_file


def _facts() -> Facts:
    main = sys.modules.get("__main__")
    module = getattr(getattr(main, "__spec__", None), "name", None)
    shell = _shell()
    return Facts(
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
    """How the ranks of a run start in this host.

    Args:
        host: what runs this process.
        asked: the strategy's ``start_method``.
        obstacle: why this process cannot be forked, from :func:`fork_obstacle`.
        num_nodes: machines.

    Raises:
        RuntimeError: this host cannot start them so.
    """
    if host.is_script:
        return "popen" if asked == "auto" else asked
    if num_nodes > 1:
        raise RuntimeError(
            f"A run on {num_nodes} machines starts with the same command on each, but this is {host.name}, so there is "
            f"no such command. To fix it, {_A_FILE} on each machine."
        )
    if asked == "popen":
        raise RuntimeError(
            f"start_method='popen' starts several processes by running the script again, but this is {host.name}, so "
            f"there is no script. Leave start_method out, which copies this process here; or {_A_FILE}."
        )
    if asked == "auto":
        return "spawn" if obstacle and host.can_spawn else "fork"
    return asked


def fork_obstacle(devices_kind: str) -> str | None:
    """Why a copy of this process could not compute; None if it could."""
    import torch

    if not hasattr(os, "fork"):
        return f"{sys.platform} cannot copy a process"
    if devices_kind == "cuda" and torch.cuda.is_initialized():
        return "CUDA was already used in this process, and a forked copy of it cannot use CUDA again"
    return None


def refusal_to_fork(host: Host, obstacle: str) -> str:
    """The sentence for a fork that is impossible, with what works in this host."""
    fixes = []
    if "CUDA" in obstacle:
        fixes.append(f"{host.restart}, and do nothing on the GPU before (no .cuda(), no .to('cuda'))")
    if host.can_spawn:
        fixes.append("use strategy='ddp_spawn' (or a strategy's start_method='spawn'), which starts fresh processes")
    if not host.is_script:
        fixes.append(_A_FILE)
    text = "; or ".join(fixes)
    return f"Several processes start as copies of this one, but {obstacle}. {text[0].upper()}{text[1:]}."


def _running() -> Iterator[str]:
    """Modules whose functions this thread and the main one are in; a package's by the package's name too."""
    frames = sys._current_frames()
    for frame in (sys._getframe(), frames.get(threading.main_thread().ident or 0)):
        while frame is not None:
            name = str(frame.f_globals.get("__name__", ""))
            yield name
            yield name.partition(".")[0]
            frame = frame.f_back


def _shell() -> Any:
    """IPython's shell, if there is one. A library that made one and ended it leaves only a mark in ``builtins``."""
    ipython: Any = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None

"""Starts Python programs from a server that has torch imported.

A fresh interpreter needs two seconds to import torch and what a first fit uses; a fork of one that has done so needs
some 30 ms. Within :func:`programs`, where every test runs that is not marked ``cold``, ``subprocess`` starts Python
programs so: the process is a child of the caller, with its own arguments, environment, folder, streams, session and
``__main__``, and ends like any interpreter. Paceline itself is not imported beforehand. What a fork cannot give
(options of the interpreter, other settings that are read when Python or torch starts, another program) is started as
usual. The program starts its own Python processes this way too: launchers their ranks, ``multiprocessing`` its spawned
ones.

What it cannot show, and tests of that are ``cold``: what an import costs or pulls in, what memory a process takes, hash
seeds that differ between processes, and how an interpreter takes itself down.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import inspect
import io
import multiprocessing.util
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn

#: What a first fit, a launcher and a rank import of other packages.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.utils.tensorboard",
    "torchmetrics",
    "rich.console",
    "rich.live",
    "rich.progress",
    "rich.table",
    "rich.tree",
    "yaml",
)
#: Environment variables that are read when Python or torch starts: with others, a program gets a fresh interpreter.
FIXED = ("GLIBC_", "KMP_", "LD_", "MALLOC_", "MKL_", "PYTHON", "TORCH_CPP_", "TORCH_DISTRIBUTED_", "TORCH_LOGS")
#: Of those, the ones that are carried over to a fork.
TAKEN = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONUNBUFFERED")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_COLD, _COLD_SPAWN = subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds
_server: _Server | None = None


@contextmanager
def programs() -> Iterator[None]:
    """Within this, ``subprocess`` and ``multiprocessing`` start Python programs from the server."""
    _start_with(_execute_child, _spawn)
    try:
        yield
    finally:
        _start_with(_COLD, _COLD_SPAWN)


def _start_with(execute_child: Any, spawn: Any) -> None:
    subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds = execute_child, spawn  # type: ignore


def _execute_child(self: subprocess.Popen[Any], *args: Any, **options: Any) -> None:
    """``subprocess.Popen._execute_child``: start the process, note its id and close its ends of the pipes."""
    asked = inspect.signature(_COLD).bind(self, *args, **options).arguments
    program = _program(asked["args"], asked["executable"], asked["env"])
    special = any(asked.get(name) is not None for name in ("preexec_fn", "gid", "gids", "uid")) or asked["shell"]
    special = special or asked.get("process_group", -1) not in (None, -1) or not asked["close_fds"]
    cwd = os.path.join(os.getcwd(), os.fspath(asked["cwd"] or ""))
    if program is None or special or not os.path.isdir(cwd) or not _can_serve():
        _COLD(self, *args, **options)
        return
    streams = enumerate(asked[name] for name in ("p2cread", "c2pwrite", "errwrite"))
    fds = {number: number if fd == -1 else fd for number, fd in streams} | {fd: fd for fd in asked["pass_fds"]}
    environ = os.environ if asked["env"] is None else asked["env"]
    try:
        self.pid = _start(program, dict(environ), cwd, fds, bool(asked["start_new_session"]))
    finally:
        ends = [asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]
    self._child_created = True


def _spawn(path: bytes, args: list[Any], passfds: Any) -> int:
    """``multiprocessing.util.spawnv_passfds``; not for the trackers it starts, which import next to nothing."""
    words = [os.fsdecode(word) for word in args]
    program = _program(words, path, None) if any("spawn_main" in word for word in words) else None
    if program is None or not _can_serve():
        return _COLD_SPAWN(path, args, passfds)
    return _start(program, dict(os.environ), os.getcwd(), {fd: fd for fd in (0, 1, 2, *passfds)}, False)


def _program(args: Any, executable: Any, env: Any) -> list[str] | None:
    """The words after ``python``, if a fork can be that program."""
    words = [os.fsdecode(word) for word in args] if isinstance(args, list | tuple) else []
    if sys.platform != "linux" or not words or os.fsdecode(executable or words[0]) != sys.executable:
        return None
    program = words[1:] or ["-"]
    known = program[0].endswith(".py") or program[0] in ("-", "-c", "-m")
    alike = _settings(os.environ if env is None else env) == _STARTED_WITH
    return program if known and alike else None


def _settings(environ: Any) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(FIXED) and name not in TAKEN}


_STARTED_WITH = _settings(os.environ)


class _Server:
    """The process that forks, seen from the one whose children the forks become."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.owner = os.getpid()


def _can_serve() -> bool:
    global _server
    if _server is not None and _server.owner != os.getpid():
        return False  # this is a fork of the server's owner
    if _server is None:
        ours, theirs = socket.socketpair()
        text = (
            f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import warm; warm.main({theirs.fileno()})"
        )
        command = [sys.executable, "-c", text, " " * 8000]  # room for the command lines of its forks
        room = {"PACELINE_TESTS_ROOM": " " * 50_000}  # ... and for their environments
        options: Any = {"pass_fds": [theirs.fileno()], "stdin": subprocess.DEVNULL, "cwd": "/"}
        options |= {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
        started = subprocess.Popen(command, env=os.environ | room, **options)
        theirs.close()
        started.returncode = 0  # nobody waits for it: it ends with this process
        _server = _Server(ours)
    return True


def _start(program: list[str], environ: dict[str, str], cwd: str, fds: dict[int, int], new_session: bool) -> int:
    assert _server is not None
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    ignored = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    there = {number: fd for number, fd in fds.items() if _is_open(fd)}
    request = pickle.dumps((program, environ, cwd, list(there), new_session, os.getpgrp(), list(blocked), ignored))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # so that the fork becomes a child of this process
    try:
        socket.send_fds(_server.connection, [struct.pack("!Q", len(request))], list(there.values()))
        _server.connection.sendall(request)
        answer = _receive(_server.connection, 8)
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)
    (pid,) = struct.unpack("!Q", answer)
    return pid


def _is_open(fd: int) -> bool:
    with suppress(OSError):
        return fcntl.fcntl(fd, fcntl.F_GETFD) >= 0
    return False


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def main(fd: int) -> None:
    """Serve the process that started this one; return only by ending, as the server or as a program."""
    for name in PRELOADED:
        import_module(name)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # what is sent to the group of a program is not for its server
    connection = socket.socket(fileno=fd)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page
    while True:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        request, fds = _serve(connection)
        connection.close()
        program, environ, cwd, numbers, new_session, group, blocked, ignored = request
        if new_session:
            os.setsid()
        elif group != os.getpgrp():
            with suppress(OSError):
                os.setpgid(0, group)
        _take(fds, numbers)
        ours, connection = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            os.setpgid(0, 0)
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in numbers:
                os.dup2(nothing, number)
            os.close(nothing)
            continue
        connection.close()
        _become_owner(ours)
        _program_begins(environ, cwd, blocked, ignored)
        _run(program)


def _serve(connection: socket.socket) -> tuple[Any, list[int]]:
    """Fork for each request; returns in the forks."""
    while True:
        head, fds, _, _ = socket.recv_fds(connection, 8, 250)
        if not head:
            os._exit(0)
        request = pickle.loads(_receive(connection, struct.unpack("!Q", head)[0]))
        waiting, go = os.pipe()
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                os.close(go)
                os.close(told)
                os.close(tell)
                os.read(waiting, 1)  # until the process between is gone, and this one has its real parent
                os.close(waiting)
                return request, fds
            os.write(tell, struct.pack("!Q", pid))
            os._exit(0)
        os.close(waiting)
        os.close(tell)
        for fd in fds:
            os.close(fd)
        answer = os.read(told, 8)
        os.waitpid(between, 0)
        os.close(told)
        os.write(go, b"1")
        os.close(go)
        connection.sendall(answer)


def _take(fds: list[int], numbers: list[int]) -> None:
    """Give the descriptors the numbers they have in the program, and leave no other."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 500) for fd in fds]
    for fd in fds:
        os.close(fd)
    for number in {0, 1, 2} - set(numbers):
        with suppress(OSError):
            os.close(number)
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)


def _become_owner(connection: socket.socket) -> None:
    """Let every Python program that this program starts be forked from its own server."""
    global _server
    _server = _Server(connection)
    os.register_at_fork(after_in_child=connection.close)
    _start_with(_execute_child, _spawn)


def _program_begins(environ: dict[str, str], cwd: str, blocked: list[Any], ignored: list[Any]) -> None:
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    base = [folder for folder in sys.path if folder not in (*inherited, "", os.path.dirname(__file__))]
    os.environ.clear()
    os.environ.update(environ)
    for number in _SIGNALS:
        handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    _prctl(_PR_SET_PDEATHSIG, 0)
    os.chdir(cwd)
    sys.path[:] = [*(folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder), *base]
    sys.dont_write_bytecode = bool(environ.get("PYTHONDONTWRITEBYTECODE"))
    import torch

    torch.set_num_threads(int(environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    unbuffered = bool(environ.get("PYTHONUNBUFFERED"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):
                terminal = os.isatty(stream.fileno())
                stream.reconfigure(
                    line_buffering=stream is sys.stderr or terminal or unbuffered, write_through=unbuffered
                )
    sys.modules["numpy"].random.seed()


def _run(program: list[str]) -> NoReturn:
    """Do what ``python *program`` does."""
    sys.orig_argv[:] = [sys.executable, *([] if program == ["-"] else program)]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    with open("/proc/self/stat") as file:
        fields = [0, 0, *file.read().rpartition(")")[2].split()]  # those of proc(5), from 1 on
    _show(sys.orig_argv, int(fields[47]), int(fields[48]))
    _show([f"{name}={value}" for name, value in os.environ.items()], int(fields[49]), int(fields[50]))
    first, *rest = program
    try:
        if first == "-m":
            sys.argv[:] = rest
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        elif os.path.isdir(first) or zipfile.is_zipfile(first):
            sys.argv[:] = program
            sys.path.insert(0, first)
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        else:
            if first == "-c":
                sys.argv[:] = ["-c", *rest[1:]]
                sys.path.insert(0, "")
                text, name = rest[0], "<string>"
            elif first == "-":
                sys.argv[:] = program
                sys.path.insert(0, "")
                text, name = sys.stdin.read(), "<stdin>"
            else:
                sys.argv[:] = program
                sys.path.insert(0, os.path.dirname(os.path.realpath(first)))
                main.__file__ = name = os.path.abspath(first)
                with open(first, "rb") as file:
                    text = file.read()
            exec(compile(text, name, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        _end(error.code)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        _end(-signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)
    _end(0)


def _show(words: Iterable[str], start: int, end: int) -> None:
    """Write into the memory that /proc shows what it would show of an interpreter of its own."""
    assert end - start > 4096
    line = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def _end(code: Any) -> NoReturn:
    """End as an interpreter does, but for the destruction of every module, which would copy every page."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if code is not None and code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit((code or 0) & 0xFF)

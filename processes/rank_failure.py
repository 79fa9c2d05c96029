"""Find out which process failed first, and report that failure.

When a process fails, the others lose their connection to it a moment later and fail too. Therefore, each process writes
its exception and the time to a file instead of printing them, and the launcher shows the first exception.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

#: Environment variable in processes that Paceline started: the process id of the launcher that waits for them.
LAUNCHED = "PACELINE_LAUNCHED"
#: Environment variable with the file where a started process writes its failure. Torch elastic sets it.
_FILE = "TORCHELASTIC_ERROR_FILE"
_STAMP = "_paceline_failed_at"
_WORKER = os.path.join(os.path.dirname(__file__), "launched_worker.py")

#: Error messages from torch and NCCL in a process that has lost its peer.
_PEER_LOST = re.compile(
    r"closed by peer|reset by peer|closed by remote|remote (process|peer)|broken pipe|recvValue failed|sendBytes failed"
    r"|connectFullMesh|socket.{0,20}(closed|timed? ?out)|connection (was )?(closed|refused|lost|aborted)"
    r"|^torch\.distributed\.Dist(Network|Store|Backend)Error|ncclRemoteError|ncclSystemError",
    re.IGNORECASE,
)
#: The signal for each first word of faulthandler's messages; any other message means SIGABRT.
_CRASHES = {
    "Segmentation": signal.SIGSEGV,
    "Floating": signal.SIGFPE,
    "Bus": getattr(signal, "SIGBUS", 7),
    "Illegal": signal.SIGILL,
}
_BELOW_THE_WORK = re.compile(r"\n  File [^\n]*\blaunch\.py\", line \d+ in _run\n.*", re.DOTALL)
_ENDED = (signal.SIGTERM, signal.SIGINT)

_registered = False


def register_failure_hook() -> None:
    """Report this process's uncaught exception to its launcher, which prints only the first failure.

    This also makes the process exit when its launcher is killed. Does nothing in a process that Paceline did not start.
    """
    global _registered
    agent = os.environ.get(LAUNCHED, "")
    if _registered or not agent.isdigit() or not os.environ.get(_FILE):
        return
    if os.getppid() != int(agent):
        if not _is_alive(int(agent)):
            os.kill(os.getpid(), signal.SIGTERM)
        return
    _registered = True
    sys.excepthook = _write_uncaught
    end_with(int(agent))


def note_failure(error: BaseException) -> None:
    """Record that ``error`` ended the run, and when. Called before cleanup makes the other processes fail too."""
    _moment(error)
    if _registered:
        write_failure(error, Path(os.environ[_FILE]))


def write_failure(error: BaseException, file: Path) -> None:
    """Write an exception, its traceback and the time at which it was first seen, in torch elastic's format."""
    moment = _moment(error)
    lines = traceback.format_exception(type(error), error, _users(error.__traceback__))
    details = {"py_callstack": "".join(lines), "timestamp": str(moment // 10**9), "time_ns": moment}
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    interrupted = isinstance(error, KeyboardInterrupt)
    data = {"message": {"message": summary, "interrupted": interrupted, "extraInfo": details}, "rank": _rank()}
    part = file.with_suffix(".part")
    part.write_text(json.dumps(data), encoding="utf-8")
    part.replace(file)


def note_crash(file: Path) -> None:
    """Write all threads' stack traces to ``file`` if native code crashes, which raises no Python exception.

    This does not cover forks of this process, or programs that enable faulthandler themselves.
    """
    crash = file.open("w", encoding="utf-8")
    crash.write(f"{_rank()}\n")
    crash.flush()
    faulthandler.enable(crash)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_say_crash)


def _say_crash() -> None:
    if sys.__stderr__ is None:
        faulthandler.disable()
    else:
        faulthandler.enable(sys.__stderr__)


def _users(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames in which ``paceline launch`` runs the script."""
    frame, last = trace, None
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == _WORKER:
            last = frame
        frame = frame.tb_next
    first = trace if last is None else last.tb_next
    while last is not None and first is not None and "runpy" in first.tb_frame.f_code.co_filename:
        first = first.tb_next
    return first


def _write_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    try:
        write_failure(error.with_traceback(trace), Path(os.environ[_FILE]))
    except OSError:
        sys.__excepthook__(kind, error, trace)


def _moment(error: BaseException) -> int:
    """Return the time in nanoseconds when this exception, or an exception that caused it, was first seen."""
    now = time.time_ns()
    first, at, seen = now, error, set[int]()
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        first = min(first, getattr(at, _STAMP, now))
        at = at.__cause__ or at.__context__
    setattr(error, _STAMP, first)
    return first


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def end_with(agent: int, ask: bool = True, child: bool = True) -> None:
    """Stop this process if its launcher is killed, because the launcher can then no longer stop it.

    A thread checks once per second. It sends SIGTERM, so that a step can finish, and kills the process after the time
    that torch elastic allows. Until the process group exists, there is no step to finish, and torch waits for the other
    processes without letting threads run. During that time, the kernel kills the process if the launcher dies (on Linux
    only).

    Args:
        agent: process id of the launcher.
        ask: whether to send SIGTERM first; False if the system itself sends a signal.
        child: whether ``agent`` is this process's parent.
    """
    ready = threading.Event()
    threading.Thread(target=_watch, args=(agent, ask, child, ready), name="paceline-agent", daemon=True).start()
    ready.wait()


def _watch(agent: int, ask: bool, child: bool, ready: threading.Event) -> None:
    def is_there() -> bool:
        return os.getppid() == agent if child else _is_alive(agent)

    def has_joined() -> bool:
        return getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)()

    _when_parent_dies(int(getattr(signal, "SIGKILL", signal.SIGTERM)))
    if not is_there():
        os._exit(1)
    ready.set()
    joined = False
    while is_there():
        if not joined and has_joined():
            joined = True
            _when_parent_dies(0)
        time.sleep(1)
    if ask:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")))
    os._exit(1)


def _when_parent_dies(number: int) -> None:
    """Make Linux send this process a signal when its parent dies (0 means none). Other threads keep their setting."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, number)


# ---- in the launcher -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """Describes how one process failed.

    Args:
        rank: rank of the process.
        exit_code: the process's exit status, or the negative number of the signal that killed it; None if unknown.
        moment: time of the failure in nanoseconds since the Unix epoch.
        text: the traceback, or the stack traces if a signal killed the process; may be empty.
        summary: the traceback's last line; empty if the process raised no exception.
        interrupted: whether Ctrl-C stopped the process.
    """

    rank: int
    exit_code: int | None
    moment: int
    text: str = ""
    summary: str = ""
    interrupted: bool = False

    @property
    def status(self) -> int:
        """The exit status that a shell would report for the process."""
        if self.summary:
            return self.exit_code if self.exit_code is not None and self.exit_code > 0 else 1
        code = 1 if self.exit_code is None else self.exit_code
        return 128 - code if code < 0 else code

    def describe(self, world_size: int) -> str:
        """Return one line that describes the failure, followed by the traceback if there is one."""
        who = f"Rank {self.rank} of {world_size}"
        if self.summary:
            return f"{who} failed (exit status {self.status}):\n{self.text.rstrip()}"
        if self.exit_code is None or self.exit_code >= 0:
            return f"{who} failed (exit status {self.status}) without an exception. Its output is above."
        killed = f"{who} was killed by signal {-self.exit_code} ({signal_name(-self.exit_code)})"
        if self.text:
            return f"{killed}, because native code crashed. Stack traces at the crash:\n{self.text.rstrip()}"
        return f"{killed}{_why(-self.exit_code)}."

    def order(self) -> tuple[int, int]:
        """Sort key: failures with their own cause come first, then lost peers, then signals to stop.

        Within each kind, earlier failures come first.
        """
        code = self.exit_code or 0
        if self.interrupted or (not self.summary and code in (*(-s for s in _ENDED), *(128 + s for s in _ENDED))):
            return 2, self.moment
        return int(_PEER_LOST.search(self.summary) is not None), self.moment


def failures(exits: dict[int, Any], files: list[Path], crashes: Sequence[Path] = ()) -> list[Failure]:
    """Return the failures of all processes that failed; the failure that caused the others comes first.

    Args:
        exits: torch elastic's ``ProcessFailure`` objects, keyed by rank.
        files: files from :func:`write_failure`.
        crashes: files from :func:`note_crash`.
    """
    found: dict[int, Failure] = {}
    for rank, seen in exits.items():
        # Torch elastic records whole seconds. For a signal, which nothing else explains, use the start of the second;
        # for an exit status, use the end.
        found[rank] = Failure(rank, seen.exitcode, (seen.timestamp + (seen.exitcode > 0)) * 10**9)
    for file in crashes if exits else ():
        who, _, text = file.read_text(encoding="utf-8", errors="replace").partition("\n")
        code = _crash_signal(text)
        if text and (int(who) not in found or found[int(who)].exit_code == code):
            found[int(who)] = Failure(int(who), code, file.stat().st_mtime_ns, _stack(text))
    for file in files:
        data = json.loads(file.read_text(encoding="utf-8"))
        message, rank = data["message"], data["rank"]
        code = found[rank].exit_code if rank in found else None
        details = message["extraInfo"]
        found[rank] = Failure(
            rank, code, details["time_ns"], details["py_callstack"], message["message"], message["interrupted"]
        )
    return sorted(found.values(), key=Failure.order)


def _crash_signal(text: str) -> int:
    """Return the exit code of a process whose faulthandler wrote the given text."""
    named = (number for words, number in _CRASHES.items() if words in text.partition("\n")[0])
    return -next(named, signal.SIGABRT)


def _stack(text: str) -> str:
    """Return the threads' stack traces, without Paceline's threads and the frames that called the user's function."""
    threads = text.partition("\n\nExtension modules:")[0].split("\n\n")[1:]
    return "\n\n".join(_BELOW_THE_WORK.sub("", one) for one in threads if " in _watch\n" not in one)


def signal_name(number: int) -> str:
    """Return a signal's name, such as ``"SIGKILL"``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _why(number: int) -> str:
    if number == getattr(signal, "SIGKILL", 9):
        return (
            ", probably by the system because memory ran out. Check the system log, and use smaller batches or fewer "
            "workers"
        )
    if number in (signal.SIGSEGV, signal.SIGABRT, getattr(signal, "SIGBUS", 7)):
        return ", which means that native code crashed. Set PYTHONFAULTHANDLER=1 to see where"
    return ""

"""Real processes for distributed tests: ``from rank_processes import ranks``."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import os
import pickle
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.processes import process_group

#: What ends a test that hangs. Nothing takes nearly as long, on a busy machine either.
LIMIT_SECONDS = 120.0
_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT

#: First line of a script whose processes share one pipe: a line is one write, since torch starts them unbuffered.
WHOLE_LINES = (
    "import os; print = lambda *words, file=None, **_: "
    "os.write(2 if file else 1, (' '.join(map(str, words)) + chr(10)).encode()) and None\n"
)


def until(what: str, condition: Callable[[], Any], limit: float = LIMIT_SECONDS) -> Any:
    """Wait until ``condition()`` is true, and return what it then is. No test waits for so many seconds instead.

    Raises:
        AssertionError: it was not within ``limit`` seconds; the text says ``what`` was waited for.
    """
    deadline = time.monotonic() + limit
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {limit:.0f} s in vain until {what}"
        time.sleep(0.005)
    return found


@contextlib.contextmanager
def own_port() -> Iterator[int]:
    """A free port for a program that takes it only later. The system gives those of this range to nobody by itself."""
    for port in range(20_000, 30_000):
        if token := reserved(port):
            with token:
                yield port
            return
    raise AssertionError("no port is free")


def reserved(port: int) -> socket.socket | None:
    """What keeps the other tests that run now off a port while it is open; None where the port is taken."""
    token = socket.socket(socket.AF_UNIX)
    try:
        token.bind(f"\0paceline-tests-port-{port}")  # a name without a file, which goes with the process
        with socket.socket() as probe:
            probe.bind(("", port))
    except OSError:
        token.close()
        return None
    return token


class RanksError(AssertionError):
    """Some ranks raised; ``errors`` has their exceptions by rank (None where there was none)."""

    def __init__(self, errors: list[BaseException | None], text: str) -> None:
        super().__init__(text)
        self.errors = errors


def ranks(count: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT_SECONDS) -> list[Any]:
    """Run ``function(*args)`` in ``count`` forked processes that ``torchrun`` might have started.

    Each has RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment; joining a
    process group is the function's part (a Trainer does). Returns what each returned, by rank.

    Raises:
        RanksError: a rank raised, ended by itself, or did not end in ``limit`` seconds; the text has every traceback.
    """
    store = _serve()
    readers, pids = [], []
    # Nobody calls the store before the last one is forked: its thread would take locks that a fork copies as taken.
    gate, opener = os.pipe()
    for rank in range(count):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os.close(opener)
            os.read(gate, 1)
            _in_child(writer, rank, count, store.port, function, args)
        os.close(writer)
        readers.append(reader)
        pids.append(pid)
    os.close(opener)
    os.close(gate)
    try:
        answers, waiting = _collect(readers, time.monotonic() + limit)
        for pid in [pids[readers.index(reader)] for reader in waiting]:
            os.kill(pid, signal.SIGUSR1)  # says on standard error where it hangs, and ends
            with contextlib.suppress(AssertionError):
                until("the process has ended", partial(os.waitid, os.P_PID, pid, _ENDED), limit=5)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for reader in readers:
            os.close(reader)
    found = [_load(answer) for answer in answers]
    if any(error is not None for _, error, _ in found):
        text = "\n".join(f"rank {rank}: {story}" for rank, (_, error, story) in enumerate(found) if error is not None)
        raise RanksError([error for _, error, _ in found], text)
    return [value for value, _, _ in found]


def wait_at_most(seconds: float) -> None:
    """From here on, this rank waits so long for others in its groups, for which they had all the time to join."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def _serve() -> dist.TCPStore:
    """A store at a free port. Two programs may get the same one at one moment; the later one then tries again."""
    for _ in range(10):
        with contextlib.suppress(dist.DistNetworkError):
            return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _in_child(
    writer: int, rank: int, count: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    status: tuple[Any, BaseException | None, str] = (None, None, "")
    logging.getLogger().handlers.clear()  # pytest's own: what a rank says goes to standard error
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True, chain=True)
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        status = (function(*args), None, "")
    except BaseException as error:
        status = (None, error, traceback.format_exc())
    try:
        answer = _dump(status)
    except Exception:
        answer = _dump((None, RuntimeError("the answer cannot be pickled"), status[2] or repr(status[0])))
    try:
        with os.fdopen(writer, "wb") as stream:
            stream.write(answer)
        if status[1] is None:
            process_group.leave()
    except BaseException:
        traceback.print_exc()  # raised further, it would make this process a second pytest
    os._exit(0)


def _dump(status: tuple[Any, BaseException | None, str]) -> bytes:
    value, error, story = status
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    stream = io.BytesIO()
    torch.save((value, error, story), stream)
    return stream.getvalue()


def _load(answer: bytes) -> tuple[Any, BaseException | None, str]:
    if not answer:
        return None, RuntimeError("no answer"), "ended or hung without an answer"
    return torch.load(io.BytesIO(answer), weights_only=False)


def _collect(readers: list[int], deadline: float) -> tuple[list[bytes], list[int]]:
    answers = dict.fromkeys(readers, b"")
    with selectors.DefaultSelector() as selector:
        for reader in readers:
            selector.register(reader, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                data = os.read(key.fd, 1 << 20)
                answers[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
        waiting = [key.fd for key in selector.get_map().values()]
    return [answers[reader] for reader in readers], waiting

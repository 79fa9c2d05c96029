"""Relay the output of forked ranks to this process's own output: a notebook cell or a captured stream.

A fork of this process cannot write to a stream that is not a plain file, because the text would stay in the fork's
memory, or go through a socket that belongs to this process. So each rank writes to pipes, and a thread of this process
reads them.
"""

from __future__ import annotations

import codecs
import contextvars
import io
import logging
import os
import pickle
import selectors
import sys
import threading
from collections.abc import Callable
from typing import Any

from .. import messages

_STREAMS = ("stdout", "stderr")
_CHUNK = 1 << 16
_LENGTH_BYTES = 8
#: Methods of IPython's publisher that display something.
_DISPLAYS = ("publish", "clear_output")


class Relay:
    """Context manager that relays the output of one run's ranks. Each rank must first call :meth:`enter`.

    Args:
        count: number of ranks to fork.
    """

    def __init__(self, count: int) -> None:
        self._old = {name: getattr(sys, name) for name in _STREAMS}
        names = [name for name, stream in self._old.items() if not _is_plain(stream)]
        self._publisher = _publisher()
        if self._publisher is not None:
            names.append("display")
        self._pipes = [{name: os.pipe() for name in names} for _ in range(count if names else 0)]
        self._end, self._ended = os.pipe()
        self._lost: Exception | None = None
        # A notebook uses the thread's context to find the cell that an output belongs to.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._relay,), name="paceline-relay", daemon=True
        )

    def __enter__(self) -> Relay:
        if self._pipes:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Relay the ranks' remaining output, and close the pipes."""
        os.close(self._ended)
        if self._pipes:
            self._thread.join()
        os.close(self._end)
        for pipes in self._pipes:
            for ends in pipes.values():
                for end in ends:
                    os.close(end)
        if self._lost is not None:
            messages.warn(f"Some of the ranks' output could not be shown: {self._lost!r}.")

    # ---- in a rank -------------------------------------------------------------------------------------------------

    def enter(self, rank: int) -> None:
        """Redirect this rank's output to its pipes. The rank itself calls this; ``rank`` is its local rank."""
        for index, pipes in enumerate(self._pipes):
            for reader, writer in pipes.values():
                os.close(reader)
                if index != rank:
                    os.close(writer)
        os.close(self._end)
        os.close(self._ended)
        for name, (_, writer) in self._pipes[rank].items() if self._pipes else ():
            if name == "display":
                self._send_displays(writer)
            else:
                stream = open(writer, "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
                setattr(sys, name, stream)
        _rebind_log({id(old): getattr(sys, name) for name, old in self._old.items()})

    def _send_displays(self, writer: int) -> None:
        lock = threading.Lock()

        def send(name: str, *args: Any, **kwargs: Any) -> None:
            message = pickle.dumps((name, args, kwargs))
            with lock:
                _write(writer, len(message).to_bytes(_LENGTH_BYTES, "big") + message)

        for name in _DISPLAYS:
            setattr(self._publisher, name, lambda *args, name=name, **kwargs: send(name, *args, **kwargs))
        sys.modules["ipywidgets"] = None  # type: ignore[reportArgumentType]  # widgets only work in the kernel's process

    # ---- in this process -------------------------------------------------------------------------------------------

    def _relay(self) -> None:
        """Relay output until the ranks have exited and the pipes are empty. Runs in the relay's thread."""
        receivers = {pipes[name][0]: self._receiver(name) for pipes in self._pipes for name in pipes}
        with selectors.DefaultSelector() as selector:
            for reader in (*receivers, self._end):
                os.set_blocking(reader, False)
                selector.register(reader, selectors.EVENT_READ)
            ready = list[int]()
            while self._end not in ready:
                ready = [key.fd for key, _ in selector.select()]
                for reader in ready:
                    self._relay_once(reader, receivers)
            for reader in receivers:
                while self._relay_once(reader, receivers):
                    pass

    def _relay_once(self, reader: int, receivers: dict[int, Callable[[bytes], Any]]) -> bool:
        """Relay the content of one pipe; return False if the pipe is empty.

        Errors are reported later, so that no rank blocks.
        """
        data = _read(reader)
        if data:
            try:
                receivers[reader](data)
            except Exception as error:
                self._lost = self._lost or error
        return bool(data)

    def _receiver(self, name: str) -> Callable[[bytes], Any]:
        """Return the function that receives the bytes of one pipe."""
        if name == "display":
            return _Displays(self._publisher)
        decode, write = codecs.getincrementaldecoder("utf-8")("replace").decode, self._old[name].write
        return lambda data: write(decode(data))


class _Displays:
    """Collects the bytes of display messages, and displays each message when it is complete."""

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher
        self._data = b""

    def __call__(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._data[:_LENGTH_BYTES], "big")
            if len(self._data) < end:
                return
            name, args, kwargs = pickle.loads(self._data[_LENGTH_BYTES:end])
            self._data = self._data[end:]
            getattr(self._publisher, name)(*args, **kwargs)


def _is_plain(stream: Any) -> bool:
    """Return True if a fork of this process can write to the stream too."""
    if stream is None:
        return True
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return isinstance(stream, io.TextIOWrapper)


def _publisher() -> Any:
    """Return IPython's object that displays output in a notebook cell; None outside a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    return None if getattr(shell, "kernel", None) is None else shell.display_pub


def _rebind_log(streams: dict[int, Any]) -> None:
    """Make logging handlers write to a rank's streams; remove pytest's handlers, whose records would be lost."""
    loggers = [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]
    for logger in loggers:
        for handler in list(getattr(logger, "handlers", ())):
            old = getattr(handler, "stream", None)
            new = streams.get(id(old))
            if new is not None and isinstance(handler, logging.StreamHandler):
                if new is not old:  # the stream of a handler that always uses sys.stderr cannot be set
                    handler.stream = new
            elif type(handler).__module__.startswith("_pytest."):
                logger.removeHandler(handler)  # type: ignore[reportAttributeAccessIssue]


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, _CHUNK)
    except BlockingIOError:
        return b""


def _write(writer: int, data: bytes) -> None:
    while data:
        data = data[os.write(writer, data) :]

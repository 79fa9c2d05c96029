"""What a person sees: ``from terminals import Notebook, seen``, on a real pseudo-terminal, in a pipe, in a notebook."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
import traceback
from collections.abc import Callable
from typing import Any

LIMIT_SECONDS = 120.0
_CONTROL = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")
_UNSET = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "JUPYTER_COLUMNS")


class Screen:
    """A terminal of ``columns`` columns that scrolls without end; raises at a control sequence it does not know.

    Attributes:
        rows: the lines, top first.
    """

    def __init__(self, columns: int) -> None:
        self.columns, self.rows, self.row, self.column = columns, [""], 0, 0

    def feed(self, text: str) -> Screen:
        """Show ``text``."""
        at = 0
        while at < len(text):
            letter = text[at]
            if letter == "\x1b":
                found = _CONTROL.match(text, at)
                assert found, repr(text[at : at + 20])
                self._control(*found.groups())
                at = found.end()
                continue
            at += 1
            if letter == "\r":
                self.column = 0
            elif letter == "\n":
                self._to(self.row + 1)
            else:
                self._put(letter)
        return self

    def _put(self, letter: str) -> None:
        if self.column == self.columns:  # the cursor waits behind the last column for one more letter
            self._to(self.row + 1)
            self.column = 0
        line = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = line[: self.column] + letter + line[self.column + 1 :]
        self.column += 1

    def _to(self, row: int) -> None:
        assert row >= 0, "above the first line"
        self.row = row
        self.rows += [""] * (row + 1 - len(self.rows))

    def _control(self, private: str, given: str, kind: str) -> None:
        number = int(given) if given.isdecimal() else 1
        if kind == "A":
            self._to(self.row - number)
        elif kind == "B":
            self._to(self.row + number)
        elif kind == "K" and given == "2":
            self.rows[self.row] = ""
        elif kind == "K" and given in ("", "0"):
            self.rows[self.row] = self.rows[self.row][: self.column]
        else:
            assert kind == "m" or private, f"unknown: {given}{kind}"

    @property
    def text(self) -> str:
        """The lines, without blanks at their ends and without empty lines below."""
        return "\n".join(row.rstrip() for row in self.rows).rstrip("\n")


class Seen:
    """What came out.

    Attributes:
        raw: with all control sequences, line ends as ``\\n``.
        text: what stands on the screen at the end; of a pipe, what was written.
    """

    def __init__(self, raw: str, columns: int | None) -> None:
        self.raw = raw.replace("\r\n", "\n") if columns is None else raw
        self.text = self.raw.rstrip("\n") if columns is None else Screen(columns).feed(raw).text

    @property
    def lines(self) -> list[str]:
        """The text in lines."""
        return self.text.split("\n")


def seen(function: Callable[[], Any], columns: int | None = 80) -> Seen:
    """Run ``function`` in a forked process whose output goes to a terminal of ``columns`` columns, or to a pipe (None).

    Raises:
        AssertionError: it raised, or did not end in time; the text has its traceback.
    """
    story, tell = os.pipe()
    reader = writer = -1
    if columns is None:
        reader, writer = os.pipe()
        pid = os.fork()
    else:
        pid, reader = pty.fork()
    if pid == 0:
        _in_child(function, tell, writer, columns)
    os.close(tell)
    if writer != -1:
        os.close(writer)
    try:
        raw = _read(reader)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
    with os.fdopen(story, encoding="utf-8") as stream:
        error = stream.read()
    assert error == "ended", error or f"ended or hung without a word; what it showed:\n{raw}"
    return Seen(raw, columns)


def _in_child(function: Callable[[], Any], tell: int, writer: int, columns: int | None) -> None:
    told = "ended"
    try:
        if columns is None:
            os.dup2(writer, 1)
            os.dup2(writer, 2)
        else:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        for name in _UNSET:
            os.environ.pop(name, None)
        os.environ["TERM"] = "xterm-256color"
        logging.getLogger().handlers.clear()  # pytest's own: what is said goes to standard error
        sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        function()
        sys.stdout.flush()
        sys.stderr.flush()
        if columns is not None:
            termios.tcdrain(1)
    except BaseException:
        told = traceback.format_exc()
    os.write(tell, told.encode())
    os._exit(0)


def _read(reader: int) -> str:
    """Everything until the other end is closed, or the time is over."""
    received, deadline = b"", time.monotonic() + LIMIT_SECONDS
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        try:
            data = os.read(reader, 1 << 16)
        except OSError:  # so says a terminal that nobody has open any more
            break
        if not data:
            break
        received += data
    return received.decode()


class Notebook:
    """Stands for IPython's ``display`` in a notebook.

    Attributes:
        outputs: the cell's outputs as plain text, top first, as they stand now.
    """

    def __init__(self) -> None:
        self.outputs: list[str] = []

    def __call__(self, rows: Any, display_id: bool) -> Any:
        self.outputs.append("")
        handle = _Handle(self.outputs, len(self.outputs) - 1)
        handle.update(rows)
        return handle


class _Handle:
    def __init__(self, outputs: list[str], place: int) -> None:
        self.outputs, self.place = outputs, place

    def update(self, rows: Any) -> None:
        text = rows._repr_mimebundle_([], [])["text/plain"]
        self.outputs[self.place] = "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())

"""Notes and warnings that Paceline prints for the user, and text helpers that error messages share.

This file imports only the standard library, so importing it is fast. With several processes, only rank 0 prints,
unless a message is about a particular rank.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Literal

log = logging.getLogger("paceline")

_PACKAGE = __name__.partition(".")[0]
#: Folders in the repository that are not part of the package. Their code counts as user code.
_NOT_IN_PACKAGE = ("tests", "examples", "benchmarks", "docs")
_PROGRAMS = os.path.dirname(sys.executable)

#: Environment variable for processes that run the same command again: this process's ID and its messages' checksums.
SAID = "PACELINE_SAID"
#: Variables in which launchers store the rank. Strategies read these more carefully, then call set_rank.
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "PMI_RANK", "SLURM_PROCID")

_REMEMBERED = 1000
_rank: int | None = None
_said: set[str] = set()
_spoken: dict[str, None] = {}
_warned: dict[str | tuple[str, type[Warning], int], int] = {}


class PacelineWarning(UserWarning):
    """A warning about something that works but is probably not what you want. The text says what to change."""


class ValueWarning(PacelineWarning, RuntimeWarning):
    """A warning about a meaningless value. It is also a ``RuntimeWarning``."""


def set_rank(rank: int | None) -> None:
    """Set this process's rank, which determines whether it prints. If None, the rank is read from the environment."""
    global _rank
    _rank = rank


def rank() -> int:
    """Return this process's rank among all processes, 0-based."""
    if _rank is not None:
        return _rank
    value = next((value for name in _RANK_VARIABLES if (value := os.environ.get(name))), "0")
    return int(value) if value.isdecimal() else 0


def is_rank_zero() -> bool:
    """Return True on rank 0, which prints messages and writes files."""
    return rank() == 0


def spoken() -> str:
    """Return the value of :data:`SAID` to pass to child processes that run the same command again."""
    return ",".join([str(os.getpid()), *_spoken])


def _is_mine(text: str) -> bool:
    """Return True if this process should print a message: it is rank 0, and its parent has not printed the message."""
    if not is_rank_zero():
        return False
    checksum = f"{zlib.crc32(text.encode()):x}"
    if checksum in _spoken or len(_spoken) >= _REMEMBERED:
        return True
    _spoken[checksum] = None
    parent, *said = os.environ.get(SAID, "").split(",")
    return checksum not in said or parent != str(os.getppid())


def info(text: str) -> None:
    """Print one line for the user through the ``paceline`` logger, or to standard error if logging is not set up."""
    if _is_mine(text):
        info_anywhere(text)


def info_anywhere(text: str) -> None:
    """Like :func:`info`, but on any rank, for messages about the calling rank."""
    if log.handlers or logging.getLogger().handlers:
        log.info(text)
    else:
        print(text, file=sys.stderr)


def columns(of_answers: bool = False) -> int | None:
    """Return the width of the terminal that :func:`info` (or :func:`answer`) writes to; None without a terminal."""
    stream = sys.stdout if of_answers else sys.stderr
    with suppress(OSError, ValueError, AttributeError):  # unknown size, COLUMNS is not a number, no stream
        if stream.isatty():
            return int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(stream.fileno()).columns or None
    return None


def answer(text: str) -> None:
    """Print a command's result to standard output."""
    print(text)


def error(text: str) -> None:
    """Print the final message of a process that is exiting, to standard error on every rank."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str, category: type[PacelineWarning] = PacelineWarning) -> None:
    """Warn on rank 0 through :mod:`warnings`, with the line in the user's code as the location.

    If no user code is on the stack, for example in a library's thread, the warning has no location.
    """
    if not _is_mine(text):
        return
    frame = next((frame for frame in call_stack() if owner_of(frame) == "user"), None)
    if frame is None:
        warnings.warn_explicit(text, category, _PACKAGE, 0, registry=_warned)
    else:
        names = frame.f_globals
        registry = names.setdefault("__warningregistry__", {})
        warnings.warn_explicit(
            text, category, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry
        )


def call_stack() -> Iterator[FrameType]:
    """Yield the frames on the call stack, from the function that iterates outward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def owner_of(frame: FrameType) -> Literal["user", "package", "library"]:
    """Return whether a frame runs the user's code, Paceline's, or a library's (torch, Python, code without a file)."""
    file, names = frame.f_code.co_filename, frame.f_globals
    module = names.get("__package__") or names.get("__name__") or ""
    top, _, rest = module.partition(".")
    if top == _PACKAGE and rest.partition(".")[0] not in _NOT_IN_PACKAGE:
        return "package"
    is_library = top in ("", "torch") or top in sys.stdlib_module_names
    return "library" if is_library or file == "<string>" or os.path.dirname(file) == _PROGRAMS else "user"


def warn_once(text: str, key: str | None = None, category: type[PacelineWarning] = PacelineWarning) -> None:
    """Like :func:`warn`, but only once per process for each text (or ``key``)."""
    key = key or text
    if key not in _said:
        _said.add(key)
        warn(text, category)


def info_once(text: str, key: str | None = None) -> None:
    """Like :func:`info`, but only once per process for each text (or ``key``)."""
    key = key or text
    if key not in _said:
        _said.add(key)
        info(text)


def ignored(where: str, why: str, unless: Any = None, **given: Any) -> None:
    """Report once that arguments have no effect. For arguments that would change results, callers raise an error.

    Args:
        where: the class or function that received the arguments, such as ``"Accelerator"``.
        why: the reason, as a clause that follows "because".
        unless: the arguments' default. Arguments that have this value, or are None, are not reported.
        **given: the arguments by name.
    """
    named = [f"{name}={value!r:.100}" for name, value in given.items() if value is not None and value is not unless]
    if named:
        info_once(f"{where}({', '.join(named)}) has no effect, because {why}.")


def debug_once(text: str) -> None:
    """Log a line at debug level, only once per process."""
    if text not in _said:
        _said.add(text)
        log.debug(text)


def forget() -> None:
    """Allow every once-only message to be printed again."""
    _said.clear()


def names(values: Iterable[Any], last: str = "or") -> str:
    """Quote and join values: ``['a', 'b', 'c']`` -> ``"'a', 'b' or 'c'"``."""
    quoted = [repr(v) for v in values]
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} {last} {quoted[-1]}"


def path(value: Any) -> str:
    """Return a path's shortest form, which is relative if the path is below the working directory."""
    text = str(value)
    try:
        below = os.path.join(os.getcwd(), "")
    except FileNotFoundError:  # the working directory was deleted
        return text
    return text if text == below else text.removeprefix(below)


def a(value: Any) -> str:
    """Return a value's type with an article, such as ``"an int"``."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def size(number: float) -> str:
    """Format a number of bytes with a unit, in steps of 1024: ``1536`` -> ``"1.5 KiB"``."""
    sign, number = "-" if number < 0 else "", abs(number)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{sign}{number:.3g} {unit}" if number < 1000 else f"{sign}{number:.0f} {unit}"
        number /= 1024
    return f"{sign}{number:.3g} TiB" if number < 1000 else f"{sign}{number:.0f} TiB"


def ranks(numbers: Iterable[int]) -> str:
    """Format ranks briefly, even if there are thousands: ``[1, 2, 3, 7]`` -> ``"ranks 1-3, 7"``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    listed = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'' if listed.isdecimal() else 's'} {listed}"


def missing(who: str, package: str) -> str:
    """Return the error text for a package that ``who`` needs but that is not installed."""
    return f"{who} needs the package {package!r}, which is not installed. Run: pip install {package}"


def is_installed(package: str) -> bool:
    """Return True if a package can be imported, without importing it. A plain folder does not count as a package."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def did_you_mean(value: Any, choices: Iterable[str]) -> str:
    """Return ``" Did you mean 'ddp'?"`` (with the leading space), or an empty string if no choice is similar."""
    close = difflib.get_close_matches(str(value), list(choices), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown(what: str, value: Any, choices: Iterable[str], more: str = "") -> str:
    """Return the error text for an unknown name: the value, the closest name, the valid names, and ``more``.

    The value is printed directly after ``what``, so ``what`` must end with a noun for the value, such as
    ``"Timer interval"``.
    """
    choices = list(choices)
    choose = f"Choose {names(choices)}{more}." if choices else "There is none."
    return f"Unknown {what} {value!r}.{did_you_mean(value, choices)} {choose}"

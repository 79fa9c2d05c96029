"""Every word Paceline says to a person goes through here: notes, warnings, and the wording helpers errors share.

Only the standard library is imported, so any room may use it at no cost. In a run of several processes only rank 0
speaks, unless a message is about one rank.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
import sys
import warnings
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Literal

log = logging.getLogger("paceline")

_PACKAGE = __name__.partition(".")[0]
#: What stands beside the package in its repository, and is a user of it.
_BESIDE = ("tests", "examples", "benchmarks", "docs")
_PROGRAMS = os.path.dirname(sys.executable)

#: What a process has said before it started others by running its command again: its id and checksums, for those.
SAID = "PACELINE_SAID"
#: Where launchers write which process this is. The strategies read them with more care, and then call set_rank.
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "PMI_RANK", "SLURM_PROCID")

_REMEMBERED = 1000
_rank: int | None = None
_said: set[str] = set()
_spoken: dict[str, None] = {}
_warned: dict[str | tuple[str, type[Warning], int], int] = {}


class PacelineWarning(UserWarning):
    """Something that works but probably is not what you want; the text says what to change."""


def set_rank(rank: int | None) -> None:
    """Tell the messages which process this is; ranks other than 0 stay silent. None: as the environment says."""
    global _rank
    _rank = rank


def is_rank_zero() -> bool:
    """Whether this process is the one that speaks and writes."""
    if _rank is not None:
        return _rank == 0
    told = next((value for name in _RANK_VARIABLES if (value := os.environ.get(name))), "0")
    return told == "0" or not told.isdecimal()


def spoken() -> str:
    """What this process has said so far, for the variable :data:`SAID` of processes that run the same command."""
    return ",".join([str(os.getpid()), *_spoken])


def _is_mine(text: str) -> bool:
    """Whether this process is to say it: on rank 0, and not if the one that started it has said so already."""
    if not is_rank_zero():
        return False
    checksum = f"{zlib.crc32(text.encode()):x}"
    if checksum in _spoken or len(_spoken) >= _REMEMBERED:
        return True
    _spoken[checksum] = None
    parent, *said = os.environ.get(SAID, "").split(",")
    return checksum not in said or parent != str(os.getppid())


def info(text: str) -> None:
    """Print one line to the person, through the ``paceline`` logger; on standard error if logging is not set up."""
    if _is_mine(text):
        info_anywhere(text)


def info_anywhere(text: str) -> None:
    """Like :func:`info`, from whichever process it is: a message about one rank."""
    if log.handlers or logging.getLogger().handlers:
        log.info(text)
    else:
        print(text, file=sys.stderr)


def columns() -> int | None:
    """Columns of the terminal that :func:`info` writes to; None where a line may be of any length."""
    with suppress(OSError, ValueError, AttributeError):  # no such size, no number in COLUMNS, no stream
        if sys.stderr.isatty():
            return int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(sys.stderr.fileno()).columns or None
    return None


def answer(text: str) -> None:
    """Print what a command was asked for, to standard output."""
    print(text)


def error(text: str) -> None:
    """Print to standard error, always: the last words of a process that ends."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Warn through :mod:`warnings` (category :class:`PacelineWarning`), on rank 0, as from the user's own line.

    Where no line of the user leads here, as in a thread of a library, the warning has no location.
    """
    if not _is_mine(text):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and owner_of(frame) != "user":
        frame = frame.f_back
    if frame is None:
        warnings.warn_explicit(text, PacelineWarning, _PACKAGE, 0, registry=_warned)
    else:
        names = frame.f_globals
        registry = names.setdefault("__warningregistry__", {})
        warnings.warn_explicit(
            text, PacelineWarning, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry
        )


def owner_of(frame: FrameType) -> Literal["user", "package", "library"]:
    """Whose code runs in a frame: the user's, Paceline's, or that of torch, Python and what has no file."""
    file, names = frame.f_code.co_filename, frame.f_globals
    module = names.get("__package__") or names.get("__name__") or ""
    top, _, rest = module.partition(".")
    if top == _PACKAGE and rest.partition(".")[0] not in _BESIDE:
        return "package"
    is_library = top in ("", "torch") or top in sys.stdlib_module_names
    return "library" if is_library or file == "<string>" or os.path.dirname(file) == _PROGRAMS else "user"


def warn_once(text: str, key: str | None = None) -> None:
    """Like :func:`warn`, but a text (or ``key``) is given once in a process."""
    key = key or text
    if key not in _said:
        _said.add(key)
        warn(text)


def info_once(text: str, key: str | None = None) -> None:
    """Like :func:`info`, but a text (or ``key``) is given once in a process."""
    key = key or text
    if key not in _said:
        _said.add(key)
        info(text)


def forget() -> None:
    """Allow every once-only message again."""
    _said.clear()


def names(values: Iterable[Any], last: str = "or") -> str:
    """``['a', 'b', 'c']`` -> ``"'a', 'b' or 'c'"``."""
    quoted = [repr(v) for v in values]
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} {last} {quoted[-1]}"


def path(value: Any) -> str:
    """A path as it is shortest: relative if it lies below the working directory."""
    text = str(value)
    try:
        below = os.path.join(os.getcwd(), "")
    except FileNotFoundError:  # somebody deleted the working directory
        return text
    return text if text == below else text.removeprefix(below)


def a(value: Any) -> str:
    """A value's type with its article, such as ``"an int"``."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def size(number: float) -> str:
    """Bytes with a unit, at 1024 each: ``1536`` -> ``"1.5 KiB"``."""
    sign, number = "-" if number < 0 else "", abs(number)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{sign}{number:.3g} {unit}" if number < 1000 else f"{sign}{number:.0f} {unit}"
        number /= 1024
    return f"{sign}{number:.3g} TiB" if number < 1000 else f"{sign}{number:.0f} TiB"


def ranks(numbers: Iterable[int]) -> str:
    """``[1, 2, 3, 7]`` -> ``"ranks 1-3, 7"``: short also for thousands."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    listed = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'' if listed.isdecimal() else 's'} {listed}"


def missing(who: str, package: str) -> str:
    """The sentence for a package that ``who`` needs and that is not there."""
    return f"{who} needs the package {package!r}, which is not installed here. Run: pip install {package}"


def is_installed(package: str) -> bool:
    """Whether a package can be imported, found out without importing it. A mere folder of that name does not count."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def did_you_mean(value: Any, choices: Iterable[str]) -> str:
    """Return ``" Did you mean 'ddp'?"`` (with the leading space), or an empty string when nothing is close."""
    close = difflib.get_close_matches(str(value), list(choices), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown(what: str, value: Any, choices: Iterable[str], more: str = "") -> str:
    """The sentence for a name that does not exist: the value, the nearest name, the list, and what else is accepted."""
    choices = list(choices)
    return f"Unknown {what} {value!r}.{did_you_mean(value, choices)} Choose {names(choices)}{more}."

"""Lightning's exceptions. If Paceline replaces Lightning, Paceline's errors are also instances of these exceptions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_PACKAGE = __name__.partition(".")[0]


class MisconfigurationException(Exception):  # noqa: N818 - Lightning's name
    """Raised if an argument or another part of a program's configuration is invalid."""


class SIGTERMException(SystemExit):
    """Raised when SIGTERM stops a run."""

    code = 143


#: The errors that Paceline raises where Lightning raises MisconfigurationException.
_MEANT = (ValueError, TypeError, RuntimeError, NotImplementedError, ModuleNotFoundError)


@functools.cache
def _joined(kind: type[Exception], also: tuple[type[Exception], ...] = ()) -> type[Exception]:
    kinds = tuple(dict.fromkeys((MisconfigurationException, kind, *also)))
    made: Any = type(f"Misconfiguration{kind.__name__}", kinds, {"__module__": __name__})
    return made


def _is_own(traceback: TracebackType | None) -> bool:
    """Return True if the exception was raised in Paceline's own code."""
    module = ""
    while traceback is not None:
        module, traceback = traceback.tb_frame.f_globals.get("__name__", ""), traceback.tb_next
    return module.partition(".")[0] == _PACKAGE


def exiting(function: F) -> F:
    """Wrap an entry point so that Ctrl-C ends the program with status 1, after the run has been torn down."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            raise SystemExit(1) from None

    return call  # type: ignore[return-value]


def translated(function: F, *also: type[Exception]) -> F:
    """Wrap a function so that Paceline's errors are also instances of Lightning's exceptions and of ``also``."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except _MEANT as error:
            if type(error) not in _MEANT or not _is_own(error.__traceback__):
                raise
            both = _joined(type(error), also)(*error.args)
            both.__cause__, both.__suppress_context__ = error.__cause__, True
            raise both.with_traceback(error.__traceback__)  # noqa: B904 - this is the same error

    return call  # type: ignore[return-value]

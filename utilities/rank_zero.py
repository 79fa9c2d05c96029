"""Call functions and print messages only on rank 0."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from .. import messages

R = TypeVar("R")

log = logging.getLogger("paceline")


class RankZeroDeprecationWarning(DeprecationWarning):
    """Warning category of :func:`rank_zero_deprecation`."""


class RankZeroOnly:
    """The decorator :data:`rank_zero_only`: ranks other than 0 return ``default`` without calling the function.

    Attributes:
        rank: this process's rank among all processes, 0-based. Set this attribute if you start processes that Paceline
            does not know about.
    """

    @property
    def rank(self) -> int:
        """This process's rank among all processes, 0-based."""
        return messages.rank()

    @rank.setter
    def rank(self, rank: int) -> None:
        messages.set_rank(rank)

    def __call__(self, fn: Callable[..., R], default: Any = None) -> Callable[..., R]:
        """Wrap ``fn``, a function or method."""

        @wraps(fn)
        def on_rank_zero(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs) if messages.is_rank_zero() else default

        return on_rank_zero


rank_zero_only = RankZeroOnly()


@rank_zero_only
def rank_zero_info(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Call ``logging.info`` on rank 0."""
    log.info(*args, stacklevel=stacklevel, **kwargs)


@rank_zero_only
def rank_zero_debug(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Call ``logging.debug`` on rank 0."""
    log.debug(*args, stacklevel=stacklevel, **kwargs)


@rank_zero_only
def rank_zero_warn(message: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Call ``warnings.warn`` with ``category`` on rank 0."""
    warnings.warn(message, stacklevel=stacklevel, **kwargs)


@rank_zero_only
def rank_zero_deprecation(message: Any, stacklevel: int = 5, **kwargs: Any) -> None:
    """Call :func:`rank_zero_warn` about a feature that will be removed."""
    kwargs.setdefault("category", RankZeroDeprecationWarning)
    warnings.warn(message, stacklevel=stacklevel, **kwargs)


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """Return ``"[rank: 1] message"``, or the message itself if ``rank`` is None."""
    return message if rank is None else f"[rank: {rank}] {message}"


class WarningCache(set[str]):
    """Shows each message only once. This set contains the messages that have already been shown."""

    def warn(self, message: str, stacklevel: int = 5, **kwargs: Any) -> None:
        """Warn on rank 0, unless the message was shown before."""
        if message not in self:
            self.add(message)
            rank_zero_warn(message, stacklevel=stacklevel, **kwargs)

    def deprecation(self, message: str, stacklevel: int = 6, **kwargs: Any) -> None:
        """Call :func:`rank_zero_deprecation` unless the message was shown before."""
        if message not in self:
            self.add(message)
            rank_zero_deprecation(message, stacklevel=stacklevel, **kwargs)

    def info(self, message: str, stacklevel: int = 5, **kwargs: Any) -> None:
        """Call :func:`rank_zero_info` unless the message was shown before."""
        if message not in self:
            self.add(message)
            rank_zero_info(message, stacklevel=stacklevel, **kwargs)

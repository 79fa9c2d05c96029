"""``accelerate``'s search for a batch size that fits in memory. Its reduction factor differs from Paceline's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...memory import out_of_memory_retry


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Like ``paceline.find_executable_batch_size``, but each attempt uses 0.9 times the previous batch size."""
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    if starting_batch_size == 0:
        return functools.wraps(function)(_refuse)
    search = out_of_memory_retry.find_executable_batch_size
    return search(function, starting_batch_size, reduce_batch_size_fn, factor=0.9)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("No executable batch size found, reached zero. Set starting_batch_size to 1 or more.")

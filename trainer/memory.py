"""Out of memory: what was tried, and what to try next, with numbers."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any, overload

import torch

from ..loggers import messages


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


_ACCUMULATE = ("accumulate_grad_batches", "gradient_accumulation_steps")


@overload
def find_executable_batch_size(
    function: Callable[..., Any],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    factor: float = 0.5,
) -> Callable[..., Any]: ...
@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    factor: float = 0.5,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    factor: float = 0.5,
) -> Callable[..., Any]:
    """Call a function with smaller and smaller batch sizes until it does not run out of memory. A decorator.

    The function makes model, optimizer and Trainer inside itself, so that nothing of a failed attempt stays in memory.
    With several processes all have to fail alike: sizes are not agreed between them.

    Args:
        function: its first parameter is the batch size, which callers of the decorated function leave out. One called
            ``accumulate_grad_batches`` (or ``gradient_accumulation_steps``) gets by how much the batch has shrunk; then
            only sizes that divide ``starting_batch_size`` are tried, and an update learns from as many samples.
        starting_batch_size: the first to try, in samples.
        reduce_batch_size_fn: gives the next one; takes no argument.
        factor: of the size before, where no function is given; between 0 and 1.

    Raises:
        RuntimeError: not even one sample fits.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=64)
        ... def train(batch_size: int, accumulate_grad_batches: int) -> int:
        ...     return batch_size * accumulate_grad_batches
        >>> train()
        64
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            factor=factor,
        )
    if starting_batch_size < 1 or not 0 < factor < 1:
        raise ValueError(
            f"find_executable_batch_size(starting_batch_size={starting_batch_size}, factor={factor}): the size is at "
            "least 1, the factor between 0 and 1."
        )
    parameters = list(inspect.signature(function).parameters)
    if not parameters:
        raise TypeError(
            f"find_executable_batch_size: {function.__qualname__}() takes no argument, but it is called with the batch "
            f"size. Define it as {function.__name__}(batch_size)."
        )
    accumulate = next((name for name in _ACCUMULATE if name in parameters), None)

    @functools.wraps(function)
    def attempts(*args: Any, **kwargs: Any) -> Any:
        size = starting_batch_size
        while True:
            more = {accumulate: starting_batch_size // size} if accumulate else {}
            try:
                return function(size, *args, **kwargs, **more)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                smaller = int(size * factor) if reduce_batch_size_fn is None else reduce_batch_size_fn()
                while accumulate and smaller > 0 and starting_batch_size % smaller:
                    smaller -= 1
                if smaller < 1:
                    raise RuntimeError(
                        f"{function.__qualname__}() runs out of memory with a batch of {size} samples too, from "
                        f"{starting_batch_size} on down. Lower the memory a sample takes: precision='bf16-mixed', "
                        "activation checkpointing, strategy='fsdp', or a smaller model."
                    ) from error
                messages.info(f"Out of memory with a batch of {size} samples: trying {smaller}.")
                size = smaller
            release_memory()

    return attempts


def release_memory(*objects: Any) -> list[None]:
    """Give back what nothing refers to any more, also what torch keeps of a GPU's memory.

    Args:
        *objects: of which the caller's names are to be set to what this returns: None for each.
    """
    clear_device_cache(garbage_collection=True)
    return [None] * len(objects)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give back what torch keeps of a GPU's memory without using it.

    Args:
        garbage_collection: look for objects first that only refer to each other.
    """
    if garbage_collection:
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

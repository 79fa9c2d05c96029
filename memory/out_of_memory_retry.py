"""Out of memory: what was tried, and what to try next, with numbers."""

from __future__ import annotations

import functools
import gc
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any, overload

import torch

from .. import messages
from ..processes.cpu_memory import give_back_memory
from .joint_retry import DONE, ERROR, OUT_OF_MEMORY, RELEASED, Outcome, Together

#: How drivers and libraries say it in a RuntimeError; cuDNN has no kernel for what does not fit its workspace.
_SAID = re.compile(
    r"\b(?:CUDA|HIP|XPU|NPU|MPS backend)(?: error:)? out of memory"
    r"|Cuda failure (?:\d+ )?'out of memory'"
    r"|OUT_OF_DEVICE_MEMORY"
    r"|CU(?:DNN|BLAS)_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_NOT_SUPPORTED"
    r"|can't allocate memory"
    r"|DefaultCPUAllocator: not enough memory"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host has no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAID.search(str(error)) is not None


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

    The function makes model, optimizer and Trainer (or Accelerator) inside itself, so that nothing of a failed attempt
    stays in memory. At the end one message says which sizes were tried, what came of each, and on a GPU the most memory
    that was in use.

    Several processes agree, as soon as they have joined a process group: each attempt ends when it has ended on all
    ranks, and where it ran out of memory on one of them, all go on to the same smaller size, also those it went well
    with. A rank that waits in a collective for one that ran out gets an error from it after some seconds, since that
    one leaves the group; the ranks then join a new one, as the old one was. With gloo that needs the group to be in no
    variable outside of the function; what the function left on the other ranks is lost with the attempt. Ranks that run
    out before they have joined a group cannot agree. If a rank ends with another error, all do.

    Args:
        function: its first parameter is the batch size, which callers of the decorated function leave out. One called
            ``accumulate_grad_batches`` (or ``gradient_accumulation_steps``) gets by how much the batch has shrunk; then
            only sizes that divide ``starting_batch_size`` are tried, and an update learns from as many samples.
        starting_batch_size: the first to try, in samples.
        reduce_batch_size_fn: gives the next one; takes no argument.
        factor: of the size before, where no function is given; between 0 and 1.

    Raises:
        RuntimeError: not even one sample fits, or another rank ended with an error.

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
        return _Search(function, starting_batch_size, smaller, accumulate).run(args, kwargs)

    def smaller(size: int) -> int:
        found = int(size * factor) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        while accumulate and found > 0 and starting_batch_size % found:
            found -= 1
        return found

    return attempts


class _Search:
    """One search for the batch size that fits.

    Attributes:
        tried: what is said about each size, in order.
    """

    def __init__(
        self, function: Callable[..., Any], start: int, smaller: Callable[[int], int], accumulate: str | None
    ) -> None:
        self.function, self.start, self.smaller, self.accumulate = function, start, smaller, accumulate
        self.together = Together()
        self.tried: list[str] = []

    def run(self, args: Any, kwargs: Any) -> Any:
        """Call the function with smaller and smaller sizes; returns what it returned."""
        size, together = self.start, self.together
        while True:
            result, outcome = self.attempt(size, args, kwargs)
            found = together.compare(outcome) if together.meet() else [outcome]
            self.refuse_errors(found)
            out = [rank for rank, one in enumerate(found) if one.kind == OUT_OF_MEMORY]
            self.tried.append(self.about(size, found, out))
            if not out:
                self.report(f"{size} it is{self.learns(size)}.")
                return result
            result = None
            release_memory()
            smaller = partial(self.smaller, size)
            before, size = size, together.same(smaller) if together.meet() else smaller()
            if size < 1:
                raise RuntimeError(
                    f"{self.function.__qualname__}() runs out of memory with a batch of {before} samples too, from "
                    f"{self.start} on down ({'; '.join(self.tried)}). Lower the memory a sample takes: "
                    "precision='bf16-mixed', activation checkpointing, strategy='fsdp', or a smaller model."
                ) from self.error

    def attempt(self, size: int, args: Any, kwargs: Any) -> tuple[Any, Outcome]:
        """One call of the function, and how it ended here. Errors of other kinds are raised."""
        more = {self.accumulate: self.start // size} if self.accumulate else {}
        gpu = torch.cuda.is_available()
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        self.error: Exception | None = None
        try:
            result = self.function(size, *args, **kwargs, **more)
        except Exception as error:
            if not self.is_end_of_memory(error):
                if self.together.meet():
                    self.together.compare(Outcome(ERROR, f"{type(error).__name__}: {error}"))
                raise
            # Its frames hold the model, and with it the memory.
            self.error = error.with_traceback(None)
            self.error.__cause__ = self.error.__context__ = None
            kind = OUT_OF_MEMORY if is_out_of_memory(error) else RELEASED
            return None, Outcome(kind, str(error), torch.cuda.max_memory_allocated() if gpu else 0)
        return result, Outcome(DONE, "", torch.cuda.max_memory_allocated() if gpu else 0)

    def is_end_of_memory(self, error: Exception) -> bool:
        """Whether it is that, or what comes of another rank's: a collective in which that one is missed."""
        if is_out_of_memory(error):
            return True
        return isinstance(error, RuntimeError) and self.together.meet() and self.together.others_ran_out()

    def refuse_errors(self, found: list[Outcome]) -> None:
        """Raise if another rank ended with an error that a smaller batch does not help."""
        wrong = {rank: one.text for rank, one in enumerate(found) if one.kind == ERROR}
        if wrong:
            rank, text = next(iter(wrong.items()))
            raise RuntimeError(
                f"{self.function.__qualname__}() ended on {messages.ranks(wrong)} with an error, so rank "
                f"{self.together.rank} cannot continue alone. The first: rank {rank}, {text}"
            )

    def about(self, size: int, found: list[Outcome], out: list[int]) -> str:
        """A size and what came of it."""
        peak = max(one.peak for one in found)
        used = f", at most {messages.size(peak)} of GPU memory" if peak else ""
        where = f" on {messages.ranks(out)}" if len(found) > 1 and out else ""
        return f"{size} {'ran out of memory' if out else 'ran'}{where}{used}"

    def learns(self, size: int) -> str:
        """How an update still learns from as many samples."""
        steps = self.start // size
        return (
            f", with {self.accumulate}={steps}, so that an update learns from {size * steps}" if self.accumulate else ""
        )

    def report(self, last: str) -> None:
        """Say what was tried, in one message."""
        messages.info(
            f"Batch sizes that {self.function.__qualname__}() was tried with: {'; '.join(self.tried)}. {last}"
        )


def release_memory(*objects: Any) -> list[None]:
    """Give back what nothing refers to any more, also what torch keeps of a GPU's memory and the process of the host's.

    Args:
        *objects: of which the caller's names are to be set to what this returns: None for each.
    """
    clear_device_cache(garbage_collection=True)
    give_back_memory()
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

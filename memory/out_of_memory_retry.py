"""Find a batch size that fits: retry a function with smaller batches when it runs out of memory."""

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
from ..devices.kinds import present
from ..processes.cpu_memory import give_back_memory
from .joint_retry import DONE, ERROR, OUT_OF_MEMORY, RELEASED, Outcome, Together

#: Texts of RuntimeErrors from drivers and libraries; cuDNN reports "not supported" if its workspace does not fit.
_ERROR_TEXTS = re.compile(
    r"\b(?:CUDA|HIP|XPU|NPU|MPS backend)(?: error:)? out of memory"
    r"|Cuda failure (?:\d+ )?'out of memory'"
    r"|OUT_OF_DEVICE_MEMORY"
    r"|CU(?:DNN|BLAS)_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_NOT_SUPPORTED"
    r"|can't allocate memory"
    r"|DefaultCPUAllocator: not enough memory"
    r"|\bout of memory\."
)


def is_out_of_memory(exception: BaseException) -> bool:
    """Return True if an error says that a device or the host is out of memory."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    return isinstance(exception, RuntimeError) and _ERROR_TEXTS.search(str(exception)) is not None


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
    """Decorator that calls a function with smaller and smaller batch sizes until it no longer runs out of memory.

    The function must create the model, optimizer and Trainer (or Accelerator) itself, so that nothing from a failed
    attempt stays in memory. At the end, one message lists the sizes that were tried, the result of each, and, on a GPU,
    the peak memory.

    Once the processes have joined a process group, they agree on the batch size. An attempt ends once it has finished
    on all ranks. If any rank ran out of memory, all ranks retry with the same smaller size, including ranks where the
    attempt succeeded; their results are lost. A rank that runs out of memory leaves the group, so ranks that are
    waiting for it in a collective fail after a few seconds. The ranks then join a new group with the same options. With
    gloo, this works only if no variable outside the function refers to the group. Ranks that run out of memory before
    they have joined a group cannot agree. If a rank fails with any other error, all ranks fail.

    Args:
        function: its first parameter is the batch size; callers of the decorated function omit it. If there is a
            parameter ``accumulate_grad_batches`` (or ``gradient_accumulation_steps``), it receives the factor by which
            the batch has shrunk. Then only sizes that divide ``starting_batch_size`` are tried, so each update still
            uses the same number of samples.
        starting_batch_size: the first size to try, in samples.
        reduce_batch_size_fn: a function without arguments that returns the next size.
        factor: the number, between 0 and 1, by which the size is multiplied after a failure if ``reduce_batch_size_fn``
            is not given.

    Raises:
        RuntimeError: not even one sample fits, or another rank failed with an error.

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
            f"find_executable_batch_size(starting_batch_size={starting_batch_size}, factor={factor}): the size must be "
            "at least 1, and the factor between 0 and 1."
        )
    parameters = list(inspect.signature(function).parameters)
    if not parameters:
        raise TypeError(
            f"find_executable_batch_size: {function.__qualname__}() takes no arguments, but it is called with the "
            f"batch size. Define the function as {function.__name__}(batch_size)."
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
    """One search for a batch size that fits.

    Attributes:
        tried: a description of each size's result, in order.
    """

    def __init__(
        self, function: Callable[..., Any], start: int, smaller: Callable[[int], int], accumulate: str | None
    ) -> None:
        self.function, self.start, self.smaller, self.accumulate = function, start, smaller, accumulate
        self.together = Together()
        self.tried: list[str] = []

    def run(self, args: Any, kwargs: Any) -> Any:
        """Call the function with smaller and smaller sizes; return its result."""
        size, together = self.start, self.together
        while True:
            result, outcome = self.attempt(size, args, kwargs)
            found = together.compare(outcome) if together.meet() else [outcome]
            self.refuse_errors(found)
            out = [rank for rank, one in enumerate(found) if one.kind == OUT_OF_MEMORY]
            self.tried.append(self.about(size, found, out))
            if not out:
                self.report(f"Using {size}{self.accumulation(size)}.")
                return result
            result = None
            release_memory()
            smaller = partial(self.smaller, size)
            before, size = size, together.same(smaller) if together.meet() else smaller()
            if size < 1:
                raise RuntimeError(
                    f"{self.function.__qualname__}() runs out of memory with every batch size from {self.start} down "
                    f"to {before} ({'; '.join(self.tried)}). Reduce the memory per sample, for example with "
                    "precision='bf16-mixed', activation checkpointing, strategy='fsdp', or a smaller model."
                ) from self.error

    def attempt(self, size: int, args: Any, kwargs: Any) -> tuple[Any, Outcome]:
        """Call the function once; return its result and the attempt's outcome on this rank.

        Raises any error that is not about memory.
        """
        more = {self.accumulate: self.start // size} if self.accumulate else {}
        device = present()
        device.reset_peak_memory()
        self.error: Exception | None = None
        try:
            result = self.function(size, *args, **kwargs, **more)
        except Exception as error:
            if not self.is_memory_error(error):
                if self.together.meet():
                    self.together.compare(Outcome(ERROR, f"{type(error).__name__}: {error}"))
                raise
            # The frames in the error's traceback refer to the model and would keep its memory allocated.
            self.error = error.with_traceback(None)
            self.error.__cause__ = self.error.__context__ = None
            kind = OUT_OF_MEMORY if is_out_of_memory(error) else RELEASED
            return None, Outcome(kind, str(error), device.peak_memory())
        return result, Outcome(DONE, "", device.peak_memory())

    def is_memory_error(self, error: Exception) -> bool:
        """Return True if an error is an out-of-memory error, or was caused by one on another rank."""
        if is_out_of_memory(error):
            return True
        return isinstance(error, RuntimeError) and self.together.meet() and self.together.others_ran_out()

    def refuse_errors(self, found: list[Outcome]) -> None:
        """Raise if another rank failed with an error that a smaller batch does not fix."""
        wrong = {rank: one.text for rank, one in enumerate(found) if one.kind == ERROR}
        if wrong:
            rank, text = next(iter(wrong.items()))
            raise RuntimeError(
                f"{self.function.__qualname__}() failed on {messages.ranks(wrong)}, so rank {self.together.rank} "
                f"cannot continue alone. The error on rank {rank}: {text}"
            )

    def about(self, size: int, found: list[Outcome], out: list[int]) -> str:
        """Return the part of the message that describes the result for a batch size."""
        peak = max(one.peak for one in found)
        used = f", at most {messages.size(peak)} of GPU memory" if peak else ""
        where = f" on {messages.ranks(out)}" if len(found) > 1 and out else ""
        return f"{size} {'ran out of memory' if out else 'worked'}{where}{used}"

    def accumulation(self, size: int) -> str:
        """Return the part of the message that explains how an update still uses the same number of samples."""
        steps = self.start // size
        return f", with {self.accumulate}={steps}, for {size * steps} samples per update" if self.accumulate else ""

    def report(self, last: str) -> None:
        """Print one message with the results of all sizes tried."""
        messages.info(f"Batch sizes tried for {self.function.__qualname__}(): {'; '.join(self.tried)}. {last}")


def release_memory(*objects: Any) -> list[None]:
    """Free everything that is no longer referenced, including cached GPU memory and host memory kept by the process.

    Args:
        *objects: objects to release; assign the result (one None per object) to the variables that held them.
    """
    clear_device_cache(garbage_collection=True)
    give_back_memory()
    return [None] * len(objects)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Free GPU memory that torch keeps cached but does not use.

    Args:
        garbage_collection: whether to run Python's garbage collector first, which deletes objects in reference cycles.
    """
    if garbage_collection:
        gc.collect()
    present().release_cached_memory()

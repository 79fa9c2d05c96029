"""Ranks, and methods that run code only on some processes, for ``PartialState`` and ``Accelerator``."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from .enums import DistributedType
from .operations import split_between_processes

if TYPE_CHECKING:
    import torch

    from ..strategies.base import Strategy

F = TypeVar("F", bound=Callable[..., Any])


class Processes:
    """This process and the other processes of its strategy.

    Attributes:
        strategy: determines where tensors live and how processes communicate.
    """

    strategy: Strategy

    @property
    def device(self) -> torch.device:
        """The device that this process uses."""
        return self.strategy.device

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of distributed training."""
        return type_of(self.strategy)

    @property
    def num_processes(self) -> int:
        """Number of processes across all nodes."""
        return self.strategy.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process, 0-based."""
        return self.strategy.global_rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its node, 0-based."""
        return self.strategy.local_rank

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is the main process, which writes files and messages."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process on its node."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process with the highest index."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this method."""
        self.strategy.barrier("wait_for_everyone")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call ``print`` on the first process of each node."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)  # noqa: T201 (it is the user who prints)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Context manager whose body the main process runs first, for example to download data once."""
        yield from self._first(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Context manager whose body the first process of each node runs first."""
        yield from self._first(self.is_local_main_process)

    def _first(self, first: bool) -> Iterator[None]:
        # One name for both, because in nested blocks a process leaves the inner one while others enter the outer one.
        name = "main_process_first or local_main_process_first"
        if not first:
            self.strategy.barrier(name)
        try:
            yield
        finally:
            if first:  # also after an error, because the others are waiting
                self.strategy.barrier(name)

    def on_main_process(self, function: F) -> F:
        """Decorator that runs a function only on the main process; on other processes, calls return None."""
        return self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: F) -> F:
        """Decorator that runs a function only on the first process of each node; elsewhere, calls return None."""
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: F) -> F:
        """Decorator that runs a function only on the last process; on other processes, calls return None."""
        return self._only(function, lambda: self.is_last_process)

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorator that runs a function only on the given process; on other processes, calls return None."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return self._only(function, lambda: self.process_index == (process_index or 0))

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorator that runs a function only on the given process of each node; elsewhere, calls return None."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return self._only(function, lambda: self.local_process_index == (local_process_index or 0))

    def _only(self, function: F, condition: Callable[[], bool]) -> F:
        @functools.wraps(function)
        def perhaps(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if condition() else None

        return perhaps  # type: ignore[return-value]

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Context manager that yields a part of ``inputs``; see :func:`.operations.split_between_processes`."""
        yield split_between_processes(inputs, self.strategy, apply_padding)


def type_of(strategy: Strategy) -> DistributedType:
    """Return the kind of distributed training that a strategy uses."""
    names = {name for kind in type(strategy).__mro__ for name in vars(kind).get("names", ())}
    if "deepspeed" in names:
        return DistributedType.DEEPSPEED
    if "fsdp" in names:
        return DistributedType.FSDP
    if strategy.world_size == 1:
        return DistributedType.NO
    kind = strategy.device.type
    named = {"cuda": DistributedType.MULTI_GPU, "tpu": DistributedType.XLA}
    # As in Accelerate, MPS and devices that have no name of their own count as CPUs.
    return named.get(kind) or DistributedType.__members__.get(f"MULTI_{kind.upper()}", DistributedType.MULTI_CPU)

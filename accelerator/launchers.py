"""Start a training function in several processes from a notebook or a test."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from .. import messages
from ..processes import launch
from ..processes.devices import find_kind
from ..settings import resolve
from .enums import MixedName, PrecisionType
from .kwargs_handlers import NO_EIGHT_BITS
from .process_state import FORKED, forgotten, is_initialized


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: MixedName | None = None,
    use_port: int | str | None = None,
    **more: Any,
) -> Any:
    """Call ``function(*args)`` in processes that make one group, from a notebook cell; returns rank 0's result.

    The processes are copies of this one, so the function may be defined in a cell and use what other cells made. It
    builds its own Accelerator, model and loaders; nothing may have used a GPU before. With one process it is called
    here. After an error the launcher can be called again.

    Args:
        function: what each process calls.
        args: its arguments.
        num_processes: None: one for each GPU, or one on the CPU.
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``, for Accelerators that say nothing else.
        use_port: where the processes meet; None: a free port.
        **more: what Accelerate's launcher takes too, such as ``num_nodes=1``; only values that ask for nothing.

    Raises:
        RuntimeError: a process failed, with the traceback of the first; or CUDA is in use already.
    """
    _refuse_more(more)
    variables = {"PACELINE_MIXED_PRECISION": _precision(mixed_precision), FORKED: "1"}
    kind = "cpu" if resolve()["cpu"] else find_kind("auto")
    count = num_processes or (torch.cuda.device_count() if kind == "cuda" else 1)
    if count == 1:
        with environment({**variables, FORKED: None}):
            return function(*args)
    _refuse_used(kind, count)
    if is_initialized():
        messages.warn_once(
            "An Accelerator was made before notebook_launcher. It knows one process only: let the function that is "
            "launched make its own, and use nothing that the other one prepared."
        )
    return _start(function, args, count, kind, variables, int(use_port or 0))


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> Any:
    """Call ``function(*args)`` in processes on the CPU, to try code for several devices; returns rank 0's result.

    Args:
        function: what each process calls.
        args: its arguments.
        num_processes: how many.

    Raises:
        RuntimeError: a process failed, with the traceback of the first.
    """
    return _start(function, args, num_processes, "cpu", {"PACELINE_CPU": "true", FORKED: "1"})


def _start(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    count: int,
    kind: str,
    variables: Mapping[str, str | None],
    port: int = 0,
) -> Any:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"num_processes={count!r} is no number of processes. Pass 1 or more.")
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "This process is in a process group already, so it cannot start another one. Restart the notebook, or call "
            "PartialState().destroy_process_group() first."
        )
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with environment(variables), forgotten():  # a copied process stands somewhere else than this one
        return launch.start(function, tuple(args), count, method, kind, port=port)


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Variables as given, None where they are to stay; all as before afterwards."""
    changed = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def _precision(asked: str | None) -> str | None:
    if asked is None:
        return None
    word = PrecisionType(asked)
    if word is PrecisionType.FP8:
        raise NotImplementedError(f"notebook_launcher(mixed_precision='fp8'): {NO_EIGHT_BITS}")
    return word.value


def _refuse_used(kind: str, count: int) -> None:
    """CUDA cannot be used in a copy of a process that has used it."""
    if kind == "cuda" and torch.cuda.is_initialized():
        raise RuntimeError(
            f"notebook_launcher(num_processes={count}) copies this process, but CUDA was initialised in it before the "
            "launch, and a copy cannot use CUDA again. Restart the notebook; then build models, loaders and the "
            "Accelerator only inside the function, and look in earlier cells for .cuda(), .to('cuda'), "
            "torch.cuda.memory_allocated(), device='cuda' and imports that do such things (torch.cuda.is_available() "
            "and torch.cuda.device_count() are harmless)."
        )


#: Arguments of Accelerate's launcher, with the values that ask for nothing.
_IDLE: dict[str, tuple[Any, ...]] = {
    "master_addr": ("127.0.0.1", "localhost", None),
    "node_rank": (0,),
    "num_nodes": (1,),
    "rdzv_backend": ("static", "", None),
    "rdzv_endpoint": ("", None),
    "rdzv_conf": (None, {}),
    "rdzv_id": ("none", None),
    "max_restarts": (0,),
    "monitor_interval": (0.1,),
    "log_line_prefix_template": (None,),
}


def _refuse_more(more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if name not in _IDLE:
            raise TypeError(f"notebook_launcher() got an unexpected argument {name!r}.")
        if value not in _IDLE[name]:
            raise NotImplementedError(
                f"notebook_launcher({name}={value!r}) is not supported: a notebook starts processes on its own machine "
                "only, once. Write the code into a file and start it with `paceline launch`, which takes such options."
            )

"""Starts a training function in several processes from a notebook or a test."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from .. import messages
from ..devices.kinds import CUDA_KIND, kind_of
from ..processes import launch
from ..processes.devices import find_kind
from ..processes.process_group import is_shared, leave_alone
from ..processes.torch_elastic import RendezvousPoint
from ..settings import resolve
from .enums import MixedName, PrecisionType
from .process_state import FORKED, forgotten, is_initialized


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: MixedName | None = None,
    use_port: int | str | None = None,
    master_addr: str | None = None,
    node_rank: int = 0,
    num_nodes: int = 1,
    **more: Any,
) -> Any:
    """Call ``function(*args)`` in several processes from a notebook cell and return rank 0's result.

    The processes are copies of the current process, so the function may be defined in a cell and use variables from
    other cells. The function must create its own Accelerator, model and loaders, and nothing may use a GPU before the
    launch. With a single process, the function runs in the current process. After an error, the launcher can be called
    again.

    Args:
        function: the function to call in each process.
        args: arguments for the function.
        num_processes: number of processes on this machine; None starts one per GPU, or a single process if there is no
            GPU.
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``, for Accelerators that do not set their own precision.
        use_port: port for the rendezvous; None chooses a free port on a single machine, and 29500 on several.
        master_addr: address of machine 0, if there are several machines.
        node_rank: index of this machine, 0-based.
        num_nodes: number of machines. Call ``notebook_launcher`` in a notebook on each machine; it returns a result
            only on machine 0.
        **more: other arguments of Accelerate's launcher, accepted only with values that have no effect, such as
            ``max_restarts=0``.

    Raises:
        RuntimeError: a process failed (the message includes the first traceback), or CUDA is already in use.
    """
    _refuse_more(more)
    variables = {"PACELINE_MIXED_PRECISION": _precision(mixed_precision), FORKED: "1"}
    kind = "cpu" if resolve()["cpu"] else find_kind("auto")
    count = num_processes or kind_of(kind).count()
    if num_nodes == 1:
        place = RendezvousPoint(port=int(use_port or 0))
    else:
        place = launch.find_place(num_nodes, node_rank, master_addr, int(use_port or 29500), _PLACE_NAMES, _LINE)
    if count == num_nodes == 1:
        with environment({**variables, FORKED: None}):
            return function(*args)
    _refuse_used(kind, count)
    if is_initialized():
        messages.warn_once(
            "An Accelerator was created before notebook_launcher was called, so that Accelerator uses a single "
            "process. Create a new Accelerator inside the launched function, and do not use objects there that the "
            "first Accelerator prepared."
        )
    return _start(function, args, count, kind, variables, place)


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> Any:
    """Like :func:`notebook_launcher`, but always uses the CPU; for trying out multi-process code."""
    return _start(function, args, num_processes, "cpu", {"PACELINE_CPU": "true", FORKED: "1"})


def _start(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    count: int,
    kind: str,
    variables: Mapping[str, str | None],
    place: RendezvousPoint | None = None,
) -> Any:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"num_processes={count!r} is not a valid number of processes. Pass 1 or more.")
    if dist.is_available() and is_shared():
        raise RuntimeError(
            "This process is already in a process group, so it cannot launch other processes. Restart the notebook, or "
            "call PartialState().destroy_process_group() first."
        )
    if dist.is_available():
        leave_alone()  # the process group of a fit on one process
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with environment(variables), forgotten():  # the new processes have different ranks
        return launch.start(function, tuple(args), count, method, kind, place=place)


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Context manager that sets environment variables; a value of None leaves that variable unchanged."""
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
    return None if asked is None else PrecisionType(asked).value


def _refuse_used(kind: str, count: int) -> None:
    """Raise an error if CUDA is initialized, because copies of this process could not use CUDA."""
    if kind == CUDA_KIND.name and CUDA_KIND.is_initialized():
        raise RuntimeError(
            f"notebook_launcher(num_processes={count}) copies this process, but the process had already initialized "
            "CUDA, so its copies cannot use CUDA. Restart the notebook, and create models, loaders and the "
            "Accelerator only inside the function. Check earlier cells for .cuda(), .to('cuda'), device='cuda', "
            "memory queries and imports that use CUDA (asking torch whether CUDA is available, or for the number of "
            "devices, is harmless)."
        )


_PLACE_NAMES = ("master_addr", "use_port", "node_rank")
_LINE = "notebook_launcher(..., num_nodes=..., master_addr={address!r}, use_port={port}, node_rank={node})"
#: Arguments of Accelerate's launcher, each with the values that have no effect.
_IDLE: dict[str, tuple[Any, ...]] = {
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
                f"notebook_launcher: {name}={value!r} is not supported, because a notebook starts its processes only "
                "once, and they connect to each other through master_addr. Put the code in a file and start it with "
                "`paceline launch`, which accepts such options."
            )

"""A progress bar that only one process per node shows."""

from __future__ import annotations

from typing import Any

from .. import messages
from ..processes.cluster_environment import find_cluster


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Show a ``tqdm.auto.tqdm`` bar on each node's first process or, if not ``main_process_only``, on all processes.

    Raises:
        ModuleNotFoundError: tqdm is not installed.
        ValueError: the first argument is a bool.
    """
    if not messages.is_installed("tqdm"):
        raise ModuleNotFoundError(messages.missing("paceline's tqdm", "tqdm"), name="tqdm")
    if args and isinstance(args[0], bool):
        raise ValueError(
            f"tqdm({args[0]}, ...): the first argument must be the iterable. Use main_process_only={args[0]}."
        )
    from tqdm.auto import tqdm as bar

    cluster = find_cluster()
    hidden = main_process_only and cluster is not None and cluster.local_rank != 0
    return bar(*args, **{**kwargs, "disable": True if hidden else kwargs.get("disable", False)})

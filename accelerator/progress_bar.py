"""A progress bar that only one process of each machine shows."""

from __future__ import annotations

from typing import Any

from .. import messages
from ..processes.cluster_environment import find_cluster


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """``tqdm.auto.tqdm``, shown by the first process of each machine.

    Args:
        *args: of tqdm.
        main_process_only: False shows a bar for every process.
        **kwargs: of tqdm; ``disable=True`` shows none.

    Raises:
        ModuleNotFoundError: tqdm is not installed.
        ValueError: True or False came first, where tqdm expects what to iterate over.
    """
    if not messages.is_installed("tqdm"):
        raise ModuleNotFoundError(messages.missing("paceline's tqdm", "tqdm"), name="tqdm")
    if args and isinstance(args[0], bool):
        raise ValueError(
            f"tqdm({args[0]}, ...): the first argument is what to iterate over. Write main_process_only={args[0]}."
        )
    from tqdm.auto import tqdm as bar

    cluster = find_cluster()
    hidden = main_process_only and cluster is not None and cluster.local_rank != 0
    return bar(*args, **{**kwargs, "disable": True if hidden else kwargs.get("disable", False)})

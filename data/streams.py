"""Detects how other packages' iterable datasets split samples by rank, and what their saved positions include."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

#: Attributes of datasets (Hugging Face, LitData and Mosaic), and the name of the number of ranks in each.
_RANKS = {"_distributed": "world_size", "distributed_env": "world_size", "_unique_rank_world": "num_ranks"}


def num_ranks_of(dataset: Any) -> int | None:
    """Return the number of ranks across which a dataset itself splits its samples; None if it does not split them."""
    for place, name in _RANKS.items():
        known = getattr(dataset, place, None)
        if known is not None:
            return int(getattr(known, name, 1))
    processes = getattr(dataset, "num_replicas", None) or getattr(dataset, "world_size", None)
    return processes if isinstance(processes, int) and hasattr(dataset, "rank") else None


def splits_shards(dataset: Any) -> bool:
    """Return True if a WebDataset pipeline gives each rank its own shards, for any number of ranks.

    A ``WebLoader`` is also a pipeline. Its first stage is a loader, whose dataset is searched too.
    """
    stages = getattr(dataset, "pipeline", None)
    if not isinstance(stages, list):
        return False
    names = [getattr(getattr(stage, "func", stage), "__name__", "") for stage in stages]
    return "split_by_node" in names or any(splits_shards(getattr(stage, "dataset", None)) for stage in stages)


def splits_itself(dataset: Any) -> bool:
    """Return True if a dataset itself decides what each rank reads, even if there is only one rank now."""
    return num_ranks_of(dataset) is not None or splits_shards(dataset)


def counts_ranks_at_creation(dataset: Any) -> bool:
    """Return True if a dataset, such as LitData's or Mosaic's, looks up the number of ranks when it is created."""
    return any(getattr(dataset, place, None) is not None for place in ("distributed_env", "_unique_rank_world"))


def saves_position(thing: Any) -> bool:
    """Return True if a loader or dataset can save its position and resume at exactly that position."""
    state_dict, load = getattr(thing, "state_dict", None), getattr(thing, "load_state_dict", None)
    return callable(state_dict) and callable(load) and not needs_counts(thing) and not _has_shuffle_buffer(thing)


def needs_counts(dataset: Any) -> bool:
    """Return True if a dataset's ``state_dict`` needs arguments that only its own package's loader knows."""
    state_dict = getattr(dataset, "state_dict", None)
    if not callable(state_dict):
        return False
    try:
        parameters = inspect.signature(state_dict).parameters.values()
    except (TypeError, ValueError):  # written in C
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.default is one.empty and one.kind in positional for one in parameters)


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Return True if a Hugging Face dataset has a shuffle buffer, whose contents are not part of its saved position."""
    pending = [getattr(dataset, "_ex_iterable", None)]
    while pending:
        step = pending.pop()
        if step is None:
            continue
        if type(step).__name__ == "BufferShuffledExamplesIterable":
            return True
        pending += [getattr(step, "ex_iterable", None), *(getattr(step, "ex_iterables", None) or ())]
    return False


def counts_all_ranks(state: Any) -> bool:
    """Return True if a saved position counts the samples of all ranks, so that any number of ranks can use it."""
    inner = state.get("dataset", state) if isinstance(state, Mapping) else None
    return isinstance(inner, Mapping) and {"sample_in_epoch", "num_canonical_nodes"} <= inner.keys()

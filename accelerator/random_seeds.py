"""Seeds random generators, and synchronizes their states across processes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch

from .. import messages
from ..devices.kinds import accelerators, kind_of
from ..processes.cluster_environment import find_cluster
from ..processes.seed import numpy_random, seed_everything
from ..strategies.base import Strategy
from .process_state import PartialState


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's ``random``, NumPy and torch (on all devices).

    Args:
        seed: 0 to 4294967295, the same on all processes. The seed also determines the order of shuffled loaders.
        device_specific: whether to add the rank to the seed, so that dropout, for example, differs between processes.
        deterministic: whether to use only deterministic algorithms. Operations without a deterministic algorithm raise
            an error.
    """
    cluster = find_cluster()
    seed_everything(seed + (cluster.rank if device_specific and cluster is not None else 0), verbose=False)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def kinds() -> tuple[str, ...]:
    """Return the kinds of random generators that can be synchronized, including those of devices."""
    return "torch", "python", "numpy", "generator", *(kind.name for kind in accelerators())


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Broadcast the state of rank 0's random generator to all processes. Every process must call this.

    Args:
        rng_type: ``"torch"`` (torch's generator for the CPU), ``"python"``, ``"numpy"``, ``"generator"``, or a kind of
            device such as ``"cuda"``. A kind of device has no effect if the run uses another kind.
        generator: the generator to synchronize if ``rng_type`` is ``"generator"``.
    """
    share_random_state(PartialState().strategy, getattr(rng_type, "value", rng_type), generator)


def share_random_state(strategy: Strategy, kind: Any, generator: torch.Generator | None = None) -> None:
    """Like :func:`synchronize_rng_state`, but among the processes of the given strategy."""
    if kind not in kinds():
        raise ValueError(messages.unknown("rng_type", kind, kinds()))
    if kind == "python":
        random.setstate(strategy.broadcast(random.getstate()))
    elif kind == "numpy":
        numpy = numpy_random()
        if numpy is not None:
            numpy.set_state(strategy.broadcast(numpy.get_state()))
    elif kind == "torch":
        torch.set_rng_state(strategy.broadcast(torch.get_rng_state()))
    elif kind == strategy.device.type:
        state = kind_of(kind).random_state(strategy.device)
        if state is not None:
            kind_of(kind).set_random_state(strategy.broadcast(state), strategy.device)
    elif kind == "generator":
        if generator is None:
            raise ValueError("synchronize_rng_state('generator') needs a generator. Pass generator=...")
        generator.set_state(strategy.broadcast(generator.get_state()))


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """Call :func:`synchronize_rng_state` for several kinds of random generators."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)

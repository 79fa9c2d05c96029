"""``join_uneven_inputs``: processes that have fewer batches than others step aside instead of letting them wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed.algorithms.join import Join, Joinable

from .. import messages

if TYPE_CHECKING:
    from .accelerator import Accelerator


@contextmanager
def join_uneven_inputs(
    accelerator: Accelerator, joinables: Sequence[Any], even_batches: bool | None = None
) -> Iterator[None]:
    """Context in which processes may have different numbers of batches, on any device.

    A process that has no more batches answers the others' communication of gradients until they are done too; then
    all have the model of the one that went on longest. Only what DistributedDataParallel communicates is answered:
    leave ``gather`` and the like, and ``backward(num_items=...)``, out of the loop.

    Args:
        accelerator: whose processes they are.
        joinables: prepared models that are trained inside, and optimizers that communicate (ZeroRedundancyOptimizer).
        even_batches: False lets prepared loaders give every sample once, so that some processes may have a batch less;
            True gives all as many, and nothing is to be joined; None: as the loaders are.

    Raises:
        ValueError: a model that is not prepared.
        NotImplementedError: a model that is sharded over the processes (FSDP, DeepSpeed, ...).
    """
    found = [_joinable(accelerator, one) for one in joinables]
    shadowed: list[Joinable] = [one for one in found if one is not None]
    before = [(loader, loader.even_batches) for loader in accelerator._dataloaders]
    if even_batches is not None:
        for loader, _ in before:
            loader.even_batches = even_batches
    uneven = not all(loader.even_batches for loader, _ in before) or not before
    try:
        if shadowed and uneven:
            with Join(shadowed, throw_on_early_termination=False):
                yield
        else:
            yield
    finally:
        for loader, even in before:
            loader.even_batches = even


def _joinable(accelerator: Accelerator, one: Any) -> Joinable | None:
    """What torch's Join takes for an object; None: it communicates nothing."""
    placement = accelerator._placements.get(id(one))
    if placement is not None:
        return placement.strategy.joinable()
    one = getattr(one, "optimizer", one)
    if isinstance(one, Joinable):
        return one
    raise ValueError(
        f"join_uneven_inputs got {messages.a(one)} that this accelerator has not prepared and that torch cannot "
        "join. Pass the models that accelerator.prepare returned."
    )

"""Adjusts losses that a loop gathers once per sample, so that the mean of all losses is weighted by sample count.

Such loops call ``gather_for_metrics(loss.repeat(batch_size))`` with a loss that is the mean over a process's samples.
``transformers.Trainer`` first gathers the number of items (tokens) in the batch. Each process then divides the sum of
its own items' losses by that number, and multiplies the result by the number of processes. The mean over all processes
is then the loss of the batch, even if the processes have different numbers of samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...accelerator.accumulation import GradientState
from ...accelerator.nested_tensors import recursively_apply
from ...accelerator.operations import gather
from ...strategies.base import Strategy
from .loaders import DataLoaderShard


def note_items(state: GradientState, counted: Any) -> None:
    """Store ``counted`` if it is an item count for the last batch of a pass.

    The user's loop gathers such a count, or sums it over processes.
    """
    number = isinstance(counted, Tensor) and counted.dtype == torch.int64 and counted.numel() == 1
    if number and state.end_of_dataloader:
        state.counted = state.active_dataloader, counted


def once_per_sample(data: Any, loader: DataLoaderShard, state: GradientState, strategy: Strategy, split: bool) -> Any:
    """Return the data that a loop gathers for a batch, with exactly one copy of the loss per sample of this process.

    Every process must call this.

    Args:
        data: the data that the loop gathers.
        loader: the loader of the batch.
        state: the gradient state of the Accelerator that gathers.
        strategy: the Accelerator's strategy.
        split: whether processes share batches, so that each process repeats its loss for the samples of all processes.
    """
    total = loader.total_batch_size or 0
    full = total // strategy.num_data_ranks
    size, samples, rows = total if split else full, loader.samples, loader.batch_rows
    if state.counted is not None and state.counted[0] is loader:
        data = _loss_of_all(data, size, samples, samples < full, state, strategy)

    def cut(value: Tensor) -> Tensor:
        repeated = value.dim() and len(value) == size and (rows != size or _is_repeated(value, size))
        return value[:samples] if repeated else value

    return recursively_apply(cut, data) if samples < size else data


def _is_repeated(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.shape == (size,) and bool((value == value[0]).all())


def _loss_of_all(value: Any, size: int, samples: int, short: bool, state: GradientState, strategy: Strategy) -> Any:
    """Return the loss over all processes for the last batch of a pass.

    If ``value`` does not consist of copies of this process's loss, return ``value`` unchanged.
    """
    loader, items = state.counted or (None, None)
    if items is None:
        return value
    own = [1, short, samples > 0, items, value[0]] if _is_repeated(value, size) else [0] * 5
    row = torch.tensor([[float(number) for number in own]], dtype=torch.float64, device=strategy.device)
    repeated, uneven, counts, numbers, losses = gather(row, strategy, strategy.data_group).unbind(1)
    if not repeated.all():
        return value
    state.counted = loader, None
    if not uneven.any():
        return value
    # A process without samples repeats another process's, whose items must not be counted twice.
    whole = (losses * counts).mean() * numbers.sum() / (numbers * counts).sum()
    return torch.full_like(value, whole.item())

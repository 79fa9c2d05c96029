"""Losses that a loop gathers once per sample, so that their mean is weighted by the number of samples.

Such loops call ``gather_for_metrics(loss.repeat(batch_size))`` with a loss that is the mean over a process's samples.
``transformers.Trainer`` also gathers the number of items (tokens) in the batch before, divides the sum over its own
items by that number, and multiplies it by the number of processes. Then the mean of all processes' losses is the loss
of the batch, whichever numbers of samples they have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...accelerator.accumulation import GradientState
from ...accelerator.operations import gather
from ...strategies.base import Strategy


def note_items(state: GradientState, gathered: Any) -> None:
    """Remember a number of items that a loop gathers for the last batch of a pass."""
    number = isinstance(gathered, Tensor) and gathered.dtype == torch.int64 and not gathered.dim()
    if number and state.end_of_dataloader:
        state.counted = state.active_dataloader, gathered


def loss_of_all(value: Any, size: int, full: int, state: GradientState, strategy: Strategy) -> Any:
    """Return the loss of the last batch on all processes if ``value`` repeats a process's part of it; else ``value``.

    Every process must call this.

    Args:
        value: what the loop gathers.
        size: how often a loss is repeated.
        full: number of samples in a full batch of one process.
        state: the state of the Accelerator that gathers.
        strategy: its strategy.
    """
    loader, items = state.counted or (None, None)
    if items is None or loader is None or loader is not state.active_dataloader:
        return value
    repeats = isinstance(value, Tensor) and value.shape == (size,) and bool((value == value[0]).all())
    own = [1, loader.rows < full, loader.rows > 0, items, value[0]] if repeats else [0] * 5
    row = torch.tensor([[float(number) for number in own]], dtype=torch.float64, device=strategy.device)
    repeated, uneven, counts, numbers, losses = gather(row, strategy, strategy.data_group).unbind(1)
    if not repeated.all():
        return value
    state.counted = loader, None
    if not uneven.any():
        return value
    # A process without samples of its own repeats another one's, which the number of items must not include.
    whole = (losses * counts).mean() * numbers.sum() / (numbers * counts).sum()
    return torch.full_like(value, whole.item())

"""Local SGD: processes train independently for some steps, then average their parameters."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn

from .. import messages

if TYPE_CHECKING:
    from .accelerator import Accelerator


class LocalSGD:
    """Context manager that averages parameters every few updates and on exit, instead of synchronizing gradients.

    Averaging reduces communication, but the result differs from synchronous training. Optimizer states and running
    statistics, such as those of batch norm, are not averaged, so they differ between processes.

    Example:
        >>> with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:  # doctest: +SKIP
        ...     for batch in loader:
        ...         accelerator.backward(model(**batch).loss)
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         local_sgd.step()

    References:
        Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019.

    Args:
        accelerator: the Accelerator that prepared the model.
        model: the prepared model.
        local_sgd_steps: number of updates between parameter averages.
        enabled: if False, synchronize gradients in every step as usual.

    Raises:
        ValueError: the model is not prepared, or ``local_sgd_steps`` is less than 1.
        NotImplementedError: the model is sharded (FSDP, DeepSpeed, ...).
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if local_sgd_steps < 1:
            raise ValueError(f"LocalSGD: local_sgd_steps={local_sgd_steps!r} is less than 1. Pass 1 or more.")
        placement = accelerator.prepared.placements.get(id(model))
        if placement is None:
            raise ValueError(
                f"LocalSGD got {messages.a(model)} that this accelerator has not prepared. Pass the model that "
                "accelerator.prepare returned."
            )
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        self._placement, self._strategy = placement, placement.strategy
        self._apart = ExitStack()

    def __enter__(self) -> LocalSGD:
        self.num_steps = self._placement.local_steps  # not 0 if a state was loaded that was saved inside the block
        if self.enabled:
            self._strategy.replicas_differ = True
            self._apart.enter_context(self._strategy.keep_gradients_local())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._apart.close()
        steps, self._placement.local_steps = self._placement.local_steps, 0
        if self.enabled and error is None and steps % self.local_sgd_steps:
            self._average()

    def step(self) -> None:
        """Count an update; call this after ``optimizer.step()``. Does nothing in an incomplete accumulation window."""
        if not self.accelerator.sync_gradients:
            return
        self.num_steps = self._placement.local_steps = self._placement.local_steps + 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.copy_(self._strategy.reduce(parameter, "mean"))

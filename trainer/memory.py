"""Out of memory: what was tried, and what to try next, with numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .data.batches import batch_size_of

if TYPE_CHECKING:
    from .trainer import Trainer


def out_of_memory(trainer: Trainer, error: BaseException) -> BaseException | None:
    """An error of the same type that says what to change; None if ``error`` is something else."""
    if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
        return None
    batch = trainer._metrics.batch
    size = None if batch is None else batch_size_of(batch)
    place = ", ".join(filter(None, (trainer.state.where(), f"{size} samples in the batch" if size else "")))
    advice = "; ".join(_advice(trainer, size))
    kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else type(error)
    return kind(
        f"The {trainer.strategy.device.type} of rank {trainer.global_rank} is out of memory ({place}; precision "
        f"{trainer.precision!r}, {type(trainer.strategy).__name__} on {trainer.world_size} processes): "
        f"{str(error).splitlines()[0]} Try, in this order: {advice}."
    )


def _advice(trainer: Trainer, size: int | None) -> list[str]:
    found = []
    training = trainer.state.stage == "train"
    if size is not None and size > 1:
        more = f" and accumulate_grad_batches={2 * trainer.accumulate_grad_batches}, which learns the same"
        found.append(f"batch_size={size // 2}{more if training else ''}")
    if trainer.precision in ("32-true", "64-true"):
        found.append("precision='bf16-mixed', which halves what the step keeps for backward")
    if training:
        found.append("activation checkpointing (torch.utils.checkpoint in your blocks, or of FSDPStrategy)")
    if not trainer.strategy.communicates_forward:
        several = max(2, trainer.world_size)
        found.append(
            f"strategy='fsdp' with devices={several}, so that each process holds 1/{several} of the weights"
            f"{', gradients and optimizer state' if training else ''}"
        )
    else:
        found.append("more processes, or FSDPStrategy(cpu_offload=True)")
    return found

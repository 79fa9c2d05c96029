"""What is said when memory runs out: where, what lies in it, and what to change, each with what it would save."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import messages
from ..data.batches import batch_size_of
from .out_of_memory_retry import is_out_of_memory

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..strategies.base import Strategy
    from ..trainer.run import Run

_EXPLAINED = "_paceline_explained"


class Door(NamedTuple):
    """How things are asked for: of a Trainer, or of an Accelerator."""

    accumulate: str
    precision: str
    sharded: str
    offloaded: str


TRAINER = Door(
    accumulate="accumulate_grad_batches={}",
    precision="precision='bf16-mixed'",
    sharded="strategy='fsdp' with devices={}",
    offloaded="FSDPStrategy(cpu_offload=True)",
)
ACCELERATOR = Door(
    accumulate="gradient_accumulation_steps={}",
    precision="mixed_precision='bf16'",
    sharded="Accelerator(strategy='fsdp') on {} processes (paceline launch --num_processes {})",
    offloaded="Accelerator(strategy='fsdp_cpu_offload')",
)


class Sizes(NamedTuple):
    """Bytes in this process.

    Attributes:
        weights: parameters and buffers; of those in parts, this process's.
        gradients: that are there now.
        optimizer: the optimizers' state.
        trained: what the gradients take once they are all there.
        highest: the most that was ever in use: on CUDA of the device's memory, elsewhere by the whole process.
    """

    weights: int
    gradients: int
    optimizer: int
    trained: int
    highest: int

    @property
    def lasting(self) -> int:
        """What a training has in memory at the end of a backward, besides what it keeps for backward."""
        return self.weights + max(self.gradients, self.trained) + self.optimizer

    @property
    def kept(self) -> int:
        """At most so much was kept for backward, or needed for a moment."""
        return max(0, self.highest - self.weights - self.gradients - self.optimizer)


class Situation(NamedTuple):
    """What ran when memory ended.

    Attributes:
        door: how to ask for something else.
        place: where the run is, in words.
        strategy: of the model.
        modules: that hold the weights.
        optimizers: their optimizers.
        samples: in the batch of one process; None: not known.
        accumulate: micro-batches in a window.
        training: or an evaluation.
    """

    door: Door
    place: str
    strategy: Strategy
    modules: list[nn.Module]
    optimizers: list[Optimizer]
    samples: int | None
    accumulate: int
    training: bool


def out_of_memory(run: Run, error: BaseException) -> BaseException | None:
    """An error that says what to change; None if ``error`` is something else."""
    if not needs_words(error):
        return None
    batch = run.metrics.batch
    module = run.module
    return explained(
        error,
        Situation(
            TRAINER,
            run.state.where(),
            run.strategy,
            [] if module is None else [module],
            list(run.optimizers),
            None if batch is None else batch_size_of(batch),
            run.trainer.accumulate_grad_batches,
            run.state.stage == "train",
        ),
    )


def needs_words(error: BaseException) -> bool:
    """Whether an error says that memory ran out, and not yet what to do about it."""
    return is_out_of_memory(error) and not hasattr(error, _EXPLAINED)


def explained(error: BaseException, now: Situation) -> BaseException:
    """An error with the sizes and what to try: torch's own, or a RuntimeError for those of drivers and libraries."""
    strategy, device = now.strategy, now.strategy.device
    sizes = measure(now.modules, now.optimizers, device)
    samples = f"{now.samples} samples in the batch" if now.samples else ""
    place = ", ".join(filter(None, (now.place, samples)))
    of_whom = "GPU memory" if device.type == "cuda" else "memory of the process"
    advice = "; ".join(f"({number}) {one}" for number, one in enumerate(_advice(now, sizes), 1))
    kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else RuntimeError
    found = kind(
        f"The {device.type} of rank {strategy.global_rank} is out of memory ({place}; precision "
        f"{strategy.precision.name!r}, {type(strategy).__name__} on {strategy.world_size} processes): "
        f"{str(error).splitlines()[0]} It holds weights of {messages.size(sizes.weights)}, gradients of "
        f"{messages.size(sizes.gradients)} and optimizer state of {messages.size(sizes.optimizer)}; the most {of_whom} "
        f"in use was {messages.size(sizes.highest)}. Try, in this order: {advice}."
    )
    setattr(found, _EXPLAINED, True)
    return found


def measure(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer], device: torch.device) -> Sizes:
    """What weights, gradients and optimizer state take on this process's device."""
    held = {id(value): value for module in modules for value in (*module.parameters(), *module.buffers())}
    trained = [value for value in held.values() if value.requires_grad]
    states = [optimizer.state for optimizer in optimizers]
    leaves = [value for state in states for value in pytree.tree_leaves(list(state.values()))]
    return Sizes(
        _bytes(held.values(), device),
        _bytes((value.grad for value in trained if value.grad is not None), device),
        _bytes((value for value in leaves if isinstance(value, Tensor)), device),
        _bytes(trained, device),
        _highest(device),
    )


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    local = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)  # of a DTensor, this process's part
    return sum(tensor.numel() * tensor.element_size() for tensor in local if tensor.device.type == device.type)


def _highest(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # on Windows nobody counts
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _advice(now: Situation, sizes: Sizes) -> Iterator[str]:
    kept, door, full = sizes.kept, now.door, now.strategy.precision.name in ("32-true", "64-true")
    if now.samples is not None and now.samples > 1:
        more = f" with {door.accumulate.format(2 * now.accumulate)}, which learns the same" if now.training else ""
        yield f"batch_size={now.samples // 2}{more} (saves up to {messages.size(kept / 2)})"
    if full:
        yield f"{door.precision}, which keeps 16 bits for backward (saves up to {messages.size(kept / 2)})"
    if now.training:
        yield (
            "activation checkpointing (torch.utils.checkpoint in your blocks, or of FSDPStrategy), which runs blocks "
            f"again in backward (saves most of {messages.size(kept)})"
        )
    yield from _spread(now, sizes)


def _spread(now: Situation, sizes: Sizes) -> Iterator[str]:
    """Weights, gradients and optimizer state elsewhere."""
    strategy, door = now.strategy, now.door
    lasting = sizes.lasting if now.training else sizes.weights
    what = "weights, gradients and optimizer state" if now.training else "weights"
    if not strategy.communicates_forward:
        several = max(2, strategy.world_size)
        saved = lasting * (1 - 1 / several)
        sharded = door.sharded.format(several, several)
        yield f"{sharded}: each process holds 1/{several} of {what} (saves {messages.size(saved)})"
    else:
        yield (
            f"{2 * strategy.world_size} processes in the place of {strategy.world_size} (saves "
            f"{messages.size(lasting / 2)})"
        )
    on_host = type(getattr(strategy, "offload", None)).__name__ == "CPUOffloadPolicy"
    if strategy.device.type != "cpu" and not on_host:  # on the CPU the host's memory is what ran out
        yield f"{door.offloaded}: {what} in the host's memory (saves up to {messages.size(lasting)})"

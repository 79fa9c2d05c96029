"""Build an out-of-memory error that says where memory ran out, what uses it, what to change and how much that saves."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from .. import messages
from ..data.batches import batch_size_of
from ..devices.kinds import kind_of
from ..torch_private import local_part, pytree
from .out_of_memory_retry import is_out_of_memory

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..strategies.base import Strategy
    from ..trainer.run import Run

_EXPLAINED = "_paceline_explained"


class Door(NamedTuple):
    """The arguments that the advice mentions, as a user of the Trainer or the Accelerator writes them."""

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


class MemorySizes(NamedTuple):
    """Bytes used in this process.

    Attributes:
        weights: parameters and buffers; if sharded, this process's shards.
        gradients: current gradients.
        optimizer: the optimizers' state.
        trained: all gradients, once every trainable parameter has one.
        highest: peak memory use of the device or, if the device does not count its memory, of the entire process.
    """

    weights: int
    gradients: int
    optimizer: int
    trained: int
    highest: int

    @property
    def lasting(self) -> int:
        """Bytes in use at the end of a backward pass in training, excluding activations."""
        return self.weights + max(self.gradients, self.trained) + self.optimizer

    @property
    def kept(self) -> int:
        """Upper bound on the bytes used by temporary tensors and by activations kept for the backward pass."""
        return max(0, self.highest - self.weights - self.gradients - self.optimizer)


class Situation(NamedTuple):
    """What was running when memory ran out.

    Attributes:
        place: the run's position, in words.
        samples: samples in one process's batch; None if unknown.
        accumulate: micro-batches in an accumulation window.
        training: whether the run is training rather than evaluating.
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
    """Return an error that says what to change; None unless ``error`` is an unexplained out-of-memory error."""
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
    """Return True if an error is an out-of-memory error whose text does not yet say what to do."""
    return is_out_of_memory(error) and not hasattr(error, _EXPLAINED)


def explained(error: BaseException, now: Situation) -> BaseException:
    """Return an error with sizes and advice: ``torch.OutOfMemoryError`` if ``error`` is one, else RuntimeError."""
    strategy, device = now.strategy, now.strategy.device
    sizes = measure(now.modules, now.optimizers, device)
    samples = f"batch size {now.samples}" if now.samples else ""
    place = ", ".join(filter(None, (now.place, samples)))
    of_whom = "GPU memory" if kind_of(device).counts_memory() else "process memory"
    advice = "; ".join(f"({number}) {one}" for number, one in enumerate(_advice(now, sizes), 1))
    kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else RuntimeError
    found = kind(
        f"The {device.type} device of rank {strategy.global_rank} is out of memory ({place}; precision "
        f"{strategy.precision.name!r}, {type(strategy).__name__} on {strategy.world_size} "
        f"process{'es' * (strategy.world_size != 1)}): {str(error).splitlines()[0]} On this rank, weights take "
        f"{messages.size(sizes.weights)}, gradients {messages.size(sizes.gradients)} and optimizer state "
        f"{messages.size(sizes.optimizer)}; peak {of_whom} use was {messages.size(sizes.highest)}. Try, in this order: "
        f"{advice}."
    )
    setattr(found, _EXPLAINED, True)
    return found


def measure(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer], device: torch.device) -> MemorySizes:
    """Return the sizes of weights, gradients and optimizer state on this process's device."""
    held = {id(value): value for module in modules for value in (*module.parameters(), *module.buffers())}
    trained = [value for value in held.values() if value.requires_grad]
    states = [optimizer.state for optimizer in optimizers]
    leaves = [value for state in states for value in pytree.tree_leaves(list(state.values()))]
    return MemorySizes(
        _bytes(held.values(), device),
        _bytes((value.grad for value in trained if value.grad is not None), device),
        _bytes((value for value in leaves if isinstance(value, Tensor)), device),
        _bytes(trained, device),
        _highest(device),
    )


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    local = map(local_part, tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local if tensor.device.type == device.type)


def _highest(device: torch.device) -> int:
    if kind_of(device).counts_memory():
        return kind_of(device).peak_memory(device)
    try:
        import resource
    except ImportError:  # not available on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _advice(now: Situation, sizes: MemorySizes) -> Iterator[str]:
    kept, door, full = sizes.kept, now.door, now.strategy.precision.name in ("32-true", "64-true")
    if now.samples is not None and now.samples > 1:
        more = (
            (f" with {door.accumulate.format(2 * now.accumulate)}, which keeps the updates the same")
            if now.training
            else ""
        )
        yield f"batch_size={now.samples // 2}{more} (saves up to {messages.size(kept / 2)})"
    if full:
        yield f"{door.precision}, which keeps activations in 16 bits (saves up to {messages.size(kept / 2)})"
    if now.training:
        yield (
            "activation checkpointing (torch.utils.checkpoint in your blocks, or FSDPStrategy's), which recomputes "
            f"blocks in backward (saves most of {messages.size(kept)})"
        )
    yield from _spread(now, sizes)


def _spread(now: Situation, sizes: MemorySizes) -> Iterator[str]:
    """Yield advice on how to move weights, gradients and optimizer state to other processes or to host memory."""
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
            f"{2 * strategy.world_size} processes instead of {strategy.world_size} (saves {messages.size(lasting / 2)})"
        )
    on_host = type(getattr(strategy, "offload", None)).__name__ == "CPUOffloadPolicy"
    if strategy.device.type != "cpu" and not on_host:  # on the CPU, host memory is what ran out
        yield f"{door.offloaded}: {what} in host memory (saves up to {messages.size(lasting)})"

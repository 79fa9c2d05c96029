"""Estimates the memory that a model and its training need, without allocating it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import CPUOffloadPolicy

from .. import messages
from ..data.batches import batch_size_of
from ..strategies.base import SingleDevice, Strategy
from ..strategies.choose import SEVERAL, named
from ..strategies.ddp import DDPStrategy
from ..strategies.fsdp.strategy import FSDPStrategy
from ..strategies.precision.choose import choose_precision
from ..strategies.precision.mixed import MixedPrecision
from ..strategies.precision.transformer_engine import TransformerEnginePrecision
from .simulated_training import PHASES, NoLauncher, Rehearsal, optimizers_of

if TYPE_CHECKING:
    from ..strategies.choose import StrategyName
    from ..strategies.precision.base import Precision
    from ..strategies.precision.choose import PrecisionAlias, PrecisionName
    from .tensor_lifetimes import MemoryUse

_SINGLE = ("auto", *SingleDevice.names)
_NAMES = (*SingleDevice.names, *(name for name, (file, *_) in SEVERAL.items() if file in ("ddp", "fsdp.strategy")))


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that one process needs for training, in bytes.

    The peak is less than the sum of weights, gradients, optimizer state and activations, because activations are freed
    while gradients are created.

    Attributes:
        precision: precision, as in ``Trainer(precision=...)``.
        strategy: name of the strategy.
        num_processes: number of processes.
        batch_size: number of samples in one process's batch; None if no batch was given.
        weights: bytes of parameters and buffers; with sharding, only this process's shards.
        gradients: bytes of gradients during the optimizer step.
        optimizer: bytes of the optimizer's state.
        activations: bytes of the batch and of the tensors that forward saves for backward; None if no batch was given,
            or if the step runs backward itself.
        training: peak memory during training; only a lower bound if no batch was given.
        training_phase: phase in which the peak occurs: ``"forward"``, ``"backward"``, ``"optimizer step"`` or
            ``"setup"``.
        training_at_peak: bytes of each part of the peak: ``weights``, ``gradients``, ``optimizer``, ``activations``,
            ``gathered`` (DDP's buckets, or the weights that FSDP has gathered from other processes) and ``temporary``.
        inference: peak memory of a forward pass without gradients; None whenever ``activations`` is None.
        host: host memory used by ``cpu_offload``.
        guessed: whether the step reads values from tensors; if so, the memory that it needs may depend on these values.
    """

    precision: str
    strategy: str
    num_processes: int
    batch_size: int | None
    weights: int
    gradients: int
    optimizer: int
    activations: int | None
    training: int
    training_phase: str
    training_at_peak: dict[str, int]
    inference: int | None
    host: int = 0
    guessed: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as plain data."""
        return asdict(self)


def estimate_memory(
    module: nn.Module,
    batch: Any = None,
    *,
    optimizer: str | Callable[[list[nn.Parameter]], Any] | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    precision: PrecisionName | PrecisionAlias | Precision = "32-true",
    strategy: StrategyName | Strategy = "single_device",
    num_processes: int = 1,
    accumulate_grad_batches: int = 1,
    activation_checkpointing: Any = None,
    device: str | torch.device = "cpu",
) -> MemoryEstimate:
    """Estimate the memory needed for training by running two steps on tensors that have shapes but no memory.

    Forward, backward and update run as they would under the strategy and the precision, and gradients are cleared after
    the update. FSDP runs torch's ``fully_shard`` in a process group that sends nothing. DDP is estimated as one process
    plus its buckets, which are a copy of all gradients (except with ``gradient_as_bucket_view``, which avoids the
    copy). The estimate excludes the process itself (Python, torch, a CUDA context of about 0.5 GiB), memory inside
    library operations, allocator fragmentation, and the setup of the run.

    Args:
        module: a model or a ``TrainingModule``, possibly on the meta device; the estimate uses a copy.
        batch: one process's batch; if None, only weights, gradients and optimizer state are estimated. A plain module
            gets a mapping as keyword arguments, and a tuple or list as positional arguments.
        optimizer: a name in ``torch.optim``, or a function that creates an optimizer from parameters; None uses
            ``configure_optimizers``, or AdamW for a plain module.
        loss: ``loss(module, batch)``; None uses ``training_step``, or else the output's ``loss``, or else the sum of
            the outputs' means.
        precision: same as in ``Trainer(precision=...)``.
        strategy: ``"single_device"``, ``"ddp"``, ``"fsdp"``, ``"fsdp_cpu_offload"``, or a ``DDPStrategy`` or
            ``FSDPStrategy``.
        num_processes: number of processes for DDP and FSDP.
        accumulate_grad_batches: number of micro-batches per optimizer step.
        activation_checkpointing: True to recompute the repeated blocks, or a value that ``FSDPStrategy`` accepts.
        device: device whose kernels are simulated; on a machine without a GPU, estimates for a GPU use the CPU's
            kernels.

    Raises:
        ValueError: a name is unknown, or arguments contradict each other.
        RuntimeError: the step fails on fake tensors. Leave out ``batch`` to estimate everything except activations.

    Example:
        >>> found = estimate_memory(nn.Linear(1000, 1000), torch.empty(8, 1000), precision="bf16-mixed")
        >>> found.weights, found.optimizer
        (4004000, 8008008)
    """
    if strategy in _SINGLE and num_processes != 1:
        raise ValueError(
            f"estimate_memory: strategy={strategy!r} and num_processes={num_processes} contradict each other, because "
            "this strategy runs in a single process. Use strategy='ddp' or 'fsdp'."
        )
    return estimate_strategies(
        module,
        batch,
        [strategy],
        optimizer=optimizer,
        loss=loss,
        precision=precision,
        num_processes=num_processes,
        accumulate_grad_batches=accumulate_grad_batches,
        activation_checkpointing=activation_checkpointing,
        device=device,
    )[0]


def estimate_strategies(
    module: nn.Module,
    batch: Any,
    strategies: Iterable[StrategyName | Strategy],
    *,
    optimizer: str | Callable[[list[nn.Parameter]], Any] | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    precision: PrecisionName | PrecisionAlias | Precision = "32-true",
    num_processes: int = 1,
    accumulate_grad_batches: int = 1,
    activation_checkpointing: Any = None,
    device: str | torch.device = "cpu",
) -> list[MemoryEstimate]:
    """Like :func:`estimate_memory`, but for several strategies, which share simulated steps if possible."""
    found, run = [], {}
    for asked in strategies:
        processes = 1 if asked in _SINGLE else num_processes
        plan = _plan(asked, precision, processes, torch.device(device), activation_checkpointing)
        if plan.key not in run:
            rehearsal = run[plan.key] = Rehearsal(
                module,
                batch,
                plan.strategy,
                partial(optimizers_of, asked=optimizer),
                loss,
                plan.activation_checkpointing,
                min(accumulate_grad_batches, 2),
            )
            _run(rehearsal, type(module).__name__, batch is not None)
        found.append(_read(run[plan.key], plan, processes, batch))
    return found


class _SimulationPlan(NamedTuple):
    """The strategy to simulate, and how to adjust the result of the simulation."""

    name: str
    strategy: Strategy
    activation_checkpointing: Any
    shared: bool = True
    buckets: bool = False
    views: bool = False
    offload: bool = False

    @property
    def key(self) -> Any:
        """A key that is the same for plans that share a simulation."""
        return type(self.strategy) if self.shared else id(self.strategy)


def _plan(asked: Any, precision: Any, processes: int, device: torch.device, checkpointing: Any) -> _SimulationPlan:
    chosen = _precision(precision, device)
    if isinstance(asked, str) and asked in _SINGLE:
        return _SimulationPlan("single_device", SingleDevice(device, chosen), checkpointing)
    by_name = isinstance(asked, str)
    if isinstance(asked, str):
        if asked not in _NAMES:
            raise ValueError(messages.unknown("strategy", asked, _NAMES, " for an estimate"))
        found: Any = named(asked)
    else:
        found = copy.copy(asked)
    if isinstance(found, DDPStrategy):
        views = bool(found.ddp_options.get("gradient_as_bucket_view"))
        return _SimulationPlan("ddp", SingleDevice(device, chosen), checkpointing, True, buckets=True, views=views)
    if type(found) is not FSDPStrategy:
        raise ValueError(
            f"estimate_memory does not support strategy={type(found).__name__}. Pass a DDPStrategy, an "
            f"FSDPStrategy, or a name: {messages.names(_NAMES)}."
        )
    offload = isinstance(found.offload, CPUOffloadPolicy)
    plain = FSDPStrategy()
    found.offload = plain.offload
    if checkpointing is not None:
        found.activation_checkpointing = checkpointing
    found.precision = chosen
    found.cluster_environment = NoLauncher()
    found.place([device] * processes)
    return _SimulationPlan("fsdp_cpu_offload" if offload else "fsdp", found, None, by_name, offload=offload)


def _precision(asked: Any, device: torch.device) -> Precision:
    found = choose_precision(asked, None, device.type)
    if found.quantizes:
        raise ValueError(
            f"estimate_memory does not support precision={found.name!r}, because weights without values cannot be "
            "quantized. Use precision='bf16-mixed', and subtract the memory that quantizing the frozen weights saves."
        )
    if isinstance(found, TransformerEnginePrecision):
        raise ValueError(
            f"estimate_memory does not support precision={found.name!r}, because TransformerEngine's layers need a "
            "GPU. Use precision='bf16-true' instead; its weights take the same amount of memory."
        )
    if found.name == "16-mixed":  # overflows cannot be simulated, so leave out the scale, which takes 4 bytes
        found = MixedPrecision("16-mixed", scaler=GradScaler(device.type, enabled=False))
    vars(found)["convert_module"] = lambda module: module  # the copy already has the dtype
    return found


def _run(rehearsal: Rehearsal, owner: str, steps: bool) -> None:
    with rehearsal.running():
        rehearsal.set_up()
        if steps:
            _train(rehearsal, owner)
        else:
            rehearsal.update_alone()


def _train(rehearsal: Rehearsal, owner: str) -> None:
    try:
        rehearsal.infer()
        rehearsal.train()  # the optimizer state exists from here on
        rehearsal.train()
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise RuntimeError(
            f"The memory that a step of {owner} needs cannot be estimated, because the step raised an error on "
            f"fake tensors, which have shapes but no values: {type(error).__name__}: {first} If the step works with "
            "real tensors, it reads values from tensors, or uses an operation whose output shape torch cannot infer. "
            "Leave out the batch to estimate only weights, gradients and optimizer state."
        ) from error


def _read(rehearsal: Rehearsal, plan: _SimulationPlan, processes: int, batch: Any) -> MemoryEstimate:
    ledger = rehearsal.ledger
    training = ledger.most
    constant: dict[str, int] = {}
    if plan.buckets:
        constant = {"gathered": training["gradients"]}
        if plan.views:
            constant = {"gathered": 0, "gradients": training["gradients"]}
    rest = training["weights"] + training["gradients"] + training["optimizer"]
    if plan.offload:
        constant = dict.fromkeys(("weights", "gradients", "optimizer"), 0)
    peak: MemoryUse = ledger.peak(PHASES.__contains__, constant)
    inference = ledger.peak("inference".__eq__, {"weights": 0} if plan.offload else None)
    return MemoryEstimate(
        precision=rehearsal.strategy.precision.name,
        strategy=plan.name,
        num_processes=processes,
        batch_size=None if batch is None else batch_size_of(batch),
        weights=training["weights"],
        gradients=training["gradients"],
        optimizer=training["optimizer"],
        activations=training["activations"] if batch is not None and rehearsal.automatic else None,
        training=peak.bytes,
        training_phase=peak.phase,
        training_at_peak=peak.by_kind,
        inference=inference.bytes or None,
        host=rest if plan.offload else 0,
        guessed=ledger.guessed,
    )


def largest_layer(sizes: dict[str, int]) -> tuple[str, int]:
    """Return the name and size of the largest block or layer; each of these must fit on one device.

    Args:
        sizes: bytes by parameter name. ``blocks.3.mlp.weight`` belongs to the block ``blocks.3``. A parameter whose
            name has no number belongs to its layer.
    """
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        parts = name.split(".")[:-1]
        number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
        layer = ".".join(parts[: number + 1])
        layers[layer] = layers.get(layer, 0) + size
    return max(layers.items(), key=lambda item: item[1], default=("", 0))

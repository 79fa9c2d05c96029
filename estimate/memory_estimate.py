"""How much memory a model and its training take, found without taking any."""

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
from ..strategies.distributed import DistributedStrategy
from ..strategies.fsdp.strategy import FSDPStrategy
from ..strategies.precision.choose import choose_precision
from ..strategies.precision.mixed import MixedPrecision
from .simulated_training import PHASES, Rehearsal, optimizers_of

if TYPE_CHECKING:
    from ..strategies.choose import StrategyName
    from ..strategies.precision.base import Precision
    from ..strategies.precision.choose import PrecisionAlias, PrecisionName
    from .tensor_lifetimes import Moment

_SINGLE = ("auto", *SingleDevice.names)
_NAMES = (*SingleDevice.names, *(name for name, (file, *_) in SEVERAL.items() if file in ("ddp", "fsdp.strategy")))


@dataclass(frozen=True)
class MemoryEstimate:
    """What one process of a training has in memory, in bytes.

    The peak is less than the sum of the parts: gradients come while activations go.

    Attributes:
        precision: as in ``Trainer(precision=...)``.
        strategy: its name.
        num_processes: over which weights and data are spread.
        batch_size: samples of one process in a batch; None where no batch was given.
        weights: parameters and buffers, of which a sharded process holds its part.
        gradients: those that the update finds.
        optimizer: the optimizer's state.
        activations: what forward leaves for backward, with the batch; None where no batch was given, or the step runs
            backward itself.
        training: the peak of a training; a lower bound where no batch was given.
        training_phase: what runs at the peak: ``"forward"``, ``"backward"``, ``"optimizer step"`` or ``"setup"``.
        training_at_peak: what the peak is made of: ``weights``, ``gradients``, ``optimizer``, ``activations``,
            ``gathered`` (DDP's buckets; under FSDP what is put together of the other processes' parts) and
            ``temporary``.
        inference: the peak of a pass without gradients; None where no batch was given, or the step runs
            backward itself.
        host: what lies in the host's memory instead (``cpu_offload``).
        guessed: the step reads values out of tensors, which had none: its memory may depend on them.
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
        """All of it, as plain data."""
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
    """Estimate the memory of a training, by running two of its steps on tensors that have shapes and no memory.

    What is counted is what lives at each moment: forward, backward and update are the strategy's and the precision's
    own, gradients are cleared right after the update. Under FSDP it is torch's ``fully_shard`` itself that runs, in a
    process group that sends nothing, so that parts, gathered blocks and what is gathered ahead are what it makes of
    them. DDP is one process and a copy of all gradients, its buckets (with ``gradient_as_bucket_view`` the buckets are
    the gradients). Not counted: the process itself (Python, torch, a CUDA context of some 0.5 GiB), what libraries take
    inside of one operation, an allocator's gaps, and the setting up of the run.

    Args:
        module: a model or a ``TrainingModule``, also one on the meta device; it is copied and stays as it is.
        batch: what one process gets; None: weights, gradients and optimizer state alone.
        optimizer: a name of ``torch.optim``, or a function that makes one from parameters; None: what
            ``configure_optimizers`` returns, AdamW for a plain module.
        loss: ``loss(module, batch)``; None: ``training_step``, or the output's ``loss``, or for other outputs the mean
            of what the module returns (a mapping is passed to it by name, a tuple in order).
        precision: a name.
        strategy: ``"single_device"``, ``"ddp"``, ``"fsdp"``, ``"fsdp_cpu_offload"``, or a ``DDPStrategy`` or
            ``FSDPStrategy``.
        num_processes: for the last ones.
        accumulate_grad_batches: micro-batches in a window.
        activation_checkpointing: True (the repeated blocks), or what ``FSDPStrategy`` takes.
        device: whose kernels run; an estimate for a GPU on a machine without one is made with the CPU's.

    Raises:
        ValueError: an unknown name, or a contradiction.
        RuntimeError: the step cannot run without values. Leave ``batch`` out for all but the activations.

    Example:
        >>> found = estimate_memory(nn.Linear(1000, 1000), torch.empty(8, 1000), precision="bf16-mixed")
        >>> found.weights, found.optimizer
        (4004000, 8008008)
    """
    if strategy in _SINGLE and num_processes != 1:
        raise ValueError(
            f"estimate_memory(strategy={strategy!r}, num_processes={num_processes}) contradict each other: that "
            "strategy has one process. Write strategy='ddp' or 'fsdp'."
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
    """As :func:`estimate_memory` for several strategies; what they have in common is run once.

    ``num_processes`` is that of the strategies that have several.
    """
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
            )
            _run(rehearsal, type(module).__name__, batch is not None, min(accumulate_grad_batches, 2))
        found.append(_read(run[plan.key], plan, processes, batch))
    return found


class _Plan(NamedTuple):
    """What is rehearsed, and what is added to it."""

    name: str
    strategy: Strategy
    activation_checkpointing: Any
    shared: bool = True
    buckets: bool = False
    views: bool = False
    offload: bool = False

    @property
    def key(self) -> Any:
        """Plans of one key are rehearsed once."""
        return type(self.strategy) if self.shared else id(self.strategy)


def _plan(asked: Any, precision: Any, processes: int, device: torch.device, checkpointing: Any) -> _Plan:
    chosen = _precision(precision, device)
    if isinstance(asked, str) and asked in _SINGLE:
        return _Plan("single_device", SingleDevice(device, chosen), checkpointing)
    by_name = isinstance(asked, str)
    if isinstance(asked, str):
        if asked not in _NAMES:
            raise ValueError(messages.unknown("strategy for an estimate", asked, _NAMES))
        found: Any = named(asked)
    else:
        found = copy.copy(asked)
    if isinstance(found, DDPStrategy):
        views = bool(found.ddp_options.get("gradient_as_bucket_view"))
        return _Plan("ddp", SingleDevice(device, chosen), checkpointing, True, buckets=True, views=views)
    if type(found) is not FSDPStrategy:
        raise ValueError(
            f"estimate_memory(strategy={type(found).__name__}) is none that can be estimated. Pass a DDPStrategy, an "
            f"FSDPStrategy, or a name: {messages.names(_NAMES)}."
        )
    offload = isinstance(found.offload, CPUOffloadPolicy)
    plain = FSDPStrategy()
    found.offload = plain.offload
    if checkpointing is not None:
        found.activation_checkpointing = checkpointing
    found.precision = chosen
    DistributedStrategy.place(found, [device] * processes)
    found._cluster = None  # a launcher's, if this process has one
    found._mesh_shape()
    return _Plan("fsdp_cpu_offload" if offload else "fsdp", found, None, by_name, offload=offload)


def _precision(asked: Any, device: torch.device) -> Precision:
    found = choose_precision(asked, None, device.type)
    if found.name == "16-mixed":  # whether a scaled gradient overflows is not known; the scale itself takes 4 bytes
        found = MixedPrecision("16-mixed", scaler=GradScaler(device.type, enabled=False))
    vars(found)["convert_module"] = _unchanged  # the copy has the dtype already
    return found


def _unchanged(module: nn.Module) -> nn.Module:
    return module


def _run(rehearsal: Rehearsal, owner: str, steps: bool, micro_batches: int) -> None:
    with rehearsal.running():
        rehearsal.set_up()
        if not steps:
            rehearsal.update_alone()
            return
        _train(rehearsal, owner, micro_batches)


def _train(rehearsal: Rehearsal, owner: str, micro_batches: int) -> None:
    try:
        rehearsal.infer()
        rehearsal.train(micro_batches)  # from now on there is an optimizer state
        rehearsal.train(micro_batches)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise RuntimeError(
            f"The memory of a step of {owner} cannot be estimated: without values it ended in "
            f"{type(error).__name__}: {first} If the step runs for real, it needs values out of its tensors, or "
            "takes an operation of which torch does not know the shape. Leave the batch out for weights, gradients and "
            "optimizer state alone."
        ) from error


def _read(rehearsal: Rehearsal, plan: _Plan, processes: int, batch: Any) -> MemoryEstimate:
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
    peak: Moment = ledger.peak(PHASES.__contains__, constant)
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
    """The block or layer with the most bytes, which is not split between devices.

    Args:
        sizes: of parameters, by their names. ``blocks.3.mlp.weight`` belongs to the block ``blocks.3``, a name without
            a number to the layer that it stands in.
    """
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        parts = name.split(".")[:-1]
        number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
        layers[".".join(parts[: number + 1])] = layers.get(".".join(parts[: number + 1]), 0) + size
    return max(layers.items(), key=lambda item: item[1], default=("", 0))

"""Simulates training with a Trainer on tensors that have shapes but no memory."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import messages
from ..callbacks.base import Callback, overridden
from ..processes.device_transfer import in_dtype
from ..processes.devices import AcceleratorName, find_kind
from ..processes.environments import LocalEnvironment
from ..strategies.base import Strategy
from ..strategies.fsdp.strategy import FSDPStrategy
from ..strategies.fsdp.wrapping import checkpoint_activations, choose_blocks
from ..torch_private import FakeTensorMode, fake_store, pytree
from ..trainer.hooks import HookTable
from ..trainer.loss import LossReader
from ..trainer.module import TrainingModule
from ..trainer.optimizers import configure
from ..trainer.run import Run
from ..trainer.step import ManualStep, TrainStep, clear_gradients
from ..trainer.trainer import Trainer
from .tensor_lifetimes import Ledger

if TYPE_CHECKING:
    from torch.optim import Optimizer

#: The phases of training. Memory used in these phases counts toward the training peak.
PHASES = ("forward", "backward", "optimizer step")


class NoLauncher(LocalEnvironment):
    """Ignores any launcher that started this process, so that the process counts as the first one."""

    def cluster(self, num_devices: int, num_nodes: int) -> None:
        return None


class Copier:
    """Copies modules and batches, giving the copies tensors that have shapes but no memory.

    Args:
        mode: the mode in which the new tensors are created.
        dtype: dtype for floating-point tensors; None keeps each tensor's dtype.
    """

    def __init__(self, mode: FakeTensorMode, device: torch.device, dtype: torch.dtype | None) -> None:
        self.mode, self.device, self.dtype = mode, device, dtype
        self._made: dict[int, Any] = {}

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor without memory that has the same shape and layout as the given one."""
        if id(tensor) not in self._made:
            dtype = tensor.dtype if self.dtype is None else in_dtype(tensor.dtype, self.dtype)
            with self.mode, torch.no_grad():
                if tensor.layout is torch.strided:
                    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=self.device)
                else:
                    made = torch.empty(tensor.shape, dtype=dtype, device=self.device)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            self._made[id(tensor)] = made
        return self._made[id(tensor)]

    def module(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module; the tensors in the copy have no memory."""
        held = [module.parameters(), module.buffers(), *(pytree.tree_leaves(vars(one)) for one in module.modules())]
        for tensor in (value for values in held for value in values if isinstance(value, Tensor)):
            self.tensor(tensor)
        try:
            return copy.deepcopy(module, dict(self._made))
        except Exception as error:
            raise TypeError(
                f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}). The estimate needs a "
                "copy, so that your module stays unchanged. Pass a function that creates the module."
            ) from error

    def batch(self, batch: Any) -> Any:
        """Return a copy of a batch; the tensors in the copy have no memory."""
        if isinstance(batch, Mapping) and type(batch) is not dict:
            batch = dict(batch)
        return pytree.tree_map_only(Tensor, self.tensor, batch)


class Rehearsal:
    """Trains a copy of a module on one batch without allocating memory, with a Trainer's steps.

    A module's own ``optimizer_step`` is not called, so optimizers that need a closure cannot be simulated.

    Args:
        batch: one process's batch; if None, no steps are run.
        strategy: a strategy whose devices have been set; with several processes, the first process is simulated.
        optimizer: function that creates the optimizers from the copied module.
        loss: ``loss(module, batch)``; None means :func:`loss_of`.
        activation_checkpointing: same as for ``FSDPStrategy``.
        micro_batches: number of micro-batches per update.

    Attributes:
        output: the latest output of the step in a window. It stays in memory while the next forward pass runs.
    """

    def __init__(
        self,
        module: nn.Module,
        batch: Any,
        strategy: Strategy,
        optimizer: Callable[[nn.Module], list[Optimizer]],
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        activation_checkpointing: Any = None,
        micro_batches: int = 1,
    ) -> None:
        self.mode, self.ledger, self.strategy = FakeTensorMode(allow_non_fake_inputs=True), Ledger(), strategy
        dtype = getattr(strategy.precision, "input_dtype", None)
        copier = Copier(self.mode, strategy.device, dtype)
        self.module = copier.module(module).train()
        self.batch = copier.batch(batch)
        self.make_optimizers = optimizer
        self.loss = loss
        self.activation_checkpointing = activation_checkpointing
        self.micro_batches = micro_batches
        self.output: Any = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager that tracks tensors without allocating memory for them."""
        several = fake_group(self.strategy) if isinstance(self.strategy, FSDPStrategy) else nullcontext()
        with several, self.mode, self.ledger.watching():
            yield

    def set_up(self) -> None:
        """Set up the module with the strategy, and create the optimizers and the step."""
        ledger = self.ledger
        if self.activation_checkpointing not in (None, False) and not self.strategy.communicates_forward:
            policy = self.activation_checkpointing
            checkpoint_activations(self.module, policy, choose_blocks(self.module, "auto") if policy is True else {})
        ledger.claim([*self.module.parameters(), *self.module.buffers()], "weights")
        pytree.tree_map_only(Tensor, lambda tensor: ledger.claim([tensor], "activations"), self.batch)
        if self.strategy.communicates_forward:  # other strategies do not change the copy here
            self.module = self.strategy.setup_module(self.module)
        ledger.claim([*self.module.parameters(), *self.module.buffers()], "weights")
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note_gradient)
        run = self.run = self._run()
        run.optimizers = self.strategy.setup_optimizers(self.make_optimizers(self.module))
        for optimizer in run.optimizers:
            _choose_kernels(optimizer, self.strategy.device)
        ledger.guessed = False  # values compared between processes do not affect memory
        self.forward = self.strategy.bind_step(self._step(), self.module, training=True)
        losses = LossReader(self.module, self.strategy)
        self.update_step = TrainStep(run, self._forward, losses)
        self.step = self.update_step if self.automatic else ManualStep(run, self._forward)
        ledger.begin("ready")

    def _note_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.ledger.claim([parameter.grad], "gradients")

    def _run(self) -> Run:
        """Create a Trainer's run for the steps, and turn off a TrainingModule's logging."""
        own = self.module if isinstance(self.module, TrainingModule) else None
        trainer = Trainer(
            max_steps=1000,
            max_epochs=-1,
            barebones=True,
            accelerator=cast(AcceleratorName, "cpu" if own is None else find_kind(self.strategy.device.type)),
            devices=1,
            plugins=[NoLauncher()],
            accumulate_grad_batches=self.micro_batches,
            gradient_clip_val=None if own is None else clip_value_of(own),
        )
        trainer.strategy = self.strategy
        run = trainer.current_run = Run(trainer)
        run.module, run.model = TrainingModule() if own is None else own, self.module
        phases = [_Phases(self)] if self.automatic or self.batch is None else []  # a manual step runs as one phase
        run.hooks = HookTable(trainer, TrainingModule(), phases, None)
        if own is not None:
            own.trainer = trainer
            for one in own.modules():
                if isinstance(one, TrainingModule):
                    vars(one).update(log=_nothing, log_dict=_nothing)
        return run

    def _step(self) -> Callable[..., Any]:
        module = self.module
        if self.loss is not None:
            return lambda batch, batch_idx: self.loss(module, batch)  # type: ignore[misc]
        if isinstance(module, TrainingModule):
            return partial(_call_step, module.training_step)
        return lambda batch, batch_idx: loss_of(call(module, batch))

    def _forward(self, batch: Any, batch_idx: int) -> Any:
        self.ledger.begin("forward")
        output = self.output = self.forward(batch, batch_idx)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if self.automatic and not isinstance(loss, Tensor):
            raise TypeError(
                f"{type(self.module).__name__}: the step returned {messages.a(loss)} instead of a loss. Return a "
                "tensor, or a dict with a tensor under 'loss'."
            )
        return {**output, "num_items": None} if isinstance(output, Mapping) else output  # weights need no memory

    # ---- steps -----------------------------------------------------------------------------------------------------

    @property
    def automatic(self) -> bool:
        """Whether the module uses automatic optimization."""
        return getattr(self.module, "automatic_optimization", True)

    def infer(self) -> None:
        """Run one forward pass without gradients. Does nothing if the step runs backward itself."""
        if not self.automatic:
            return
        self.ledger.begin("inference")
        self.module.eval()
        with torch.no_grad():
            self.forward(self.batch, 0)
        self.module.train()
        self.ledger.begin("between")

    def train(self) -> None:
        """Run one window of micro-batches and the update."""
        for _ in range(self.micro_batches):
            self.step(self.batch, 0)
        self.output = None
        if not self.automatic:  # the step has run backward and the update itself
            self.ledger.begin("optimizer step")
            self.claim_states()
            clear_gradients(self.run.joint.optimizer)
        self.ledger.begin("between")

    def update_alone(self) -> None:
        """Run an update with zero gradients, without a backward pass."""
        self.ledger.begin("optimizer step")
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
                self._note_gradient(parameter)
        self.run.state.window = self.micro_batches
        self.update_step.update()
        self.ledger.begin("between")

    def claim_gradients(self) -> None:
        """Record the gradients."""
        for parameter in self.module.parameters():
            self._note_gradient(parameter)

    def claim_states(self) -> None:
        """Record the tensors in the optimizers' state."""
        for optimizer in self.run.optimizers:
            values = pytree.tree_leaves(list(optimizer.state.values()))
            self.ledger.claim((value for value in values if isinstance(value, Tensor)), "optimizer")


def clip_value_of(module: TrainingModule) -> float | None:
    """Return a clipping value if a module overrides ``configure_gradient_clipping`` (which may need one), else None."""
    return None if overridden(module, "configure_gradient_clipping", TrainingModule) is None else 1.0


class _Phases(Callback):
    """Marks the phases of an automatic step."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal, self.ledger = rehearsal, rehearsal.ledger

    def on_before_backward(self, trainer: Trainer, pl_module: TrainingModule, loss: Tensor) -> None:
        self.ledger.claim_living("forward", "activations")
        self.ledger.begin("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self.rehearsal.claim_gradients()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer) -> None:
        self.ledger.begin("optimizer step")

    def on_before_zero_grad(self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer) -> None:
        self.rehearsal.claim_states()


def call(module: nn.Module, batch: Any) -> Any:
    """Call a module; a mapping is passed as keyword arguments, and a tuple or list as positional arguments."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, (tuple, list)) else module(batch)


def loss_of(output: Any) -> Tensor:
    """Return the loss in a module's output, or else the sum of the float32 means of its floating-point tensors."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    found = [value for value in pytree.tree_leaves(output) if isinstance(value, Tensor) and value.is_floating_point()]
    if not found:
        raise TypeError(
            f"The module returned {messages.a(output)} without a floating-point tensor, so there is no loss to train "
            "on. Pass a function of the module and the batch as loss=..."
        )
    return torch.stack([value.float().mean() for value in found]).sum()


@contextmanager
def fake_group(strategy: FSDPStrategy) -> Iterator[None]:
    """Context manager with a fake process group, in which only the first process exists and nothing is sent."""
    if dist.is_initialized():
        raise RuntimeError(
            "Estimating sharded training needs its own process group, but this process has already joined another "
            "group. Run the estimate before the process joins a group, or on the command line with paceline "
            "estimate-memory."
        )
    dist.init_process_group("fake", rank=0, world_size=strategy.world_size, store=fake_store())
    try:
        strategy.sharding_mesh()
        yield
    finally:
        dist.destroy_process_group()


def optimizers_of(module: nn.Module, asked: Any) -> list[Optimizer]:
    """Create a module's optimizers; see the ``optimizer`` argument of :func:`.memory_estimate.estimate_memory`."""
    if asked is None and isinstance(module, TrainingModule):
        return configure(module)[0]
    if asked is None:
        asked = "adamw"
    if isinstance(asked, str):
        known = {name.lower(): name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)}
        if asked.lower() not in known:
            raise ValueError(messages.unknown("optimizer", asked, known.values(), ", or pass a function"))
        asked = getattr(torch.optim, known[asked.lower()])
    return [asked([parameter for parameter in module.parameters() if parameter.requires_grad])]


def _choose_kernels(optimizer: Optimizer, device: torch.device) -> None:
    """Choose the same optimizer implementation that torch chooses for real tensors on a GPU."""
    for group in optimizer.param_groups:
        if device.type == "cuda" and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def _call_step(step: Callable[..., Any], batch: Any, batch_idx: int) -> Any:
    takes = [
        p for p in inspect.signature(step).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return step(batch, batch_idx) if len(takes) > 1 else step(batch)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing. This function is called in place of ``self.log``."""

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
from ..processes.device_transfer import in_dtype
from ..processes.devices import AcceleratorName, find_kind
from ..processes.environments import LocalEnvironment
from ..strategies.base import Strategy
from ..strategies.fsdp.strategy import FSDPStrategy
from ..strategies.fsdp.wrapping import checkpoint_activations, choose_blocks
from ..torch_private import FakeTensorMode, fake_store, pytree
from ..trainer.module import TrainingModule
from ..trainer.optimizers import configure
from ..trainer.step import clear_gradients
from ..trainer.trainer import Trainer
from .tensor_lifetimes import Ledger

if TYPE_CHECKING:
    from torch.optim import Optimizer

#: The phases of training. Memory used in these phases counts toward the training peak.
PHASES = ("forward", "backward", "optimizer step")


class NoLauncher(LocalEnvironment):
    """Makes this process the first of those that it would start itself, even if a launcher started it."""

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
    """Trains a copy of a module on one batch without allocating memory.

    Args:
        batch: one process's batch; if None, no steps are run.
        strategy: a strategy whose devices have been set; with several processes, the first process is simulated.
        optimizer: function that creates the optimizers from the copied module.
        loss: ``loss(module, batch)``; None means :func:`loss_of`.
        activation_checkpointing: same as for ``FSDPStrategy``.
    """

    def __init__(
        self,
        module: nn.Module,
        batch: Any,
        strategy: Strategy,
        optimizer: Callable[[nn.Module], list[Optimizer]],
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        activation_checkpointing: Any = None,
    ) -> None:
        self.mode, self.ledger, self.strategy = FakeTensorMode(allow_non_fake_inputs=True), Ledger(), strategy
        dtype = getattr(strategy.precision, "input_dtype", None)
        copier = Copier(self.mode, strategy.device, dtype)
        self.module = copier.module(module).train()
        self.batch = copier.batch(batch)
        self.make_optimizers = optimizer
        self.loss = loss
        self.activation_checkpointing = activation_checkpointing
        self.optimizers: list[Optimizer] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager that tracks tensors without allocating memory for them."""
        several = fake_group(self.strategy) if isinstance(self.strategy, FSDPStrategy) else nullcontext()
        with several, self.mode, self.ledger.watching():
            yield

    def set_up(self) -> None:
        """Set up the module with the strategy, and create the optimizers."""
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
        trainer = self._attach()
        self.optimizers = self.strategy.setup_optimizers(self.make_optimizers(self.module))
        if trainer is not None:
            trainer.optimizers = self.optimizers
        for optimizer in self.optimizers:
            _choose_kernels(optimizer, self.strategy.device)
        ledger.guessed = False  # values compared between processes do not affect memory
        step = self.strategy.bind_step(self._step(), self.module, training=True)
        self.step = lambda: step(self.batch, 0)
        self.ledger.begin("ready")

    def _note_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.ledger.claim([parameter.grad], "gradients")

    def _attach(self) -> Trainer | None:
        """Attach a TrainingModule to a Trainer, and turn off the module's logging."""
        module = self.module
        if not isinstance(module, TrainingModule):
            return None
        kind = cast(AcceleratorName, find_kind(self.strategy.device.type))
        trainer = Trainer(max_steps=1000, max_epochs=-1, barebones=True, accelerator=kind, devices=1)
        trainer.strategy = self.strategy
        trainer.current_run.hooks = _NoHooks()  # type: ignore[assignment]
        trainer.current_run.module = module
        module.trainer = trainer
        for one in module.modules():
            if isinstance(one, TrainingModule):
                vars(one).update(log=_nothing, log_dict=_nothing)
        return trainer

    def _step(self) -> Callable[..., Any]:
        module = self.module
        if self.loss is not None:
            return lambda batch, batch_idx: self.loss(module, batch)  # type: ignore[misc]
        if isinstance(module, TrainingModule):
            return partial(_call_step, module.training_step)
        return lambda batch, batch_idx: loss_of(call(module, batch))

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
            self.step()
        self.module.train()
        self.ledger.begin("between")

    def train(self, micro_batches: int = 1) -> None:
        """Run one window of micro-batches and then the update, as :class:`~.step.TrainStep` does."""
        automatic = self.automatic
        for number in range(micro_batches):
            self.strategy.sync_gradients(number + 1 == micro_batches)
            self.ledger.begin("forward")
            output = self.step()
            if not automatic:  # the step has run backward and the update itself
                continue
            self.ledger.claim_living("forward", "activations")
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if not isinstance(loss, Tensor):
                raise TypeError(
                    f"{type(self.module).__name__}: the step returned {messages.a(loss)} instead of a loss. Return a "
                    "tensor, or a dict with a tensor under 'loss'."
                )
            self.ledger.begin("backward")
            self.strategy.backward(loss)
            for parameter in self.module.parameters():
                self._note_gradient(parameter)
        self.update(automatic)

    def update(self, automatic: bool = True) -> None:
        """Run the optimizer step and clear the gradients."""
        self.ledger.begin("optimizer step")
        for optimizer in self.optimizers:
            if automatic:
                self.strategy.optimizer_step(optimizer)
            self.ledger.claim(self.states(), "optimizer")
        for optimizer in self.optimizers:
            clear_gradients(optimizer)
        self.ledger.begin("between")

    def states(self) -> list[Tensor]:
        """Return the tensors in the optimizers' state."""
        states = [optimizer.state for optimizer in self.optimizers]
        return [
            value for state in states for value in pytree.tree_leaves(list(state.values())) if isinstance(value, Tensor)
        ]

    def update_alone(self) -> None:
        """Run an update with zero gradients, without a backward pass."""
        self.ledger.begin("optimizer step")
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
                self._note_gradient(parameter)
        self.update()


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
            "Estimating sharded training needs its own process group, but this process has already joined another. Run "
            "the estimate before the process joins a group, or on the command line with paceline estimate-memory."
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


class _NoHooks:
    """A hook table without callbacks."""

    def __getattr__(self, name: str) -> tuple[()]:
        return ()

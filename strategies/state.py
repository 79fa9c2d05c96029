"""What a checkpoint gets of module and optimizers: the last third of a :class:`.base.Strategy`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .placement import move_optimizer_state

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..big_model.deferred_weights import Waiting


class State:
    """Collects the state of modules and optimizers as one process would have it, and loads it back.

    By default module and optimizers are whole in this process. A subclass whose processes hold parts overrides the
    methods in pairs: ``model_state`` and ``load_model_state``, and the same for optimizers and gradients. Only if its
    processes can write their parts themselves, it overrides ``states_in_parts`` and ``room_for`` too.
    """

    #: Both belong to :class:`.placement.Placement`: where loaded tensors go, and the weights that wait for values.
    device: torch.device
    waiting: Waiting
    #: What writes and reads checkpoints of one file, set by a Trainer.
    checkpoint_io: Any = None

    @contextmanager
    def states_in_parts(self) -> Iterator[bool]:
        """Context in which states may contain DTensors, of which each process writes its shards; yields whether."""
        yield False

    def room_for(self, empty: Tensor) -> Tensor:
        """Memory for this process's part of a checkpoint's tensor, given as a tensor on the meta device."""
        return torch.empty_like(empty, device="cpu")

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """The complete ``state_dict`` of the unwrapped module. All processes must call this; only rank 0 may get it."""
        return module.state_dict()

    def load_model_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a complete ``state_dict`` into the unwrapped module."""
        self.waiting.restored(state)
        return module.load_state_dict(state, strict=strict)

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """The complete state of the optimizer."""
        return optimizer.state_dict()

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load the complete state of an optimizer and move it to the device of its parameters."""
        optimizer.load_state_dict(state)
        move_optimizer_state(optimizer, self.device)

    def window_gradients(self, module: nn.Module) -> dict[str, Any] | None:
        """This process's gradients of an unfinished window, by parameter name, on the CPU; None: not supported."""
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        return {name: grad.detach().cpu() for name, grad in grads.items()}

    def load_window_gradients(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Restore :meth:`window_gradients`. Every process must call this."""
        for name, parameter in module.named_parameters():
            if name in state:
                parameter.grad = state[name].to(parameter.device)

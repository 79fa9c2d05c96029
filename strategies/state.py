"""The part of a :class:`.base.Strategy` that saves and loads the state of modules and optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from .placement import move_optimizer_state

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..big_model.deferred_weights import Waiting


class State:
    """Collects the full, unsharded state of modules and optimizers, and loads it back.

    By default each process holds the full module and optimizers. A subclass that shards them overrides the methods in
    pairs: ``model_state`` and ``load_model_state``, and the corresponding methods for optimizers and gradients. If its
    processes can write their own shards, it also overrides ``states_in_parts`` and ``room_for``.
    """

    #: Whether all weights and optimizer states can be restored after a trial, as the Tuner requires.
    restores_after_trials: ClassVar[bool] = True
    #: Both come from :class:`.placement.Placement`: the device for loaded tensors, and the deferred weights.
    device: torch.device
    waiting: Waiting
    #: Writes and reads single-file checkpoints; set by the Trainer.
    checkpoint_io: Any = None

    @contextmanager
    def states_in_parts(self) -> Iterator[bool]:
        """Context manager in which states may contain DTensors, so that each process writes its own shards.

        Yields True if states may contain DTensors, False if the strategy only supports full states.
        """
        yield False

    def room_for(self, empty: Tensor) -> Tensor:
        """Allocate a tensor for this process's shard of a checkpoint tensor.

        ``empty`` is the checkpoint tensor on the meta device.
        """
        return torch.empty_like(empty, device="cpu")

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the full ``state_dict`` of the unwrapped module; a strategy may return it on rank 0 only.

        Every process must call this.
        """
        return module.state_dict()

    def load_model_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a full ``state_dict`` into the unwrapped module."""
        self.waiting.restored(state)
        return module.load_state_dict(state, strict=strict)

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's full state dict."""
        return optimizer.state_dict()

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load an optimizer's full state dict and move it to the device of the optimizer's parameters."""
        optimizer.load_state_dict(state)
        move_optimizer_state(optimizer, self.device)

    def reduction_order(self) -> list[int] | None:
        """Return the order in which gradients are reduced, as indices of parameters; None if it never changes."""
        return None

    def restore_reduction_order(self, order: list[int] | None) -> None:
        """Restore a saved :meth:`reduction_order` before the first backward pass. Every process must call this."""

    def window_gradients(self, module: nn.Module) -> dict[str, Any] | None:
        """Return this process's gradients of an unfinished accumulation window, on the CPU, keyed by parameter name.

        Returns None if the strategy does not support this.
        """
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        return {name: grad.detach().cpu() for name, grad in grads.items()}

    def load_window_gradients(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Restore the gradients that :meth:`window_gradients` returned. Every process must call this."""
        for name, parameter in module.named_parameters():
            if name in state:
                parameter.grad = state[name].to(parameter.device)

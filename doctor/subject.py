"""What the doctor asks of a run, whichever door it came through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from ..strategies.base import Strategy

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


class Subject(Protocol):
    """A run that is examined.

    Attributes:
        updates: optimizer steps so far.
        communication: what :meth:`Strategy.communication_seconds` says; empty for None.
        accumulate: micro-batches an update.
        is_compiled: torch.compile is at work, which does not go with looking at operators.
        own_loop: the loop is the user's; no Trainer runs.
    """

    @property
    def strategy(self) -> Strategy: ...
    @property
    def updates(self) -> int: ...
    @property
    def communication(self) -> dict[str, float]: ...
    @property
    def accumulate(self) -> int: ...
    @property
    def is_compiled(self) -> bool: ...
    @property
    def own_loop(self) -> bool: ...
    @property
    def modules(self) -> Sequence[nn.Module]: ...
    @property
    def loader(self) -> Any: ...

    def measure_communication(self) -> None:
        """Let what communicates gradients measure how long that takes."""


class TrainerSubject:
    """A fit of a Trainer."""

    own_loop = False

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.strategy = trainer.strategy

    @property
    def updates(self) -> int:
        """Optimizer steps so far."""
        return self._trainer.state.updates

    @property
    def communication(self) -> dict[str, float]:
        """Seconds of communication so far."""
        return self.strategy.communication_seconds() or {}

    @property
    def accumulate(self) -> int:
        """Micro-batches an update."""
        return self._trainer.accumulate_grad_batches

    @property
    def is_compiled(self) -> bool:
        """Whether the module, or a part of it, is compiled."""
        return self._trainer.compile is not False or has_compiled(self.modules)

    @property
    def modules(self) -> Sequence[nn.Module]:
        """What is trained."""
        return [self._trainer.training_module]

    @property
    def loader(self) -> Any:
        """The training loader, as it is divided."""
        return self._trainer.current_run.source.train_loader

    def measure_communication(self) -> None:
        """Let the strategy measure."""
        self.strategy.measure_communication()


def has_compiled(modules: Sequence[nn.Module]) -> bool:
    """Whether one of the modules, or a part of one, is compiled."""
    return any(part._compiled_call_impl is not None for module in modules for part in module.modules())

"""The facts that the doctor reads from a Trainer's fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ..torch_private import is_compiled

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


class TrainerSubject:
    """Provides facts about a Trainer's fit. :class:`.own_loop.OwnLoop` has the same members for a user's own loop."""

    #: Whether the loop is the user's, without a Trainer.
    own_loop = False

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.strategy = trainer.strategy

    @property
    def updates(self) -> int:
        """Number of optimizer steps so far."""
        return self._trainer.state.updates

    @property
    def communication(self) -> dict[str, float]:
        """The communication times so far; see :meth:`Strategy.communication_seconds`."""
        return self.strategy.communication_seconds() or {}

    @property
    def accumulate(self) -> int:
        """Number of micro-batches per update."""
        return self._trainer.accumulate_grad_batches

    @property
    def is_compiled(self) -> bool:
        """Whether the module or a part of it is compiled. If so, operators cannot be recorded."""
        return self._trainer.compile is not False or has_compiled(self.modules)

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The trained module."""
        return [self._trainer.training_module]

    @property
    def loader(self) -> Any:
        """The training loader, prepared for this process."""
        return self._trainer.current_run.source.train_loader

    def measure_communication(self) -> None:
        """Make the strategy measure communication."""
        self.strategy.measure_communication()


def has_compiled(modules: Sequence[nn.Module]) -> bool:
    """Return True if one of the modules, or a part of it, is compiled."""
    return any(is_compiled(part) for module in modules for part in module.modules())

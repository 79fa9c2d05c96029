"""Raise if the user's code steps the optimizer or runs backward although the trainer does so itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ..torch_private import takes_step_hooks

if TYPE_CHECKING:
    from .run import Run

#: Number of updates after which a fit's optimizers are no longer watched.
UPDATES = 8
_SECOND_BACKWARD = "backward through the graph a second time"


def stepped(module: Any) -> RuntimeError:
    """Return the error for an optimizer that the user's code stepped."""
    owner = type(module).__name__
    return RuntimeError(
        f"{owner} stepped its optimizer by hand, but the trainer steps it too, so each batch would count twice. To "
        f"step it yourself, write in {owner}.__init__:\n\n    self.automatic_optimization = False\n\nand call "
        "self.manual_backward(loss). Or just return the loss and leave backward(), step() and zero_grad() to the "
        "trainer."
    )


def second_backward(module: Any, error: RuntimeError, first_batch: bool) -> RuntimeError | None:
    """Return a clearer error if backward failed because the loss's graph was freed; None for other errors."""
    if _SECOND_BACKWARD not in str(error):
        return None
    owner = type(module).__name__
    by_hand = (
        f"{owner}.training_step ran backward itself, but the trainer runs it too, on the returned loss. To run it "
        f"yourself, write in {owner}.__init__:\n\n    self.automatic_optimization = False\n\nand call "
        "self.manual_backward(loss) and self.optimizers().step(). Or leave out loss.backward()."
    )
    if first_batch:
        return RuntimeError(by_hand)
    return RuntimeError(
        f"Backward failed, because part of the loss's graph was already freed. If {owner}.training_step keeps tensors "
        f"between batches, detach them (self.hidden = hidden.detach()). Otherwise, {by_hand}"
    )


class ManualStepCheck:
    """Raises if the user's code steps one of the fit's optimizers during the first :data:`UPDATES` updates.

    The wrapped optimizers from ``self.optimizers()`` raise in later updates, too. A step calls :meth:`begin_update` and
    :meth:`end_update` around each update, except that a step with a closure does not call :meth:`begin_update`.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.updates_left = UPDATES
        self._hooks: list[Any] = []

    def watch(self) -> bool:
        """Watch an epoch's updates; return False if the fit has already had its first :data:`UPDATES` updates."""
        self.unwatch()
        if not self.updates_left:
            return False
        managed = self._managed = self.run.joint

        def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            # If an error ends a fit before its first updates, this hook stays on the optimizer.
            fit = self.run.fit
            if fit is not None and fit.manual_step_check is self and self.run.trainer.training and not managed.expected:
                raise stepped(self.run.module)

        watched = filter(takes_step_hooks, self.run.optimizers)
        self._hooks = [optimizer.register_step_pre_hook(refuse) for optimizer in watched]
        return True

    def begin_update(self) -> None:
        """Expect the trainer's own steps."""
        self._managed.expected = True

    def end_update(self) -> bool:
        """Count an update; return False if it was the last one to watch."""
        self._managed.expected = False
        self.updates_left -= 1
        if not self.updates_left:
            self.unwatch()
        return self.updates_left > 0

    def unwatch(self) -> None:
        """Stop watching until the next epoch, because code between epochs, such as a tuner, may step the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

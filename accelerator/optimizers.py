"""Prepared optimizers, which step only when the accumulation window is complete."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from .. import messages
from ..strategies.base import Strategy
from ..strategies.precision.base import Precision, parameters
from .models import refuse_processes
from .observed_methods import UNTIMED, time_methods

if TYPE_CHECKING:
    from ..doctor.own_loop import OwnLoop
    from .accumulation import GradientState
    from .models import PreparedModel

#: Attributes that belong to this process or to the doctor.
_NOT_PICKLED = ("explain", "strategies", "step", "zero_grad", UNTIMED)


class AcceleratedOptimizer(Optimizer):
    """Wraps the user's optimizer and exposes all of its attributes.

    ``step()`` does nothing while gradients are accumulated. ``zero_grad()`` keeps gradients that no step has used yet,
    so it may be called at the beginning or the end of a micro-batch.

    Args:
        strategy: the strategy that runs the steps if the optimizer has no parameters of a prepared model.
        placements: the prepared models whose parameters the optimizer updates.
        clip_norm: maximum gradient norm; each step clips larger gradients to it. None means no clipping.

    Attributes:
        placement: the first of ``placements``, or None.
        strategies: IDs of the models' strategies.
        updates: number of complete windows for which ``step()`` was called.
        scales: whether the gradients are multiplied by the fp16 loss scale.
        step_was_skipped: whether the last step was skipped because fp16 gradients overflowed.
    """

    _is_accelerate_prepared = True
    #: Returns an error that says what to do about a given error; None if there is nothing to add.
    explain: Callable[[BaseException], BaseException | None] = staticmethod(lambda error: None)

    def __init__(
        self,
        optimizer: Optimizer,
        strategy: Strategy,
        state: GradientState,
        placements: Sequence[PreparedModel] = (),
        clip_norm: float | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.strategy = strategy
        self._state_of_gradients = state
        self.step_was_skipped = self._steps = False
        self._clip_norm = clip_norm
        self._takes_set_to_none = _takes_set_to_none(optimizer)
        self.updates = 0
        self.belongs_to(placements)

    def belongs_to(self, placements: Sequence[PreparedModel]) -> None:
        """Set the models whose parameters the optimizer updates; the first model's strategy runs the steps."""
        self.placements = list(placements)
        self.placement = self.placements[0] if self.placements else None
        self.strategies = {id(one.strategy) for one in self.placements}
        if self.placement is not None:
            self.strategy = self.placement.strategy
        strategy = self.strategy
        self.scales = strategy.precision.scaler is not None
        self._plain = (
            self._clip_norm is None
            and type(strategy).optimizer_step is Strategy.optimizer_step
            and type(strategy.precision).optimizer_step is Precision.optimizer_step
        )

    def observe(self, observers: Sequence[OwnLoop]) -> None:
        """Set the observers that time the steps."""
        time_methods(self, {"step": "optimizer", "zero_grad": "optimizer"}, observers)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step if the accumulation window is complete; otherwise do nothing.

        Args:
            closure: for optimizers that need one, a function that computes the loss and calls ``accelerator.backward``.
        """
        state = self._state_of_gradients
        window = state.window
        if not window.count and closure is None:
            window.check_own_backward(self)
        if not state.sync_gradients:
            return None
        self.updates += 1
        if state.first_use:
            state.used()
        loss = None
        if closure is None and (self.scales or window.by_items or window.local or window.count != state.num_steps):
            window.settle(self)  # otherwise the gradients are already final
        if closure is None and self._clip_norm is not None:
            self.strategy.clip_by_norm(parameters(self.optimizer), self._clip_norm)
        self._steps = True
        try:
            if self._plain and closure is None:
                self.optimizer.step()
            elif closure is None:
                self.step_was_skipped = not self.strategy.optimizer_step(self.optimizer)
            else:
                loss, self.step_was_skipped = self._step_with(closure)
        except RuntimeError as error:
            better = self.explain(error)
            if better is None:
                raise
            raise better from error
        finally:
            self._steps = False
        window.stepped.add(id(self))
        return loss

    def refuse_others(self, why: str) -> None:
        """Make the user's own optimizer raise an error if it is stepped directly; ``why`` says what would go wrong."""
        text = (
            f"{type(self.optimizer).__name__}.step() was called on the optimizer that was passed to prepare, {why}. "
            "Step the optimizer that prepare returned: optimizer = accelerator.prepare(optimizer)."
        )
        self.optimizer.register_step_pre_hook(partial(_refuse, weakref.ref(self), text))

    def _step_with(self, closure: Callable[[], Any]) -> tuple[Any, bool]:
        losses: list[Any] = []

        def settled() -> Any:
            losses[:] = [closure()]
            window = self._state_of_gradients.window
            window.settled.discard(id(self))
            window.settle(self)
            window.stepped.add(id(self))
            return losses[0]

        stepped = self.strategy.optimizer_step(self.optimizer, settled)
        return (losses[0] if losses else None), not stepped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; does nothing while gradients accumulate, or before the backward pass of a micro-batch.

        Args:
            set_to_none: same as for torch's optimizers. An optimizer whose own ``zero_grad`` has no such argument
                clears its gradients in its own way.
        """
        state = self._state_of_gradients
        window = state.window
        used = window.counted or window.free or id(self) in window.stepped
        if (state.sync_gradients and used) or not window.count:
            if self._takes_set_to_none or not set_to_none:
                self.optimizer.zero_grad(set_to_none)
            else:
                self.optimizer.zero_grad()
            window.cleared = window.count > 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Switch schedule-free optimizers to training mode."""
        getattr(self.optimizer, "train", lambda: None)()

    def eval(self) -> None:
        """Switch schedule-free optimizers to evaluation mode."""
        getattr(self.optimizer, "eval", lambda: None)()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's parameter groups."""
        _refuse_scaler(self.scales or self._state_of_gradients.num_steps > 1)
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:  # type: ignore[override]
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:  # type: ignore[override]
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        refuse_processes(self.strategy, f"A prepared {type(self.optimizer).__name__}")
        window = self._state_of_gradients.window
        own = () if self.placements else parameters(self.optimizer)  # models pickle their own gradients
        return {
            "own": {name: value for name, value in vars(self).items() if name not in _NOT_PICKLED},
            "gradients": [(parameter, parameter.grad) for parameter in own],
            "settled": id(self) in window.settled,
            "stepped": id(self) in window.stepped,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state["own"])
        self.strategies = {id(one.strategy) for one in self.placements}
        window = self._state_of_gradients.window
        for done, optimizers in ((state["settled"], window.settled), (state["stepped"], window.stepped)):
            if done:
                optimizers.add(id(self))
        for parameter, gradient in state["gradients"]:
            parameter.grad = gradient


def _takes_set_to_none(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's ``zero_grad`` accepts an argument; those of some packages do not."""
    try:
        inspect.signature(optimizer.zero_grad).bind(True)
    except TypeError:
        return False
    except ValueError:  # a compiled function without a signature
        pass
    return True


def _refuse_scaler(accelerating: bool) -> None:
    """Raise a RuntimeError if torch's GradScaler reads a prepared optimizer's parameters.

    A caller is recognized as a scaler by the name of the file that contains its code.

    Args:
        accelerating: whether gradients are accumulated or scaled; if so, a second scaler would corrupt the gradients.
    """
    if accelerating and next(islice(messages.call_stack(), 2, None)).f_code.co_filename.endswith("grad_scaler.py"):
        raise RuntimeError(
            "The script uses its own GradScaler on a prepared optimizer. Under mixed_precision='fp16', "
            "accelerator.backward already scales the loss, and optimizer.step() unscales the gradients. Delete the "
            "scaler: scaler.scale(loss).backward() becomes accelerator.backward(loss), scaler.step(optimizer) becomes "
            "optimizer.step(), and scaler.unscale_ and scaler.update are not needed."
        )


def _refuse(reference: Callable[[], AcceleratedOptimizer | None], text: str, *_: Any) -> None:
    prepared = reference()
    if prepared is not None and not prepared._steps:
        raise RuntimeError(text)

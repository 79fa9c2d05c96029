"""Step several optimizers together in automatic optimization, and check that this is possible."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from ..strategies.precision.base import parameters as parameters_of

if TYPE_CHECKING:
    from .module import TrainingModule


class JointOptimizer(Optimizer):
    """Several optimizers combined into one that steps them together; hooks and overridden methods receive it.

    It has the parameter groups and state of all of them, but no options, hooks or ``state_dict`` of its own.

    Attributes:
        optimizers: the optimizers, as ``configure_optimizers`` returned them.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.optimizers = list(optimizers)  # without Optimizer.__init__, which would create its own groups

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override] - it cannot be set
        """The parameter groups of all optimizers, in a new list. To add a group, add it to one of the optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override] - it cannot be set
        """The state of each parameter, read-only."""
        return MappingProxyType({p: state for optimizer in self.optimizers for p, state in optimizer.state.items()})

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:  # type: ignore[override]
        """Run the closure once, then step every optimizer; return the closure's result."""
        loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step(**arguments)
        return loss

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients of all optimizers by calling each one's ``zero_grad`` with these arguments."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"JointOptimizer has no {name!r}, because it combines several optimizers. Use the optimizers "
            "in its .optimizers attribute."
        )

    def __repr__(self) -> str:
        return f"JointOptimizer({', '.join(type(optimizer).__name__ for optimizer in self.optimizers)})"


def check_together(module: TrainingModule, optimizers: Sequence[Optimizer], said: str) -> None:
    """Raise a ValueError if automatic optimization cannot step these optimizers in one update.

    Args:
        module: the module whose parameters the optimizers train.
        optimizers: one or more optimizers.
        said: the beginning of the error message, before the list of optimizers ("... returned").
    """
    by_hand = "set self.automatic_optimization = False in __init__ and step them in training_step"
    if len(optimizers) < 2:
        return
    for optimizer in optimizers:
        if needs_closure(optimizer):
            raise ValueError(
                f"{said} {_names(optimizers)}. {type(optimizer).__name__} evaluates the loss itself, perhaps several "
                "times per step, so the gradients of the other optimizers would be out of date. Return only that "
                f"optimizer, or {by_hand}."
            )
    seen: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            if id(parameter) in seen:
                raise ValueError(
                    f"{said} {_names(optimizers)}, and {_name(module, parameter)} is in both "
                    f"{type(seen[id(parameter)]).__name__} and {type(optimizer).__name__}, so each step would change "
                    f"it twice. Give each parameter to one optimizer, or {by_hand}."
                )
        seen |= {id(parameter): optimizer for parameter in parameters_of(optimizer)}


def needs_closure(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer.step`` requires a closure, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _names(optimizers: Sequence[Optimizer]) -> str:
    return " and ".join(type(optimizer).__name__ for optimizer in optimizers)


def _name(module: TrainingModule, parameter: Tensor) -> str:
    found = next((name for name, one in module.named_parameters() if one is parameter), None)
    return f"a parameter of shape {tuple(parameter.shape)}" if found is None else f"the parameter {found!r}"

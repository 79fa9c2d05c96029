"""Parameters that the training wrapper ignores, because they were frozen or missing when it wrapped the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy


class LateParameters:
    """Calls a method when a parameter that was frozen or missing when training began gets a gradient."""

    def __init__(self) -> None:
        self._watched: dict[nn.Parameter, Any] = {}

    def __reduce__(self) -> Any:
        """Copy this object without the parameters, because their hooks belong to this process and this run."""
        return LateParameters, ()

    def watch(self, parameters: Iterable[nn.Parameter], then: Callable[[nn.Parameter], None]) -> list[nn.Parameter]:
        """Watch parameters, which may be frozen, until :meth:`forget` is called or the owner of ``then`` is deleted.

        Args:
            parameters: the parameters to watch in addition to those that are watched already.
            then: method to call with a parameter during the backward pass, after each change of its gradient.

        Returns:
            The parameters, except those that can never get a gradient or that have no values yet.
        """
        method = weakref.WeakMethod(then)

        def tell(parameter: nn.Parameter) -> None:
            if (called := method()) is not None:
                called(parameter)

        added = [one for one in parameters if _can_train(one)]
        for parameter in added:
            frozen = not parameter.requires_grad
            parameter.requires_grad = True  # torch accepts hooks only for parameters that may get a gradient
            self._watched[parameter] = parameter.register_post_accumulate_grad_hook(tell)
            parameter.requires_grad = not frozen
        return added

    def forget(self) -> None:
        """Stop watching."""
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._watched

    def trainable(self) -> list[nn.Parameter]:
        """Return the watched parameters that are no longer frozen, in the order in which they were watched."""
        return [parameter for parameter in self._watched if parameter.requires_grad]


def _can_train(parameter: nn.Parameter) -> bool:
    """Return False for quantized weights, for tensors made in inference mode, and for layers without a size yet."""
    trains = parameter.is_floating_point() or parameter.is_complex()
    return trains and not parameter.is_inference() and not is_lazy(parameter)

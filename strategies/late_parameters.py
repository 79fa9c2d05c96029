"""Parameters that were frozen or missing when the model was wrapped for training, so that the wrapper ignores them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


class LateParameters:
    """Calls a function when a parameter that was frozen or missing when training began gets a gradient."""

    def __init__(self) -> None:
        self._watched: dict[nn.Parameter, Any] = {}

    def watch(self, parameters: Iterable[nn.Parameter], then: Callable[[nn.Parameter], None]) -> None:
        """Watch parameters, which may be frozen, until :meth:`forget` is called.

        Args:
            parameters: the parameters to watch in addition to those that are watched already.
            then: function to call with a parameter during the backward pass, after each change of its gradient.
        """
        for parameter in parameters:
            frozen = not parameter.requires_grad
            if frozen and not (parameter.is_floating_point() or parameter.is_complex()):
                continue  # quantized weights never get a gradient
            parameter.requires_grad = True  # torch accepts hooks only for parameters that may get a gradient
            self._watched[parameter] = parameter.register_post_accumulate_grad_hook(then)
            parameter.requires_grad = not frozen

    def forget(self) -> None:
        """Stop watching."""
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._watched

    def trainable(self) -> list[nn.Parameter]:
        """Return the watched parameters that are not frozen any more, in the order in which they were watched."""
        return [parameter for parameter in self._watched if parameter.requires_grad]

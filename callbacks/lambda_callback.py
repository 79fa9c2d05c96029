"""Callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import messages
from .base import HOOKS, Callback


class LambdaCallback(Callback):
    """Build a callback from functions, when a class would be too much.

    Hooks that are not given cost nothing.

    Args:
        **hooks: a function by the name of a :class:`Callback` hook, with that hook's arguments (without ``self``);
            None means not given.

    Example:
        >>> greet = LambdaCallback(on_fit_start=lambda trainer, pl_module: trainer.print("here we go"))
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, function in hooks.items():
            if name not in HOOKS:
                raise ValueError(f"LambdaCallback takes hooks by name. {messages.unknown('hook', name, HOOKS)}")
            if function is None:
                continue
            if not callable(function):
                raise TypeError(
                    f"LambdaCallback({name}=) got {function!r} of type {type(function).__name__}, which cannot be "
                    f"called. Pass a function with the arguments of Callback.{name}."
                )
            setattr(self, name, function)

"""Callback built from functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import messages
from .base import HOOKS, Callback


class LambdaCallback(Callback):
    """A callback built from functions, for simple hooks that do not need a class.

    Hooks that are not passed cost nothing.

    Args:
        **hooks: functions, each passed under the name of a :class:`Callback` hook and called with that hook's arguments
            (without ``self``); None is the same as not passing the hook.

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
                    f"LambdaCallback({name}=) got {function!r} of type {type(function).__name__}, which is not "
                    f"callable. Pass a function with the arguments of Callback.{name}."
                )
            setattr(self, name, function)

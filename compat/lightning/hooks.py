"""Calls hooks in the same way as Lightning."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from ...callbacks.base import OTHER_METHODS, Callback
from ...trainer.module import TrainingModule
from ...trainer.module_hooks import ModuleHooks

#: Checkpoint key that Lightning's checkpoints do not have.
_SECTION = "paceline"


class Unlisted:
    """A method that ``inspect.getmembers(owner, inspect.isfunction)`` does not find.

    Programs list the functions of ``Callback`` to find all hooks, so functions that are not hooks must not be listed.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["__wrapped__"](*args, **kwargs)

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else MethodType(self, instance)


def list_only_hooks() -> None:
    """Hide the functions of ``Callback`` that Lightning's ``Callback`` does not have."""
    for name in (*OTHER_METHODS, "log", "log_dict"):
        if not name.endswith("state_dict"):
            setattr(Callback, name, Unlisted(vars(Callback)[name]))


def as_lightning(overridden: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``overridden``, which returns an object's hook, to change how a program's own hooks are called.

    ``on_save_checkpoint`` receives a checkpoint with only Lightning's keys, and ``on_train_epoch_start`` is not called
    when a run resumes inside an epoch.
    """

    def find(owner: Any, name: str, *base: type) -> Any:
        method = overridden(owner, name, *base)
        if method is None or name not in ("on_save_checkpoint", "on_train_epoch_start") or _is_built_in(owner, name):
            return method
        return (_without_section if name == "on_save_checkpoint" else functools.partial(_at_beginning, owner))(method)

    return find


def loading_as_lightning(call: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``call`` to pass a checkpoint with only Lightning's keys to a program's own ``on_load_checkpoint``."""

    def call_hook(owner: Any, hook: str, *args: Any) -> None:
        if hook != "on_load_checkpoint" or _is_built_in(owner, hook):
            call(owner, hook, *args)
        else:
            _without_section(functools.partial(call, owner, hook))(*args)

    return call_hook


def _is_built_in(owner: Any, name: str) -> bool:
    """Return True if the hook, or a hook that it overrides, is defined in Paceline."""
    return any(
        name in vars(kind) and kind.__module__.startswith("paceline.")
        for kind in type(owner).__mro__
        if kind not in (Callback, TrainingModule, ModuleHooks)
    )


def _without_section(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def call(*args: Any) -> None:
        checkpoint = args[-1]
        shown = {key: value for key, value in checkpoint.items() if key != _SECTION}  # the hook may keep this copy
        method(*args[:-1], shown)
        hidden = {_SECTION: checkpoint[_SECTION]} if _SECTION in checkpoint else {}
        checkpoint.clear()
        checkpoint.update(shown | hidden)

    return call


def _at_beginning(owner: Any, method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def call(*args: Any) -> None:
        trainer = args[0] if args else owner.trainer
        if not (trainer.current_run.resumes and trainer.state.next_batch):
            method(*args)

    return call

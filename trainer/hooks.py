"""Who is called at each hook: found once when a run starts, so that a step asks nobody."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..callbacks.base import HOOKS, Callback

if TYPE_CHECKING:
    from .data.datamodule import DataModule
    from .module import TrainingModule
    from .trainer import Trainer

Bound = Callable[..., Any]

#: The module's hooks that no callback has.
MODULE_HOOKS = (
    "prepare_data",
    "on_validation_model_zero_grad",
    *(f"on_{stage}_model_{mode}" for stage in ("validation", "test", "predict") for mode in ("eval", "train")),
    "on_before_batch_transfer",
    "on_after_batch_transfer",
)


def overridden(owner: Any, name: str, base: type) -> Bound | None:
    """The bound method if ``owner``'s class defines ``name`` below ``base`` or the instance carries it, else None.

    A value of None, on the class or on the instance, means "not overridden".
    """
    method = getattr(owner, name, None)
    if method is None or name in vars(owner):
        return method
    return method if getattr(type(owner), name, None) is not getattr(base, name, None) else None


class HookTable:
    """For each hook the callables that define it, in call order, with ``trainer`` and module already applied.

    ``table.on_train_batch_end`` is a tuple: empty when nobody defines the hook. ``on_train_epoch_end`` holds the
    callbacks that do not monitor and the module; ``on_train_epoch_end_monitors`` the callbacks that do.
    """

    def __init__(
        self, trainer: Trainer, module: TrainingModule, callbacks: Sequence[Callback], datamodule: DataModule | None
    ) -> None:
        from .data.datamodule import DataModule
        from .module import TrainingModule

        for callback in callbacks:
            check_names(callback, HOOKS)
        check_names(module, (*HOOKS, *MODULE_HOOKS))
        data = [] if datamodule is None else [(datamodule, DataModule, ())]
        theirs = [(callback, Callback, (trainer, module)) for callback in callbacks]
        own = [(module, TrainingModule, ())]
        self.on_train_epoch_end: tuple[Bound, ...] = ()
        for name in HOOKS:
            owners = [*data, *theirs, *own] if name in ("setup", "teardown", "on_exception") else [*theirs, *own]
            setattr(self, name, tuple(_bind(owners, name)))
        quiet = [owner for owner in theirs if not owner[0].monitors_metrics]
        monitors = [owner for owner in theirs if owner[0].monitors_metrics]
        self.on_train_epoch_end = tuple(_bind([*quiet, *own], "on_train_epoch_end"))
        self.on_train_epoch_end_monitors = tuple(_bind(monitors, "on_train_epoch_end"))
        self.prepare_data = tuple(_bind([*data, *own], "prepare_data"))

    def __getattr__(self, name: str) -> tuple[Bound, ...]:
        raise AttributeError(f"There is no hook {name!r}")


def _bind(owners: Iterable[tuple[Any, type, tuple[Any, ...]]], name: str) -> Iterable[Bound]:
    for owner, base, given in owners:
        method = overridden(owner, name, base)
        if method is not None:
            if hasattr(Callback, name) and name not in ("on_exception",):
                check_signature(owner, name, method, len(given))
            yield partial(method, *given) if given else method


def check_names(owner: Any, known: Sequence[str]) -> None:
    """Raise for a method that looks like a misspelled hook: it would never be called."""
    for name in dir(type(owner)):
        if name.startswith("on_") and name not in known and callable(getattr(owner, name, None)):
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            if close:
                raise TypeError(
                    f"{type(owner).__name__}.{name} is not a hook, so it would never be called. Did you mean "
                    f"{close[0]!r}? Rename it (or give a method of your own a name that does not start with 'on_')."
                )


def check_signature(owner: Any, name: str, method: Bound, given: int, extra: int = 0) -> None:
    """Raise if ``method`` cannot be called the way the loop will call it.

    Args:
        owner: the callback or module, for the message.
        name: the hook.
        method: its bound method.
        given: how many leading arguments (trainer, module) are applied already.
        extra: further positional arguments (``dataloader_idx`` with several loaders).
    """
    wanted = [p.name for p in inspect.signature(getattr(Callback, name)).parameters.values() if p.default is p.empty][
        1:
    ]
    if not given:
        wanted = wanted[2:]
    wanted += ["dataloader_idx"] * extra
    try:
        inspect.signature(method).bind(*wanted)
    except TypeError as error:
        raise TypeError(
            f"{type(owner).__name__}.{name}{inspect.signature(method)} cannot be called with ({', '.join(wanted)}): "
            f"{error}. "
            f"Write it as def {name}(self, {', '.join(wanted)})."
        ) from None
    except ValueError:  # a callable without a signature, written in C
        return

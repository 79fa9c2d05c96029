"""Collect each hook's callables once, when a run starts, so that steps do not have to look them up."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..callbacks.base import HOOKS, OTHER_METHODS, Callback, overridden
from ..data.datamodule import DataModule
from .hook_names import DATA_METHODS, MODULE_METHODS, MOVED, STEPS
from .module import TrainingModule

if TYPE_CHECKING:
    from .trainer import Trainer

Bound = Callable[..., Any]
#: Hooks whose last argument is the stage, passed by keyword if the hook accepts it.
_WITH_STAGE = ("setup", "teardown")


def method_of(owner: Any, name: str, base: type) -> Bound:
    """Return the owner's method, or ``base``'s method if the owner has set it to None."""
    return overridden(owner, name, base) or partial(getattr(base, name), owner)


class HookTable:
    """The callables of each hook in call order, with ``trainer`` and the module already bound.

    ``table.on_train_batch_end`` is a tuple, empty if nothing defines the hook. Callbacks come before the module. At the
    end of a batch or a validation, callbacks with ``runs_last`` come after the module, so that they save the changes
    that the module's hook makes. ``on_train_epoch_end_monitors`` holds the hooks of callbacks that monitor metrics, and
    ``on_train_epoch_end`` holds all others.
    """

    def __init__(
        self, trainer: Trainer, module: TrainingModule, callbacks: Sequence[Callback], datamodule: DataModule | None
    ) -> None:
        for callback in callbacks:
            check(callback, Callback, (*HOOKS, *OTHER_METHODS))
        check(module, TrainingModule, (*HOOKS, *MODULE_METHODS))
        if datamodule is not None:
            check(datamodule, DataModule, DATA_METHODS)
        data = [] if datamodule is None else [(datamodule, DataModule, ())]
        theirs = [(callback, Callback, (trainer, module)) for callback in callbacks]
        own = [(module, TrainingModule, ())]
        self.on_train_epoch_end: tuple[Bound, ...] = ()
        bind = partial(_bind, trainer.profiler.around)
        for name in HOOKS:
            owners = [*data, *theirs, *own] if name in (*_WITH_STAGE, "on_exception") else [*theirs, *own]
            setattr(self, name, tuple(bind(owners, name)))
        savers = [owner for owner in theirs if owner[0].runs_last]
        others = [owner for owner in theirs if not owner[0].runs_last]
        for name in ("on_train_batch_end", "on_validation_end"):
            setattr(self, name, tuple(bind([*others, *own, *savers], name)))
        quiet = [owner for owner in theirs if not owner[0].monitors_metrics]
        monitors = [owner for owner in theirs if owner[0].monitors_metrics]
        self.on_train_epoch_end = tuple(bind([*quiet, *own], "on_train_epoch_end"))
        self.on_train_epoch_end_monitors = tuple(bind(monitors, "on_train_epoch_end"))
        #: Pairs of a flag and a hook; the flag says whether every node calls the hook or only the first node does.
        self.prepare_data = tuple(
            (owner[0].prepare_data_per_node, hook) for owner in [*data, *own] for hook in bind([owner], "prepare_data")
        )

    def __getattr__(self, name: str) -> tuple[Bound, ...]:
        raise AttributeError(f"There is no hook {name!r}.")


def _bind(
    around: Callable[..., Bound], owners: Iterable[tuple[Any, type, tuple[Any, ...]]], name: str
) -> Iterable[Bound]:
    for owner, base, given in owners:
        method = overridden(owner, name, base)
        if method is not None:
            who = owner.state_key if base is Callback else type(owner).__name__
            called = partial(method, *given) if given else method
            if name in _WITH_STAGE and takes(called, stage=""):
                called = _with_stage(called)
            yield around(f"[{base.__name__}]{who}.{name}", called)


def _with_stage(hook: Bound) -> Bound:
    return lambda stage: hook(stage=stage)


def takes(method: Bound, *args: Any, **kwargs: Any) -> bool:
    """Return True if a method's signature accepts these arguments, including their keyword names."""
    try:
        inspect.signature(method).bind(*args, **kwargs)
    except (TypeError, ValueError):  # a callable written in C has no signature
        return False
    return True


def check(owner: Any, base: type, known: Sequence[str]) -> None:
    """Raise if ``owner`` has a hook that looks misspelled or has the wrong signature."""
    for name in own_methods(owner, base):
        if name not in known:
            meant = meant_hook(owner, base, name, known)
            if meant is not None and not _is_used(owner, base, name):
                raise TypeError(
                    f"{type(owner).__name__}.{name} is not a hook, so it would never be called. Did you mean "
                    f"{meant!r}? Rename it. If it is not meant to be a hook, choose a less similar name."
                )
    for name in known:
        method = overridden(owner, name, base)
        if method is not None and name not in STEPS:
            check_signature(owner, name, method)


def _is_used(owner: Any, base: type, name: str) -> bool:
    """Return True if another method of the owner's classes uses ``name``, which is then no misspelled hook."""
    kinds = (kind for kind in type(owner).__mro__ if kind not in base.__mro__)
    others = (method for kind in kinds for other, method in vars(kind).items() if other != name)
    codes = (getattr(getattr(method, "__func__", method), "__code__", None) for method in others)
    return any(code is not None and name in code.co_names for code in codes)


def own_methods(owner: Any, base: type) -> list[str]:
    """Return the names of the callables that ``owner`` has and ``base`` does not."""
    carried = [name for name, value in vars(owner).items() if callable(value)]
    defined = [name for name in dir(type(owner)) if callable(getattr(type(owner), name, None))]
    return [name for name in (*defined, *carried) if not name.startswith("_") and not hasattr(base, name)]


def meant_hook(owner: Any, base: type, name: str, known: Sequence[str]) -> str | None:
    """Return the hook of which ``name`` is a former name or probably a misspelling, or None if there is none."""
    if name in MOVED and MOVED[name] in known:
        return MOVED[name] if overridden(owner, MOVED[name], base) is None else None
    hook = name.startswith("on_")
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75 if hook else 0.92)
    return close[0] if close and (hook or overridden(owner, close[0], base) is None) else None


def check_signature(owner: Any, name: str, method: Bound, several: bool | None = None) -> None:
    """Raise if the hook does not accept the loop's arguments.

    ``several``: whether there are several loaders; if so, the hook gets ``dataloader_idx``. None means that the number
    of loaders is not known yet.
    """
    wanted = wanted_arguments(owner, name) + ["dataloader_idx"] * bool(several)
    write = f"def {name}({', '.join(['self', *wanted])})"
    if not callable(method):
        raise TypeError(f"{type(owner).__name__}.{name} is {method!r}, which is not callable. Write it as {write}.")
    if inspect.iscoroutinefunction(method) or (name.startswith("on_") and inspect.isgeneratorfunction(method)):
        kind = "a coroutine (async def)" if inspect.iscoroutinefunction(method) else "a generator (it yields)"
        raise TypeError(f"{type(owner).__name__}.{name} is {kind}, whose body would never run. Write it as {write}.")
    try:
        signature = inspect.signature(method)
    except ValueError:  # a callable written in C has no signature
        return
    try:
        signature.bind(*wanted)
    except TypeError as error:
        if name in _WITH_STAGE and takes(method, *wanted[:-1], stage=""):
            return
        if not several and "dataloader_idx" in signature.parameters and takes(method, *wanted, "dataloader_idx"):
            if several is None:
                return
            raise RuntimeError(of_one_loader(f"{type(owner).__name__}.{name}", write)) from None
        if several and takes(method, *wanted[:-1]):
            raise RuntimeError(
                f"{type(owner).__name__}.{name}{signature} takes no dataloader_idx, but there are several loaders. "
                f"Write it as {write}."
            ) from None
        raise TypeError(
            f"{type(owner).__name__}.{name}{signature} cannot be called with ({', '.join(wanted)}): {error}. "
            f"Write it as {write}."
        ) from None


def of_one_loader(name: str, write: str) -> str:
    """Return the error text for a hook or step that needs ``dataloader_idx`` in a run with one loader."""
    return (
        f"{name} needs dataloader_idx, which is passed only if there are several loaders, but there is only one. "
        f"Write it as {write}, or give dataloader_idx a default."
    )


def wanted_arguments(owner: Any, name: str) -> list[str]:
    """Return the arguments that the loop passes to a hook of ``owner``."""
    base = next(kind for kind in (Callback, TrainingModule, DataModule) if isinstance(owner, kind))
    defined = getattr(base, name, None)
    parameters = inspect.signature(defined or getattr(Callback, name)).parameters.values()
    found = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    optional = {p.name for p in parameters if p.name == "dataloader_idx" and p.default is not p.empty}
    skipped = 1 if defined is not None else 3  # self; for a callback's hook also trainer and module
    return [argument for argument in found[skipped:] if argument not in optional]

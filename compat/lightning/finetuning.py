"""What subclasses of Lightning's BaseFinetuning use to keep and restore an optimizer's parameter groups themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...callbacks.finetuning import BaseFinetuning

_KEPT = "_internal_optimizer_metadata"
_RESUMES = "_restarting"
_MAPS = "_apply_mapping_to_param_groups"


def install() -> None:
    """Give BaseFinetuning these attributes and methods."""
    kind: Any = BaseFinetuning
    setattr(kind, _MAPS, staticmethod(mapped))
    kind._store = _store
    kind.__init__ = _keeping(kind.__init__)
    kind.on_fit_start = _restoring(kind.on_fit_start)


def mapped(param_groups: Sequence[Mapping[str, Any]], mapping: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Return copies of the groups with each entry of ``params`` replaced by what ``mapping`` has for it."""
    return [{**group, "params": [mapping[one] for one in group["params"]]} for group in param_groups]


def _keeping(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def create(callback: Any, *args: Any, **kwargs: Any) -> None:
        init(callback, *args, **kwargs)
        setattr(callback, _KEPT, {})
        setattr(callback, _RESUMES, False)

    return create


def _store(
    callback: Any, pl_module: Any, opt_idx: int, num_param_groups: int, current_param_groups: list[dict[str, Any]]
) -> None:
    """Note the groups of an optimizer by the names of their parameters, from index ``num_param_groups`` onward."""
    names = {parameter: name for name, parameter in pl_module.named_parameters()}
    kept = getattr(callback, _KEPT)
    known = opt_idx in kept
    if not known or num_param_groups != len(current_param_groups):
        new = current_param_groups[num_param_groups if known else 0 :]
        kept.setdefault(opt_idx, []).extend(mapped(new, names))


def _restoring(on_fit_start: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``on_fit_start`` to give the optimizers the groups that a subclass's ``load_state_dict`` has set."""

    @functools.wraps(on_fit_start)
    def start(callback: Any, trainer: Any, pl_module: Any) -> None:
        on_fit_start(callback, trainer, pl_module)
        if getattr(callback, _RESUMES):
            kept, parameters = getattr(callback, _KEPT), dict(pl_module.named_parameters())
            for index, optimizer in enumerate(trainer.optimizers):
                if index in kept:
                    optimizer.param_groups = mapped(kept[index], parameters)
            setattr(callback, _RESUMES, False)

    return start

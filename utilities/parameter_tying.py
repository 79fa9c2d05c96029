"""Find parameters that a module has under several names, and tie them again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from torch import nn

from ..big_model.module_sizes import find_tied_parameters


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """Return a list of names for each parameter that has more than one name."""
    return find_tied_parameters(module)


def set_shared_parameters(module: nn.Module, shared_params: Sequence[Sequence[str]]) -> nn.Module:
    """Tie parameters again, so that all names in a list refer to the parameter with the list's first name.

    Args:
        module: the module, which is changed in place.
        shared_params: the result of :func:`find_shared_parameters` from before the module was copied or moved.
    """
    for first, *others in shared_params:
        parameter = reduce(getattr, first.split("."), module)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, parameter)
    return module

"""Layers that were made without memory (on the meta device) get memory and their initial values, one at a time."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import messages
from ..torch_private import own_buffers, own_parameters
from .module_blocks import bottom_up

_RESETS = ("reset_parameters", "_reset_parameters")


def materialize(root: nn.Module, device: torch.device, noted: Collection[int] = ()) -> list[str]:
    """Fill all that is on the meta device; see :class:`Materializer`. Returns what got memory, but no values."""
    materializer = Materializer(root, device, noted)
    for name, part in bottom_up(root):
        materializer.fill(name, part)
    return materializer.unfilled


class Materializer:
    """Fills what is on the meta device, module by module, children first.

    A module's own ``reset_parameters`` gives the initial values, and after it the ``_init_weights(module)`` of the
    nearest module around it that has one. Children first is the order in which constructors fill their layers, so that
    the random numbers, and with them the initial values, are those of a process that made the same layers for real.
    They are not where a constructor fills its children anew (or copies them) and no method of that name does.

    What has values, or gets them otherwise, keeps them, and no random numbers are drawn for it.

    Args:
        root: the module; nothing is changed yet.
        device: where memory is taken.
        noted: ids of parameters on the meta device that stay there: their values come from elsewhere.

    Attributes:
        unfilled: names of tensors that got memory, but no values; a checkpoint may still bring them.
    """

    def __init__(self, root: nn.Module, device: torch.device, noted: Collection[int] = ()) -> None:
        self.device = device
        self._given = {
            (id(owner), key)
            for owner in root.modules()
            for key, value in _own_tensors(owner)
            if not value.is_meta or id(value) in noted
        }
        empty = sum(len(_own_tensors(owner)) for owner in root.modules()) - len(self._given)
        if empty:
            messages.info_once(
                f"{empty} tensors of {type(root).__name__} were made without values, and get their layers' initial "
                "ones. If they are to come from files, load them with load_checkpoint_in_model."
            )
        self.unfilled: list[str] = []
        self._filler: dict[int, Any] = {}
        #: By the id of the empty one, which is kept alive; the one that was made is let go of when it is sharded.
        self._made: dict[int, tuple[Tensor, weakref.ref[Tensor]]] = {}
        self._find_fillers(root, None)

    def _find_fillers(self, module: nn.Module, nearest: Any) -> None:
        own = getattr(module, "_init_weights", None)
        nearest = own if callable(own) else nearest
        self._filler[id(module)] = nearest
        for child in module.children():
            self._find_fillers(child, nearest)

    @torch.no_grad()
    def fill(self, name: str, module: nn.Module) -> None:
        """Give memory and values to the tensors that ``module`` itself holds, if they have none."""
        own = _own_tensors(module)
        empty = {key for key, value in own if value.is_meta and (id(module), key) not in self._given}
        if not empty:
            return
        self._take_memory(module, empty)
        reset = next((found for key in _RESETS if callable(found := getattr(module, key, None))), None)
        with self._without_what_was_given(module):
            if reset is not None:
                reset()
            fill = self._filler[id(module)]
            if fill is not None:
                fill(module)
        for key, value in _own_tensors(module):
            if key in empty and has_sentinel(value):
                self.unfilled.append(f"{name}.{key}" if name else key)

    @contextmanager
    def _without_what_was_given(self, module: nn.Module) -> Iterator[None]:
        """Within, methods that fill a module find nothing they could change in the place of what has values."""
        put_away: list[tuple[dict[str, Any], str, Tensor]] = []
        for owner in module.modules():
            for held in (own_parameters(owner), own_buffers(owner)):
                for key, value in held.items():
                    if value is not None and not value.is_meta and (id(owner), key) in self._given:
                        put_away.append((held, key, value))
        for held, key, value in put_away:
            empty = torch.empty_like(value, device="meta")
            held[key] = nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty
        try:
            yield
        finally:
            for held, key, value in put_away:
                held[key] = value

    def _take_memory(self, module: nn.Module, keys: Collection[str]) -> None:
        """As ``to_empty``, but a tied parameter stays one, and what nobody fills afterwards can be told."""
        for held in (own_parameters(module), own_buffers(module)):
            for key, value in held.items():
                if value is None or key not in keys:
                    continue
                made = self._made[id(value)][1]() if id(value) in self._made else None
                if made is None:
                    made = _with_sentinel(torch.empty_like(value, device=self.device))
                    if isinstance(value, nn.Parameter):
                        made = nn.Parameter(made, requires_grad=value.requires_grad)
                    self._made[id(value)] = (value, weakref.ref(made))
                held[key] = made  # type: ignore[assignment]


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    both = (*own_parameters(module).items(), *own_buffers(module).items())
    return [(key, value) for key, value in both if value is not None]


def _with_sentinel(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(torch.nan)
    return tensor.zero_() if tensor.dtype is torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)


def has_sentinel(tensor: Tensor) -> bool:
    """Whether an element was left as it was; a bool cannot tell, and counts as left."""
    if not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype is torch.bool or bool((tensor == torch.iinfo(tensor.dtype).max).any())

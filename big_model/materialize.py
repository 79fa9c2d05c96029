"""Materialize meta-device layers: allocate and initialize their tensors on a real device, layer by layer."""

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
    """Materialize all meta-device tensors; return the names of tensors without values. See :class:`Materializer`."""
    materializer = Materializer(root, device, noted)
    for name, part in bottom_up(root):
        materializer.fill(name, part)
    return materializer.unfilled


class Materializer:
    """Materializes meta-device tensors, module by module, children first.

    A module's tensors are initialized by its own ``reset_parameters``, and then by ``_init_weights(module)`` of the
    nearest enclosing module that has this method. Constructors initialize their layers in the same order, children
    first. The random numbers and the initial values are therefore the same as in a process that created the layers with
    memory, unless a constructor initializes (or copies) its children again and none of these methods does the same.

    Tensors that already have values, or are in ``noted``, do not change, and no random numbers are drawn for them.

    Args:
        root: the module; creating this object does not change the module.
        device: device on which to allocate memory.
        noted: IDs of parameters that stay on the meta device, because their values are read from files later.

    Attributes:
        unfilled: names of tensors that have memory but no values; a checkpoint may still set them.
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
                f"{type(root).__name__} has tensors that were created without values ({empty}), so their layers "
                "initialize them. To load these tensors from files instead, call load_checkpoint_in_model."
            )
        self.unfilled: list[str] = []
        self._filler: dict[int, Any] = {}
        #: By the empty tensor's id: the empty tensor (kept alive) and a weak ref to the new one (sharding replaces it).
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
        """Allocate and fill the module's own tensors that have no values."""
        own = _own_tensors(module)
        empty = {key for key, value in own if value.is_meta and (id(module), key) not in self._given}
        if not empty:
            return
        self._take_memory(module, empty)
        reset = next((found for key in _RESETS if callable(found := getattr(module, key, None))), None)
        with self._values_hidden(module):
            if reset is not None:
                reset()
            fill = self._filler[id(module)]
            if fill is not None:
                fill(module)
        for key, value in _own_tensors(module):
            if key in empty and has_sentinel(value):
                self.unfilled.append(f"{name}.{key}" if name else key)

    @contextmanager
    def _values_hidden(self, module: nn.Module) -> Iterator[None]:
        """Context manager that temporarily replaces initialized tensors, so that initializers cannot change them."""
        hidden: list[tuple[dict[str, Any], str, Tensor]] = []
        for owner in module.modules():
            for held in (own_parameters(owner), own_buffers(owner)):
                for key, value in held.items():
                    if value is not None and not value.is_meta and (id(owner), key) in self._given:
                        hidden.append((held, key, value))
        for held, key, value in hidden:
            empty = torch.empty_like(value, device="meta")
            held[key] = nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty
        try:
            yield
        finally:
            for held, key, value in hidden:
                held[key] = value

    def _take_memory(self, module: nn.Module, keys: Collection[str]) -> None:
        """Allocate memory like ``to_empty``, but keep parameters tied, and mark unfilled tensors with sentinels."""
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
    """Return True if any element still has the sentinel value; bool tensors always count as unfilled."""
    if not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype is torch.bool or bool((tensor == torch.iinfo(tensor.dtype).max).any())

"""Save everything that a trial may change, and restore it in place afterward."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.loaders import load_loader_state, loader_state, samplers_of
from ..devices.kinds import kind_of
from ..processes.seed import random_states, set_random_states

#: Maximum length of a collection to save; a longer one is considered data, not state.
_MOST_ENTRIES = 10_000


class SavedState:
    """Saves the contents of objects. :meth:`restore` restores them in place and can be called repeatedly.

    This covers modules, optimizers and plain collections (recursively), and tensors (copied to the host), numpy arrays
    and random generators. The contents of other objects are not saved.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []
        self._random: dict[str, Any] | None = None
        self._seen: dict[int, Any] = {}  # keeps objects alive, so that ids are unique

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything. Random states are restored last."""
        for undo in self._undo:
            undo()
        if self._random is not None:
            set_random_states(self._random)

    # ---- saving ----------------------------------------------------------------------------------------------------

    def random(self, device: torch.device) -> None:
        """Save all RNG states, including those of the devices."""
        if kind_of(device).is_available():
            kind_of(device).initialize()  # otherwise, a generator first used in a trial has no state to restore
        self._random = random_states()

    def attributes(self, owner: Any) -> None:
        """Save an object's attributes, and the states of any random generators among them."""
        self._fill(vars(owner))
        for value in vars(owner).values():
            if isinstance(value, (torch.Generator, random.Random)):
                self.keep(value)

    def loaders(self, loaders: Iterable[Any]) -> None:
        """Save the loaders' positions, generators and samplers."""
        for loader in loaders:
            for sampler in samplers_of(loader):
                if hasattr(sampler, "__dict__"):
                    self._fill(vars(sampler))
            state = loader_state(loader)
            if state is not None:
                self._undo.append(lambda loader=loader, state=state: load_loader_state(loader, state))

    @torch.no_grad()
    def keep(self, value: Any) -> None:
        """Save a module, an optimizer, a tensor, a generator, or a collection of these."""
        if id(value) in self._seen or isinstance(value, (str, int, float, type(None))):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, (nn.Module, Optimizer, torch.amp.GradScaler)):
            self._fill(vars(value))
            self._inside(vars(value).values())
        elif isinstance(value, (dict, list, set, deque)) and len(value) <= _MOST_ENTRIES:
            self._fill(value)
            self._inside(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, tuple) and len(value) <= _MOST_ENTRIES:
            self._inside(value)
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._undo.append(lambda: value.set_state(state))
        elif isinstance(value, random.Random):
            drawn = value.getstate()
            self._undo.append(lambda: value.setstate(drawn))
        else:
            self._array(value)

    def _array(self, value: Any) -> None:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray) and value.flags.writeable:
            entries = value.copy()
            self._undo.append(lambda: numpy.copyto(value, entries))

    def _inside(self, values: Iterable[Any]) -> None:
        for value in values:
            self.keep(value)

    def _fill(self, value: Any) -> None:
        """Save a collection's entries and their order."""
        entries = value.copy()

        def refill() -> None:
            if isinstance(value, dict):
                if list(value) != list(entries):
                    value.clear()
                value.update(entries)
            elif isinstance(value, list):
                value[:] = entries
            else:
                value.clear()
                (value.extend if isinstance(value, deque) else value.update)(entries)

        self._undo.append(refill)

    def _tensor(self, tensor: Tensor) -> None:
        spread = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, _strides(tensor), strict=False))
        if tensor.is_meta or tensor.is_inference() or spread:
            return
        copy, device = _own(tensor).detach().to("cpu", copy=True), tensor.device
        grad, wants = (tensor.grad if tensor.is_leaf else None), tensor.requires_grad

        def refill() -> None:
            own = _own(tensor).detach()
            if own.shape == copy.shape and own.dtype == copy.dtype and tensor.device == device:
                own.copy_(copy)
            else:
                tensor.data = copy.to(device)
            if tensor.is_leaf:
                tensor.grad = grad
                if tensor.requires_grad != wants:
                    tensor.requires_grad_(wants)

        self._undo.append(refill)


def _own(tensor: Any) -> Tensor:
    """Return this process's shard of a DTensor, or any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout == torch.strided else ()

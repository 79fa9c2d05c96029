"""Deferred weights: parameters on the meta device whose values are read only after the module has been sharded.

If a strategy shards a module, ``configure_model`` runs before sharding. Loading a weight into a parameter on the meta
device only attaches a note with the path of the weight's file, although names and shapes are checked immediately. After
the module has been sharded, each process reads its own shards, so no process ever holds all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import messages
from ..torch_private import change_count
from . import sharded_loading
from .empty_init import put
from .weight_files import Pages, mapped_tensors

_NOTE = "_paceline_note"
#: The model's attribute that contains the names of its deferred parameters.
_NAMES = "_paceline_noted"
_noting: ContextVar[bool] = ContextVar("noting", default=False)


class Note(NamedTuple):
    """Records where a parameter's values are stored.

    Attributes:
        file: the weight file.
        name: the tensor's name in the file.
        dtype: dtype that floating-point values are first converted to when they are read; None skips this conversion.
            In either case, the values are then converted to the dtype that the parameter has at that time.
    """

    file: Path
    name: str
    dtype: torch.dtype | None


class NotedParameter(nn.Parameter):
    """A parameter on the meta device with a note that says where the values are stored; copies keep this note."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = super().__deepcopy__(memo)
        _attach(made, vars(self)[_NOTE][0])
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.data, self.requires_grad, vars(self)[_NOTE][0])


def _rebuilt(data: Tensor, requires_grad: bool, note: Note) -> nn.Parameter:
    made = nn.Parameter(data, requires_grad)
    _attach(made, note)
    return made


@contextmanager
def noting() -> Iterator[None]:
    """Context manager that defers loading values into meta-device parameters until the module has been sharded."""
    token = _noting.set(True)
    try:
        yield
    finally:
        _noting.reset(token)


def is_noting() -> bool:
    """Return True if loading is currently deferred until the module has been sharded."""
    return _noting.get()


def is_to_be_noted(own: Tensor) -> bool:
    """Return True if loading values into a tensor must be deferred."""
    return is_noting() and own.is_meta and isinstance(own, nn.Parameter)


def write_note(model: nn.Module, names: list[str], own: Tensor, note: Note, dtype: torch.dtype) -> None:
    """Attach a note that says where the values of a parameter on the meta device are stored.

    ``names`` are the parameter's names in the model. The parameter stays the same object but gets the given dtype.
    """
    own.data = own.data.to(dtype)
    _attach(own, note)
    vars(model).setdefault(_NAMES, set()).update(names)


def _attach(own: Tensor, note: Note) -> None:
    """Attach a note to a parameter so that copies of the parameter keep the note.

    The parameter must stay the same object, because tied layers, optimizers and the user may reference it, so its class
    is changed in place. ``torch.utils.swap_tensors`` does the same, but rejects parameters that have weak references.
    """
    vars(own)[_NOTE] = (note, change_count(own))
    if type(own) is nn.Parameter:
        own.__class__ = NotedParameter


def _notes(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Note]]:
    """Yield the names, parameters and notes of a module's deferred parameters.

    Raises:
        RuntimeError: a parameter was changed after loading, and the change would be lost.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        note, version = vars(parameter).get(_NOTE, (None, 0))
        if note is None or not parameter.is_meta:
            continue
        if change_count(parameter) != version:
            raise RuntimeError(_lost(name, "changed in place"))
        yield name, parameter, note


def _check_replaced(module: nn.Module) -> None:
    """Raise an error if a loaded parameter was replaced with a new one on the meta device, for example by resizing."""
    for place, part in module.named_modules():
        names = vars(part).pop(_NAMES, ())
        own = dict(part.named_parameters(remove_duplicate=False)) if names else {}
        for name in names:
            if name in own and own[name].is_meta and _NOTE not in vars(own[name]):
                raise RuntimeError(_lost(f"{place}.{name}" if place else name, "replaced by a new parameter"))


def _lost(name: str, what: str) -> str:
    return (
        f"{name} was loaded from a file and then {what}, but it has no memory yet. Under a strategy that shards "
        "models, the file is read after configure_model, so the change would be lost. Change the parameter before "
        "load_checkpoint_in_model, or create the model without init_empty_weights, in which case each process "
        "temporarily holds the full model."
    )


class Waiting:
    """Parameters whose values have not been loaded yet.

    Args:
        module: the module before it is sharded; None if no values are missing.

    Attributes:
        notes: notes for parameters whose values are in files, by parameter name.
        unfilled: names of tensors that have memory but no values, because no method of their layer sets the values. A
            checkpoint may still set them.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.notes: dict[str, Note] = {}
        self.unfilled: list[str] = []
        self.noted: set[int] = set()
        if module is None:
            return
        _check_replaced(module)
        for name, parameter, note in _notes(module):
            self.notes[name] = note
            self.noted.add(id(parameter))

    def __str__(self) -> str:
        return "\n".join(f"{name}: {note.name} of {note.file.name}" for name, note in self.notes.items())

    def take_memory(self, module: nn.Module, device: torch.device) -> None:
        """Allocate uninitialized memory for the deferred parameters, or only for this process's shards of them."""
        tied: dict[int, list[str]] = {}
        own = dict(module.named_parameters(remove_duplicate=False))
        for name in self.notes:
            if own[name].is_meta:
                tied.setdefault(id(own[name]), []).append(name)
        for names in tied.values():
            parameter = own[names[0]]
            made = nn.Parameter(sharded_loading.memory_for(parameter, device), requires_grad=parameter.requires_grad)
            put(module, names, made)

    def restored(self, names: Iterable[str]) -> None:
        """Record that a checkpoint has set the values of the parameters with the given names."""
        found = set(names)
        self.notes = {name: note for name, note in self.notes.items() if name not in found}
        self.unfilled = [name for name in self.unfilled if name not in found]

    def read(self, module: nn.Module) -> None:
        """Read the deferred parameters' values, or this process's shards of them, from their files, one at a time."""
        own = dict(module.named_parameters(remove_duplicate=False))
        files: dict[Path, dict[str, dict[int, tuple[Tensor, Note]]]] = {}
        for name, note in self.notes.items():
            # A tied parameter has several names, and several parameters (copies, for example) may use the same value.
            targets = files.setdefault(note.file, {}).setdefault(note.name, {})
            targets[id(own[name])] = (own[name], note)
        for file, wanted in files.items():
            _read_file(file, wanted)
        self.notes = {}

    def check(self, module: nn.Module, gather: Callable[[Any], list[Any]]) -> None:
        """Raise an error on every process if a tensor lacks values on any process.

        ``gather`` returns the values that all processes pass to it.

        Raises:
            RuntimeError: some tensors have no values; the message names them.
        """
        from .materialize import has_sentinel

        own = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        left = [
            name for name in self.unfilled if not own[name].is_meta and has_sentinel(sharded_loading.local(own[name]))
        ]
        found = {name for names in gather(left) for name in names}
        self.unfilled = [name for name in self.unfilled if name in found]
        if self.unfilled:
            raise RuntimeError(
                f"{type(module).__name__} was created on the meta device, and nothing sets the values "
                f"of {messages.names(self.unfilled[:10], 'and')}. Their layers have no reset_parameters() that "
                "sets them, no enclosing module has _init_weights(module), and no checkpoint was loaded. Load a "
                "checkpoint (load_checkpoint_in_model), define one of those methods, or create these layers outside "
                "torch.device('meta')."
            )


def _read_file(file: Path, wanted: Mapping[str, Mapping[int, tuple[Tensor, Note]]]) -> None:
    left = set(wanted)
    pages: Pages | None = None
    for name, value in mapped_tensors(file):
        if name not in left:
            continue
        left.discard(name)
        for own, note in wanted[name].values():
            if own.shape != value.shape:
                raise _changed(file, f"{name} has the shape {tuple(value.shape)}, not {tuple(own.shape)}")
            pages = pages or Pages()
            sharded_loading.fill(own, value, note.dtype, pages)
    if left:
        raise _changed(file, f"the file no longer contains {', '.join(sorted(left)[:5])}")


def _changed(file: Path, what: str) -> ValueError:
    return ValueError(
        f"The weights in {str(file)!r} have changed since the model was created: {what}. Do not change this file while "
        "a run is starting."
    )

"""Weights that are loaded into parameters without memory, before it is known which process holds which part of them.

Where a strategy splits a module, ``configure_model`` comes before the split. A parameter that has no memory then keeps
a note of the file that has its values; names and shapes are checked at once. After the split each process reads its
part: none of them ever holds the whole.
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
#: Where a model has the names of what was noted in it.
_NAMES = "_paceline_noted"
_noting: ContextVar[bool] = ContextVar("noting", default=False)


class Note(NamedTuple):
    """Where the values of a parameter are.

    Attributes:
        file: what holds them.
        name: what they are called there.
        dtype: what floating-point ones become when they are read, before they become what the parameter is by then;
            None: that at once.
    """

    file: Path
    name: str
    dtype: torch.dtype | None


class NotedParameter(nn.Parameter):
    """A parameter without memory, with a note of where its values are; a copy has the note too."""

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
    """Within, what is loaded into a parameter without memory is noted, to be read when the module has been split."""
    token = _noting.set(True)
    try:
        yield
    finally:
        _noting.reset(token)


def is_noting() -> bool:
    """Whether weights are only noted at this moment, to be read when the module has been split."""
    return _noting.get()


def is_to_be_noted(own: Tensor) -> bool:
    """Whether the values of this tensor are to be read later."""
    return is_noting() and own.is_meta and isinstance(own, nn.Parameter)


def write_note(model: nn.Module, names: list[str], own: Tensor, note: Note, dtype: torch.dtype) -> None:
    """Let a parameter without memory know where its values are.

    Args:
        model: that it is of.
        names: of the parameter in it.
        own: the parameter, which stays the same object.
        note: where they are.
        dtype: what the parameter is from now on.
    """
    own.data = own.data.to(dtype)
    _attach(own, note)
    vars(model).setdefault(_NAMES, set()).update(names)


def _attach(own: Tensor, note: Note) -> None:
    vars(own)[_NOTE] = (note, change_count(own))
    if type(own) is nn.Parameter:
        own.__class__ = NotedParameter


def _notes(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Note]]:
    """The notes of a module's parameters, by name.

    Raises:
        RuntimeError: something was done to a parameter after it was loaded, which would have been lost.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        note, version = vars(parameter).get(_NOTE, (None, 0))
        if note is None or not parameter.is_meta:
            continue
        if change_count(parameter) != version:
            raise RuntimeError(_lost(name, "changed in place"))
        yield name, parameter, note


def _check_replaced(module: nn.Module) -> None:
    """Raise if a parameter that was loaded has made room for another one without memory (resized, say)."""
    for place, part in module.named_modules():
        names = vars(part).pop(_NAMES, ())
        own = dict(part.named_parameters(remove_duplicate=False)) if names else {}
        for name in names:
            if name in own and own[name].is_meta and _NOTE not in vars(own[name]):
                raise RuntimeError(_lost(f"{place}.{name}" if place else name, "replaced by another one"))


def _lost(name: str, what: str) -> str:
    return (
        f"{name} was loaded from a file and then {what}, while it has no memory: under a strategy that shards, the "
        "file is read after configure_model, so that would be lost. Change it before load_checkpoint_in_model; or "
        "build the model without init_empty_weights, so that each process holds the whole of it for a moment."
    )


class Waiting:
    """What of a module waits for values while it is set up, by its name.

    Args:
        module: as it was built, before anything is split; None: nothing waits.

    Attributes:
        notes: of parameters whose values are in files.
        unfilled: what has memory, but no values: no layer's own method gives it any. A checkpoint may.
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
        """Give what was noted its memory, without values; of what has been split only this process's part."""
        twins: dict[int, list[str]] = {}
        own = dict(module.named_parameters(remove_duplicate=False))
        for name in self.notes:
            if own[name].is_meta:
                twins.setdefault(id(own[name]), []).append(name)
        for names in twins.values():
            parameter = own[names[0]]
            made = nn.Parameter(sharded_loading.memory_for(parameter, device), requires_grad=parameter.requires_grad)
            put(module, names, made)

    def restored(self, names: Iterable[str]) -> None:
        """These have got values, from a checkpoint."""
        found = set(names)
        self.notes = {name: note for name, note in self.notes.items() if name not in found}
        self.unfilled = [name for name in self.unfilled if name not in found]

    def read(self, module: nn.Module) -> None:
        """Fill what was noted from its files, one after the other; of what has been split only this process's part."""
        own = dict(module.named_parameters(remove_duplicate=False))
        files: dict[Path, dict[str, dict[int, tuple[Tensor, Note]]]] = {}
        for name, note in self.notes.items():
            # A tied parameter has several names, and a value may go to several parameters: to a copy, say.
            targets = files.setdefault(note.file, {}).setdefault(note.name, {})
            targets[id(own[name])] = (own[name], note)
        for file, wanted in files.items():
            _read_file(file, wanted)
        self.notes = {}

    def check(self, module: nn.Module, gather: Callable[[Any], list[Any]]) -> None:
        """Raise on every process if something has no values on one of them.

        Args:
            module: that it is of.
            gather: returns what every process passes.

        Raises:
            RuntimeError: what has none.
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
                f"{type(module).__name__} was made on the meta device, and nothing gives "
                f"{messages.names(self.unfilled[:10], 'and')} a value: the layer has no reset_parameters() that fills "
                "it, no module around it has _init_weights(module), and no checkpoint was loaded. Load one "
                "(load_checkpoint_in_model), write one of those methods, or make that layer outside of "
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
        raise _changed(file, f"{', '.join(sorted(left)[:5])} is not in it")


def _changed(file: Path, what: str) -> ValueError:
    return ValueError(
        f"The weights in {str(file)!r} have changed since the model was built: {what}. Leave them as they are while a "
        "run starts."
    )

"""``save_state`` and ``load_state``, which let a user's loop resume with bit-identical results.

A state is a folder that contains ``state.ckpt`` (a checkpoint in the Trainer's format) and the files of user hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

from .. import messages
from ..checkpoint import atomic_write, sharded_folder, single_file
from ..checkpoint.manifest import STATE
from ..checkpoint.read import read
from ..checkpoint.storage import Location, location
from .state_contents import Contents, Restored, Weights
from .state_folders import Folders, HookFiles, newer_of_its_run, settle_files

_METHODS = ("state_dict", "load_state_dict")
_FROZEN = ("only_trainable", "exclude_frozen_parameters")


@dataclass(eq=False)
class States:
    """Saves and loads the states of one Accelerator.

    Attributes:
        before_save: hooks called with ``(models, weights, output_dir)``, keyed by the ID of their handle.
        before_load: hooks called with ``(models, input_dir)``, keyed by the ID of their handle.
    """

    contents: Contents
    folders: Folders
    before_save: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)
    before_load: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)

    # ---- save ------------------------------------------------------------------------------------------------------

    def save(self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any) -> str:
        """Save everything that the loop needs to resume; :meth:`.Accelerator.save_state` describes the arguments."""
        messages.ignored(
            "accelerator.save_state",
            "a state is one file that can be read without running code",
            unless=True,
            safe_serialization=safe_serialization,
        )
        only_trainable = _only_trainable(save_model_func_kwargs)
        contents, folders, strategy = self.contents, self.folders, self.contents.strategy
        strategy.barrier(f"accelerator.save_state({'' if output_dir is None else repr(str(output_dir))})")
        folder = folders.to_save(output_dir)
        with ExitStack() as stack:
            placements = contents.prepared.placements.values()
            modes = [stack.enter_context(one.strategy.states_in_parts()) for one in placements]
            weights, left_out = contents.weights(only_trainable)
            hooked = self._call_hooks(folder, weights)
            try:
                files = strategy.broadcast(hooked.files if hooked else {})
                sequence = folders.next(folder) if strategy.is_global_zero else 0
                sequence, folders.line = strategy.broadcast((sequence, folders.line))
                checkpoint = contents.gather(weights, left_out, files, sequence, folders.line)
                self._write(checkpoint, folder, hooked, any(modes))
            finally:
                if hooked is not None:
                    hooked.remove()
        folders.saved(folder)
        if contents.project.writes(strategy):
            folders.delete_old(folder)
        contents.project.iteration += 1
        strategy.barrier("accelerator.save_state: saved")
        return str(folder)

    def _call_hooks(self, folder: Location, weights: Weights) -> HookFiles | None:
        """Call the hooks, which may write files. Weights that a hook removes on rank 0 are not saved."""
        hooks = list(self.before_save.values())
        if not hooks:
            return None
        strategy = self.contents.strategy
        files = HookFiles(folder, strategy, self.contents.project.writes(strategy))
        listed = list(weights.values())

        def call(path: str) -> None:
            for hook in hooks:
                hook(self.contents.prepared.saved_models, listed, path)

        files.written_by(call)
        kept = {id(state) for state in listed}
        for index in strategy.broadcast([index for index, state in weights.items() if id(state) not in kept]):
            del weights[index]
        return files

    def _write(self, checkpoint: dict[str, Any], folder: Location, hooked: HookFiles | None, in_parts: bool) -> None:
        strategy, writes = self.contents.strategy, self.contents.project.writes(self.contents.strategy)
        path = folder / STATE
        with hooked.in_place() if hooked and writes else nullcontext():
            if in_parts:
                sharded_folder.write(checkpoint, path, strategy)
            else:
                sharded_folder.together(
                    strategy, "saved", lambda: single_file.write(checkpoint, path) if writes else None
                )
        if writes and isinstance(folder, Path):
            for pattern in (f".{STATE}.*.tmp", ".hooks.*.tmp"):  # left by killed saves
                for left in folder.glob(pattern):
                    atomic_write.remove(left)

    # ---- load -------------------------------------------------------------------------------------------------------

    def load(
        self,
        input_dir: Any = None,
        load_kwargs: Mapping[str, Any] | None = None,
        strict: bool = False,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Resume from a state that :meth:`save` wrote; :meth:`.Accelerator.load_state` describes the arguments."""
        _check_options({**(load_kwargs or {}), **load_model_func_kwargs})
        strategy = self.contents.strategy
        strategy.barrier(f"accelerator.load_state({'' if input_dir is None else repr(str(input_dir))})")
        find = partial(self.folders.to_load, input_dir) if strategy.is_global_zero else str
        state = location(strategy.broadcast(str(sharded_folder.together(strategy, "found", find))))
        reader = next((one.strategy for one in self.contents.prepared.placements.values()), strategy)
        checkpoint = sharded_folder.together(strategy, "read", lambda: read(state, strategy=reader))
        wrong = self._settled_files(state, checkpoint)
        models = self.contents.prepared.saved_models
        hooks = list(self.before_load.values())
        sharded_folder.together(strategy, "loaded", lambda: [hook(models, str(state.parent)) for hook in hooks])
        newer = strategy.broadcast(newer_of_its_run(state) if strategy.is_global_zero else None)
        restored = Restored(self.contents, checkpoint, models, newer)
        missing = [*restored.missing, *(f"the file {name}, which differs from the saved one" for name in wrong)]
        if missing:
            _tell(str(state.parent if state.name == STATE else state), missing, strict)
        restored.apply()
        known = checkpoint.get("paceline", {}).get("manifest", {})
        self.folders.line = known.get("line") or self.folders.line

    def _settled_files(self, state: Location, checkpoint: Mapping[str, Any]) -> list[str]:
        strategy = self.contents.strategy
        files = checkpoint.get("paceline", {}).get("accelerator", {}).get("files", {})
        if not files:
            return []
        wrong = sharded_folder.together(
            strategy, "read", lambda: settle_files(state, files) if strategy.is_global_zero else []
        )
        return strategy.broadcast(wrong)

    # ---- registered objects and hooks -------------------------------------------------------------------------------

    def register(self, *objects: Any) -> None:
        """Register objects to be saved and loaded as part of the state. Loading matches objects by registration order.

        Args:
            *objects: objects with ``load_state_dict(state)`` and with ``state_dict()``, which must return plain data
                and tensors.

        Raises:
            ValueError: some objects lack these methods; in that case, no object is registered.
        """
        odd = [
            f"{index}: {type(one).__name__}"
            for index, one in enumerate(objects)
            if not all(callable(getattr(one, name, None)) for name in _METHODS)
        ]
        if odd:
            raise ValueError(
                "accelerator.register_for_checkpointing: these objects lack state_dict or load_state_dict: "
                f"{', '.join(odd)}. Define both methods; state_dict must return plain data (numbers, strings, "
                "tensors, and dicts and lists of these)."
            )
        known = self.contents.objects
        for one in objects:
            if all(one is not other for other in known):
                known.append(one)

    def on_save(self, hook: Callable[..., None]) -> RemovableHandle:
        """Register a hook; see :meth:`.accelerator.Accelerator.register_save_state_pre_hook`."""
        return _registered(self.before_save, hook)

    def on_load(self, hook: Callable[..., None]) -> RemovableHandle:
        """Register a hook; see :meth:`.accelerator.Accelerator.register_load_state_pre_hook`."""
        return _registered(self.before_load, hook)


def _only_trainable(options: Mapping[str, Any]) -> bool:
    for name in options:
        if name not in _FROZEN:
            raise TypeError(f"accelerator.save_state: {messages.unknown('argument', name, _FROZEN)}")
    return any(options.values())


def _check_options(options: Mapping[str, Any]) -> None:
    known = ("map_location", "weights_only")
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"accelerator.load_state: {messages.unknown('argument', name, known)}")
        if name == "weights_only" and value is False:
            raise ValueError(
                "accelerator.load_state(load_kwargs={'weights_only': False}) is not supported, because a state is "
                "plain data and loading it never runs code. Leave out weights_only."
            )
    messages.ignored(
        "accelerator.load_state",
        "every tensor goes to the device of the object that it belongs to",
        map_location=options.get("map_location"),
    )


def _tell(where: str, missing: list[str], strict: bool) -> None:
    text = f"accelerator.load_state({where!r}) cannot restore everything: {'; '.join(missing)}."
    if strict:
        raise RuntimeError(
            f"{text} Nothing was loaded. Prepare and register the same objects as when the state was saved, in the "
            "same order, or leave out strict=True."
        )
    messages.warn(f"{text} Everything else is restored. Pass strict=True to make this an error.")


def _registered(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle

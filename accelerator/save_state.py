"""``save_state`` and ``load_state``: a loop of the user's own goes on from where it was, to the bit.

A state is a folder with one checkpoint of the format that the Trainer writes too, ``state.ckpt``, and beside it the
files that hooks of the user's wrote.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

from .. import messages
from ..checkpoint import atomic_write, sharded_folder, single_file
from ..checkpoint.manifest import STATE
from ..checkpoint.read import read
from ..checkpoint.storage import Location, location
from . import state_folders
from .state_contents import Restored, Weights, gather, weights_of

if TYPE_CHECKING:
    from .accelerator import Accelerator

_FROZEN = ("only_trainable", "exclude_frozen_parameters")


# ---- save ------------------------------------------------------------------------------------------------------------


def save_state(
    accelerator: Accelerator, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
) -> str:
    """Save everything that the loop needs to go on. Every rank must call.

    Models, optimizers, schedulers, the loss scale, the place in every prepared loader, the gradients of the window
    under way, the random states of every rank and the registered objects, in ``output_dir/state.ckpt``. It is written
    aside and takes its place when it is on the disk: whatever happens, the old state or the new one is there.

    Args:
        accelerator: whose loop it is.
        output_dir: a folder, or an address of one; None: ``project_dir/checkpoints/checkpoint_<n>`` with
            ``automatic_checkpoint_naming``.
        safe_serialization: accepted; a state is data in either case, and no code is run when it is read.
        **save_model_func_kwargs: ``only_trainable=True`` leaves frozen parameters out (``exclude_frozen_parameters``
            is another name for it).

    Returns:
        The folder.

    Raises:
        RuntimeError: the ranks are at different places of the program.
        TypeError: a registered object's state is not plain data; or an argument that is not known.
        ValueError: nothing says where to save.
        OSError: it could not be written; raised on every rank, and the old state is as it was.
    """
    only_trainable = _only_trainable(save_model_func_kwargs)
    strategy, saves, config = accelerator.strategy, accelerator._saves, accelerator.project_configuration
    strategy.barrier(f"accelerator.save_state({'' if output_dir is None else repr(str(output_dir))})")
    folder = state_folders.folder_to_save(accelerator, output_dir)
    with ExitStack() as stack:
        modes = [
            stack.enter_context(one.strategy.states_in_parts()) for one in accelerator.prepared.placements.values()
        ]
        weights, left_out = weights_of(accelerator, only_trainable)
        hooked = _call_hooks(accelerator, folder, weights)
        try:
            files = strategy.broadcast(hooked.files if hooked else {})
            sequence = strategy.broadcast(saves.next(folder) if strategy.is_global_zero else 0)
            checkpoint = gather(accelerator, weights, left_out, files, sequence)
            _write(accelerator, checkpoint, folder, hooked, any(modes))
        finally:
            if hooked is not None:
                hooked.remove()
    saves.saved(folder)
    if strategy.is_global_zero:
        state_folders.delete_old(saves, folder, config.total_limit)
    config.iteration += 1
    strategy.barrier("accelerator.save_state: saved")
    return str(folder)


def _only_trainable(options: Mapping[str, Any]) -> bool:
    for name in options:
        if name not in _FROZEN:
            raise TypeError(f"accelerator.save_state: {messages.unknown('argument', name, _FROZEN)}")
    return any(options.values())


def _call_hooks(accelerator: Accelerator, folder: Location, weights: Weights) -> state_folders.HookFiles | None:
    """Let hooks write files of their own; weights that rank 0's take out of the list are not saved here."""
    hooks = list(accelerator._saves.before_save.values())
    if not hooks:
        return None
    strategy = accelerator.strategy
    files = state_folders.HookFiles(folder, strategy)
    listed = list(weights.values())

    def call(path: str) -> None:
        for hook in hooks:
            hook(accelerator.prepared.models, listed, path)

    files.written_by(call)
    kept = {id(state) for state in listed}
    for index in strategy.broadcast([index for index, state in weights.items() if id(state) not in kept]):
        del weights[index]
    return files


def _write(
    accelerator: Accelerator,
    checkpoint: dict[str, Any],
    folder: Location,
    hooked: state_folders.HookFiles | None,
    in_parts: bool,
) -> None:
    strategy, each_node = accelerator.strategy, accelerator.project_configuration.save_on_each_node
    path = folder / STATE
    with hooked.in_place() if hooked and strategy.is_global_zero else nullcontext():
        if in_parts:
            sharded_folder.write(checkpoint, path, strategy)
        else:
            writes = strategy.is_global_zero or (each_node and strategy.local_rank == 0)
            sharded_folder.together(strategy, "saved", lambda: single_file.write(checkpoint, path) if writes else None)
    if strategy.is_global_zero and isinstance(folder, Path):
        for pattern in (f".{STATE}.*.tmp", ".hooks.*.tmp"):  # of saves that were killed
            for left in folder.glob(pattern):
                atomic_write.remove(left)


# ---- load ------------------------------------------------------------------------------------------------------------


def load_state(
    accelerator: Accelerator,
    input_dir: Any = None,
    load_kwargs: Mapping[str, Any] | None = None,
    strict: bool = False,
    **load_model_func_kwargs: Any,
) -> None:
    """Go on from what :func:`save_state` wrote, to the bit. Every rank must call, after ``prepare``.

    The next pass over a prepared loader begins where that loader was. On another number of ranks the place in the data
    is that of the same number of samples, and one message says what else was derived.

    Args:
        accelerator: with everything prepared and registered as when it was saved.
        input_dir: the folder; None: the newest valid one of the project, or of this run.
        load_kwargs: accepted as far as they change nothing: ``weights_only=True``, ``map_location``.
        strict: what cannot be restored is an error, before anything is changed; else one warning names it.
        **load_model_func_kwargs: ``map_location`` is accepted; everything goes to where it belongs.

    Raises:
        FileNotFoundError: there is no such state.
        ValueError: damaged, or of other optimizers.
        RuntimeError: weights do not fit; or ``strict``, and something is missing.
    """
    _check_options({**(load_kwargs or {}), **load_model_func_kwargs})
    strategy = accelerator.strategy
    strategy.barrier(f"accelerator.load_state({'' if input_dir is None else repr(str(input_dir))})")
    state = location(strategy.broadcast(_found(accelerator, input_dir)))
    placements = list(accelerator.prepared.placements.values())
    reader = placements[0].strategy if placements else strategy
    checkpoint = sharded_folder.together(strategy, "read", lambda: read(state, strategy=reader))
    wrong = _settled_files(accelerator, state, checkpoint)
    models = list(accelerator.prepared.models)
    sharded_folder.together(strategy, "loaded", lambda: _call_load_hooks(accelerator, models, str(state.parent)))
    newer = strategy.broadcast(state_folders.newer_of_its_run(state) if strategy.is_global_zero else None)
    restored = Restored(accelerator, checkpoint, models, newer)
    missing = [*restored.missing, *(f"the file {name}, which is not what was saved" for name in wrong)]
    if missing:
        _tell(str(state.parent if state.name == STATE else state), missing, strict)
    restored.apply()
    known = checkpoint.get("paceline", {}).get("manifest", {})
    accelerator._saves.line = known.get("line") or accelerator._saves.line


def _call_load_hooks(accelerator: Accelerator, models: list[Any], folder: str) -> None:
    for hook in list(accelerator._saves.before_load.values()):
        hook(models, folder)


def _found(accelerator: Accelerator, input_dir: Any) -> str:
    """Where rank 0 finds it; an error there is one on every rank."""
    strategy = accelerator.strategy
    return sharded_folder.together(
        strategy,
        "found",
        lambda: str(state_folders.state_to_load(accelerator, input_dir)) if strategy.is_global_zero else "",
    )


def _check_options(options: Mapping[str, Any]) -> None:
    known = ("map_location", "weights_only")
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"accelerator.load_state: {messages.unknown('argument', name, known)}")
        if name == "weights_only" and value is False:
            raise ValueError(
                "accelerator.load_state(load_kwargs={'weights_only': False}): a state is data, and code that a file "
                "names is never run. Leave it out."
            )


def _settled_files(accelerator: Accelerator, state: Location, checkpoint: Mapping[str, Any]) -> list[str]:
    strategy = accelerator.strategy
    files = checkpoint.get("paceline", {}).get("accelerator", {}).get("files", {})
    if not files:
        return []
    wrong = sharded_folder.together(
        strategy, "read", lambda: state_folders.settle_files(state, files) if strategy.is_global_zero else []
    )
    return strategy.broadcast(wrong)


def _tell(where: str, missing: list[str], strict: bool) -> None:
    text = f"accelerator.load_state({where!r}) cannot restore everything: {'; '.join(missing)}."
    if strict:
        raise RuntimeError(
            f"{text} Nothing was loaded. Prepare and register what was there when the state was saved, in the same "
            "order; or leave strict=True out."
        )
    messages.warn(f"{text} What is not restored keeps its current state. strict=True makes this an error.")


# ---- registered objects and hooks ------------------------------------------------------------------------------------


def register_for_checkpointing(accelerator: Accelerator, *objects: Any) -> None:
    """Save and load these objects with the state, by the order in which they are registered.

    Args:
        accelerator: whose state it is.
        *objects: each with ``state_dict()``, which returns plain data and tensors, and ``load_state_dict(state)``.

    Raises:
        ValueError: some have no such methods; all of them are named, and none is registered.
    """
    odd = [
        f"{index}: {type(one).__name__}"
        for index, one in enumerate(objects)
        if not all(callable(getattr(one, name, None)) for name in _METHODS)
    ]
    if odd:
        raise ValueError(
            f"accelerator.register_for_checkpointing: of the objects given, these lack state_dict or load_state_dict "
            f"({', '.join(odd)}). Give them both methods; state_dict returns plain data (numbers, strings, tensors; "
            "dicts and lists of them)."
        )
    known = accelerator._custom_objects
    for one in objects:
        if all(one is not other for other in known):
            known.append(one)


_METHODS = ("state_dict", "load_state_dict")


def register_save_state_pre_hook(
    accelerator: Accelerator, hook: Callable[[list[Any], list[dict[str, Any]], str], None]
) -> RemovableHandle:
    """Call ``hook(models, weights, output_dir)`` before a state is saved, on every rank.

    What it writes to ``output_dir`` comes beside the state when that takes its place. A model whose entry rank 0 takes
    out of ``weights`` is not saved in the state.

    Returns:
        A handle with ``remove()``.
    """
    return _registered(accelerator._saves.before_save, hook)


def register_load_state_pre_hook(accelerator: Accelerator, hook: Callable[[list[Any], str], None]) -> RemovableHandle:
    """Call ``hook(models, input_dir)`` before a state is loaded, on every rank.

    A model that it takes out of ``models`` gets no weights from the state.

    Returns:
        A handle with ``remove()``.
    """
    return _registered(accelerator._saves.before_load, hook)


def _registered(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle

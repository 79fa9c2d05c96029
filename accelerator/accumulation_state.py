"""The micro-batches that wait for an optimizer step, in a state: each window's counts, and each rank's gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import messages

if TYPE_CHECKING:
    from .accelerator import Accelerator
    from .accumulation import Window
    from .models import PreparedModel

#: A model's gradients by parameter, as its strategy keeps them.
Gradients = Mapping[str, Any]


def placements_of(accelerator: Accelerator) -> list[PreparedModel]:
    """The models in the order in which they were prepared."""
    return [accelerator._placements[id(model)] for model in accelerator._models]


# ---- gather ----------------------------------------------------------------------------------------------------------


def gather_windows(accelerator: Accelerator) -> dict[str, Any]:
    """What this rank keeps of all windows.

    ``windows``: of each its models, whether it is the one in force, and where it stands; ``gradients``: those that
    wait, by model; None where the strategy has no way to save them.
    """
    state = accelerator.gradient_state
    places = {id(model): index for index, model in enumerate(accelerator._models)}
    named: list[tuple[list[int] | None, Window]] = [
        ([places[key] for key in keys], window) for keys, window in accelerator._windows.items()
    ]
    if all(window is not state.window for _, window in named):
        named.append((None, state.window))  # of a loop without `accumulate`
    windows, waiting = [], set[int]()
    for models, window in named:
        kept = window.state_dict()
        windows.append({"models": models, "in_force": window is state.window, "state": kept})
        if kept["count"]:
            waiting |= set(models or range(len(places)))
    gradients = {
        index: one.strategy.window_gradients(one.module)
        for index, one in enumerate(placements_of(accelerator))
        if index in waiting and not one.frozen
    }
    _say_lost(accelerator, [index for index, found in gradients.items() if found is None])
    return {"windows": windows, "gradients": gradients}


def _say_lost(accelerator: Accelerator, models: list[int]) -> None:
    if models:
        listed = messages.names([type(accelerator._models[index]).__name__ for index in models], "and")
        messages.warn_once(
            f"{type(accelerator.strategy).__name__} has no way to save gradients that wait for an optimizer step, so "
            f"those of {listed} are not in this state: a loop that continues from it lacks the micro-batches of the "
            "window under way. Call save_state where accelerator.sync_gradients is True."
        )


# ---- restore ---------------------------------------------------------------------------------------------------------


def restore_windows(accelerator: Accelerator, own: Mapping[str, Any] | None, ranks: Sequence[Any]) -> list[str]:
    """Put gradients back that wait, and say to each window where it stands; every rank must call.

    Args:
        accelerator: with its models prepared.
        own: what this rank kept; None if the run had other ranks.
        ranks: what each rank kept.

    Returns:
        What was derived, in words.
    """
    forget_windows(accelerator)
    placements = placements_of(accelerator)
    exact = own is not None and all(_fits(placements, index, kept) for index, kept in own["gradients"].items())
    share = len(ranks) / accelerator.strategy.num_data_ranks
    lost = _restore_counts(accelerator, own if exact else None, ranks, share)
    found = own["gradients"] if own is not None and exact else _merged(placements, ranks, share)
    for index, gradients in found.items():
        if gradients and index < len(placements) and index not in lost:
            placements[index].strategy.load_window_gradients(placements[index].module, gradients)
    derived = []
    if lost:
        derived.append("the accumulation window, which starts over without its micro-batches")
    elif found and not exact:
        derived.append("the gradients of the window under way (the mean over the saved ranks)")
    return derived


def forget_windows(accelerator: Accelerator) -> None:
    """Forget the micro-batches that wait for an optimizer step, and their gradients."""
    for model in accelerator._models:
        for parameter in model.parameters():
            parameter.grad = None
    state = accelerator.gradient_state
    for window in (state.window, *accelerator._windows.values()):
        window.load_state_dict({**window.state_dict(), "count": 0})
    state.sync_gradients = True


def _fits(placements: list[PreparedModel], index: int, gradients: Gradients | None) -> bool:
    """Whether saved gradients have the form that the model's strategy keeps them in."""
    return gradients is None or all(
        isinstance(kept, dict) is _in_parts(placements, index) for kept in gradients.values()
    )


def _in_parts(placements: list[PreparedModel], index: int) -> bool:
    parameters = placements[index].module.parameters() if index < len(placements) else ()
    return any(hasattr(parameter, "_local_tensor") for parameter in parameters)


def _restore_counts(
    accelerator: Accelerator, own: Mapping[str, Any] | None, ranks: Sequence[Any], share: float
) -> set[int]:
    """Say to each window where it stands; returns the models whose gradients there is no way to have."""
    lost = {
        index
        for kept in (ranks if own is None else [own])
        for index, gradients in kept["gradients"].items()
        if gradients is None or (own is None and any(_whole(one) is None for one in gradients.values()))
    }
    for number, entry in enumerate((own or ranks[0])["windows"]):
        window, state = _window(accelerator, entry), entry["state"]
        if window is None:
            continue
        if lost & set(entry["models"] or range(len(accelerator._models))):
            state = {**state, "count": 0}
        elif own is None:
            state = {**state, "items": _items([kept["windows"][number]["state"]["items"] for kept in ranks], share)}
        window.load_state_dict(state)
        if entry["in_force"]:
            accelerator.gradient_state.window = window
            accelerator.gradient_state.sync_gradients = window.complete
    return lost


def _window(accelerator: Accelerator, entry: Mapping[str, Any]) -> Window | None:
    """The window of the same models; None if they are not all there."""
    models = entry["models"]
    if models is None:
        window = accelerator.gradient_state.window
        return window if window.free else None
    if any(index >= len(accelerator._models) for index in models):
        return None
    return accelerator.accumulate(*(accelerator._models[index] for index in models))


def _items(saved: Sequence[Mapping[str, Any]], share: float) -> dict[str, Any]:
    """What each rank of now has of the items of all ranks of then."""
    return {"items": sum(one["items"] for one in saved) / len(saved) * share, "unit": saved[0]["unit"]}


def _merged(placements: list[PreparedModel], ranks: Sequence[Any], share: float) -> dict[int, dict[str, Any]]:
    """Gradients for each rank of now whose mean is that of then; where items are counted, whose sum is."""
    by_items = {
        index
        for entry in ranks[0]["windows"]
        if entry["state"]["by_items"]
        for index in entry["models"] or range(len(placements))
    }
    found: dict[int, dict[str, Any]] = {}
    for index in dict.fromkeys(index for kept in ranks for index in kept["gradients"]):
        saved = [kept["gradients"].get(index) or {} for kept in ranks]
        factor = (share if index in by_items else 1.0) / len(ranks)
        found[index] = {}
        for name in dict.fromkeys(name for gradients in saved for name in gradients):
            whole = [_whole(gradients[name]) for gradients in saved if name in gradients]
            total = sum(one * factor for one in whole if one is not None)
            found[index][name] = {"whole": total, "part": None} if _in_parts(placements, index) else total
    return found


def _whole(value: Any) -> Tensor | None:
    """A gradient that a rank has accumulated with nobody, whole; None if it is another one."""
    if isinstance(value, dict):
        return value["whole"] if value["part"] is None else None
    return value

"""The accumulation windows of one Accelerator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import messages
from ..checkpoint.rank_files import merged_gradients, whole_gradient
from ..torch_private import is_in_parts
from .accumulation import GradientState, Window

if TYPE_CHECKING:
    from ..strategies.base import Strategy
    from .models import PreparedModel
    from .prepare import Prepared


@dataclass(eq=False)
class Windows:
    """Creates accumulation windows, and saves and restores incomplete ones.

    Attributes:
        state: the gradient state that contains the windows, including the one for loops that do not call
            ``accumulate``.
    """

    strategy: Strategy
    state: GradientState
    prepared: Prepared

    def __post_init__(self) -> None:
        self.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with windows keyed by their models' indices, because object IDs mean nothing in a copy."""
        index = {id(model): number for number, model in enumerate(self.prepared.models)}
        known = self.state.windows.items()
        return vars(self) | {
            "windows": [([index[one] for one in key], window) for key, window in known if set(key) <= index.keys()]
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        models = self.prepared.models
        for key, window in vars(self).pop("windows"):
            self.state.windows[tuple(id(models[one]) for one in key)] = window

    def open(self, models: Sequence[Any]) -> Window:
        """Return the window for the given prepared models, or for all models if none are given."""
        key = tuple(map(id, models))
        window = self.state.windows.get(key)
        if window is None:
            placements = [self.prepared.placement(model, "accumulate") for model in models] or self._placements
            window = self.state.windows[key] = Window(self.state, self.strategy, [one.strategy for one in placements])
        return window

    @property
    def _placements(self) -> list[PreparedModel]:
        return list(self.prepared.placements.values())

    def clear(self) -> None:
        """Discard all windows."""
        self.state.windows.clear()
        self.state.window = Window(self.state, self.strategy)

    # ---- gather ------------------------------------------------------------------------------------------------------

    def gather(self) -> dict[str, Any]:
        """Return this rank's windows, to be saved in a checkpoint.

        ``windows`` lists each window's models and position, and which window is current. ``gradients`` maps each model
        to the gradients that are waiting for an optimizer step, or to None if the strategy cannot save them.
        """
        state = self.state
        places = {id(model): index for index, model in enumerate(self.prepared.models)}
        named: list[tuple[list[int] | None, Window]] = [
            ([places[key] for key in keys], window) for keys, window in self.state.windows.items()
        ]
        if all(window is not state.window for _, window in named):
            named.append((None, state.window))  # the window for a loop that does not call `accumulate`
        windows, waiting = [], set[int]()
        for models, window in named:
            kept = window.state_dict()
            windows.append({"models": models, "in_force": window is state.window, "state": kept})
            if kept["count"]:
                waiting |= set(models or range(len(places)))
        gradients = {
            index: one.strategy.window_gradients(one.module)
            for index, one in enumerate(self._placements)
            if index in waiting and not one.frozen
        }
        self._say_lost([index for index, found in gradients.items() if found is None])
        return {"windows": windows, "gradients": gradients}

    def _say_lost(self, models: list[int]) -> None:
        if models:
            listed = messages.names([type(self.prepared.models[index]).__name__ for index in models], "and")
            messages.warn_once(
                f"{type(self.strategy).__name__} cannot save gradients that are still waiting for an optimizer step, "
                f"so this state does not contain the gradients of {listed}. A loop that resumes from this state loses "
                "the micro-batches of the incomplete window. Call save_state when accelerator.sync_gradients is True."
            )

    # ---- restore -----------------------------------------------------------------------------------------------------

    def restore(self, own: Mapping[str, Any] | None, ranks: Sequence[Any]) -> list[str]:
        """Restore windows from the results of :meth:`gather`. Every rank must call this.

        ``own`` is this rank's result, or None if the saved run had a different number of ranks. ``ranks`` contains the
        results of all ranks of the saved run.

        Returns:
            Descriptions of the parts of the state that were derived instead of restored.
        """
        self.forget()
        placements = self._placements
        exact = own is not None and all(_fits(placements, index, kept) for index, kept in own["gradients"].items())
        share = len(ranks) / self.strategy.num_data_ranks
        lost = self._restore_counts(own if exact else None, ranks, share)
        found = own["gradients"] if own is not None and exact else _merged(placements, ranks, share)
        for index, gradients in found.items():
            if gradients and index < len(placements) and index not in lost:
                placements[index].strategy.load_window_gradients(placements[index].module, gradients)
        derived = []
        if lost:
            derived.append("the accumulation window, which restarts without its micro-batches")
        elif found and not exact:
            derived.append("the gradients of the incomplete window (the mean over the saved ranks)")
        return derived

    def forget(self) -> None:
        """Discard the micro-batches that are waiting for an optimizer step, and their gradients."""
        for model in self.prepared.models:
            for parameter in model.parameters():
                parameter.grad = None
        state = self.state
        for window in (state.window, *self.state.windows.values()):
            window.load_state_dict({**window.state_dict(), "count": 0})
        state.sync_gradients = True

    def _restore_counts(self, own: Mapping[str, Any] | None, ranks: Sequence[Any], share: float) -> set[int]:
        """Restore the position in each window; return the indices of models whose gradients cannot be restored."""
        lost = {
            index
            for kept in (ranks if own is None else [own])
            for index, gradients in kept["gradients"].items()
            if gradients is None or (own is None and any(whole_gradient(one) is None for one in gradients.values()))
        }
        for number, entry in enumerate((own or ranks[0])["windows"]):
            window, state = self._window(entry), entry["state"]
            if window is None:
                continue
            if lost & set(entry["models"] or range(len(self.prepared.models))):
                state = {**state, "count": 0}
            elif own is None:
                state = {**state, "items": _items([kept["windows"][number]["state"]["items"] for kept in ranks], share)}
            window.load_state_dict(state)
            if entry["in_force"]:
                self.state.window = window
                self.state.sync_gradients = window.complete
        return lost

    def _window(self, entry: Mapping[str, Any]) -> Window | None:
        """Return the window for the models of a saved entry, or None if this run does not have all of these models."""
        models = entry["models"]
        if models is None:
            window = self.state.window
            return window if window.free else None
        if any(index >= len(self.prepared.models) for index in models):
            return None
        return self.open([self.prepared.models[index] for index in models])


def _fits(placements: list[PreparedModel], index: int, gradients: Mapping[str, Any] | None) -> bool:
    """Return True if the saved gradients have the form that the model's strategy uses."""
    return gradients is None or all(
        isinstance(kept, dict) is _in_parts(placements, index) for kept in gradients.values()
    )


def _in_parts(placements: list[PreparedModel], index: int) -> bool:
    parameters = placements[index].module.parameters() if index < len(placements) else ()
    return any(map(is_in_parts, parameters))


def _items(saved: Sequence[Mapping[str, Any]], share: float) -> dict[str, Any]:
    """Return the item count for each current rank: an equal share of the total over all saved ranks."""
    return {"items": sum(one["items"] for one in saved) / len(saved) * share, "unit": saved[0]["unit"]}


def _merged(placements: list[PreparedModel], ranks: Sequence[Any], share: float) -> dict[int, dict[str, Any]]:
    """Return gradients for each rank that keep the saved run's mean (or its sum, if items are counted)."""
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
        found[index] = merged_gradients(saved, factor, _in_parts(placements, index))
    return found

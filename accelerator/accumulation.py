"""Accumulation windows, which decide when the gradients of a user's loop are synchronized, weighted and applied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from .. import messages
from ..strategies.item_weighting import ItemWindow, weighed
from ..strategies.precision.base import gradients
from ..torch_private import local_part

if TYPE_CHECKING:
    from ..doctor.own_loop import OwnLoop
    from ..strategies.base import Strategy
    from .loader_positions import Pass
    from .optimizers import AcceleratedOptimizer


class ReadLoader(Protocol):
    """The :class:`.loaders.PreparedLoader` attributes that accumulation windows, gathering and error messages read."""

    @property
    def end_of_dataloader(self) -> bool: ...
    @property
    def ends_separately(self) -> bool: ...
    @property
    def share(self) -> float: ...
    @property
    def remainder(self) -> int: ...
    @property
    def batch_rows(self) -> int: ...
    @property
    def in_parts(self) -> bool: ...
    @property
    def total_batch_size(self) -> int | None: ...
    @property
    def epoch(self) -> int: ...
    @property
    def batches_done(self) -> int: ...
    @property
    def reading(self) -> Pass | None: ...
    @property
    def lengths(self) -> list[int]: ...


class GradientState:
    """The state of an Accelerator's current micro-batch, such as its loader and whether it completes the window.

    Args:
        num_steps: number of micro-batches in a window.
        adjust_scheduler: accepted and ignored, because schedulers never advance while gradients accumulate.
        sync_with_dataloader: whether the last batch of a loader always completes the window.
        sync_each_batch: whether to synchronize gradients after every micro-batch, which saves memory under FSDP but
            needs more communication.

    Attributes:
        sync_gradients: whether the current micro-batch completes the window; if so, optimizers step.
        active_dataloader: the loader of the current batch; None if no loader is being read.
        window: the innermost open ``accumulate`` window or, if none is open, the most recent one.
        speaker: the window that last turned gradient synchronization on or off; None if something other than a window
            did so last.
        on_pass: function to call with a loader when a pass over it begins.
        explain: function that takes an error and returns another one that also says what to do, or None if there is no
            advice.
        depth: number of open ``accumulate`` blocks.
        by_hand: whether the user's loop decides after which micro-batches optimizers step.
        counted: a loader, and the number of items that the loop has gathered for the loader's last batch. The number
            becomes None once it has been used.
        dataloader_references: loaders that are being read, innermost last.
        trains: whether an optimizer has been prepared.
        first_use: functions to call once, at the next backward pass or optimizer step.
        windows: ``accumulate`` windows, keyed by the IDs of their models; the key ``()`` means all models.
        checked: whether the function that runs backward passes has been chosen since the last model was prepared.
        runs_own_backward: whether the user has been warned that the script does not call ``accelerator.backward``.
        step: a counter for the loop's own use, saved with the state.
        observers: doctors that time the loop.
        split_batch: the last ``batch`` whose sequences ``maybe_context_parallel`` split; None if there is none.
    """

    def __init__(
        self,
        num_steps: int = 1,
        adjust_scheduler: bool = True,
        sync_with_dataloader: bool = True,
        sync_each_batch: bool = False,
    ) -> None:
        self.num_steps = num_steps
        self.adjust_scheduler = adjust_scheduler
        self.sync_with_dataloader = sync_with_dataloader
        self.sync_each_batch = sync_each_batch
        self.sync_gradients = True
        self.window: Window
        self.speaker: Window | None = None
        self.on_pass: Callable[[Any], None] | None = None
        self.explain: Callable[[BaseException], BaseException | None] | None = None
        self.depth = 0
        self.by_hand = False
        self.counted: tuple[Any, Tensor | None] | None = None
        self.active_dataloader: ReadLoader | None = None
        self.dataloader_references: list[ReadLoader] = []
        self.trains = False
        self.first_use: list[Callable[[], None]] = []
        self.windows: dict[tuple[int, ...], Window] = {}
        self.checked = False
        self.runs_own_backward = False
        self.step = 0
        self.observers: Sequence[OwnLoop] = ()
        self.split_batch: tuple[int, int] | None = None

    def models_changed(self) -> None:
        """Record that a model was prepared."""
        self.windows.pop((), None)
        self.checked = False

    def used(self) -> None:
        """Call the functions in ``first_use``, and clear the list."""
        waiting, self.first_use = self.first_use, []
        for tell in waiting:
            tell()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without loader passes, open blocks, callbacks and IDs, which are tied to this process."""
        return vars(self) | {
            "speaker": None,
            "on_pass": None,
            "explain": None,
            "depth": 0,
            "counted": None,
            "active_dataloader": None,
            "dataloader_references": [],
            "windows": {},
            "split_batch": None,
            "checked": False,
            "observers": (),
        }

    @property
    def batch(self) -> tuple[int, int]:
        """The ID of the current loader and the number of its current batch; zeros if no loader is being read."""
        loader = self.active_dataloader
        return (0, 0) if loader is None else (id(loader), loader.batches_done)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last one of its loader."""
        loader = self.active_dataloader
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Number of samples in the last batch across all ranks; -1 if unknown."""
        return -1 if self.active_dataloader is None else self.active_dataloader.remainder

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return self.active_dataloader is not None

    @property
    def plugin_kwargs(self) -> PluginFields:
        """The fields of the ``GradientAccumulationPlugin`` that are not at their defaults. They can be set."""
        return PluginFields(self)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set ``sync_gradients`` for loops that fetch all batches of a window first, such as transformers.Trainer.

        Once such a loop has fetched a loader's last batch, that batch completes the window. ``backward`` then weights
        the batch's loss, unless the loop has gathered the number of items to weight the loss itself.
        """
        self.sync_gradients, self.by_hand = sync_gradients, True

    @property
    def weighs_itself(self) -> bool:
        """Whether the loop weights the loss itself, because it has gathered item counts or fetched later batches.

        Inside an ``accumulate`` block, a gathered count is treated as a metric unless the loop sets ``sync_gradients``.
        """
        counts = self.counted is not None and (self.by_hand or not self.depth)
        return counts or (self.by_hand and not self.sync_gradients)

    @property
    def initialized(self) -> bool:
        """Always True, because an Accelerator creates its state itself."""
        return True

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Always False, because XLA is not supported."""
        return False

    def say_read_at_once(self) -> None:
        """Warn if a loader that is read together with others has an uneven last batch, which cannot be weighted."""
        for loader in self.dataloader_references:
            if loader is not self.active_dataloader and loader.end_of_dataloader and loader.share != 1.0:
                messages.warn_once(
                    "Several prepared loaders are read at once, and the last batch of one loader differs in size "
                    "between processes. backward and gather_for_metrics use the loader that was read last, so the "
                    "uneven batch is not weighted and its repeated samples are not removed. Use one loader over a "
                    "torch.utils.data.StackDataset, or drop the incomplete batch (drop_last=True)."
                )

    def begin(self, loader: ReadLoader) -> None:
        """Record that a pass over a loader has begun."""
        self.dataloader_references = [other for other in self.dataloader_references if other is not loader] + [loader]
        self.active_dataloader = loader

    def end(self, loader: ReadLoader) -> None:
        """Record that a pass has ended or was abandoned."""
        if loader.reading is not None and loader.reading.last_is_unknown:
            self._say_last_is_unknown()
        self.dataloader_references = [other for other in self.dataloader_references if other is not loader]
        self.active_dataloader = self.dataloader_references[-1] if self.dataloader_references else None
        if self.counted is not None and self.counted[0] is loader:
            self.counted = None

    def _say_last_is_unknown(self) -> None:
        why = "because the loop fetched several batches before running their backward passes, and skipped one of them"
        if self.window.by_items:
            messages.info_anywhere(
                f"Rank {messages.rank()}'s last batch only repeats samples of another rank, but its items were "
                f"counted, {why}. To count each sample once, drop the incomplete batch (drop_last=True)."
            )
        else:
            messages.warn_once(
                f"The last batch differs in size between processes, but its loss was not weighted, {why}. Pass "
                "num_items to backward with every loss, or drop the incomplete batch (drop_last=True)."
            )


class PluginFields(MutableMapping[str, Any]):
    """The fields of a ``GradientAccumulationPlugin`` that differ from their defaults. Setting one changes the state."""

    defaults: Mapping[str, Any] = {
        "num_steps": None,
        "adjust_scheduler": True,
        "sync_with_dataloader": True,
        "sync_each_batch": False,
    }

    def __init__(self, state: GradientState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Any:
        if name not in iter(self):
            raise KeyError(name)
        return getattr(self._state, name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.defaults:
            raise KeyError(messages.unknown("GradientAccumulationPlugin field", name, self.defaults))
        setattr(self._state, name, value)

    def __delitem__(self, name: str) -> None:
        """Restore a field's default. ``num_steps`` has none."""
        if name == "num_steps":
            raise TypeError(
                "GradientAccumulationPlugin: num_steps cannot be deleted. Set it to 1 to step in each batch."
            )
        self[name] = self.defaults[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, default in self.defaults.items() if getattr(self._state, name) != default)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


class Window:
    """The micro-batches over which a group of models accumulates gradients. Enter this context for each micro-batch.

    An Accelerator starts with a window for loops that do not call ``accumulate``. In this window, every backward pass
    counts as a micro-batch, and losses are weighted only by ``num_items``.

    Args:
        strategies: strategies of the models whose gradients are synchronized once the window is complete; None for a
            loop that does not call ``accumulate``.

    Attributes:
        count: number of micro-batches so far that had a backward pass, including the current one.
        counted: whether the current micro-batch had a backward pass.
        complete: whether the current micro-batch is the last one in the window.
        free: whether the window is for a loop that does not call ``accumulate``.
        settled: IDs of optimizers whose gradients are final, that is, synchronized, unscaled and weighted.
        stepped: IDs of optimizers that have stepped with the window's gradients.
        cleared: whether an optimizer's gradients were cleared.
        local: IDs of strategies that still hold unsynchronized gradients.
        missing: factor for gradients that were averaged over more processes than still have batches (see
            ``join_uneven_inputs``), because processes without batches add zeros to the next average. 1.0 if none.
    """

    def __init__(self, state: GradientState, strategy: Strategy, strategies: Iterable[Strategy] | None = None) -> None:
        self.state = state
        self._precision = strategy.precision
        self.items = ItemWindow(strategy, "accelerator.backward(loss, num_items=...) got")
        self.by_items: bool | None = None
        self.count = 0
        self.counted = False
        self.complete = True
        self.free = strategies is None
        self._strategies = [one for one in strategies or () if one.communicates_gradients]
        self._communicates = True
        self._outer: list[tuple[Window, bool]] = []
        self._batch_items: Any = None
        self.settled: set[int] = set()
        self.stepped: set[int] = set()
        self.cleared = False
        self.local: set[int] = set()
        self.missing = 1.0
        self._scale: Any = None
        self._factor: float | Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the window's position without object IDs, which mean nothing in another process."""
        stepped = {0} if self.stepped else set()
        return vars(self) | {"settled": set(), "stepped": stepped, "local": set(), "_outer": [], "_communicates": True}

    def __enter__(self) -> None:
        state, loader = self.state, self.state.active_dataloader
        self._outer.append((state.window, state.sync_gradients))
        state.depth += 1
        state.window = self
        left_out = self.count > 0 and not (self.counted or self.stepped)
        if self.complete and not left_out:  # if a window's last micro-batch was skipped, the window continues
            self.begin()
        self.counted = False
        ends = loader is not None and loader.end_of_dataloader and state.sync_with_dataloader
        self.complete = state.sync_gradients = ends or self.count + 1 >= state.num_steps
        if self._strategies:
            if self.missing != 1.0:
                self._make_up()
            self.communicate(self.complete or self._is_shared(loader))

    def _make_up(self) -> None:
        """Scale gradients that are already averaged, so that the next average over all processes keeps them."""
        for strategy in self._strategies:
            strategy.scale_waiting(self.missing)
        self.missing = 1.0

    def _is_shared(self, loader: ReadLoader | None) -> bool:
        """Return True if this incomplete micro-batch synchronizes gradients.

        It must if another process has no more batches, because that process then completes its window.
        """
        lengths = loader.lengths if loader is not None and self.state.sync_with_dataloader else []
        shared = self.state.sync_each_batch or (loader is not None and loader.batches_done in lengths)
        if shared and lengths and loader is not None:
            self.missing = len(lengths) / sum(length > loader.batches_done for length in lengths)
        return shared

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        state = self.state
        outer = self._outer.pop()
        state.depth -= 1
        if state.depth:  # an optimizer may step after the outermost block
            state.window, state.sync_gradients = outer
        if error is not None and state.explain is not None:
            better = state.explain(error)
            if better is not None:
                raise better from error

    def communicate(self, enabled: bool) -> None:
        """Set whether the models' backward passes synchronize gradients."""
        if enabled is not self._communicates or self.state.speaker is not self:
            self._communicates, self.state.speaker = enabled, self
            for strategy in self._strategies:
                strategy.sync_gradients(enabled)

    def begin(self) -> None:
        """Begin a new window."""
        if self.cleared and not self.stepped:
            self.items.items = 0
        self.cleared = False
        self.count = 0
        self.missing = 1.0
        self._scale = None
        self.local.clear()
        self._factor = None
        self.settled.clear()
        self.stepped.clear()

    def weigh(self, loss: Tensor, num_items: Any) -> Tensor:  # noqa: C901 - with fewer calls per backward pass
        """Count the micro-batch (once, even if it has several backward passes); return the weighted loss, shape ().

        Args:
            loss: scalar, shape ().
            num_items: number of items that the loss averages over; None if all micro-batches have the same weight.
        """
        state, first = self.state, self.free or not self.counted
        loader = state.active_dataloader
        one = None if loader is None else loader.reading
        if (
            loader is not None
            and (loader.end_of_dataloader or loader.ends_separately)
            and loader.share != 1.0
            and not state.weighs_itself
        ):
            loss, num_items = _share(loss, num_items, loader, first)
        if one is not None:
            one.read_ahead -= first and one.read_ahead > 0
        if len(state.dataloader_references) > 1:
            state.say_read_at_once()
        if state.first_use:
            state.used()
        if self.free and (self.stepped or self.cleared):
            self.begin()
        if self.counted and not (self.free or self.complete or state.depth):
            self._say_left()
        if first:
            self.counted = True
            self.count += 1
        if self.by_items is not (num_items is not None):
            self._count_by(num_items is not None)
        if self._precision.scaler is not None and state.num_steps > 1 and not self.free:
            loss = self._at_one_scale(loss)
        if num_items is not None:
            return self._weigh_items(loss, num_items, first)
        return loss / state.num_steps if state.num_steps > 1 else loss

    def _say_left(self) -> None:
        messages.warn_once(
            "accelerator.backward was called outside of `with accelerator.accumulate(...):` while a window has only "
            f"{self.count} of {self.state.num_steps} micro-batches. Optimizers do not step until the window is "
            "complete. Put the loop's body in that block, or complete the open window."
        )

    def _count_by(self, items: bool) -> None:
        if self.by_items is not None:
            raise ValueError(
                "accelerator.backward got num_items for only some of the window's losses, so they cannot be "
                "weighted. Pass num_items with every loss, or with none."
            )
        self.by_items = items

    def _at_one_scale(self, loss: Tensor) -> Tensor:
        """Return the loss, rescaled so that all losses of the window use the fp16 scale of the window's first loss."""
        scale = self._precision.shared_scale(of_next_loss=True)
        if scale is None:
            return loss
        if self._scale is None:
            self._scale = scale
        return loss * (self._scale / scale)

    def _weigh_items(self, loss: Tensor, num_items: Any, first: bool) -> Tensor:
        if first:
            self._batch_items = num_items
            return self.items.weigh(loss, num_items)
        if num_items is not self._batch_items and bool(num_items != self._batch_items):
            raise ValueError(
                f"accelerator.backward got num_items={num_items} and {self._batch_items} for losses of the same "
                "micro-batch, whose items are counted only once. Pass the same num_items with each of these losses."
            )
        return weighed(loss, num_items, self.items.unit)

    def settle(self, optimizer: AcceleratedOptimizer) -> None:
        """Finalize an optimizer's gradients once: synchronize, unscale and weight them."""
        if id(optimizer) in self.settled or not self.count:
            return
        self.settled.add(id(optimizer))
        strategy, inner, steps = optimizer.strategy, optimizer.optimizer, self.state.num_steps
        weighted = self.by_items or self.state.by_hand or self.state.counted is not None
        if self.free and self.count < steps and not weighted:
            messages.warn_once(
                f"{type(inner).__name__} stepped after {self.count} micro-batch{'es' * (self.count > 1)} outside of "
                f"`with accelerator.accumulate(model):`, but each loss was divided by gradient_accumulation_steps="
                f"{steps}. Put the body of the loop in that block, or set gradient_accumulation_steps=1."
            )
        lacking = not self.counted and not self.free and steps > 1  # the last micro-batch had no backward pass
        left = self.local & optimizer.strategies if optimizer.strategies else self.local
        if left or (lacking and strategy.communicates_gradients):
            strategy.complete_gradients(inner)
        factor = self._factor
        if factor is None:
            factor = self.items.finish() if self.by_items else 1.0 if self.free else steps / self.count
            self._factor = factor
        if self._scale is not None:
            strategy.unscale_gradients(inner)  # must come first, because it may change the scale
            now = self._precision.shared_scale()
            factor = factor if now is None else factor * (now / self._scale)
        strategy.finish_gradients(inner, factor)

    def check_own_backward(self, optimizer: AcceleratedOptimizer) -> None:
        """Check whether the script called ``loss.backward()`` itself to compute the gradients.

        If there are any gradients, the check waits for the device.

        Raises:
            RuntimeError: ``loss.backward()`` was called inside ``accumulate``, so the optimizer would never step.
        """
        state, scaler = self.state, optimizer.strategy.precision.scaler
        counts = state.num_steps > 1 and not self.free
        scales = scaler is not None and scaler.is_enabled() and not state.runs_own_backward
        if state.by_hand or not (counts or scales) or any(window.count for window in state.windows.values()):
            return
        found = gradients(optimizer.optimizer)
        if not any(gradient.is_sparse or bool(local_part(gradient).any()) for gradient in found):
            return
        name = f"{type(optimizer.optimizer).__name__}.step()"
        if counts:
            raise RuntimeError(
                f"{name} was called inside `with accelerator.accumulate(...):`, but the gradients did not come from "
                "accelerator.backward. Only calls to accelerator.backward count as micro-batches, so the window of "
                f"{state.num_steps} micro-batches would never be complete. Call accelerator.backward(loss) instead "
                "of loss.backward(); it also divides the loss by gradient_accumulation_steps="
                f"{state.num_steps}, so do not divide it yourself."
            )
        state.runs_own_backward = True
        messages.warn(
            f"{name} divides gradients by the fp16 loss scale, but these gradients did not come from "
            "accelerator.backward, which multiplies the loss by that scale. Call accelerator.backward(loss) instead "
            "of loss.backward(). If the script calls accelerator.scaler.scale(loss) itself, ignore this warning."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the window's position as plain data, for a checkpoint."""
        waiting = not self.complete or (self.count > 0 and not self.stepped)
        scale = None if self._scale is None else float(self._scale)
        kept = {"by_items": self.by_items, "items": self.items.state_dict(), "scale": scale}
        return {"count": self.count if waiting else 0, **kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`. If the window is incomplete, restore the gradients first."""
        self.begin()
        self.count, self.by_items = state["count"], state["by_items"]
        self._scale = state.get("scale") if self.count else None
        self.complete = self.free or self.count == 0
        self.items.load_state_dict(state["items"], in_window=self.count > 0)


def _share(loss: Tensor, num_items: Any, loader: ReadLoader, first: bool) -> tuple[Tensor, Any]:
    """Return the weighted loss and number of items for a batch whose size differs between processes.

    If the loss belongs to an earlier batch, whose backward pass runs only now, the loss is returned unchanged. A loss
    whose number of items is given needs no weight, unless its batch only repeats samples of another process.
    """
    share = loader.share
    if num_items is not None and share != 0.0:
        return loss, num_items
    if loader.reading is not None and not loader.reading.is_loss_of_latest(first):
        return loss, num_items
    return (loss * share, None) if num_items is None else (loss, 0)

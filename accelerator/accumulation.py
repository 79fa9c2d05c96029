"""Windows of micro-batches in a loop of the user's own: when gradients are communicated, weighed and stepped with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import messages
from ..strategies.item_weighting import ItemWindow, weighed

if TYPE_CHECKING:
    from ..strategies.base import Strategy
    from .loaders import PreparedLoader
    from .models import PreparedModel
    from .optimizers import AcceleratedOptimizer


class GradientState:
    """What one Accelerator knows of the batch under way: its loader, and whether gradients are complete after it.

    Args:
        num_steps: micro-batches in a window.
        adjust_scheduler: accepted; schedulers stand still on micro-batches that do not step in either case.
        sync_with_dataloader: a window ends with the loader that it is filled from.
        sync_each_batch: communicate gradients with every micro-batch: less memory under FSDP, more to send.

    Attributes:
        sync_gradients: the window is complete with this micro-batch, so optimizers step.
        active_dataloader: the loader that handed out the batch under way; None outside of all passes.
        window: the innermost open ``accumulate`` window, or the last one.
        speaker: the window that last decided which backward passes communicate; None: something else has, since.
        on_pass: called with a loader when a pass over it begins.
        explain: finds better words for an error; None if there are none.
        depth: ``accumulate`` blocks that are open.
        by_hand: the loop says itself which micro-batches step, and weighs its losses itself.
        dataloader_references: loaders whose passes are under way, the innermost last.
        trains: an optimizer was prepared.
        first_use: called, once, when the next backward or optimizer step runs.
        windows: those of ``accumulate``, by the ids of their models; ``()``: the one of all models.
        checked: what runs backward was chosen for the models that are prepared now.
        step: a number that the loop may count with; states keep it.
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
        self.active_dataloader: PreparedLoader | None = None
        self.dataloader_references: list[PreparedLoader] = []
        self.trains = False
        self.first_use: list[Callable[[], None]] = []
        self.windows: dict[tuple[int, ...], Window] = {}
        self.checked = False
        self.step = 0

    def models_changed(self) -> None:
        """A model was prepared."""
        self.windows.pop((), None)
        self.checked = False

    def used(self) -> None:
        """The loop trains for the first time since something asked for it in ``first_use``."""
        waiting, self.first_use = self.first_use, []
        for tell in waiting:
            tell()

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: passes over loaders, open blocks, callbacks, ids."""
        return vars(self) | {
            "speaker": None,
            "on_pass": None,
            "explain": None,
            "depth": 0,
            "active_dataloader": None,
            "dataloader_references": [],
            "windows": {},
            "checked": False,
        }

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch under way is its loader's last."""
        loader = self.active_dataloader
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """How many samples the last batch of all ranks together has; -1 if nobody knows."""
        return -1 if self.active_dataloader is None else self.active_dataloader.remainder

    @property
    def in_dataloader(self) -> bool:
        """Whether a pass over a prepared loader is under way."""
        return self.active_dataloader is not None

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """What a ``GradientAccumulationPlugin`` says."""
        return {
            "num_steps": self.num_steps,
            "adjust_scheduler": self.adjust_scheduler,
            "sync_with_dataloader": self.sync_with_dataloader,
            "sync_each_batch": self.sync_each_batch,
        }

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """For loops that fetch a window's batches ahead of its steps, such as that of transformers.Trainer.

        The loader's place then says nothing about the micro-batch under way, so losses are taken as they are.
        """
        self.sync_gradients, self.by_hand = sync_gradients, True

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Always False: there are no XLA devices here."""
        return False

    def say_read_at_once(self) -> None:
        """Warn if one of several loaders that are read at once ends with samples that only it is to weigh."""
        for loader in self.dataloader_references:
            if loader is not self.active_dataloader and loader.end_of_dataloader and loader.last_share != 1.0:
                messages.warn_once(
                    "Several prepared loaders are read at once, and the last batch of one has not as many samples on "
                    "each process. backward and gather_for_metrics go by the loader that was read last, so that batch "
                    "is not weighed, and what repeats is not left out. Read one loader over "
                    "torch.utils.data.StackDataset, or make the number of samples divide (drop_last=True)."
                )

    def begin(self, loader: PreparedLoader) -> None:
        """A pass over a loader begins."""
        self.dataloader_references = [other for other in self.dataloader_references if other is not loader] + [loader]
        self.active_dataloader = loader

    def end(self, loader: PreparedLoader) -> None:
        """A pass is over, or was left."""
        self.dataloader_references = [other for other in self.dataloader_references if other is not loader]
        self.active_dataloader = self.dataloader_references[-1] if self.dataloader_references else None


class Window:
    """The micro-batches that a group of models gathers gradients of; ``with window:`` around each one.

    The one that an Accelerator starts with is for loops without ``accumulate``: there every backward counts, and
    weighing is left to the loop, but for ``num_items``.

    Args:
        state: of the Accelerator; its ``window`` is the innermost that is open, or the last that was.
        strategy: the ranks.
        models: whose gradients are held back until the window is complete; None: no ``accumulate`` is meant.

    Attributes:
        count: micro-batches of the window whose backward has run, the one under way included.
        counted: the backward of the one under way has run.
        complete: the one under way is the window's last.
        free: no ``accumulate`` is meant.
        settled: ids of the optimizers whose gradients have their final size.
        stepped: ids of those that have stepped with the window's gradients.
        cleared: an optimizer's gradients were cleared.
        local: ids of the strategies that a backward left gradients with, which are still this process's own.
    """

    def __init__(self, state: GradientState, strategy: Strategy, models: Iterable[PreparedModel] | None = None) -> None:
        self.state = state
        self._precision = strategy.precision
        self.items = ItemWindow(strategy, "accelerator.backward(loss, num_items=...) got")
        self.by_items: bool | None = None
        self.count = 0
        self.counted = False
        self.complete = True
        self.free = models is None
        self._strategies = [one.strategy for one in models or () if one.strategy.communicates_gradients]
        self._communicates = True
        self._outer: list[tuple[Window, bool]] = []
        self._batch_items: Any = None
        self.settled: set[int] = set()
        self.stepped: set[int] = set()
        self.cleared = False
        self.local: set[int] = set()
        self._scale: Any = None
        self._factor: float | Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Where the window stands. Ids mean nothing elsewhere: an optimizer says itself that it has stepped."""
        stepped = {0} if self.stepped else set()
        return vars(self) | {"settled": set(), "stepped": stepped, "local": set(), "_outer": [], "_communicates": True}

    def __enter__(self) -> None:
        state, loader = self.state, self.state.active_dataloader
        self._outer.append((state.window, state.sync_gradients))
        state.depth += 1
        state.window = self
        left_out = self.count > 0 and not (self.counted or self.stepped)
        if self.complete and not left_out:  # gradients whose last micro-batch was left out wait for the next one
            self.begin()
        self.counted = False
        ends = loader is not None and loader.end_of_dataloader and state.sync_with_dataloader
        self.complete = state.sync_gradients = ends or self.count + 1 >= state.num_steps
        if self._strategies:
            self.communicate(self.complete or state.sync_each_batch)

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
        """Say whether backwards of the group's models communicate; nothing if that was said already."""
        if enabled is not self._communicates or self.state.speaker is not self:
            self._communicates, self.state.speaker = enabled, self
            for strategy in self._strategies:
                strategy.sync_gradients(enabled)

    def begin(self) -> None:
        """Forget the window whose gradients were stepped with, or dropped."""
        if self.cleared and not self.stepped:
            self.items.items = 0
        self.cleared = False
        self.count = 0
        self._scale = None
        self.local.clear()
        self._factor = None
        self.settled.clear()
        self.stepped.clear()

    def weigh(self, loss: Tensor, num_items: Any) -> Tensor:
        """Count a backward pass of this loss; returns the loss to run it on, shape ().

        Several backwards of one micro-batch count as one.

        Args:
            loss: scalar, shape ().
            num_items: how many items it is the mean over; None: micro-batches count alike.

        Raises:
            ValueError: a number for some losses only, or two numbers for one micro-batch.
        """
        state = self.state
        loader = None if state.by_hand else state.active_dataloader
        if loader is not None and loader.end_of_dataloader and loader.last_share != 1.0:
            loss, num_items = _share(loss, num_items, loader.last_share)
        if len(state.dataloader_references) > 1:
            state.say_read_at_once()
        if state.first_use:
            state.used()
        if self.free and (self.stepped or self.cleared):
            self.begin()
        if self.counted and not (self.free or self.complete or state.depth):
            self._say_left()
        first = self.free or not self.counted
        if first:
            self.counted = True
            self.count += 1
        if self.by_items is not (num_items is not None):
            self._count_by(num_items is not None)
        if self._precision.scaler is not None and state.num_steps > 1 and not self.free:
            loss = self._at_one_scale(loss)
        if num_items is None:
            return loss / state.num_steps if state.num_steps > 1 else loss
        return self._weigh_items(loss, num_items, first)

    def _say_left(self) -> None:
        messages.warn_once(
            "accelerator.backward was called outside of `with accelerator.accumulate(...):` while a window of "
            f"{self.count} of {self.state.num_steps} micro-batches waits for more: optimizers do not step before "
            "it is complete. Put the loop's body in that block, or finish the window that was left."
        )

    def _count_by(self, items: bool) -> None:
        if self.by_items is not None:
            raise ValueError(
                "accelerator.backward got num_items for some losses only, so the window's losses cannot be "
                "weighed. Pass it with every loss, or with none."
            )
        self.by_items = items

    def _at_one_scale(self, loss: Tensor) -> Tensor:
        """The loss, so that fp16's scale is that of the window's first, whatever other windows' steps make of it."""
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
                f"accelerator.backward got num_items={num_items} and {self._batch_items} for losses of one "
                "micro-batch, but its items are counted once. Pass the same number with each of its losses."
            )
        return weighed(loss, num_items, self.items.unit)

    def settle(self, optimizer: AcceleratedOptimizer) -> None:
        """Give an optimizer's gradients their final size, once: communicated, unscaled, weighed by what is in it."""
        if id(optimizer) in self.settled or not self.count:
            return
        self.settled.add(id(optimizer))
        strategy, inner, steps = optimizer.strategy, optimizer.optimizer, self.state.num_steps
        if self.free and self.count < steps and not self.by_items and not self.state.by_hand:
            messages.warn_once(
                f"{type(inner).__name__} stepped after {self.count} micro-batch{'es' * (self.count > 1)} outside of "
                f"`with accelerator.accumulate(model):`, although gradient_accumulation_steps is {steps}, by which "
                "each loss was divided. Put the body of the loop in that block, or set gradient_accumulation_steps=1."
            )
        lacking = not self.counted and not self.free and steps > 1  # the last micro-batch had no backward
        left = self.local & optimizer.strategies if optimizer.strategies else self.local
        if left or (lacking and strategy.communicates_gradients):
            strategy.complete_gradients(inner)
        factor = self._factor
        if factor is None:
            factor = self.items.finish() if self.by_items else 1.0 if self.free else steps / self.count
            self._factor = factor
        if self._scale is not None:
            strategy.unscale_gradients(inner)  # first: it may change the scale
            now = self._precision.shared_scale()
            factor = factor if now is None else factor * (now / self._scale)
        strategy.finish_gradients(inner, factor)

    def state_dict(self) -> dict[str, Any]:
        """The window under way, as plain data for a checkpoint."""
        waiting = not self.complete or (self.count > 0 and not self.stepped)
        scale = None if self._scale is None else float(self._scale)
        kept = {"by_items": self.by_items, "items": self.items.state_dict(), "scale": scale}
        return {"count": self.count if waiting else 0, **kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back :meth:`state_dict`; the gradients are in place by then, or the window is to begin anew."""
        self.begin()
        self.count, self.by_items = state["count"], state["by_items"]
        self._scale = state.get("scale") if self.count else None
        self.complete = self.free or self.count == 0
        self.items.load_state_dict(state["items"], in_window=self.count > 0)


def _share(loss: Tensor, num_items: Any, share: float) -> tuple[Tensor, Any]:
    """Loss and number of items of a last batch that has more or fewer samples here than on other processes."""
    if num_items is None:
        return loss * share, None
    return loss, 0 if share == 0.0 else num_items

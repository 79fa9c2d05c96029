"""The ``Accelerator`` class for programs written for ``accelerate``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ... import messages
from ...accelerator import accelerator, accumulation
from ...accelerator.nested_tensors import recursively_apply
from ...accelerator.optimizers import AcceleratedOptimizer
from ...accelerator.schedulers import AcceleratedScheduler
from .loaders import DataLoaderShard


class _OfTheLast(type):
    """Makes ``GradientState()`` return the newest Accelerator's state, and ``isinstance`` accept any Accelerator's."""

    last: weakref.ref[accumulation.GradientState] | None = None

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        found = None if _OfTheLast.last is None else _OfTheLast.last()
        if found is None:
            raise ValueError("GradientState() needs an Accelerator, but none exists. Call Accelerator() first.")
        return found

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, accumulation.GradientState)


class GradientState(accumulation.GradientState, metaclass=_OfTheLast):
    """The accumulation window of the newest Accelerator; each Accelerator has its own."""


class _Optimizer(AcceleratedOptimizer):
    """A prepared optimizer that says when it keeps gradients that Accelerate would clear."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        state = self._state_of_gradients
        if state.sync_gradients and state.window.count and not state.window.cleared:
            messages.info_once(
                "optimizer.zero_grad() was called before backward in the last micro-batch of a window. It keeps the "
                "gradients of the earlier micro-batches; Accelerate clears them. Losses differ from Accelerate's from "
                "here on.",
                key="gradients are kept",
            )


class Accelerator(accelerator.Accelerator):
    """Paceline's Accelerator, with additional behavior that loops written for Accelerate rely on."""

    @functools.wraps(accelerator.Accelerator.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Such loops skip to the resume position themselves, except with stateful dataloaders.
        self.states.contents.script_skips = not self.dataloader_config.use_stateful_dataloader
        self.prepared.loader_kind = functools.partial(DataLoaderShard, rng_types=self.rng_types or ())
        self.prepared.optimizer_kind = _Optimizer
        _OfTheLast.last = weakref.ref(self.gradient_state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if _OfTheLast.last is None or _OfTheLast.last() is None:
            _OfTheLast.last = weakref.ref(self.gradient_state)

    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Like ``paceline.Accelerator.prepare``; says that schedules advance once per update."""
        found = super().prepare(*objects, device_placement=device_placement)
        self._tell_schedules()
        return found

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one scheduler."""
        found = super().prepare_scheduler(scheduler)
        self._tell_schedules()
        return found

    def _tell_schedules(self) -> None:
        world, config = self.strategy.num_data_ranks, self.dataloader_config
        multiplied = world > 1 and self.step_scheduler_with_optimizer and not config.split_batches
        if multiplied and self.prepared.schedulers and self.scheduler_steps != "per_sample":
            messages.info_once(
                f"Prepared schedules advance once per update. Accelerate advances them {world} times, once for each "
                "process. If the script multiplies the length of its schedule by the number of processes, set "
                "PACELINE_SCHEDULER_STEPS=per_sample.",
                key="schedules advance once",
            )

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Like ``paceline.Accelerator.clip_grad_norm_``; says once that it does nothing within a window."""
        self._tell_clipping()
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Like ``paceline.Accelerator.clip_grad_value_``; says once that it does nothing within a window."""
        self._tell_clipping()
        super().clip_grad_value_(parameters, clip_value)

    def _tell_clipping(self) -> None:
        if not self.sync_gradients:
            messages.info_once(
                "Gradients are clipped once, when their window is complete. Accelerate clips what has accumulated "
                "after each micro-batch. Losses differ from Accelerate's from here on. To clip once there too, write "
                "`if accelerator.sync_gradients:` before the call.",
                key="gradients are clipped once",
            )

    @property
    def _models(self) -> list[nn.Module]:
        """All prepared models."""
        return self.prepared.models

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like ``paceline.Accelerator.gather_for_metrics``, but also handles values repeated for each sample.

        Loops for Accelerate gather ``loss.repeat(batch_size)`` to compute a mean weighted by batch size. For a batch
        that is not full, only one row per sample is kept.
        """
        loader = self.gradient_state.active_dataloader
        if loader is not None:
            rows, size = loader.batch_rows, (loader.total_batch_size or 0) // self.strategy.num_data_ranks
            if 0 < rows < size:
                input_data = recursively_apply(lambda value: _first(value, rows, size), input_data)
        return super().gather_for_metrics(input_data, use_gather_object)


def _first(value: Tensor, rows: int, size: int) -> Tensor:
    return value[:rows] if value.dim() and len(value) == size else value

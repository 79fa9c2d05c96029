"""Handles an Accelerator's gradients: backward passes, synchronization, unscaling and clipping."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import messages
from ..strategies.base import Strategy
from ..strategies.precision.base import Precision, parameters
from .optimizers import AcceleratedOptimizer

if TYPE_CHECKING:
    from .accumulation import GradientState
    from .models import PreparedModel
    from .prepare import Prepared


@dataclass(eq=False)
class Gradients:
    """Chooses how backward passes run, synchronizes and unscales gradients, and clips them.

    Attributes:
        run: function that runs the backward pass of a weighted loss; None means the loss's own ``backward``.
        replicas: strategies under which a backward pass may leave gradients unsynchronized.
        norm: norm of the last accumulation window's gradients before clipping, shape (); None before the first window.
    """

    strategy: Strategy
    state: GradientState
    prepared: Prepared
    run: Callable[..., None] | None = None
    replicas: list[Strategy] = field(default_factory=list)
    norm: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"run": None, "replicas": []}

    # ---- backward --------------------------------------------------------------------------------------------------

    def choose(self) -> None:
        """Choose the function that runs backward passes, and check once that the script prepared everything."""
        self._check_optimizers()
        self._check_shared()
        self.state.checked = True
        trained = [one.strategy for one in self.prepared.trained]
        self.replicas = [one for one in trained if type(one).left_gradients is not Strategy.left_gradients]
        for model in self.prepared.trained:
            model.strategy.check_parameters(model.module)
        strategy = trained[0] if len(trained) == 1 else self.strategy
        method = type(strategy).backward if len(trained) < 2 else Strategy.backward
        plain = method is Strategy.backward and type(strategy.precision).scale_loss is Precision.scale_loss
        self.run = None if plain else partial(method, strategy)

    def explain(self, error: BaseException) -> BaseException | None:
        """Return an error that says what to do about a failed backward pass, or None if there is nothing to add."""
        trained = self.prepared.trained
        return self.prepared.errors.explain(trained[0] if len(trained) == 1 else None, error)

    # ---- communication ---------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, model: Any = None) -> Iterator[None]:
        """Turn off gradient synchronization; see :meth:`.accelerator.Accelerator.no_sync`."""
        prepared = self.prepared
        found = prepared.placements.values() if model is None else [prepared.placement(model, "no_sync")]
        strategies = [one.strategy for one in found if one.strategy.communicates_gradients]
        for strategy in strategies:
            strategy.sync_gradients(False)
        try:
            yield
        finally:
            for strategy in strategies:
                strategy.sync_gradients(True)
            self.state.speaker = None

    @contextmanager
    def trigger_sync(self, model: Any) -> Iterator[None]:
        """Synchronize gradients in the next backward; see :meth:`.accelerator.Accelerator.trigger_sync_in_backward`."""
        strategy = self.prepared.placement(model, "trigger_sync_in_backward").strategy
        if strategy.communicates_gradients:
            strategy.sync_next_backward()
        yield

    # ---- complete gradients ----------------------------------------------------------------------------------------

    def clip_norm(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip the total gradient norm; see :meth:`.accelerator.Accelerator.clip_grad_norm_`."""
        if not self.state.sync_gradients:
            return torch.tensor(float("nan")) if self.norm is None else self.norm
        found, strategy = self._settled(parameters)
        self.norm = strategy.clip_by_norm(found, max_norm, norm_type)
        return self.norm

    def clip_value(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip gradients elementwise; see :meth:`.accelerator.Accelerator.clip_grad_value_`."""
        if self.state.sync_gradients:
            found, strategy = self._settled(parameters)
            strategy.clip_by_value(found, clip_value)

    def unscale(self, optimizer: Any) -> None:
        """Divide gradients by the fp16 loss scale; see :meth:`.accelerator.Accelerator.unscale_gradients`."""
        if self.state.sync_gradients:
            given = self.prepared.live_optimizers if optimizer is None else optimizer
            for one in given if isinstance(given, (list, tuple)) else [given]:
                self.state.window.settle(one)

    def _settled(self, parameters: Tensor | Iterable[Tensor]) -> tuple[list[Tensor], Strategy]:
        """Finalize the parameters' gradients; return the model's current parameters and the strategy to clip with."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        found, strategy = [], self.strategy
        owners: dict[int, PreparedModel] = {}
        for parameter in given:
            for placement in self.prepared.placements.values():
                own = placement.current(parameter)
                if own is not None:
                    owners[id(placement)], strategy, parameter = placement, placement.strategy, own
                    break
            found.append(parameter)
        for optimizer in self.prepared.live_optimizers:
            if not optimizer.placements or any(id(one) in owners for one in optimizer.placements):
                self.state.window.settle(optimizer)
        return found, strategy

    # ---- objects that the script forgot to prepare -----------------------------------------------------------------

    @property
    def _is_scaled(self) -> bool:
        return self.strategy.precision.scaler is not None

    def _check_optimizers(self) -> None:
        """Raise a RuntimeError if an optimizer that was not prepared would step before the gradients are final.

        This can happen if gradients are accumulated, scaled, weighted by items or sharded. All live objects are
        searched only if a model has no prepared optimizer, so a correct script does not pay for the search.
        """
        state, optimizers = self.state, self.prepared.live_optimizers
        unfinished = state.num_steps > 1 or state.window.by_items or self._is_scaled
        for one in optimizers if unfinished else ():
            one.refuse_others(self._why())
        matters = unfinished or self.prepared.shards
        served = {id(one.placement) for one in optimizers}
        lacking = [one for one in self.prepared.trained if id(one) not in served]
        if not matters or not any(parameter.requires_grad for one in lacking for parameter in one.parameters.values()):
            return
        known = {id(one.optimizer) for one in optimizers}
        for found in gc.get_objects():
            kind = type(found)  # isinstance fails for a weak proxy whose object is gone
            if not issubclass(kind, Optimizer) or issubclass(kind, AcceleratedOptimizer) or id(found) in known:
                continue
            for owner in lacking:
                if any(owner.current(parameter) is not None for parameter in parameters(found)):
                    raise RuntimeError(self._forgotten(found, owner))

    def _why(self) -> str:
        """Return the part of an error message that explains the effect of not preparing an optimizer."""
        if self._is_scaled:
            return "so it would step with gradients that still contain fp16's loss scale"
        if self.state.num_steps > 1:
            return f"so it would step after each of the {self.state.num_steps} micro-batches"
        return "so it would step with gradients that have not yet been divided by the number of items (num_items)"

    def _forgotten(self, optimizer: Optimizer, model: PreparedModel) -> str:
        why = self._why()
        if self.prepared.shards:
            why = "and sharding has replaced the model's parameters, so it would update tensors that nothing uses"
        return (
            f"{type(optimizer).__name__} has parameters of the prepared {type(model.module).__name__} but was not "
            f"prepared itself, {why}. Pass both to prepare: model, optimizer = accelerator.prepare(model, optimizer)."
        )

    def _check_shared(self) -> None:
        """Warn if processes train separately or on the same samples because something was not prepared."""
        processes = self.strategy.num_data_ranks
        if processes == 1:
            return
        apart = [type(one.optimizer).__name__ for one in self.prepared.live_optimizers if one.placement is None]
        if apart or not self.prepared.trained:
            what = f"{apart[0]} has no parameter of a prepared model" if apart else "no model was prepared"
            messages.warn_once(
                f"accelerator.backward was called, but {what}, so the {processes} processes train separately, without "
                "averaging gradients. Prepare the model and its optimizer: model, optimizer = "
                "accelerator.prepare(model, optimizer)."
            )
        used = any(loader.epoch > 0 or loader.batches_done > 0 for loader in self.prepared.loaders)
        if not self.state.by_hand and not used:
            messages.warn_once(
                "accelerator.backward was called, but no prepared loader is in use. If the loader gives all "
                f"{processes} processes the same samples, they all do the same work. Prepare the loader: loader = "
                "accelerator.prepare(loader)."
            )

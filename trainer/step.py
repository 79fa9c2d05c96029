"""One training batch: forward, backward, update.

There are three main forms of ``step(batch, batch_idx) -> outputs``: :class:`TrainStep` (the normal one),
:class:`ClosureStep` (optimizers that need a closure, such as LBFGS, and modules that override ``optimizer_step``) and
:class:`ManualStep`. One of them is chosen at the start of each epoch, and everything that it calls is bound then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from .. import messages
from ..strategies.precision.base import BACKWARD
from .hooks import method_of, overridden, takes
from .joint_optimizer import needs_closure
from .loss import LossReader
from .manual_step_check import ManualStepCheck, second_backward
from .module import TrainingModule
from .profiling import by_module

if TYPE_CHECKING:
    from .run import Run

Outputs = Any


class ManualStep:
    """Runs ``training_step``; the user's own code runs backward and steps the optimizer."""

    def __init__(self, run: Run, forward: Callable[..., Any]) -> None:
        self.run = run
        self.state = run.state
        self.forward = forward

    def __call__(self, batch: Any, batch_idx: int) -> Outputs:
        return no_batch(self.run) if batch is None else self.forward(batch, batch_idx)

    def finish_window(self) -> None:
        """Run the update on an incomplete window at the end of an epoch; does nothing under manual optimization."""


class FreeStep(ManualStep):
    """A step for a module without optimizers; each batch counts as an optimizer step."""

    def __call__(self, batch: Any, batch_idx: int) -> Outputs:
        if batch is None:
            return no_batch(self.run)
        output = self.forward(batch, batch_idx)
        state = self.state
        state.stepped = True
        state.global_step += 1
        state.updates += 1
        return output


class TrainStep(ManualStep):
    """Runs forward, backward and, on the last micro-batch of a window, the update.

    A window is ``accumulate_grad_batches`` micro-batches, or fewer at the end of an epoch. Its gradient is the mean
    over the micro-batches actually in it or, where ``training_step`` returns ``{"loss": mean, "num_items": n}``, the
    mean over all items of the window on all ranks.

    Attributes:
        losses: reads the loss from what ``training_step`` returned, and counts the items of the window.
        optimizer: the fit's only optimizer, or a :class:`.JointOptimizer` that combines all of them.
        source: provides this rank's weight in the epoch's last batch, if the batch's size differs between ranks.
        sync: tells the strategy whether the next backward averages gradients across ranks; None if every backward does.
        scales: whether fp16 scales the losses; if so, gradients are unscaled before each step.
        clip: clips an optimizer's gradients; None if they are not clipped.
        take: steps an optimizer; returns False if the step was skipped.
        clear: clears an optimizer's gradients.
        clearing: the ``on_before_zero_grad`` hooks and ``clear``, each called with the optimizer.
        after_step: the functions called with the optimizer after each of its steps; the same as ``clearing``.
        check: raises if the user's code steps the optimizer between updates; None after a fit's first updates.
    """

    def __init__(
        self, run: Run, forward: Callable[..., Any], losses: LossReader, check: ManualStepCheck | None = None
    ) -> None:
        super().__init__(run, forward)
        self.losses = losses
        self.check = check if check is not None and check.watch() else None
        module, hooks, strategy = run.module, run.hooks, run.strategy
        self.optimizer: Optimizer = run.joint.optimizer
        self.accumulate = run.trainer.accumulate_grad_batches
        self.before_backward, self.after_backward = hooks.on_before_backward, hooks.on_after_backward
        self.before_step = hooks.on_before_optimizer_step
        self.sync = strategy.sync_gradients if strategy.communicates_gradients and self.accumulate > 1 else None
        # `overridden` returns a user's own method, or None; `by_module` only adds the timing if there is a profiler.
        own_backward = overridden(module, "backward", TrainingModule)
        self.backward = partial(strategy.backward, how=own_backward) if own_backward else strategy.backward
        precision = strategy.precision
        if not precision.overrides.isdisjoint(BACKWARD):
            around = (self.before_backward, self.after_backward)
            self.before_backward = self.after_backward = ()
            self.backward = precision.bind_backward(strategy.backward, module, self.optimizer, around)
        self.scales = precision.scaler is not None
        self.clip = self._clipping(module)
        self.take = strategy.optimizer_step
        own_zero = overridden(module, "optimizer_zero_grad", TrainingModule)
        own_clear = any(overridden(optimizer, "zero_grad", Optimizer) for optimizer in run.optimizers)
        zero_grad = method_of(module, "optimizer_zero_grad", TrainingModule)
        clear = partial(self._zero_grad, zero_grad) if own_zero or own_clear else clear_gradients
        self.clear = by_module(run, "optimizer_zero_grad", clear)
        self.clearing = self.after_step = (*hooks.on_before_zero_grad, self.clear)

    def _clipping(self, module: Any) -> Callable[[Optimizer], Any] | None:
        run = self.run
        own = overridden(module, "configure_gradient_clipping", TrainingModule)
        if own is None and run.trainer.gradient_clip_val is None:
            return None
        value, algorithm = run.trainer.gradient_clip_val, run.trainer.gradient_clip_algorithm
        clip = own or module.clip_gradients
        settings = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
        if takes(clip, None, **settings):
            called = partial(clip, **settings)
        else:  # an override with other parameter names
            called = lambda optimizer: clip(optimizer, value, algorithm)  # noqa: E731
        return by_module(run, "configure_gradient_clipping", called)

    def _zero_grad(self, zero: Callable[..., Any], optimizer: Optimizer) -> None:
        zero(self.state.epoch, self.state.batch_idx, optimizer)

    def __call__(self, batch: Any, batch_idx: int) -> Outputs:
        state = self.state
        complete = state.window + 1 >= self.accumulate or state.is_last_batch
        if batch is None:
            no_batch(self.run)
            return self.skip()
        if self.sync is not None:
            self.sync(complete)  # ranks average gradients only in the backward that completes a window
        output = self.forward(batch, batch_idx)
        # `read` checks the form of the output; None means that the batch is skipped.
        loss = output if type(output) is Tensor and not self.losses.by_items else self.losses.read(output)
        if loss is None:
            return self.skip_loss()
        self.differentiate(loss)
        state.window += 1
        if complete:
            self.update()
        return output

    def skip(self) -> None:
        """Skip the batch without adding it to the window."""
        if self.state.is_last_batch:
            self.finish_window()

    def skip_loss(self) -> Outputs:
        """Skip a batch for which ``training_step`` returned None."""
        return self.skip()

    def differentiate(self, loss: Tensor) -> None:
        """Run backward on one micro-batch."""
        if not self.losses.by_items:
            if self.accumulate > 1:
                loss = loss / self.accumulate
            if self.state.share != 1.0:
                loss = loss * self.state.share
        for hook in self.before_backward:
            hook(loss)
        try:
            self.backward(loss)
        except RuntimeError as error:
            problem = self.losses.problem(loss)
            if problem is not None:
                raise problem from None
            better = second_backward(self.run.module, error, first_batch=self.state.batches == 0)
            if better is not None:
                raise better from error
            raise
        for hook in self.after_backward:
            hook()

    def finish_window(self) -> None:
        if self.state.window:
            if self.sync is not None:
                self.run.strategy.complete_gradients(self.optimizer)  # no backward has averaged these gradients
            self.update()

    def update(self) -> None:
        """Unscale and clip the gradients, step the optimizer and clear the gradients."""
        optimizer, state, check = self.optimizer, self.state, self.check
        if check is not None:
            check.begin_update()
        self.complete()
        stepped = self.take(optimizer)  # False if fp16 found an overflow
        for hook in self.after_step:
            hook(optimizer)
        state.window = 0
        if stepped:
            state.stepped = True
            state.global_step += 1
            state.updates += 1
        if check is not None and not check.end_update():
            self.check = None

    def complete(self) -> None:
        """Finish the gradients: unscale them, divide them by the actual size of the window, and clip them."""
        optimizer = self.optimizer
        by_items, window = self.losses.by_items, self.state.window
        if self.scales or by_items or window != self.accumulate:  # otherwise, the losses were divided exactly
            factor = self.losses.finish_window() if by_items else self.accumulate / window
            self.run.strategy.finish_gradients(optimizer, factor)
        for hook in self.before_step:
            hook(optimizer)
        if self.clip is not None:
            self.clip(optimizer)


class ClosureStep(TrainStep):
    """A step for optimizers that evaluate the loss themselves, and for a module or Precision that overrides the step.

    The closure runs forward, backward, hooks and clipping. Its first call for a batch adds to the gradients of the
    window's earlier micro-batches; further calls (by LBFGS) start from cleared gradients.
    """

    def __init__(
        self, run: Run, forward: Callable[..., Any], losses: LossReader, check: ManualStepCheck | None = None
    ) -> None:
        super().__init__(run, forward, losses, check)
        if isinstance(self.optimizer, LBFGS) and self.accumulate > 1:
            self.refuse(
                f"Trainer(accumulate_grad_batches={self.accumulate}) does not work with LBFGS, because LBFGS "
                "evaluates the loss of one batch several times, so gradients of earlier batches would be lost. Use a "
                "larger batch and accumulate_grad_batches=1."
            )
        self.managed = run.joint
        self.optimizer_step = by_module(run, "optimizer_step", run.module.optimizer_step)

    def refuse(self, why: str) -> None:
        """Raise an error, because the optimizer does not support this gradient accumulation."""
        raise ValueError(why)

    def __call__(self, batch: Any, batch_idx: int) -> Outputs:
        state = self.state
        if batch is None or not (state.window + 1 >= self.accumulate or state.is_last_batch):
            return super().__call__(batch, batch_idx)
        if self.sync is not None:
            self.sync(True)
        evaluated: list[Any] = []
        # If all ranks skip the same batches, they agree on that in `forward`, which must run before the optimizer.
        first = [self.forward(batch, batch_idx)] if self.losses.together else []
        if first and first[0] is None:  # no loss, no step
            return self.skip()
        earlier = (state.window, self.losses.window.items)

        def closure() -> Tensor | None:
            if evaluated:
                state.window, self.losses.window.items = earlier
                self.restart()
            self.managed.expected = False  # no step is expected while training_step runs
            with torch.enable_grad():
                output = first.pop() if first else self.forward(batch, batch_idx)
            self.managed.expected = True
            evaluated[:] = [output]
            loss = self.losses.read(output)
            if loss is not None:
                self.differentiate(loss)
                state.window += 1
            if state.window:
                self.complete()
            return loss

        self.step_through_module(closure)
        if not evaluated:
            raise RuntimeError(self.without_closure())
        return evaluated[0]

    def without_closure(self) -> str:
        """Return the error text for an ``optimizer_step`` that did not run the closure."""
        precision, owner = self.run.strategy.precision, type(self.run.module)
        how = "Call optimizer.step(closure=optimizer_closure), or optimizer_closure()"
        if precision.needs_closure and overridden(self.run.module, "optimizer_step", TrainingModule) is None:
            owner = type(precision)
            how = "Call super().optimizer_step(optimizer, model=model, closure=closure), or closure()"
        return (
            f"{owner.__name__}.optimizer_step did not run the closure, so this batch was not trained on. {how} to skip "
            "the step."
        )

    def restart(self) -> None:
        """Clear the gradients before the closure evaluates the loss again."""
        self.clear(self.optimizer)

    def step_through_module(self, closure: Callable[[], Any]) -> None:
        """Run the module's ``optimizer_step``, then clear the gradients.

        Nothing is cleared if every batch of the window was skipped.
        """
        state, managed = self.state, self.managed
        managed.expected = True
        self.optimizer_step(state.epoch, state.batch_idx, managed, closure)
        managed.expected = False
        if state.window:
            for hook in self.after_step:
                hook(self.optimizer)
            state.window = 0
        if self.check is not None and not self.check.end_update():
            self.check = None

    def finish_window(self) -> None:
        if self.state.window:
            if self.sync is not None:
                self.run.strategy.complete_gradients(self.optimizer)
            self.step_through_module(self.complete)


class WeightedStep(ManualStep):
    """A step for a rank that may get more or fewer samples than other ranks; it sets ``state.share``.

    A batch whose share is 0.0 is run only so that other ranks do not wait, and the values that it logs are discarded.

    Args:
        step: the step to run.
        each: whether any batch may need a weight, not only the epoch's last one.
    """

    def __init__(self, step: ManualStep, each: bool) -> None:
        self.step, self.run, self.state = step, step.run, step.state
        self.each = each

    def __call__(self, batch: Any, batch_idx: int) -> Outputs:
        state = self.state
        weighs = self.each or state.is_last_batch
        state.share = self.run.source.share(batch_idx) if weighs else 1.0
        if state.share:
            return self.step(batch, batch_idx)
        with self.run.metrics.muted(self.run.module):
            return self.step(batch, batch_idx)

    def finish_window(self) -> None:
        self.step.finish_window()


def without_repeated_items(run: Run, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward`` for a :class:`WeightedStep`, so that it reports no items for a batch whose share is 0.0."""

    def forward_without(batch: Any, batch_idx: int) -> Any:
        output = forward(batch, batch_idx)
        repeats = run.state.share == 0.0
        return output | {"num_items": 0} if repeats and isinstance(output, dict) and "num_items" in output else output

    return forward_without


class IteratorStep(ManualStep):
    """A step for ``training_step(dataloader_iter)`` that passes the iterator on and checks that the module used it."""

    def __init__(self, step: ManualStep) -> None:
        self.step = step

    def __call__(self, batch: Any, batch_idx: int) -> Outputs:
        taken = batch.taken
        outputs = self.step(batch, batch_idx)
        if batch.taken == taken:
            raise RuntimeError(
                "training_step(dataloader_iter) returned without calling next(dataloader_iter), so training would "
                "never advance. Fetch one batch: batch, batch_idx, dataloader_idx = next(dataloader_iter)."
            )
        self.step.state.is_last_batch |= batch.exhausted
        return outputs


def no_batch(run: Run) -> None:
    """Warn that the loader yielded None instead of a batch, or raise if there are several processes."""
    if run.strategy.world_size > 1:
        raise RuntimeError(
            f"The train_dataloader yielded None instead of a batch on rank {run.strategy.global_rank}. The other "
            "ranks would wait for that rank's gradients. Skip unreadable samples in the dataset, not in collate_fn."
        )
    messages.warn_once(
        "The train_dataloader yielded None instead of a batch, so this batch is skipped and nothing is learned from "
        "it. If this is not intended, check the loader's collate_fn."
    )


def clear_gradients(optimizer: Optimizer) -> None:
    """Do what ``optimizer.zero_grad()`` does, without its overhead (6 us per step on a small model)."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def choose_step(
    run: Run, forward: Callable[..., Any], losses: LossReader, check: ManualStepCheck | None = None
) -> ManualStep:
    """Choose the step for this module and its optimizers; a step of automatic optimization uses ``check``.

    Called in every epoch, because callbacks may change the accumulation.
    """
    module = run.module
    if not run.optimizers:
        return FreeStep(run, forward)
    if not module.automatic_optimization:
        return ManualStep(run, forward)
    own = overridden(module, "optimizer_step", TrainingModule) is not None or run.strategy.precision.needs_closure
    closed = own or needs_closure(run.joint.optimizer)
    return (ClosureStep if closed else TrainStep)(run, forward, losses, check)


def detached(output: Any) -> dict[str, Any] | None:
    """Convert the output of ``training_step`` to a dict of detached tensors, for ``on_train_batch_end``."""
    if output is None:
        return None
    if not isinstance(output, Mapping):
        output = {"loss": output}
    return {k: v.detach() if isinstance(v, Tensor) else v for k, v in output.items()}

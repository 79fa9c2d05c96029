"""``Trainer(compile="step")``: forward, loss, backward, clipping and the optimizer step as one compiled graph.

Torch traces ``training_step``, ``torch.autograd.grad`` and the optimizer's own code into one graph, or raises an error
that says why it cannot. Only counters and ``self.log`` stay outside, so the graph returns the values to log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from inspect import unwrap
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..strategies.compile_networks import arguments_of, scope_of
from ..strategies.item_weighting import final_factor, weighed
from ..strategies.recompile_watch import advice_for, watch_compiling
from ..torch_private import compiler_errors, on_compiling, tracing_whole_steps
from .compiled_optimizer import TracedOptimizer
from .compiled_step_checks import check_optimizers, check_trainer, cycles_momentum
from .microbatch_metrics import Heard, listened
from .profiling import by_strategy
from .step import Outputs, TrainStep

if TYPE_CHECKING:
    from torch import nn

    from .loss import LossReader
    from .run import Run


#: Number of batch shapes that get their own graph; all further shapes share one graph.
MOST_SHAPES = 4


class Switches:
    """Torch settings for tracing a whole step, set only during compilation because setting them in every step is slow.

    ``wanted``: whether the running step is compiled as a whole.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._on: ExitStack | None = None

    def install(self) -> Switches:
        """Register this object with torch's compiler, and return it."""
        on_compiling(self._begin, self._end)
        return self

    def _begin(self, *_: Any) -> None:
        if not self.wanted:
            return
        import torch.compiler.config as compiler

        # Counters that a step reads (``batch_idx``, ``self.global_step``) must not become constants that force
        # recompiles.
        sources = ",".join(filter(None, (compiler.dynamic_sources, "L['args'][1]")))
        self._on = ExitStack()
        self._on.enter_context(tracing_whole_steps())
        self._on.enter_context(compiler.patch(dynamic_sources=sources))  # type: ignore[attr-defined]

    def _end(self, *_: Any) -> None:
        if self._on is not None:
            self._on.close()
            self._on = None


_switches = Switches()
_fits = count(1)


class WholeStep:
    """The compiled functions of a fit, and the state that they read.

    Attributes:
        accumulate: micro-batches per accumulation window.
        primed: whether the optimizer has created its state; only then can one graph be compiled for all steps.
    """

    def __init__(self, run: Run, forward: Callable[..., Any]) -> None:
        self.run, self.forward, self.strategy = run, forward, run.strategy
        self.owner = type(run.module).__name__
        self.module, self.store = run.module, run.metrics
        self.accumulate = run.trainer.accumulate_grad_batches
        self.clipping = run.trainer.gradient_clip_val, run.trainer.gradient_clip_algorithm
        self.optimizers = [TracedOptimizer(optimizer, cycles_momentum(run)) for optimizer in run.optimizers]
        self.primed = False
        self.number = next(_fits)
        self.unit: float | None = None
        self.heard: list[Heard] = []
        self.replays = scope_of(run.trainer.compile) == "graphs"
        self.failures = compiler_errors()
        self.limit = self.failures[1]
        self.switches = _switches.install()
        self.watch = watch_compiling()
        self.arguments = {**arguments_of(run.trainer.compile), "fullgraph": True}
        self.by_shape = "dynamic" not in self.arguments
        self.batch_steps: dict[Any, Callable[..., Any]] = {}
        self.window_end = self.compiled("window_end", lambda *args: self.trace_update(*args))

    def compiled(self, name: str, function: Any, **more: Any) -> Callable[..., Any]:
        """Compile a function under a unique name, because torch's caches of code and shapes are keyed by name."""
        function.__code__ = function.__code__.replace(co_name=f"{self.owner}_{name}_of_fit_{self.number}")
        return by_strategy(self.run, "training_step", torch.compile(function, **{**self.arguments, **more}))

    def batch_step(self, batch: Any) -> Callable[..., Any]:
        """Return the compiled function for a batch; each shape has its own graph.

        By default, torch would switch to one graph for all shapes when it sees a second shape. A resumed run may see
        the shapes in a different order, and would then round differently.
        """
        key = shapes_of(batch) if self.by_shape else None
        found = self.batch_steps.get(key)
        if found is None:
            number = len(self.batch_steps)
            if number < MOST_SHAPES:
                found = self.compiled(f"batch_step_{number}", lambda *args: self.trace_batch(*args))
            elif None in self.batch_steps:
                found = self.batch_steps[None]
            else:
                found = self.compiled("batch_step_any", lambda *args: self.trace_batch(*args), dynamic=True)
                self.batch_steps[None] = found
            self.batch_steps[key] = found
        return found

    # ---- what torch traces -----------------------------------------------------------------------------------------

    def trace_batch(
        self, batch: Any, batch_idx: int, by_items: bool, before: Any, complete: bool, factor: Any
    ) -> tuple[Any, bool, Any]:
        """Run one micro-batch and, if it is the last of its window (``complete``), the update.

        Args:
            batch: the batch, on its device.
            batch_idx: the batch's index in the epoch.
            by_items: whether ``num_items`` is expected.
            before: the number of items in the window's earlier micro-batches as a float64 tensor of shape (), or None.
            complete: whether this is the window's last micro-batch.
            factor: the factor to multiply the window's gradients by, unless they are weighted by items.

        Returns:
            The detached output, whether there was a usable loss, and the number of items in the window so far.
        """
        output = self.forward(batch, batch_idx)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        items = output.get("num_items") if isinstance(output, Mapping) else None
        usable = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
        if loss is None or not usable or (items is not None) != by_items:
            return with_tensors(output, Tensor.detach), False, before
        total: Any = None
        if items is not None:
            loss = weighed(loss, items, self.unit)
            total = torch.as_tensor(items, dtype=torch.float64, device=loss.device).detach()
            total = total if before is None else before + total
        elif self.accumulate > 1:
            loss = loss / self.accumulate
        self.trace_gradients(loss, complete)
        if complete:
            if total is not None:
                factor = final_factor(total, self.unit)
            self.trace_update(factor)
        return with_tensors(output, Tensor.detach), True, total  # backward has freed the graph

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all optimizers."""
        return [p for optimizer in self.optimizers for group in optimizer.groups for p in group["params"]]

    def trace_gradients(self, loss: Any, complete: bool) -> None:
        """Run backward, and add the gradients to those of the window's earlier micro-batches."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        with torch.no_grad():
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
            ):
                if gradient is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = gradient
                elif complete:
                    parameter.grad = parameter.grad + gradient
                else:
                    parameter.grad.add_(gradient)

    def trace_update(self, factor: Any) -> None:
        """Scale and clip the gradients, step the optimizers and clear the gradients."""
        parameters = self.parameters()
        if factor is not None:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * factor
        value, algorithm = self.clipping
        if value is not None:
            self.strategy.clip(parameters, value, algorithm)
        for optimizer in self.optimizers:
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    def hear(self, name: str, value: Any, options: Any) -> Heard:
        """Return the object that receives one call to ``self.log``."""
        return _Detached(self.heard, name, options)

    # ---- what the step calls ---------------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a compiled function, then log the values that it recorded.

        Raises RuntimeError if torch cannot compile the function into one graph.
        """
        for optimizer in self.optimizers:
            optimizer.refresh()
        self.heard.clear()
        self.switches.wanted = True
        try:
            found = listened(self.store, self.hear, function, *args)
        except self.failures as error:
            raise self.problem(error) from error
        finally:
            self.switches.wanted = False
        for call in self.heard:
            if call.options.enable_graph:
                raise ValueError(
                    f"self.log({call.name!r}, enable_graph=True) does not work with "
                    f"Trainer(compile={self.run.trainer.compile!r}), because the compiled step includes the backward "
                    "pass, which frees the value's autograd graph. Leave out enable_graph, or use compile=True."
                )
            self.module.log(call.name, call.value, **call.options._asdict(), batch_size=call.batch_size)
        return found

    def problem(self, error: Exception) -> RuntimeError:
        """Return the error for a step that torch cannot trace into one graph."""
        why, advice = self.changing() if isinstance(error, self.limit) else self.untraceable(error)
        return RuntimeError(
            f"Trainer(compile='step') compiles {self.owner}.training_step and the optimizer's step into one graph, "
            f"but torch cannot do that: {why} {advice} Or use compile=True, which compiles the networks and leaves "
            "the step in Python."
        )

    def changing(self) -> tuple[str, str]:
        """Return why torch gave up after recompiling the step too often, and a fix."""
        reason = self.watch.last_reason
        why = f"because the latest compiled code did not apply: {reason}" if reason else "without giving a reason"
        return f"it recompiled the step too often and gave up, {why}.", advice_for(reason)

    def untraceable(self, error: Exception) -> tuple[str, str]:
        """Return the operation that torch cannot trace, and a fix."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = lines[0] if lines else type(error).__name__
        why = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
        places = [line for line in lines if line.startswith('File "')]
        where = f" At {places[-1]}." if places else ""
        advice = "Remove that operation from training_step."
        users = _file(self.module.training_step)
        for traced in self.optimizers:
            own = _file(traced.raw_step)
            if own and own in where and own != users:
                advice = f"This code is in the step of {type(traced.optimizer).__name__}, so use another optimizer."
        return f"{said}{': ' + why if why else ''}.{where}", advice

    def step(self, losses: LossReader) -> CompiledStep:
        """Create the epoch's step, because callbacks may have changed the accumulation since the last epoch."""
        check_trainer(self.run.trainer)
        return CompiledStep(self.run, self.forward, losses, self)

    def prime(self) -> None:
        """Switch to compiled steps; the optimizers must already have created their state."""
        for optimizer in self.optimizers:
            optimizer.settle(static=self.replays)
        self.primed = True


def compiled_whole(run: Run, forward: Callable[..., Any]) -> WholeStep | None:
    """Return a fit's WholeStep, or None if its step is not compiled as a whole.

    Raises ValueError for unsupported optimizers.
    """
    if scope_of(run.trainer.compile) not in ("step", "graphs"):
        return None
    check_optimizers(run)
    return WholeStep(run, forward)


class CompiledStep(TrainStep):
    """A step that calls one compiled function per batch.

    The first update of a fit runs uncompiled, so that the optimizer can create its state and a mistake in
    ``training_step`` raises Python's usual error instead of one from the compiler.
    """

    def __init__(self, run: Run, forward: Callable[..., Any], losses: LossReader, whole: WholeStep) -> None:
        super().__init__(run, forward, losses)
        self.whole = whole
        whole.accumulate = self.accumulate
        if run.resumes and self.state.updates and not whole.primed:
            whole.prime()

    def __call__(self, batch: Any, batch_idx: int) -> Outputs:
        state, whole, losses = self.state, self.whole, self.losses
        if not whole.primed:
            return super().__call__(batch, batch_idx)
        filled = state.window + 1
        complete = filled >= self.accumulate or state.is_last_batch
        factor = None if not complete or filled == self.accumulate else self.accumulate / filled
        whole.unit = losses.window.unit
        by_items = losses.by_items if losses.form_known else whole.unit is not None
        output, learned, items = whole.call(
            whole.batch_step(batch), batch, batch_idx, by_items, self.items(), complete, factor
        )
        if whole.replays:
            output = with_tensors(output, Tensor.clone)  # the next replay overwrites this output's memory
        if not learned:
            return self.left_out(output)
        losses.form_known, losses.by_items = True, items is not None
        losses.window.items = 0 if complete or items is None else items
        state.window = filled
        if complete:
            self.count_update()
        return output

    def items(self) -> Tensor | None:
        """Return the number of items in the window so far; None if losses are not weighted by items."""
        items = self.losses.window.items
        if not self.state.window or not self.losses.by_items:
            return None
        return torch.as_tensor(items, dtype=torch.float64, device=self.run.strategy.device)

    def left_out(self, output: Any) -> Outputs:
        """Skip a batch without a usable loss, or raise an error that says what is wrong with the loss."""
        losses = self.losses
        losses.form_known, losses.by_items = True, losses.window.unit is not None
        loss = losses.read(output)
        if loss is not None:
            raise losses.problem(loss) or RuntimeError(
                f"{self.whole.owner}.training_step returned no usable loss. Return a scalar computed from the module's "
                "output, or None to skip the batch."
            )
        return self.skip()

    def update(self) -> None:
        super().update()
        self.whole.prime()

    def finish_window(self) -> None:
        if not self.state.window or not self.whole.primed:
            super().finish_window()
            return
        factor: Any = self.accumulate / self.state.window
        if self.losses.by_items:
            factor = self.losses.finish_window()
        self.whole.call(self.whole.window_end, factor)
        self.count_update()

    def count_update(self) -> None:
        """Count the update that the graph ran."""
        state = self.state
        state.window = 0
        state.stepped = True
        state.global_step += 1
        state.updates += 1


class _Detached(Heard):
    """One call to ``self.log`` inside the graph. It detaches the value, because backward frees its autograd graph."""

    def update(self, value: Any, batch_size: int | None) -> None:
        super().update(value.detach() if isinstance(value, Tensor) else value, batch_size)


def _file(function: Any) -> str | None:
    code = getattr(unwrap(function), "__code__", None)
    return code and code.co_filename


def shapes_of(batch: Any) -> Any:
    """Return the shapes of a batch's tensors, in the same structure; any other object is replaced by None."""
    if isinstance(batch, Tensor):
        return batch.shape
    if isinstance(batch, Mapping):
        return tuple([(name, shapes_of(value)) for name, value in batch.items()])
    if isinstance(batch, (list, tuple)):
        return tuple([shapes_of(value) for value in batch])
    return None


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to every tensor in a plain collection."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: with_tensors(one, change) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)([with_tensors(one, change) for one in value])
    return value

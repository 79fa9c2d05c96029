"""Run a batch's micro-batches through the stages: find tensor shapes, create buffers, and run the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...devices.kinds import kind_of
from . import microbatches as micro
from .pipeline_stages import Passage, StageExit, StageRun, Stages, TensorForm, is_fake

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

    from .pipeline import Pipeline

_HOST = torch.device("cpu")
#: Phrases in the errors of operations that need a tensor's values when only its shape is known.
_SIGNS = ("meta", "FakeTensor", "fake_tensor")


class Call:
    """One batch that passes through the stages as micro-batches of ``sizes`` samples.

    Args:
        step: the user's step.
        more: the arguments that the step gets after the batch.
        batches: the micro-batches.
        sizes: number of samples in each micro-batch.
        seed: seed for all stages; random numbers still differ between micro-batches and between stages.
        scale: fp16's loss scale, or None.
        training: whether to run backward too.
        unit: divisor that keeps weighted losses in fp16's range, close to the number of items in a micro-batch; None if
            it is not known yet.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        more: tuple[Any, ...],
        batches: list[Any],
        sizes: list[int],
        seed: int,
        scale: Tensor | None,
        training: bool,
        unit: float | None = None,
    ) -> None:
        self.step, self.more, self.batches, self.sizes = step, more, batches, sizes
        self.seed, self.scale, self.training = seed, scale, training
        self.outputs: list[Any] = [None] * len(batches)
        self.items: list[Any] = [None] * len(batches)
        self.unit = unit

    def finish(self, index: int, output: Any) -> Tensor:
        """Store the step's output (on the last stage) and return the tensor, shape (), to run backward on."""
        if not self.training:
            self.outputs[index] = output
            return torch.zeros(())
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = "None" if output is None else f"{type(loss).__name__} as its loss"
            raise TypeError(
                f"training_step returned {what} for a micro-batch, so there is nothing to run backward on. Return the "
                "loss as a scalar tensor, or a dict that contains it under 'loss'. A pipeline cannot skip batches."
            )
        if not loss.requires_grad:
            raise RuntimeError(
                "training_step returned a loss that does not require gradients, so the last pipeline stage cannot be "
                "trained. Compute the loss from the module's output without .item(), .detach() or torch.no_grad()."
            )
        items = output.get("num_items") if isinstance(output, Mapping) else None
        self.items[index] = items
        self.outputs[index] = _detached(output)
        if items is None:
            weight: Any = self.sizes[index] / sum(self.sizes)
        else:
            self.unit = self.unit or 2.0 ** math.floor(math.log2(max(float(items), 1.0)))
            weight = items / self.unit
        loss = loss.reshape(())
        loss = loss if type(weight) is float and weight == 1.0 else loss * weight
        return loss if self.scale is None else loss * self.scale

    def loss(self) -> tuple[list[Any], tuple[bool, str]]:
        """Return a list with the batch's loss, and a pair (whether the step returned ``num_items``, the loss's dtype).

        If ``unit`` is known, the list also contains the number of items, and that number divided by ``unit``.
        """
        losses = [output["loss"] if isinstance(output, Mapping) else output for output in self.outputs]
        form = (self.items[0] is not None, str(losses[0].dtype).removeprefix("torch."))
        if any((items is not None) != form[0] for items in self.items):
            raise ValueError(
                "training_step returned 'num_items' for only some micro-batches, so their losses cannot be weighted. "
                "Return 'num_items' for all micro-batches or for none."
            )
        weights = self.items if form[0] else self.sizes
        loss = micro.mean([loss.to(kind_of(loss.device).widest_float) for loss in losses], weights)
        total = sum(weights)
        return [loss, total, total / self.unit] if self.unit else [loss], form


class MicrobatchSchedule:
    """Runs ``count`` micro-batches whose tensors have the same shapes and dtypes (the same form).

    When it is created, it finds the forms of the tensors that are sent between stages. Each stage runs the first
    micro-batch up to the next stage's first block, with zeros in place of the values from earlier stages, and sends the
    forms of that block's arguments to the next stage. ``passages`` contains the results of an earlier schedule for
    micro-batches of this form; None if there was no earlier schedule.
    """

    def __init__(
        self, pipeline: Pipeline, call: Call, first: int, count: int, passages: dict[int, Passage] | None = None
    ) -> None:
        self.pipeline, self.count, self.training = pipeline, count, call.training
        stages = pipeline.stages
        if stages is None:
            raise RuntimeError("The module was not set up for the pipeline. Call setup_module first.")
        self.stages: Stages = stages
        self.device = pipeline.strategy.device
        self.call, self.first = call, first
        self.passages = passages or {index: Passage() for index in pipeline.mine}
        if passages is None:
            self._learn()
        self.parts = [_StageModule(self, index) for index in pipeline.mine]
        self.schedule = self._schedule([self._stage(part) for part in self.parts])

    def run(self, call: Call, first: int) -> None:
        """Run forward (and backward, in training) for ``count`` micro-batches, starting at index ``first``."""
        self.call, self.first = call, first
        for part in self.parts:
            part.done = 0
        target = torch.arange(self.count) if self.training and self.pipeline.last else None
        given = {} if target is None else {"target": target}
        try:
            self.schedule.step(return_outputs=False, **given)
        except RuntimeError as error:
            if isinstance(error.__cause__, Exception) and "failed to run forward" in str(error):
                raise error.__cause__ from None
            raise

    # ---- one stage, one micro-batch --------------------------------------------------------------------------------

    def pass_through(self, stage: int, index: int, received: tuple[Tensor, ...]) -> Any:
        """Run a stage's part of the step; return the tensors to send or, on the last stage, the loss."""
        call, passage = self.call, self.passages[stage]
        index += self.first
        left, output = self._reach(stage, index, received)
        if passage.carried is None:
            passage.carried = set()
        if left is not None:
            if any(map(is_fake, left.leaves)):
                raise self._lacks_values(stage)
            return tuple([left.leaves[position].contiguous() for position in passage.sent])
        if stage < self.stages.count - 1:
            raise RuntimeError(self._not_called(self.stages.range(stage).stop))
        result = call.finish(index, output)
        if is_fake(result) or any(map(is_fake, micro.leaves(output))):
            raise self._lacks_values(stage)
        return result.float()  # the dtype that the stage promises; torch 2.11 checks it

    def _reach(
        self, stage: int, index: int, received: tuple[Tensor, ...] = (), stop_at_entry: bool = False
    ) -> tuple[StageExit | None, Any]:
        """Run the step until it leaves the stage or finishes.

        Returns a pair: the tensors for the next stage (None if the step finished), and the step's output.
        """
        call, seed = self.call, self.pipeline.seed

        def enter() -> None:
            seed(call.seed, index, stage)

        seed(call.seed, index, 0)
        seen = self.pipeline.held.seen if self.training else None
        run = StageRun(self.stages, stage, self.passages[stage], received, stop_at_entry, enter, seen)
        output = None
        try:
            with run:
                output = call.step(call.batches[index], *call.more)
        except StageExit as left:
            return left, None
        except Exception as error:
            if stage and any(sign in f"{type(error).__module__} {error}" for sign in _SIGNS):
                raise self._lacks_values(stage) from error
            raise
        if not run.entered:
            raise RuntimeError(self._not_called(self.stages.range(stage).start))
        return None, output

    def _not_called(self, block: int) -> str:
        name = self.stages.names[block]
        return (
            f"The step of {type(self.stages.module).__name__} finished without calling {name}, the first module of a "
            "pipeline stage. Every step must call all of the network's blocks in order. List other modules in "
            "split_points, or use pipeline_parallel=1."
        )

    def _lacks_values(self, stage: int) -> RuntimeError:
        name = self.stages.names[self.stages.range(stage).start]
        return RuntimeError(
            f"Pipeline stage {stage}, which begins with {name}, needs the value of a tensor that an earlier stage "
            f"computes but that is not passed to {name} as an argument. The tensor may be a skip connection, a weight "
            "of another stage, or the source of a Python number. Pass the tensor through the blocks' arguments, or "
            "use split_points to split the model elsewhere."
        )

    # ---- forms -----------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        buffers = [(b, b.clone()) for b in self.stages.module.buffers() if not b.is_meta]
        try:
            for stage in range(self.stages.count - 1):
                if stage in self.passages:
                    self._offer(stage)
                if stage + 1 in self.passages:
                    self._ask(stage + 1)
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    def _offer(self, stage: int) -> None:
        """Send the next stage a list of this stage's tensors, and receive the indices of the tensors that it needs."""
        passage = self.passages[stage]
        received = tuple(form.make(self.device) for form in passage.inputs)
        left, _ = self._reach(stage, self.first, received)
        forms = None if left is None else [_form(leaf) for leaf in left.leaves]
        receiver = self.pipeline.process_of(stage + 1)
        self._send(forms, receiver)
        if forms is None:
            raise RuntimeError(self._not_called(self.stages.range(stage).stop))
        wanted = self._receive(receiver)
        if isinstance(wanted, str):
            raise RuntimeError(wanted)
        passage.sent = wanted
        passage.outputs = tuple(forms[position] for position in wanted)  # type: ignore[misc]

    def _ask(self, stage: int) -> None:
        """Find out which tensors the previous stage has, and tell that stage which of them this stage needs."""
        passage, sender = self.passages[stage], self.pipeline.process_of(stage - 1)
        forms = self._receive(sender)
        if forms is None:
            raise RuntimeError(self._not_called(self.stages.range(stage).start))
        left, _ = self._reach(stage, self.first, stop_at_entry=True)
        if left is None:
            raise RuntimeError(self._not_called(self.stages.range(stage).start))
        problem = None
        if left.count != len(forms) or any(forms[position] is None for position in left.leaves):
            problem = (
                f"{self.stages.names[self.stages.range(stage).start]}, the first module of pipeline stage {stage}, "
                "gets different arguments on this stage than on the previous one. These arguments must not depend on "
                "tensor values, and must not be objects that blocks change (for transformers models, pass "
                "use_cache=False)."
            )
        self._send(problem or left.leaves, sender)
        if problem:
            raise RuntimeError(problem)
        passage.wanted = left.leaves
        passage.inputs = tuple(forms[position] for position in left.leaves)

    def _send(self, value: Any, process: int) -> None:
        dist.send_object_list([value], process, group=self.pipeline.host, device=_HOST)

    def _receive(self, process: int) -> Any:
        box = [None]
        dist.recv_object_list(box, process, group=self.pipeline.host, device=_HOST)
        return box[0]

    # ---- torch's objects -------------------------------------------------------------------------------------------

    def _stage(self, part: _StageModule) -> PipelineStage:
        from torch.distributed.pipelining import PipelineStage  # importing it takes half a second

        passage = self.passages[part.stage]
        is_last = part.stage == self.stages.count - 1
        outputs = (TensorForm((), torch.float32, False),) if is_last else passage.outputs
        return PipelineStage(
            part,
            part.stage,
            self.stages.count,
            self.device,
            input_args=tuple(form.make(self.device) for form in passage.inputs),
            output_args=tuple(form.make(self.device) for form in outputs),
            group=self.pipeline.group,
        )

    def _schedule(self, stages: list[Any]) -> Any:
        from torch.distributed import pipelining

        count, processes = self.count, self.pipeline.size
        given: dict[str, Any] = {"loss_fn": _loss if self.training else None, "scale_grads": False}
        if self.pipeline.virtual > 1:
            even = count % max(1, count // processes) == 0
            kind = pipelining.ScheduleInterleaved1F1B if self.training and even else pipelining.ScheduleLoopedBFS
            return kind(stages, count, **given)
        steady = self.training and self.pipeline.schedule == "1f1b" and count >= self.stages.count
        return (pipelining.Schedule1F1B if steady else pipelining.ScheduleGPipe)(stages[0], count, **given)


class _StageModule(nn.Module):
    """The module that torch runs as a pipeline stage. Its forward runs the stage's part on the next micro-batch."""

    def __init__(self, plan: MicrobatchSchedule, stage: int) -> None:
        super().__init__()
        self.plan, self.stage, self.done = plan, stage, 0

    def forward(self, *received: Tensor) -> Any:
        index = self.done
        self.done += 1
        return self.plan.pass_through(self.stage, index, received)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output


def _form(leaf: Any) -> TensorForm | None:
    return TensorForm(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else None


def _detached(output: Any) -> Any:
    if isinstance(output, Mapping):
        return {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
    return output.detach()

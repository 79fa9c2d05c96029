"""Pipeline parallelism: successive processes hold successive blocks, run by torch.distributed.pipelining."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import messages
from ...devices.kinds import kind_of
from ...processes.device_transfer import move
from ...torch_private import APPLY, is_compiled
from . import microbatches as micro
from .microbatches import ScheduleName
from .pipeline_schedule import Call, MicrobatchSchedule
from .pipeline_stages import Passage, Stages
from .pipeline_weights import Weights

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..distributed import DistributedStrategy

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
#: Number of plans to keep; a plan holds the buffers for micro-batches of one form.
_KEPT_PLANS = 4
#: Maximum number of processes: each has one bit in the integer that says which processes use a weight.
_MOST_PROCESSES = 62
_HOST = torch.device("cpu")


class Pipeline:
    """Runs the steps of a ModelParallelStrategy's module, whose blocks are on successive processes.

    All processes of a pipeline see the same batch. The batch is split into micro-batches, which pass through the stages
    one after another. Every stage runs ``training_step`` for each micro-batch, from the stage's first block to its
    last. Code after the network (the loss, ``self.log``) runs on the last stage. Forward and backward both run within
    the step, so calling backward on the returned loss only determines a factor for the gradients.

    Args:
        strategy: the strategy that this pipeline belongs to.
        schedule: ``"gpipe"`` (Huang et al., GPipe, 2019), ``"1f1b"`` (Narayanan et al., Memory-Efficient
            Pipeline-Parallel DNN Training, 2021) or ``"interleaved_1f1b"`` (Narayanan et al., Efficient Large-Scale
            Language Model Training, 2021).
        microbatches: number of micro-batches per batch; four per process if None.
        virtual_stages: number of stages per process; only the interleaved schedule has more than one (default: 2).
        split_points: names of the first modules of the second and later stages; if None, the parameters are split
            evenly.
    """

    def __init__(
        self,
        strategy: DistributedStrategy,
        schedule: ScheduleName = "1f1b",
        microbatches: int | None = None,
        virtual_stages: int | None = None,
        split_points: Sequence[str] | None = None,
    ) -> None:
        _check(schedule, microbatches, virtual_stages)
        self.strategy = strategy
        self.schedule = schedule
        self.microbatches = microbatches
        self.virtual = virtual_stages or (2 if schedule == "interleaved_1f1b" else 1)
        self.split_points = split_points
        self.syncs = True
        self.stages: Stages | None = None
        self.weights: Weights | None = None
        self._plans: OrderedDict[Any, MicrobatchSchedule] = OrderedDict()
        self._passages: dict[Any, dict[int, Passage]] = {}
        self._layouts: list[Any] = []
        self._fresh = True
        self._leaf: Tensor | None = None
        self._unit: float | None = None
        self._units: Tensor | None = None

    # ---- processes ----------------------------------------------------------------------------------------------

    def meet(self, mesh: Any) -> None:
        """Set this process's position in the mesh's ``"pp"`` dimension, and create the pipeline's process groups."""
        self.group = mesh["pp"].get_group()
        self.rank, self.size = mesh["pp"].get_local_rank(), mesh["pp"].size()
        self.host = self._host_group(mesh, "pp")
        #: Groups of the processes that hold the same stages in different pipeline copies, for the device and the host.
        self.copies = [
            (mesh[axis].get_group(), self._host_group(mesh, axis))
            for axis in ("dp_replicate", "dp_shard")
            if mesh[axis].size() > 1
        ]
        self.last = self.rank == self.size - 1
        if self.size > _MOST_PROCESSES:
            raise ValueError(
                f"pipeline_parallel={self.size} is too large: a pipeline can have at most {_MOST_PROCESSES} "
                "processes. Use the other processes for tensor_parallel or data_parallel_replicate."
            )
        self.microbatches = self.microbatches or 4 * self.size

    def _host_group(self, mesh: Any, axis: str) -> Any:
        dim = mesh.mesh_dim_names.index(axis)
        every = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.mesh.shape[dim]).tolist()
        group, _ = dist.new_subgroups_by_enumeration(every, backend="gloo", timeout=self.strategy.timeout)
        return group

    @property
    def mine(self) -> list[int]:
        """The stages that this process holds."""
        return [self.rank + turn * self.size for turn in range(self.virtual)]

    def process_of(self, stage: int) -> int:
        """Return the process that holds a stage."""
        return dist.get_global_rank(self.host, stage % self.size)

    # ---- module and optimizers -------------------------------------------------------------------------------------

    def knows(self, module: nn.Module) -> bool:
        """Return True if this pipeline has split the module."""
        return self.stages is not None and self.stages.module is module

    def split(self, module: nn.Module) -> None:
        """Split a module into stages, and drop the weights of other processes' stages."""
        self.rest()
        self.stages = Stages(module, self.size * self.virtual, self.strategy.device, self.split_points)
        self.weights = Weights(self, self.stages)

    def rest(self) -> None:
        """Free the buffers that the last run's micro-batches used."""
        self._plans.clear()
        self._passages.clear()
        self._leaf = None

    @property
    def held(self) -> Weights:
        """The pipeline's weights; raises an error if no module has been set up yet."""
        if self.weights is None:
            raise RuntimeError("The pipeline has no module yet. Call setup_module first.")
        return self.weights

    def to_device(self, module: nn.Module) -> nn.Module:
        """Move the tensors that this process holds to its device."""
        device = self.strategy.device
        return getattr(module, APPLY)(lambda tensor: tensor if tensor.is_meta else tensor.to(device))

    def check_training(self, module: nn.Module) -> None:
        """Raise an error if this pipeline cannot train a module."""
        if not getattr(module, "automatic_optimization", True):
            raise ValueError(
                f"{type(module).__name__} uses manual optimization, but a pipeline's schedule interleaves the "
                "micro-batches' forward and backward passes. Return the loss from training_step "
                "(automatic_optimization = True), or use pipeline_parallel=1."
            )

    def setup_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Set the optimizers, whose state is on the same processes as the weights that they update."""
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError(
                    "LBFGS needs all weights in one process, but a pipeline distributes them. Use another optimizer, "
                    "or pipeline_parallel=1."
                )
        self.held.optimizers = optimizers

    # ---- a step ----------------------------------------------------------------------------------------------------

    def bind_step(self, step: Callable[..., Any], logs: Any, training: bool) -> Callable[..., Any]:
        """Return the function to call in place of ``step``; it runs a batch through the pipeline.

        If ``logs`` is not None, its ``take`` and ``put`` methods send the last stage's logged values to all stages.
        """
        self.rest()
        self._fresh = True
        self._refuse_compiled()
        return lambda batch, *more: self._run(step, logs, batch, more, training)

    def _refuse_compiled(self) -> None:
        """Raise an error if a network that contains blocks is compiled, because a compiled network cannot be split."""
        stages = self.held.stages
        around = {name.rpartition(".")[0] for name in stages.names}
        around |= {outer[:end] for outer in around for end, sign in enumerate(outer) if sign == "."} | {""}
        for name in sorted(around):
            module = stages.module.get_submodule(name)
            if is_compiled(module):
                raise ValueError(
                    f"{type(module).__name__} ({name or 'the module itself'}) is compiled as a whole, but a pipeline "
                    "splits a network between its blocks. Compile the blocks instead: for block in ...: "
                    "block.compile()."
                )

    def _run(self, step: Callable[..., Any], logs: Any, batch: Any, more: tuple[Any, ...], training: bool) -> Any:
        weights = self.held
        batches, sizes = micro.cut(batch, self.microbatches or 1)
        scale = self._scale() if training else None
        call = Call(step, more, batches, sizes, self._draw_seed(), scale, training, self._unit)
        if training:
            weights.set_gradients_aside()
        state = self._random_state()
        try:
            first = 0
            for form, same in groupby(map(micro.form_of, batches)):
                count = len(list(same))
                self._plan(form, call, first, count).run(call, first)
                first += count
        finally:
            self._set_random_state(state)
        return self._output(call, logs, weights)

    def _plan(self, form: Any, call: Call, first: int, count: int) -> MicrobatchSchedule:
        mode = "training" if call.training else ("inference" if torch.is_inference_mode_enabled() else "no_grad")
        key = (form, count, mode)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = MicrobatchSchedule(self, call, first, count, self._passages.get((form, mode)))
            self._passages[form, mode] = plan.passages
            if len(self._plans) > _KEPT_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return plan

    def _scale(self) -> Tensor | None:
        """Return fp16's loss scale, shape (), or None."""
        precision = self.strategy.precision
        return None if precision.scaler is None else precision.scale_loss(torch.ones((), device=self.strategy.device))

    def _output(self, call: Call, logs: Any, weights: Weights) -> Any:
        """Return the step's output for the whole batch, with the same loss and logged values on every stage."""
        if not call.training:
            output = micro.join(call.outputs, call.sizes) if self.last else None
            self._share(("", None), [], logs)
            if not getattr(logs, "returns", False):
                return output
            return move(self._from(self.size - 1, move(output, _HOST)), self.strategy.device)
        found, form = call.loss() if self.last else ([], None)
        (by_items, dtype), numbers = self._share(form, found, logs, weights)
        self._leaf = loss = numbers[0].to(getattr(torch, dtype)).requires_grad_()
        self._units, self._unit = numbers[2] if by_items else None, call.unit
        output = micro.join(call.outputs, call.sizes) if self.last and isinstance(call.outputs[0], Mapping) else {}
        if by_items:
            items = numbers[1].item() if numbers.is_cpu else numbers[1]
            return {**output, "loss": loss, "num_items": items}
        return {**output, "loss": loss} if output else loss

    def backward(self, loss: Tensor, how: Callable[[Tensor], Any] | None) -> None:
        """Multiply the last batch's gradients by the factor that the user applied to its loss, and reduce them."""
        leaf, weights = self._leaf, self.held
        if leaf is None:
            raise RuntimeError(
                "With a pipeline, backward can only be called on the loss that training_step returned. Use "
                "pipeline_parallel=1 to call backward on other losses."
            )
        self._leaf = None
        if how is None:
            loss.backward()
        else:
            with self.strategy.precision.backward_context():
                how(loss)
        factor = None if loss is leaf else leaf.grad
        if self._units is not None:
            factor = (1.0 if factor is None else factor) / self._units
        weights.take_gradients(factor)
        if self.syncs:
            weights.reduce_gradients()

    # ---- random numbers --------------------------------------------------------------------------------------------

    def _draw_seed(self) -> int:
        """Draw a seed for a batch.

        All stages draw the same seed, because their generators have the same state between batches.
        """
        if self._fresh:
            self._fresh = False
            torch.set_rng_state(self._from(0, torch.get_rng_state()))
        return int(torch.randint(2**62, (), device=_HOST))

    def _random_state(self) -> tuple[Tensor, Tensor | None]:
        device = self.strategy.device
        return torch.get_rng_state(), kind_of(device).random_state(device)

    def _set_random_state(self, state: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            kind_of(self.strategy.device).set_random_state(state[1], self.strategy.device)

    def seed(self, seed: int, index: int, stage: int) -> None:
        """Seed the random number generators for a micro-batch, or for a stage's own blocks in a micro-batch."""
        mixed = (seed ^ (index * 0x9E3779B97F4A7C15 + stage * 0xBF58476D1CE4E5B9)) & (2**63 - 1)
        torch.default_generator.manual_seed(mixed)
        kind_of(self.strategy.device).seed(mixed)

    # ---- from the last stage to all --------------------------------------------------------------------------------

    def _from(self, rank: int, value: Any) -> Any:
        """Broadcast an object from rank ``rank`` of the pipeline to all of the pipeline's ranks."""
        box = [value]
        dist.broadcast_object_list(box, dist.get_global_rank(self.host, rank), group=self.host, device=_HOST)
        return box[0]

    def compute_metric(self, metric: Any) -> Any:
        """Compute a torchmetrics ``Metric`` on the last stage, which has updated it; return the value on all stages."""
        value = None
        if self.last:
            before = metric._to_sync, metric.process_group
            metric._to_sync = bool(self.copies)
            metric.process_group = self.copies[0][0] if self.copies else None
            try:
                value = metric.compute()
            finally:
                metric._to_sync, metric.process_group = before
            value = value.cpu() if isinstance(value, Tensor) else value
        value = self._from(self.size - 1, value)
        return value.to(self.strategy.device) if isinstance(value, Tensor) else value

    def _share(self, form: Any, numbers: list[Any], logs: Any, weights: Weights | None = None) -> tuple[Any, Tensor]:
        """Send the last stage's ``numbers`` (such as the loss) and logged values to all stages.

        The values are sent from device to device. The CPU process group exchanges only a few integers and, if the
        layout of the values is new, that layout. The same exchange tells ``weights`` which stages use which weights.

        Returns:
            The last stage's ``form`` and ``numbers``, of shape (n,).
        """
        logged, values = logs.take() if self.last and logs is not None else ((), [])
        use = weights.use() if weights is not None else []
        header = torch.zeros(2 + len(use), dtype=torch.int64)
        if self.last:
            layout = (form, len(numbers), logged)
            header[1] = layout not in self._layouts
            if header[1]:
                self._layouts.append(layout)
            header[0] = self._layouts.index(layout)
        if use:
            header[2:] = torch.tensor(use)
        dist.all_reduce(header, group=self.host)
        number, is_new, *use = header.tolist()
        if is_new and (found := self._from(self.size - 1, self._layouts[-1] if self.last else None)) and not self.last:
            self._layouts.append(found)
        if weights is not None:
            weights.settle(use)
        form, count, logged = self._layouts[number]
        numbers_there = self._broadcast(numbers + values, count + len(logged))
        if logs is not None:
            logs.put(logged, numbers_there[count:])
        return form, numbers_there[:count]

    def _broadcast(self, values: list[Any], count: int) -> Tensor:
        device = self.strategy.device
        dtype = kind_of(device).widest_float
        numbers = torch.zeros(count, dtype=dtype, device=device)
        if count and self.last:
            numbers = torch.stack([torch.as_tensor(v, dtype=dtype, device=device).detach().reshape(()) for v in values])
        if count:
            dist.broadcast(numbers, self.process_of(self.size - 1), group=self.group)
        return numbers


def _check(schedule: str, microbatches: int | None, virtual_stages: int | None) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(messages.unknown("pipeline schedule", schedule, SCHEDULES))
    for name, value in (("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r} is not a positive integer. Pass 1 or more, or leave {name} out.")
    if schedule != "interleaved_1f1b" and (virtual_stages or 1) > 1:
        raise ValueError(
            f"virtual_stages={virtual_stages} has no effect, because pipeline_schedule={schedule!r} has one stage per "
            "process. Use pipeline_schedule='interleaved_1f1b', or leave virtual_stages out."
        )
    if schedule == "interleaved_1f1b" and virtual_stages == 1:
        raise ValueError(
            "pipeline_schedule='interleaved_1f1b' with virtual_stages=1 is the same as '1f1b'. Use '1f1b', or "
            "virtual_stages=2."
        )

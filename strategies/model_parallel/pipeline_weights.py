"""A pipeline's weights: track which process holds each weight, reduce gradients, and gather full state dicts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...torch_private import own_buffers, scaler_states
from .. import sharded_tensors
from ..precision.base import parameters as parameters_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .pipeline import Pipeline
    from .pipeline_stages import Stages

_BUCKET_BYTES = 32 * 2**20
_HOST = torch.device("cpu")


class Weights:
    """The weights of a module that a pipeline runs.

    A process holds the weights of its stages' blocks and, at first, all weights outside the blocks. The first training
    step shows which processes use the weights outside the blocks; the other processes then move these weights to the
    meta device. If several processes use a weight (tied weights), its gradients are summed across these processes.
    """

    def __init__(self, pipeline: Pipeline, stages: Stages) -> None:
        self.pipeline, self.stages = pipeline, stages
        self.module: nn.Module = stages.module
        self.optimizers: list[Optimizer] = []
        self.holders = {
            name: sorted({stage % pipeline.size for stage in found}) for name, found in stages.holders().items()
        }
        self._named = dict(self.module.named_parameters())
        self._shared = [name for name in self._named if len(self.holders[name]) > 1]
        self._users: dict[str, set[int]] = {}
        #: Ids of the weights that this process has used; None after the first step.
        self.seen: set[int] | None = set()
        self._earlier: list[tuple[nn.Parameter, Tensor]] = []
        #: Shared weights that have a gradient on some process in this window.
        self._window: set[str] = set()
        for name in self._named:
            if pipeline.rank not in self.holders[name]:
                self._leave_out(name)
        self._leave_out_buffers()
        self._held = [parameter for parameter in self._named.values() if not parameter.is_meta]

    def _leave_out_buffers(self) -> None:
        for name, buffer in list(self.module.named_buffers()):
            owner, _, key = name.rpartition(".")
            if self.pipeline.rank not in self.holders[name]:
                own_buffers(self.module.get_submodule(owner))[key] = buffer.to("meta")
        self._outside = {n: b.clone() for n, b in self.module.named_buffers() if len(self.holders[n]) > 1}

    def _leave_out(self, name: str) -> None:
        parameter = self._named[name]
        empty = nn.Parameter(sharded_tensors.without_memory(parameter), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, empty)
        for optimizer in self.optimizers:
            optimizer.state.pop(parameter, None)

    # ---- gradients -------------------------------------------------------------------------------------------------

    def set_gradients_aside(self) -> None:
        """Store the gradients of the window's earlier batches, so that the next batch starts without gradients."""
        self._earlier = [(p, p.grad) for p in self._held if p.grad is not None]
        for parameter, _ in self._earlier:
            parameter.grad = None

    def take_gradients(self, factor: Tensor | None) -> None:
        """Multiply the batch's gradients by a factor, shape (), and add the gradients of earlier batches."""
        grads = [p.grad for p in self._held if p.grad is not None]
        if grads and factor is not None:
            sharded_tensors.multiply(grads, factor)
        for parameter, grad in self._earlier:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        self._earlier = []

    def use(self) -> list[int]:
        """Return two integers per shared weight: whether this process uses it, and whether a gradient exists."""
        mine, seen = 1 << self.pipeline.rank, self.seen or ()
        found = []
        for name in self._shared:
            parameter = self._named[name]
            has_gradient = parameter.grad is not None
            found += [mine * (has_gradient or id(parameter) in seen), mine * has_gradient]
        return found

    def settle(self, use: list[int]) -> None:
        """Process the results of :meth:`use`, combined across all processes.

        In the first step, this also drops the weights that only other processes use.
        """
        everyone, first, rank = set(range(self.pipeline.size)), self.seen is not None, self.pipeline.rank
        self.seen = None
        for name, users_bits, has_gradient in zip(self._shared, use[::2], use[1::2], strict=True):
            now = {rank for rank in everyone if users_bits >> rank & 1}
            if has_gradient:
                self._window.add(name)
            before = self._users.get(name, set())
            if now <= before:
                continue
            self._users[name] = now if first else before | now if before else everyone
            if first and rank not in now:
                self._leave_out(name)
        if first:
            self._held = [parameter for parameter in self._named.values() if not parameter.is_meta]

    def reduce_gradients(self) -> None:
        """Sum a shared weight's gradients across its processes; average all gradients across pipeline copies."""
        by_users: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for name in self._shared:
            users = self._users.get(name, set())
            if name in self._window and len(users) > 1 and self.pipeline.rank in users:
                by_users.setdefault(tuple(sorted(users)), []).append(self._named[name])
        self._window = set()
        for users, parameters in by_users.items():
            in_buckets(parameters, partial(self._sum_across, users))
        for group, host in self.pipeline.copies:
            there = torch.tensor([parameter.grad is not None for parameter in self._held], dtype=torch.uint8)
            dist.all_reduce(there, dist.ReduceOp.MAX, group=host)
            chosen = [parameter for parameter, yes in zip(self._held, there.tolist(), strict=True) if yes]
            in_buckets(chosen, partial(_average, group=group))

    def _sum_across(self, users: tuple[int, ...], flat: Tensor) -> None:
        """Sum a tensor in place across some of the pipeline's processes.

        This avoids a separate process group, which all processes, including those of other pipelines, would have to
        create.
        """
        group = self.pipeline.group
        if len(users) == self.pipeline.size:
            dist.all_reduce(flat, group=group)
            return
        first, *others = [self.pipeline.process_of(rank) for rank in users]
        if self.pipeline.rank == users[0]:
            part = torch.empty_like(flat)
            for other in others:
                dist.recv(part, other, group=group)
                flat += part
            for other in others:
                dist.send(flat, other, group=group)
        else:
            dist.send(flat, first, group=group)
            dist.recv(flat, first, group=group)

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip the norm across all stages, counting each shared weight once; return the original norm, shape ()."""
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        sharded_tensors.settle(parameters)
        named = {id(parameter): name for name, parameter in self._named.items()}
        counted = [p.grad for p in parameters if p.grad is not None and self._counts(named.get(id(p)))]
        norm = sharded_tensors.total_norm(counted, norm_type).to(self.pipeline.strategy.device)
        if norm_type == float("inf"):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self.pipeline.group)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=self.pipeline.group)
            norm = norm ** (1.0 / norm_type)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        sharded_tensors.multiply([parameter.grad for parameter in parameters if parameter.grad is not None], factor)
        return norm

    def agree_on_overflow(self, scaler: Any, optimizer: Optimizer) -> None:
        """Treat an overflow on one stage as an overflow on all stages, so that either all stages step or none does."""
        if scaler is None or not scaler.is_enabled():
            return
        for found in scaler_states(scaler)[id(optimizer)]["found_inf_per_device"].values():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.pipeline.group)

    def _counts(self, name: str | None) -> bool:
        """Return True if this process includes a gradient in the total norm.

        If several processes share a weight, only the first of these processes includes the weight's gradient.
        """
        if name is None:
            return self.pipeline.rank == 0
        return self.pipeline.rank == min(self._users.get(name) or self.holders[name])

    # ---- states ----------------------------------------------------------------------------------------------------

    def model_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the full ``state_dict`` on the pipeline's first process; other processes get only their own part."""
        changed = {n for n, value in self._outside.items() if not torch.equal(value, self.module.get_buffer(n))}
        mine = {}
        for name, value in state.items():
            if isinstance(value, Tensor) and value.is_meta:
                continue
            mine[name] = (value.cpu() if isinstance(value, Tensor) else value, name in changed)
        if self.pipeline.rank:
            self._send_to_first(mine)
            return {name: value for name, (value, _) in mine.items()}
        found = dict(mine)
        for rank in range(1, self.pipeline.size):
            for name, entry in self._receive_from(rank):
                if name not in found or (entry[1] and not found[name][1]):
                    found[name] = entry
        return {name: found[name][0] for name in state if name in found}

    def load_model_state(self, state: Mapping[str, Any], strict: bool) -> Any:
        """Load this stage's tensors from a full state dict."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*meta parameter.*no-op")
            result = self.module.load_state_dict(state, strict=strict)
        self._outside = {name: self.module.get_buffer(name).clone() for name in self._outside}
        return result

    def optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the full optimizer state on the pipeline's first process; other processes get only their own part."""
        if self.pipeline.rank:
            self._send_to_first(state["state"])
            return state
        found = dict(state["state"])
        for rank in range(1, self.pipeline.size):
            for index, entry in self._receive_from(rank):
                found.setdefault(index, entry)
        return {**state, "state": dict(sorted(found.items()))}

    def own_part(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of a full optimizer state for this stage's parameters."""
        indices = [index for group in state["param_groups"] for index in group["params"]]
        here = {index for index, p in zip(indices, parameters_of(optimizer), strict=True) if not p.is_meta}
        return {**state, "state": {index: entry for index, entry in state["state"].items() if index in here}}

    def _send_to_first(self, entries: Mapping[Any, Any]) -> None:
        first = self.pipeline.process_of(0)
        for entry in (*entries.items(), None):  # one by one, so that the first process never holds two copies
            dist.send_object_list([entry], first, group=self.pipeline.host, device=_HOST)

    def _receive_from(self, rank: int) -> Iterator[tuple[Any, Any]]:
        while True:
            box: list[Any] = [None]
            dist.recv_object_list(box, self.pipeline.process_of(rank), group=self.pipeline.host, device=_HOST)
            if box[0] is None:
                return
            yield box[0]


def in_buckets(parameters: list[nn.Parameter], reduce: Callable[[Tensor], None]) -> None:
    """Reduce gradients in place with ``reduce``, in buckets of shape (n,); a missing gradient counts as zero."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in sharded_tensors.local_parts(parameter.grad for parameter in parameters if parameter.grad is not None):
        by_dtype.setdefault(grad.dtype, []).append(grad)
    for grads in by_dtype.values():
        for bucket in _buckets(grads):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            reduce(flat)
            pieces = flat.split([grad.numel() for grad in bucket])
            for grad, piece in zip(bucket, pieces, strict=True):
                grad.copy_(piece.view_as(grad))


def _average(flat: Tensor, group: Any) -> None:
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)


def _buckets(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        if bucket and size + grad.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.nbytes
    if bucket:
        yield bucket

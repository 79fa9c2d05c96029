"""Parameters of which each process holds a part: their gradients' norm, and their state as one process would have it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

# ---- gradients -------------------------------------------------------------------------------------------------------


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def settle(parameters: Iterable[Tensor]) -> None:
    """Give every gradient its parameter's placement: some layers leave a sum over processes for whoever reads it."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """This process's part of each gradient there is."""
    return [local_part(p.grad) for p in parameters if p.grad is not None]


def total_norm(parameters: Iterable[Tensor], norm_type: float = 2.0, also_over: Iterable[Any] = ()) -> Tensor:
    """The norm of all gradients together, each element counted once however many processes hold it.

    Args:
        parameters: whole, sharded and replicated ones in any mixture.
        norm_type: p of the p-norm.
        also_over: process groups whose members hold other parameters (pipeline stages).

    Returns:
        The same on every process; scalar tensor, shape ().
    """
    parts: dict[tuple[str, ...], list[Tensor]] = {}
    groups: dict[str, Any] = {}
    device = torch.device("cpu")
    for parameter in parameters:
        over = _sharded_over(parameter)
        groups |= over
        found = parts.setdefault(tuple(over), [])
        device = parameter.device
        if parameter.grad is not None and (local := local_part(parameter.grad)).numel():
            found.append(local)
    largest = norm_type == float("inf")
    power = 1.0 if largest else norm_type
    norms = [get_total_norm(found, norm_type).to(device, torch.float32) ** power for found in parts.values()]
    sums = torch.stack(norms) if norms else torch.zeros(1, device=device)
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    for name in sorted(groups):
        here = [index for index, key in enumerate(parts) if name in key]
        some = sums[here].contiguous()
        dist.all_reduce(some, op, group=groups[name])
        sums[here] = some
    total = sums.max() if largest else sums.sum()
    for group in also_over:
        dist.all_reduce(total, op, group=group)
    return total ** (1.0 / power)


def _sharded_over(parameter: Tensor) -> dict[str, Any]:
    """The process groups over which a parameter is cut, by name."""
    if not isinstance(parameter, DTensor):
        return {}
    mesh = parameter.device_mesh
    groups = [mesh.get_group(axis) for axis, p in enumerate(parameter.placements) if not p.is_replicate()]
    return {group.group_name: group for group in groups if group.size() > 1}


def clip_by_norm(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, also_over: Iterable[Any] = ()
) -> Tensor:
    """Scale the gradients down to a total norm of at most ``max_norm``; return the norm before, a scalar tensor."""
    parameters = list(parameters)
    settle(parameters)
    norm = total_norm(parameters, norm_type, also_over)
    scale_gradients(parameters, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def scale_gradients(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply every gradient, in place."""
    grads = local_gradients(parameters)
    if grads:
        torch._foreach_mul_(grads, factor)  # type: ignore[reportPrivateImportUsage]


def clip_by_value(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clip each gradient element, in place."""
    parameters = list(parameters)
    settle(parameters)
    for grad in local_gradients(parameters):
        grad.clamp_(-clip_value, clip_value)


# ---- state -----------------------------------------------------------------------------------------------------------


def whole(value: Any, keep: bool) -> Any:
    """A tensor put together on the CPU of the processes that ``keep`` it; every process of its mesh must call."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu() if isinstance(value, Tensor) and keep else value


def part_like(value: Any, like: Any) -> Any:
    """A whole tensor, that every process has, cut as ``like`` is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def whole_model_state(module: nn.Module, keep: bool) -> dict[str, Any]:
    """The module's ``state_dict`` in plain tensors on the CPU of the processes that ``keep`` it; empty on others."""
    state = {name: whole(value, keep) for name, value in module.state_dict().items()}
    return state if keep else {}


def load_model_state(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """Load a whole ``state_dict``: each process takes its parts."""
    own = module.state_dict()
    return module.load_state_dict({name: part_like(value, own.get(name)) for name, value in state.items()}, strict)


def whole_optimizer_state(optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """``optimizer.state_dict()`` in plain tensors, on the processes that ``keep`` it; empty on others."""
    found = optimizer.state_dict()
    state = {
        index: {key: whole(value, keep) for key, value in values.items()} for index, values in found["state"].items()
    }
    return found | {"state": state} if keep else {}


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a whole optimizer state: what has its parameter's shape is cut as that is."""
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    cut = {
        index: {key: _part_of_state(value, parameters.get(index)) for key, value in values.items()}
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict(state | {"state": cut})


def _part_of_state(value: Any, parameter: Tensor | None) -> Any:
    same_shape = isinstance(value, Tensor) and parameter is not None and value.shape == parameter.shape
    return part_like(value, parameter) if same_shape and value.dim() else value

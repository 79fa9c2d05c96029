"""Convert between ZeRO's flat partitions and full tensors.

Each ZeRO rank holds a float32 slice of each parameter group's concatenated parameters, and the optimizer state for that
slice. Checkpoints contain full tensors, so they can be loaded with any strategy and any number of ranks. This module
finds each rank's pieces of the parameters, gathers the pieces, and splits full tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...torch_private import IncompatibleKeys, change_count, load_own_tensors, saved_versions

#: Number of weights that are compared at a time, to limit memory use.
_CHUNK = 2**22


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that this rank updates.

    The piece has ``numel`` elements (0 if other ranks hold the whole parameter). They begin at ``start`` in the float32
    partition ``flat``, shape (partition,), and at ``first`` in the flattened parameter.
    """

    flat: Tensor
    start: int
    first: int
    numel: int


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return a parameter's full shape, even while ZeRO-3 holds only part of it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def is_split(parameter: Any) -> bool:
    """Return True if ZeRO-3 has partitioned the parameter."""
    return hasattr(parameter, "ds_id")


def pieces(zero: Any) -> dict[int, Piece]:
    """Return a dict of this rank's pieces of the trained parameters, keyed by the parameters' ``id``.

    ``zero`` is DeepSpeed's optimizer.
    """
    return dict(_pieces_of_split(zero) if splits(zero) else _pieces_of_whole(zero))


def _pieces_of_whole(zero: Any) -> Iterator[tuple[int, Piece]]:
    for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
        for parameter in group:
            mapping = parameter._hp_mapping
            if mapping is None:
                yield id(parameter), Piece(flat, 0, 0, 0)
                continue
            there, here = mapping.hp_fragment_address, mapping.lp_fragment_address
            yield id(parameter), Piece(flat, there.start, here.start, there.numel)


def _pieces_of_split(zero: Any) -> Iterator[tuple[int, Piece]]:
    for group, flat in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        start = 0
        for parameter in group:
            each = parameter.partition_numel()  # the same on every rank, so the last ranks may have padding
            first = each * dist.get_rank(parameter.ds_process_group)
            yield id(parameter), Piece(flat, start, first, max(0, min(each, parameter.ds_numel - first)))
            start += each


def gradients(zero: Any) -> list[Tensor]:
    """Return the reduced gradients of this rank's pieces, including zero padding."""
    if offloads(zero):
        flats = zero.fp32_partitioned_groups_flat if splits(zero) else zero.single_partition_of_fp32_groups
        return [flat.grad for flat in flats if flat.grad is not None]
    return [grad for found in zero.averaged_gradients.values() for grad in found or () if grad is not None]


def begin_backward(zero: Any, gradients_are_final: bool) -> list[Tensor]:
    """Prepare for a backward pass; return the earlier gradients that it would overwrite, to be added back afterward.

    ``gradients_are_final`` says whether a backward pass since the last step has completed the gradients.
    """
    zero.clear_backward_seen_flag()  # DeepSpeed does this in a forward pass, but one may have several backward passes
    if not gradients_are_final or splits(zero):
        return []
    if not offloads(zero):
        return gradients(zero)
    if zero.micro_step_id == 0:
        _keep_offloaded(zero)
    return []


def _keep_offloaded(zero: Any) -> None:
    """Copy the gradients of a window's first backward pass to the buffer to which DeepSpeed adds later gradients."""
    for params, flat in zip(zero.params_in_partition, zero.single_partition_of_fp32_groups, strict=True):
        for parameter in params:
            key = zero.get_param_id(parameter)
            _, first, start, numel = zero.grad_position[key]
            if key not in zero.accumulated_grads_in_cpu:
                kept = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=zero.device)
                zero.accumulated_grads_in_cpu[key] = kept
            part = flat.grad[start : start + numel]
            zero.accumulated_grads_in_cpu[key][first : first + numel] = part
            zero._offload_accumulated_param_ids.add(key)


def complete_backward(zero: Any, earlier: list[Tensor]) -> None:
    """Complete the gradients after the last backward pass of a window; ``earlier`` is from :func:`begin_backward`."""
    for grad, before in zip(gradients(zero), earlier, strict=False):
        if grad is not before:  # otherwise DeepSpeed has added to it
            grad.add_(before)
    if offloads(zero) and zero.micro_step_id > 0:
        zero.finalize_gradient_accumulation_boundary()  # of parameters that the last backward pass did not reach


def clear_gradients(zero: Any) -> None:
    """Discard all gradients, including those that the next backward pass might not replace."""
    zero.zero_grad()
    if splits(zero):
        kept = [zero.grad_partitions_flat_buffer]
        zero._offload_boundary_param_ids = set()
    else:
        kept = list(zero.accumulated_grads_in_cpu.values()) if offloads(zero) else []
        zero._offload_accumulated_param_ids = set()
        zero.micro_step_id = -1
        for found in (zero.averaged_gradients, zero.all_grad_tensors):
            found.update(dict.fromkeys(found))
    if offloads(zero):
        zero.reset_cpu_buffers()
        kept += gradients(zero)
    for grad in kept:
        grad.zero_()


def splits(zero: Any) -> bool:
    """Return True if this is the optimizer of stage 3."""
    return hasattr(zero, "fp16_groups")


def offloads(zero: Any) -> bool:
    """Return True if this optimizer keeps its state and gradients on the host."""
    return zero.offload_optimizer if splits(zero) else zero.cpu_offload


# ---- weights that the user's code changes ----------------------------------------------------------------------------


def trained_parameters(zero: Any) -> list[nn.Parameter]:
    """Return the parameters that DeepSpeed's optimizer trains."""
    groups = zero.fp16_groups if splits(zero) else zero.bit16_groups
    return [parameter for group in groups for parameter in group]


def change_counts(trained: list[nn.Parameter]) -> list[tuple[int | None, int | None]]:
    """Return two change counts for each parameter: one for its values and one for this rank's shard.

    The two counts are the same if each rank holds the whole parameter. DeepSpeed's own steps do not count.
    """
    return [(change_count(one), change_count(getattr(one, "ds_tensor", one))) for one in trained]


@torch.no_grad()
def keep_changes(zero: Any) -> None:
    """Copy changed weights to the separate float32 weights that DeepSpeed trains, so that the next step uses them.

    A float32 weight that still rounds to the 16-bit weight is not replaced, so it keeps its full precision.
    """
    if splits(zero):
        weights = zero.fp16_partitioned_groups_flat
        trained = zero.fp32_partitioned_groups_flat
    else:
        ranks = map(dist.get_rank, zero.real_dp_process_group)
        weights = [parts[rank] for parts, rank in zip(zero.parallel_partitioned_bit16_groups, ranks, strict=True)]
        trained = zero.single_partition_of_fp32_groups
    for group, floats in zip(weights, trained, strict=True):
        if group is None or group is floats or group.numel() != floats.numel():  # on disk, or not separate
            continue
        for some, kept in zip(group.split(_CHUNK), floats.split(_CHUNK), strict=True):
            now = some.to(kept.device)
            same = now.dtype == kept.dtype
            kept.copy_(now if same else torch.where(now == kept.to(now.dtype), kept, now.to(kept.dtype)))


# ---- full tensors ----------------------------------------------------------------------------------------------------


def gather(piece: Piece, values: Tensor, parameter: Tensor, device: torch.device) -> Tensor:
    """Gather the ranks' pieces of a parameter into a tensor of the parameter's shape.

    ``values`` contains this rank's piece and has the layout of ``piece.flat``.
    """
    shape = whole_shape(parameter)
    whole = torch.zeros(shape.numel(), dtype=values.dtype, device=device)
    whole[piece.first : piece.first + piece.numel] = values[piece.start : piece.start + piece.numel].to(device)
    dist.all_reduce(whole)
    return whole.view(shape)


@torch.no_grad()
def scatter(piece: Piece, values: Tensor, whole: Tensor) -> None:
    """Write this rank's piece of ``whole`` (a full tensor in the parameter's shape) to ``values``."""
    part = whole.flatten()[piece.first : piece.first + piece.numel]
    values[piece.start : piece.start + piece.numel].copy_(part)


def optimizer_states(
    optimizer: Any, found: Mapping[int, Piece], parameters: Mapping[int, Tensor], device: torch.device, keep: bool
) -> dict[int, dict[str, Any]]:
    """Return the optimizer's state, keyed by parameter index, with flat tensors gathered into full tensors.

    Other values (such as a step count) are unchanged. ``found`` contains this rank's pieces. Every rank must call this,
    but only ranks that pass ``keep=True`` get the result.
    """
    states: dict[int, dict[str, Any]] = {}
    for index, parameter in parameters.items():
        piece = found.get(id(parameter))
        if piece is None or piece.flat not in optimizer.state:
            continue
        own: dict[str, Any] = {}
        for key, value in optimizer.state[piece.flat].items():
            if isinstance(value, Tensor):
                flat = value.shape == piece.flat.shape
                value = gather(piece, value, parameter, device) if flat else value.detach().clone()
            if keep:
                own[key] = value.cpu() if isinstance(value, Tensor) else value
        states[index] = own
    return states if keep else {}


def load_optimizer_states(
    optimizer: Any, found: Mapping[int, Piece], parameters: Mapping[int, Tensor], states: Mapping[int, Any]
) -> None:
    """Load the result of :func:`optimizer_states`, which any strategy may have saved."""
    optimizer.state.clear()
    step_on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for index, parameter in parameters.items():
        piece = found.get(id(parameter))
        if piece is None or index not in states:
            continue
        own = optimizer.state[piece.flat]
        for key, value in states[index].items():
            if isinstance(value, Tensor) and key != "step" and value.shape == whole_shape(parameter):
                if key not in own:
                    own[key] = torch.zeros_like(piece.flat)
                scatter(piece, own[key], value)
            elif isinstance(value, Tensor) and key not in own:
                own[key] = value.clone() if key == "step" and not step_on_device else value.to(piece.flat.device)
            elif key not in own:
                own[key] = value


def master_weights(
    found: Mapping[int, Piece], parameters: Mapping[int, Tensor], device: torch.device, keep: bool
) -> dict[int, Tensor]:
    """Return the float32 weights that a 16-bit mode trains, keyed by parameter index."""
    weights: dict[int, Tensor] = {}
    for index, parameter in parameters.items():
        if id(parameter) in found:
            piece = found[id(parameter)]
            whole = gather(piece, piece.flat.detach(), parameter, device)
            if keep:
                weights[index] = whole.cpu()
    return weights


def load_master_weights(
    found: Mapping[int, Piece], parameters: Mapping[int, Tensor], weights: Mapping[int, Tensor]
) -> None:
    """Load the result of :func:`master_weights`. The 16-bit weights derived from it are saved separately."""
    for index, parameter in parameters.items():
        if id(parameter) in found and index in weights:
            piece = found[id(parameter)]
            scatter(piece, piece.flat, weights[index])


def model_state(module: nn.Module, keep: bool) -> dict[str, Any]:
    """Return the module's ``state_dict``, gathering partitioned parameters one by one; empty if ``keep`` is False."""
    state = module.state_dict(keep_vars=True)
    whole: dict[int, Tensor] = {}
    for name, value in state.items():
        if not is_split(value):
            state[name] = value.detach() if isinstance(value, Tensor) else value
            continue
        if id(value) not in whole:
            with _together([value]):
                whole[id(value)] = value.detach().cpu().clone() if keep else torch.empty(0)
        state[name] = whole[id(value)]
    return state if keep else {}


def load_model_state(module: nn.Module, state: Mapping[str, Any], strict: bool) -> Any:
    """Like ``module.load_state_dict``, but for partitioned parameters, which are gathered one submodule at a time.

    Raises:
        ValueError: tensors are missing or unexpected, or have a different shape.
    """
    missing: list[str] = []
    unexpected: list[str] = []
    problems: list[str] = []
    versions = saved_versions(state)
    given = dict(state)

    def load(child: nn.Module, prefix: str) -> None:
        own = [p for p in child.parameters(recurse=False) if is_split(p)]
        with _together(own, modifier_rank=0, enabled=bool(own)):
            load_own_tensors(child, given, prefix, versions.get(prefix[:-1], {}), missing, unexpected, problems)
        for name, grandchild in child.named_children():
            load(grandchild, f"{prefix}{name}.")

    load(module, "")
    own_keys = module.state_dict().keys()
    unexpected = [key for key in given if key not in own_keys]
    if strict:
        kinds = (("missing from the checkpoint", missing), ("unexpected", unexpected))
        problems += [f"{len(keys)} {what} ({', '.join(keys[:10])})" for what, keys in kinds if keys]
    if problems:
        raise ValueError(
            f"The checkpoint does not match {type(module).__name__}: {'; '.join(problems)}. Build the module with the "
            "arguments that it had when it was saved."
        )
    return IncompatibleKeys(missing, unexpected)


def _together(parameters: list[Any], **given: Any) -> Any:
    """Context manager in which partitioned parameters are gathered."""
    return import_module("deepspeed.runtime.zero").GatheredParameters(parameters, **given)

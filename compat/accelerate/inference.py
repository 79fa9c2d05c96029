"""``accelerate.prepare_pippy``: distributes a model over processes for inference, with torch.distributed.pipelining."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

from ... import messages
from ...accelerator.nested_tensors import (
    concatenate,
    find_batch_size,
    pad_input_tensors,
    send_to_device,
    slice_tensors,
)
from ...accelerator.process_state import PartialState


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Distribute a model's layers over the processes for inference; return the model. Every process must call this.

    Process 0 reads the inputs. The last process returns the outputs, and all others return None. The processes work on
    different parts of a batch at the same time.

    Args:
        model: the model. torch exports the model's graph with the example inputs, so shapes in the model must not
            depend on the values of tensors.
        split_points: names of the first modules of the second and later parts; ``"auto"`` creates parts with roughly
            equal numbers of parameters.
        no_split_module_classes: names of classes whose modules are not split.
        example_args: example inputs, with the shapes of a batch.
        example_kwargs: example inputs by name.
        num_chunks: number of micro-batches per batch; None means the number of processes.
        gather_output: whether all processes get the outputs.
    """
    state = PartialState()
    world, chunks = state.num_processes, num_chunks or state.num_processes
    model.eval()
    if world == 1:
        return model
    if split_points == "auto":
        split_points = _equal_parts(model, world, no_split_module_classes or ())
    _refuse_other_parts(model, split_points, world)
    rows = find_batch_size([example_args, example_kwargs])
    size = math.ceil(rows / chunks) * chunks
    example = pad_input_tensors((tuple(example_args), example_kwargs or {}), rows, size)
    first = slice_tensors(example, slice(size // chunks))
    spec = dict.fromkeys(split_points, SplitPoint.BEGINNING)
    with torch.no_grad():
        pipe = pipeline(model, first[0], first[1], spec)
    schedule = ScheduleGPipe(pipe.build_stage(state.process_index, state.device), chunks)
    model.hf_split_points = list(split_points)  # type: ignore[assignment]
    model.forward = _forward(schedule, size, gather_output)  # type: ignore[assignment]
    return model


def _refuse_other_parts(model: nn.Module, split_points: Sequence[str], world: int) -> None:
    """Raise an error unless there is one part per process, and each part begins at an existing module."""
    known = [name for name, _ in model.named_modules() if name]
    for name in split_points:
        if name not in known:
            raise ValueError(f"prepare_pippy(split_points=...): {messages.unknown('module', name, known)}")
    if len(split_points) + 1 != world:
        raise ValueError(
            f"prepare_pippy(split_points={list(split_points)!r}) divides the model into {len(split_points) + 1} parts, "
            f"but there are {world} processes, and each process runs one part. Pass {world - 1} split points, or "
            "'auto'."
        )


def _forward(schedule: Any, size: int, gather_output: bool) -> Callable[..., Any]:
    """Return a forward method that runs the model's pipeline on ``size`` rows at a time."""
    state = PartialState()

    def forward(*args: Any, **kwargs: Any) -> Any:
        inputs, found = send_to_device((args, kwargs), state.device), []
        rows = state.strategy.broadcast(find_batch_size(inputs) if state.is_main_process else 0)
        if state.is_main_process:
            inputs = pad_input_tensors(inputs, rows, size)
        with torch.no_grad():
            for start in range(0, rows, size):
                own = slice_tensors(inputs, slice(start, start + size)) if state.is_main_process else ((), {})
                found.append(schedule.step(*own[0], **own[1]))
        output = slice_tensors(concatenate(found), slice(rows)) if state.is_last_process else None
        return state.strategy.gather_objects(output)[-1] if gather_output else output

    return forward


def _equal_parts(model: nn.Module, count: int, whole: Sequence[str]) -> list[str]:
    """Divide a model into equal parts; return the name of the first module of each part except the first part."""
    blocks = [(name, sum(one.numel() for one in block.parameters())) for name, block in _blocks(model, "", whole)]
    if len(blocks) < count:
        raise ValueError(
            f"prepare_pippy: {type(model).__name__} has {len(blocks)} layer{'s' * (len(blocks) != 1)} with "
            f"parameters, but there are {count} processes. Start fewer processes, or pass split_points."
        )
    total, seen, points = sum(size for _, size in blocks), 0, []
    for index, (name, size) in enumerate(blocks):
        left, parts = len(blocks) - index, count - 1 - len(points)
        if index and parts and (seen >= total * (len(points) + 1) / count or left == parts):
            points.append(name)
        seen += size
    return points


def _blocks(module: nn.Module, prefix: str, whole: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return the modules that have parameters, in order, including modules inside lists and sequences."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if type(child).__name__ not in whole and isinstance(child, (nn.ModuleList, nn.Sequential)):
            found += _blocks(child, f"{full}.", whole)
        elif any(True for _ in child.parameters()):
            found.append((full, child))
    return found

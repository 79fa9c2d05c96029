"""Split a module into pipeline stages, and run one stage's part of the user's step.

No network is rewritten or traced. Every stage runs the user's step as written and intercepts calls to a few blocks:
blocks before the stage are skipped, the stage's first block gets the tensors from the previous stage, and the call to
the next stage's first block ends the step and provides the tensors to send. Before its first block, every stage
computes everything that needs no weights: masks, positions, and also noise, because all stages draw the same random
numbers. Values derived from weights are replaced by torch's fake tensors, which have a shape but no values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ... import messages
from ...torch_private import (
    COMPILED_CALL,
    FakeTensor,
    FakeTensorMode,
    current_function_mode,
    own_modules,
    plain_call,
    pytree,
)

_WRITES = ("__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")
_CONTAINERS = (tuple, list, dict)


@dataclass(frozen=True)
class TensorForm:
    """The shape and dtype of a tensor to send between two stages, and whether it requires gradients."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def make(self, device: torch.device) -> Tensor:
        """Create a zero tensor of this form."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device).requires_grad_(self.requires_grad)


@dataclass
class Passage:
    """Facts about a stage, for micro-batches of one form.

    Attributes:
        wanted: indices of the arguments of the stage's first block that the stage must receive.
        inputs: the forms of the arguments that the stage receives.
        sent: indices of the arguments of the next stage's first block that this stage sends.
        outputs: the forms of the arguments that the stage sends.
        skipped: the results of each block before the stage, as fake tensors.
        carried: the stage's blocks that get tensors computed before the stage's first block; None if not known yet.
    """

    wanted: tuple[int, ...] = ()
    inputs: tuple[TensorForm, ...] = ()
    sent: tuple[int, ...] = ()
    outputs: tuple[TensorForm, ...] = ()
    skipped: dict[int, Any] = field(default_factory=dict)
    carried: set[int] | None = None


class Stages:
    """The blocks of a module, in the order in which they run, and the first block of each stage.

    Everything outside the blocks (embeddings, heads, the module's own parameters) belongs to all stages. See
    ModelParallelStrategy for ``split_points``.
    """

    def __init__(
        self, module: nn.Module, count: int, device: torch.device, split_points: Sequence[str] | None = None
    ) -> None:
        self.module, self.count = module, count
        if split_points is None:
            self.names, sizes = _find_blocks(module, count)
            self.starts = even_split(sizes, count)
        else:
            self.names, self.starts = _blocks_at(module, count, split_points)
        self.blocks = [module.get_submodule(name) for name in self.names]
        self._refuse_repeated()
        self.device = device
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}

    def _refuse_repeated(self) -> None:
        seen: dict[int, str] = {}
        for name, block in zip(self.names, self.blocks, strict=True):
            if id(block) in seen:
                raise ValueError(
                    f"{name} is the same module as {seen[id(block)]}, so it would be part of several pipeline stages. "
                    "Give each block its own weights, or use pipeline_parallel=1."
                )
            seen[id(block)] = name

    def range(self, stage: int) -> range:
        """Return the indices of a stage's blocks."""
        return range(self.starts[stage], self.starts[stage + 1] if stage + 1 < self.count else len(self.blocks))

    def stage_of(self, block: int) -> int:
        """Return the stage that a block belongs to."""
        return max(stage for stage in range(self.count) if self.starts[stage] <= block)

    def holders(self) -> dict[str, set[int]]:
        """Return, for each parameter and buffer, the stages that hold it. Tied tensors use their first name."""
        inside: dict[int, set[int]] = {}
        for index, block in enumerate(self.blocks):
            for tensor in (*block.parameters(), *block.buffers()):
                inside.setdefault(id(tensor), set()).add(self.stage_of(index))
        prefixes = tuple(f"{name}." for name in self.names)
        everywhere = set(range(self.count))
        named = [
            *self.module.named_parameters(remove_duplicate=False),
            *self.module.named_buffers(remove_duplicate=False),
        ]
        outside = {id(tensor) for name, tensor in named if not name.startswith(prefixes)}
        found: dict[str, set[int]] = {}
        seen: set[int] = set()
        for name, tensor in named:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = everywhere if id(tensor) in outside else inside[id(tensor)]
        return found

    def without_value(self, leaf: Any) -> Any:
        """Return the fake tensor for a tensor; return any other value unchanged."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        if not is_weight(leaf):
            return self._empty(leaf)
        known, twin = self._twins.get(id(leaf), (None, None))
        if known is leaf and twin is not None:
            return twin
        twin = self._empty(leaf)
        if isinstance(leaf, nn.Parameter) or any(leaf is buffer for buffer in self.module.buffers()):
            self._twins[id(leaf)] = leaf, twin  # but not for a temporary tensor, because a later one may get its id
        return twin

    def _empty(self, tensor: Tensor) -> Tensor:
        with self.fake:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)


class StageRun:
    """Context manager for one run of a step on one stage; it intercepts calls to blocks.

    Args:
        stages: all stages.
        index: the stage.
        passage: facts about the stage; the first runs add to them.
        received: tensors from the previous stage, in the order of ``passage.wanted``.
        stop_at_entry: whether to end the run at the stage's first block, to find out which tensors the stage needs.
        on_entry: function that is called at the stage's first block.
        seen: set that collects the ids of the parameters that the stage's own blocks use; None if not needed.
    """

    def __init__(
        self,
        stages: Stages,
        index: int,
        passage: Passage,
        received: tuple[Tensor, ...] = (),
        stop_at_entry: bool = False,
        on_entry: Callable[[], None] | None = None,
        seen: set[int] | None = None,
    ) -> None:
        self.stages, self.index, self.passage, self.received = stages, index, passage, received
        self.stop_at_entry, self.on_entry, self.seen = stop_at_entry, on_entry, seen
        self.entered = index == 0
        self.mode: _Mode | None = None
        self._before: dict[int, Any] = {}
        self._arrived: dict[int, Tensor] = {}

    def __enter__(self) -> StageRun:
        first, after = self.stages.range(self.index).start, self.stages.range(self.index).stop
        if self.index:
            for block in range(first):
                self._answer(block, partial(self._skip, block))
            self._answer(first, self._report if self.stop_at_entry else self._enter)
            carried = self.passage.carried
            for block in range(first + 1, after) if carried is None else carried:
                self._answer(block, partial(self._carry, block))
        if self.index or self.seen is not None:
            self.mode = _Mode(self.stages, self.seen, on=self.index > 0)
            self.mode.__enter__()
        if after < len(self.stages.blocks):
            self._answer(after, self._leave)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        for block in list(self._before):
            self._restore(block)
        self._leave_mode()
        return False

    def _answer(self, block: int, how: Callable[..., Any]) -> None:
        """Make the function ``how`` handle calls to a block, before hooks and compiled code run."""
        attributes = vars(self.stages.blocks[block])
        self._before[block] = attributes.get(COMPILED_CALL)
        attributes[COMPILED_CALL] = how

    def _restore(self, block: int) -> Callable[..., Any]:
        """Make a block handle its own calls again; return the function that handles them."""
        module = self.stages.blocks[block]
        before = self._before.pop(block)
        vars(module).pop(COMPILED_CALL)
        if before is None:
            return plain_call(module)
        vars(module)[COMPILED_CALL] = before
        return before

    def _leave_mode(self) -> None:
        mode, self.mode = self.mode, None
        if mode is not None:
            mode.on = False
            if current_function_mode() is mode:  # otherwise one of the user's modes is still active inside it
                mode.__exit__(None, None, None)

    # ---- handling calls --------------------------------------------------------------------------------------------

    def _skip(self, block: int, *args: Any, **kwargs: Any) -> Any:
        known = self.passage.skipped
        if block not in known:
            result = plain_call(self.stages.blocks[block])(*args, **kwargs)
            known[block] = pytree.tree_map(self.stages.without_value, result)
        return known[block]

    def _report(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = flatten((args, kwargs))
        seen: set[int] = set()
        wanted = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, FakeTensor) and id(leaf) not in seen:
                seen.add(id(leaf))
                wanted.append(position)
        raise StageExit(len(leaves), tuple(wanted))

    def _enter(self, *args: Any, **kwargs: Any) -> Any:
        call = self._restore(self.stages.range(self.index).start)
        if self.mode is not None:
            self.mode.on = False
        if self.seen is None:
            self._leave_mode()
        leaves, spec = flatten((args, kwargs))
        for position, tensor in zip(self.passage.wanted, self.received, strict=True):
            self._arrived[id(leaves[position])] = tensor
        self.entered = True
        if self.on_entry is not None:
            self.on_entry()
        args, kwargs = pytree.tree_unflatten([self._arrived.get(id(leaf), leaf) for leaf in leaves], spec)
        return call(*args, **kwargs)

    def _carry(self, block: int, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = flatten((args, kwargs))
        if any(id(leaf) in self._arrived for leaf in leaves):
            if self.passage.carried is None:
                self.passage.carried = set()
            self.passage.carried.add(block)
            args, kwargs = pytree.tree_unflatten([self._arrived.get(id(leaf), leaf) for leaf in leaves], spec)
        before = self._before[block]
        return (before or plain_call(self.stages.blocks[block]))(*args, **kwargs)

    def _leave(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = flatten((args, kwargs))
        raise StageExit(len(leaves), tuple(self._arrived.get(id(leaf), leaf) for leaf in leaves))


class StageExit(BaseException):
    """Raised to end a run at a stage's boundary. It is not an error, so ``except Exception`` must not catch it.

    Args:
        count: number of leaves in the block's arguments.
        leaves: the leaves, or the indices of the leaves that the stage needs.
    """

    def __init__(self, count: int, leaves: tuple[Any, ...]) -> None:
        super().__init__("the end of a pipeline stage")
        self.count, self.leaves = count, leaves


class _Mode(TorchFunctionMode):
    """Replaces values derived from weights with fake tensors before a stage's first block; other code runs as written.

    ``on`` is True until the step reaches that block. From that block on, ``seen`` collects the ids of the parameters
    that the step uses.
    """

    def __init__(self, stages: Stages, seen: set[int] | None, on: bool) -> None:
        super().__init__()
        self.stages, self.seen, self.on = stages, seen, on

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.on and self.seen is None:
            return func(*args, **kwargs)
        if not self.on:
            leaves = pytree.tree_leaves((args, kwargs))
            self.seen |= {id(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter)}  # type: ignore[operator]
        elif _has_no_value(args) or _has_no_value(kwargs.values()):
            leaves, spec = pytree.tree_flatten((args, kwargs))
            self._refuse_writing(func, leaves)
            leaves = [self.stages.without_value(leaf) if is_weight(leaf) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
        return func(*args, **kwargs)

    def _refuse_writing(self, func: Any, leaves: list[Any]) -> None:
        name = getattr(func, "__name__", "")
        written = leaves[0] if leaves else None
        writes = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        if writes and isinstance(written, Tensor) and not is_fake(written) and not is_weight(written):
            raise RuntimeError(
                f"The step of {type(self.stages.module).__name__}, before it calls its first block, writes a value "
                f"derived from a weight into another tensor in place ({name}). Later pipeline stages do not have the "
                "weight's value, so they would continue with a wrong tensor. Use an operation that returns a new "
                "tensor, such as torch.cat or torch.where."
            )


def flatten(values: Any) -> tuple[list[Any], Any]:
    """Flatten nested tuples, lists and dicts; all other objects are leaves."""
    return pytree.tree_flatten(values, is_leaf=lambda x: not isinstance(x, _CONTAINERS))


def _has_no_value(values: Any) -> bool:
    """Return True if an operation's arguments contain a weight, or a value derived from a weight."""
    for value in values:
        if isinstance(value, Tensor):
            if isinstance(value, FakeTensor) or is_weight(value):
                return True
        elif isinstance(value, (list, tuple)) and _has_no_value(value):
            return True
    return False


def is_weight(leaf: Any) -> bool:
    """Return True if a value is a parameter, or a tensor that only other processes hold."""
    return isinstance(leaf, nn.Parameter) or (isinstance(leaf, Tensor) and leaf.is_meta)


def is_fake(leaf: Any) -> bool:
    """Return True if a value is a fake tensor, which replaces a result from before the stage's first block."""
    return isinstance(leaf, FakeTensor)


# ---- where to split --------------------------------------------------------------------------------------------------


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _containers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_modules():
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1:
            yield name, child


def _find_blocks(module: nn.Module, count: int) -> tuple[list[str], list[int]]:
    """Return the names and sizes of a module's blocks.

    The blocks are the children of the container with the most parameters, not counting its largest child.
    """
    best: tuple[int, list[str], list[int]] = (0, [], [])
    for name, container in _containers(module):
        sizes = [_size(child) for child in own_modules(container).values() if child is not None]
        score = sum(sizes) - max(sizes)
        enough = sum(size > 0 for size in sizes) >= count
        if score > best[0] and (enough or sum(size > 0 for size in best[2]) < count):
            prefix = f"{name}." if name else ""
            best = (score, [f"{prefix}{child}" for child in own_modules(container)], sizes)
    _, names, sizes = best
    owner = type(module).__name__
    if not names:
        raise ValueError(
            f"{owner} has no nn.ModuleList or nn.Sequential of several layers with parameters, so it cannot be split "
            f"into {count} pipeline stages. Put its repeated blocks into such a container, or use pipeline_parallel=1."
        )
    if (found := sum(size > 0 for size in sizes)) < count:
        raise ValueError(
            f"{owner} has too few blocks with parameters ({found}: {names[0]} ... {names[-1]}) for {count} pipeline "
            "stages. Use fewer stages (pipeline_parallel, virtual_stages), or list smaller modules in split_points."
        )
    return names, sizes


def even_split(sizes: Sequence[int], count: int) -> list[int]:
    """Choose each stage's first block so that the largest stage is as small as possible and no stage is empty.

    Blocks without parameters stay with the block before them.
    """
    heavy = [index for index, size in enumerate(sizes) if size > 0]
    total = [0]
    for index in heavy:
        total.append(total[-1] + sizes[index])
    best = [[math.inf] * (len(heavy) + 1) for _ in range(count + 1)]
    cut = [[0] * (len(heavy) + 1) for _ in range(count + 1)]
    best[0][0] = 0
    for stage in range(1, count + 1):
        for end in range(stage, len(heavy) + 1):
            for start in range(stage - 1, end):
                largest = max(best[stage - 1][start], total[end] - total[start])
                if largest < best[stage][end]:
                    best[stage][end], cut[stage][end] = largest, start
    starts, end = [], len(heavy)
    for stage in range(count, 0, -1):
        end = cut[stage][end]
        starts.append(heavy[end] if end else 0)
    return starts[::-1]


def _blocks_at(module: nn.Module, count: int, split_points: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the names of the blocks (the split points and their siblings), and the first block of each stage."""
    if isinstance(split_points, str) or len(split_points) != count - 1:
        raise ValueError(
            f"split_points={split_points!r} must list the name of the first module of each pipeline stage except the "
            f"first stage. With {count} stages, the list must have {count - 1} name{'s' * (count > 2)}."
        )
    known = [name for name, _ in module.named_modules() if name]
    for name in split_points:
        if name not in known:
            raise ValueError(messages.unknown("split_points name", name, known))
    parents = {name.rpartition(".")[0] for name in split_points}
    first = module.get_submodule(split_points[0])
    if next(iter(module.get_submodule(split_points[0].rpartition(".")[0]).children())) is first:
        # If a stage begins with a decoder's first block, the encoder's blocks come before it.
        parents |= {name for name, container in _containers(module) if type(next(container.children())) is type(first)}
    names = [name for name in known if name.rpartition(".")[0] in parents]
    nested = [name for name in names if any(name.startswith(f"{other}.") for other in names)]
    if nested:
        raise ValueError(
            f"split_points={list(split_points)!r}: {nested[0]} is inside another block, so the model cannot be split "
            "there. Choose blocks that are not inside each other, and not inside a sibling of another split point."
        )
    starts = [0, *(names.index(name) for name in split_points)]
    if starts != sorted(set(starts)):
        raise ValueError(
            f"split_points={list(split_points)!r} must be in the order in which the modules run, and must not "
            f"include the first module ({names[0]})."
        )
    return names, starts

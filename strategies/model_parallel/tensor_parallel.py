"""Split layers across processes, by a user's plan or automatically.

A linear layer can be split by its outputs or by its inputs. Two linear layers are split together if the operations
between them treat each feature, or each attention head, independently. The first layer is then split by its outputs,
and the second by its inputs. Such a pair needs one sum across processes in forward and one in backward (Shoeybi et al.,
Megatron-LM, 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, loss_parallel, parallelize_module
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ... import messages
from ..sharded_tensors import cut_if_fits, from_part
from .tensor_parallel_plan import SplittableLayers, find, find_head, inputs, is_transposed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

STYLES = ("colwise", "rowwise")
#: Allowed relative difference between a network's outputs before and after the split; 16-bit dtypes need this much.
_SAME = 0.05


class Splitter:
    """Splits a module's layers across the processes of a mesh, one at a time and in place.

    Args:
        module: the module; it must be the same on every process.
        mesh: a 1-D mesh.
        plan: a mapping from patterns of layer names (``"blocks.*.attn.q"``) to ``"colwise"``, ``"rowwise"`` or a
            ``ParallelStyle``; if None, find linear layers that can be split.
        logits: whether to split the layer that computes the logits too, by its outputs, for :class:`SplitLoss`.

    Attributes:
        styles: how each layer is split, keyed by the layer's name.

    Raises:
        ValueError: a pattern matches no layer, no layer can be split, or an attention layer's number of heads is not
            divisible by the number of processes.
    """

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Any] | None, logits: bool = False
    ) -> None:
        size = mesh.size()
        self.module, self.mesh, self.automatic = module, mesh, plan is None
        self.found = find(module, size, strict=plan is None)
        self.styles = _from_found(module, self.found, size) if plan is None else _from_plan(module, plan)
        if logits:
            self.styles[find_head(module, size, self.styles)] = ColwiseParallel(use_local_output=False)
        self.attentions = [
            attention
            for attention in self.found.attentions
            if all(_gives_local(self.styles.get(name)) for name in attention.projections)
        ]
        for attention in self.attentions:
            attention.check(size, type(module.get_submodule(attention.name)).__name__)

    def split(self, name: str) -> None:
        """Split one layer, which already has rank 0's weights."""
        parallelize_module(self.module.get_submodule(name), self.mesh, self.styles[name])

    def check(self, name: str) -> None:
        """Compare a network's output before and after its layers are split.

        Raises:
            ValueError: the outputs differ, because an operation between the layers needs all features.
        """
        network, tensors, split_ones = self.module.get_submodule(name), {}, {}
        if not self.automatic or name not in self.found.networks:
            return
        generator = torch.Generator().manual_seed(0)
        for key, parameter in network.named_parameters():
            tensors[key] = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if parameter.is_meta:  # the parameter has no values yet, but random values are enough here
                values = torch.randn(parameter.shape, generator=generator) / max(parameter.shape[-1], 1) ** 0.5
                tensors[key] = values.to(self.mesh.device_type, parameter.dtype)
                split_ones[key] = cut_if_fits(tensors[key], parameter)
        first = tensors[next(iter(tensors))]
        layer = self.module.get_submodule(next(key for key in self.found.columns if key.startswith(f"{name}.")))
        x = torch.randn(2, inputs(layer), generator=generator).to(first)
        training = network.training
        network.eval()
        try:
            with torch.no_grad():
                whole, split = functional_call(network, tensors, x), functional_call(network, split_ones, x)
        except Exception:  # the network's forward does not take a single tensor
            return
        finally:
            network.train(training)
        if not (isinstance(whole, Tensor) and (whole - split).norm() > _SAME * whole.norm()):
            return
        raise ValueError(
            f"The output of {type(network).__name__} ({name}) changes when its layers are split across "
            f"tensor_parallel={self.mesh.size()} processes, because an operation between these layers, such as a "
            "softmax or a normalization, needs all features at once. Pass a plan without this network: "
            "plan={'...': 'colwise', ...}."
        )

    def finish(self) -> None:
        """Set the number of heads that each split attention layer computes in this process, and report the split."""
        changed: dict[str, str] = {}
        for attention in self.attentions:
            owner = self.module.get_submodule(attention.name)
            for attribute in attention.counts:
                whole = getattr(owner, attribute)
                setattr(owner, attribute, whole // self.mesh.size())
                changed[f"{type(owner).__name__}.{attribute}"] = f"{whole} -> {whole // self.mesh.size()}"
        if any(isinstance(layer, nn.TransformerEncoderLayer) for layer in self.module.modules()):
            torch.backends.mha.set_fastpath_enabled(False)  # the fast path does not call the layers' own forward
        _tell(self.styles, self.found, changed, self.mesh.size(), self.automatic)


def _from_found(module: nn.Module, found: SplittableLayers, size: int) -> dict[str, ParallelStyle]:
    if not found.columns:
        why = (
            "; ".join(found.not_split)
            or "it has no attention layer with separate q, k and v, and no pair of linear layers"
        )
        raise ValueError(
            f"ModelParallelStrategy(tensor_parallel={size}) found nothing to split in {type(module).__name__}: {why}. "
            "Pass plan={'layer name': 'colwise' or 'rowwise', ...}, or use data_parallel_shard (strategy='fsdp'), "
            "which works with any model."
        )
    styles: dict[str, ParallelStyle] = {name: Columns() for name in found.columns}
    return styles | {name: Rows() for name in found.rows} | {name: OfEachHead() for name in found.norms}


def _from_plan(module: nn.Module, plan: Mapping[str, Any]) -> dict[str, ParallelStyle]:
    names = [name for name, _ in module.named_modules() if name]
    styles: dict[str, ParallelStyle] = {}
    for pattern, wanted in plan.items():
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(
                f"ModelParallelStrategy(plan=...): the pattern {pattern!r} matches no layer of "
                f"{type(module).__name__}.{messages.did_you_mean(pattern, names)} The module's layers are "
                f"{_listed(names)}."
            )
        style = _style(pattern, wanted)
        for name in matched:
            if type(style) in (Columns, Rows):
                _check_linear(name, module.get_submodule(name))
            styles[name] = style
    return styles


def _style(pattern: str, wanted: Any) -> ParallelStyle:
    if isinstance(wanted, ParallelStyle):
        return wanted
    if isinstance(wanted, str) and wanted in STYLES:
        return Columns() if wanted == "colwise" else Rows()
    raise ValueError(
        messages.unknown(
            "style",
            wanted,
            STYLES,
            f" for {pattern!r} in plan=..., or pass a ParallelStyle from torch.distributed.tensor.parallel",
        )
    )


def _check_linear(name: str, layer: nn.Module) -> None:
    if not isinstance(layer, nn.Linear) and not is_transposed(layer):
        raise ValueError(
            f"ModelParallelStrategy(plan=...): {name!r} is {messages.a(layer)}, but 'colwise' and 'rowwise' only "
            "split linear layers. Pass a ParallelStyle for this layer, such as ColwiseParallel() for an Embedding."
        )


def _listed(names: list[str], limit: int = 12) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _gives_local(style: ParallelStyle | None) -> bool:
    """Return True if a layer's output is a plain tensor that contains only this process's features."""
    if isinstance(style, ColwiseParallel):
        return style.use_local_output and all(p.is_shard() for p in style.output_layouts)
    return isinstance(style, Columns)


def _tell(styles: dict[str, Any], found: SplittableLayers, fewer: dict[str, str], size: int, automatic: bool) -> None:
    said = f"Tensor parallelism across {size} processes: {len(styles)} layers are split"
    if automatic:
        kinds = sorted({".".join("*" if part.isdigit() else part for part in name.split(".")) for name in styles})
        said += f" ({_listed(kinds)})"
        if found.not_split:
            said += f"; not split: {'; '.join(found.not_split[:5])}"
    if fewer:
        said += f". Heads per process: {', '.join(f'{name} {change}' for name, change in fewer.items())}"
    messages.info_once(f"{said}.")


# ---- the loss of split logits ----------------------------------------------------------------------------------------


class SplitLoss(TorchFunctionMode):
    """Context manager in which ``cross_entropy`` works on logits that are split by classes, without gathering them.

    The loss is a plain tensor, the same on every process. Its backward pass must also run in ``loss_parallel()``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.cross_entropy or not isinstance(args[0], DTensor):
            return func(*args, **(kwargs or {}))
        with loss_parallel():
            return func(*args, **(kwargs or {})).full_tensor()

    def bind(self, step: Callable[..., T], training: bool) -> Callable[..., T]:
        """Return a function that runs the step inside this context manager."""

        def with_split_loss(*args: Any) -> T:
            with self:
                return step(*args)

        def evaluating(*args: Any) -> T:  # in inference mode torch would not split cross_entropy
            with self, torch.inference_mode(False), torch.no_grad():
                return step(*args)

        return with_split_loss if training else evaluating


# ---- the two ways to split a linear layer ----------------------------------------------------------------------------


class Columns(ParallelStyle):
    """Splits a linear layer so that each process computes some of the layer's outputs from all inputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        outputs = 1 if is_transposed(module) else 0
        _cut(module, device_mesh, {"weight": Shard(outputs), "bias": Shard(0)})
        module.forward = MethodType(_some_outputs, module)
        return module


class Rows(ParallelStyle):
    """Splits a linear layer's weight along its input dimension, and sums the partial results across ranks.

    Its inputs are the outputs of a :class:`Columns` layer.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        inputs = 0 if is_transposed(module) else 1
        _cut(module, device_mesh, {"weight": Shard(inputs), "bias": Replicate()})
        module.forward = MethodType(_from_some_inputs, module)
        return module


class OfEachHead(ParallelStyle):
    """Handles a layer with the same weights for every head: its gradient is summed across the processes' heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _cut(module, device_mesh, {name: Replicate() for name, _ in _own_parameters(module)})
        module.forward = MethodType(_with_some_heads, module)
        return module


def _cut(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Any]) -> None:
    for name, parameter in _own_parameters(module):
        part = distribute_tensor(parameter.detach(), mesh, [placements[name]], src_data_rank=None)
        part = from_part(part.to_local().clone(), part)
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False))


def _some_outputs(self: Any, x: Tensor) -> Tensor:
    weight = self.weight
    if not isinstance(weight, DTensor):  # called with full weights
        return type(self).forward(self, x)
    bias = None if self.bias is None else self.bias.to_local()
    return _product(self, _shared(x, weight.device_mesh), weight.to_local(), bias)


def _from_some_inputs(self: Any, x: Tensor) -> Tensor:
    weight = self.weight
    if not isinstance(weight, DTensor):
        return type(self).forward(self, x)
    part = DTensor.from_local(_product(self, x, weight.to_local(), None), weight.device_mesh, [Partial()])
    total = part.redistribute(placements=[Replicate()]).to_local()
    return total if self.bias is None else total + self.bias.to_local()


def _with_some_heads(self: Any, *args: Any, **kwargs: Any) -> Any:
    own = {name: p for name, p in _own_parameters(self) if isinstance(p, DTensor)}
    if not own:  # called with plain tensors
        return type(self).forward(self, *args, **kwargs)
    plain = {name: p.to_local(grad_placements=[Partial()]) for name, p in own.items()}
    return functional_call(self, plain, args, kwargs)


def _product(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.t() if is_transposed(layer) else weight, bias)


def _shared(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return an input that several split layers share; its gradient is summed across processes once for all of them."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    found = getattr(x, "_split_over", None)
    if found is None:
        found = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        if not torch.compiler.is_compiling():
            x._split_over = found  # type: ignore[attr-defined]
    return found

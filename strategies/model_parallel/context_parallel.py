"""Split sequences across processes; attention gathers the keys and values of all parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.overrides import TorchFunctionMode

from ... import messages
from ...torch_private import pytree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: The sequence dimension: one number for all tensors of a batch, or a number for each key or index in the batch.
Dims = int | Mapping[Any, int]


class SplitSequences:
    """Runs a step on this process's part of each sequence of the batch.

    Process r of n gets the r-th of n successive parts. The keys and values of all parts are gathered before each
    attention operation (as in Llama 3, Grattafiori et al., 2024), so the result is the same as for the full sequence.

    Args:
        mesh: a 1-D mesh; sequences are split across its processes.
        dims: the sequence dimension of the batch's tensors; tensors that a mapping does not name are not split.
    """

    def __init__(self, mesh: DeviceMesh, dims: Dims) -> None:
        self.mesh, self.dims = mesh, dims

    def bind(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that runs on one part of each sequence and attends to all parts."""
        attention = _Attention(self.mesh)

        def on_a_part(batch: Any, *more: Any) -> Any:
            with attention:
                return step(self.cut(batch), *more)

        return on_a_part

    def cut(self, batch: Any) -> Any:
        """Return this process's part of a batch.

        Raises:
            ValueError: a sequence length is not divisible by the number of processes, or a named tensor is missing.
        """
        if not isinstance(self.dims, Mapping):
            dim = self.dims
            return pytree.tree_map_only(Tensor, lambda tensor: self._part(tensor, dim, "a tensor"), batch)
        named = batch if isinstance(batch, Mapping) else dict(enumerate(batch)) if isinstance(batch, Sequence) else {}
        absent = [key for key in self.dims if key not in named]
        if absent:
            has = f"has the keys {list(named)}" if named else f"is {messages.a(batch)}"
            raise ValueError(
                f"ModelParallelStrategy(context_parallel_dims=...) has the key {absent[0]!r}, but the batch {has}. Use "
                "the batch's keys (indices for a tuple), or one number, the sequence dimension of all tensors."
            )
        parts = {
            key: self._part(value, self.dims[key], repr(key)) if key in self.dims else value
            for key, value in named.items()
        }
        kind: Any = type(batch)
        if isinstance(batch, Mapping):
            return kind(parts)
        return kind(*parts.values()) if hasattr(batch, "_fields") else kind(parts.values())

    def _part(self, tensor: Tensor, dim: int, name: str) -> Tensor:
        count = self.mesh.size()
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"ModelParallelStrategy(context_parallel_dims=...) says that dimension {dim} of {name} is the "
                f"sequence, but its shape is {tuple(tensor.shape)}. Pass the sequence dimension of each tensor: "
                "{key: dim}."
            )
        if tensor.shape[dim] % count:
            raise ValueError(
                f"A sequence of {tensor.shape[dim]} elements ({name}, dimension {dim}) cannot be split evenly across "
                f"context_parallel={count} processes. Pad it to a multiple of {count}, or drop the last elements."
            )
        return tensor.chunk(count, dim)[self.mesh.get_local_rank()]


class _Attention(TorchFunctionMode):
    """Context manager in which attention uses this part's queries with the keys and values of all parts."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            raise NotImplementedError(
                "nn.MultiheadAttention does not work with context_parallel, because its masks cover only one part of "
                "the sequence. Implement the attention with F.scaled_dot_product_attention."
            )
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        if attn_mask is not None:
            raise NotImplementedError(
                f"scaled_dot_product_attention(attn_mask=...) does not work with context_parallel={self.mesh.size()}, "
                f"because a mask of shape {tuple(attn_mask.shape)} covers only one part of the sequence. Use "
                "is_causal=True or no mask. If the batch is padded, make the loss ignore the padding."
            )
        length = query.shape[-2]
        if is_causal and key.shape[-2] != length:
            raise ValueError(
                f"With context_parallel, the queries and keys of a causal attention must come from the same part of a "
                f"sequence, but there are {length} queries and {key.shape[-2]} keys. Split both tensors "
                "(context_parallel_dims=...)."
            )
        seen = (self.mesh.get_local_rank() + 1) * length if is_causal else None
        key, value = (self._all_parts(tensor)[..., :seen, :] for tensor in (key, value))
        mask: Any = None
        if is_causal and seen is not None:
            from torch.nn.attention.bias import causal_lower_right  # importing it takes half a second

            mask = causal_lower_right(length, seen)
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p, **options)

    def _all_parts(self, tensor: Tensor) -> Tensor:
        """Return the full sequence, (..., length, features); a part's gradients are summed across processes."""
        part = DTensor.from_local(tensor, self.mesh, [Shard(tensor.dim() - 2)], run_check=False)
        return part.full_tensor(grad_placements=[Partial()])

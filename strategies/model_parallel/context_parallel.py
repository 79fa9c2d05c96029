"""Sequences split over processes: each computes its part, and attention fetches the keys and values of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from ... import messages
from ...torch_private import pytree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Which dimension of a batch's tensors is the sequence: of all of them, or by key or place in the batch.
Dims = int | Mapping[Any, int]


class SplitSequences:
    """Runs a step on this process's part of each sequence of the batch.

    The parts are successive: process r of n has the r-th n-th. Keys and values of all parts are gathered before each
    attention (as for Llama 3, Grattafiori et al., 2024), so that the result is that of the whole sequence.

    Args:
        mesh: one dimension, over whose processes sequences are split.
        dims: the dimension of the sequence in the batch's tensors; a tensor that a mapping does not name stays whole.
    """

    def __init__(self, mesh: DeviceMesh, dims: Dims) -> None:
        self.mesh, self.dims = mesh, dims

    def bind(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the step with the batch cut and attention reaching over all parts."""
        attention = _Attention(self.mesh)

        def on_a_part(batch: Any, *more: Any) -> Any:
            with attention:
                return step(self.cut(batch), *more)

        return on_a_part

    def cut(self, batch: Any) -> Any:
        """This process's part of a batch.

        Raises:
            ValueError: a length does not divide by the number of processes, or the batch lacks a named tensor.
        """
        if not isinstance(self.dims, Mapping):
            dim = self.dims
            return pytree.tree_map_only(Tensor, lambda tensor: self._part(tensor, dim, "a tensor"), batch)
        named = batch if isinstance(batch, Mapping) else dict(enumerate(batch)) if isinstance(batch, Sequence) else {}
        absent = [key for key in self.dims if key not in named]
        if absent:
            has = f"the keys {list(named)}" if named else f"none: it is {messages.a(batch)}"
            raise ValueError(
                f"ModelParallelStrategy(context_parallel_dims=...) names {absent[0]!r}, but the batch has {has}. Name "
                "its keys, or the places in a tuple; a number alone is the dimension in all tensors."
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
                f"ModelParallelStrategy(context_parallel_dims=...) names dimension {dim} as the sequence of {name}, "
                f"whose shape is {tuple(tensor.shape)}. Name the dimension of each tensor: {{key: dim}}."
            )
        if tensor.shape[dim] % count:
            raise ValueError(
                f"A sequence of {tensor.shape[dim]} elements ({name}, dimension {dim}) cannot be split evenly over "
                f"context_parallel={count} processes. Pad it to a multiple of {count}, or drop the last ones."
            )
        return tensor.chunk(count, dim)[self.mesh.get_local_rank()]


class _Attention(TorchFunctionMode):
    """While active, scaled_dot_product_attention of a part's queries reaches over all parts' keys and values."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            raise NotImplementedError(
                "nn.MultiheadAttention with context_parallel: it makes its own masks for the part of the sequence that "
                "it sees. Write the attention with F.scaled_dot_product_attention."
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
                f"scaled_dot_product_attention(attn_mask=...) with context_parallel={self.mesh.size()}: a mask of "
                f"shape {tuple(attn_mask.shape)} is that of one part of the sequence. Use is_causal=True or no mask; "
                "for padding, let the loss ignore what was padded."
            )
        length = query.shape[-2]
        if is_causal and key.shape[-2] != length:
            raise ValueError(
                f"Causal attention of {length} queries over {key.shape[-2]} keys with context_parallel: both must be "
                "the same part of one sequence. Split both tensors (context_parallel_dims=...)."
            )
        seen = (self.mesh.get_local_rank() + 1) * length if is_causal else None
        key, value = (self._all_parts(tensor)[..., :seen, :] for tensor in (key, value))
        mask: Any = causal_lower_right(length, seen) if is_causal and seen is not None else None
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p, **options)

    def _all_parts(self, tensor: Tensor) -> Tensor:
        """The whole sequence, (..., length, features); its gradient goes back summed to where each part came from."""
        part = DTensor.from_local(tensor, self.mesh, [Shard(tensor.dim() - 2)], run_check=False)
        return part.full_tensor(grad_placements=[Partial()])

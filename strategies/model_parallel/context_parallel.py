"""Split sequences across processes; attention gathers the keys and values of all parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ... import messages
from ...torch_private import pytree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DIMS = "ModelParallelStrategy(context_parallel_dims=...)"
#: The sequence dimension: one number for all tensors of a batch, or a number for each key or index in the batch.
Dims = int | Mapping[Any, int]


class SplitSequences:
    """Runs a step on this process's part of each sequence of the batch.

    Process r of n gets the r-th of n successive parts. The keys and values of all parts are gathered before each
    attention operation (as in Llama 3, Grattafiori et al., 2024), so the result is the same as for the full sequence.

    Args:
        mesh: a 1-D mesh; sequences are split across its processes.
        dims: the sequence dimension of the batch's tensors, either one number for all tensors, or a mapping; tensors
            that the mapping does not name are not split.

    Attributes:
        attention: context manager in which attention covers all parts. Backward passes that run forward passes again
            (activation checkpointing) also need this context.
    """

    def __init__(self, mesh: DeviceMesh, dims: Dims) -> None:
        self.mesh, self.dims = mesh, dims
        self.attention = _Attention(mesh)
        self._whole = WeakTensorKeyDictionary()

    def bind(self, step: Callable[..., Any], training: bool) -> Callable[..., Any]:
        """Return a training step that runs on one part of each sequence, with attention to all parts.

        If the user's loop splits the sequences (``dims`` is empty), return a step that hides padding without a mask.
        """
        if self.dims == {}:
            return self.without_padding_mask(step)
        if not training:
            return step

        def on_a_part(batch: Any, *more: Any) -> Any:
            with self.attention:
                return step(self.cut(batch), *more)

        return on_a_part

    @contextmanager
    def split(self, tensors: Sequence[Tensor], dims: Sequence[int], unrestored: Collection[Tensor]) -> Iterator[None]:
        """Context manager in which tensors hold this process's part of each sequence, and attention covers all parts.

        Args:
            tensors: the tensors to change in place.
            dims: the sequence dimension of each tensor.
            unrestored: the tensors that are not restored afterwards.
        """
        said = "maybe_context_parallel(buffer_seq_dims=...)"
        kept = {id(tensor) for tensor in unrestored}
        whole = {id(tensor): tensor.data for tensor in tensors}
        parts = [
            self._part(tensor.data, dim, f"buffers[{index}]", said).contiguous()
            for index, (tensor, dim) in enumerate(zip(tensors, dims, strict=True))
        ]
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.data = part
        for tensor in tensors:
            self._whole[tensor] = whole[id(tensor)]
        try:
            with self.attention:
                yield
        finally:
            self._whole.clear()
            self.attention.padded = False
            for tensor in tensors:
                if id(tensor) not in kept:
                    tensor.data = whole[id(tensor)]

    def without_padding_mask(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a model's forward without ``attention_mask``, if causal attention hides the padding anyway.

        The mask is dropped because, once split, it covers only one part of the sequence. With causal attention, padding
        at the end has no effect on the tokens before it. The mask is copied to the host to check this.
        """

        def forward_without(*args: Any, **kwargs: Any) -> Any:
            self.attention.padded = False
            mask = kwargs.get("attention_mask")
            whole = self._whole.get(mask) if isinstance(mask, Tensor) else None
            if whole is None or whole.dim() != 2:
                return forward(*args, **kwargs)
            counts = whole != 0
            if bool((counts[:, 1:] & ~counts[:, :-1]).any()):
                raise NotImplementedError(
                    "attention_mask hides tokens that precede visible tokens. With split sequences, only padding at "
                    "the end of each sequence can be hidden. Pad on the right (padding_side='right')."
                )
            self.attention.padded = not bool(counts.all())
            return forward(*args, **{**kwargs, "attention_mask": None})

        return forward_without

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
                f"{_DIMS} has the key {absent[0]!r}, but the batch {has}. Use the batch's keys (indices for a tuple), "
                "or pass one number as the sequence dimension of all tensors."
            )
        parts = {
            key: self._part(value, self.dims[key], repr(key)) if key in self.dims else value
            for key, value in named.items()
        }
        kind: Any = type(batch)
        if isinstance(batch, Mapping):
            return kind(parts)
        return kind(*parts.values()) if hasattr(batch, "_fields") else kind(parts.values())

    def _part(self, tensor: Tensor, dim: int, name: str, said: str = _DIMS) -> Tensor:
        count = self.mesh.size()
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"{said} sets {dim} as the sequence dimension of {name}, which has shape {tuple(tensor.shape)}. Pass "
                "the sequence dimension of each tensor."
            )
        if tensor.shape[dim] % count:
            raise ValueError(
                f"A sequence of {tensor.shape[dim]} elements ({name}, dimension {dim}) cannot be split evenly across "
                f"context_parallel={count} processes. Pad the sequence to a multiple of {count}, or drop its last "
                "elements."
            )
        return tensor.chunk(count, dim)[self.mesh.get_local_rank()]


def check_layers(module: nn.Module) -> None:
    """Raise a NotImplementedError if a layer would compute a different result on a part than on the full sequence.

    The check recognizes torch's recurrent layers and the configurations of models from transformers.
    """
    for name, part in module.named_modules():
        config = getattr(part, "config", None)
        attention = getattr(config, "_attn_implementation", None)
        if isinstance(attention, str) and attention != "sdpa":
            raise NotImplementedError(
                f"{name or type(part).__name__} has attn_implementation={attention!r}, which would attend only to the "
                "part of a sequence on one process. Load the model with attn_implementation='sdpa'."
            )
        kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
        if isinstance(part, nn.RNNBase):
            found = type(part).__name__
        elif isinstance(kinds, (list, tuple)):
            found = ", ".join(sorted({str(kind) for kind in kinds} - {"full_attention"}))
        else:
            slides = isinstance(window, int) and getattr(config, "use_sliding_window", True)
            found = f"sliding_window={window}" if slides else ""
        if found:
            raise NotImplementedError(
                f"{name or type(part).__name__} has layers ({found}) that need more of a sequence than the part on one "
                "process. Context parallelism (context_parallel, cp_size) supports full attention only. Use another "
                "model, or do not split sequences."
            )


class _Attention(TorchFunctionMode):
    """Context manager in which attention uses this part's queries with the keys and values of all parts.

    Entering the context again inside itself has no effect.

    Attributes:
        padded: whether the sequences end with padding that only causal attention hides.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self._attends = self.padded = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not self._attends:
            self._attends = True
            try:
                return self._attend(*args, **kwargs)
            finally:
                self._attends = False
        if func is F.multi_head_attention_forward:
            raise NotImplementedError(
                "nn.MultiheadAttention does not work with context_parallel, because its masks cover only one part of "
                "the sequence. Implement the attention with F.scaled_dot_product_attention."
            )
        if func is Tensor.backward:
            return self._run_backward(*args, **kwargs)
        return func(*args, **kwargs)

    def _run_backward(
        self,
        tensor: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Run ``tensor.backward`` inside this context, for forward passes that activation checkpointing repeats.

        Torch would leave the context in ``tensor.backward``, so this method runs backward from the tensor's gradient
        edge.
        """
        if inputs is not None or not tensor.requires_grad or (gradient is None and tensor.numel() != 1):
            tensor.backward(gradient, retain_graph, create_graph, inputs)
        else:
            edge = get_gradient_edge(tensor)
            gradient = torch.ones_like(tensor) if gradient is None else gradient
            with self:
                torch.autograd.backward(edge, gradient, retain_graph, create_graph)  # type: ignore[arg-type]

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
        if self.padded and not is_causal:
            raise NotImplementedError(
                "The sequences are padded, and attention is not causal, so attention would include the padding. With "
                "split sequences, masks are not supported: use causal attention, or batches without padding."
            )
        length = query.shape[-2]
        if is_causal and key.shape[-2] != length:
            raise ValueError(
                "With context_parallel, the queries and keys of causal attention must come from the same part of a "
                f"sequence, but there are {length} queries and {key.shape[-2]} keys. Split both tensors."
            )
        seen = (self.mesh.get_local_rank() + 1) * length if is_causal else None
        key, value = (self._all_parts(tensor)[..., :seen, :] for tensor in (key, value))
        mask: Any = None
        if is_causal and seen is not None:
            from torch.nn.attention.bias import causal_lower_right  # importing it takes half a second

            mask = causal_lower_right(length, seen)
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p, **options)

    def _all_parts(self, tensor: Tensor) -> Tensor:
        """Return the full sequence, shape (..., length, features); gradients of a part are summed across processes."""
        part = DTensor.from_local(tensor, self.mesh, [Shard(tensor.dim() - 2)], run_check=False)
        return part.full_tensor(grad_placements=[Partial()])

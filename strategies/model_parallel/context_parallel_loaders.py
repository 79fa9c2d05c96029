"""Split sequences across processes in prepared loaders, as DeepSpeed's Ulysses does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ... import messages
from ...torch_private import pytree
from .context_parallel import SplitSequences

_SAID = "ParallelismConfig(sp_size=...)"


class SplitBatches(SplitSequences):
    """Cuts batches in the loader, and makes attention cover all parts of a sequence in forward passes on one part.

    Dimension 1 of every tensor of a batch is the sequence dimension. ``shift_labels``, the next token at each position,
    replaces ``labels``, because the token that follows a part's last token is in the next part.
    """

    def bind(self, step: Callable[..., Any], training: bool) -> Callable[..., Any]:
        on_a_part = self.without_padding_mask(step)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(one, Tensor) and one in self._whole for one in pytree.tree_leaves((args, kwargs))):
                with self.attention:
                    return on_a_part(*args, **kwargs)
            if training:
                raise RuntimeError(
                    f"{_SAID} splits the sequences of batches, but a forward pass with gradients enabled got no tensor "
                    "from a prepared loader. Prepare the loader in the same call as the model, pass the tensors of "
                    "its batches unchanged, and run evaluation under torch.no_grad()."
                )
            return step(*args, **kwargs)

        return forward

    def cut(self, batch: Any) -> Any:
        """Return this process's part of a batch.

        Raises:
            ValueError: the batch lacks ``input_ids`` or ``position_ids``, or its sequences cannot be split evenly.
        """
        names = list(batch) if isinstance(batch, Mapping) else []
        if "input_ids" not in names or "position_ids" not in names:
            has = f"has the keys {names}" if names else f"is {messages.a(batch)}"
            raise ValueError(
                f"{_SAID} needs batches with input_ids and position_ids, but the batch {has}. Return a dict from "
                "collate_fn, with position_ids=torch.arange(length) for each sequence. A process has only part of "
                "a sequence, and cannot infer the positions from it."
            )
        named = dict(batch)
        labels = named.pop("labels", None)
        if labels is not None:
            named.setdefault("shift_labels", F.pad(labels, (0, 1), value=-100)[..., 1:])
        length = named["input_ids"].shape[1]
        for key, value in named.items():
            if isinstance(value, Tensor):
                if value.dim() < 2 or value.shape[1] != length:
                    raise ValueError(
                        f"{_SAID} splits dimension 1 of every tensor, but {key!r} has shape {tuple(value.shape)} and "
                        f"input_ids has {length} tokens. Remove {key!r} from the batch, or pad it to the same length."
                    )
                named[key] = part = self._part(value, 1, repr(key), _SAID).contiguous()
                self._whole[part] = value if key == "attention_mask" else None
        kind: Any = type(batch)
        return kind(named)

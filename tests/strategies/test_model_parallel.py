"""One mesh of processes: layers split over some, replicas and shards over others; the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline import Trainer, TrainingModule
from paceline.strategies import ModelParallelStrategy, Strategy
from paceline.strategies.model_parallel import find_sizes

WORDS, WIDTH, LENGTH, BATCH = 13, 16, 6, 4
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, self.num_heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.network = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before(x)))
        return x + self.dropout(self.network(self.between(x)))


class Language(TrainingModule):
    """Predicts the next word; embedding and head have one weight."""

    def __init__(self, heads: int = 4, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block(WIDTH, heads, dropout) for _ in range(2))
        self.to(dtype)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def batches(count: int, size: int = BATCH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(WORDS, (count, size, LENGTH + 1), generator=generator))


def trained(
    strategy: str | Strategy, module: TrainingModule, data: list[Any], accumulate: int = 1, **more: Any
) -> tuple[dict[str, Tensor], Trainer]:
    """The weights after one pass over the data, whole; on rank 0."""
    torch.set_num_threads(1)
    trainer = Trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=accumulate, **QUIET, **more)
    trainer.fit(module, data)
    return trainer.strategy.model_state(module), trainer


def mine(strategy: ModelParallelStrategy, batch: Tensor) -> Tensor:
    """The share of a global batch that a rank sees."""
    return batch.chunk(strategy.num_data_ranks)[strategy.data_rank]


def departure(state: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest difference of a weight, relative to the largest value of its tensor."""
    assert state.keys() == reference.keys()
    return max(float((state[k] - r).abs().max() / r.abs().max()) for k, r in reference.items())


def tensor_parallel_run(accumulate: int, more: dict[str, Any]) -> Any:
    state, trainer = trained("model_parallel", Language(), batches(10), accumulate, **more)
    kinds = {name: type(p.data) for name, p in trainer.training_module.named_parameters()}
    return state, kinds, trainer.callback_metrics["loss"]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_split_layers_train_like_one_process(accumulate: int) -> None:
    exact, _ = trained("cpu", Language(dtype=torch.float64), batches(10), accumulate)
    (state, kinds, loss), (other, _, other_loss) = ranks(2, tensor_parallel_run, accumulate, {})
    assert departure(state, exact) < 1e-6
    assert kinds["blocks.0.attention.q.weight"] is DTensor
    print(departure(state, exact), loss, other_loss)

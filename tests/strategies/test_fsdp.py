"""FSDP on real gloo processes: the numbers of one process with the global batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from processes import RanksFailed, ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline import Trainer, TrainingModule
from paceline.strategies import FSDPStrategy

VOCABULARY, WIDTH, LENGTH = 11, 8, 5
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(y := self.norm(x), y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Transformer(TrainingModule):
    """Next-token prediction; the head is used as a weight in ``training_step``, tied to the embedding or not."""

    def __init__(self, tied: bool = False, optimizer: Any = None, seed: int = 1) -> None:
        super().__init__()
        generator = torch.random.get_rng_state()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        if tied:
            self.head.weight = self.embedding.weight
        self.optimizer = optimizer or partial(torch.optim.SGD, lr=0.2, momentum=0.9)
        torch.random.set_rng_state(generator)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.head.weight) * self.scale

    def loss(self, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Tokens(Dataset):
    def __init__(self, count: int) -> None:
        self.data = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


def loader(rank: int = 0, world: int = 1, batches: int = 10, size: int = 8) -> DataLoader:
    """``batches`` global batches of ``size`` samples, of which each rank sees its share."""
    share = size // world
    order = [b * size + rank * share + i for b in range(batches) for i in range(share)]
    return DataLoader(Tokens(batches * size), batch_size=share, sampler=order)


def train(module: TrainingModule, strategy: Any = "single_device", world: int = 1, **arguments: Any) -> Trainer:
    import os

    rank = int(os.environ.get("RANK", 0))
    batches = arguments.pop("batches", 10)
    path = arguments.pop("ckpt_path", None)
    trainer = Trainer(strategy=strategy, max_epochs=1, **{**QUIET, **arguments})
    trainer.fit(module, loader(rank, world, batches), ckpt_path=path)
    return trainer


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return trainer.strategy.model_state(trainer.training_module)


def on_ranks(world: int, make: Any, strategy: Any, **arguments: Any) -> dict[str, Tensor]:
    """The weights after a fit on ``world`` processes."""

    def run() -> Any:
        return weights(train(make(), strategy(), world, **arguments))

    return ranks(world, run)[0]


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference between two states, relative to the largest weight of the tensor."""
    assert list(one) == list(other)
    return max(float((one[k] - other[k]).abs().max() / one[k].abs().max()) for k in one)


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.2, momentum=0.9),
    "adamw": partial(
        torch.optim.AdamW, lr=1e-2, eps=1e-4
    ),  # smaller, it would divide rounding errors by rounding errors
}
#: What float64 leaves of another order of summation after ten steps.
EXACT = 1e-11


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ten_steps_equal_one_process_with_the_global_batch(optimizer: str, tied: bool, accumulate: int) -> None:
    make = partial(Transformer, tied, OPTIMIZERS[optimizer])
    how = {"accumulate_grad_batches": accumulate, "precision": "64-true"}
    assert furthest(weights(train(make(), **how)), on_ranks(2, make, FSDPStrategy, **how)) < EXACT


def test_ten_steps_in_float32_equal_one_process_to_a_few_roundings() -> None:
    assert furthest(weights(train(Transformer())), on_ranks(2, Transformer, FSDPStrategy)) < 2e-6

"""The networks of the parity tests: a CNN whose batch norm is frozen, a transformer, one with tied weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline import TrainingModule

WIDTH, HEADS, WORDS, LENGTH = 16, 4, 29, 6


class ConvNet(TrainingModule):
    """Classifies small pictures. Its batch norm stands still: with moving statistics it depends on who sees what."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        norm = nn.BatchNorm2d(8)
        norm.running_mean.normal_()  # type: ignore[union-attr]
        norm.eval()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            norm,
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * 9, 24),
            nn.ReLU(),
            nn.Linear(24, 5),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pictures, labels = batch
        loss = F.cross_entropy(self.net(pictures), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        # Without biases: the gradient of a key's is 0, and AdamW would make steps of its rounding errors.
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.fc2(F.gelu(self.fc1(self.mlp_norm(x))))


class Decoder(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Language(TrainingModule):
    """Predicts the next word."""

    tied = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = Decoder(self.tied)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (words,) = batch
        scores = self.net(words[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            self.parameters(), lr=1e-3, eps=1e-3
        )  # at a gradient near 0 AdamW multiplies its rounding by lr / eps


class TiedLanguage(Language):
    """The same with one weight for words that go in and words that come out."""

    tied = True


def loader(module: type[TrainingModule], batch_size: int = 8, batches: int = 6) -> DataLoader[Any]:
    """Data that fit a module."""
    generator = torch.Generator().manual_seed(3)
    count = batch_size * batches
    if module is ConvNet:
        pictures = torch.randn(count, 1, 8, 8, generator=generator)
        return DataLoader(TensorDataset(pictures, torch.randint(5, (count,), generator=generator)), batch_size)
    return DataLoader(TensorDataset(torch.randint(WORDS, (count, LENGTH + 1), generator=generator)), batch_size)

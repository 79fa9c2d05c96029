"""A loop of a user's own with everything random in it, for tests of states: ``from loops import Loop``."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline import Accelerator

EPOCHS = 2


class Noisy(Dataset[Any]):
    """Samples that random numbers of three libraries change each time they are loaded."""

    def __init__(self, count: int = 28) -> None:
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        noise = torch.rand(4) + random.random() + float(numpy.random.rand())
        return self.x[index] + 0.1 * noise, self.x[index].sum().reshape(1), index


class Counter:
    """What a user registers."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


class Loop:
    """One program: it makes everything, loads a state if there is one, and trains.

    Attributes:
        seen: indices of the samples of each batch on this rank.
    """

    def __init__(
        self, *, workers: int = 0, batch: int = 2, num_items: bool = False, seed: int = 0, **given: Any
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        given.setdefault("gradient_accumulation_steps", 3)
        if callable(given.get("strategy")):
            given["strategy"] = given["strategy"]()
        self.accelerator = Accelerator(cpu=True, **given)
        self.num_items = num_items
        self.seen: list[list[int]] = []
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        loader = DataLoader(Noisy(), batch, shuffle=True, num_workers=workers)
        self.counter = Counter()
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.accelerator.register_for_checkpointing(self.counter)

    def step(self, batch: Any) -> None:
        """One micro-batch."""
        x, y, index = batch
        self.seen.append(index.tolist())
        with self.accelerator.accumulate(self.model):
            loss = nn.functional.mse_loss(self.model(x), y)
            items = int(index.sum()) + 1 if self.num_items else None
            self.accelerator.backward(loss, num_items=items)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.counter.batches += 1

    def run(self, save_at: int | None = None, folder: Any = None, stop: bool = True) -> list[Tensor]:
        """Train to the end, from wherever it is; after so many batches save, and stop.

        Returns:
            All weights and buffers; of those that lie in parts, this rank's.
        """
        for _ in range(self.loader.epoch, EPOCHS):
            for batch in self.loader:
                self.step(batch)
                if self.counter.batches == save_at:
                    self.accelerator.save_state(folder)
                    if stop:
                        return []
        return self.weights()

    def weights(self) -> list[Tensor]:
        """All weights and buffers; of those that lie in parts, this rank's."""
        values = self.model.state_dict().values()
        return [getattr(value, "_local_tensor", value).detach().clone() for value in values]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """To the bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))

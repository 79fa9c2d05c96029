"""``lightning.pytorch.demos``: small models and datasets that libraries built on Lightning use in their tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from ...data.datamodule import DataModule
from ...trainer.module import TrainingModule


class RandomDataset(Dataset[Tensor]):
    """A dataset of ``length`` normally distributed vectors, each with ``size`` numbers."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomDictDataset(Dataset[dict[str, Tensor]]):
    """A dataset of dicts with two vectors, ``a`` and ``b``."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"a": self.data[index], "b": self.data[index] + 2}

    def __len__(self) -> int:
        return self.len


class RandomIterableDataset(IterableDataset[Tensor]):
    """A stream of ``count`` normally distributed vectors, each with ``size`` numbers."""

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count = size, count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.randn(self.size) for _ in range(self.count))


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """A :class:`RandomIterableDataset` that has a length."""

    def __len__(self) -> int:
        return self.count


class BoringModel(TrainingModule):
    """A linear layer with 32 inputs and 2 outputs that learns to output ones; it has a loader for every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, shape (batch, 2)."""
        return self.layer(x)

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the mean squared error against ``labels``, which are ones by default."""
        return F.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Any) -> Tensor:
        """Return a batch's loss."""
        return self.loss(self(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"x": self.step(batch)}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"y": self.step(batch)}

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64))

    def val_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64))

    def test_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64))

    def predict_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64))


class ManualOptimBoringModel(BoringModel):
    """A :class:`BoringModel` with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class DemoModel(TrainingModule):
    """A linear layer with 32 inputs and ``out_dim`` outputs."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(32, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output after ReLU, shape (batch, out_dim)."""
        return torch.relu(self.l1(x.view(x.size(0), -1)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class BoringDataModule(DataModule):
    """Provides 64 random vectors of 32 numbers for each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.random_full = RandomDataset(32, 64 * 4)

    def setup(self, stage: str) -> None:
        parts = [Subset(self.random_full, range(start, start + 64)) for start in range(0, 256, 64)]
        if stage == "fit":
            self.random_train = parts[0]
        if stage in ("fit", "validate"):
            self.random_val = parts[1]
        if stage == "test":
            self.random_test = parts[2]
        if stage == "predict":
            self.random_predict = parts[3]

    def train_dataloader(self) -> Any:
        return DataLoader(self.random_train)

    def val_dataloader(self) -> Any:
        return DataLoader(self.random_val)

    def test_dataloader(self) -> Any:
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.random_predict)


class IterableBoringDataModule(DataModule):
    """Provides two streams of 16 random vectors for training and two for validation, each with its own loader."""

    def __init__(self) -> None:
        super().__init__()
        self.train_datasets = [RandomIterableDataset(4, 16) for _ in range(2)]
        self.val_datasets = [RandomIterableDataset(4, 16) for _ in range(2)]

    def train_dataloader(self) -> Any:
        return [DataLoader(dataset, batch_size=4) for dataset in self.train_datasets]

    def val_dataloader(self) -> Any:
        return [DataLoader(dataset, batch_size=4) for dataset in self.val_datasets]

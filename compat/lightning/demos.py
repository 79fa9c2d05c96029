"""Small models and data for tests and bug reports, with the names of ``lightning.pytorch.demos.boring_classes``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from ...data.datamodule import DataModule
from ...trainer.module import TrainingModule

_FEATURES, _SAMPLES = 32, 64


class RandomDataset(Dataset[Tensor]):
    """``length`` samples of ``size`` normal random numbers."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomDictDataset(RandomDataset):
    """The same samples as dicts: ``a`` is the sample ``x``, ``b`` is ``2 * x + 1``."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]
        return {"a": self.data[index], "b": 2 * self.data[index] + 1}


class RandomIterableDataset(IterableDataset[Tensor]):
    """A stream of ``count`` samples of ``size`` normal random numbers."""

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count = size, count

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.count):
            yield torch.randn(self.size)


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """The same stream, with a length."""

    def __len__(self) -> int:
        return self.count


def _loader() -> DataLoader[Any]:
    return DataLoader(RandomDataset(_FEATURES, _SAMPLES))


class BoringModel(TrainingModule):
    """One linear layer from 32 features to 2, trained towards ones; its loaders yield random batches of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean squared error against ``labels``, ones by default."""
        return functional.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Any) -> Tensor:
        """The loss of a batch."""
        return self.loss(self(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"x": self.step(batch)}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Any:
        return _loader()

    def val_dataloader(self) -> Any:
        return _loader()

    def test_dataloader(self) -> Any:
        return _loader()

    def predict_dataloader(self) -> Any:
        return _loader()


class ManualOptimBoringModel(BoringModel):
    """The same with manual optimization."""

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
    """One linear layer from 32 features to ``out_dim``; its loss is the sum of its outputs."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(_FEATURES, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.l1(x.view(x.size(0), -1)))

    def training_step(self, batch: Any, batch_nb: int) -> Tensor:
        return self(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class BoringDataModule(DataModule):
    """64 random samples of 32 features for each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.random_full: Dataset[Any] = RandomDataset(_FEATURES, 4 * _SAMPLES)

    def setup(self, stage: str) -> None:
        parts = [Subset(self.random_full, range(start, start + _SAMPLES)) for start in range(0, 256, _SAMPLES)]
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

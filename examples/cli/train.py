"""A training program whose command line and config files come from its classes.

    python train.py fit --config config.yaml
    python train.py fit --config config.yaml --model.hidden 64 --optimizer SGD --optimizer.lr 0.05
    python train.py fit --config config.yaml --trainer.fast_dev_run 1
    python train.py test --config config.yaml --ckpt_path runs/.../last.ckpt
    python train.py fit --help
    python train.py fit --config config.yaml --print_config

Needs jsonargparse: pip install ".[cli]".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from paceline import DataModule, TrainingModule
from paceline.cli import ArgumentParser, TrainerCLI


class Points(DataModule):
    """Points around the corners of a cube; the class of a point is its corner.

    Args:
        count: number of points.
        dimensions: of the cube.
        batch_size: points in a batch.
        noise: standard deviation around a corner.
    """

    def __init__(self, count: int = 2048, dimensions: int = 3, batch_size: int = 64, noise: float = 0.3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.num_classes = 2**dimensions

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)
        count, dimensions = self.hparams.count, self.hparams.dimensions
        labels = torch.randint(self.num_classes, (count,), generator=generator)
        corners = torch.stack([labels >> bit & 1 for bit in range(dimensions)], 1) * 2.0 - 1
        points = corners + self.hparams.noise * torch.randn(count, dimensions, generator=generator)
        parts = random_split(TensorDataset(points, labels), [0.8, 0.1, 0.1], generator)
        self.train_points, self.val_points, self.test_points = parts

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_points, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_points, self.hparams.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test_points, self.hparams.batch_size)


class Classifier(TrainingModule):
    """A network with one hidden layer.

    Args:
        inputs: dimensions of a point; linked to the data.
        classes: number of classes; linked to the data.
        hidden: width of the hidden layer.
        activation: what stands between the layers.
    """

    def __init__(self, inputs: int, classes: int, hidden: int = 32, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(inputs, hidden), activation or nn.ReLU(), nn.Linear(hidden, classes))

    def loss(self, batch: Any, name: str) -> Tensor:
        points, labels = batch
        scores = self.layers(points)
        loss = nn.functional.cross_entropy(scores, labels)
        self.log(f"{name}_loss", loss)
        self.log(f"{name}_accuracy", (scores.argmax(1) == labels).float().mean(), prog_bar=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, "test")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class CommandLine(TrainerCLI):
    """The data sets the sizes of the network."""

    def add_arguments_to_parser(self, parser: ArgumentParser) -> None:
        parser.link_arguments("data.dimensions", "model.inputs")
        parser.link_arguments("data.num_classes", "model.classes", apply_on="instantiate")


def main(args: list[str] | None = None) -> TrainerCLI:
    """Run the command line; ``args`` are its words."""
    return CommandLine(Classifier, Points, args=args, trainer_defaults={"accelerator": "cpu"})


if __name__ == "__main__":
    main()

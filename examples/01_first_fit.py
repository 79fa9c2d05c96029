"""Handwritten digits: a small convolutional network, from the data to a picture of its mistakes, in a minute on a CPU.

    python examples/01_first_fit.py                # train, test, draw
    python examples/01_first_fit.py --epochs 30    # go on where the last run stopped
    tensorboard --logdir runs/first_fit            # look at the curves

Needs scikit-learn (for the 1,797 images it ships) and matplotlib: pip install ".[examples]".
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from paceline import Callback, DataModule, Trainer, TrainingModule, seed_everything
from paceline.callbacks import ModelCheckpoint
from paceline.loggers import TensorBoardLogger

CLASSES = 10


class Digits(DataModule):
    """Images of 8 x 8 gray values in [0, 1], split 60 / 20 / 20 the same way every time."""

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
        self.train, self.val, self.test = random_split(data, [0.6, 0.2, 0.2], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=256)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=256)


class Classifier(TrainingModule):
    def __init__(self, width: int = 32, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(8 * width, CLASSES),
        )  # fmt: skip
        self.val_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.test_accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels))
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.test_accuracy(self(images), labels)
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


class Curve(Callback):
    """Remembers the losses of every epoch, over a resume too: what ``state_dict`` returns is in each checkpoint."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        metrics = trainer.callback_metrics
        keep = {"training loss": "train_loss_epoch", "validation loss": "val_loss"}
        self.epochs.append({label: float(metrics[name]) for label, name in keep.items()})

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


def draw(path: Path, curve: Curve, model: Classifier, data: Digits) -> None:
    """The learning curve on the left, the test images that the model gets wrong on the right."""
    from matplotlib.figure import Figure

    images, labels = next(iter(DataLoader(data.test, batch_size=len(data.test))))
    with torch.no_grad():
        guesses = model.cpu().eval()(images).argmax(1)
    wrong = (guesses != labels).nonzero().flatten().tolist()
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    for label in curve.epochs[0]:
        axes.plot(range(1, len(curve.epochs) + 1), [epoch[label] for epoch in curve.epochs], label=label)
    axes.set(xlabel="epoch", ylabel="cross-entropy", yscale="log")
    axes.legend()
    right.suptitle(f"{len(wrong)} wrong of {len(labels)}")
    tiles = right.subplots(3, 4).flatten().tolist()
    for axes, i in zip(tiles, wrong, strict=False):
        axes.imshow(images[i, 0], cmap="gray_r")
        axes.set_title(f"{labels[i]}, not {guesses[i]}", fontsize=9)
    for axes in tiles:
        axes.axis("off")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/first_fit"), help="folder for log, checkpoints, picture")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--fast", action="store_true", help="a few batches only, to see that it works")
    args = parser.parse_args()

    seed_everything(1)
    model, data, curve = Classifier(), Digits(), Curve()
    best = ModelCheckpoint(args.out / "checkpoints", monitor="val_loss", save_last=True)
    trainer = Trainer(
        max_epochs=args.epochs,
        callbacks=[curve, best],
        logger=TensorBoardLogger(args.out, name="log"),
        log_every_n_steps=5,
        limit_train_batches=3 if args.fast else None,
    )
    last = args.out / "checkpoints" / "last.ckpt"
    trainer.fit(model, datamodule=data, ckpt_path=last if last.exists() else None)
    accuracy = trainer.test(model, datamodule=data, ckpt_path="best")[0]["test_accuracy"]
    draw(args.out / "digits.png", curve, model, data)
    print(f"test accuracy {accuracy:.1%} after {len(curve.epochs)} epoch(s); see {args.out / 'digits.png'}")


if __name__ == "__main__":
    main()

"""Two networks against each other: one paints handwritten digits, the other tells them from real ones.

    python examples/03_gan.py          # about a minute on a CPU; ends with a picture of 64 painted digits

Shows manual optimization: the module steps two optimizers itself. Needs scikit-learn and matplotlib:
pip install ".[examples]".
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline import Trainer, TrainingModule, seed_everything
from paceline.loggers import TensorBoardLogger


def network(*widths: int) -> nn.Sequential:
    """Fully connected layers with leaky rectifiers between them."""
    layers: list[nn.Module] = []
    for into, out in pairwise(widths):
        layers += [nn.Linear(into, out), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class GAN(TrainingModule):
    def __init__(self, noise: int = 32, width: int = 256, lr: float = 3e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.painter = nn.Sequential(network(noise, width, width, 64), nn.Sigmoid())
        self.judge = network(64, width, width, 1)

    def forward(self, count: int) -> Tensor:
        """Paint ``count`` images, (count, 64), gray values in [0, 1]."""
        return self.painter(torch.randn(count, self.hparams["noise"], device=self.device))

    def verdict(self, images: Tensor, real: bool) -> Tensor:
        """How far the judge is from calling all of ``images`` real (or all painted): a loss, shape ()."""
        logits = self.judge(images)
        # 0.9 in place of 1: a judge that is never quite sure leaves the painter something to learn from.
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, 0.9 if real else 0.0))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real,) = batch
        painter_optimizer, judge_optimizer = self.optimizers()

        with self.toggled_optimizer(judge_optimizer):
            judge_loss = (self.verdict(real, True) + self.verdict(self(len(real)).detach(), False)) / 2
            self.manual_backward(judge_loss)
            judge_optimizer.step()
            judge_optimizer.zero_grad()

        with self.toggled_optimizer(painter_optimizer):
            painter_loss = self.verdict(self(len(real)), True)
            self.manual_backward(painter_loss)
            painter_optimizer.step()
            painter_optimizer.zero_grad()

        self.log_dict({"judge_loss": judge_loss, "painter_loss": painter_loss}, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        lr = self.hparams["lr"]
        return [torch.optim.Adam(net.parameters(), lr=lr, betas=(0.5, 0.999)) for net in (self.painter, self.judge)]


def draw(images: Tensor, path: Path) -> None:
    """Save 64 images of 64 values as one picture of 8 x 8 tiles."""
    from matplotlib.image import imsave

    tiles = F.pad(images.view(8, 8, 8, 8), (1, 1, 1, 1)).permute(0, 2, 1, 3).reshape(80, 80)
    imsave(path, tiles.repeat_interleave(6, 0).repeat_interleave(6, 1).numpy(), cmap="gray")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gan"), help="folder for log, checkpoint and picture")
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--fast", action="store_true", help="a few batches only, to see that it works")
    args = parser.parse_args()

    seed_everything(1)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    model = GAN()
    trainer = Trainer(
        max_epochs=1 if args.fast else args.epochs,
        limit_train_batches=3 if args.fast else None,
        logger=TensorBoardLogger(args.out, name="log"),
        log_every_n_steps=2 if args.fast else 50,
    )
    trainer.fit(model, DataLoader(TensorDataset(images), batch_size=64, shuffle=True, drop_last=True))
    with torch.no_grad():
        painted = model.cpu()(64)
    draw(painted, args.out / "painted.png")
    print(f"{trainer.global_step} steps of two optimizers; 64 painted digits are in {args.out / 'painted.png'}")


if __name__ == "__main__":
    main()

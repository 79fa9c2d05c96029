"""A training loop of your own, before and after: three lines change, and it runs on any device and any number of them.

    python examples/06_own_loop.py --plain                         # the loop as PyTorch has it
    python examples/06_own_loop.py                                 # the same numbers, on the device there is
    paceline launch --num_processes 2 examples/06_own_loop.py      # on two devices, or two CPU processes
    tensorboard --logdir runs/own_loop                             # both curves

Look for `accelerator` to see what changed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.loggers import TensorBoardLogger


def plain(epochs: int) -> list[float]:
    """Train, as PyTorch has it; returns the losses."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(spirals(), batch_size=64)
    losses = []
    for _ in range(epochs):
        for points, arms in loader:
            loss = nn.functional.cross_entropy(model(points), arms)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def anywhere(epochs: int) -> list[float]:
    """Train on whatever there is; returns the losses of this process's batches."""
    accelerator = Accelerator()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(spirals(), batch_size=64)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(epochs):
        for points, arms in loader:
            loss = nn.functional.cross_entropy(model(points), arms)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def build_model() -> nn.Module:
    """A small network, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 3))


def spirals(count: int = 3000) -> TensorDataset:
    """Points of three spiral arms, and which arm each belongs to, in a random order."""
    generator = torch.Generator().manual_seed(0)
    arms = torch.randint(3, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    noise = 0.15 * torch.randn(count, generator=generator)
    angle: Tensor = 5 * radius + 2 * torch.pi / 3 * arms + noise
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="the loop as PyTorch has it")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/own_loop"))
    parser.add_argument("--fast", action="store_true", help="one epoch, to see that it runs")
    args = parser.parse_args()
    name, train = ("plain", plain) if args.plain else ("anywhere", anywhere)
    losses = train(1 if args.fast else args.epochs)
    logger = TensorBoardLogger(args.out, name=name)
    for step, loss in enumerate(losses, 1):
        logger.log_metrics({"loss": loss}, step)
    logger.finalize("success")
    print(f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")


if __name__ == "__main__":
    main()

"""Local SGD: processes train apart and average their parameters now and then, which communicates less.

    paceline launch --cpu --num_processes 2 examples/09_local_sgd.py                # average every 8 updates
    paceline launch --cpu --num_processes 2 examples/09_local_sgd.py --every 1      # in every update
    paceline launch --cpu --num_processes 2 examples/09_local_sgd.py --every 0      # synchronous training
    tensorboard --logdir runs/local_sgd                                             # all of them

One process alone trains as it always does.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, LocalSGD, set_seed


def waves(count: int) -> TensorDataset:
    """Points in 8 dimensions and a value that waves over two of them."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(count, 8, generator=generator)
    return TensorDataset(points, (2 * points[:, :1]).sin() + points[:, 1:2].cos())


def mean_error(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """The mean squared error over the whole data set, each sample once."""
    errors: list[Tensor] = []
    with torch.inference_mode():
        for points, values in loader:
            errors.append(accelerator.gather_for_metrics((model(points) - values).pow(2)))
    return torch.cat(errors).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=8, help="updates between two averages; 0: train synchronously")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", default="runs/local_sgd")
    parser.add_argument("--fast", action="store_true", help="one epoch, to see that it runs")
    args = parser.parse_args()

    accelerator = Accelerator(log_with="tensorboard", project_dir=args.out)
    accelerator.init_trackers(f"every_{args.every}", config=vars(args))
    set_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train, test = DataLoader(waves(2048), batch_size=32, shuffle=True), DataLoader(waves(512), batch_size=128)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    began, error = time.perf_counter(), float("nan")
    for epoch in range(1 if args.fast else args.epochs):
        model.train()
        with LocalSGD(accelerator, model, max(args.every, 1), enabled=args.every > 0) as local_sgd:
            for points, values in train:
                accelerator.backward(nn.functional.mse_loss(model(points), values))
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
        model.eval()
        error = mean_error(accelerator, model, test)
        accelerator.log({"error": error}, step=epoch)
    accelerator.print(f"error {error:.4f} after {time.perf_counter() - began:.1f} s")
    accelerator.end_training()


if __name__ == "__main__":
    main()

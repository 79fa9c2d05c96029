"""Step 4: nothing of several processes any more. This is the program for one, and runs on any number."""

from __future__ import annotations

import sys

import torch
from digits import digits, network
from torch import nn
from torch.utils.data import DataLoader

from paceline import Accelerator


def train(epochs: int) -> list[float]:
    """Train and test; returns the losses of this process's batches."""
    train_data, test_data = digits()
    model = network()
    train_loader = DataLoader(train_data, batch_size=64)
    test_loader = DataLoader(test_data, batch_size=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    accelerator = Accelerator(mixed_precision="fp16")
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    losses = []
    for epoch in range(epochs):
        model.train()
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        right = []
        with torch.no_grad():
            for images, labels in test_loader:
                right.append(accelerator.gather_for_metrics(model(images).argmax(dim=1) == labels))
        result = torch.stack([loss.detach(), torch.cat(right).float().mean()])
        result = accelerator.reduce(result, "mean")
        accelerator.print(f"epoch {epoch}: loss {result[0]:.4f}, accuracy {result[1]:.3f}")
    return losses


if __name__ == "__main__":
    train(epochs=1 if "--fast" in sys.argv else 5)

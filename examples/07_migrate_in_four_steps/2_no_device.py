"""Step 2: no device any more. prepare moves the model, and the loaders move their batches."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from digits import digits, network
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from paceline import Accelerator


def train(epochs: int) -> list[float]:
    """Train and test; returns the losses of this process's batches."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    train_data, test_data = digits()
    train_sampler = test_sampler = None
    model = network()
    if world_size > 1:
        dist.init_process_group()
        train_sampler = DistributedSampler(train_data, shuffle=False)
        test_sampler = DistributedSampler(test_data, shuffle=False)
        model = DistributedDataParallel(model)
    train_loader = DataLoader(train_data, batch_size=64, sampler=train_sampler)
    test_loader = DataLoader(test_data, batch_size=64, sampler=test_sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    accelerator = Accelerator()
    scaler = torch.amp.GradScaler(accelerator.device.type)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    losses = []
    for epoch in range(epochs):
        if train_sampler is not None:
            train_sampler.set_epoch(epoch)
        model.train()
        for images, labels in train_loader:
            with torch.autocast(accelerator.device.type, dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        right = []
        with torch.no_grad():
            for images, labels in test_loader:
                right.append(model(images).argmax(dim=1) == labels)
        result = torch.stack([loss.detach(), torch.cat(right).float().mean()])
        if world_size > 1:
            dist.all_reduce(result)
            result /= world_size
        if rank == 0:
            print(f"epoch {epoch}: loss {result[0]:.4f}, accuracy {result[1]:.3f}")
    if world_size > 1:
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    train(epochs=1 if "--fast" in sys.argv else 5)

"""A custom loop for ``paceline launch``: every process prints its rank and the number of samples in an epoch."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator

points = torch.randn(64, 4, generator=torch.Generator().manual_seed(7))
model = nn.Linear(4, 1)
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), batch_size=8),
)
seen = 0
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    seen += len(accelerator.gather_for_metrics(x))
print(f"rank {accelerator.process_index} of {accelerator.num_processes}: {seen} samples", flush=True)
accelerator.end_training()

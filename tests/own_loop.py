"""A plain loop and the same loop through an Accelerator: ``from own_loop import ...``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.accelerator.accelerator import Accelerator


def data(count: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator, dtype=dtype)
    return TensorDataset(x, x @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]], dtype=dtype))


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def whole_weights(accelerator: Accelerator, model: nn.Module) -> Tensor | None:
    """The model's weights on rank 0, wherever they lie."""
    state = accelerator.prepared.placements[id(model)].strategy.model_state(model)
    return torch.cat([value.reshape(-1) for value in state.values()]) if accelerator.is_main_process else None


def train(
    count: int = 24, batch_size: int = 4, epochs: int = 2, clip: float | None = None, shuffle: bool = True, **given: Any
) -> tuple[Tensor | None, list[float], int]:
    """Train the network by an Accelerator's loop; returns weights, learning rates and the number of updates."""
    torch.manual_seed(5)
    accelerator = Accelerator(**{"cpu": True, **given})
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    updates = 0

    def count_update(*_: Any) -> None:
        nonlocal updates
        updates += 1

    optimizer.register_step_post_hook(count_update)
    loader = DataLoader(data(count), batch_size, shuffle=shuffle)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    rates = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            rates.append(schedule.get_last_lr()[0])
    return whole_weights(accelerator, model), rates, updates

"""What all steps train on, and what they train."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Handwritten digits, 64 pixels each, and which they are: 1500 to learn from and 296 to be tested with."""
    images, labels = load_digits(return_X_y=True)
    pixels, names = torch.tensor(images).float() / 16, torch.tensor(labels)
    return TensorDataset(pixels[:1500], names[:1500]), TensorDataset(pixels[1500:1796], names[1500:1796])


def network() -> nn.Module:
    """A small network, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

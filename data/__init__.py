"""Data loading: the DataModule, the supported kinds of loaders, and how their batches reach the training step."""

from __future__ import annotations

from .combined_loader import CombinedLoader
from .datamodule import DataModule

__all__ = ["CombinedLoader", "DataModule"]

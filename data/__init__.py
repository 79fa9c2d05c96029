"""Data: the DataModule, what may be given as a loader, and how its batches reach the step."""

from __future__ import annotations

from .combined_loader import CombinedLoader
from .datamodule import DataModule

__all__ = ["CombinedLoader", "DataModule"]

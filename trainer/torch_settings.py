"""Torch settings that a run changes and restores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .trainer import Trainer


CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def numerics(trainer: Trainer) -> Iterator[None]:
    """Context manager that applies the Trainer's anomaly mode, deterministic algorithms and cuDNN benchmark."""
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    deterministic = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark = torch.backends.cudnn.benchmark
    cublas = os.environ.get(CUBLAS)
    if trainer.detect_anomaly:
        torch.autograd.set_detect_anomaly(True)
    if trainer.deterministic is not None:
        torch.use_deterministic_algorithms(bool(trainer.deterministic), warn_only=trainer.deterministic == "warn")
    if trainer.deterministic:
        os.environ.setdefault(CUBLAS, ":4096:8")
        torch.backends.cudnn.benchmark = False
    if trainer.benchmark is not None:
        torch.backends.cudnn.benchmark = trainer.benchmark
    try:
        yield
    finally:
        torch.autograd.set_detect_anomaly(*anomaly)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        torch.backends.cudnn.benchmark = benchmark
        if cublas is None:
            os.environ.pop(CUBLAS, None)

"""Small runs with a planted fault, or none: ``from patients import diagnose``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from clocks import Clock
from tiny import QUIET
from torch import nn
from torch.utils.data import Dataset

from paceline import Trainer, TrainingModule
from paceline.doctor import doctor, step_clock
from paceline.doctor.doctor import Doctor
from paceline.doctor.report import Report

SETTINGS: dict[str, Any] = QUIET | {"max_epochs": 1, "num_sanity_val_steps": 0}


#: What the doctor's tests let the doctor read: it goes on by what a test says, however busy the machine is.
CLOCK = Clock(tick=1e-8)


def read_clock(patch: Callable[..., Any] = setattr) -> None:
    """Let the doctor read :data:`CLOCK`."""
    for file in (step_clock, doctor):
        patch(file, "perf_counter", CLOCK)


class Small(TrainingModule):
    """A step of next to nothing, which can be made to last."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.seconds = seconds

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        CLOCK.sleep(self.seconds)
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Healthy(TrainingModule):
    """Computes for 5 ms a step, with few weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 128)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        CLOCK.sleep(0.005)
        for _ in range(4):
            batch = torch.tanh(self.layer(batch))
        loss = batch.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Slow(Dataset[torch.Tensor]):
    """Samples that take their time, by :data:`CLOCK`."""

    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        CLOCK.sleep(self.seconds)
        return torch.ones(4)


def batches(count: int = 20, rows: int = 4, width: int = 4) -> list[torch.Tensor]:
    """Ready batches, in memory."""
    return [torch.ones(rows, width)] * count


def diagnose(module: TrainingModule, data: Any, val: Any = None, **arguments: Any) -> Report:
    """The doctor's report on a fit."""
    doctor = Doctor(write=False)
    Trainer(**{**SETTINGS, "profiler": doctor, **arguments}).fit(module, data, val)
    assert doctor.report is not None
    return doctor.report


def keys(report: Report) -> set[str]:
    """The findings that cost something."""
    return {finding.key for finding in report.problems}


def only(report: Report, key: str) -> Any:
    """The finding of that name, which must be there."""
    found = [finding for finding in report.findings if finding.key == key]
    assert found, report.text()
    return found[0]

"""What the doctor costs a step: fits with and without it, side by side in one process.

    python benchmarks/doctor_cost.py                     # a step of about 1 ms, and one of next to nothing
    python benchmarks/doctor_cost.py --rounds 5 --steps 200

A round makes one fit of each kind in random order, on the same data, and times the steps after the doctor's warm-up
(where it looks at every operator) by what ticks in ``training_step``. The figures are the median over the rounds of the
difference of CPU times, and of their ratio; a second fit without shows the noise.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import time
import warnings
from typing import Any

import torch
from torch import nn

from paceline import Trainer, TrainingModule
from paceline.trainer.doctor.measure import Doctor

SKIPPED = 10


class Ticks(TrainingModule):
    """A network of some layers that notes when its step begins."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
        self.ticks: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ticks.append((time.perf_counter(), time.process_time()))
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def step_seconds(profiler: Any, width: int, depth: int, rows: int, steps: int) -> tuple[float, float]:
    """Wall and CPU seconds of a step, on average."""
    torch.manual_seed(0)
    module, batch = Ticks(width, depth), torch.randn(rows, width)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        profiler=profiler,
    )
    trainer.fit(module, [batch] * (steps + SKIPPED + 1))
    (wall, cpu), (wall_end, cpu_end) = module.ticks[SKIPPED], module.ticks[-1]
    return (wall_end - wall) / steps, (cpu_end - cpu) / steps


def compare(width: int, depth: int, rows: int, steps: int, rounds: int) -> dict[str, float]:
    """Medians over the rounds, in us and per cent."""
    kinds = {"without": lambda: None, "again": lambda: None, "doctor": lambda: Doctor(write=False)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name in random.sample(list(kinds), len(kinds)):
            found[name].append(step_seconds(kinds[name](), width, depth, rows, steps))
    bare = [cpu for _, cpu in found["without"]]

    def added(name: str) -> list[float]:
        return [cpu - base for (_, cpu), base in zip(found[name], bare, strict=True)]

    return {
        "step_us": statistics.median(bare) * 1e6,
        "doctor_us": statistics.median(added("doctor")) * 1e6,
        "noise_us": statistics.median(added("again")) * 1e6,
        "doctor_percent": 100 * statistics.median(a / b for a, b in zip(added("doctor"), bare, strict=True)),
        "noise_percent": 100 * statistics.median(a / b for a, b in zip(added("again"), bare, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    warnings.simplefilter("ignore")
    logging.getLogger("paceline").addHandler(logging.NullHandler())
    print("step        without     doctor adds            noise (without again)")
    for name, size in (("tiny", (8, 1, 4)), ("1 ms", (192, 6, 64))):
        r = compare(*size, arguments.steps, arguments.rounds)
        print(
            f"{name:8} {r['step_us']:8.1f} us   {r['doctor_us']:6.2f} us = {r['doctor_percent']:5.2f} %"
            f"    {r['noise_us']:6.2f} us = {r['noise_percent']:5.2f} %"
        )


if __name__ == "__main__":
    main()

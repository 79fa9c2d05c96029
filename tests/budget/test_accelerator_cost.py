"""What the Accelerator adds to a plain loop, counted in Python calls of our own."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loop import data, loss_of, network
from torch.utils.data import DataLoader

import paceline
from paceline.accelerator.accelerator import Accelerator

PACKAGE = Path(paceline.__file__).resolve().parent
ROOMS = tuple(
    str(PACKAGE / room)
    for room in ("accelerator", "data", "strategies", "processes", "loggers", "memory", "torch_private.py")
)
#: What a loader of torch's does itself, with more calls: it makes the batch, here of tensors in memory.
LOADING = "/in_memory.py"


def calls_of_an_epoch(batches: int, **given: Any) -> Counter[str]:
    accelerator = Accelerator(cpu=True, **given)
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    loader = DataLoader(data(2 * batches, torch.float32), 2, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    found: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            if name.startswith(ROOMS) and not name.endswith(LOADING):
                found[f"{Path(name).name}:{frame.f_code.co_name}"] += 1
            elif "contextlib" in name or "glob" in name or name.endswith("posixpath.py"):
                found["library"] += 1

    for _ in range(2):
        found.clear()
        sys.setprofile(count if _ else None)
        try:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        finally:
            sys.setprofile(None)
    return found


@pytest.mark.parametrize(("given", "most"), [({}, 10), ({"gradient_accumulation_steps": 4}, 10)])
def test_a_step_costs_at_most_ten_calls_of_our_own(given: dict[str, Any], most: int) -> None:
    short, long = calls_of_an_epoch(8, **given), calls_of_an_epoch(28, **given)
    more = long - short
    assert sum(more.values()) / 20 <= most, more
    assert more["library"] == 0

"""``benchmarks/gpu.py`` is for the rare day with a GPU, so its parts have to work before: here with tiny sizes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rank_processes import ranks

HERE = Path(__file__).resolve().parent


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(HERE.parent / "benchmarks")
    return importlib.import_module("gpu")


def test_the_networks_are_gpt_2_and_resnet_50(gpu: ModuleType) -> None:
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in task.network().parameters()) for name, task in gpu.tasks(False).items()}
    assert sizes == {"transformer": 124_439_808, "resnet50": 25_557_032}


@pytest.mark.parametrize("task", ["transformer", "resnet50"])
def test_a_contestant_is_timed_between_two_loops_by_hand(gpu: ModuleType, task: str) -> None:
    found = gpu.run_steps(task, "paceline", True)
    assert found["samples_per_second"] > 0
    assert found["weights_apart"] < 1e-3
    assert found["mfu"] is None  # not a GPU whose peak is known
    assert {"by hand", "paceline", 'paceline, compile="step"', "by hand, CUDA graphs"} <= gpu.contestants(True).keys()


def test_the_other_parts_run_and_all_fit_into_one_table(gpu: ModuleType) -> None:
    (sharded,) = ranks(1, gpu.run_sharded, True)
    found: dict[str, Any] = {"sharded": sharded, "steps": {"transformer": {"lightning": {"failed": "out of memory"}}}}
    found |= {part: gpu.RUNNERS[part](True) for part in ("waits", "stall", "doctor")}
    found["tests"] = {"tests": 3, "failures": 1, "errors": 0, "skipped": 0, "failed": ["a::b"], "output": ""}
    rows = gpu.rows_of(json.loads(json.dumps(found)))
    assert [row[0] for row in rows] == ["tests"] * 2 + ["waits"] * 2 + ["transformer"] + ["stall"] * 2 + [
        "doctor"
    ] * 2 + ["sharded"]
    assert rows[0][-1] == "2 passed, 1 failed, 0 skipped"
    assert sharded["backend"] == "gloo"
    assert sharded["weights_apart"] < 1e-6
    assert sum(found["doctor"]["doctor"].values()) == pytest.approx(1)
    assert len(gpu.table(gpu.HEADER, rows).splitlines()) == len(rows) + 2

"""``accelerator.profile``: torch's profiler, and its traces as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rank_processes import ranks

from paceline.accelerator.accelerator import Accelerator
from paceline.accelerator.kwargs_handlers import ProfileKwargs


def operations(path: Path) -> set[str]:
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"]}


def profiled(folder: str) -> int:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=folder)])
    with accelerator.profile() as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert any(event.key == "aten::mm" for event in profiler.key_averages())
    return len(list(Path(folder).glob("*.json")))


def test_b21_every_process_writes_its_trace_and_all_wait_for_them(tmp_path: Path) -> None:
    assert ranks(2, profiled, str(tmp_path / "made")) == [2, 2]
    for rank in (0, 1):
        assert "aten::mm" in operations(tmp_path / "made" / f"profile_{rank}.json")


def test_a_schedule_that_repeats_gives_a_trace_for_each_cycle_and_calls_the_users_handler(tmp_path: Path) -> None:
    seen: list[Any] = []
    schedule = {"wait": 1, "warmup": 1, "active": 1, "repeat": 2}
    handler = ProfileKwargs(
        activities=["cpu"], schedule_option=schedule, on_trace_ready=seen.append, output_trace_dir=tmp_path
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cuda"])])
    with accelerator.profile(handler) as profiler:
        for size in range(1, 9):
            torch.zeros(size).add_(1) if size < 4 else torch.zeros(size).mul_(2)
            profiler.step()
    assert seen == [profiler, profiler]
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["profile_0.json", "profile_0_1.json"]
    assert "aten::add_" in operations(tmp_path / "profile_0.json")
    assert "aten::mul_" in operations(tmp_path / "profile_0_1.json")


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    with Accelerator(cpu=True).profile(ProfileKwargs(activities=["cpu"])) as profiler:
        torch.ones(2).exp()
    assert "aten::exp" in {event.key for event in profiler.key_averages()}
    assert not list(tmp_path.iterdir())

"""What an Accelerator says about itself: this process's ranks along each dimension, who saves, and device maps."""

from __future__ import annotations

from typing import Any

import pytest
from rank_processes import ranks
from torch import nn

from paceline import Accelerator
from paceline.accelerator.parallelism_config import ParallelismConfig

#: What the ranks are called.
AXES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel_shard", "data_parallel")


#: Arguments, the ranks of process 3 of 4 along each axis, and whether parameters are sharded by ``fully_shard``.
RUNS: list[tuple[dict[str, Any], list[int], bool]] = [
    ({"strategy": "ddp"}, [0, 0, 0, 0, 3], False),
    ({"strategy": "fsdp"}, [0, 0, 0, 3, 3], True),
    ({"dp_replicate_size": 2, "dp_shard_size": 2}, [0, 0, 0, 1, 3], True),
    ({"dp_shard_size": 2, "tp_size": 2}, [1, 0, 0, 1, 1], True),
]


def _facts(given: dict[str, Any]) -> tuple[list[int], bool, bool, bool]:
    sizes = "strategy" not in given
    accelerator = Accelerator(cpu=True, **({"parallelism_config": ParallelismConfig(**given)} if sizes else given))
    found = [getattr(accelerator, f"{axis}_rank") for axis in AXES]
    return found, accelerator.should_save_model, accelerator.multi_device, accelerator.is_composable_parallelism_enabled


def test_ranks_along_the_dimensions_of_parallelism_and_who_saves() -> None:
    first, *_, last = ranks(4, lambda: [_facts(given) for given, _, _ in RUNS])
    assert first == [([0] * 5, True, False, sharded) for _, _, sharded in RUNS]
    assert last == [(expected, False, False, sharded) for _, expected, sharded in RUNS]


def test_one_process_is_rank_0_and_saves() -> None:
    assert _facts({"strategy": "auto"}) == ([0, 0, 0, 0, 0], True, False, False)


def test_a_device_map_with_several_devices_is_found_also_inside_a_wrapper() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Sequential(nn.Linear(1, 1))
    assert not accelerator.verify_device_map(model)
    for devices, several in (({"": 0}, False), ({"a": 0, "b": 0}, False), ({"a": 0, "b": "cpu"}, True)):
        model.hf_device_map = devices  # type: ignore[assignment]
        assert accelerator.verify_device_map(model) is several
        assert accelerator.verify_device_map(nn.Sequential(model)) is several


def test_print_config_shows_settings_and_their_origins(capsys: pytest.CaptureFixture[str]) -> None:
    Accelerator(cpu=True, gradient_accumulation_steps=3).print_config()
    lines = [line for line in capsys.readouterr().out.splitlines() if "  gradient_accumulation_steps " in line]
    assert ["3" in line and "code" in line for line in lines] == [True]

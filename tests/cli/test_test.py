"""``paceline test``: that it passes, and that it finds what is wrong, each time by its name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks

import paceline
from paceline.accelerator.accelerator import Accelerator
from paceline.cli import self_check

ROOT = str(Path(paceline.__file__).resolve().parent.parent)


def test_c14_two_cpu_processes_are_checked_as_they_are_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ROOT)
    Path("mine.json").write_text('{"use_cpu": true, "num_processes": 2, "mixed_precision": "bf16"}')
    command = [sys.executable, "-m", "paceline", "test", "--config_file", "mine.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    *checks, last = done.stdout.splitlines()
    assert checks == [f"ok  {name}" for name in self_check.CHECKS]
    assert last == "All checks passed: 2 processes on cpu, DDPStrategy, mixed_precision=bf16."


def wrong_data(accelerator: Accelerator) -> None:
    whole = accelerator.gather_for_metrics
    accelerator.gather_for_metrics = lambda data: whole(data)[1:]  # type: ignore[method-assign]


def wrong_training(accelerator: Accelerator) -> None:
    backward = accelerator.backward
    accelerator.backward = lambda loss: backward(loss * 2)  # type: ignore[method-assign]


def wrong_group(accelerator: Accelerator) -> None:
    import os

    os.environ["WORLD_SIZE"] = "3"


def wrong_collectives(accelerator: Accelerator) -> None:
    accelerator.gather = lambda tensor: torch.cat([tensor, tensor])  # type: ignore[method-assign]


def wrong_checkpoint(accelerator: Accelerator) -> None:
    accelerator.load_state = lambda folder: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("spoil", "name", "said"),
    [
        (wrong_group, "the processes form one group", "3 processes were started, but the group has 2"),
        (wrong_collectives, "collectives are correct", "gather gave"),
        (wrong_data, "each sample is seen once", "gather_for_metrics returned"),
        (wrong_training, "training matches one process", "the trained model's outputs differ by"),
        (wrong_checkpoint, "a saved state is restored", "the model's outputs changed after load_state"),
    ],
)
def test_c14_a_failed_check_is_named_and_the_status_is_1(
    spoil: Callable[[Accelerator], None], name: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def checked() -> int:
        made = Accelerator(cpu=True)
        spoil(made)
        self_check.Accelerator = lambda: made  # type: ignore[misc, assignment]
        kept: dict[str, Any] = {name: self_check.CHECKS[name]}
        self_check.CHECKS = kept
        return self_check.main()

    assert ranks(2, checked) == [1, 1]
    err = capfd.readouterr().err
    assert err.count("paceline test:") == 1
    assert f"paceline test: this check failed: {name} (rank 0: {said}" in err or f"rank 1: {said}" in err

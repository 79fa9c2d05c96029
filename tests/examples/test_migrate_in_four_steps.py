"""A script on its way from hand-written code to an Accelerator: at each of four steps it runs and learns the same."""

from __future__ import annotations

import difflib
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from rank_processes import ranks

from paceline.processes import process_group

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "examples" / "07_migrate_in_four_steps"
STEPS = ("0_plain", "1_accelerator", "2_no_device", "3_no_scaler", "4_done")


def losses_of(step: str) -> list[float]:
    """The losses of this process's batches in an epoch."""
    spec = importlib.util.spec_from_file_location(f"paceline_example_{step}", FOLDER / f"{step}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train(epochs=1)


def all_losses(processes: int) -> dict[str, list[float]]:
    """By step: the mean of the processes' losses, batch by batch."""
    found = {step: ranks(processes, losses_of, step) for step in STEPS} if processes > 1 else {}
    found = found or {step: [losses_of(step)] for step in STEPS}
    return {step: [sum(batch) / processes for batch in zip(*own, strict=True)] for step, own in found.items()}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("paceline.processes.devices.count", lambda kind: int(kind == "cpu"))
    destroy = dist.destroy_process_group
    # Torch may wait forever here: the wrapped model, freed after this, joins workers that still need the interpreter.
    monkeypatch.setattr(dist, "destroy_process_group", lambda: (process_group.wait_for_gloo(), destroy()))


def test_b15_k1_each_step_of_the_migration_runs_and_learns_the_same_on_one_process() -> None:
    plain, *others = all_losses(1).values()
    assert all(other == plain for other in others)
    assert plain[-1] < 0.7 * plain[0]


def test_b15_k1_each_step_of_the_migration_runs_and_learns_the_same_on_two_processes() -> None:
    plain, *others = all_losses(2).values()
    assert len(plain) == 12
    assert plain[-1] < 0.9 * plain[0]
    for other in others:
        assert other == pytest.approx(plain, abs=0.002)


@pytest.mark.parametrize(
    ("step", "launcher"),
    [
        ("1_accelerator", ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]),
        ("4_done", ["paceline", "launch", "--cpu", "--num_processes", "2"]),
    ],
    ids=["torchrun", "paceline launch"],
)
def test_b15_k1_a_half_done_and_a_done_migration_start_with_a_launcher(
    step: str, launcher: list[str], tmp_path: Path
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", *launcher, str(FOLDER / f"{step}.py"), "--fast"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"^epoch 0: loss \d", done.stdout, re.M)) == 1


def test_b15_k1_each_step_changes_few_lines_and_the_last_is_half_as_long() -> None:
    texts = [(FOLDER / f"{step}.py").read_text().partition('"""\n\n')[2].splitlines() for step in STEPS]
    pairs = itertools.pairwise(texts)
    changed = [[line for line in difflib.ndiff(*pair) if line[0] in "+-" and line[2:].strip()] for pair in pairs]
    added = [sum(line[0] == "+" for line in lines) for lines in changed]
    assert added[0] == 4
    assert max(added) <= 8
    assert len(changed[0]) == 5
    assert len(texts[-1]) < 0.7 * len(texts[0])


def test_a5_the_last_step_names_no_hardware_and_no_process() -> None:
    words = (".to(", "cuda", "DistributedSampler", "GradScaler", "autocast", "init_process_group")
    plain, done = ((FOLDER / f"{step}.py").read_text() for step in (STEPS[0], STEPS[-1]))
    assert [word for word in words if word in plain] == list(words)
    assert not [word for word in words if word in done]


def test_k1_the_guide_shows_lines_that_the_steps_change() -> None:
    guide = (ROOT / "docs" / "from_accelerate.md").read_text()
    shown = re.findall(r"^   ```diff\n(.*?)^   ```$", guide, re.M | re.S)
    texts = [(FOLDER / f"{step}.py").read_text().splitlines() for step in STEPS]
    for block, (before, after) in zip(shown, itertools.pairwise(texts), strict=True):
        changed = [line[3:] for line in block.splitlines()]
        assert changed
        for line in changed:
            gone, come = (before, after) if line[0] == "-" else (after, before)
            assert line[1:] in gone
            assert line[1:] not in come

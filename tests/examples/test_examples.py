"""Every example runs: a few batches here, whole by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NO_LOG = ("11_larger_than_memory",)
FIRST_FIT, *OTHERS = (path for path in sorted((ROOT / "examples").glob("[0-9]*.py")) if path.stem not in NO_LOG)


def run(example: Path, out: Path, *options: str) -> str:
    """Run an example's few-batches form, return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    command = [sys.executable, str(example), "--fast", "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=out, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("example", OTHERS, ids=[e.stem for e in OTHERS])
def test_the_example_runs_and_leaves_a_tensorboard_log(example: Path, tmp_path: Path) -> None:
    if "transformers" in example.stem:
        pytest.importorskip("transformers")
    said = run(example, tmp_path)
    assert said.strip(), "an example says what came out of it"
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_first_fit_draws_its_curve_and_its_mistakes_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    assert "after 1 epoch(s)" in run(FIRST_FIT, tmp_path, "--epochs", "1")
    assert is_png(tmp_path / "digits.png")
    assert list(tmp_path.rglob("events.out.tfevents.*"))
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
    said = run(FIRST_FIT, tmp_path, "--epochs", "3")
    assert "after 3 epoch(s)" in said

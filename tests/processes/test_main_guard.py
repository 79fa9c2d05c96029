"""Programs that start fresh processes without a main guard."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.processes import launch
from paceline.processes.main_guard import require_main_guard

PACKAGE = Path(launch.__file__).resolve().parents[2]

PROGRAM = """
import multiprocessing
import sys

sys.path.insert(0, {tests!r})
from tiny import TinyModule, tiny_loader
from torch.utils.data import DataLoader
from paceline import Accelerator, Trainer


def fit(**options):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(**quiet, accelerator="cpu", max_epochs=1, **options)
    trainer.fit(TinyModule(), DataLoader(tiny_loader().dataset, 2, num_workers=1, multiprocessing_context="spawn"))

print("top")
try:
    fit(
        strategy="ddp_spawn", devices=2)
except RuntimeError as error:
    print(error)
for door in (fit, lambda: list(Accelerator(cpu=True).prepare(
        DataLoader(range(4), num_workers=1, multiprocessing_context="forkserver")))):
    try:
        door()
    except RuntimeError as error:
        print(error)
"""


def test_a_program_without_a_main_guard_is_told_the_two_lines_to_write_and_starts_nothing(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.format(tests=str(Path(__file__).resolve().parent.parent)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    told = "\n".join(
        f"{who} starts fresh processes, and each of them runs train.py again from the top, so line {line} would start "
        "more processes. Put code that only the first process should run under a main guard:\n\n"
        f'    if __name__ == "__main__":\n        {statement}\n'
        for who, line, statement in (
            ("start_method='spawn'", 18, "fit("),
            ("DataLoader(num_workers=1) with 'spawn'", 25, "door()"),
            ("DataLoader(num_workers=1) with 'forkserver'", 25, "door()"),
        )
    )
    assert (done.returncode, done.stdout) == (0, f"top\n{told}\n"), done.stderr


def test_a_new_process_that_comes_to_start_processes_while_it_imports_its_program_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_main_guard("It")  # pytest's own program is not imported by new processes
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match=r'(?s)spawn. starts fresh processes.*if __name__ == "__main__":'):
        launch.start(print, (), 2, "spawn")

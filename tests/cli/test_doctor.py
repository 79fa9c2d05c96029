"""``paceline doctor`` on real scripts, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline

PACKAGE = Path(paceline.__file__).resolve().parent
TRAINER = """
import sys, torch
from patients import Slow, read_clock
from torch import nn
from torch.utils.data import DataLoader
from paceline import Trainer, TrainingModule

class Net(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

if __name__ == "__main__":
    read_clock()
    print("words:", sys.argv[1:])
    trainer = Trainer(accelerator="cpu", max_epochs=100, min_epochs=50, logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Net(), DataLoader(Slow(400, 0.01), batch_size=2))
    print("the script went on")
"""
LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from paceline import Accelerator

accelerator = Accelerator(cpu=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader([torch.ones(4)] * COUNT, batch_size=2))
for epoch in range(1):
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
"""


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(PACKAGE.parent), str(PACKAGE / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "paceline", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)


def found(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "doctor.json").read_text())


def test_a_script_is_run_for_some_steps_and_judged(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    done = doctor("--steps", "12", "--out", "out", "train.py", "--lr", "3")
    assert done.returncode == 0, done.stderr
    assert "Waiting for data takes" in done.stdout
    assert "words: ['--lr', '3']" in done.stderr
    assert "the script went on" not in done.stderr
    assert found(tmp_path / "out")["ranks"][0]["steps"] == 9
    assert "<!doctype html>" in (tmp_path / "out" / "doctor.html").read_text()


def test_what_is_tried_stands_before_and_after(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    done = doctor("--steps", "14", "--try", "--only", "num_workers", "--json", "train.py")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    rows = {row["what"]: row for row in data["trials"]}
    assert rows["unchanged"]["factor"] == 1.0
    more = next(row for what, row in rows.items() if what.startswith("num_workers="))
    assert more["samples_per_second"] > 0
    assert sum(row.get("best", False) for row in data["trials"]) == 1


def test_a_loop_of_one_s_own_is_judged_and_left_after_its_steps(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP.replace("COUNT", "4000"))
    done = doctor("--steps", "20", "loop.py")
    assert done.returncode == 0, done.stderr
    assert found(tmp_path)["ranks"][0]["steps"] == 17


def test_a_loop_that_ends_before_is_judged_by_what_there_was(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP.replace("COUNT", "24"))
    done = doctor("--steps", "100", "loop.py")
    assert done.returncode == 0, done.stderr
    assert found(tmp_path)["ranks"][0]["steps"] == 9


def test_scripts_that_fail_or_train_nothing_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    (tmp_path / "idle.py").write_text("print('hello')")
    failed, idle = doctor("fails.py"), doctor("idle.py")
    assert failed.returncode == idle.returncode == 2
    assert "exited with status 3" in failed.stderr
    assert "Trainer.fit" in idle.stderr


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("")
    done = doctor("--steps", "4", "idle.py")
    assert done.returncode == 2
    assert "--steps 4" in done.stderr


def test_a_run_that_hangs_is_ended_and_says_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import signal; print('begun', flush=True); signal.pause()")
    done = doctor("--timeout", "1", str(script))
    assert done.returncode == 2
    assert "paceline doctor: The run took longer than --timeout 1 seconds and was stopped." in done.stderr
    assert "Traceback" not in done.stderr


def test_names_of_what_is_to_be_tried_are_checked_before_anything_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('begun', flush=True)")
    done = doctor("--try", "--only", "wrokers", str(script))
    assert done.returncode == 2
    assert "'wrokers' is not a change that can be tried" in done.stderr
    assert "begun" not in done.stderr


RESUMED = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from paceline import Trainer, TrainingModule

class Net(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.automatic_optimization = AUTOMATIC
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.step()
        return loss
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.01) for _ in range(1 if AUTOMATIC else 5)]

trainer = Trainer(accelerator="cpu", max_epochs=2, default_root_dir="run", enable_progress_bar=False)
trainer.fit(Net(), DataLoader(torch.ones(40, 4), batch_size=2), ckpt_path="auto")
print("ended at step", trainer.global_step)
"""


def test_a_run_that_goes_on_is_examined_from_its_beginning_and_goes_on_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(RESUMED.replace("AUTOMATIC", "True"))
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))

    def train() -> str:
        return subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=120).stdout

    assert doctor("--steps", "12", str(script)).returncode == 0
    assert found(tmp_path)["ranks"][0]["steps"] == 9
    assert not list(tmp_path.rglob("*.ckpt"))
    assert train() == "ended at step 40\n"
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.ckpt")}
    assert kept
    done = doctor("--steps", "12", "--try", "--only", "batch_size", str(script))
    assert done.returncode == 0, done.stderr
    assert found(tmp_path)["ranks"][0]["steps"] == 9
    assert all(row["samples_per_second"] > 0 for row in found(tmp_path)["trials"])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.ckpt")} == kept


def test_batches_are_counted_also_where_each_has_several_optimizer_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RESUMED.replace("AUTOMATIC", "False"))
    assert doctor("--steps", "12", "train.py").returncode == 0
    assert found(tmp_path)["ranks"][0]["steps"] == 9


def test_a_loop_of_several_processes_that_ends_before_is_judged_by_what_there_was(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP.replace("COUNT", "48").replace("accelerator.end_training()", ""))
    done = doctor("--steps", "100", "--num_processes", "2", "loop.py")
    assert done.returncode == 0, done.stderr
    assert [rank["steps"] for rank in found(tmp_path)["ranks"]] == [9, 9]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--only", "num_workers"], "--try"),
        (["--try", "--only", ","], "--only"),
        (["--num_processes", "0"], "--num_processes 0"),
        (["--out", "/proc/nowhere"], "/proc/nowhere"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_runs(tmp_path: Path, words: list[str], expected: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('begun', flush=True)")
    done = doctor(*words, str(script))
    assert done.returncode == 2
    assert expected in done.stderr
    assert "begun" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_is_killed_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    done = doctor("train.py")
    assert done.returncode == 2
    assert "SIGKILL" in done.stderr
    assert "memory" in done.stderr


def test_only_the_script_is_asked_for() -> None:
    done = doctor()
    assert done.returncode == 2
    assert "required: script\n" in done.stderr


def test_an_interrupt_while_something_is_tried_leaves_what_was_found_before(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    path = os.pathsep.join([str(PACKAGE.parent), str(PACKAGE / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "paceline", "doctor", "--steps", "12", "--try", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("Trying" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        process.stderr.read()
    assert process.returncode == 130
    assert found(tmp_path)["ranks"][0]["steps"] == 9

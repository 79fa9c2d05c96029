"""What the README says is so: its program trains, its pseudo-code is the code's, its tables and tree are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

import paceline
from paceline.callbacks.base import FIT_PSEUDO_CODE
from paceline.strategies.choose import SEVERAL, SingleDevice
from paceline.strategies.precision.choose import NAMES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
#: Names that the README's first column puts in backticks, table rows only.
IN_TABLES = {
    name for row in re.findall(r"^\|([^|]+)\|", README, re.M) for name in re.findall(r"`\"?([\w.-]+)\"?`", row)
}


def block_after(comment: str) -> str:
    """The first code block behind an HTML comment that holds ``comment``."""
    return re.search(rf"<!--[^>]*{re.escape(comment)}[^>]*-->\n```python\n(.*?)```", README, re.S)[1]


def test_the_pseudo_code_is_the_one_in_the_code() -> None:
    assert block_after("FIT_PSEUDO_CODE").rstrip("\n") == FIT_PSEUDO_CODE.rstrip("\n")


def test_the_twenty_lines_train(tmp_path: Path) -> None:
    program = block_after("tests/test_readme.py runs this")
    assert len([line for line in program.splitlines() if line.strip()]) <= 22
    show = "\nimport sys\nprint(trainer.callback_metrics['train_loss'].item())\n"
    program = program.replace("Trainer(max_epochs=10).fit(", "trainer = Trainer(max_epochs=2)\ntrainer.fit(") + show
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.splitlines()[-1]) < 2.3, "ten classes guessed at random have a loss of 2.3"
    assert list(tmp_path.rglob("events.out.tfevents.*"))
    assert list(tmp_path.rglob("*.ckpt"))


def test_the_loop_of_your_own_runs(tmp_path: Path) -> None:
    program = block_after("tests/test_readme.py runs this loop") + "\nprint(loss.item() >= 0)\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr[-2000:]


@pytest.mark.parametrize("room", ["callbacks", "loggers"])
def test_every_callback_and_logger_is_in_a_table(room: str) -> None:
    promised = {name for name in getattr(paceline, room).__all__ if not name.endswith("Theme")}
    assert not promised - IN_TABLES


def test_every_strategy_and_precision_is_in_a_table() -> None:
    named = {name for name in SEVERAL if "_find_unused_parameters_" not in name}
    classes = {name for name in paceline.strategies.__all__ if name.endswith("Strategy")} - {"Strategy"}
    assert not {"auto", *SingleDevice.names, *named, *classes, *NAMES} - {"DistributedStrategy"} - IN_TABLES


def test_nothing_in_the_tables_is_made_up() -> None:
    strategies = {"auto", *SingleDevice.names, *SEVERAL, *paceline.strategies.__all__}
    known = {*strategies, *NAMES, *paceline.callbacks.__all__, *paceline.loggers.__all__, "16", "bf16", "fp8"}
    assert not IN_TABLES - known


def test_every_folder_of_the_package_is_in_the_tree() -> None:
    tree = README.partition("## How the code is organized")[2]
    folders = [package.removeprefix("paceline.") for package in PACKAGES if package != "paceline"]
    assert not [folder for folder in folders if not re.search(rf"^ *{folder.rpartition('.')[2]}/ +\w", tree, re.M)]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target

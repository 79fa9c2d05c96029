"""Which program runs a process, and how ranks start there: real hosts, and a table of described ones."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
from tiny import QUIET, TinyModule, tiny_loader
from torch import nn

from paceline import Trainer
from paceline.processes import launched_worker
from paceline.processes.host_program import Host, HostFacts, recognize, refusal_to_fork, start_method_in

ROOT = str(Path(__file__).resolve().parents[3])
LIMIT = 120.0

# ---- real hosts ----------------------------------------------------------------------------------------------------

SAY = "from paceline.processes.host_program import find_host\nprint('host:', find_host().name)\n"
FUNCTION = "def say(*_):\n" + indent(SAY, "    ")
CASE = FUNCTION + "import unittest\nclass Case(unittest.TestCase):\n    test = say\n"
WORKER = """
import multiprocessing, sys
if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=say)
    process.start()
    process.join()
"""
IN_A_THREAD = """
import threading
def test():
    thread = threading.Thread(target=say)
    thread.start()
    thread.join()
"""
FILES = {
    "train.py": SAY,
    "package/__init__.py": "",
    "package/train.py": SAY,
    "bin/mytool": "import sys\nsys.argv, sys.path[0] = ['-c'], '.'\nimport package.train\n",
    "test_case.py": CASE,
    "main_case.py": f"{CASE}unittest.main()\n",
    "test_pytest.py": FUNCTION + IN_A_THREAD,
    "examples.txt": ">>> from paceline.processes.host_program import find_host\n>>> find_host().name\n'doctest'\n",
    "tested.py": "import doctest\nassert doctest.testfile('examples.txt') == (0, 2)\n",
    "frozen.py": f"import sys\nsys.frozen = True\n{SAY}",
    "worker.py": FUNCTION + WORKER,
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with zipfile.ZipFile(folder / "program.zip", "w") as archive:
        archive.writestr("__main__.py", SAY)
    return folder


@pytest.mark.parametrize(
    ("command", "stdin", "host"),
    [
        (["train.py"], "", "a script"),
        (["-u", "train.py", "-c", "-"], "", "a script"),
        (["-m", "package.train"], "", "a script"),
        (["bin/mytool"], "", "a script"),
        (["program.zip"], "", "a script"),
        (["-m", "cProfile", "train.py"], "", "a script"),
        (["-c", SAY], "", "`python -c`"),
        (["-"], SAY, "a program read from standard input"),
        ([], SAY, "a program read from standard input"),
        (["-i", "train.py"], "", "an interactive Python session"),
        (["-i"], SAY, "an interactive Python session"),
        (["-m", "unittest", "-q", "test_case"], "", "unittest"),
        (["main_case.py"], "", "unittest"),
        (["-m", "doctest", "examples.txt"], "", ""),
        (["tested.py"], "", ""),
        (["-m", "pytest", "-sqp", "no:cacheprovider", "test_pytest.py"], "", "pytest"),
        (["frozen.py"], "", "a frozen program"),
        (["worker.py", "fork"], "", "a process started by multiprocessing"),
        (["worker.py", "spawn"], "", "a process started by multiprocessing"),
        (launched_worker.command("train.py", [])[1:], "", "a script"),
        (launched_worker.command("package.train", [], module=True)[1:], "", "a script"),
    ],
)
def test_the_host_of_a_program(programs: Path, command: list[str], stdin: str, host: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=programs,
        env={**environ, "PYTHONPATH": ROOT},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    said = [line.partition("host: ")[2] for line in done.stdout.splitlines() if "host: " in line]
    assert (said, done.returncode) == ([host] if host else [], 0), done.stdout + done.stderr


# ---- described hosts -----------------------------------------------------------------------------------------------

COPIED = "CUDA was already used in this process, and a fork of it cannot use CUDA"


@pytest.mark.parametrize(
    ("facts", "name", "method", "after_cuda"),
    [
        ({"file": "train.py"}, "a script", "popen", "popen"),
        ({"file": "/venv/lib/package/train.py", "module": "package.train"}, "a script", "popen", "popen"),
        ({"file": "/venv/bin/mytool"}, "a script", "popen", "popen"),
        ({"file": "train.py", "options": ("train.py", "-c")}, "a script", "popen", "popen"),
        ({"running": {"unittest.mock"}, "file": "train.py"}, "a script", "popen", "popen"),
        ({"running": {"_pytest"}, "file": "/venv/bin/pytest"}, "pytest", "fork", "spawn"),
        ({"running": {"_pytest"}, "file": None, "options": ("-c",)}, "pytest", "fork", "spawn"),
        (
            {"running": {"_pytest", "unittest.case"}, "file": "x", "module": "pytest.__main__"},
            "pytest",
            "fork",
            "spawn",
        ),
        ({"running": {"unittest.suite"}, "file": "x", "module": "unittest.__main__"}, "unittest", "fork", "spawn"),
        ({"running": {"doctest"}, "file": "train.py"}, "doctest", "fork", "fork"),
        ({"kernel": True, "ipython": True, "file": None, "module": "ipykernel_launcher"}, "a notebook", "fork", "fork"),
        ({"kernel": True, "ipython": True, "running": {"_pytest"}}, "a notebook", "fork", "fork"),
        ({"ipython": True, "file": "/venv/bin/ipython"}, "an IPython session", "fork", "fork"),
        ({"interactive": True, "file": None}, "an interactive Python session", "fork", "fork"),
        ({"interactive": True, "file": "train.py"}, "an interactive Python session", "fork", "fork"),
        ({"options": ("-c", "...")}, "`python -c`", "fork", "fork"),
        ({"options": ("-",)}, "a program read from standard input", "fork", "fork"),
        ({"file": "<stdin>"}, "a program read from standard input", "fork", "fork"),
        ({"frozen": True, "file": "train.py"}, "a frozen program", "fork", "fork"),
        ({"worker": True, "file": "train.py"}, "a process started by multiprocessing", "fork", "spawn"),
        ({"sweep": True, "file": "train.py"}, "a Hydra sweep", "fork", "spawn"),
        ({"executable": "", "file": "train.py"}, "Python embedded in another program", "fork", "fork"),
    ],
)
def test_how_ranks_start_in_each_host(facts: dict[str, Any], name: str, method: str, after_cuda: str) -> None:
    host = recognize(HostFacts(**{**facts, "running": frozenset(facts.get("running", ()))}))
    assert host.name.startswith(name)
    assert start_method_in(host, "auto", None) == method
    assert start_method_in(host, "auto", COPIED) == after_cuda
    assert start_method_in(host, "spawn", None) == "spawn"
    if host.is_script:
        assert start_method_in(host, "popen", None, 2) == "popen"
        return
    with pytest.raises(RuntimeError, match=rf"but this program is {name}.*Omit start_method.*`python file.py`"):
        start_method_in(host, "popen", None)
    with pytest.raises(RuntimeError, match=rf"on 2 machines.*program is {name}.*`python file.py` on each machine"):
        start_method_in(host, "auto", None, num_nodes=2)


@pytest.mark.parametrize(
    ("host", "obstacle", "fixes"),
    [
        (Host("a notebook", restart="Restart the kernel"), COPIED, ["Restart the kernel", "put the code in a file"]),
        (Host("pytest", can_spawn=True), COPIED, ["Start again", "'ddp_spawn'", "put the code in a file"]),
        (Host("a script", True, True), COPIED, ["Start again", "'ddp_spawn'"]),
        (Host("a notebook"), "win32 cannot fork a process", ["Put the code in a file"]),
    ],
)
def test_a_fork_that_cannot_be_is_refused_with_what_works_there(host: Host, obstacle: str, fixes: list[str]) -> None:
    text = refusal_to_fork(host, obstacle)
    assert text.startswith(f"The run starts its processes by forking this process, but {obstacle}. {fixes[0]}")
    everything = ["Start again", "Restart the kernel", "'ddp_spawn'", "put the code in a file"]
    assert [fix for fix in everything if fix.lower() in text.lower()] == [
        fix for fix in everything if fix.lower() in [one.lower() for one in fixes]
    ]


# ---- fits in pytest ------------------------------------------------------------------------------------------------


class Pair(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def weights_after(strategy: Any, devices: int, batch_size: int) -> torch.Tensor:
    torch.manual_seed(7)
    module, loader = Pair(), tiny_loader(batches=8 // batch_size, batch_size=batch_size)
    trainer = Trainer(**QUIET, strategy=strategy, devices=devices, max_epochs=1, limit_val_batches=0)
    trainer.fit(module, loader)
    return torch.cat([parameter.flatten() for parameter in module.parameters()]).detach()


@pytest.mark.parametrize("name", ["auto", "ddp", "fsdp", "model_parallel", "deepspeed_stage_2"])
def test_a_strategy_by_name_trains_under_pytest_without_a_second_session(
    name: str, deepspeed_imported: None, capfd: pytest.CaptureFixture[str]
) -> None:
    if name.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    expected = weights_after("cpu", 1, 4)
    batch_size = 4 if name == "model_parallel" else 2
    torch.testing.assert_close(weights_after(name, 2, batch_size), expected, rtol=1e-4, atol=1e-6)
    assert "test session" not in capfd.readouterr().out

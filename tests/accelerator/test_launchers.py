"""Functions in several processes, from a notebook or a test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import own_port, ranks

from paceline.accelerator.launchers import debug_launcher, notebook_launcher
from paceline.accelerator.process_state import AcceleratorState, PartialState
from paceline.messages import PacelineWarning
from paceline.settings import resolve

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    AcceleratorState._reset_state(reset_partial_state=True)


def stand(*args: Any) -> Any:
    state = PartialState()
    state.wait_for_everyone()
    settings = resolve()
    return state.num_processes, str(state.distributed_type), state.fork_launched, settings["mixed_precision"], args


def test_a11_a_function_runs_in_several_processes_also_after_an_error() -> None:
    def fail() -> None:
        if PartialState().process_index == 1:
            raise ValueError("mine")

    with pytest.raises(RuntimeError, match=r"(?s)Rank 1 of 2 failed.*mine") as caught:
        notebook_launcher(fail, num_processes=2)
    assert "accelerator/launchers.py" not in str(caught.value).replace("tests/trainer/accelerator", "")
    given = [torch.ones(1), "two"]
    found = notebook_launcher(stand, tuple(given), num_processes=2, mixed_precision="bf16")
    assert found == (2, "MULTI_CPU", True, "bf16", tuple(given))
    assert "FORK_LAUNCHED" not in os.environ
    assert "PACELINE_MIXED_PRECISION" not in os.environ


def test_one_process_is_this_one() -> None:
    assert notebook_launcher(lambda: (os.getpid(), stand()), mixed_precision="bf16") == (
        os.getpid(),
        (1, "NO", False, "bf16", ()),
    )
    assert resolve()["mixed_precision"] == "no"


def test_a11_a_cell_of_a_notebook_launches_what_it_defined() -> None:
    cells = (
        "from paceline.accelerator.launchers import notebook_launcher\n"
        "from paceline.accelerator.process_state import PartialState\n"
        "before = PartialState()\n"
        "def train(name):\n"
        "    state = PartialState()\n"
        "    state.wait_for_everyone()\n"
        "    return name, state.num_processes\n"
        "print(notebook_launcher(train, ('cell',), num_processes=2), before.num_processes)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-"], input=cells, env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout == "('cell', 2) 1\n", done.stderr


def test_debug_launcher_is_on_the_cpu_with_two_processes() -> None:
    def on_cpu() -> Any:
        return resolve()["cpu"], stand()

    assert debug_launcher(on_cpu) == (True, (2, "MULTI_CPU", True, "no", ()))
    assert debug_launcher(stand, (3,), num_processes=1)[0] == 1


def test_the_processes_meet_at_the_port_that_is_given_or_at_a_free_one() -> None:
    def where() -> str:
        PartialState().wait_for_everyone()
        return os.environ["MASTER_PORT"]

    with own_port() as port:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))
            taken.listen()
            with pytest.raises(OSError, match=f"Port {port} .*is already in use"):
                notebook_launcher(where, num_processes=2, use_port=port)
            assert notebook_launcher(where, num_processes=2) != str(port)
        assert notebook_launcher(where, num_processes=2, use_port=str(port)) == str(port)


def test_a11_u25_cuda_that_was_used_before_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match=r"already initialized CUDA.*Restart the notebook"):
        notebook_launcher(stand)


def test_an_accelerator_of_an_earlier_cell_is_pointed_out() -> None:
    AcceleratorState.of(PartialState())
    with pytest.warns(PacelineWarning, match="An Accelerator was created before notebook_launcher"):
        assert notebook_launcher(stand, num_processes=2)[0] == 2
    AcceleratorState._reset_state(reset_partial_state=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        notebook_launcher(stand, num_processes=2)


@pytest.mark.parametrize(
    ("given", "kind", "match"),
    [
        ({"num_nodes": 2}, RuntimeError, r"There are 2 machines, but master_addr is not set(?s:.*)use_port=29500"),
        ({"max_restarts": 1}, NotImplementedError, "max_restarts=1"),
        ({"nodes": 2}, TypeError, "unexpected argument 'nodes'"),
        ({"num_processes": -1}, ValueError, "num_processes=-1 is not a valid number of processes"),
        ({"mixed_precision": "bf61"}, ValueError, "Did you mean 'bf16'"),
    ],
)
def test_what_a_notebook_cannot_do_is_refused(given: dict[str, Any], kind: Any, match: str) -> None:
    with pytest.raises(kind, match=match):
        notebook_launcher(stand, **given)


def on_machine(port: int) -> Any:
    """What one of two notebooks, each on a machine of its own, gets."""
    machine = int(os.environ["RANK"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    return notebook_launcher(stand, (machine,), 1, "bf16", port, "127.0.0.1", machine, 2)


def test_notebooks_on_two_machines_train_together() -> None:
    with own_port() as port:
        first, second = ranks(2, on_machine, port)
    assert (first[0], first[3], first[-1], second) == (2, "bf16", (0,), None)


def test_what_asks_for_nothing_is_accepted() -> None:
    assert notebook_launcher(stand, (), 1, "no", "29500", num_nodes=1, node_rank=0, master_addr="127.0.0.1")[0] == 1

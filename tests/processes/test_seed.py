"""One seed for everything, and random states that can be kept and put back."""

from __future__ import annotations

import logging
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import seed_everything
from paceline.checkpoint import single_file
from paceline.processes.seed import PrivateRandomness, isolate_rng, random_states, reset_seed, set_random_states


def draw() -> tuple[Any, ...]:
    """Some numbers of every generator; Gaussian ones too, since those leave a spare value behind."""
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    )


@pytest.fixture(autouse=True)
def no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PACELINE_GLOBAL_SEED", "PL_GLOBAL_SEED", "PACELINE_SEED_WORKERS"):
        monkeypatch.delenv(variable, raising=False)


def test_the_same_seed_draws_the_same_and_another_does_not():
    assert seed_everything(7, verbose=False) == 7
    first = draw()
    assert draw() != first
    seed_everything(7, verbose=False)
    assert draw() == first
    seed_everything(8, verbose=False)
    assert draw() != first


def test_the_seed_is_left_in_the_environment_for_processes_started_later():
    seed_everything(11, workers=True, verbose=False)
    assert os.environ["PACELINE_GLOBAL_SEED"] == "11"
    assert os.environ["PACELINE_SEED_WORKERS"] == "1"
    assert seed_everything(verbose=False) == 11


def test_without_a_seed_the_environment_decides_ours_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    assert seed_everything(verbose=False) == 3
    monkeypatch.setenv("PACELINE_GLOBAL_SEED", "4")
    assert seed_everything(verbose=False) == 4


def test_without_any_seed_0_is_used_with_a_warning():
    with pytest.warns(UserWarning, match=r"uses seed 0, because no seed"):
        assert seed_everything(verbose=False) == 0


def test_the_seed_is_said_only_when_verbose(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "paceline"):
        seed_everything(5)
        seed_everything(6, verbose=False)
    assert caplog.messages == ["Seed set to 5"]


@pytest.mark.parametrize("seed", [-1, 2**32, "abc", 1.5, np.float64(2)])
def test_a_seed_that_is_none_is_an_error_with_the_value(seed: Any):
    with pytest.raises(
        ValueError, match=rf"seed_everything\(seed={re.escape(repr(seed))}\) is not a valid seed.* from 0 to 4294967295"
    ):
        seed_everything(seed)


def test_a_bad_seed_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "x")
    with pytest.raises(ValueError, match=r"environment variable PL_GLOBAL_SEED='x' is not a valid seed"):
        seed_everything()


def test_reset_seed_starts_the_numbers_again_and_without_a_seed_does_nothing():
    before = random.getstate()
    reset_seed()
    assert random.getstate() == before
    seed_everything(9, verbose=False)
    first = draw()
    reset_seed()
    assert draw() == first


def test_random_states_go_through_a_file_and_come_back(tmp_path: Path):
    draw()
    single_file.write({"state_dict": {}, "random": random_states()}, tmp_path / "x.ckpt")
    expected = draw()
    seed_everything(1, verbose=False)
    set_random_states(single_file.read(tmp_path / "x.ckpt")["random"])
    assert draw() == expected


def test_what_is_drawn_in_isolation_leaves_no_trace_even_after_an_error():
    draw()
    states = random_states()
    expected = draw()
    set_random_states(states)
    with isolate_rng():
        seed_everything(3, verbose=False)
        draw()
    with pytest.raises(ZeroDivisionError), isolate_rng():
        random.seed(1 / draw().count("nothing"))
    assert draw() == expected


def test_a_state_with_other_devices_is_put_back_as_far_as_it_goes_and_said():
    states = random_states() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)}
    expected = draw()
    if torch.cuda.is_available():
        states["cuda"] = [*torch.cuda.get_rng_state_all(), states["cuda"][0]]
    with pytest.warns(UserWarning, match="The RNG state of 'cuda' was saved but cannot be restored"):
        set_random_states(states)
    assert draw() == expected


@pytest.mark.gpu
def test_cuda_states_come_back():
    torch.rand(1, device="cuda")
    states = random_states()
    expected = torch.rand(4, device="cuda")
    with isolate_rng():
        torch.rand(4, device="cuda")
        torch.cuda.manual_seed_all(1)
    torch.cuda.manual_seed_all(2)
    set_random_states(states)
    assert torch.equal(torch.rand(4, device="cuda"), expected)


LAZY_NUMPY = """
import os
import sys
import numpy as np
import torch
from paceline.processes.seed import PrivateRandomness, random_states, seed_host, set_random_states

def a_seed():
    seed_host(5)
    assert np.random.rand() == np.random.RandomState(5).rand()

def a_checkpoint():
    states = random_states()
    drawn = np.random.rand()
    set_random_states(states)
    assert np.random.rand() == drawn

def a_loader():
    with PrivateRandomness(5):
        drawn = np.random.rand()
    assert drawn == np.random.RandomState(5).rand()

assert "numpy.random" not in sys.modules  # numpy loads it when it is first used
for case in (a_seed, a_checkpoint, a_loader):
    if os.fork() == 0:
        case()
        sys.exit()
    assert os.wait()[1] == 0, case.__name__
"""
WITHOUT_NUMPY = """
import sys
import torch
for name in [name for name in sys.modules if name.partition(".")[0] == "numpy"]:
    del sys.modules[name]
sys.modules["numpy"] = None  # importing it is an error from here on
from paceline.processes.seed import isolate_rng, random_states, seed_everything, set_random_states
seed_everything(1, verbose=False)
with isolate_rng():
    torch.rand(1)
states = random_states()
set_random_states(states)
sys.stdout.write(" ".join(sorted(states)))
"""


def run(program: str) -> str:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root.parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.cold
def test_numpy_counts_from_its_import_on_though_it_loads_its_random_numbers_later():
    run(LAZY_NUMPY)


@pytest.mark.cold
def test_numpy_is_never_imported_for_it():
    assert run(WITHOUT_NUMPY).split()[-2:] == ["python", "torch"]


def test_private_randomness_goes_on_where_it_was_left_and_leaves_no_trace():
    seed_everything(1, verbose=False)
    expected_outside = [draw(), draw()]
    whole, parts = PrivateRandomness(5), PrivateRandomness(5)
    with whole:
        expected = [draw(), draw()]
    seed_everything(1, verbose=False)
    with parts:
        first = draw()
    outside = [draw()]
    with parts:
        second = draw()
    outside.append(draw())
    assert [first, second] == expected
    assert outside == expected_outside
    with PrivateRandomness(6):
        assert all(one != other for one, other in zip(draw(), first, strict=True))


def test_private_randomness_leaves_no_trace_after_an_exception():
    seed_everything(1, verbose=False)
    expected = draw()
    seed_everything(1, verbose=False)
    with pytest.raises(KeyError), PrivateRandomness(5):
        raise KeyError(draw())
    assert draw() == expected

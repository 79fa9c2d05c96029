"""Where a process stands, with and without an Accelerator, and what belongs to the whole process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import RanksError, ranks

from paceline import Accelerator
from paceline.accelerator.enums import DistributedType
from paceline.accelerator.process_state import AcceleratorState, PartialState, is_initialized
from paceline.strategies import SingleDevice


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a4_one_process_is_the_main_the_local_main_and_the_last() -> None:
    state = PartialState()
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert not state.use_distributed
    assert state.distributed_type == "NO"
    assert state.backend is None
    assert state.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert PartialState(cpu=True).device.type == "cpu" or torch.cuda.is_available()
    state.wait_for_everyone()
    state.set_device()


def test_e9_u10_processes_on_a_cpu_form_one_group_with_one_main_process() -> None:
    def stand() -> Any:
        state = PartialState(cpu=True, timeout=timedelta(seconds=60))
        state.wait_for_everyone()
        with state.split_between_processes(["a", "b", "c"]) as part:
            assert part == (["a", "b"], ["c"])[state.process_index]
        with state.split_between_processes([1, 2, 3], apply_padding=True) as part:
            assert part == ([1, 2], [3, 3])[state.process_index]
        main = (state.is_main_process, state.is_local_main_process, state.is_last_process)
        return state.num_processes, state.process_index, str(state.distributed_type), state.backend, main

    first, last = ranks(2, stand)
    assert first == (2, 0, "MULTI_CPU", "gloo", (True, True, False))
    assert last == (2, 1, "MULTI_CPU", "gloo", (False, False, True))


def test_u10_half_of_a_launch_is_an_error_rather_than_many_main_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RuntimeError, match="but not MASTER_ADDR, MASTER_PORT,"):
        PartialState()


def test_a4_f2_torchrun_starts_processes_that_know_their_place(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from pathlib import Path\n"
        "from paceline.accelerator.process_state import PartialState\n"
        "state = PartialState()\n"
        "state.print('once', state.num_processes, state.distributed_type, state.device, sep='|', end=';\\n')\n"
        "state.on_process(lambda: Path('rank').write_text(str(state.process_index)), process_index=1)()\n"
    )
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environ = {**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "once|2|MULTI_CPU|cpu;\n"
    assert Path("rank").read_text() == "1"


def test_f1_functions_run_on_exactly_the_process_that_is_meant() -> None:
    def run() -> Any:
        state = PartialState()

        @state.on_process(process_index=1)
        def second() -> int:
            """Has a docstring."""
            return state.process_index

        by_name = {
            "main": state.on_main_process(lambda: state.process_index)(),
            "local main": state.on_local_main_process(lambda: state.process_index)(),
            "last": state.on_last_process(lambda: state.process_index)(),
            "second": second(),
            "local": state.on_local_process(lambda: state.process_index, local_process_index=0)(),
        }
        return by_name, second.__doc__

    (first, doc), (last, _) = ranks(2, run)
    assert first == {"main": 0, "local main": 0, "last": None, "second": None, "local": 0}
    assert last == {"main": None, "local main": None, "last": 1, "second": 1, "local": None}
    assert doc == "Has a docstring."


def test_the_main_process_goes_first_also_when_it_fails(tmp_path: Path) -> None:
    def go(fail: bool) -> Any:
        state = PartialState()
        found = None
        try:
            with state.main_process_first(), state.local_main_process_first():
                found = (tmp_path / f"made{fail}").exists()
                (tmp_path / f"made{fail}").touch()
                if fail and state.is_main_process:
                    raise InterruptedError
        except InterruptedError:
            found = "failed"
        with state.local_main_process_first():
            pass
        return found

    assert ranks(2, go, False) == [False, True]
    assert ranks(2, go, True) == ["failed", True]


def test_a_state_made_later_stands_where_the_first_one_does() -> None:
    strategy = SingleDevice("cpu")
    first = PartialState.of(strategy)
    assert PartialState().strategy is strategy
    second = PartialState.of(SingleDevice("cpu"))
    assert second.strategy is not strategy
    assert PartialState().strategy is first.strategy


def test_the_group_may_be_left_and_joined_anew() -> None:
    def leave() -> Any:
        state = PartialState()
        state.wait_for_everyone()
        state.destroy_process_group()
        return dist.is_initialized(), state.initialized

    assert ranks(2, leave) == [(False, False)] * 2


def test_after_a_reset_a_state_says_what_happened() -> None:
    state = PartialState()
    with pytest.raises(AttributeError, match="'PartialState' object has no attribute 'something'"):
        state.something  # type: ignore[attr-defined]  # noqa: B018
    PartialState._reset_state()
    assert not state.initialized
    with pytest.raises(AttributeError, match=r"`num_processes` anymore, because `PartialState._reset_state\(\)`"):
        state.num_processes  # noqa: B018
    assert PartialState().num_processes == 1


def test_an_accelerators_state_needs_an_accelerator() -> None:
    with pytest.raises(ValueError, match=r"this process has not created one. Call Accelerator"):
        AcceleratorState()
    assert not is_initialized()


def test_u16_the_state_shows_its_own_accelerator_and_the_last_one_made() -> None:
    place = PartialState()
    first = AcceleratorState.of(place, "bf16", fsdp_plugin="mine")
    second = AcceleratorState.of(place, "no")
    assert (first.mixed_precision, first.fsdp_plugin, first.deepspeed_plugin) == ("bf16", "mine", None)
    assert (second.mixed_precision, second.fsdp_plugin) == ("no", None)
    assert AcceleratorState() is second
    assert AcceleratorState(mixed_precision="no") is second
    with pytest.raises(ValueError, match=r"mixed_precision='fp16'.*latest Accelerator uses 'no'"):
        AcceleratorState(mixed_precision="fp16")
    assert second.device == place.device
    assert second.distributed_type == DistributedType.NO
    assert not second.is_fsdp2
    assert "Mixed precision type: no" in repr(second)
    with pytest.raises(AttributeError, match="'AcceleratorState' object has no attribute 'something'"):
        second.something  # noqa: B018


def test_after_a_reset_an_accelerators_state_says_what_happened() -> None:
    state = AcceleratorState.of(PartialState(), "no", deepspeed_plugin="mine")
    assert state.get_deepspeed_plugin("default") == "mine"
    AcceleratorState._reset_state()
    assert not state.initialized
    with pytest.raises(AttributeError, match=r"no attribute `mixed_precision` anymore.*Create a new Accelerator\(\)"):
        state.mixed_precision  # noqa: B018
    assert PartialState().num_processes == 1


def test_an_error_on_one_rank_names_it() -> None:
    def fail() -> None:
        PartialState().on_process(_raise, process_index=1)()

    with pytest.raises(RanksError, match="rank 1: "):
        ranks(2, fail)


def _raise() -> None:
    raise ValueError("mine")


def test_a_pickled_state_is_that_of_the_process_that_reads_it() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    written = [pickle.dumps(accelerator.state), pickle.dumps(accelerator.state._partial)]
    read = [pickle.loads(one) for one in written]
    assert AcceleratorState() is accelerator.state
    assert (read[0].mixed_precision, accelerator.state.mixed_precision) == ("bf16", "bf16")
    AcceleratorState._reset_state(reset_partial_state=True)
    for one in written:
        assert (pickle.loads(one).num_processes, PartialState().device.type) == (1, "cpu")

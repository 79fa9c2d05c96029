"""The tables of the kinds of devices."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from paceline.devices.base import DeviceKind
from paceline.devices.generic import Generic
from paceline.devices.kinds import accelerators, kind_of, present

PAGE = Path(__file__).resolve().parents[2] / "docs" / "devices.md"
KINDS = ("cuda", "mps", "xpu", "tpu", "cpu")


def test_each_kind_has_one_table_and_one_that_torch_alone_knows_gets_a_generic_one() -> None:
    assert [kind_of(name).name for name in KINDS] == [*KINDS]
    assert kind_of(torch.device("cuda", 1)) is kind_of("cuda")
    assert (type(kind_of("npu")), kind_of("npu").title) == (Generic, "NPU device")
    assert [kind.name for kind in accelerators()][:4] == [*KINDS[:4]]


@pytest.mark.parametrize("name", [*KINDS, "npu"])
def test_a_kind_answers_every_question_under_the_names_and_arguments_of_the_base(name: str) -> None:
    kind = kind_of(name)
    for method, base in inspect.getmembers(DeviceKind, inspect.isfunction):
        assert [*inspect.signature(getattr(type(kind), method)).parameters] == [*inspect.signature(base).parameters]
    assert torch.bfloat16 in kind.autocast_dtypes() if name != "npu" else not kind.is_available()


@pytest.mark.parametrize("name", ["mps", "xpu", "tpu", "npu"])
def test_a_kind_that_is_not_here_counts_nothing_and_has_no_random_states(name: str) -> None:
    kind = kind_of(name)
    if kind.is_available():
        pytest.skip(f"this machine has an {kind.title}")
    assert (kind.count(), kind.is_initialized(), kind.random_states()) == (0, False, None)
    assert kind.fork_obstacle() is None
    assert present().name in ("cuda", "cpu")


def test_the_free_memory_of_an_mps_device_leaves_out_what_the_driver_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.mps.recommended_max_memory", lambda: 100)
    for used, free in ((0, 100), (30, 70), (130, 0)):
        monkeypatch.setattr("torch.mps.driver_allocated_memory", lambda used=used: used)
        assert kind_of("mps").free_memory("mps") == free


def test_an_mps_device_has_events_of_torch_and_no_streams_and_a_fork_cannot_use_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, made = kind_of("mps"), []
    monkeypatch.setattr("torch._C._mps_acquireEvent", lambda timed: made.append(timed) or 0, raising=False)
    event = kind.new_event(timed=True)
    assert isinstance(event, torch.mps.Event)
    assert isinstance(kind.new_event(), torch.mps.Event)
    assert made == [True, False]
    assert kind.has_timed_events()
    assert {"record", "query", "synchronize", "elapsed_time"} <= {*dir(event)}  # what the base asks of an event
    assert not kind.overlaps_copies()
    with pytest.raises(NotImplementedError, match="no streams for the MPS device"):
        kind.new_stream(torch.device("mps"))
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert "the fork cannot use the MPS device" in (kind.fork_obstacle() or "")


def test_the_page_says_of_each_kind_whether_it_has_run() -> None:
    rows = [row.split("|") for row in PAGE.read_text().splitlines() if row.startswith("| ")]
    told = {row[2].strip().partition('"')[2].partition('"')[0]: row[5].strip() for row in rows if len(row) == 7}
    words = ("ran here", "ran on a lent machine", "written and never run")
    assert {name for name in told if name in KINDS} == {*KINDS}
    assert all(said.startswith(words) for name, said in told.items() if name)

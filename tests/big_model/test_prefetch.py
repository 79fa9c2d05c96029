"""Parts of a model that are fetched and freed again."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from big_models import write
from torch import Tensor, nn

from paceline.big_model.prefetch import Fetcher, Part
from paceline.big_model.weight_files import Pages, mapped_tensors

CPU = torch.device("cpu")


def part_of(folder: Path, misaligned: bool, fetcher: Fetcher | None = None, name: str = "m") -> tuple[Part, Tensor]:
    path = write({"w": torch.arange(20_000.0)}, folder / f"{name}.safetensors", misaligned)
    parameter = nn.Parameter(dict(mapped_tensors(path))["w"])
    fetcher = fetcher or Fetcher()
    fetcher.pages = Pages()
    return Part([parameter], CPU, fetcher), parameter


ALIGNED = pytest.mark.parametrize("misaligned", [False, True], ids=["aligned", "misaligned"])
WAYS = {
    "in place": lambda parameter: torch.no_grad()(parameter.add_)(1),
    "through data": lambda parameter: parameter.data.add_(1),
    "in inference mode": lambda parameter: torch.inference_mode()(parameter.add_)(1),
    "other data": lambda parameter: setattr(parameter, "data", parameter.data + 1),
}


@ALIGNED
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_changes_between_two_runs_are_seen_and_kept(way: Any, misaligned: bool, tmp_path: Path) -> None:
    part, parameter = part_of(tmp_path, misaligned)
    expected = torch.arange(20_000.0)
    for _ in range(3):
        part.enter()
        assert torch.equal(parameter, expected)
        assert parameter.data_ptr() % 64 == 0
        part.leave()
        way(parameter)
        expected += 1
        assert torch.equal(parameter, expected)


@ALIGNED
@pytest.mark.parametrize("way", [way for way in WAYS if way != "through data"])
def test_changes_while_it_runs_are_kept(way: str, misaligned: bool, tmp_path: Path) -> None:
    part, parameter = part_of(tmp_path, misaligned)
    for count in range(3):
        part.enter()
        assert torch.equal(parameter, torch.arange(20_000.0) + count)
        WAYS[way](parameter)
        part.leave()
    assert torch.equal(parameter, torch.arange(20_000.0) + 3)


@ALIGNED
def test_batch_statistics_which_leave_no_version_are_kept(misaligned: bool, tmp_path: Path) -> None:
    path = write({"mean": torch.zeros(5000), "var": torch.ones(5000)}, tmp_path / "m.safetensors", misaligned)
    mapped = dict(mapped_tensors(path))
    norm, other = nn.BatchNorm1d(5000), nn.BatchNorm1d(5000)
    norm.running_mean, norm.running_var = mapped["mean"], mapped["var"]
    part = Part([norm.running_mean, norm.running_var], CPU, Fetcher())
    for _ in range(3):
        x = torch.randn(4, 5000)
        part.enter()
        norm(x)
        part.leave()
        other(x)
    assert torch.equal(norm.running_mean, other.running_mean)
    assert torch.equal(norm.running_var, other.running_var)


@ALIGNED
def test_a_change_after_it_was_fetched_in_advance_is_seen(misaligned: bool, tmp_path: Path) -> None:
    fetcher = Fetcher()
    first, _ = part_of(tmp_path, misaligned, fetcher, "one")
    second, parameter = part_of(tmp_path, misaligned, fetcher, "two")
    first.following = second
    fetcher.start()
    first.enter()
    assert fetcher._advance is not None
    fetcher._advance.tensors.result()
    with torch.no_grad():
        parameter.add_(1)
    first.leave()
    second.enter()
    assert torch.equal(parameter, torch.arange(20_000.0) + 1)
    second.leave()
    fetcher.stop()
    assert torch.equal(parameter, torch.arange(20_000.0) + 1)


def test_copies_are_made_in_advance_only_while_the_model_runs(tmp_path: Path) -> None:
    """Between two runs anything may change, also what torch does not see."""
    fetcher = Fetcher()
    first, _ = part_of(tmp_path, True, fetcher, "one")
    second, parameter = part_of(tmp_path, True, fetcher, "two")
    for _ in range(2):
        for part in (first, second):
            part.enter()
            part.leave()
    assert first.following is second
    assert fetcher._advance is None
    parameter.data.add_(1)
    second.enter()
    assert torch.equal(parameter, torch.arange(20_000.0) + 1)
    second.leave()
    fetcher.start()
    first.enter()
    assert fetcher._advance is not None
    first.leave()
    fetcher.stop()
    assert fetcher._advance is None


def test_a_failing_fetch_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = Fetcher()
    first, one = part_of(tmp_path, True, fetcher, "one")
    second, two = part_of(tmp_path, True, fetcher, "two")
    first.following = second
    home, real = two.data_ptr(), mmap.mmap
    fetcher.start()
    monkeypatch.setattr(mmap, "mmap", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(MemoryError, match="no room"):
        first.enter()
    monkeypatch.setattr(mmap, "mmap", real)
    first.enter()
    with pytest.MonkeyPatch.context() as patch:
        fetcher._drop()
        patch.setattr(mmap, "mmap", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no room")))
        fetcher.begin(second)
        assert fetcher._advance is not None
        assert isinstance(fetcher._advance.tensors.exception(), MemoryError)
    second.enter()  # tried again
    assert torch.equal(two, torch.arange(20_000.0))
    second.leave()
    first.leave()
    fetcher.stop()
    assert two.data_ptr() == home
    assert torch.equal(one, torch.arange(20_000.0))


def test_a_part_within_itself_comes_once_and_goes_last(tmp_path: Path) -> None:
    part, parameter = part_of(tmp_path, True)
    home = parameter.data_ptr()
    part.enter()
    part.enter()
    part.leave()
    assert parameter.data_ptr() != home
    part.leave()
    assert parameter.data_ptr() == home


def test_parameters_made_in_inference_mode_come_and_go(tmp_path: Path) -> None:
    with torch.inference_mode():
        part, parameter = part_of(tmp_path, True)
        other, aligned = part_of(tmp_path, False, name="b")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for one, tensor in ((part, parameter), (other, aligned)):
                one.enter()
                assert torch.equal(tensor, torch.arange(20_000.0))
                one.leave()
    with torch.inference_mode():
        part.enter()
        parameter.add_(1)
        part.leave()
    assert torch.equal(parameter, torch.arange(20_000.0) + 1)


def test_a_fork_fetches_too(tmp_path: Path) -> None:
    part, parameter = part_of(tmp_path, True)
    part.enter()
    part.leave()
    pid = os.fork()
    if pid == 0:
        threading.Timer(20, lambda: os._exit(1)).start()
        part.enter()
        os._exit(0 if torch.equal(parameter, torch.arange(20_000.0)) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_no_thread_stays_behind(tmp_path: Path) -> None:
    fetcher = Fetcher()
    first, _ = part_of(tmp_path, False, fetcher, "one")
    first.following, _ = part_of(tmp_path, False, fetcher, "two")
    fetcher.start()
    first.enter()
    assert fetching()
    first.leave()
    fetcher.stop()
    assert not fetching()


def fetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("paceline-fetch")]


def test_pages_are_those_of_the_moment(tmp_path: Path) -> None:
    before = Pages()
    _, parameter = part_of(tmp_path, False)
    assert not before.holds(parameter)
    assert Pages().holds(parameter)

"""Weights in folders, and parts that come and go."""

from __future__ import annotations

import json
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from big_models import write
from torch import Tensor, nn

from paceline.big_model.offload import (
    Fetcher,
    OffloadedWeightsLoader,
    Part,
    PrefixedDataset,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from paceline.big_model.weight_files import Pages, mapped_tensors

CPU = torch.device("cpu")

# ---- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_a_tensor_comes_back_as_it_was(dtype: torch.dtype, tmp_path: Path) -> None:
    value = (torch.randn(3, 4) * 4).to(dtype)
    index = offload_weight(value, "a.b", tmp_path / "new")
    found = load_offloaded_weight(tmp_path / "new" / "a.b.dat", index["a.b"])
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))
    assert os.listdir(tmp_path / "new") == ["a.b.dat"]


def test_odd_shapes_and_types_are_written_too(tmp_path: Path) -> None:
    state = {"scalar": torch.tensor(2.5), "none": torch.empty(0, 3), "turned": torch.arange(6.0).view(2, 3).t()}
    offload_state_dict(tmp_path, state)
    found = OffloadedWeightsLoader(save_folder=tmp_path)
    assert list(found) == list(state)
    assert len(found) == 3
    assert all(torch.equal(found[name], value) for name, value in state.items())
    index = offload_weight(torch.ones(5), "half", tmp_path, dtype=torch.float16)
    assert index["half"] == {"dtype": "float16", "shape": [5]}


def test_writing_a_mapped_tensor_that_was_changed_leaves_it_changed(tmp_path: Path) -> None:
    value = dict(mapped_tensors(write({"a": torch.zeros(50_000)}, tmp_path / "m.safetensors")))["a"]
    value.data.add_(1)
    offload_state_dict(tmp_path, {"a": value})
    assert value.sum() == 50_000
    assert OffloadedWeightsLoader(save_folder=tmp_path)["a"].sum() == 50_000


def test_a_folder_of_another_model_is_named(tmp_path: Path) -> None:
    index = offload_weight(torch.ones(3), "a", tmp_path)
    save_offload_index(index, tmp_path)
    offload_weight(torch.ones(4), "a", tmp_path)
    with pytest.raises(ValueError, match=r"a\.dat' has 16 bytes, but .* has 12\. The folder was changed"):
        OffloadedWeightsLoader(save_folder=tmp_path)["a"]
    (tmp_path / "a.dat").unlink()
    with pytest.raises(FileNotFoundError):
        OffloadedWeightsLoader(save_folder=tmp_path)["a"]


def test_an_index_is_added_to(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_offload_index(offload_weight(torch.ones(1), name, tmp_path), tmp_path)
    assert sorted(json.loads((tmp_path / "index.json").read_text())) == ["a", "b"]
    save_offload_index({}, tmp_path / "nowhere")


def test_what_cannot_be_written_says_how_large_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"'a' \(40 bytes\) cannot be offloaded: .*file"):
        offload_weight(torch.ones(10), "a", tmp_path / "file")
    with pytest.raises(OSError, match=r"'a' \(40000 bytes\) cannot be offloaded: No space left"):
        offload_weight(torch.ones(10_000), "a", full(tmp_path))


def full(folder: Path) -> Path:
    """A folder in which the file that is written is a device that has no room."""
    (folder / "full").mkdir()
    (folder / "full" / f".a.dat.{os.getpid()}.tmp").symlink_to("/dev/full")
    return folder / "full"


def test_tensors_come_from_memory_files_and_prefixes(tmp_path: Path) -> None:
    file = write({"x": torch.ones(3)}, tmp_path / "m.safetensors")
    entries = {"y": {"safetensors_file": str(file), "weight_name": "x", "dtype": "float16"}}
    found = OffloadedWeightsLoader({"a.w": torch.zeros(1)}, index=entries)
    assert set(found) == {"a.w", "y"}
    assert found["y"].dtype == torch.float16
    twice = OffloadedWeightsLoader(index={"y": {"safetensors_file": str(file), "weight_name": "x"}, "z": entries["y"]})
    twice["y"].add_(1)
    assert torch.equal(twice["z"], torch.ones(3, dtype=torch.float16))  # changing one does not change another
    with pytest.raises(ValueError, match=r"looks for 'X' in .*m\.safetensors', which does not have it\. The file was"):
        OffloadedWeightsLoader(index={"X": {"safetensors_file": str(file)}})["X"]
    inside = PrefixedDataset(found, "a.")
    assert (list(inside), len(inside)) == (["w"], 1)
    assert torch.equal(inside["w"], torch.zeros(1))
    with pytest.raises(ValueError, match="needs a state_dict, a save_folder or an index"):
        OffloadedWeightsLoader()


# ---- parts -----------------------------------------------------------------------------------------------------------


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

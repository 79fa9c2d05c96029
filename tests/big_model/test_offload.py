"""Weights in folders."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from big_models import write

from paceline.big_model.offload import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from paceline.big_model.weight_files import mapped_tensors

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
    with pytest.raises(ValueError, match=r"a\.dat' has 16 bytes, but .* has 12\. The folder has been changed"):
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
    with pytest.raises(
        ValueError, match=r"expects 'X' in .*m\.safetensors', which does not contain it\. The file has been"
    ):
        OffloadedWeightsLoader(index={"X": {"safetensors_file": str(file)}})["X"]
    inside = PrefixedDataset(found, "a.")
    assert (list(inside), len(inside)) == (["w"], 1)
    assert torch.equal(inside["w"], torch.zeros(1))
    with pytest.raises(ValueError, match="needs a state_dict, a save_folder or an index"):
        OffloadedWeightsLoader()

"""Files of weights, mapped into memory, and what the system is told about their pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from big_models import write
from torch import Tensor, nn

from paceline.big_model.weight_files import (
    Pages,
    advise_needed,
    copy_into,
    is_aligned,
    map_file,
    mapped_tensors,
    weight_files,
)

#: Of 4 KiB pages, so that several lie between the first and the last one.
COUNT = 100_000


def resident(tensor: Tensor) -> int:
    """Bytes in memory of the mapped file that a tensor lies in."""
    text = Path("/proc/self/smaps").read_text()
    for found in re.finditer(r"^([0-9a-f]+)-([0-9a-f]+) .*?^Rss:\s+(\d+) kB", text, re.M | re.S):
        if int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16):
            return int(found[3]) * 1024
    raise AssertionError("it is not mapped")


def mapped(folder: Path, kind: str = "safetensors", **values: Tensor) -> dict[str, Tensor]:
    state = values or {"a": torch.arange(float(COUNT)), "b": torch.ones(COUNT)}
    if kind == "safetensors":
        return dict(mapped_tensors(write(state, folder / "model.safetensors")))
    torch.save(state, folder / "model.bin")
    return dict(mapped_tensors(folder / "model.bin"))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_pages_are_read_and_given_back(kind: str, tmp_path: Path) -> None:
    a = mapped(tmp_path, kind)["a"]
    pages = Pages()
    assert pages.holds(a)
    assert pages.holds(a[7:9])
    pages.give_back(a)
    before = resident(a)
    advise_needed(a)
    assert resident(a) >= before + a.nbytes - 8192
    pages.give_back(a, around=True)
    assert resident(a) <= before
    assert torch.equal(a, torch.arange(float(COUNT)))


def test_memory_of_the_process_is_never_given_back(tmp_path: Path) -> None:
    mapped(tmp_path)
    own = torch.arange(float(COUNT))
    pages = Pages()
    assert not pages.holds(own)
    assert not pages.holds(torch.empty(0))
    assert not pages.holds(torch.empty(3, device="meta"))
    pages.give_back(own)
    assert torch.equal(own, torch.arange(float(COUNT)))
    pages._ranges = [(own.data_ptr() - 2**23, own.data_ptr() + own.nbytes + 2**23)]  # even if it were taken for a file
    pages.give_back(own, around=True)
    assert torch.equal(own, torch.arange(float(COUNT)))


CHANGES = {
    "in place": lambda tensor: tensor.add_(1),
    "one element at the end": lambda tensor: tensor[-5000:-4999].add_(1),
    "through data": lambda tensor: tensor.data.mul_(2),
    "through numpy": lambda tensor: tensor.numpy().__setitem__(slice(30_000, 30_001), -1),
    "in inference mode": lambda tensor: torch.inference_mode()(tensor.fill_)(3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_what_was_changed_is_never_given_back(kind: str, change: Any, tmp_path: Path) -> None:
    a = mapped(tmp_path, kind)["a"]
    change(a)
    expected = a.clone()
    Pages().give_back(a)
    assert torch.equal(a, expected)
    Pages().give_back(a[10_000:], around=True)
    assert torch.equal(a, expected)
    assert torch.equal(mapped_again(tmp_path)["a"], torch.arange(float(COUNT))), "the file was changed"


def mapped_again(folder: Path) -> dict[str, Tensor]:
    return dict(mapped_tensors(next(folder.glob("model.*"))))


def test_without_word_from_the_system_nothing_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = mapped(tmp_path)["a"]
    a.sum()

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError

    monkeypatch.setattr("builtins.open", refuse)
    before = resident(a)
    Pages().give_back(a)
    assert resident(a) == before


def test_copying_keeps_no_more_than_a_chunk_and_converts(tmp_path: Path) -> None:
    a = mapped(tmp_path)["a"]
    target = torch.empty(COUNT, dtype=torch.bfloat16)
    copy_into(target, a)
    assert resident(a) < 200_000
    assert torch.equal(target, torch.arange(float(COUNT)).bfloat16())
    matrix = mapped(tmp_path, a=torch.randn(30, 40))["a"]
    turned = torch.empty(40, 30)
    copy_into(turned, matrix.t())
    assert torch.equal(turned, matrix.t())
    copy_into(torch.empty(0), torch.empty(0))


def test_what_lies_in_memory_apart_is_known_by_its_whole_span(tmp_path: Path) -> None:
    matrix = mapped(tmp_path, "bin", a=torch.arange(400_000.0).view(400, 1000)[:, ::2])["a"]
    assert not matrix.is_contiguous()
    assert not is_aligned(matrix)
    pages = Pages()
    assert pages.holds(matrix)
    advise_needed(matrix)
    pages.give_back(matrix)
    assert resident(matrix) < 200_000
    matrix[-1, -1] = -1
    pages.give_back(matrix)
    assert matrix[-1, -1] == -1


def test_a_matrix_that_begins_anywhere_gives_other_bits_and_is_known_as_such(tmp_path: Path) -> None:
    state = {"w": torch.randn(64, 64), "z": torch.randn(8, 8, dtype=torch.complex64), "n": torch.arange(8)}
    good = dict(mapped_tensors(write(state, tmp_path / "good.safetensors")))
    bad = dict(mapped_tensors(write(state, tmp_path / "bad.safetensors", misaligned=True)))
    assert is_aligned(good["w"])
    assert not is_aligned(bad["w"])
    assert not is_aligned(bad["z"])
    assert is_aligned(bad["n"])
    assert is_aligned(torch.empty(3))


def test_a_file_of_bytes_is_a_tensor(tmp_path: Path) -> None:
    value = torch.randn(3, 5, dtype=torch.float64).bfloat16()
    (tmp_path / "w.dat").write_bytes(value.view(torch.uint8).numpy().tobytes())
    assert torch.equal(map_file(tmp_path / "w.dat", torch.bfloat16, (3, 5)), value)
    assert map_file(tmp_path / "none", torch.float32, (0, 4)).shape == (0, 4)


# ---- which files -----------------------------------------------------------------------------------------------------


def test_a_whole_file_counts_before_an_index_and_safetensors_before_others(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "other.pt"):
        (tmp_path / name).touch()
    assert [file.name for file in weight_files(tmp_path)] == ["pytorch_model.bin"]
    (tmp_path / "model.safetensors").touch()
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").unlink()
    assert [file.name for file in weight_files(tmp_path)] == ["other.pt"]


INDEXES = {
    "no json": "{",
    "a list": "[]",
    "no map": "{}",
    "numbers": '{"weight_map": {"a": 1}}',
    "nested": '{"weight_map": {"a": {}}}',
    "map is a list": '{"weight_map": ["a"]}',
    "bytes": "\udcff",
}


@pytest.mark.parametrize("text", INDEXES.values(), ids=INDEXES)
def test_an_index_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json.* is not a valid weight index"):
        weight_files(tmp_path)


def test_files_of_an_index_that_are_not_there_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}}))
    (tmp_path / "1.safetensors").touch()
    with pytest.raises(FileNotFoundError, match=r"lists 2 files, of which 1 could not be found: 2\.safetensors"):
        weight_files(path)
    (tmp_path / "2.safetensors").touch()
    assert [file.name for file in weight_files(path)] == ["1.safetensors", "2.safetensors"]


def test_folders_without_weights_of_one_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="which is empty"):
        weight_files(tmp_path)
    for name in ("a.pt", "b.pt"):
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match=r"which contains a\.pt, b\.pt"):
        weight_files(tmp_path)
    with pytest.raises(FileNotFoundError, match="no weights at"):
        weight_files(tmp_path / "deeper" / "still")


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
@pytest.mark.parametrize("left", [0, 5, 60, 2000, -1], ids=lambda left: f"{left} bytes left")
def test_a_file_that_was_cut_off_is_named(name: str, left: int, tmp_path: Path) -> None:
    path = tmp_path / name
    state = {"a": torch.ones(1000)}
    if name.endswith("bin"):
        torch.save(state, path)
    else:
        write(state, path)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match=f"The weights in .*{name}.* cannot be read.*damaged"):
        dict(mapped_tensors(path))


def test_what_holds_no_tensors_by_name_is_named(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    with pytest.raises(ValueError, match="contains a Tensor, not a dict"):
        dict(mapped_tensors(tmp_path / "tensor.pt"))
    torch.save(nn.Linear(1, 1), tmp_path / "module.pt")
    with pytest.raises(ValueError, match="Weights only load failed"):
        dict(mapped_tensors(tmp_path / "module.pt"))
    torch.save({"epoch": 3, "state_dict": {"a": torch.ones(1)}}, tmp_path / "nested.pt")
    assert list(dict(mapped_tensors(tmp_path / "nested.pt"))) == ["a"]

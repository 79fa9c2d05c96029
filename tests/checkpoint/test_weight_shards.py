"""Weights in one file or several with an index, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paceline.checkpoint import safetensors_export
from paceline.checkpoint.storage import location
from paceline.checkpoint.weight_shards import SAFETENSORS, TORCH, Layout, write_shards


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def write(model: nn.Module, folder: Path, limit: int = 10**10, layout: Layout = SAFETENSORS) -> None:
    write_shards(model.state_dict(), location(folder), limit, layout, [])


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "torch"])
def test_a_large_model_is_several_files_with_an_index(tmp_path: Path, safe: bool) -> None:
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(5)))
    write(model, tmp_path, 1000, SAFETENSORS if safe else TORCH)
    stem, suffix = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
    files = [f"{stem}-{number:05d}-of-00003{suffix}" for number in (1, 2, 3)]
    index = f"{stem}{suffix}.index.json"
    assert names(tmp_path) == sorted([*files, index])
    content = json.loads((tmp_path / index).read_text())
    assert content["metadata"] == {"total_size": 2000}
    assert content["weight_map"] == {f"{i}.weight": files[i // 2] for i in range(5)}
    for name, file in content["weight_map"].items():
        found = load_file(tmp_path / file) if safe else torch.load(tmp_path / file)
        assert torch.equal(found[name], model.state_dict()[name])


def test_files_of_the_save_before_go_and_others_stay(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    (tmp_path / "config.json").write_text("{}")
    write(model, tmp_path, 400)
    assert len(names(tmp_path)) == 6
    write(model, tmp_path)
    assert names(tmp_path) == ["config.json", "model.safetensors"]


def test_a_save_that_fails_leaves_the_files_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    write(model, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    write_one, calls = safetensors_export.write_safetensors, []

    def fail_second(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        write_one(*args)

    monkeypatch.setattr(safetensors_export, "write_safetensors", fail_second)
    with pytest.raises(OSError, match="No space"):
        write(model, tmp_path, 400)
    assert names(tmp_path) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before

"""Weights in files that other tools read: one or several with an index, tied ones once, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from paceline import Accelerator
from paceline.big_model.module_sizes import size_in_bytes


class Tied(nn.Module):
    """Two names for one weight, and a part of another as a weight of its own."""

    _tied_weights_keys = ("first",)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False)
        self.second = nn.Linear(4, 8, bias=False)
        self.second.weight = self.first.weight
        whole = torch.arange(12.0)
        self.register_buffer("low", whole[:6])
        self.register_buffer("high", whole[6:])


def prepared(model: nn.Module) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True)
    return accelerator, accelerator.prepare(model)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_small_model_is_one_file_of_the_names_it_has(tmp_path: Path) -> None:
    accelerator, model = prepared(nn.Linear(3, 2))
    accelerator.save_model(model, tmp_path / "m")
    assert names(tmp_path / "m") == ["model.safetensors"]
    found = load_file(tmp_path / "m" / "model.safetensors")
    assert found.keys() == {"weight", "bias"}
    assert torch.equal(found["weight"], model.weight)
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_tied_weights_are_written_once_under_the_name_that_is_not_tied(tmp_path: Path) -> None:
    accelerator, model = prepared(Tied())
    accelerator.save_model(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == {"second.weight", "low", "high"}
    assert torch.equal(found["high"], torch.arange(6.0, 12.0))
    again = Tied()
    assert again.load_state_dict(found, strict=False).missing_keys == ["first.weight"]
    assert torch.equal(again.first.weight, model.first.weight)


def test_transformers_reads_what_was_saved(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    accelerator, model = prepared(transformers.GPT2LMHeadModel(config))
    config.save_pretrained(tmp_path)
    accelerator.save_model(model, tmp_path, max_shard_size="2KB")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    pairs = zip(model.state_dict().items(), again.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    assert again.lm_head.weight is again.transformer.wte.weight


def test_wrong_arguments_are_errors_that_say_what_to_do(tmp_path: Path) -> None:
    accelerator, model = prepared(nn.Linear(3, 2))
    for size in ("10", "ten GB", 0, -5, True, "0GB"):
        with pytest.raises(ValueError, match=r"max_shard_size=.* is not a valid size"):
            accelerator.save_model(model, tmp_path, max_shard_size=size)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file"):
        accelerator.save_model(model, tmp_path / "file")


@pytest.mark.parametrize(("text", "size"), [("10GB", 10**10), ("1.5MB", 1_500_000), ("2 GiB", 2**31), (7, 7)])
def test_sizes_are_read(text: Any, size: int) -> None:
    assert size_in_bytes(text, "max_shard_size") == size


def test_the_state_dict_of_a_compiled_model_has_the_models_own_names() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(3, 2))
    compiled = torch.compile(model)
    assert accelerator.get_state_dict(compiled).keys() == {"weight", "bias"}
    other = nn.Linear(2, 2)
    assert accelerator.get_state_dict(other).keys() == {"weight", "bias"}


def save_on_two(folder: str, strategy: str) -> Any:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, _ = accelerator.prepare(model, optimizer)
    accelerator.save_model(model, folder)
    accelerator.save({"rank": accelerator.process_index}, f"{folder}/who.pt")
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    return len(state), names(Path(folder))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_write_the_whole_weights_once(tmp_path: Path, strategy: str) -> None:
    (first, seen), (second, seen_too) = ranks(2, save_on_two, str(tmp_path), strategy)
    assert (first, second) == (4, 4 if strategy == "ddp" else 0)
    assert seen == seen_too == ["model.safetensors", "who.pt"]
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).state_dict()
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.load(tmp_path / "who.pt") == {"rank": 0}


def test_save_writes_tensors_as_safetensors_when_asked(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    tensor = torch.arange(6.0).reshape(2, 3).T
    accelerator.save({"a": tensor}, tmp_path / "a.safetensors", safe_serialization=True)
    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], tensor)
    with pytest.raises(TypeError, match=r"also has non-tensor values \(n\)"):
        accelerator.save({"a": tensor, "n": 1}, tmp_path / "b.safetensors", safe_serialization=True)
    with pytest.raises(TypeError, match="is of type list"):
        accelerator.save([tensor], tmp_path / "b.safetensors", safe_serialization=True)
    assert names(tmp_path) == ["a.safetensors"]
    with (tmp_path / "c.pt").open("wb") as file:
        accelerator.save({"n": 1}, file)
    assert torch.load(tmp_path / "c.pt") == {"n": 1}

"""``paceline estimate-memory``: rows C16 and I8, pain U21."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.cli.main import FAILED, main

FACTORY = """
import torch
from torch import nn
from paceline import TrainingModule

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(1000, 1000, bias=False) for _ in range(4)))

def build(batch_size=8):
    return Net(), (torch.zeros(batch_size, 1000),)

def fixed():
    return Net(), (torch.zeros(8, 1000),)

def huge():
    return nn.Linear(200_000, 200_000)

def chooses():
    class Chooses(Net):
        def forward(self, x):
            return super().forward(x[x.sum(1) > 0])
    return Chooses(), (torch.zeros(8, 1000),)

class Module(TrainingModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
"""
MB = 10**6


@pytest.fixture
def factory(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FACTORY)
    return str(tmp_path / "mine.py")


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["estimate-memory", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_c16_a_factory_gives_loading_and_training_for_each_dtype(
    factory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(capsys, f"{factory}:build", "--device_memory", "1GB", "--num_processes", "4")
    assert found["parameters"] == 4 * MB
    loading = {row["dtype"]: row for row in found["loading"]}
    weights = {"float32": 16 * MB, "bf16-mixed": 16 * MB, "bfloat16": 8 * MB, "int8": 4 * MB, "int4": 2 * MB}
    assert {name: row["weights"] for name, row in loading.items()} == weights
    assert loading["float32"]["largest_layer"] == 4 * MB
    assert found["largest_layer"] == "0"
    assert loading["int8"]["training"] is None
    assert 16 * MB <= loading["float32"]["inference"] < 17 * MB
    assert 4 * MB <= loading["float32"]["offloaded"] < 5 * MB
    training = {(row["strategy"], row["precision"]): row for row in found["training"]}
    assert len(training) == 4 * 3
    single = training["single_device", "32-true"]
    assert (single["weights"], single["gradients"], single["optimizer"]) == (16 * MB, 16 * MB, 32 * MB + 16)
    assert single["training"] == loading["float32"]["training"]
    assert 64 * MB <= single["training"] < 80 * MB
    assert training["fsdp", "32-true"]["weights"] == 4 * MB
    assert training["fsdp", "32-true"]["num_processes"] == 4
    assert training["fsdp_cpu_offload", "bf16-true"]["host"] == 8 * MB + 16
    assert {row["fits"] for row in found["training"]} == {"yes"}


def test_i8_a_model_that_does_not_fit_is_told_with_what_would(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (f"{factory}:build", "--batch_size", "1", "--dtypes", "float32", "--num_processes", "2")
    found = asked(capsys, *arguments, "--device_memory", "40MB")
    fits = {row["strategy"]: row["fits"] for row in found["training"]}
    assert fits == {"single_device": "no", "ddp": "no", "fsdp": "no", "fsdp_cpu_offload": "yes"}
    said = " ".join(found["verdict"])
    assert "These do not fit: single_device in 32-true" in said
    assert "These fit: fsdp_cpu_offload x2 in 32-true" in said
    nothing = asked(capsys, *arguments, "--device_memory", "25MB", "--strategy", "fsdp")
    assert {row["fits"] for row in nothing["training"]} == {"no"}
    said = " ".join(nothing["verdict"])
    assert "These would fit: " in said
    assert "fsdp x32 in bf16-mixed (" in said
    assert "fsdp_cpu_offload x2 in bf16-mixed (" in said
    small = asked(capsys, *arguments, "--device_memory", "10MB", "--dtypes", "float32", "int8")
    assert (
        "Loaded in float32, the model does not fit on one device of 9.54 MiB. In int8 (3.83 MiB), the model fits."
        in " ".join(small["verdict"])
    )


def test_the_batch_can_be_resized_whether_the_factory_knows_or_not(
    factory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--dtypes", "float32", "--strategy", "single_device")
    for name in ("build", "fixed"):
        small, large = (
            asked(capsys, f"{factory}:{name}", *few, "--batch_size", size)["training"][0] for size in ("10", "1000")
        )
        assert (small["batch_size"], large["batch_size"]) == (10, 1000)
        assert large["activations"] > 90 * small["activations"]


def test_the_table_has_a_row_for_each_dtype_and_strategy(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate-memory", f"{factory}:build", "--dtypes", "float32", "int4", "--device_memory", "24GiB"]) == 0
    said = capsys.readouterr().out
    for word in ("4,000,000 parameters", "float32", "int4", "single_device", "ddp x2", "fsdp x2", "devices of 24 GiB"):
        assert word in said
    assert all(len(line) <= 160 for line in said.splitlines() if "|" in line)


def test_a_model_that_no_machine_could_hold_takes_no_memory(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, f"{factory}:huge", "--dtypes", "bfloat16", "--device_memory", "80GiB")
    assert found["parameters"] == 200_000 * 200_001
    assert any("returned no batch, so activations are not included" in note for note in found["notes"])
    assert found["training"][0]["activations"] is None
    assert found["training"][0]["training"] > 4 * 2 * 40 * 10**9


def test_a_step_that_cannot_be_followed_leaves_the_activations_out_and_says_so(
    factory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(capsys, f"{factory}:chooses", "--dtypes", "float32")
    assert found["training"][0]["activations"] is None
    assert found["training"][0]["optimizer"] == 32 * MB + 16
    assert [note for note in found["notes"] if "cannot be estimated" in note]


def test_u21_files_of_safetensors_are_read_by_their_headers_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file(
        {"a.0.w": torch.zeros(1000, dtype=torch.bfloat16), "n": torch.zeros(10, dtype=torch.int64)},
        folder / "1.safetensors",
    )
    save_file({"a.1.w": torch.zeros(3000)}, folder / "2.safetensors")
    index = {"weight_map": {"a.0.w": "1.safetensors", "n": "1.safetensors", "a.1.w": "2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in (folder, folder / "model.safetensors.index.json"):
        found = asked(capsys, str(path), "--dtypes", "float32", "int8")
        assert found["parameters"] == 4010
        assert [row["weights"] for row in found["loading"]] == [16_080, 4_080]
        assert found["training"] == []
        assert "activations are not included" in found["notes"][0]
    # Data that is not there is noticed, data that is wrong is never looked at.
    whole = (folder / "2.safetensors").read_bytes()
    (folder / "2.safetensors").write_bytes(whole[:-12000] + b"\xff" * 12000)
    assert asked(capsys, str(folder / "2.safetensors"))["parameters"] == 3000
    (folder / "2.safetensors").write_bytes(whole[:-1])
    assert main(["estimate-memory", str(folder)]) == FAILED
    assert "2.safetensors' cannot be read: Error while deserializing header: incomplete" in capsys.readouterr().err
    (folder / "2.safetensors").write_bytes(struct.pack("<Q", 2**60))
    assert main(["estimate-memory", str(folder)]) == FAILED
    assert "The file is damaged or has another format. Download or write the file again." in capsys.readouterr().err


def test_u21_a_name_of_the_hub_is_told_what_to_do_without_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate-memory", "mistralai/Mixtral-8x7B-v0.1"]) == FAILED
    said = capsys.readouterr().err
    assert "There is no file or folder 'mistralai/Mixtral-8x7B-v0.1' in the working directory." in said
    assert "downloads nothing" in said
    assert "gated" not in said
    assert "hf download mistralai/Mixtral-8x7B-v0.1 config.json" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mine.py"], "Add the name of the function that builds the model, for example mine.py:build_model"),
        (["mine.py:bild"], "no function or class 'bild'. Did you mean 'build'?"),
        (["mine.py:torch"], "no function or class 'torch'"),
        (["mine.py:build", "--device_memory", "much"], "--device_memory='muchB' is not a valid size"),
        (["mine.py:build", "--batch_size", "0"], "--batch_size must be 1 or more"),
        (["mine.py:fixed", "--sequence_length", "8"], "has no parameter sequence_length"),
        (["mine.py:Net", "--optimizer", "adamv"], "Unknown optimizer 'adamv'"),
    ],
)
def test_what_cannot_be_meant_is_an_error(
    factory: str,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(factory).parent)
    assert main(["estimate-memory", *arguments]) == FAILED
    assert words in capsys.readouterr().err


def test_a_folder_with_a_config_is_built_by_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 1000, "n_positions": 128}
    transformers.GPT2Config(architectures=["GPT2LMHeadModel"], **sizes).save_pretrained(tmp_path)
    found = asked(capsys, str(tmp_path), "--dtypes", "float32", "--strategy", "single_device", "--batch_size", "4")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert "A batch is 4 x 128 tokens." in found["notes"]
    assert found["training"][0]["activations"] > 4 * 128 * 1000 * 4  # the logits alone
    short = asked(
        capsys, str(tmp_path), "--dtypes", "float32", "--strategy", "single_device", "--sequence_length", "16"
    )
    assert "A batch is 1 x 16 tokens." in short["notes"]

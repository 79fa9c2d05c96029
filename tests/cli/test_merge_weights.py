"""``paceline merge-weights``: the same file as ``paceline checkpoint export`` writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint import single_file
from paceline.cli.main import FAILED, main

WEIGHTS = {"layer.weight": torch.full((2, 2), 0.5), "layer.bias": torch.zeros(2)}


def write(path: Path) -> None:
    section = {"format": 1, "manifest": {"sequence": 1, "score": None, "monitor": None}}
    single_file.write({"epoch": 0, "global_step": 3, "state_dict": WEIGHTS, "paceline": section}, path)


@pytest.mark.parametrize("out", ["merged.safetensors", "merged"])
def test_weights_become_one_file_of_safetensors(out: str, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    write(tmp_path / "saved" / "state.ckpt")
    assert main(["merge-weights", str(tmp_path / "saved"), out]) == 0
    found = load_file(out if out.endswith("safetensors") else f"{out}/model.safetensors")
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["merge-weights", "x", "y", "--unsafe_serialization"],
            "--unsafe_serialization: only safetensors files are",
        ),
        (["merge-weights", "x", "y", "--remove-checkpoint-dir"], "--remove_checkpoint_dir: training can resume only"),
        (["to-fsdp2", "--config_file", "x"], "Paceline uses FSDP 2"),
        (["tpu-config"], "Paceline does not run commands on all machines of a TPU pod."),
    ],
)
def test_what_is_not_done_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == FAILED
    err = capsys.readouterr().err
    assert err.startswith(f"paceline {words[0]}: {said}")
    assert len(err.splitlines()) == 1

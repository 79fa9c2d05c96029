"""Weights from the files that other tools write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Accelerator, load_checkpoint_in_model
from paceline.loggers.messages import PacelineWarning


class Tied(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight


def write(folder: Path, kind: str) -> tuple[Path, nn.Module]:
    """Weights in a form, and the model that they are of."""
    torch.manual_seed(3)
    model = Tied()
    accelerator = Accelerator(cpu=True)
    size = 600 if "shards" in kind else "1GB"
    if "state" in kind:
        torch.save(model.state_dict(), folder / "weights.pt")
        return folder / "weights.pt", model
    accelerator.save_model(model, folder, size, safe_serialization="bin" not in kind)
    if "file" in kind:
        return folder / "model.safetensors", model
    if "index" in kind:
        return next(folder.glob("*.index.json")), model
    return folder, model


FORMS = ["folder", "folder of shards", "index of shards", "file", "folder bin", "folder of bin shards", "a state"]


@pytest.mark.parametrize("meta", [False, True], ids=["with values", "on meta"])
@pytest.mark.parametrize("kind", FORMS)
def test_g5_weights_come_from_a_folder_a_file_or_an_index(kind: str, meta: bool, tmp_path: Path) -> None:
    path, model = write(tmp_path, kind)
    if "shards" in kind:
        assert len(list(tmp_path.glob("*-of-*"))) > 1
    torch.manual_seed(9)
    other = Tied()
    if meta:
        other = other.to("meta")
        other.head.weight = other.embed.weight
    loaded = load_checkpoint_in_model(other, path, strict=True)
    assert loaded == ([], [])
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


def test_a_type_is_converted_on_the_way(tmp_path: Path) -> None:
    path, model = write(tmp_path, "folder")
    other = Tied()
    load_checkpoint_in_model(other, path, dtype=torch.bfloat16)
    assert other.body[0].weight.dtype == torch.bfloat16
    assert torch.equal(other.body[0].weight, model.body[0].weight.bfloat16())  # type: ignore[union-attr]
    assert other.body[1].num_batches_tracked.dtype == torch.int64


def test_what_does_not_fit_is_said_or_raised(tmp_path: Path) -> None:
    path, model = write(tmp_path, "folder")

    class More(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(2, 2)

    with pytest.warns(PacelineWarning, match=r"2 missing in it \(more.weight, more.bias\)"):
        load_checkpoint_in_model(More(), path)
    with pytest.raises(RuntimeError, match=r"8 unexpected \(body\.0\.bias.*strict=False"):
        load_checkpoint_in_model(nn.Sequential(), path, strict=True)
    assert isinstance(model, Tied)


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (lambda folder: Tied(4), ValueError, r"embed.weight has the shape \(16, 8\).* but \(16, 4\) in Tied"),
        (lambda folder: next(folder.glob("*-of-*")).unlink(), FileNotFoundError, "1 are not there: model-00001"),
        (lambda folder: next(folder.glob("*-of-*")).write_bytes(b"x" * 50), ValueError, "damaged or of another kind"),
        (lambda folder: [f.unlink() for f in folder.iterdir()], FileNotFoundError, "There are no weights of one model"),
    ],
    ids=["shapes", "missing shard", "damaged", "nothing"],
)
def test_bad_files_are_named(spoil: Any, error: type[Exception], said: str, tmp_path: Path) -> None:
    path, _ = write(tmp_path, "folder of shards")
    model = spoil(tmp_path)
    with pytest.raises(error, match=said):
        load_checkpoint_in_model(model if isinstance(model, nn.Module) else Tied(), path)


def test_a_damaged_file_of_torch_and_a_misspelled_one_are_named(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "a state")
    with pytest.raises(FileNotFoundError, match=r"Did you mean 'weights\.pt'"):
        load_checkpoint_in_model(Tied(), tmp_path / "weigths.pt")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged or of another kind"):
        load_checkpoint_in_model(Tied(), path)

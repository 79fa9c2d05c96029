"""What a checkpoint says about itself."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import manifest, single_file, verify
from paceline.checkpoint.manifest import Manifest


def checkpoint(score: float | None = 0.25) -> dict[str, Any]:
    return {
        "state_dict": {"weight": torch.arange(100.0)},
        "optimizer_states": [],
        "epoch": 3,
        "global_step": 7,
        "paceline": {
            "format": 1,
            "world_size": 2,
            "versions": {"paceline": "9"},
            "runs": ["abc"],
            "manifest": {"sequence": 4, "monitor": "loss", "score": score},
        },
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    single_file.write(checkpoint(), tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt"


def test_a_file_says_what_it_is(path: Path):
    found = manifest.read(path)
    assert found is not None
    assert (found.kind, found.weights_only, found.epoch, found.global_step) == ("file", False, 3, 7)
    assert (found.sequence, found.monitor, found.score, found.world_size) == (4, "loss", 0.25, 2)
    assert (found.versions, found.runs) == ({"paceline": "9"}, ["abc"])
    assert found.written.endswith("+00:00")
    assert found.files["archive/data/0"][0] == 400


@pytest.mark.parametrize("score", [math.nan, math.inf, None])
def test_a_score_that_json_cannot_hold_is_none(score: float | None, tmp_path: Path):
    single_file.write(checkpoint(score), tmp_path / "x.ckpt")
    found = manifest.read(tmp_path / "x.ckpt")
    assert found is not None
    assert found.score is None


def test_the_record_is_the_last_of_the_zip_and_torch_reads_the_file_in_every_way(path: Path):
    with zipfile.ZipFile(path) as archive:
        assert archive.infolist()[-1].filename == "archive/manifest.json"
        assert json.loads(archive.read("archive/manifest.json"))["sequence"] == 4
        assert archive.testzip() is None
    weights = torch.arange(100.0)
    assert torch.equal(torch.load(path)["state_dict"]["weight"], weights)
    assert torch.equal(torch.load(path, mmap=True)["state_dict"]["weight"], weights)
    assert torch.equal(torch.load(io.BytesIO(path.read_bytes()))["state_dict"]["weight"], weights)
    assert torch.load(path, map_location="meta", mmap=True)["state_dict"]["weight"].is_meta


@pytest.mark.cold
def test_reading_and_verifying_need_no_torch(path: Path):
    program = (
        "import sys; from pathlib import Path; from paceline.checkpoint import manifest; "
        "from paceline.checkpoint import verify; path = Path(sys.argv[1]); "
        "print(manifest.read(path).sequence, verify.problem(path), 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["4", "None", "False", "False"]


def test_files_of_other_tools_have_none(tmp_path: Path):
    torch.save({"state_dict": {}}, tmp_path / "zip.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert manifest.read(tmp_path / "zip.ckpt") is None
    assert manifest.read(tmp_path / "old.ckpt") is None


@pytest.mark.parametrize("data", [b"", b"PK", b"text", b"PK\x03\x04" + bytes(500)])
def test_what_is_no_checkpoint_is_refused(data: bytes, tmp_path: Path):
    (tmp_path / "x.ckpt").write_bytes(data)
    with pytest.raises(ValueError, match="its records cannot be read"):
        manifest.read(tmp_path / "x.ckpt")


def test_any_changed_byte_of_a_folders_manifest_is_noticed(tmp_path: Path):
    manifest.write(tmp_path, Manifest(kind="folder", epoch=3, files={"a": [1, 2]}))
    good = (tmp_path / manifest.NAME).read_bytes()
    for place in range(len(good)):
        (tmp_path / manifest.NAME).write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(ValueError, match=r"its file 'manifest\.json' has changed since it was written"):
            manifest.read_folder(tmp_path)


def test_fields_that_a_later_version_adds_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifest, "asdict", lambda known: {**vars(known), "mood": "good"})
    manifest.write(tmp_path, Manifest(epoch=5))
    assert manifest.read_folder(tmp_path) == Manifest(epoch=5)


def test_the_checkpoints_of_a_folder_are_found_to_a_depth(path: Path, tmp_path: Path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "y.ckpt").touch()
    (tmp_path / ".hidden.ckpt").touch()
    (tmp_path / "notes.txt").touch()
    assert list(manifest.checkpoints_in(tmp_path)) == [path]
    assert list(manifest.checkpoints_in(tmp_path, depth=1)) == [tmp_path / "inner" / "y.ckpt", path]
    assert list(manifest.checkpoints_in(tmp_path / "nowhere")) == []


def test_a_damaged_record_is_named_without_torch(path: Path):
    data = bytearray(path.read_bytes())
    place = data.index(torch.arange(100.0).numpy().tobytes())
    data[place + 8] ^= 1
    path.write_bytes(data)
    found = verify.problem(path)
    assert found is not None
    assert found.why == "its record 'archive/data/0' does not match its checksum"

"""``paceline env``: versions, devices, the file in force, every setting with its origin. Rows C6, C16, D4."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

import paceline
from paceline.cli.main import main
from paceline.settings import SETTINGS


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text("mixed_precision: bf16\n")
    monkeypatch.setenv("PACELINE_CONFIG_FILE", str(path))
    monkeypatch.setenv("PACELINE_NUM_PROCESSES", "3")
    return path


def test_d4_it_shows_every_setting_with_value_and_origin(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    rows = {row["name"]: (row["value"], row["place"], row["where"]) for row in shown["settings"]}
    assert list(rows) == list(SETTINGS)
    assert rows["mixed_precision"] == ("bf16", "file", f"{file}: mixed_precision")
    assert rows["num_processes"] == (3, "env", "PACELINE_NUM_PROCESSES")
    assert rows["num_machines"] == (1, "default", "")


def test_c16_it_shows_versions_devices_and_the_file_in_force(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"paceline {paceline.__version__}" in lines
    assert f"torch {metadata.version('torch')}" in lines
    assert any(line.startswith("gpus ") for line in lines)
    assert f"Current settings (file: {file})" in lines
    assert "mixed_precision bf16 file mixed_precision" in lines


def test_c6_another_file_can_be_looked_at(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"mixed_precision": "fp16"}')
    assert main(["env", "--config_file", str(other), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config_file"] == str(other)
    assert shown["settings"][0]["value"] == "fp16"

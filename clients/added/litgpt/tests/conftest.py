"""Fixtures that litgpt's tests use but its source distribution does not contain, written by hand with small files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def fake_checkpoint_dir(tmp_path: Path) -> Path:
    """A folder with the files of a checkpoint, all empty."""
    folder = tmp_path / "checkpoints" / "tmp"
    folder.mkdir(parents=True)
    for name in ("lit_model.pth", "model_config.yaml", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).touch()
    return folder


@pytest.fixture
def alpaca_path(tmp_path: Path) -> Path:
    """A file with 24 questions and answers in the format of the Alpaca dataset."""
    path = tmp_path / "alpaca" / "alpaca_data.json"
    path.parent.mkdir()
    samples = [{"instruction": f"Add 1 to {i}.", "input": "", "output": str(i + 1)} for i in range(24)]
    path.write_text(json.dumps(samples))
    return path

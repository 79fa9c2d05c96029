"""The example whose weights stay on disk."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cold

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "11_larger_than_memory.py"


def test_i6_what_is_generated_from_disk_is_what_is_generated_from_memory(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, str(EXAMPLE), "--out", str(tmp_path), "--check", "--gigabytes", "0.2", "--limit", "20MB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the same as from memory: yes" in done.stdout
    more = re.search(r"at most (\d+) MB more", done.stdout)
    assert more is not None
    assert int(more[1]) < 100  # of 200
    assert list(tmp_path.iterdir()) == []

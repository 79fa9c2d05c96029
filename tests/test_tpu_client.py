"""``clients/tpu/run.py``: what it installs is pinned by hash, and what it runs exists."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_every_package_is_pinned_by_hash_and_the_tests_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "clients")  # and back again, with what run.py adds
    spec = importlib.util.spec_from_file_location("tpu_run", ROOT / "clients" / "tpu" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    assert (ROOT / run.TEST).is_file()
    assert run.environment()["PACELINE_TEST_DEVICE"] == "tpu"
    lines = (ROOT / "clients" / "tpu" / "requirements.txt").read_text().replace("\\\n", "").splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    assert len(packages) == 7
    assert all("==" in line and "--hash=sha256:" in line for line in packages)

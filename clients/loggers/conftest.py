"""Which package the tests run with: ``--service mlflow`` and so on, one a process."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--service", help="the module in services/ to test")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``how`` a run ends. A task of ClearML is never continued, and its own processes do not survive a fork."""
    if "how" in metafunc.fixturenames:
        ways = [metafunc.module.fail, metafunc.module.kill]
        metafunc.parametrize("how", ways[:1] if metafunc.config.getoption("--service") == "clearml" else ways)


@pytest.fixture
def service(pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the service, prepared to write below ``tmp_path`` only and to send nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    found: ModuleType = importlib.import_module(f"services.{pytestconfig.getoption('--service')}")
    found.prepare(tmp_path, monkeypatch)
    return found

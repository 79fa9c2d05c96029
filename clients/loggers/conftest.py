"""Options and fixtures that select the service to test, such as ``--service mlflow``: one service per process."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--service", help="name of the module in services/ to test")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize ``how``, the way in which a run ends.

    ClearML runs are not killed, because ClearML never continues a task and its own processes do not survive a fork.
    """
    if "how" in metafunc.fixturenames:
        ways = [metafunc.module.fail, metafunc.module.kill]
        metafunc.parametrize("how", ways[:1] if metafunc.config.getoption("--service") == "clearml" else ways)


@pytest.fixture
def service(pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The service's module, set up to write only below ``tmp_path`` and to send nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    found: ModuleType = importlib.import_module(f"services.{pytestconfig.getoption('--service')}")
    found.prepare(tmp_path, monkeypatch)
    return found

"""``clients/run.py``: its table can be read, and what two runs of a library's tests show is compared test by test."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "clients"

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two[x]">{two}</testcase>
<testcase classname="tests.a" name="three"><skipped/></testcase>
<testcase classname="tests.a" name="four">{four}</testcase>
</testsuite></testsuites>"""
FAILED = '<failure message="AttributeError: no name&#10;more lines"/>'


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("clients_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "clients_run", module)  # for its dataclasses
    spec.loader.exec_module(module)
    return module


def test_every_library_of_the_table_has_its_versions_locked(run: ModuleType) -> None:
    for client in run.read_table():
        locked = client.lock.read_text().splitlines()
        assert f"{client.name}=={client.version}" in locked
        assert any(line.startswith(f"{client.stand_in}==") for line in locked)
        if client.prepare:
            assert (FOLDER / "added" / client.name / client.prepare).exists()


def test_lost_and_gained_tests_are_named_with_their_errors(run: ModuleType, tmp_path: Path) -> None:
    def outcomes(two: str, four: str) -> object:
        (tmp_path / "report.xml").write_text(REPORT.format(two=two, four=four))
        return run.outcomes(tmp_path / "report.xml")

    client = run.Client("library", "1.0", "lightning", "Trainer", explained={"two[x]": "a row of the differences"})
    result = run.Result(client, outcomes("", FAILED), outcomes(FAILED, ""), {"real": 1.0, "paceline": 2.0})
    assert result.lost == ["tests.a::two[x]"]
    assert result.gained == ["tests.a::four"]
    summary = result.summary()
    assert summary["lost"]["tests.a::two[x]"] == {
        "error": "AttributeError: no name",
        "explanation": "a row of the differences",
    }
    assert (summary["passed_real"], summary["passed_paceline"]) == (2, 2)
    assert "| library 1.0 | lightning: Trainer | 2 | 2 | 1 | 1 |" in run.table([result])

"""``clients/torches/run.py``: it tests the oldest and the newest torch, and counts what its runs report."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
REPORT = """<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10">
<testcase classname="a" name="b"/></testsuite></testsuites>"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "clients")  # and back again, with what run.py adds
    spec = importlib.util.spec_from_file_location("torches_run", ROOT / "clients" / "torches" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_version_is_its_newest_patch_unless_one_is_named(run: ModuleType) -> None:
    assert run.requirement("2.15") == "torch==2.15.*"
    assert run.requirement("2.15.0") == "torch==2.15.0"


def test_what_passed_failed_and_was_skipped_is_counted_and_a_run_without_a_report_failed(
    run: ModuleType, tmp_path: Path
) -> None:
    report = tmp_path / "report.xml"
    assert run.counts(report) == (0, 1, 0)
    report.write_text(REPORT)
    assert run.counts(report) == (4, 3, 3)


def test_the_table_of_versions_has_the_oldest_and_the_newest(run: ModuleType) -> None:
    rows = [line for line in (ROOT / "docs" / "versions.md").read_text().splitlines() if line.startswith("| 2.")]
    for version in (run.oldest(), run.newest()):
        assert [row for row in rows if row.startswith((f"| {version}.", f"| {version} "))]

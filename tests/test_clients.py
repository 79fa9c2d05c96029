"""``clients/run.py``: its table can be read, and two runs of a library's tests are compared test by test.

``clients/environments.py``: an environment is made again when its sources change.
"""

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
    monkeypatch.syspath_prepend(FOLDER)
    spec.loader.exec_module(module)
    return module


def test_every_library_of_the_table_has_its_versions_locked(run: ModuleType) -> None:
    for client in run.read_table():
        locked = client.lock.read_text().splitlines()
        assert f"{client.name}=={client.version}" in locked
        assert any(line.startswith(f"{client.stand_in}==") for line in locked)
        if client.prepare:
            assert (FOLDER / "added" / client.name / client.prepare).exists()
        if client.scenarios:
            assert (FOLDER / "scenarios" / client.scenarios).exists()


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
    assert "| library 1.0 | lightning: Trainer | 2 | 2 | 1 | 1 |  |" in run.table([result])


def test_a_test_whose_losses_differ_is_lost(run: ModuleType, tmp_path: Path) -> None:
    def outcomes(*losses: str) -> object:
        cases = (
            f'<testcase classname="a" name="{number}">'
            f'<properties><property name="losses" value="{found}"/></properties></testcase>'
            for number, found in enumerate(losses)
        )
        (tmp_path / "report.xml").write_text(f"<testsuite>{''.join(cases)}</testsuite>")
        return run.outcomes(tmp_path / "report.xml")

    client = run.Client("library", "1.0", "accelerate", "Trainer", tolerance=0.01)
    real = outcomes("[1.0, 2.0]", "[1.0, NaN]", "[1.0]", "[1.0, 2.0]")
    result = run.Result(client, real, outcomes("[1.0, 2.005]", "[1.0, NaN]", "[1.0, 2.0]", "[1.0, 2.5]"), {})
    assert result.lost == ["a::2", "a::3"]
    assert result.error("a::2") == "recorded 2 instead of 1 losses"
    assert result.error("a::3") == "losses differ by up to 0.5"
    assert result.differences["a::0"] == pytest.approx(0.005)
    assert "| 4 | 4 | 2 | 0 | inf |" in run.table([result])


def test_the_package_around_a_librarys_tests_is_not_imported(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pytest would import the repository's root under the name of its folder, beside the installed package."""
    root, source = tmp_path / "clone", tmp_path / "source"
    folder = root / ".clients" / "libraries" / "library"
    for place in (source, folder):
        place.mkdir(parents=True)
    (root / "__init__.py").write_text("raise RuntimeError('imported')")
    (root / "pyproject.toml").write_text("")
    (source / "test_one.py").write_text("def test_one(): ...")
    monkeypatch.setattr(run.Client, "folder", folder)
    monkeypatch.setattr(run.Client, "python", Path(sys.executable))
    client = run.Client("library", "1.0", "accelerate", "Trainer", tests=["test_one.py"])
    outcomes, _ = run.run_tests(client, source, stand_in=False)
    assert {name: one.word for name, one in outcomes.items()} == {"test_one::test_one": "passed"}


def test_an_environment_is_made_again_when_one_of_its_sources_changes(run: ModuleType, tmp_path: Path) -> None:
    sources = tmp_path / "lock.txt", tmp_path / "plugin.c"
    for source in sources:
        source.write_text("1")
    environment = run.Environment(tmp_path, *sources)
    assert not environment.is_current()
    environment.finish()
    assert run.Environment(tmp_path, *sources).is_current()
    sources[1].write_text("2")
    assert not environment.is_current()

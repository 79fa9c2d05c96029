"""What a release ships besides code agrees with the code: citation, licenses, issue forms, Pythons it is tried on."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import paceline

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def program(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"release_{name}", ROOT / "clients" / "release" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_release_is_tried_on_every_python_that_the_metadata_names() -> None:
    named = {found[1] for line in PROJECT["classifiers"] if (found := re.search(r":: (3\.\d+)$", line))}
    assert named <= set(program("run").PYTHONS)


def test_what_checks_a_release_is_pinned() -> None:
    lines = (ROOT / "clients" / "release" / "tools.txt").read_text().splitlines()
    assert all("==" in line for line in lines if not line.startswith("#"))
    assert {"twine", "cffconvert", "uv"} <= {line.partition("==")[0] for line in lines}


def test_a_failed_command_of_a_release_ends_it_with_its_output(tmp_path: Path) -> None:
    run = program("run").run
    assert run("echo", "fine", cwd=tmp_path) == "fine\n"
    with pytest.raises(SystemExit, match=r"sh -c .* failed with status 3:\nbroken"):
        run("sh", "-c", "echo broken; exit 3", cwd=tmp_path)


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == paceline.__version__
    day = re.search(rf"^## {paceline.__version__} \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert day
    assert str(citation["date-released"]) == day[1]
    assert citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_the_page_of_licenses_has_every_package_that_paceline_and_its_extras_ask_for() -> None:
    parts = re.split(r"^## ", (ROOT / "docs" / "licenses.md").read_text(), flags=re.M)
    sections = {part.partition("\n")[0]: part for part in parts[1:]}
    core = sections["Paceline itself"]
    for extra, wants in {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}.items():
        for asked in map(Requirement, wants):
            row = re.compile(rf"^\| {re.escape(canonicalize_name(asked.name))} \| (\S+) \| (.+) \|$", re.M)
            if asked.name == "paceline":
                continue
            found = row.search(core) or row.search(sections[f"Extra {extra}"])
            assert found, f"{asked.name}: run python clients/release/licenses.py"
            assert asked.specifier.contains(found[1]), found[0]
            assert found[2] != "not stated", found[0]


def test_a_copyleft_license_is_found_however_it_is_stated() -> None:
    licenses = program("licenses")
    stated = licenses.license_of({"classifier": ["License :: OSI Approved :: GNU General Public License v2 (GPLv2)"]})
    assert licenses.COPYLEFT.search(stated)
    assert licenses.COPYLEFT.search(licenses.license_of({"license_expression": "MIT AND MPL-2.0"}))
    assert not licenses.COPYLEFT.search(licenses.license_of({"license": "BSD-3-Clause\n\nlong text of the GPL"}))


def test_a_package_brings_those_that_it_needs_and_those_of_the_extras_asked_for() -> None:
    packages = {
        "a": {"requires_dist": ["b", "c; extra == 'more'", "d; python_version < '3'"]},
        "b": {"requires_dist": ["a"]},
        "c": {},
        "d": {},
    }
    assert program("licenses").needed(["a"], packages) == {"a", "b"}
    assert program("licenses").needed(["a[more]", "unknown"], packages) == {"a", "b", "c"}


def test_issue_forms_have_what_a_form_must_have() -> None:
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 3
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= set(form), path
        fields = [part for part in form["body"] if part["type"] != "markdown"]
        assert len({part["id"] for part in fields}) == len(fields), path
        assert all(part["attributes"]["label"] for part in fields), path
        assert {part["type"] for part in fields} <= {"input", "textarea", "dropdown", "checkboxes"}, path


def test_links_of_the_security_policy_lead_somewhere() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert text.isascii()
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / target).exists(), target

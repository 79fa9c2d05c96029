"""The notebooks in docs/notebooks run and print what they show."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
FOLDER = DOCS / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def stored(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


@pytest.fixture(scope="module")
def run() -> ModuleType:
    """The program that runs the notebooks and stores them."""
    spec = importlib.util.spec_from_file_location("run_notebooks", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(cell: Any) -> list[str]:
    """What a cell prints and what its last line is; without messages, bars and pictures."""
    texts = [one.text for one in cell.outputs if one.output_type == "stream" and one.name == "stdout"]
    return ["".join(texts)] + [one.data["text/plain"] for one in cell.outputs if one.output_type == "execute_result"]


def kinds(cell: Any) -> set[str]:
    """The kinds of things that a cell shows."""
    data = [one.data for one in cell.outputs if one.output_type in ("display_data", "execute_result")]
    return {kind for one in data for kind in one} - {"text/plain"}


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_the_five_notebooks() -> None:
    assert NAMES == ["callbacks_and_logging", "checkpoints_and_resume", "first_fit", "own_loop", "what_is_slow"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_prints_what_it_shows(name: str, run: ModuleType, tmp_path: Path) -> None:
    before, now = code_cells(stored(name)), code_cells(run.executed(FOLDER / f"{name}.ipynb", tmp_path))
    assert [cell.source for cell in now] == [cell.source for cell in before]
    for old, new in zip(before, now, strict=True):
        assert kinds(new) == kinds(old), new.source
        if "varies" not in old.metadata.get("tags", []):
            assert shown(new) == shown(old), new.source


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_notebook_has_its_outputs_and_nothing_that_differs_from_run_to_run(name: str, run: ModuleType) -> None:
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    notebook = stored(name)
    assert nbformat.writes(run.cleaned(notebook, Path("/nowhere")), indent=1) + "\n" == text
    assert not re.search(r"/(tmp|home|root|work)/", text), "a path of the machine that ran it"
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    assert len(text) < 400_000
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", cell.source):
                assert (FOLDER / target).exists(), target

"""The notebooks in docs/notebooks run, print what they show, and are seen on their pages."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
FOLDER = DOCS / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


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


@pytest.mark.rotates(5)
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


@pytest.mark.rotates(10)
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_notebook_is_seen_on_its_page_with_plots_bar_and_report(tmp_path: Path) -> None:
    pytest.importorskip("myst_nb", reason="needs what builds the documentation: pip install paceline[docs]")
    source, site = tmp_path / "source", tmp_path / "site"
    (source / "notebooks").mkdir(parents=True)
    for name in ("first_fit", "what_is_slow"):
        shutil.copy(FOLDER / f"{name}.ipynb", source / "notebooks")
    (source / "index.md").write_text("# Site\n\n```{toctree}\n:glob:\n\nnotebooks/*\n```\n")
    (source / "conf.py").write_text(
        'extensions = ["myst_nb"]\nnb_execution_mode = "off"\nhtml_theme = "pydata_sphinx_theme"\n'
        'suppress_warnings = ["myst.xref_missing"]\n'
    )
    command = [sys.executable, "-m", "sphinx", "-q", str(source), str(site)]
    subprocess.run(command, check=True, timeout=200, env={**os.environ, "PYTHONPATH": str(DOCS.parent.parent)})
    first = dom(site / "notebooks" / "first_fit.html", tmp_path)
    assert len(re.findall(r'<img [^>]*src="[^"]+\.png"', first)) >= 2, "the digits, and those that are hard to read"
    assert "Epoch 7/7: 22/22 (100%)" in first
    assert "of the digits are read correctly" in first
    report = dom(site / "notebooks" / "what_is_slow.html", tmp_path)
    assert "Waiting for data takes" in report
    assert re.search(r'<iframe [^>]*srcdoc="[^"]*How it went', report)


def dom(page: Path, folder: Path) -> str:
    """What a browser has made of a page."""
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    command = [str(CHROMIUM), *flags.split(), "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

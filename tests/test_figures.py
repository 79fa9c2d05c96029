"""docs/figures.md: each figure has a command that exists and a date since the last release, and pages link to it."""

from __future__ import annotations

import datetime
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FIGURES = (DOCS / "figures.md").read_text()
#: Claim, value, command, date and machine of each figure.
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in FIGURES.splitlines()
    if line.startswith("| ") and not line.startswith("| claim ")
]
BENCHMARKS = (ROOT / "benchmarks" / "README.md").read_text()


def last_release() -> datetime.date:
    """The day of the newest release in the changelog."""
    found = re.search(r"^## \d[\w.]* \((\d{4}-\d{2}-\d{2})\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert found, "A release in CHANGELOG.md has its day: ## 0.1.0 (2026-11-21)"
    return datetime.date.fromisoformat(found[1])


def test_every_figure_is_complete_and_was_measured_since_the_last_release() -> None:
    assert len(ROWS) >= 30
    for row in ROWS:
        assert len(row) == 5, row
        assert all(row), row
        assert datetime.date.fromisoformat(row[3].rstrip("*")) >= last_release(), row
        assert row[4] in ("quiet", "busy", "exact"), row


def test_every_command_of_a_figure_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for row in ROWS:
        program, *words = shlex.split(row[2].strip("`"))
        assert program in ("python", "make"), row
        if program == "make":
            assert words[0] in targets, row
        else:
            assert (ROOT / words[2 if words[:2] == ["-m", "pytest"] else 0]).exists(), row


def test_every_benchmark_whose_result_is_quoted_has_a_figure() -> None:
    quoted = set(re.findall(r"benchmarks/(\w+)\.py", BENCHMARKS.partition("\nMeasured on")[2]))
    assert not quoted - set(re.findall(r"benchmarks/(\w+)\.py", FIGURES))


def test_pages_that_name_a_benchmark_link_to_the_figures() -> None:
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *DOCS.glob("*.md")]
    named = [page for page in pages if "benchmarks/" in (text := page.read_text()) and "figures.md" not in text]
    assert [page.relative_to(ROOT).as_posix() for page in named if page != DOCS / "figures.md"] == []

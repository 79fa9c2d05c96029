"""Kill and resume runs that read streams of other packages, and check the table of docs/checkpoints.md.

    make streams                              all packages, about twenty minutes
    make streams STREAMS="--only litdata"     only one; the environment stays in .streams

The environment sees the packages of .venv and has, on top of them, exactly what ``lock.txt`` lists. ``kills.py`` runs
the cells, ``sources.py`` has the data and the loaders.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sources import FORMS, Form

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from environments import with_lock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = ROOT / ".streams"
PACKAGES = list(dict.fromkeys(form.package for form in FORMS))
HEADER = ["package", "read with", "workers", "as many ranks", "other number of ranks"]


def cells_of(package: str, python: Path) -> list[dict[str, Any]]:
    """Run a package's cells."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    command = [python, HERE / "kills.py", "--package", package]
    found = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        for line in run.stdout or ():
            if line.startswith("{"):
                print(line.strip(), file=sys.stderr, flush=True)
                found.append(json.loads(line))
    return found


def word(cell: dict[str, Any]) -> str:
    """Return a few words that describe how a cell ended."""
    result = cell["result"]
    again = ", reads again" if cell["read_again"] else ""
    if result.startswith("same"):  # the rest counts samples that are lost even without a kill
        return f"exact{again}"
    if result == "each once":
        return f"each once{again}"
    if "lost" not in result:
        return "fails"
    both = any(not part.endswith(" 0 again") for part in result.split("; "))
    return "loses and repeats" if both else "loses"


def together(cells: list[dict[str, Any]]) -> str:
    """Join the results of cells that differ in the door, and perhaps in the number of ranks."""
    words = {cell["door"]: set() for cell in cells}
    for cell in cells:
        words[cell["door"]].add(word(cell))
    told = {door: " or ".join(sorted(found)) for door, found in words.items()}
    if len(set(told.values())) == 1:
        return next(iter(told.values()))
    return "; ".join(f"{door}: {text}" for door, text in sorted(told.items()))


def rows_of(index: int, form: Form, cells: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of a form: one, or one for each number of workers."""
    found = {}
    for workers in sorted({cell["workers"] for cell in cells if cell["form"] == index}):
        own = [cell for cell in cells if cell["form"] == index and cell["workers"] == workers]
        same = [cell for cell in own if cell["before"] == cell["after"]]
        other = [cell for cell in own if cell["before"] != cell["after"]]
        found[str(workers)] = [together(same), together(other)]
    if len({tuple(texts) for texts in found.values()}) == 1:
        found = {", ".join(found): next(iter(found.values()))}
    return [[form.package, form.what, workers, *texts] for workers, texts in found.items()]


def main() -> None:
    """Run the packages that were asked for, print their rows, and compare them with the documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="PACKAGE", choices=PACKAGES, help="may be repeated")
    parser.add_argument("--cells", type=Path, help="lines that kills.py printed, instead of running it")
    arguments = parser.parse_args()
    packages, cells = arguments.only or PACKAGES, []
    if arguments.cells:
        cells = [json.loads(line) for line in arguments.cells.read_text().splitlines() if line.startswith("{")]
    else:
        python = with_lock(WORK, HERE / "lock.txt")
        cells = [cell for package in packages for cell in cells_of(package, python)]
    documented = {line.strip() for line in (ROOT / "docs" / "checkpoints.md").read_text().splitlines()}
    rows = [row for index, form in enumerate(FORMS) if form.package in packages for row in rows_of(index, form, cells)]
    changed = False
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    for row in rows:
        line = "| " + " | ".join(row) + " |"
        print(line)
        changed |= line not in documented
    if changed or not rows:
        raise SystemExit(
            "These rows differ from the table in docs/checkpoints.md. Find the cause, or update the table."
        )


if __name__ == "__main__":
    main()

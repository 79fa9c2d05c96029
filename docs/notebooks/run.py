"""Run the notebooks in a real kernel and store their outputs, as they are shown in the documentation.

Usage: python docs/notebooks/run.py [NAME...]    # all of them without a name

Each runs in an empty folder. What would differ from run to run without meaning anything is removed, so that a diff
shows only what has changed: execution counts and times, the kernel's version, states of a progress bar but the last.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_SECONDS = 280


def executed(path: Path, folder: Path) -> Any:
    """The notebook with the outputs that it has when it runs in a folder; an error in a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook, timeout=LIMIT_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment(folder))
    return cleaned(notebook, folder)


def environment(folder: Path) -> dict[str, str]:
    """The kernel's: it finds this repository as the package, computes on one thread, and keeps its files to itself."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PACELINE", "MPL"))}
    found = {
        "PYTHONPATH": os.pathsep.join(filter(None, (kept.get("PYTHONPATH"), str(ROOT.parent)))),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
    }
    hidden = {"XDG_CONFIG_HOME": str(folder / ".config"), "IPYTHONDIR": str(folder / ".ipython")}
    return {**kept, **found, **hidden, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def cleaned(notebook: Any, folder: Path) -> Any:
    """The notebook without what says nothing."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
    }
    for number, cell in enumerate(notebook.cells, start=1):
        kept = {name: cell.metadata[name] for name in ("tags", "mystnb") if cell.metadata.get(name)}
        cell.id, cell.metadata = f"cell-{number}", kept
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = joined([output for output in cell.outputs if not is_empty(output)])
            for output in cell.outputs:
                output.pop("execution_count", None)
                if output.output_type == "execute_result":
                    output.execution_count = None
                if output.output_type == "stream":
                    output.text = of_no_machine(output.text, folder)
                else:
                    output.metadata = {}
                    output.data = {kind: of_no_machine(text, folder) for kind, text in output.data.items()}
    return notebook


def of_no_machine(text: str, folder: Path) -> str:
    """A text without the paths and the name of the system of the machine that the notebook ran on."""
    text = text.replace(str(folder), "~").replace(sys.prefix, "~/.venv").replace(platform.platform(), platform.system())
    return re.sub(r"-f [^ ]+\.json( --HistoryManager\S*memory:)?", "-f kernel.json", text)


def joined(outputs: list[Any]) -> list[Any]:
    """The outputs with texts in a row as one, because the kernel cuts them where time has passed."""
    found: list[Any] = []
    for output in outputs:
        if found and output.output_type == found[-1].output_type == "stream" and output.name == found[-1].name:
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def is_empty(output: Any) -> bool:
    """Whether nothing is seen of an output: a bar that was removed."""
    return output.output_type == "display_data" and not any(str(text).strip() for text in output.data.values())


def main(names: list[str]) -> None:
    """Run the named notebooks and write them where they are."""
    for path in sorted(HERE.glob("*.ipynb")):
        if not names or path.stem in names:
            with tempfile.TemporaryDirectory() as folder:
                notebook = executed(path, Path(folder))
            path.write_text(nbformat.writes(notebook, indent=1) + "\n", encoding="utf-8")
            print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])

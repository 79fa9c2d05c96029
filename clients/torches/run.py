"""Run the tests with other versions of torch or Python, each in its own environment.

    make torches                                               the oldest and the newest supported torch
    make torches TORCHES="--only 2.12.1 tests/strategies"      another version, and only some of the tests
    make torches TORCHES="--only 2.15.0 --python python3.12"   with another Python

An environment shares the packages of .venv and adds only torch. With another Python, it has its own packages: the
newest ones that the extra ``dev`` allows. A CUDA build of torch takes 5 GB, so each environment is deleted after its
run, unless ``--keep`` is given.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from paceline import messages, torch_versions

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from environments import Environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = ROOT / ".torches"
COUNTS = ("passed", "failed", "skipped")


def oldest() -> str:
    """Return the oldest version of torch that pyproject.toml allows."""
    found = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    if found is None:
        raise SystemExit(
            "pyproject.toml has no requirement torch>=VERSION, which sets the oldest version to test. Add it, or "
            "pass --only."
        )
    return found[1]


def newest() -> str:
    """Return the newest version of torch that Paceline is known to support."""
    return ".".join(map(str, torch_versions.NEWEST_TRIED))


def requirement(version: str) -> str:
    """Return the requirement for pip: ``2.15`` selects its latest patch release, ``2.15.0`` exactly that version."""
    return f"torch=={version}" + (".*" if version.count(".") == 1 else "")


def install(folder: Path, version: str, interpreter: str | None) -> Path:
    """Create an environment and return its Python."""
    environment = Environment(folder)
    environment.create(shared=interpreter is None, interpreter=interpreter)
    if interpreter is None:
        environment.install(requirement(version))
    else:
        environment.resolve(requirement(version), "-e", f"{ROOT}[dev]")
    return environment.python


def versions(python: Path) -> tuple[str, str]:
    """Return the versions of torch and Python that an environment actually has."""
    program = "import platform, torch; print(torch.__version__, platform.python_version())"
    torch, own = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    return torch, own


def test(python: Path, report: Path, paths: list[str]) -> tuple[int, ...]:
    """Run the tests; return how many passed, failed and were skipped."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = ["-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([python, "-m", "pytest", *paths, *options], cwd=ROOT, env=environment, check=False)
    return counts(report)


def counts(report: Path) -> tuple[int, ...]:
    """Read from pytest's report how many tests passed, failed and were skipped."""
    if not report.exists():
        return 0, 1, 0
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    all_of_them, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return all_of_them - failed - skipped, failed, skipped


def main() -> None:
    """Test the requested versions and print their rows for the table in docs/versions.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="VERSION", help="version of torch; may be repeated")
    parser.add_argument("--python", metavar="COMMAND", help="command of another Python to use")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("tests", nargs="*", default=["tests"], help="tests to run; all tests by default")
    arguments = parser.parse_args()
    rows = [("torch", "Python", *COUNTS)]
    for version in arguments.only or (oldest(), newest()):
        folder = WORK / f"{version}-{arguments.python or 'python'}".replace("/", "-")
        try:
            python = install(folder, version, arguments.python)
            found = test(python, folder / "report.xml", arguments.tests)
            rows.append((*versions(python), *map(str, found)))
        finally:
            if not arguments.keep:
                shutil.rmtree(folder, ignore_errors=True)
    messages.answer(messages.table(rows))
    raise SystemExit(any(passed == "0" or failed != "0" for _, _, passed, failed, _ in rows[1:]))


if __name__ == "__main__":
    main()

"""Test libraries that are built on the packages that Paceline replaces, with the real package and with Paceline.

    python clients/run.py                       # all libraries of clients.toml; make clients does this
    python clients/run.py --only litgpt --keep

Each library gets an environment in ``.clients``, with the versions in a file in ``locks``. The tests are the library's
own, from its source distribution on PyPI, or a file in ``scenarios``, which trains with the library and records losses.
They run twice, in copies of the source: with the real package and with Paceline. A table shows how many tests pass in
each run and the largest difference between their losses; the lost tests and their errors follow. A test is lost if it
passes only with the real package, or if its losses differ. The exit status is 1 if ``clients.toml`` does not explain a
lost test.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib
from environments import Environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WORK = ROOT / ".clients"
#: Settings for both runs: offline, with one thread, without a terminal.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "COLUMNS": "160",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}
#: Argument for extracting tar files. In Python 3.11, it exists only from 3.11.4 on.
FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


@dataclass
class Client:
    """A library of ``clients.toml``.

    Attributes:
        name: the library's name on PyPI.
        version: the library's version.
        stand_in: the package that the library is built on and that Paceline replaces.
        uses: the parts of that package that the library uses.
        scenarios: a file in ``scenarios`` that is run in place of the library's own tests.
        environment: name of the environment and its file in ``locks``, which libraries may share; by default, the
            library's name.
        tests: files and folders with tests in the source distribution.
        options: additional arguments for pytest.
        timeout: maximum seconds for one test.
        limit: maximum seconds for all tests.
        prepare: a script in ``added`` that runs once in the unpacked source and creates data that tests would download.
        tolerance: largest accepted difference between the losses of a test's two runs.
        excluded: tests that are not run with either package, each with the reason.
        explained: parts of the names of lost tests, each with the reason, such as a row in the documentation.
    """

    name: str
    version: str
    stand_in: str
    uses: str
    scenarios: str = ""
    environment: str = ""
    tests: list[str] = field(default_factory=lambda: ["tests"])
    options: list[str] = field(default_factory=list)
    timeout: int = 180
    limit: int = 1200
    prepare: str = ""
    tolerance: float = 0.0
    excluded: dict[str, str] = field(default_factory=dict)
    explained: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.environment = self.environment or self.name
        if self.scenarios:
            self.tests = [self.scenarios]

    @property
    def folder(self) -> Path:
        """The folder with the copies of the library's source."""
        return WORK / "libraries" / self.name

    @property
    def place(self) -> Path:
        """The folder of the library's environment."""
        return WORK / "environments" / self.environment

    @property
    def python(self) -> Path:
        """The Python interpreter of the library's environment."""
        return self.place / "bin" / "python"

    @property
    def lock(self) -> Path:
        """The lock file with the versions of all packages in the library's environment."""
        return HERE / "locks" / f"{self.environment}.txt"


@dataclass
class Outcome:
    """The outcome of a test.

    Attributes:
        word: ``passed``, ``skipped`` or ``failed``.
        error: the first line of the error if the test failed.
        losses: the losses that the test recorded.
    """

    word: str
    error: str = ""
    losses: list[float] = field(default_factory=list)


#: The outcome of a test that a run did not collect.
MISSING = Outcome("was not collected")


@dataclass
class Result:
    """The outcomes of both runs of a library's tests."""

    client: Client
    real: dict[str, Outcome]
    paceline: dict[str, Outcome]
    seconds: dict[str, float]

    @property
    def lost(self) -> list[str]:
        """Tests that pass only with the real package, or whose losses differ."""
        apart = [name for name, difference in self.differences.items() if difference > self.client.tolerance]
        return _only(self.real, self.paceline) + apart

    @property
    def gained(self) -> list[str]:
        """Tests that pass only with Paceline."""
        return _only(self.paceline, self.real)

    @property
    def differences(self) -> dict[str, float]:
        """Largest loss difference of each test that passes in both runs; infinite if the numbers of losses differ."""
        pairs = {name: (one, self.paceline.get(name, MISSING)) for name, one in self.real.items() if one.losses}
        return {
            name: max(map(_apart, one.losses, two.losses)) if len(one.losses) == len(two.losses) else math.inf
            for name, (one, two) in pairs.items()
            if one.word == two.word == "passed"
        }

    def error(self, test: str) -> str:
        """Return the error of a lost test, in one line."""
        found = self.paceline.get(test, MISSING)
        if test not in self.differences:
            return found.error or found.word
        if len(found.losses) != len(self.real[test].losses):
            return f"recorded {len(found.losses)} instead of {len(self.real[test].losses)} losses"
        return f"losses differ by up to {self.differences[test]:.2g}"

    def explanation(self, test: str) -> str:
        """Return why a test is expected to be lost; empty if nothing explains it."""
        return next((why for part, why in self.client.explained.items() if part in test), "")

    def summary(self) -> dict[str, Any]:
        """Return all results as plain data."""
        return {
            "version": self.client.version,
            "stands_in": self.client.stand_in,
            "passed_real": _passed(self.real),
            "passed_paceline": _passed(self.paceline),
            "losses": {test: self.differences[test] for test in self.differences},
            "lost": {test: {"error": self.error(test), "explanation": self.explanation(test)} for test in self.lost},
            "gained": self.gained,
            "seconds": {name: round(seconds) for name, seconds in self.seconds.items()},
        }


def read_table(path: Path = HERE / "clients.toml") -> list[Client]:
    """Return the libraries in the table, in order."""
    return [Client(name, **row) for name, row in tomllib.loads(path.read_text()).items()]


def install(client: Client) -> None:
    """Create the environment, unless the existing one has the same versions."""
    environment = Environment(client.place, client.lock)
    if not environment.is_current():
        environment.create(shared=False)
        environment.install("-r", client.lock)
        environment.install("--no-deps", "--no-build-isolation", "-e", ROOT)
        environment.finish()


def fetch(client: Client) -> Path:
    """Return the folder of the scenarios, or of the unpacked source distribution with the files in ``added``."""
    if client.scenarios:
        return HERE / "scenarios"
    source = client.folder / "source"
    if source.exists():
        return source
    downloads, unpacked = client.folder / "sdist", client.folder / "unpacked"
    named = f"{client.name}=={client.version}"
    pip = [client.python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", client.name]
    _call([*pip, "--dest", downloads, named])
    with tarfile.open(next(downloads.glob("*.tar.gz"))) as archive:
        archive.extractall(unpacked, **FILTER)
    (inner,) = unpacked.iterdir()
    if (added := HERE / "added" / client.name).is_dir():
        shutil.copytree(added, inner, dirs_exist_ok=True)
    if client.prepare:
        _call([client.python, client.prepare], cwd=inner)
    inner.rename(source)
    return source


def run_tests(client: Client, source: Path, *, stand_in: bool) -> tuple[dict[str, Outcome], float]:
    """Run the tests in a copy of the source; return their outcomes by name and the total seconds."""
    label = "paceline" if stand_in else "real"
    copy, report = client.folder / label, client.folder / f"{label}.xml"
    shutil.rmtree(copy, ignore_errors=True)
    report.unlink(missing_ok=True)
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    excluded = [option for test in client.excluded for option in ("--deselect", test)]
    pytest = ["-m", "pytest", *client.tests, *client.options, *excluded, "-p", "no:cacheprovider", "--tb=short", "-q"]
    pytest += [f"--timeout={client.timeout}", f"--junitxml={report}", "-o", "junit_family=xunit1"]
    # The copy is inside this repository, whose root is a package that pytest must not import under another name.
    pytest += [f"--rootdir={copy}", f"--confcutdir={copy}"]
    replace = ["-m", "paceline.compat", client.stand_in] if stand_in else []
    start = time.monotonic()
    with (client.folder / f"{label}.log").open("w") as log:
        try:
            _call([client.python, *replace, *pytest], cwd=copy, log=log, limit=client.limit)
        except subprocess.TimeoutExpired:
            print(f"{client.name}: the tests did not finish within {client.limit} s; see {log.name}", file=sys.stderr)
    if not report.exists():
        raise SystemExit(f"{client.name}: pytest wrote no report; see {client.folder / label}.log")
    return outcomes(report), time.monotonic() - start


def outcomes(report: Path) -> dict[str, Outcome]:
    """Return the outcome of each test in a JUnit report."""
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test = f"{case.get('classname')}::{case.get('name')}"
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        if bad is not None:
            found[test] = Outcome("failed", _first_line(bad.get("message") or bad.text or ""))
        elif found.get(test, Outcome("")).word != "failed":
            losses = next((one.get("value", "") for one in case.iter("property") if one.get("name") == "losses"), "[]")
            found[test] = Outcome("passed" if case.find("skipped") is None else "skipped", losses=json.loads(losses))
    return found


def compare(client: Client) -> Result:
    """Install a library, fetch its tests, and run them with the real package and with Paceline."""
    print(f"{client.name} {client.version}: installing", file=sys.stderr)
    install(client)
    source = fetch(client)
    print(f"{client.name}: running its tests with {client.stand_in}, then with Paceline", file=sys.stderr)
    real, real_seconds = run_tests(client, source, stand_in=False)
    if not _passed(real):
        raise SystemExit(f"{client.name}: no test passes with {client.stand_in}; see {client.folder / 'real.log'}")
    paceline, seconds = run_tests(client, source, stand_in=True)
    return Result(client, real, paceline, {"real": real_seconds, "paceline": seconds})


def table(results: Iterable[Result]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| library | uses | tests passed with the real package | with Paceline | lost | gained | losses differ by |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        client = result.client
        counts = [_passed(result.real), _passed(result.paceline), len(result.lost), len(result.gained)]
        cells = [f"{client.name} {client.version}", f"{client.stand_in}: {client.uses}", *map(str, counts)]
        cells.append(f"{max(result.differences.values()):.2g}" if result.differences else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def print_report(results: list[Result]) -> None:
    """Print the table, then each lost test with its error and explanation."""
    print(f"\n{table(results)}")
    for result in results:
        if result.lost:
            print(f"\nLost by {result.client.name}:")
        for test in result.lost:
            print(f"- {test}: {result.error(test)}")
            print(f"  {result.explanation(test) or 'NOT EXPLAINED'}")


def _only(first: Mapping[str, Outcome], second: Mapping[str, Outcome]) -> list[str]:
    return [name for name, one in first.items() if one.word == "passed" != second.get(name, MISSING).word]


def _apart(one: float, two: float) -> float:
    """Return the difference between two losses: 0 if both are NaN, infinity if only one is."""
    difference = 0.0 if one == two or (math.isnan(one) and math.isnan(two)) else abs(one - two)
    return math.inf if math.isnan(difference) else difference


def _passed(run: Mapping[str, Outcome]) -> int:
    return sum(one.word == "passed" for one in run.values())


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:200] if lines else ""


def _call(command: list[Any], *, cwd: Path = ROOT, log: Any = None, limit: float | None = None) -> None:
    """Run a command. If it fails, exit this program, unless the output goes to a log."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    output: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT} if log else {}
    command = [str(part) for part in command]
    done = subprocess.run(command, cwd=cwd, env=environment | ENVIRONMENT, timeout=limit, check=False, **output)
    if done.returncode and not log:
        raise SystemExit(f"{' '.join(command)} failed with status {done.returncode}.")


def main() -> None:
    """Compare the requested libraries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="test this library; may be repeated")
    parser.add_argument("--keep", action="store_true", help="keep environments, sources and logs, and reuse them")
    parser.add_argument("--json", type=Path, default=WORK / "report.json", help="path of the JSON report")
    arguments = parser.parse_args()
    clients = {client.name: client for client in read_table()}
    if unknown := set(arguments.only or ()) - set(clients):
        parser.error(f"unknown library {', '.join(sorted(unknown))}; clients.toml has {', '.join(clients)}")
    asked, results = [clients[name] for name in arguments.only or clients], []
    for number, client in enumerate(asked, 1):
        results.append(compare(client))
        print(table(results[-1:]).splitlines()[-1], file=sys.stderr)
        if not arguments.keep:
            shutil.rmtree(client.folder)
            if all(later.environment != client.environment for later in asked[number:]):
                shutil.rmtree(client.place)
    print_report(results)
    report = {"date": datetime.date.today().isoformat(), "libraries": {r.client.name: r.summary() for r in results}}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{arguments.json}")
    raise SystemExit(any(not result.explanation(test) for result in results for test in result.lost))


if __name__ == "__main__":
    main()

"""Libraries built on the packages that Paceline replaces, tested with the real package and with Paceline.

    python clients/run.py                       # all libraries of clients.toml; make clients does this
    python clients/run.py --only litgpt --keep

Each library gets an environment in ``.clients``, with the versions of a file in ``locks``. Its tests are its own, from
its source distribution on PyPI, or a file of ``scenarios``, which trains with it and records losses. They run twice, in
copies of the source: with the real package, and under the stand-in. A table shows what both runs passed and the largest
difference between their losses; below it stands each lost test with its error. A test is lost if it passes with the
real package only, or if its losses differ. The exit status is 1 if a test is lost that ``clients.toml`` does not
explain.
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
#: Offline, on one thread, without a terminal: the same for both runs.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "COLUMNS": "160",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}
#: Python 3.11 knows the filter from 3.11.4 on.
FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


@dataclass
class Client:
    """A library of ``clients.toml``.

    Attributes:
        name: on PyPI.
        version: of the library.
        stand_in: the package that the library is built on and that Paceline replaces.
        uses: what of that package the library uses.
        scenarios: a file in ``scenarios`` that is run in place of the library's own tests.
        environment: the file in ``locks`` and the environment, which libraries may share; the library's name if empty.
        tests: files and folders of the source distribution that hold tests.
        options: further arguments for pytest.
        timeout: seconds for one test.
        limit: seconds for all tests.
        prepare: a script in ``added`` that runs once in the unpacked source, to make data that tests would download.
        tolerance: how far the losses of the two runs of a test may be apart.
        excluded: tests that run with neither package, and why.
        explained: parts of names of lost tests, each with the reason, such as a row of the documentation.
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
        """Where the copies of its source are."""
        return WORK / "libraries" / self.name

    @property
    def place(self) -> Path:
        """Its environment."""
        return WORK / "environments" / self.environment

    @property
    def python(self) -> Path:
        """The Python of its environment."""
        return self.place / "bin" / "python"

    @property
    def lock(self) -> Path:
        """The versions of everything in its environment."""
        return HERE / "locks" / f"{self.environment}.txt"


@dataclass
class Outcome:
    """How a test ended.

    Attributes:
        word: ``passed``, ``skipped`` or ``failed``.
        error: the first line of its error if it failed.
        losses: what it recorded.
    """

    word: str
    error: str = ""
    losses: list[float] = field(default_factory=list)


#: A test that a run did not have.
MISSING = Outcome("was not collected")


@dataclass
class Result:
    """Both runs of a library's tests."""

    client: Client
    real: dict[str, Outcome]
    paceline: dict[str, Outcome]
    seconds: dict[str, float]

    @property
    def lost(self) -> list[str]:
        """Tests that pass with the real package only, or whose losses differ."""
        apart = [name for name, difference in self.differences.items() if difference > self.client.tolerance]
        return _only(self.real, self.paceline) + apart

    @property
    def gained(self) -> list[str]:
        """Tests that pass with Paceline only."""
        return _only(self.paceline, self.real)

    @property
    def differences(self) -> dict[str, float]:
        """How far the losses of each test that passes with both are apart; infinite if one has more of them."""
        pairs = {name: (one, self.paceline.get(name, MISSING)) for name, one in self.real.items() if one.losses}
        return {
            name: max(map(_apart, one.losses, two.losses)) if len(one.losses) == len(two.losses) else math.inf
            for name, (one, two) in pairs.items()
            if one.word == two.word == "passed"
        }

    def error(self, test: str) -> str:
        """What a lost test failed with, in one line."""
        found = self.paceline.get(test, MISSING)
        if test not in self.differences:
            return found.error or found.word
        if len(found.losses) != len(self.real[test].losses):
            return f"{len(found.losses)} losses instead of {len(self.real[test].losses)}"
        return f"losses are up to {self.differences[test]:.2g} apart"

    def explanation(self, test: str) -> str:
        """Why a test may be lost; empty if nothing explains it."""
        return next((why for part, why in self.client.explained.items() if part in test), "")

    def summary(self) -> dict[str, Any]:
        """Everything as plain data."""
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
    """The libraries of the table, in its order."""
    return [Client(name, **row) for name, row in tomllib.loads(path.read_text()).items()]


def install(client: Client) -> None:
    """Make the environment, unless the one from the last time has the same versions."""
    environment = Environment(client.place, client.lock)
    if not environment.is_current():
        environment.create(shared=False)
        environment.install("-r", client.lock)
        environment.install("--no-deps", "--no-build-isolation", "-e", ROOT)
        environment.finish()


def fetch(client: Client) -> Path:
    """The scenarios, or the unpacked source distribution with what ``added`` has for it."""
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
    """Run the tests in a copy of the source; their outcomes by name, and the seconds that all took."""
    label = "paceline" if stand_in else "real"
    copy, report = client.folder / label, client.folder / f"{label}.xml"
    shutil.rmtree(copy, ignore_errors=True)
    report.unlink(missing_ok=True)
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    excluded = [option for test in client.excluded for option in ("--deselect", test)]
    pytest = ["-m", "pytest", *client.tests, *client.options, *excluded, "-p", "no:cacheprovider", "--tb=short", "-q"]
    pytest += [f"--timeout={client.timeout}", f"--junitxml={report}", f"--rootdir={copy}", "-o", "junit_family=xunit1"]
    replace = ["-m", "paceline.compat", client.stand_in] if stand_in else []
    start = time.monotonic()
    with (client.folder / f"{label}.log").open("w") as log:
        try:
            _call([client.python, *replace, *pytest], cwd=copy, log=log, limit=client.limit)
        except subprocess.TimeoutExpired:
            print(f"{client.name}: the tests did not end within {client.limit} s; see {log.name}", file=sys.stderr)
    if not report.exists():
        raise SystemExit(f"{client.name}: pytest wrote no report; see {client.folder / label}.log")
    return outcomes(report), time.monotonic() - start


def outcomes(report: Path) -> dict[str, Outcome]:
    """What a JUnit report says about each test."""
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
    """Install, fetch and run both."""
    print(f"{client.name} {client.version}: installing", file=sys.stderr)
    install(client)
    source = fetch(client)
    print(f"{client.name}: its tests with {client.stand_in}, then with Paceline", file=sys.stderr)
    real, real_seconds = run_tests(client, source, stand_in=False)
    if not _passed(real):
        raise SystemExit(f"{client.name}: no test passes with {client.stand_in}; see {client.folder / 'real.log'}")
    paceline, seconds = run_tests(client, source, stand_in=True)
    return Result(client, real, paceline, {"real": real_seconds, "paceline": seconds})


def table(results: Iterable[Result]) -> str:
    """The table, in Markdown."""
    lines = [
        "| library | uses | tests passed with the real package | with Paceline | lost | gained | losses apart by |",
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
    """Print the table, and each lost test with its error and its explanation."""
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
    """How far two losses are apart; two that are not numbers are equal, and one alone is infinitely far."""
    difference = 0.0 if one == two or (math.isnan(one) and math.isnan(two)) else abs(one - two)
    return math.inf if math.isnan(difference) else difference


def _passed(run: Mapping[str, Outcome]) -> int:
    return sum(one.word == "passed" for one in run.values())


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:200] if lines else ""


def _call(command: list[Any], *, cwd: Path = ROOT, log: Any = None, limit: float | None = None) -> None:
    """Run a command; its failure ends this program, unless its output goes to a log."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    output: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT} if log else {}
    command = [str(part) for part in command]
    done = subprocess.run(command, cwd=cwd, env=environment | ENVIRONMENT, timeout=limit, check=False, **output)
    if done.returncode and not log:
        raise SystemExit(f"{' '.join(command)} failed with status {done.returncode}.")


def main() -> None:
    """Compare the libraries that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="this library; may be repeated")
    parser.add_argument("--keep", action="store_true", help="leave environments, sources and logs, and use them again")
    parser.add_argument("--json", type=Path, default=WORK / "report.json", help="where the report goes as JSON")
    arguments = parser.parse_args()
    clients = {client.name: client for client in read_table()}
    if unknown := set(arguments.only or ()) - set(clients):
        parser.error(f"unknown library {', '.join(sorted(unknown))}; clients.toml has {', '.join(clients)}")
    asked, results = [clients[name] for name in arguments.only or clients], []
    for number, client in enumerate(asked, 1):
        results.append(compare(client))
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

"""Write docs/licenses.md, which lists the license of every package that Paceline and its extras install.

    .venv/bin/python clients/release/licenses.py

Versions come from requirements-dev.lock and the locks in clients/loggers and clients/tpu, so the page changes only when
they change. For packages that are not installed here, pip downloads only the metadata.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "licenses.md"
#: Matches the name of a copyleft license.
COPYLEFT = re.compile(r"GPL|MPL|Mozilla|EPL|Eclipse|CDDL|EUPL|GNU")
#: Short names of licenses that packages name in different ways.
SHORT = {
    "Apache Software License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache-2.0 license": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License 2.0": "Apache-2.0",
    "BSD License": "BSD",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "ISC License (ISCL)": "ISC",
}
#: The driver of a real TPU. TorchTPU installs it, but clients/tpu runs on a CPU and does not need it.
LIBTPU = "libtpu==0.0.52"
HEAD = """# Licenses

Paceline is licensed under Apache-2.0 and contains no code from other projects. Installing it also installs other
packages, each with its own license. This page lists them by extra, with the licenses that their authors state. Versions
are those that Paceline is tested with. `python clients/release/licenses.py` writes this page.

CUDA builds of torch also install NVIDIA's libraries (`nvidia-*`), which have NVIDIA's own proprietary license. The CPU
build, which is listed here, installs none of them.
"""
COPYLEFT_HEAD = """## Copyleft

These licenses require you to share the source of modified copies (MPL), or cover programs that are distributed together
with the package (GPL, LGPL). Installing and importing the packages for your own use requires nothing of you. Read the
licenses before you ship the packages with a product.

| package | license | comes with |
|---|---|---|"""


def metadata(wanted: list[str]) -> dict[str, dict[str, Any]]:
    """Return packages' metadata by name; ``wanted`` lists requirements without extras."""
    here = {(canonicalize_name(one.name), one.version.partition("+")[0]): one.metadata.json for one in distributions()}
    pins = [requirement.partition("==") for requirement in wanted]
    found = [here.get((canonicalize_name(name), version), {}) for name, _, version in pins]
    missing = [name for name, one in zip(wanted, found, strict=True) if not one]
    if missing:
        options = ["--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-"]
        command = [python_with_newest_pip(), "-m", "pip", "install", *options, *missing]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found += [one["metadata"] for one in json.loads(done.stdout)["install"]]
    return {canonicalize_name(str(one["name"])): one for one in found if one}


@cache
def python_with_newest_pip() -> Path:
    """Return the Python of an environment with the newest pip; older versions omit most packages' license."""
    folder = ROOT / ".release" / "pip"
    subprocess.run([sys.executable, "-m", "venv", "--upgrade-deps", folder], check=True, capture_output=True)
    return folder / "bin" / "python"


def locked(path: Path) -> list[str]:
    """Return the packages that a lock file names, with their versions."""
    return [line.removesuffix(" \\") for line in path.read_text().splitlines() if "==" in line]


def named(requirement: str) -> str:
    """Return the name of the package in a requirement."""
    return canonicalize_name(Requirement(requirement).name)


def license_of(package: dict[str, Any]) -> str:
    """Return a package's stated license: its expression, else its classifiers, else the first line of its text."""
    classifiers = [c.rpartition(" :: ")[2] for c in package.get("classifier", ()) if c.startswith("License :: OSI")]
    text = (package.get("license") or "").strip().partition("\n")[0]
    if stated := package.get("license_expression"):
        return str(stated)
    named = [SHORT.get(one, one) for one in classifiers] or [SHORT.get(text, text[:60])]
    files = [f"see its file {name}" for name in package.get("license_file", ())]
    return ", ".join(filter(None, named)) or ", ".join(files) or "not stated"


def needed(roots: list[str], packages: dict[str, dict[str, Any]]) -> set[str]:
    """Return all packages that the given requirements install, directly or through other packages."""
    found: set[tuple[str, str]] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        for extra in ("", *one.extras):
            if (name, extra) in found or name not in packages:
                continue
            found.add((name, extra))
            further = [Requirement(text) for text in packages[name].get("requires_dist", ())]
            waiting += [r for r in further if r.marker is None or r.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def table(names: set[str], packages: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table of packages with their licenses."""
    shown = [(name, packages[name]["version"].partition("+")[0], license_of(packages[name])) for name in sorted(names)]
    rows = [f"| {name} | {version} | {stated} |" for name, version, stated in shown]
    return "\n".join(["| package | version | license |", "|---|---|---|", *rows])


def page() -> str:
    """Return the text of docs/licenses.md."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = metadata(locked(ROOT / "requirements-dev.lock"))
    locks = {path.stem: locked(path) for path in (ROOT / "clients" / "loggers" / "locks").glob("*.txt")}
    locks["tpu"] = [*locked(ROOT / "clients" / "tpu" / "requirements.txt"), LIBTPU]
    core = needed(project["dependencies"], tested)
    parts, brought_by = [f"## Paceline itself\n\n{table(core, tested)}\n"], dict.fromkeys(core, "Paceline itself")
    known = dict(tested)
    for extra, roots in project["optional-dependencies"].items():
        others = [name for name in map(named, roots) if name not in {*tested, "paceline"}]
        packages = {**tested, **metadata(locks.get(extra, others))}
        added = needed(roots, packages) - core
        parts.append(f"## Extra {extra}\n\n{table(added, packages)}\n")
        known |= packages
        for name in added:
            brought_by[name] = f"{brought_by[name]}, {extra}" if name in brought_by else extra
    rows = [
        f"| {name} | {license_of(known[name])} | {brought_by[name]} |"
        for name in sorted(brought_by)
        if COPYLEFT.search(license_of(known[name]))
    ]
    return "\n".join([HEAD, COPYLEFT_HEAD, *rows, "", *parts])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

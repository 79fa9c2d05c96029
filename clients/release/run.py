"""Build a release into dist/ and try it as a user would, in a bare environment for each Python.

    make release                                 every Python from 3.10 to 3.14 on this machine
    make release RELEASE="--only 3.12"           only this one; may be repeated
    make release RELEASE="--torch 2.15.0"        a torch other than the one in requirements-dev.lock
    python3.14 clients/release/run.py --built    the files already in dist/, with the Python that runs this file

The wheel is built from the source distribution, which contains the files that git tracks. Environments are created with
uv, which unpacks each package once for all of them; the CUDA build of torch and its dependencies take 6 GB. Each
environment is deleted before the next one is created. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = ROOT / ".release"
TOOLS = WORK / "tools"
DIST = ROOT / "dist"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: Tests that are run in the unpacked source distribution.
TESTS = ("tests/test_architecture.py", "tests/test_readme.py", "tests/trainer/test_loop.py")
#: Imports every module. An import may fail only if a package from an extra is missing.
IMPORTS = """
import importlib, pkgutil, sys
import paceline
assert paceline.__file__.startswith(sys.prefix), paceline.__file__
lacking = set()
for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
    if not module.name.startswith("paceline.compat.on_path") and not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            lacking.add(str(error.name).partition(".")[0])
extras = {"accelerate", "bitsandbytes", "deepspeed", "jsonargparse", "lightning", "pytest", "torchao", "tqdm"}
assert lacking <= extras, lacking - extras
print(paceline.__version__)
"""


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """Run a command and return its output; if it fails, exit the program and show the output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
        raise SystemExit(f"{' '.join(map(str, command))} failed with status {done.returncode}:\n{said}")
    return done.stdout


def uv(python: Path, command: str, *arguments: str | Path) -> None:
    """Run a ``uv pip`` command for an environment, with pip's settings."""
    settings = {"UV_FIND_LINKS": "PIP_FIND_LINKS", "UV_INDEX": "PIP_EXTRA_INDEX_URL"}
    taken = {name: os.environ[pips] for name, pips in settings.items() if pips in os.environ}
    run(TOOLS / "bin" / "uv", "pip", command, "--quiet", "--python", python, *arguments, cwd=ROOT, **taken)


def locked(package: str) -> str:
    """Return the version of a package in requirements-dev.lock."""
    found = re.search(rf"^{package}==(.+)$", (ROOT / "requirements-dev.lock").read_text(), re.M)
    if found is None:
        raise SystemExit(f"requirements-dev.lock has no version of {package}. Add the line {package}==VERSION.")
    return found[1]


def build() -> None:
    """Build the source distribution from the files that git tracks, and the wheel from the source distribution."""
    source = WORK / "source"
    for folder in (WORK, DIST):
        shutil.rmtree(folder, ignore_errors=True)
    for name in filter(None, run("git", "ls-files", "-z").split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, source)
    for file in distributions():
        print(f"built {file.relative_to(ROOT)}, {file.stat().st_size / 1e6:.1f} MB")


def distributions() -> list[Path]:
    """Return the paths of the wheel and the source distribution in dist/."""
    found = [*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")]
    if len(found) != 2:
        raise SystemExit(
            f"dist/ must contain one wheel and one source distribution, but has {len(found)} such files. Run without "
            "--built."
        )
    return found


def check_metadata() -> None:
    """Check the metadata, the rendering of the description, and the citation file."""
    run(sys.executable, "-m", "venv", TOOLS)
    pip = [TOOLS / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "install", "-r", HERE / "tools.txt")
    run(TOOLS / "bin" / "twine", "check", "--strict", *distributions())
    print("metadata and description: passed (twine check --strict)")
    run(TOOLS / "bin" / "cffconvert", "--validate", "-i", ROOT / "CITATION.cff")
    print("CITATION.cff: valid (cffconvert)")


def test_source() -> None:
    """Run some of the tests in the unpacked source distribution, without git or the repository."""
    with tarfile.open(distributions()[1]) as archive:
        top = archive.getnames()[0]
        archive.extractall(WORK, filter="data")
    unpacked = (WORK / top).rename(WORK / "paceline")
    said = run(sys.executable, "-m", "pytest", *TESTS, "-p", "no:cacheprovider", cwd=unpacked, PYTHONPATH=str(WORK))
    print(f"tests in the source distribution: {said.splitlines()[-1].strip('= ')}")


def interpreters(only: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the version and command of each Python on this machine."""
    for version in only or PYTHONS:
        kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        if command := str(kept[-1]) if kept else shutil.which(f"python{version}"):
            yield version, command
        else:
            print(f"Python {version}: not on this machine")


def try_on(version: str, command: str, torch: str) -> None:
    """Install the wheel, then the source distribution, in a bare environment, and check each."""
    folder = WORK / f"python{version}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        run(command, "-m", "venv", "--without-pip", folder)
        python = folder / "bin" / "python"
        wheel, source = distributions()
        uv(python, "install", f"torch=={torch}", wheel)
        uv(python, "check")
        print(f"Python {version}, wheel: {', '.join(checks(folder, 'wheel'))}", flush=True)
        uv(python, "install", "--reinstall", "--no-deps", source)
        print(f"Python {version}, source distribution: {', '.join(checks(folder, 'source'))}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def checks(folder: Path, form: str) -> Iterator[str]:
    """Check an installation from outside the repository; yield a description of each check that passed."""
    python, paceline, place = folder / "bin" / "python", folder / "bin" / "paceline", folder / form
    place.mkdir()
    offline = {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    yield f"import of {run(python, '-I', '-W', 'error::SyntaxWarning', '-c', IMPORTS, cwd=place).strip()}"
    run(paceline, "--help", cwd=place)
    run(paceline, "env", cwd=place)
    run(paceline, "test", cwd=place)
    run(paceline, "test", "--cpu", "--num_processes", "2", cwd=place)
    yield "paceline --help, env, test"
    one, two = (run(python, HERE / "fit.py", name, place / name, cwd=place, **offline) for name in ("cpu", "ddp"))
    losses = {said.splitlines()[-1] for said in (one, two)}
    if len(losses) != 1:
        raise SystemExit(f"Training with one process and with two printed different results: {losses}.")
    yield f"fit and resume with one process and with two ({losses.pop()})"
    launched = run(paceline, "launch", "--cpu", "--num_processes", "2", HERE / "loop.py", cwd=place, **offline)
    if sorted(launched.splitlines()) != [f"rank {rank} of 2: 64 samples" for rank in (0, 1)]:
        raise SystemExit(f"paceline launch printed {launched!r} instead of a line with 64 samples for each rank.")
    yield "paceline launch"


def main() -> None:
    """Build a release, or use the one in dist/, and check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="VERSION", help="version of Python to try; may be repeated")
    parser.add_argument(
        "--torch", metavar="VERSION", help="version of torch to install; by default, the one in requirements-dev.lock"
    )
    parser.add_argument("--built", action="store_true", help="try the files in dist/ with this Python")
    arguments = parser.parse_args()
    if arguments.built:
        found = [("{}.{}".format(*sys.version_info), sys.executable)]
    else:
        build()
        check_metadata()
        test_source()
        found = list(interpreters(arguments.only))
    for version, command in found:
        try_on(version, command, arguments.torch or locked("torch"))


if __name__ == "__main__":
    main()

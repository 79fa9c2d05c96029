"""Test the loggers of services offline with the services' real packages, each in its own environment.

    make loggers                            all of them, about three minutes
    make loggers LOGGERS="--only aim"       only one; the environments are kept in .loggers

Each environment shares the packages of .venv and adds exactly the packages that ``locks/NAME.txt`` lists.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from environments import with_lock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = ROOT / ".loggers"
#: The service's package in each lock file.
PACKAGES = {
    "mlflow": "mlflow-skinny",
    "comet": "comet_ml",
    "trackio": "trackio",
    "clearml": "clearml",
    "dvclive": "dvclive",
    "swanlab": "swanlab",
    "aim": "aim",
}


def lock(name: str) -> Path:
    """Return the path of the lock file with all versions in a service's environment."""
    return HERE / "locks" / f"{name}.txt"


def version(name: str) -> str:
    """Return the locked version of a service's package."""
    lines = lock(name).read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{PACKAGES[name]}=="))


def test(name: str, python: Path) -> bool:
    """Run the tests of a service; return whether all passed."""
    private = WORK / name / "home"
    shutil.rmtree(private, ignore_errors=True)
    private.mkdir()
    environment = {
        **os.environ,
        "HOME": str(private),
        "TRACKIO_DIR": str(private / "trackio"),
        "CLEARML_CACHE_DIR": str(private / "clearml"),
        "OMP_NUM_THREADS": "1",
    }
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--timeout=120", "--service", name]
    return subprocess.run([python, "-m", "pytest", HERE, *options], cwd=HERE, env=environment).returncode == 0


def main() -> None:
    """Test the requested services and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        choices=list(PACKAGES),
        help="test only this service; may be repeated",
    )
    arguments = parser.parse_args()
    rows = []
    for name in arguments.only or PACKAGES:
        print(f"{name}:", file=sys.stderr, flush=True)
        start = time.monotonic()
        passed = test(name, with_lock(WORK / name, lock(name)))
        rows.append((f"{PACKAGES[name]} {version(name)}", "passed" if passed else "FAILED", time.monotonic() - start))
    for package, result, seconds in rows:
        print(f"{package:24} {result:8} {seconds:4.0f} s")
    raise SystemExit(any(result != "passed" for _, result, _ in rows))


if __name__ == "__main__":
    main()

"""Run the device tests on one TPU, which XLA emulates on the CPU. Its speed means nothing.

    make tpu                                     half a minute, plus two minutes for the first installation (0.8 GB)
    make tpu TPU="-k resumed -x"                 some of the tests, with pytest's options

The environment, .tpu, shares the packages of .venv. It adds TorchTPU and the plugin that runs XLA's programs on the
CPU, both pinned by hash, and a small C library (plugin.c). The library is compiled here, which requires a C compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from environments import Environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = ROOT / ".tpu"
ENVIRONMENT = Environment(WORK, *(HERE / name for name in ("requirements.txt", "plugin.c", "run.py")))
LIBRARY = WORK / "plugin.so"
#: Other tests in tests/devices register their own device with torch, which accepts only one.
TEST = "tests/devices/test_any_device.py"


def install() -> None:
    """Create the environment, unless it exists and was created from the same files."""
    if ENVIRONMENT.is_current():
        return
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SystemExit(
            "make tpu compiles a small C library, but this machine has no cc, gcc or clang. Install one of them, or "
            "set CC."
        )
    ENVIRONMENT.create(shared=True, first=f"import sys; sys.path.append({str(HERE)!r}); import tpu_on_cpu")
    ENVIRONMENT.install("--no-deps", "--require-hashes", "-r", HERE / "requirements.txt")
    header = ENVIRONMENT.packages / "xla_plugins" / "xla_cpu_pjrt" / "include"
    command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Werror", f"-I{header}", "-o", LIBRARY]
    subprocess.run([*command, HERE / "plugin.c", "-ldl"], check=True)
    ENVIRONMENT.finish()


def environment() -> dict[str, str]:
    """Return the environment variables with which a process in the environment sees one TPU."""
    return {
        **os.environ,
        "TPU_LIBRARY_PATH": str(LIBRARY),
        "PACELINE_CPU_PLUGIN": str(ENVIRONMENT.packages / "lammps_jax_pjrt_cpu" / "pjrt_c_api_cpu_plugin.so"),
        "TPU_SKIP_MDS_QUERY": "1",  # no query to a cloud's metadata service
        "PACELINE_TEST_DEVICE": "tpu",
        "OMP_NUM_THREADS": "1",
    }


def main() -> int:
    """Create the environment and run the tests in it; return pytest's exit status."""
    install()
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:]]
    return subprocess.run([ENVIRONMENT.python, "-m", "pytest", TEST, *options], cwd=ROOT, env=environment()).returncode


if __name__ == "__main__":
    sys.exit(main())

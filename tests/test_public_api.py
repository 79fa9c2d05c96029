"""What a user gets: the public names, the packages that are shipped, and what an installation holds."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import tomllib

import paceline

ROOT = Path(__file__).resolve().parent.parent
#: Folders of the repository that are not the package.
BESIDE = {"tests", "examples", "benchmarks", "clients", "docs", "build"}
ROOMS = tuple(
    path.name for path in sorted(ROOT.iterdir()) if (path / "__init__.py").exists() and path.name not in BESIDE
)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_public_name_can_be_used() -> None:
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert set(paceline.__all__) <= set(dir(paceline))


def test_the_public_names_are_these() -> None:
    assert set(paceline.__all__) == {
        "Accelerator",
        "AutocastKwargs",
        "Callback",
        "CombinedLoader",
        "DDPCommunicationHookType",
        "DataLoaderConfiguration",
        "DataModule",
        "DeepSpeedPlugin",
        "DistributedDataParallelKwargs",
        "DistributedType",
        "DynamoBackend",
        "FullyShardedDataParallelPlugin",
        "GradScalerKwargs",
        "GradientAccumulationPlugin",
        "InitProcessGroupKwargs",
        "LocalSGD",
        "BnbQuantizationConfig",
        "ParallelismConfig",
        "PartialState",
        "ProfileKwargs",
        "ProjectConfiguration",
        "TorchDynamoPlugin",
        "Trainer",
        "TrainingModule",
        "Tuner",
        "__version__",
        "callbacks",
        "debug_launcher",
        "find_executable_batch_size",
        "get_logger",
        "cpu_offload",
        "cpu_offload_with_hook",
        "disk_offload",
        "dispatch_model",
        "init_empty_weights",
        "init_on_device",
        "infer_auto_device_map",
        "plan_device_map",
        "profilers",
        "load_checkpoint_and_dispatch",
        "compute_module_sizes",
        "load_and_quantize_model",
        "load_checkpoint_in_model",
        "loggers",
        "notebook_launcher",
        "seed_everything",
        "set_seed",
        "skip_first_batches",
        "strategies",
        "synchronize_rng_states",
        "verify",
    }


def test_a_type_checker_sees_the_same_names_as_a_program() -> None:
    source = (ROOT / "__init__.py").read_text()
    block = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        module = "." + (statement.module or "")
        for name in (alias.name for alias in statement.names):
            loaded = importlib.import_module(module if module != "." else f".{name}", "paceline")
            assert getattr(paceline, name) is (loaded if module == "." else getattr(loaded, name))
            assert name in paceline.__all__


def test_a_misspelled_name_is_corrected() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'Traner'\. Did you mean 'Trainer'\?"):
        _ = paceline.Traner


@pytest.mark.parametrize("room", ["callbacks", "loggers", "profilers", "strategies"])
def test_every_name_that_a_room_promises_is_there(room: str) -> None:
    module = getattr(paceline, room)
    assert module.__all__, f"paceline.{room} promises nothing"
    assert len(module.__all__) == len(set(module.__all__))
    for name in module.__all__:
        assert callable(getattr(module, name)) or name == "StrategyRegistry"
    assert set(module.__all__) <= set(dir(module))


def test_a_profiler_is_the_same_wherever_it_is_imported_from() -> None:
    assert paceline.profilers.Doctor is importlib.import_module("paceline.doctor.doctor").Doctor


def test_pyproject_lists_every_folder_that_holds_code() -> None:
    folders = {path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    packages = {"paceline", *("paceline." + ".".join(folder.relative_to(ROOT).parts) for folder in folders)}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == packages
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_pyright_checks_all_of_the_package() -> None:
    assert set(PYPROJECT["tool"]["pyright"]["include"]) == {*ROOMS, *(path.name for path in ROOT.glob("*.py"))}


def test_what_the_lock_pins_is_what_pyproject_asks_for() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    def pinned(path: Path) -> dict[str, str]:
        return {canonicalize_name(name): pin for name, pin in re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.M)}

    project, pins = PYPROJECT["project"], pinned(ROOT / "requirements-dev.lock")
    beside = {path.stem: pinned(path) for path in (ROOT / "clients" / "loggers" / "locks").glob("*.txt")}
    beside["tpu"] = pinned(ROOT / "clients" / "tpu" / "requirements.txt")
    extras = {name: wants for name, wants in project["optional-dependencies"].items() if name != "benchmarks"}
    for extra, wants in {"": project["dependencies"], **extras}.items():
        for asked in map(Requirement, wants):
            if asked.name != "paceline":
                version = beside.get(extra, pins)[canonicalize_name(asked.name)]
                assert asked.specifier.contains(version), (extra, asked)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, as building leaves files in the source folder."""
    copy = tmp_path_factory.mktemp("source") / "checkout"
    left = ("build", "dist", "*.egg-info", "runs", "wandb", "gpu.json", "sources", "reference")
    left_out = shutil.ignore_patterns(".*", "__pycache__", *left)
    shutil.copytree(ROOT, copy, ignore=left_out)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """Both distributions are built, the wheel from the unpacked source distribution."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", ".", cwd=source)
    return next((source / "dist").glob("*.whl"))


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def new_environment(folder: Path) -> Path:
    """A virtual environment that sees this one's packages, but not what this one has installed as editable."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    outer = [path for path in sys.path if Path(path).name == "site-packages"]
    (Path(site) / "outer.pth").write_text("\n".join(outer) + "\n")
    return python


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    code = {*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))}
    files = [ROOT / "py.typed", *ROOT.glob("compat/*/surface.txt"), *(code - {ROOT / "setup.py"})]
    assert shipped == {f"paceline/{path.relative_to(ROOT).as_posix()}" for path in files}


def test_the_source_distribution_holds_all_that_the_repository_does(source: Path, wheel: Path) -> None:
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as archive:
        shipped = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    made = {"PKG-INFO", "setup.cfg", ".gitignore"}
    found = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    own = {name for name in found if not name.startswith(("dist/", "build/", "paceline.egg-info/"))}
    assert {name for name in shipped if not name.startswith((".", "paceline.egg-info/"))} - made == own - made


def test_the_description_on_a_package_index_has_no_relative_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"paceline-{paceline.__version__}.dist-info/METADATA").decode()
    headers, _, shown = metadata.partition("\n\n")
    assert "Description-Content-Type: text/markdown" in headers
    assert shown.startswith("# Paceline\n")
    assert "documentation (docs/index.md) has the rest" in shown.replace("\n", " ")
    assert 'pip install "paceline[examples]"' in shown
    assert not re.findall(r"\]\((?!https:|#)[^)]*\)|(?:src|href)=\"(?!https:)[^\"]*\"", shown)


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"paceline-{paceline.__version__}.dist-info/METADATA").decode()
        for text in ("LICENSE", "NOTICE"):
            assert f"paceline-{paceline.__version__}.dist-info/licenses/{text}" in archive.namelist()
    required = {
        line.removeprefix("Requires-Dist: ").split(">")[0].split("<")[0].strip()
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }
    assert required == {"torch", "torchmetrics", "tensorboard", "wandb", "packaging", "PyYAML", "rich", "safetensors"}


@pytest.mark.parametrize("form", ["wheel", "editable"])
def test_an_installation_works_outside_the_checkout(form: str, source: Path, wheel: Path, tmp_path: Path) -> None:
    python = new_environment(tmp_path / "environment")
    what = [wheel] if form == "wheel" else ["--no-build-isolation", "--editable", source]
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--no-deps"]
    run(*pip, *what, cwd=tmp_path)
    program = "import paceline; print(paceline.Trainer, paceline.trainer.loop.__file__, paceline.__version__)"
    said = run(python, "-I", "-c", program, cwd=tmp_path)
    place = source if form == "editable" else tmp_path / "environment"
    assert str(place) in said
    assert "version" in PYPROJECT["project"]["dynamic"]
    assert paceline.__version__ in said


def strict_errors(checker: str, python: Path, folder: Path) -> str:
    """Run a type checker in its strict mode on program.py; return what it prints, empty if it has no objection."""
    if checker == "mypy":
        options = ["--strict", "--no-error-summary", "--python-version", "3.10", "--python-executable", python]
        command = ["mypy", *options, "program.py"]
    else:
        settings = {"include": ["program.py"], "typeCheckingMode": "strict", "pythonVersion": "3.10"}
        (folder / "pyrightconfig.json").write_text(json.dumps(settings))
        command = ["pyright", "--pythonpath", python, "-p", "."]
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=folder,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    return done.stdout.replace("0 errors, 0 warnings, 0 informations", "").strip() + done.stderr


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_strict_type_checker_accepts_a_program_that_uses_the_installed_wheel(
    checker: str, wheel: Path, tmp_path: Path
) -> None:
    python = new_environment(tmp_path / "environment")
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    program = (ROOT / "tests" / "typed_program.py").read_text()
    (tmp_path / "program.py").write_text(program)
    assert strict_errors(checker, python, tmp_path) == ""
    wrong = program.replace("max_epochs=2", "max_epochs='two'")
    (tmp_path / "program.py").write_text(wrong)
    assert "max_epochs" in strict_errors(checker, python, tmp_path)

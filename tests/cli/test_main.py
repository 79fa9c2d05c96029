"""How a command is found, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import main as module
from paceline.cli.main import COMMANDS, FAILED, main

pytestmark = pytest.mark.cold

HELP = [
    ["--help"],
    ["checkpoint", "--help"],
    ["checkpoint", "ls", "-h"],
    ["launch", "-h"],
    ["test", "-h"],
    ["merge-weights", "-h"],
    ["estimate-memory", "-h"],
    ["report", "-h"],
    ["--version"],
]

PROGRAM = """
import json, sys
from paceline.cli.main import main
try:
    main({arguments})
except SystemExit as ended:
    print(json.dumps([ended.code, sorted(name for name in sys.modules if not name.startswith("_"))]))
"""


def ended(*arguments: str) -> tuple[int, list[str], str]:
    """The exit status of a command in a fresh interpreter, the modules it imported, and what it said."""
    program = PROGRAM.format(arguments=list(arguments))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *said, last = done.stdout.splitlines()
    return *json.loads(last), "\n".join(said)


@pytest.mark.parametrize("arguments", HELP)
def test_help_imports_neither_torch_nor_another_package(arguments: list[str]) -> None:
    status, modules, said = ended(*arguments)
    assert status == 0
    assert said
    assert "paceline.cli.main" in modules
    foreign = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names) - {"paceline"}
    assert not foreign & {"torch", "numpy", "fsspec", "rich", "jsonargparse"}
    # What .pth files of the environment import is not ours; few modules mean a quick answer.
    assert len([name for name in modules if name.startswith("paceline")]) <= 20


def test_the_module_can_be_run() -> None:
    done = subprocess.run([sys.executable, "-m", "paceline", "--help"], capture_output=True, text=True, check=True)
    assert "checkpoint" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_its_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*name.split(), "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert f"paceline {name}" in said
    assert "options:" in said


def test_a_flag_may_be_spelled_with_dashes_or_underscores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, spelled in enumerate(("--config-file", "--config_file")):
        path = str(tmp_path / f"{number}.yaml")
        assert main(["config", "--yes", spelled, path, f"{spelled[:-5]}_file={path}", "--set=mixed-precision=no"]) == 0
        assert capsys.readouterr().out == f"{path}\n"
    with pytest.raises(SystemExit):
        main(["config", "--help"])
    assert "--config-file" not in capsys.readouterr().out


def test_an_unknown_command_is_an_error_that_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["checkpoint", "lss"])
    assert end.value.code == 2
    assert "'verify'" in capsys.readouterr().err


def test_an_unknown_flag_is_one_sentence_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--num_proceses", "2", "train.py"]) == FAILED
    assert capsys.readouterr().err == (
        "paceline launch: Unknown argument '--num_proceses'. Did you mean '--num_processes'? --help lists all "
        "arguments.\n"
    )
    assert main(["checkpoint", "ls", ".", "--jsn"]) == FAILED
    assert "Did you mean '--json'?" in capsys.readouterr().err


def test_a_failure_is_one_sentence_and_exit_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", str(tmp_path / "none")]) == FAILED == 2
    said = capsys.readouterr().err
    assert said.startswith("paceline checkpoint ls: ")
    assert "does not exist" in said
    assert len(said.splitlines()) == 1


def test_a_bug_is_not_hidden_behind_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.cli.checkpoint import ls

    def broken(_: object) -> int:
        raise AttributeError("a bug")

    monkeypatch.setattr(ls, "run", broken)
    with pytest.raises(AttributeError, match="a bug"):
        main(["checkpoint", "ls", str(tmp_path)])


def test_the_script_is_the_same_function() -> None:
    import tomllib

    project = tomllib.loads((Path(module.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"paceline": "paceline.cli.main:main"}

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.processes.rank_failure import (
    LAUNCHED,
    Failure,
    failures,
    note_failure,
    register_failure_hook,
    write_failure,
)


def ended(exit_code: int, second: int = 100) -> Any:
    return SimpleNamespace(exitcode=exit_code, timestamp=second)


def written(folder: Path, rank: int, summary: str, second: float = 100, interrupted: bool = False) -> Path:
    details = {"py_callstack": f"Traceback\n{summary}\n", "timestamp": str(int(second)), "time_ns": int(second * 10**9)}
    message = {"message": summary, "interrupted": interrupted, "extraInfo": details}
    file = folder / f"rank{rank}.json"
    file.write_text(json.dumps({"message": message, "rank": rank}))
    return file


def blamed(exits: dict[int, Any], files: list[Path]) -> Failure:
    failure = failures(exits, files)[0]
    assert failure is not None
    return failure


def test_nothing_failed() -> None:
    assert failures({}, []) == []


def test_of_two_exceptions_the_earlier_is_to_blame(tmp_path: Path) -> None:
    files = [written(tmp_path, 0, "ValueError: b", 100.2), written(tmp_path, 1, "ValueError: a", 100.1)]
    failure = blamed({0: ended(1), 1: ended(1)}, files)
    assert (failure.rank, failure.status) == (1, 1)
    assert failure.describe(2) == "Rank 1 of 2 failed (exit status 1):\nTraceback\nValueError: a"


@pytest.mark.parametrize(
    "lost",
    [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:123",
        "RuntimeError: Read error [127.0.0.1]:36187: Connection reset by peer",
        "torch.distributed.DistBackendError: NCCL error in: x.cpp, remote process exited or there was a network error",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    ],
)
def test_who_lost_its_peer_is_not_to_blame_even_when_it_wrote_first(tmp_path: Path, lost: str) -> None:
    files = [written(tmp_path, 0, lost, 100), written(tmp_path, 1, "ValueError: a", 101)]
    assert blamed({0: ended(1), 1: ended(1)}, files).rank == 1
    assert blamed({0: ended(1), 1: ended(3, 101)}, files[:1]).status == 3
    assert blamed({0: ended(1), 1: ended(-9, 101)}, files[:1]).status == 137
    assert blamed({0: ended(1)}, files[:1]).rank == 0  # nobody else to blame


def test_who_was_told_to_end_is_not_to_blame(tmp_path: Path) -> None:
    files = [written(tmp_path, 2, "KeyboardInterrupt", 99, interrupted=True)]
    for told in (-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGINT, 130):
        assert blamed({0: ended(told), 1: ended(3, 101), 2: ended(1)}, files).rank == 1


def test_an_exception_goes_before_a_bare_exit_in_the_same_second(tmp_path: Path) -> None:
    file = written(tmp_path, 0, "ValueError: a", 100.9)
    assert blamed({0: ended(1, 100), 1: ended(1, 100)}, [file]).rank == 0


def test_a_death_by_signal_goes_before_an_exception_in_the_same_second(tmp_path: Path) -> None:
    file = written(tmp_path, 0, "ValueError: peers are gone", 100.9)
    assert blamed({0: ended(1, 100), 1: ended(-signal.SIGSEGV, 100)}, [file]).rank == 1
    assert blamed({0: ended(1, 100), 1: ended(-signal.SIGKILL, 130)}, [file]).rank == 0  # killed for not ending


@pytest.mark.parametrize(
    ("exit_code", "status", "words"),
    [
        (3, 3, "failed (exit status 3) without an exception"),
        (-signal.SIGKILL, 137, "was killed by signal 9 (SIGKILL), probably by the system because memory ran out"),
        (-signal.SIGSEGV, 139, "was killed by signal 11 (SIGSEGV), which means that native code crashed"),
        (-signal.SIGUSR1, 128 + signal.SIGUSR1, "(SIGUSR1)."),
    ],
)
def test_without_a_traceback_the_status_explains(exit_code: int, status: int, words: str) -> None:
    failure = Failure(0, exit_code, 0)
    assert failure.status == status
    assert failure.describe(4).startswith("Rank 0 of 4 ")
    assert words in failure.describe(4)


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"])
def test_a_crash_leaves_its_signal_and_where_it_was(tmp_path: Path, name: str) -> None:
    file, number = tmp_path / "rank1.crash", signal.Signals[name]
    code = (
        "import os, sys; from pathlib import Path; from paceline.processes.rank_failure import note_crash\n"
        "def crash_here(): os.kill(os.getpid(), int(sys.argv[2]))\n"
        "note_crash(Path(sys.argv[1])); crash_here()"
    )
    started = [sys.executable, "-c", code, str(file), str(int(number))]
    done = subprocess.run(started, env=os.environ | {"RANK": "1"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-number, "")
    lost = written(tmp_path, 0, "RuntimeError: Connection closed by peer", 100)
    first, other = failures({0: ended(1)}, [lost], [file])
    assert (first.rank, first.status, other.rank) == (1, 128 + number, 0)
    said = first.describe(2)
    assert said.startswith(f"Rank 1 of 2 was killed by signal {int(number)} ({name}), because native code crashed.")
    assert " in crash_here" in said


@pytest.mark.parametrize("written_so_far", ["", "1", "1\n"])
def test_a_process_that_did_not_crash_is_none_that_failed(tmp_path: Path, written_so_far: str) -> None:
    (tmp_path / "rank1.crash").write_text(written_so_far)
    assert failures({}, [], [tmp_path / "rank1.crash"]) == []


def test_a_noted_exception_keeps_its_first_moment(tmp_path: Path) -> None:
    def moment(error: BaseException) -> int:
        write_failure(error, tmp_path / "error.json")
        return json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["time_ns"]

    inner, outer = ValueError("inner"), RuntimeError("outer")
    first = moment(inner)
    assert moment(inner) == first
    assert moment(outer) > first
    wrapped = RuntimeError("wrapped")
    wrapped.__cause__ = inner
    assert moment(wrapped) == first


def test_the_hook_is_for_processes_that_paceline_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = sys.excepthook
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.delenv(LAUNCHED, raising=False)
    register_failure_hook()  # torchrun's child
    monkeypatch.setenv(LAUNCHED, str(os.getpid()))
    register_failure_hook()  # a child's child: the one that waits lives, but is not the parent
    note_failure(ValueError("a"))
    assert sys.excepthook is before
    assert not file.exists()


def test_a_started_process_writes_its_exception_instead_of_printing_it(tmp_path: Path) -> None:
    code = (
        "from paceline.processes.rank_failure import register_failure_hook; register_failure_hook(); "
        "import threading; assert 'paceline-agent' in [t.name for t in threading.enumerate()]; 1 / 0"
    )
    more = {LAUNCHED: str(os.getpid()), "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"), "RANK": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | more, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    failure = blamed({}, [tmp_path / "error.json"])
    assert (failure.rank, failure.summary) == (3, "ZeroDivisionError: division by zero")
    assert failure.text.startswith("Traceback (most recent call last):\n")
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]

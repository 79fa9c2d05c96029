"""Reading a record back: what counts once, what follows from it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.report import system_info
from paceline.report.history import find, read
from paceline.report.record import PARTS
from paceline.report.run_page import duration


def clock(step: float = 0.0) -> dict[str, float]:
    return {**dict.fromkeys(PARTS, 0.0), "step": step}


def row(step: int, seconds: float = 0.0, **values: float) -> dict[str, Any]:
    counters = {"step": step, "updates": step, "epoch": 0, "batches": 2 * step, "lr": {"SGD": 0.1}}
    return {"what": "row", "time": float(step), **counters, "values": values, "clock": clock(seconds)}


def start(**more: Any) -> dict[str, Any]:
    return {"what": "start", "time": 0.0, "fn": "fit", **more}


def written(*lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    header = '{"what": "record", "format": 1, "run": "x"}'
    path = Path("run_report.jsonl")
    path.write_text("\n".join([header, *texts]) + "\n")
    return path


def test_rows_behind_the_checkpoint_of_a_resume_count_once() -> None:
    before = [start(), row(0), row(2, a=2.0), row(4, a=4.0)]
    place = written(*before).stat().st_size
    lost = [row(4, b=0.4), row(6, a=0.6)]
    again = [{"what": "go on", "after": place}, start(), row(4), row(4, b=4.0), row(6, a=6.0)]
    history = read(written(*before, *lost, *again))
    assert history.curves() == {"a": [(2, 2.0), (4, 4.0), (6, 6.0)], "b": [(4, 4.0)]}
    assert [one.repeated for one in history.starts] == [2, 0]


def test_a_start_from_an_earlier_step_takes_the_place_of_what_came_after_it() -> None:
    history = read(written(start(), row(0), row(2, a=0.2), row(4, a=0.4), start(), row(0), row(2, a=2.0)))
    assert history.curves() == {"a": [(2, 2.0)]}


def test_a_torn_line_in_the_middle_is_passed_over() -> None:
    history = read(written(start(), row(0), '{"what": "row", "ti', row(2, a=1.0)))
    assert history.torn == 1
    assert history.curves() == {"a": [(2, 1.0)]}


def test_speed_is_of_the_time_in_which_it_trained() -> None:
    data = {"what": "data", "time": 0.0, "batch_size": 8, "ranks": 2, "accumulate": 2}
    history = read(written(start(), data, row(0), row(10, 1.0), row(20, 3.0)))
    assert history.speed() == {
        "steps per second": pytest.approx(20 / 3),
        "steps per second, median": pytest.approx(7.5),
        "samples per second": pytest.approx(40 * 16 / 3),
    }


def test_values_that_are_not_numbers_are_kept_as_such() -> None:
    history = read(written(start(), row(0), row(2, a=float("nan")), row(4, a=float("inf"))))
    (_, first), (_, second) = history.curves()["a"]
    assert first != first
    assert second == float("inf")


@pytest.mark.parametrize("whose", ["ours", "ended", "other host", "another with its number"])
def test_a_record_without_an_end_is_running_only_if_its_process_is(whose: str) -> None:
    pid = os.getpid()
    process = {"host": socket.gethostname(), "pid": pid, "begun": system_info.begun(pid)}
    if whose == "ended":
        gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
        process["pid"] = int(gone.stdout)
    if whose == "other host":
        process["host"] = "elsewhere"
    if whose == "another with its number":
        process["begun"] = 1
    history = read(written(start(process=process), row(0)))
    assert history.status.startswith(
        "running" if whose == "ours" else "ended without recording how: the process was killed"
    )


def test_the_record_beside_a_page_is_found() -> None:
    path = written(start())
    page = path.with_suffix(".html")
    page.write_text("")
    assert find(page) == find(path) == path
    assert find(".") == path


def test_secrets_of_the_command_are_not_kept() -> None:
    words = ["train.py", "--lr", "0.1", "--api-key", "abc", "--token=def", "keyword"]
    assert system_info._command(words) == "train.py --lr 0.1 --api-key *** --token=*** keyword"


def test_git_state_counts_changed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)
    assert system_info.git_state() == {}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "train.py").write_text("1")
    for words in (["init", "-q", "-b", "trunk"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "train.py").write_text("2")
    found = system_info.git_state()
    assert (len(found["commit"]), found["branch"], found["changed files"]) == (40, "trunk", 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert system_info.git_state() == {}


@pytest.mark.parametrize(("seconds", "said"), [(0.1234, "0.123 s"), (75, "1 min 15 s"), (7383, "2 h 03 min")])
def test_durations_are_words(seconds: float, said: str) -> None:
    assert duration(seconds) == said

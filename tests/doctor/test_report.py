"""The report: words, rich, and the page in a real browser."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from terminals import seen

from paceline.doctor.finding import duration, percent
from paceline.doctor.measurements import Facts
from paceline.doctor.report import Report
from paceline.doctor.script_run import changed
from paceline.doctor.try_fixes import candidates, mark_best, names, tried

FACTS = Facts(
    steps=100,
    updates=100,
    world_size=2,
    local_world_size=2,
    strategy="DDPStrategy",
    seconds={"data": 1.0, "forward": 0.5, "backward": 0.5},
    step_seconds=[0.02] * 50 + [0.05] + [0.02] * 49,
    run_seconds=3.0,
    batch_size=8,
    cores=8,
    loader={"kind": "DataLoader", "num_workers": 1, "pin_memory": False, "batch_size": 8},
    communication={"all": 0.002, "exposed": 0.001},
)
WITH_CALLBACKS = [replace(FACTS, seconds={**FACTS.seconds, "callbacks": 2.0}, rank=rank) for rank in (0, 1)]
REPORT = Report.of([replace(FACTS, rank=1), FACTS])
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def test_ranks_stand_in_order_and_communication_comes_out_of_backward() -> None:
    assert [facts.rank for facts in REPORT.ranks] == [0, 1]
    assert FACTS.parts["communication"] == pytest.approx(0.1)
    assert FACTS.parts["backward"] == pytest.approx(0.4)
    assert FACTS.share("data") == pytest.approx(0.5)


def test_the_words_give_the_number_the_reason_the_change_and_the_gain() -> None:
    text = REPORT.text()
    assert "A step takes 20 ms, 800 samples per second." in text
    assert "Waiting for data takes 50 % of each step (10 ms) with num_workers=1." in text
    assert "\n   Why: loading a batch takes about 20 ms, and the rest of the step takes 10 ms.\n" in text
    assert "\n   Change: set num_workers=3 and persistent_workers=True; each process has 4 cores.\n" in text
    assert "\n   Gain: a step without the wait takes 50 % of the time, so it is 2.0 times as fast." in text
    assert re.search(r"waiting for data +10 ms +50 % +10 ms +50 %", text)
    assert re.search(r"\nmean of 100 steps +20 ms +100 % +20 ms +100 %", text)


def test_the_last_row_names_every_number_of_steps() -> None:
    text = Report.of([FACTS, replace(FACTS, rank=1, steps=98)]).text()
    assert "\nmean of 98 to 100 steps " in text


def test_the_number_of_workers_says_that_it_is_a_tenth_more_than_the_ratio() -> None:
    facts = replace(FACTS, world_size=1, local_world_size=1, cores=2, seconds={"data": 1.65, "forward": 0.16})
    text = Report.of([replace(facts, loader={**FACTS.loader, "num_workers": 0}, communication={})]).text()
    assert "1.6 ms. To keep up with a tenth to spare, loading would need 12 workers, and each process has" in text


def test_a_note_is_a_sentence_of_its_own() -> None:
    line = {"file": "train.py", "number": 3, "text": "loss.item()", "what": "reads", "times": 1}
    lines = [line, {**line, "number": 4}]
    text = Report.of([replace(FACTS, lines=lines), replace(FACTS, rank=1)]).text()
    assert "\nNote: 2 lines of the step make the host wait for the device: train.py:3 'loss.item()'; " in text
    assert "\n   Change: keep values as tensors: self.log(name, tensor) reads them later, all at once." in text


@pytest.mark.parametrize("columns", [80, None])
def test_the_report_is_said_whole_in_a_terminal_and_in_a_pipe(columns: int | None) -> None:
    report = Report.of([replace(facts, hooks={"AVeryLongName.on_train_batch_end": 1.0}) for facts in WITH_CALLBACKS])
    found = seen(report.say, columns)
    text = " ".join(re.sub("[\u2500-\u257f]", " ", found.text).split())
    for finding in report.findings:
        for words in (finding.what, finding.why[1:], finding.change[1:], finding.gain[1:]):
            assert words in text, words
    assert columns is None or max(map(len, found.lines)) <= columns


def test_rich_shows_the_same() -> None:
    from rich.console import Console

    console = Console(record=True, width=140, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(*REPORT.rich())
    text = console.export_text()
    assert "Waiting for data takes 50 %" in text
    assert "communication (exposed)" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2e-6, "2 us"), (0.99999e-3, "1 ms"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (123.4, "123.4 s")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert percent(0.384) == "38 %"


def test_trying_compares_every_run_with_the_first_and_keeps_what_failed() -> None:
    def measure(change: dict[str, object]) -> dict[str, object]:
        if "compile" in change:
            raise RuntimeError("no compiler")
        faster = 4.0 if change.get("num_workers") == 2 else 1.0
        seconds = {name: value / faster for name, value in FACTS.seconds.items()}
        return Report.of([replace(FACTS, rank=rank, seconds=seconds) for rank in (0, 1)]).as_dict()

    report = Report.of(REPORT.ranks)
    report.trials = list(tried(report, measure, lambda text: None))
    mark_best(report.trials)
    rows = {row["what"]: row for row in report.trials}
    assert rows["num_workers=2 (was 1)"]["factor"] == pytest.approx(4.0)
    assert rows["num_workers=2 (was 1)"]["best"]
    assert rows["compile=True"]["error"] == "no compiler"
    assert "one process (was 2)" in rows
    assert (
        "2 processes train on 1.00 times as many samples per second as one process, which is a scaling "
        "efficiency of 50 %." in report.text()
    )
    assert "num_workers=2 (was 1) is best (4.00 times as fast)" in report.verdict()
    with pytest.raises(ValueError, match="'wrokers' is not a change"):
        names("compile,wrokers")


def test_a_trial_that_trained_nothing_is_no_result() -> None:
    def measure(change: dict[str, object]) -> dict[str, object]:
        return Report.of([replace(FACTS, steps=0, seconds={})]).as_dict()

    report = Report.of(REPORT.ranks)
    report.trials = list(tried(report, measure, lambda text: None, {"num_workers"}))
    mark_best(report.trials)
    assert all(row["error"] == "ended too soon" for row in report.trials[1:])
    assert "All changes that were tried failed" in report.verdict()


def test_only_what_can_be_changed_is_tried() -> None:
    plain = replace(FACTS, world_size=1, local_world_size=1, loader={"kind": "list"})
    assert [words for _, words, _ in candidates(plain)] == ["compile=True", "compile='step'"]
    assert not list(candidates(replace(plain, own_loop=True))), "the plan changes a Trainer's arguments"
    gpu = {name for name, *_ in candidates(replace(FACTS, device="cuda"))}
    assert gpu == {"num_workers", "pin_memory", "batch_size", "processes", "accumulation", "compile"}


def test_a_loader_is_changed_without_changing_its_data() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, shuffle=True, drop_last=True)
    double = changed(loader, batch_factor=2)
    assert double.batch_size == 4
    assert double.dataset is loader.dataset
    assert double.drop_last
    assert sorted(torch.cat([batch[0] for batch in double]).tolist()) == list(range(8))
    assert changed(loader, num_workers=2).num_workers == 2
    with pytest.raises(ValueError, match="cannot change the settings of a loader of type list"):
        changed([1], num_workers=1)


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = REPORT.html()
    assert "http" not in text
    assert "<script" not in text
    assert text.count("<svg") == 4, "two pies, the bars of the ranks, the line of step times"


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_opens_in_a_browser(tmp_path: Path) -> None:
    page, picture = tmp_path / "doctor.html", tmp_path / "doctor.png"
    page.write_text(REPORT.html())
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    quiet = "--disable-component-update --disable-sync --window-size=900,1600"
    base = [str(CHROMIUM), *flags.split(), *quiet.split(), f"--user-data-dir={tmp_path / 'profile'}"]
    dom = subprocess.run([*base, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    seen = html.unescape(dom.stdout)
    assert "Waiting for data takes 50 % of each step" in seen
    assert len(re.findall(r"<path [^>]*d=\"M95", seen)) >= 6, "the wedges of two pies"
    assert "<polyline" in seen
    subprocess.run([*base, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=120, check=True)
    assert picture.stat().st_size > 10_000

"""``paceline report``: one run, or two side by side."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tiny import TinyModule, tiny_loader

from paceline import Trainer
from paceline.callbacks import RunReport
from paceline.cli.main import FAILED, main
from paceline.loggers import CSVLogger


def run(folder: str, lr: float = 0.1, **arguments: object) -> None:
    class Keeps(TinyModule):
        def __init__(self, lr: float) -> None:
            super().__init__(lr)
            self.save_hyperparameters()

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=CSVLogger(folder),
        callbacks=[RunReport()],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **arguments,  # type: ignore[arg-type]
    )
    trainer.fit(Keeps(lr), tiny_loader(4), tiny_loader(2))


def test_two_runs_are_held_against_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    run("a")
    run("b", lr=0.01, gradient_clip_val=1.0)
    capsys.readouterr()
    assert main(["report", "a", "b"]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "A: a B: b" in said
    assert "lr 0.1 0.01" in said
    assert "gradient_clip_val 1.0" in said
    assert any(line.startswith("samples per second ") for line in said)
    assert said[-1] == "Page: run_comparison.html"
    parser, text = HTMLParser(), Path("run_comparison.html").read_text()
    parser.feed(text)
    chart = text.partition("<h2>Curves</h2>")[2].partition("</figure>")[0]
    assert chart.count("<polyline") == 2
    assert "B / A" in text


def test_json_has_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    run("a")
    run("b")
    capsys.readouterr()
    assert main(["report", "a", "--json", "--output", "page.html"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"]["status"] == "finished"
    assert set(found["last"]) == {"train_loss", "val_loss"}
    assert Path(found["page"]).name == "page.html"
    assert main(["report", "a", "b/paceline_logs/version_0/run_report.html", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    name, of_a, of_b, ratio = found["speed"][0]
    assert name == "steps per second"
    assert ratio == pytest.approx(of_b / of_a)


def test_of_several_runs_the_newest_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    run("a")
    run("a")
    capsys.readouterr()
    assert main(["report", "a"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Page: a/paceline_logs/version_1/run_report.html"


@pytest.mark.cold
def test_the_page_is_made_without_torch() -> None:
    run("a")
    program = (
        "import sys\nfrom paceline.cli.main import main\nstatus = main(['report', 'a'])\n"
        "sys.exit(status or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "'nowhere' does not exist"),
        (["empty"], "contain no record of a run"),
        (["text.jsonl"], "'text.jsonl' is not a record of a run"),
        (["newer.jsonl"], "was written by a later version"),
        (["known.jsonl", "known.jsonl"], "are the same record"),
        (
            ["known.jsonl", "empty", "known.jsonl"],
            "3 runs were given ('known.jsonl', 'empty' and 'known.jsonl'). Pass one",
        ),
    ],
)
def test_what_cannot_be_read_is_said(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    Path("text.jsonl").write_text("a text\n{}\n")
    Path("newer.jsonl").write_text('{"what": "record", "format": 99, "run": "x"}\n')
    Path("known.jsonl").write_text('{"what": "record", "format": 1, "run": "x"}\n')
    assert main(["report", *arguments]) == FAILED
    assert said in capsys.readouterr().err


def test_a_record_that_was_hardly_begun_has_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    Path("known.jsonl").write_text('{"what": "record", "format": 1, "run": "x"}\n')
    assert main(["report", "known.jsonl"]) == 0
    assert "nothing was recorded" in capsys.readouterr().out

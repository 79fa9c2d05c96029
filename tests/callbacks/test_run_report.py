"""Every run leaves a record and a page: one that ends, one that crashes, is stopped, killed, resumed, goes back."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import tempfile
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import Clock
from rank_processes import ranks
from tiny import TinyModule, tiny_loader

from paceline import Callback, Trainer, seed_everything
from paceline.callbacks import LearningRateMonitor, LossGuard, ModelCheckpoint, RunReport
from paceline.cli.main import main
from paceline.loggers import CSVLogger
from paceline.report import history
from paceline.report.history import History

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOID = {"meta", "br", "img", "input", "link", "hr"}


class Page(HTMLParser):
    """Headings, texts and what a page would load; fails on a tag that is closed in the wrong place."""

    def __init__(self, path: Path | str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.feed(Path(path).read_text(encoding="utf-8"))
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href")]
        self.loads += [tag] if tag in ("script", "link", "iframe") else []

    def handle_startendtag(self, tag: str, attrs: Any) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        self.text += f"{data}\n"


class Decays(TinyModule):
    """Its learning rate halves at every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def section(path: str | None, heading: str) -> str:
    """The part of a page below a heading."""
    text = Path(str(path)).read_text(encoding="utf-8")
    return text.partition(f"<h2>{heading}</h2>")[2].partition("</section>")[0]


class Fails(Callback):
    """Does something after a step, once."""

    def __init__(self, step: int, what: Any) -> None:
        self.step, self.what, self.done = step, what, False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and not self.done:
            self.done = True
            if isinstance(self.what, int):
                os.kill(os.getpid(), self.what)
            else:
                raise self.what


class Both(TinyModule):
    """Logs a training metric of steps and epochs, and keeps a hyperparameter."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


def trainer_with(*callbacks: Callback, **arguments: Any) -> Trainer:
    defaults = {
        "accelerator": "cpu",
        "max_epochs": 3,
        "logger": CSVLogger("logs"),
        "log_every_n_steps": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "callbacks": list(callbacks),
    }
    return Trainer(**{**defaults, **arguments})


def fit(*callbacks: Callback, module: Any = None, batches: int = 6, **arguments: Any) -> Trainer:
    ckpt_path = arguments.pop("ckpt_path", None)
    trainer = trainer_with(*callbacks, **arguments)
    trainer.fit(module or Both(), tiny_loader(batches), tiny_loader(2), ckpt_path=ckpt_path)
    return trainer


def read(folder: str | Path = ".") -> History:
    return history.read(history.find(folder))


# ---- a run that comes to its end -------------------------------------------------------------------------------------


def test_a_finished_run_leaves_a_page_with_all_there_is_to_say() -> None:
    seed_everything(7, verbose=False)
    trainer = fit(report := RunReport(), ModelCheckpoint(monitor="val_loss", save_top_k=2))
    assert report.path == "logs/paceline_logs/version_0/run_report.html"
    page = Page(report.path)
    assert page.headings == [
        "How it went",
        "Curves",
        "Values",
        "Learning rate",
        "Speed",
        "Where the time went",
        "Checkpoints",
        "Settings",
        "Hyperparameters",
        "Environment",
    ]
    assert not page.loads
    kept = [Path(path).name for path in trainer.checkpoint_callback.best_k_models]
    for text in ("Finished", "train_loss_step", "train_loss_epoch", "val_loss", *kept, "Trainer(max_epochs=)", "lr"):
        assert text in page.text, text
    for text in (metadata.version("torch"), "SingleDevice, cpu, 32-true", "seed", os.uname().nodename):
        assert text in page.text, text
    assert len(trainer.loggers) == 1


def test_what_is_on_the_page_is_what_the_logger_got() -> None:
    fit(RunReport())
    history = read("logs")
    csv = (Path("logs/paceline_logs/version_0/metrics.csv")).read_text().splitlines()
    names = csv[0].split(",")
    expected: dict[str, list[tuple[int, float]]] = {}
    for line in csv[1:]:
        cells = dict(zip(names, line.split(","), strict=True))
        for name in names[3:]:
            if cells[name]:
                expected.setdefault(name, []).append((int(cells["step"]), float(cells[name])))
    assert history.curves() == expected
    assert history.steps == 18
    assert history.hyperparameters == {"lr": 0.1}
    assert history.status == "finished"


def test_learning_rates_need_no_monitor() -> None:
    fit(RunReport(), module=Decays(), max_epochs=1)
    rates = dict(read("logs").rates()["SGD"])
    assert rates == {0: 1.0, 2: 0.25, 4: 0.0625, 6: 0.015625}


@pytest.mark.parametrize("module", [Decays, Both])
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_learning_rate_that_a_monitor_logs_is_drawn_once(module: Any, interval: str) -> None:
    fit(report := RunReport(), LearningRateMonitor(interval, log_momentum=True), module=module(), log_every_n_steps=1)
    assert "lr-SGD" in read("logs").curves()
    assert "lr-SGD<" not in section(report.path, "Curves")
    assert "lr-SGD-momentum<" in section(report.path, "Curves"), "is not a learning rate"
    assert section(report.path, "Learning rate").count("<svg") == 1
    assert "<td>lr-SGD</td>" in section(report.path, "Values")


def test_a_metric_that_equals_the_rate_now_and_then_is_drawn() -> None:
    class Equals(Both):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log_dict({"accuracy": self.lr, "sometimes": self.lr * (1 + batch_idx % 2)}, on_step=True)

    fit(report := RunReport(), module=Equals(), log_every_n_steps=1)
    for name in ("accuracy", "sometimes"):
        assert name in section(report.path, "Curves")


def test_a_chart_says_what_it_shows_once_and_the_speed_has_one() -> None:
    fit(report := RunReport(), batches=8)
    text = Path(report.path).read_text(encoding="utf-8")
    for figure in re.findall("<figure>.*?</figure>", text, re.DOTALL):
        caption = re.search("<figcaption>(.*?)</figcaption>", figure)
        labels = re.findall("<text[^>]*>(.*?)</text>", figure)
        assert caption is None or caption.group(1).partition(",")[0] not in labels
    speed = section(report.path, "Speed")
    assert speed.count("<svg") == 1
    assert "samples per second (2 in a step)" in speed
    assert "samples per second" in section(report.path, "How it went")
    assert "steps per second" in section(report.path, "How it went")


def test_a_page_is_called_after_the_log_or_else_the_folder() -> None:
    titles = []
    for arguments in ({}, {"logger": False, "default_root_dir": "digits"}, {"logger": CSVLogger("logs", "mine", "b")}):
        fit(report := RunReport(), max_epochs=1, **arguments)
        page = Path(report.path).read_text(encoding="utf-8")
        titles.append(re.findall("<(?:title|h1)>(.*?)<", page)[:2])
    assert titles == [["paceline_logs / version_0"] * 2, ["digits"] * 2, ["mine / b"] * 2]


def test_without_another_logger_everything_is_recorded_and_no_folder_changes() -> None:
    folders = [
        fit(ModelCheckpoint(), *more, logger=False, max_epochs=1).checkpoint_callback.dirpath
        for more in ([], [RunReport(), LearningRateMonitor("step")])
    ]
    assert folders[0] == folders[1]
    curves = read().curves()
    assert {"train_loss_step", "train_loss_epoch", "val_loss", "lr-SGD"} <= set(curves)
    assert Path("run_report.html").is_file()


def test_two_runs_in_one_folder_are_two_records() -> None:
    first, second = RunReport("reports"), RunReport("reports")
    fit(first, max_epochs=1)
    fit(second, max_epochs=2)
    assert [first.path, second.path] == [os.path.abspath(f"reports/run_report{n}.html") for n in ("", "-v1")]
    assert [history.read(Path(one.path).with_suffix(".jsonl")).steps for one in (first, second)] == [6, 12]


def test_a_second_fit_and_a_test_of_one_trainer_go_on_in_the_record() -> None:
    trainer = fit(report := RunReport(), max_epochs=1)
    trainer.max_epochs = 2
    trainer.fit(Both(), tiny_loader(6), tiny_loader(2))
    trainer.test(dataloaders=tiny_loader(2), verbose=False)
    history = read("logs")
    assert [start.facts["fn"] for start in history.starts] == ["fit", "fit", "test"]
    assert [step for step, _ in history.curves()["train_loss_step"]] == [2, 4, 6, 8, 10, 12]
    assert "test_loss" in history.curves()
    assert "Starts" in Page(report.path).headings


def test_under_fast_dev_run_nothing_is_written() -> None:
    fit(report := RunReport(), fast_dev_run=2)
    assert report.path is None
    assert not list(Path().rglob("run_report*"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let reports read a clock that goes on by what the test says, however busy the machine is."""
    clock = Clock(tick=1e-6)
    for file in ("report.record", "callbacks.run_report"):
        monkeypatch.setattr(f"paceline.{file}.perf_counter", clock)
    return clock


def test_the_parts_of_the_time_add_up_to_the_whole(clock: Clock) -> None:
    fit(RunReport(), ModelCheckpoint(save_top_k=-1))
    history = read("logs")
    assert all(seconds > 0 for seconds in history.clock.values())
    assert sum(history.starts[0].clock.values()) == pytest.approx(clock.now, abs=10e-6), "but for its ends"
    assert history.seconds == pytest.approx(sum(history.clock.values()))


def test_slow_data_a_slow_hook_and_a_slow_validation_are_told_apart(clock: Clock) -> None:
    class Slow(TinyModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            clock.sleep(0.02)

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            clock.sleep(0.1)

    def batches() -> Any:
        for batch in tiny_loader(6):
            clock.sleep(0.05)
            yield batch

    class Loader:
        def __iter__(self) -> Any:
            return batches()

        def __len__(self) -> int:
            return 6

    trainer = trainer_with(RunReport(), max_epochs=1, num_sanity_val_steps=0, log_every_n_steps=1)
    trainer.fit(Slow(), Loader(), tiny_loader(2))
    found = read("logs").clock
    for part, seconds in {"data": 6 * 0.05, "step": 6 * 0.02, "evaluation": 2 * 0.1}.items():
        assert found[part] == pytest.approx(seconds, rel=0.01), part


def test_the_speed_leaves_validation_and_checkpoints_out(clock: Clock) -> None:
    class Waits(Callback):
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            clock.sleep(0.5)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            clock.sleep(0.01)

    fit(RunReport(), ModelCheckpoint(), Waits(), num_sanity_val_steps=0)
    speed = read("logs").speed()
    assert speed["steps per second"] == pytest.approx(100, rel=0.01)
    assert speed["samples per second"] == pytest.approx(2 * speed["steps per second"])


def test_settings_come_with_their_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text("gradient_accumulation_steps: 2\n")
    monkeypatch.setenv("PACELINE_CONFIG_FILE", str(tmp_path / "c.yaml"))
    fit(RunReport(), max_epochs=1, gradient_clip_val=1.5)
    rows = {name: (value, *where) for name, value, *where in read("logs").facts["settings"]}
    assert rows["gradient_clip_val"] == (1.5, "code", "Trainer(gradient_clip_val=)")
    place = f"{tmp_path}/c.yaml: gradient_accumulation_steps"
    assert rows["accumulate_grad_batches"] == (2, "settings", place)
    assert rows["gradient_accumulation_steps"] == (2, "file", place)
    assert rows["min_steps"] == (None, "default", "")


def test_a_further_split_of_the_time_can_be_joined() -> None:
    class Joins(Callback):
        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            report.add_split("doctor", {"forward": 1.0, "backward": 3.0})

    fit(report := RunReport(), Joins(), max_epochs=1)
    assert read("logs").splits == {"doctor": {"forward": 1.0, "backward": 3.0}}
    assert "backward 75.0%" in Page(report.path).text


@pytest.mark.parametrize(
    ("split", "error", "said"),
    [
        (
            {"a": "x"},
            TypeError,
            r"add_split\('m', {'a': 'x'}\): 'a' is a str, not a number\. Pass the seconds of each part",
        ),
        ([1], TypeError, r"seconds is a list, not a dict\. Pass the seconds of each part"),
        ({"a": -1.0}, ValueError, r"'a' is -1\.0, but a time must be finite and not negative\. Pass"),
        ({"a": float("nan")}, ValueError, "'a' is nan"),
    ],
)
def test_what_is_no_split_is_refused(split: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        RunReport().add_split("m", split)


@pytest.mark.parametrize("name", ["doctor", "simple"])
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_profiler_saw_of_a_step_is_on_the_page(name: str, fails: bool) -> None:
    error = Fails(12 if fails else -1, ZeroDivisionError("planted"))
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        fit(report := RunReport(), error, batches=20, max_epochs=1, profiler=name)
    history, page = read("logs"), Page(report.path)
    ((source, split),) = history.splits.items()
    assert source == {"doctor": "Doctor", "simple": "SimpleProfiler"}[name]
    assert f"by {source}" in page.text
    named = {"doctor": ("forward", "backward", "optimizer"), "simple": ("no action",)}[name]
    for part in named:
        assert split[part] > 0
        assert f"{part} {split[part] / sum(split.values()):.1%}" in page.text
    during = sum(seconds for part, seconds in split.items() if not part.endswith(".setup"))  # the record begins there
    assert 0 < during <= 1.1 * history.seconds, "parts that lie in each other count once"


def test_a_profiler_without_a_split_adds_none_and_other_entry_points_have_none_of_the_doctors() -> None:
    fit(report := RunReport(), max_epochs=1, profiler="advanced")
    assert read("logs").splits == {}
    trainer = trainer_with(report := RunReport("tested"), profiler="doctor", logger=False)
    trainer.test(TinyModule(), tiny_loader())
    assert report.path is not None
    assert read("tested").splits == {}


def test_a_run_without_values_has_a_page_too() -> None:
    class Silent(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch)

    trainer = trainer_with(report := RunReport(), max_epochs=1, limit_val_batches=0)
    trainer.fit(Silent(), list(tiny_loader(4)))
    page = Page(report.path)
    assert "Nothing was logged." in page.text
    assert read("logs").steps == 4


# ---- a run that does not ---------------------------------------------------------------------------------------------


def test_an_exception_is_on_the_page_with_its_text_and_place() -> None:
    with pytest.raises(ZeroDivisionError):
        fit(report := RunReport(), Fails(5, ZeroDivisionError("<b>nothing</b> to divide by")))
    history = read("logs")
    assert history.status == "failed"
    assert history.error["type"] == "ZeroDivisionError"
    assert history.steps == 5
    page = Page(report.path)
    assert "ZeroDivisionError: <b>nothing</b> to divide by" in page.text
    assert "in on_train_batch_end" in page.text


def test_an_exception_before_the_first_step_is_on_the_page() -> None:
    class Broken(TinyModule):
        def configure_optimizers(self) -> Any:
            raise RuntimeError("no optimizer today")

    with pytest.raises(RuntimeError):
        fit(report := RunReport(), module=Broken())
    assert "no optimizer today" in Page(report.path).text


def test_a_signal_ends_a_run_with_its_name_and_the_checkpoint_it_left() -> None:
    with pytest.raises(SystemExit):
        fit(report := RunReport(), ModelCheckpoint(), Fails(5, int(signal.SIGTERM)))
    assert read("logs").status == "interrupted by SIGTERM"
    assert "epoch=0-step=5.ckpt" in Page(report.path).text


def killed_at(step: int) -> None:
    """Fit in a process that is killed after so many steps."""
    pid = os.fork()
    if pid == 0:
        try:
            fit(RunReport(), ModelCheckpoint(save_top_k=-1), Fails(step, int(signal.SIGKILL)))
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def test_a_killed_run_has_its_record_and_once_resumed_one_page_with_each_row_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = fit(RunReport("whole"), logger=False, num_sanity_val_steps=2)
    assert whole.global_step == 18
    expected = read("whole").curves()

    killed_at(9)
    folder = Path("logs/paceline_logs/version_0")
    assert not (folder / "run_report.html").exists()
    history = read(folder)
    assert history.status.startswith("ended without recording how: the process was killed")
    assert [step for step, _ in history.curves()["train_loss_step"]] == [2, 4, 6, 8]
    assert main(["report", str(folder)]) == 0
    assert "killed" in capsys.readouterr().out
    assert "Ended without recording how: the process was killed" in Page(folder / "run_report.html").text

    with open(folder / "run_report.jsonl", "ab") as file:
        file.write(b'{"what": "row", "ti')  # as if the kill had come in the middle of a line
    fit(report := RunReport(), ModelCheckpoint(save_top_k=-1), ckpt_path="last")
    assert Path(report.path) == folder / "run_report.html"
    history = read(folder)
    assert history.torn == 1
    assert [start.repeated > 0 for start in history.starts] == [True, False]
    assert history.status == "finished"
    curves = history.curves()
    assert {name: [step for step, _ in points] for name, points in curves.items()} == {
        name: [step for step, _ in points] for name, points in expected.items()
    }
    page = Page(report.path)
    assert page.text.count("not recorded") == 1
    assert [save.step for save in history.checkpoints()] == [6, 12, 18]


def test_a_fit_that_goes_back_to_a_checkpoint_has_each_row_once() -> None:
    class Jumps(Both):
        jumped = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.trainer.global_step == 10 and not self.jumped:
                self.jumped = True
                return loss * float("nan")
            return loss

    fit(
        RunReport(),
        ModelCheckpoint(every_n_train_steps=5, save_top_k=-1),
        LossGuard(action="rollback"),
        module=Jumps(),
    )
    history = read("logs")
    assert history.status == "finished"
    steps = [step for step, _ in history.curves()["train_loss_step"]]
    assert steps == sorted(set(steps))
    assert len(history.starts) == 2


def test_a_full_disk_ends_the_record_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    report = RunReport()

    class Fills(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            report._record._file.close()
            report._record._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115

    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with pytest.warns(UserWarning, match="continues without a report"):
        trainer = fit(report, Fills(), max_epochs=1)
    assert trainer.global_step == 6


def test_an_address_is_refused() -> None:
    with pytest.raises(ValueError, match=r"RunReport: dirpath='s3://bucket/run' is a remote URL"):
        RunReport("s3://bucket/run")


def test_a_report_can_be_pickled_while_it_is_in_use() -> None:
    class Pickles(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.copy = pickle.loads(pickle.dumps(report))

    fit(report := RunReport("here"), pickles := Pickles(), max_epochs=1)
    assert pickles.copy.dirpath == os.path.abspath("here")


# ---- several ranks ---------------------------------------------------------------------------------------------------


def on_two_ranks() -> tuple[bool, int, int]:
    report = RunReport()
    trainer = fit(report, LearningRateMonitor("step"), strategy="ddp", devices=2, logger=False, batches=8)
    return report.path is not None, len(trainer.loggers), trainer.global_step


def test_of_two_ranks_one_writes() -> None:
    assert ranks(2, on_two_ranks) == [(True, 0, 12), (False, 0, 12)]
    assert sorted(path.name for path in Path().glob("run_report*")) == ["run_report.html", "run_report.jsonl"]
    history = read()
    assert history.facts["strategy"]["world_size"] == 2
    speed = history.speed()
    assert speed["samples per second"] == pytest.approx(4 * speed["steps per second"])
    assert [step for step, _ in history.curves()["lr-SGD"]] == [2, 4, 6, 8, 10, 12]


# ---- seen ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_the_page() -> None:
    fit(report := RunReport(), max_epochs=1)
    with tempfile.TemporaryDirectory() as profile:
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
        flags += ("--disable-background-networking", "--disable-component-update", "--disable-sync")
        page = f"file://{os.path.abspath(report.path)}"
        command = [CHROMIUM, *flags, f"--user-data-dir={profile}", "--window-size=900,2400"]
        shown = subprocess.run([*command, "--dump-dom", page], capture_output=True, text=True, timeout=120)
        subprocess.run(
            [*command, f"--screenshot={os.path.abspath('page.png')}", page], capture_output=True, timeout=120
        )
    assert "<polyline" in shown.stdout
    assert "Where the time went" in shown.stdout
    assert Path("page.png").stat().st_size > 20000

from __future__ import annotations

import io
import re
import sys
from collections import Counter
from math import inf
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from clocks import Clock
from terminals import Notebook, seen
from terminals import Screen as TerminalScreen
from tiny import TinyModule, tiny_loader

import paceline.callbacks.progress as progress_file
import paceline.callbacks.tqdm_progress as tqdm_file
from paceline import Trainer
from paceline.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from paceline.callbacks.progress import Bar, DrawnProgressBar, PlainLines, Surface, clock_text, metric_text
from paceline.loggers.csv import CSVLogger

EVALUATIONS = [("validate", "Validation"), ("test", "Testing"), ("predict", "Predicting")]


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    CLOCK.now = 0.0
    for file in (progress_file, tqdm_file):
        monkeypatch.setattr(file, "perf_counter", CLOCK)


class Screen(Surface):
    """Records what is drawn on it."""

    def __init__(self, seconds: float, immediate: bool = True) -> None:
        self.seconds = seconds
        self.immediate = immediate
        self.drawn: list[tuple[str, int, int | None]] = []
        self.metrics: list[dict[str, Any]] = []
        self.finished: list[str] = []
        self.closed = 0

    def draw(self, bars: Any, metrics: Any) -> None:
        self.drawn.append((bars[-1].description, bars[-1].n, bars[-1].total))
        self.metrics.append(dict(metrics))

    def finish(self, bars: Any, metrics: Any) -> bool:
        self.finished.append(f"{bars[-1].description} {bars[-1].count_text}")
        return False

    def write(self, text: str) -> None:
        self.drawn.append((text, 0, 0))

    def close(self) -> None:
        self.closed += 1


class ScreenBar(DrawnProgressBar):
    def __init__(self, screen: Screen, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate, leave=False)
        self.screen = screen

    def _make_surface(self) -> Surface:
        return self.screen


class Shown(TinyModule):
    """Logs to the bar; each step may take a while."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        CLOCK.sleep(self.seconds)
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("hidden", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch), prog_bar=True)


class Endless:
    """A loader without length."""

    def __init__(self, batches: int) -> None:
        self.batches = list(tiny_loader(batches))

    def __iter__(self) -> Any:
        return iter(self.batches)


def trainer_with(bar: ProgressBar, **more: Any) -> Trainer:
    more = {"logger": False, "max_epochs": 1, "accelerator": "cpu", "enable_checkpointing": False, **more}
    return Trainer(callbacks=[bar], enable_model_summary=False, **more)


def plain_bar(**more: Any) -> tuple[RichProgressBar, io.StringIO]:
    text = io.StringIO()
    return RichProgressBar(console_kwargs={"file": text}, **more), text


# ---- what a bar knows -----------------------------------------------------------------------------------------------


def test_totals_are_the_trainers_and_follow_the_loader_under_way() -> None:
    seen: dict[str, Any] = {}

    class Totals(ProgressBar):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen["train"] = self.total_train_batches
            seen["val"] = self.total_val_batches

        def on_validation_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, idx: int = 0
        ) -> None:
            changed = self.has_dataloader_changed(idx)
            seen.setdefault("current", []).append((changed, self.total_val_batches_current_dataloader))

    trainer_with(Totals(), num_sanity_val_steps=1).fit(Shown(), tiny_loader(5), [tiny_loader(1), tiny_loader(2)])
    sanity, validation = [(True, 1), (True, 1)], [(True, 1), (True, 2), (False, 2)]
    assert seen == {"train": 5, "val": 3, "current": [*sanity, *validation]}
    trainer_with(Totals(), check_val_every_n_epoch=2, max_epochs=2).fit(Shown(), tiny_loader(5), tiny_loader(1))
    assert seen["val"] == 0


def test_the_total_of_the_sanity_check_is_its_number_of_steps() -> None:
    seen = []

    class Totals(ProgressBar):
        def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(self.total_val_batches_current_dataloader)

    trainer_with(Totals(), num_sanity_val_steps=2).fit(Shown(), tiny_loader(1), tiny_loader(7))
    assert seen == [2]


def test_reading_the_trainer_before_a_run_says_when_to_read_it() -> None:
    with pytest.raises(RuntimeError, match=r"RichProgressBar\.trainer was read before a run.*setup\(\)"):
        _ = RichProgressBar().trainer


def test_metrics_are_the_version_and_what_was_logged_for_the_bar(tmp_path: Path) -> None:
    bar = ScreenBar(Screen(0.0))
    trainer_with(bar, logger=CSVLogger(tmp_path)).fit(Shown(0.005), tiny_loader(3), tiny_loader(1))
    last = bar.screen.metrics[-1]
    assert list(last) == ["loss_step", "val", "loss_epoch", "v_num"]
    assert last["v_num"] == 0
    assert all(isinstance(value, float) for value in list(last.values())[:-1])


def test_get_metrics_can_be_overridden() -> None:
    class Own(ScreenBar):
        def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
            metrics = super().get_metrics(trainer, pl_module)
            metrics.pop("loss_step", None)
            return {**metrics, "lr": pl_module.lr}

    bar = Own(Screen(0.0))
    trainer_with(bar).fit(Shown(), tiny_loader(2))
    assert bar.screen.metrics[-1] == {"lr": 0.1, "loss_epoch": bar.screen.metrics[-1]["loss_epoch"]}


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0:00"), (75.9, "1:15"), (3600, "1:00:00"), (90061, "25:01:01")])
def test_times_read_like_a_clock(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.1, "0.1000"), (1e-5, "1.000e-05"), (12345.0, "1.234e+04"), (3, "3"), ("a1", "a1")]
)
def test_floats_keep_one_width_and_the_rest_stays_as_it_is(value: Any, text: str) -> None:
    assert metric_text(value) == text


def test_speed_leaves_out_a_pause() -> None:
    bar = Bar("train", "Epoch 0", 100, 0, now=0.0)
    bar.advance(10, 1.0)
    bar.resume(61.0)
    bar.advance(20, 62.0)
    assert bar.speed == pytest.approx(10.0)
    assert (bar.count_text, bar.time_text, bar.speed_text) == ("20/100", "1:02 < 0:08", "10.0 it/s")


def test_no_speed_is_told_of_a_time_that_is_too_short_to_measure_one() -> None:
    bar = Bar("validate", "Validation", 7, 0, now=0.0)
    bar.advance(7, 0.0004)
    assert (bar.count_text, bar.time_text, bar.speed_text) == ("7/7", "0:00", "-- it/s")
    bar.advance(8, 0.5)
    assert bar.speed_text == "15.3 it/s", "less what the first batches weigh by now"


def test_a_slow_loop_shows_seconds_a_batch_and_an_endless_one_no_total() -> None:
    bar = Bar("train", "Epoch 0", inf, 0, now=0.0)
    assert bar.speed_text == "-- it/s"
    bar.advance(2, 8.0)
    assert (bar.count_text, bar.time_text, bar.speed_text) == ("2", "0:08", "4.0 s/it")


def test_speed_after_a_resume_counts_from_the_first_batch_of_this_run() -> None:
    bar = Bar("train", "Epoch 3", 100, 90, now=0.0)
    bar.advance(95, 1.0)
    assert bar.speed == pytest.approx(5.0)


# ---- when a bar draws -----------------------------------------------------------------------------------------------


def test_drawing_is_limited_by_the_clock_and_not_by_the_batches() -> None:
    bar = ScreenBar(Screen(seconds=0.05))
    trainer_with(bar).fit(Shown(2**-10), tiny_loader(200))
    at_the_end = [200, 200]  # of the epoch, of the fit
    assert [n for _, n, _ in bar.screen.drawn] == [0, 52, 104, 156, *at_the_end]


def test_refresh_rate_draws_at_multiples_of_it() -> None:
    bar = ScreenBar(Screen(seconds=0.0), refresh_rate=4)
    trainer_with(bar).fit(Shown(0.001), tiny_loader(10))
    shown = [n for _, n, _ in bar.screen.drawn]
    assert shown[:3] == [0, 4, 8]
    assert set(shown[3:]) == {10}


def test_a_slow_surface_takes_at_most_a_tenth_of_the_time() -> None:
    class Slow(Screen):
        def draw(self, bars: Any, metrics: Any) -> None:
            super().draw(bars, metrics)
            CLOCK.sleep(0.02)

    bar = ScreenBar(Slow(seconds=0.0))
    trainer_with(bar).fit(Shown(0.003), tiny_loader(200))
    in_the_loop = [n for _, n, _ in bar.screen.drawn if 0 < n < 200]
    assert in_the_loop == [67, 134], "0.2 s after each drawing"


def test_refresh_rate_0_defines_no_hook_that_draws() -> None:
    bar = RichProgressBar(refresh_rate=0)
    trainer = trainer_with(bar)
    trainer.fit(Shown(), tiny_loader(2), tiny_loader(1))
    assert bar.is_disabled
    for hook in ("on_train_batch_end", "on_validation_batch_end", "on_train_epoch_start", "on_test_start"):
        assert getattr(trainer.current_run.hooks, hook) == ()


@pytest.mark.parametrize("refresh_rate", [-1, 0.5, "1", True, None])
def test_a_refresh_rate_that_is_no_number_of_batches_is_refused(refresh_rate: Any) -> None:
    with pytest.raises(ValueError, match=r"RichProgressBar: refresh_rate=.*must be a non-negative integer"):
        RichProgressBar(refresh_rate=refresh_rate)


def own_calls_per_batch(bar: ProgressBar, evaluate: bool) -> Counter[str]:
    """Python calls into the bar's files between two batches, for the batch with the most of them."""
    files = {str(Path(progress_file.__file__).with_name(f"{name}.py")) for name in ("progress", "rich_progress")}
    batches: list[Counter[str]] = []

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        code: CodeType = frame.f_code
        if event == "call" and code.co_filename in files and batches:
            batches[-1][code.co_name] += 1

    class Marked(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batches.append(Counter())
            if batch_idx == 19:
                sys.setprofile(None)
            loss = self.loss(batch)
            self.log("loss", loss, prog_bar=True)
            return loss

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

        def on_train_start(self) -> None:
            sys.setprofile(profile)

        on_test_start = on_train_start

    trainer = trainer_with(bar)
    try:
        if evaluate:
            trainer.test(Marked(), tiny_loader(20), verbose=False)
        else:
            trainer.fit(Marked(), tiny_loader(20))
    finally:
        sys.setprofile(None)
    assert len(batches) == 20
    return max(batches[1:-1], key=lambda calls: calls.total())


@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("terminal", [False, True])
def test_a_batch_for_which_no_drawing_is_due_costs_one_call(
    evaluate: bool, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.callbacks import rich_progress

    monkeypatch.setattr(rich_progress._Terminal, "seconds", 3600.0)
    bar = RichProgressBar(console_kwargs={"file": io.StringIO(), "force_terminal": terminal})
    calls = own_calls_per_batch(bar, evaluate)
    assert calls.total() == 1, calls


def test_the_bar_does_not_change_what_is_trained() -> None:
    weights = []
    for rate in (0, 1):
        torch.manual_seed(1)
        module = Shown()
        trainer_with(ScreenBar(Screen(0.0), rate), max_epochs=2).fit(
            module, tiny_loader(5, shuffle=True), tiny_loader(2)
        )
        weights.append(module.layer.weight.detach().clone())
    assert torch.equal(weights[0], weights[1])


# ---- which bars there are -------------------------------------------------------------------------------------------


def test_sanity_check_training_and_validation_have_their_bars_in_turn() -> None:
    bar = ScreenBar(Screen(0.0))
    trainer_with(bar, max_epochs=2).fit(Shown(), tiny_loader(2), tiny_loader(3))
    titles = list(dict.fromkeys(name for name, _, _ in bar.screen.drawn))
    assert titles == ["Sanity Checking", "Epoch 0/1", "Validation", "Epoch 1/1"]
    assert bar.screen.finished == [
        "Sanity Checking 2/2",
        "Validation 3/3",
        "Epoch 0/1 2/2",
        "Validation 3/3",
        "Epoch 1/1 2/2",
    ]


def test_each_evaluation_loader_has_its_own_bar() -> None:
    bar = ScreenBar(Screen(0.0))
    trainer_with(bar).validate(Shown(), [tiny_loader(2), tiny_loader(3)], verbose=False)
    assert bar.screen.finished == ["Validation DataLoader 0 2/2", "Validation DataLoader 1 3/3"]


@pytest.mark.parametrize(("entry", "title"), EVALUATIONS)
def test_validate_test_and_predict_have_a_bar(entry: str, title: str) -> None:
    bar = ScreenBar(Screen(0.0))
    getattr(trainer_with(bar), entry)(Shown(), tiny_loader(4))
    assert bar.screen.finished == [f"{title} 4/4"]
    assert bar.screen.closed == 1


def test_training_goes_on_where_it_was_after_a_validation_inside_the_epoch() -> None:
    bar = ScreenBar(Screen(0.0))
    trainer_with(bar, val_check_interval=2, num_sanity_val_steps=0).fit(Shown(0.001), tiny_loader(4), tiny_loader(1))
    shown = [n for title, n, _ in bar.screen.drawn if title == "Epoch 0/0"]
    assert shown == sorted(shown)
    assert set(shown) == {0, 1, 2, 3, 4}


def test_a_loader_without_length_counts_up_without_a_total() -> None:
    bar = ScreenBar(Screen(0.0))
    trainer_with(bar).fit(Shown(), Endless(3), Endless(2))
    assert bar.screen.finished[-2:] == ["Validation 2", "Epoch 0/0 3"]


def test_an_unlimited_number_of_epochs_shows_no_last_one() -> None:
    bar = ScreenBar(Screen(0.0))
    trainer_with(bar, max_epochs=-1, max_steps=3).fit(Shown(), tiny_loader(2))
    assert bar.screen.finished == ["Epoch 0 2/2", "Epoch 1 1/2"]


def test_a_resumed_epoch_starts_where_it_was_left(tmp_path: Path) -> None:
    first = trainer_with(ScreenBar(Screen(0.0)), max_epochs=1)
    first.fit(Shown(), tiny_loader(2))
    first.save_checkpoint(tmp_path / "a.ckpt")
    bar = ScreenBar(Screen(0.0))
    trainer_with(bar, max_epochs=2).fit(Shown(), tiny_loader(2), ckpt_path=tmp_path / "a.ckpt")
    assert bar.screen.finished == ["Epoch 1/1 2/2"]


def test_disable_and_enable_take_effect_in_the_run() -> None:
    class Quiet(ScreenBar):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.disable() if trainer.current_epoch == 1 else self.enable()
            super().on_train_epoch_start(trainer, pl_module)

    bar = Quiet(Screen(0.0))
    trainer_with(bar, max_epochs=3).fit(Shown(), tiny_loader(2))
    assert bar.screen.finished == ["Epoch 0/2 2/2", "Epoch 2/2 2/2"]
    assert bar.is_enabled


def test_other_ranks_draw_nothing_and_have_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = ScreenBar(Screen(0.0))
    trainer = trainer_with(bar)
    monkeypatch.setattr(type(trainer.strategy), "global_rank", 1)
    trainer.fit(Shown(), tiny_loader(2))
    assert bar.is_disabled
    assert bar.screen.drawn == []
    assert trainer.current_run.hooks.on_train_batch_end == ()


# ---- plain lines ----------------------------------------------------------------------------------------------------


def test_output_that_is_no_terminal_gets_one_plain_line_at_the_end_of_each_epoch() -> None:
    bar, text = plain_bar()
    trainer_with(bar, max_epochs=2).fit(Shown(), tiny_loader(4), tiny_loader(2))
    lines = text.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["Epoch 0/1", "Epoch 1/1"]
    assert "Epoch 0/1: 4/4 (100%)" in lines[0]
    assert all(f"  {name}=" in lines[0] for name in ("loss_epoch", "val"))
    assert "hidden" not in text.getvalue()
    assert not set(text.getvalue()) & {"\r", "\x1b", "\b"}


def test_a_plain_line_comes_at_intervals_of_time() -> None:
    bar, text = plain_bar()
    bar.plain_seconds = 10.0
    trainer_with(bar).fit(Shown(0.5), tiny_loader(50))
    lines = text.getvalue().splitlines()
    assert [line.partition("  loss")[0] for line in lines] == [
        "Epoch 0/0: 20/50 (40%)  0:10 < 0:15  2.0 it/s",
        "Epoch 0/0: 40/50 (80%)  0:20 < 0:05  2.0 it/s",
        "Epoch 0/0: 50/50 (100%)  0:25  2.0 it/s",
    ]


def test_frequent_validations_do_not_keep_the_plain_line_from_coming() -> None:
    bar, text = plain_bar()
    bar.plain_seconds = 5.0
    trainer_with(bar, val_check_interval=2, num_sanity_val_steps=0).fit(Shown(1.0), tiny_loader(20), tiny_loader(1))
    starts = [line.split("  ")[0] for line in text.getvalue().splitlines()]
    assert len(starts) >= 4, starts
    assert starts[-1] == "Epoch 0/0: 20/20 (100%)"


@pytest.mark.parametrize(("entry", "title"), EVALUATIONS)
def test_an_evaluation_ends_with_a_plain_line(entry: str, title: str) -> None:
    bar, text = plain_bar()
    getattr(trainer_with(bar), entry)(Shown(), tiny_loader(3))
    assert text.getvalue().startswith(f"{title}: 3/3 (100%)")
    assert text.getvalue().count("\n") == 1


def test_an_error_leaves_a_line_that_says_where_it_came() -> None:
    class Fails(Shown):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise RuntimeError("the user's own")
            return super().training_step(batch, batch_idx)

    bar, text = plain_bar()
    with pytest.raises(RuntimeError, match="the user's own"):
        trainer_with(bar).fit(Fails(), tiny_loader(5))
    assert text.getvalue().startswith("Epoch 0/0: 3/5 (60%)")


def test_an_error_in_get_metrics_is_not_asked_for_again() -> None:
    calls = []

    class Broken(RichProgressBar):
        def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
            calls.append(1)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trainer_with(Broken(console_kwargs={"file": io.StringIO()})).fit(Shown(), tiny_loader(2))
    assert len(calls) == 1


def test_a_letter_that_the_output_cannot_encode_is_written_as_its_code() -> None:
    raw = io.BytesIO()
    lines = PlainLines(lambda: io.TextIOWrapper(raw, "ascii", write_through=True), 1.0)
    stream = io.TextIOWrapper(raw, "ascii", write_through=True)
    lines._stream = lambda: stream
    lines.write("\u03b1=1\n")
    assert raw.getvalue() == b"\\u03b1=1\n"


def test_an_output_that_breaks_warns_once_and_the_training_goes_on() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    bar = RichProgressBar(console_kwargs={"file": Broken()})
    trainer = trainer_with(bar, max_epochs=3)
    with pytest.warns(UserWarning, match="can no longer write its output.*Broken pipe.*The run continues") as caught:
        trainer.fit(Shown(), tiny_loader(2))
    assert sum("can no longer write its output" in str(warning.message) for warning in caught) == 1
    assert trainer.current_epoch == 3


def test_print_of_the_trainer_goes_through_the_bar_and_outside_a_run_to_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Talks(Shown):
        def on_train_epoch_start(self) -> None:
            self.trainer.print("from", "inside", sep="-")

    bar, text = plain_bar()
    trainer = trainer_with(bar)
    trainer.fit(Talks(), tiny_loader(1))
    trainer.print("outside", 1, end="!\n")
    assert text.getvalue().splitlines()[0] == "from-inside"
    assert capsys.readouterr().out == "outside 1!\n"
    somewhere = io.StringIO()
    trainer.print("there", file=somewhere)
    assert somewhere.getvalue() == "there\n"


# ---- what a person sees ----------------------------------------------------------------------------------------------

LONG = ("train/loss_of_the_whole_batch", "val/f1_of_the_first_class", "val/f1_of_the_second_class", "val/accuracy")


class Many(Shown):
    """Logs more than fits into a line of a terminal."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        for name in LONG:
            self.log(name, self.loss(batch), prog_bar=True)


BARS: list[type[DrawnProgressBar]] = [RichProgressBar, TQDMProgressBar]


@pytest.fixture
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time is too short for a speed, however busy the machine is."""
    for file in (progress_file, tqdm_file):
        monkeypatch.setattr(file, "LEAST_SECONDS", inf)


def fit_many(bar: ProgressBar) -> None:
    trainer_with(bar, max_epochs=3, log_every_n_steps=1, logger=CSVLogger("logs")).fit(
        Many(), tiny_loader(4), tiny_loader(2)
    )


def epochs_in(lines: list[str]) -> list[str]:
    """Each epoch's line, with the lines that continue it."""
    found: list[str] = []
    for line in lines:
        if line.startswith("Epoch"):
            found.append(line)
        elif not line.startswith("Logging to "):
            assert line.startswith("  "), line
            found[-1] += line
    return found


def check_epochs(lines: list[str]) -> None:
    found = epochs_in(lines)
    assert [line.split("  ")[0] for line in found] == [f"Epoch {epoch}/2: 4/4 (100%)" for epoch in range(3)]
    for line in found:
        words = line.split()
        names = [word.partition("=")[0] for word in words if "=" in word]
        assert sorted(names[:-1]) == sorted([*LONG, "loss_step", "loss_epoch"])
        assert names[-1] == "v_num", "what is the same in every line stands last"
        assert all(word.partition("=")[2] for word in words if "=" in word), "each name with its value"
        assert ": " not in line.partition(": ")[2], "one form of a metric"
        assert "it/s" not in line, "too short to be measured"


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize("columns", [80, None])
def test_each_epoch_leaves_one_line_with_every_name_beside_its_value_in_a_terminal_as_in_a_pipe(
    bar: type[DrawnProgressBar], columns: int | None
) -> None:
    check_epochs(seen(lambda: fit_many(bar()), columns).lines)


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize("bar", BARS)
def test_a_notebook_keeps_one_line_for_each_epoch(
    bar: type[DrawnProgressBar], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.callbacks import rich_progress, tqdm_progress

    notebook = Notebook()
    monkeypatch.setattr(rich_progress, "notebook_display", lambda: notebook)
    monkeypatch.setattr(tqdm_progress, "notebook_display", lambda: notebook)
    fit_many(bar())
    written = TerminalScreen(1000).feed(capsys.readouterr().out.replace("\n", "\r\n")).text
    check_epochs([line for output in (*notebook.outputs, written) for line in output.splitlines() if line])


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize(("bar", "columns"), [(RichProgressBar, 80), (RichProgressBar, None), (TQDMProgressBar, None)])
def test_an_evaluation_leaves_one_line_for_each_loader(bar: type[DrawnProgressBar], columns: int | None) -> None:
    def run() -> None:
        trainer_with(bar()).validate(Many(), [tiny_loader(2), tiny_loader(7)], verbose=False)

    lines = [line for line in seen(run, columns).lines if not line.startswith("  ")]
    assert [line.split("  ")[0] for line in lines] == [
        "Validation DataLoader 0: 2/2 (100%)",
        "Validation DataLoader 1: 7/7 (100%)",
    ]
    assert "it/s" not in "".join(lines)


@pytest.mark.parametrize("bar", BARS)
def test_a_bar_that_is_left_by_an_error_keeps_every_name_beside_its_value(bar: type[DrawnProgressBar]) -> None:
    class Fails(Many):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.current_epoch == 1 and batch_idx == 2:
                raise KeyError("the user's own")
            return super().training_step(batch, batch_idx)

    def run() -> None:
        with pytest.raises(KeyError, match="the user's own"):
            trainer_with(bar(), max_epochs=3).fit(Fails(), tiny_loader(4), tiny_loader(1))

    found = seen(run)
    assert found.lines[0].startswith("Epoch 0/2: 4/4 (100%)")
    (at,) = [number for number, line in enumerate(found.lines) if line.startswith("Epoch 1/2")]
    assert "2/4" in found.lines[at]
    assert not any(line.startswith(" ") for line in found.lines[at:])
    for word in " ".join(found.lines[at:]).split():
        name, equals, value = word.rstrip(",]").partition("=")
        assert not equals or (name and re.fullmatch(r"[0-9.]+(e[+-][0-9]+)?", value)), word

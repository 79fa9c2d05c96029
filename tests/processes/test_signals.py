"""Signals in one process: handlers, the save, SLURM's requeue."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader

from paceline import Callback, Trainer
from paceline.callbacks import ModelCheckpoint, OnExceptionCheckpoint

KNOWN = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python's own handlers, and no SLURM job."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    before = {number: signal.getsignal(number) for number in KNOWN}
    for number in KNOWN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Sends(Callback):
    """Sends this process a signal after training batch 2."""

    def __init__(self, *signums: int, hook: str = "on_train_batch_end", at: int = 2) -> None:
        self.signums, self.sent, self.at = signums, False, at
        setattr(self, hook, self.send)

    def send(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step >= self.at and not self.sent:
            self.sent = True
            for signum in self.signums:
                os.kill(os.getpid(), signum)


def fit(quiet: dict[str, Any], *callbacks: Callback, **arguments: Any) -> tuple[Trainer, BaseException | None]:
    on = {"enable_checkpointing": any(isinstance(c, (ModelCheckpoint, OnExceptionCheckpoint)) for c in callbacks)}
    if not on["enable_checkpointing"]:
        on = {}
    elif not any(isinstance(c, ModelCheckpoint) for c in callbacks):
        on = {"enable_checkpointing": None}  # type: ignore[dict-item]
    loaders = arguments.pop("loaders", (tiny_loader(),))
    trainer = Trainer(**{**quiet, "max_epochs": 3, "callbacks": list(callbacks), **on, **arguments})
    try:
        trainer.fit(TinyModule(), *loaders)
    except (SystemExit, KeyboardInterrupt) as error:
        return trainer, error
    return trainer, None


def step_of(path: Path) -> int:
    return torch.load(path, weights_only=True)["global_step"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_fit_at_the_step_with_one_save(signum: int, tmp_path: Path, quiet: dict[str, Any]) -> None:
    trainer, error = fit(quiet, Sends(signum), ModelCheckpoint(tmp_path))
    assert isinstance(error, KeyboardInterrupt) if signum == signal.SIGINT else error.code == 143  # type: ignore
    assert trainer.global_step == 2
    assert [file.name for file in tmp_path.iterdir()] == ["epoch=0-step=2.ckpt"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("hook", "told"),
    [
        ("on_sanity_check_start", "SIGTERM ends the fit before its first step, so nothing was trained or saved."),
        (
            "on_train_batch_end",
            "SIGTERM ends the fit after step 1 without a new checkpoint. A ModelCheckpoint would have saved one.",
        ),
    ],
)
def test_a_signal_that_nothing_is_saved_for_says_so(
    hook: str, told: str, quiet: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paceline")
    _, error = fit(quiet, Sends(signal.SIGTERM, hook=hook, at=0), loaders=(tiny_loader(), tiny_loader()))
    assert isinstance(error, SystemExit)
    assert caplog.messages == [told]


def test_a_monitored_ranking_is_left_alone_and_last_is_rewritten(tmp_path: Path, quiet: dict[str, Any]) -> None:
    keeper = ModelCheckpoint(tmp_path / "a", monitor="val_loss", save_top_k=1, every_n_train_steps=1)
    last = ModelCheckpoint(tmp_path / "b", monitor="val_loss", save_last=True)
    fit(quiet, Sends(signal.SIGTERM), keeper, ModelCheckpoint(tmp_path / "not needed"))
    assert not (tmp_path / "not needed").exists()
    fit(quiet, Sends(signal.SIGTERM), last)
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["epoch=0-step=2.ckpt"]
    assert keeper.best_k_models == {}
    assert [file.name for file in (tmp_path / "b").iterdir()] == ["last.ckpt"]
    assert step_of(tmp_path / "b" / "last.ckpt") == 2


def test_a_step_that_is_saved_is_not_saved_again(tmp_path: Path, quiet: dict[str, Any]) -> None:
    written: list[Any] = []

    class Writes(ModelCheckpoint):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
            written.append(trainer.global_step)

    fit(quiet, Sends(signal.SIGTERM), Writes(tmp_path, every_n_train_steps=1, save_on_exception=True))
    assert written == [1, 2]


def test_a_checkpoint_on_exceptions_writes_no_second_file(tmp_path: Path, quiet: dict[str, Any]) -> None:
    first, second = OnExceptionCheckpoint(tmp_path / "a"), OnExceptionCheckpoint(tmp_path / "b")
    fit(quiet, Sends(signal.SIGTERM), ModelCheckpoint(tmp_path / "a"), first)
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["epoch=0-step=2.ckpt"]
    fit(quiet, Sends(signal.SIGTERM), second, enable_checkpointing=False)
    assert step_of(tmp_path / "b" / "on_exception.ckpt") == 2


def test_a_signal_inside_a_window_or_a_validation_finishes_it(quiet: dict[str, Any]) -> None:
    trainer, _ = fit(quiet, Sends(signal.SIGTERM), accumulate_grad_batches=3, loaders=(tiny_loader(12),))
    assert (trainer.global_step, trainer.state.batches) == (2, 6)
    ended: list[int] = []

    class Ends(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            ended.append(trainer.global_step)

    sends = Sends(signal.SIGTERM, hook="on_validation_batch_start")
    loaders = (tiny_loader(), tiny_loader())
    trainer, _ = fit(quiet, sends, Ends(), val_check_interval=2, num_sanity_val_steps=0, loaders=loaders)
    assert trainer.global_step == 2
    assert ended == [2]


def test_the_last_batch_of_an_epoch_ends_the_epoch_first(tmp_path: Path, quiet: dict[str, Any]) -> None:
    class Ends(Callback):
        epochs = 0

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.epochs += 1

    ends = Ends()
    trainer, error = fit(quiet, Sends(signal.SIGTERM), ends, loaders=(tiny_loader(2),))
    assert isinstance(error, SystemExit)
    assert (trainer.global_step, trainer.current_epoch, ends.epochs) == (2, 1, 1)


def test_a_second_ctrl_c_interrupts_at_once(quiet: dict[str, Any]) -> None:
    class Twice(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("went on")

    with pytest.raises(KeyboardInterrupt):
        Trainer(**quiet, max_epochs=1).fit(Twice(), tiny_loader())


def test_signals_during_the_save_let_it_finish(tmp_path: Path, quiet: dict[str, Any]) -> None:
    class Presses(ModelCheckpoint):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
            for signum in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), signum)

    _, error = fit(quiet, Sends(signal.SIGINT), Presses(tmp_path))
    assert isinstance(error, KeyboardInterrupt)
    assert step_of(tmp_path / "epoch=0-step=2.ckpt") == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_a_handler_of_the_users_is_called_too_and_put_back(quiet: dict[str, Any]) -> None:
    called: list[int] = []

    def handler(signum: int, frame: Any) -> None:
        called.append(signum)

    signal.signal(signal.SIGTERM, handler)
    _, error = fit(quiet, Sends(signal.SIGTERM))
    assert isinstance(error, SystemExit)
    assert called == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_handler_set_during_the_run_stays(quiet: dict[str, Any]) -> None:
    def handler(signum: int, frame: Any) -> None:
        pass

    class Sets(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            signal.signal(signal.SIGTERM, handler)

    fit(quiet, Sets())
    assert signal.getsignal(signal.SIGTERM) is handler


def test_an_ignored_signal_stays_ignored(quiet: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    trainer, error = fit(quiet, Sends(signal.SIGINT))
    assert error is None
    assert trainer.global_step == 12


def test_a_signal_after_the_run_is_raised_again_for_the_old_handler(quiet: dict[str, Any]) -> None:
    class Late(Callback):
        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Trainer(**quiet, max_epochs=1, callbacks=Late()).fit(TinyModule(), tiny_loader())


def test_signals_can_be_chosen(quiet: dict[str, Any]) -> None:
    _, error = fit(quiet, Sends(signal.SIGUSR2), signals={"SIGUSR2": "stop"})
    assert isinstance(error, SystemExit)
    assert error.code == 128 + signal.SIGUSR2
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: seen.append(signum))
    trainer, error = fit(quiet, Sends(signal.SIGTERM), signals={"SIGTERM": None})
    assert (error, seen, trainer.global_step) == (None, [signal.SIGTERM], 12)


# ---- SLURM -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name, which notes how it was called and what lay in the folder of checkpoints."""
    folder, notes = tmp_path / "bin", tmp_path / "notes"
    folder.mkdir()
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" $(ls {tmp_path}/saved) >> {notes}\n')
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    return notes


@pytest.mark.parametrize("array", [False, True])
def test_slurms_signal_saves_and_requeues(
    array: bool, scontrol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: dict[str, Any]
) -> None:
    if array:
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    trainer, error = fit(quiet, Sends(signal.SIGUSR1), ModelCheckpoint(tmp_path / "saved"))
    assert isinstance(error, SystemExit)
    assert error.code == 128 + signal.SIGUSR1
    assert scontrol.read_text().split() == ["requeue", "70_4" if array else "71", "epoch=0-step=2.ckpt"]
    assert trainer.global_step == 2


def test_a_requeued_job_resumes_without_being_told(
    scontrol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: dict[str, Any]
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    started: list[int] = []

    class Starts(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            started.append(trainer.global_step)

    for _ in range(2):
        fit(quiet, Sends(signal.SIGUSR1), Starts(), ModelCheckpoint(tmp_path / "saved"))
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    fit(quiet, Starts(), ModelCheckpoint(tmp_path / "saved"))
    assert started == [0, 2, 0]


def test_a_failed_requeue_is_told_and_the_run_still_ends_by_the_signal(
    scontrol: Path, tmp_path: Path, quiet: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho Access denied >&2\nexit 1\n")
    _, error = fit(quiet, Sends(signal.SIGUSR1))
    assert isinstance(error, SystemExit)
    assert "`scontrol requeue 71` failed (exit status 1: Access denied)" in capsys.readouterr().err


def test_a_users_handler_for_slurms_signal_is_left_alone(scontrol: Path, quiet: dict[str, Any]) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: seen.append(signum))
    _, error = fit(quiet, Sends(signal.SIGUSR1))
    assert error is None
    assert seen == [signal.SIGUSR1]
    assert not scontrol.exists()


# ---- and then resumed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hook", ["on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end", "on_train_epoch_start"]
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_that_a_signal_ended_goes_on_to_the_bit(
    hook: str, accumulate: int, tmp_path: Path, quiet: dict[str, Any]
) -> None:
    def train(path: Any, *callbacks: Callback) -> tuple[TinyModule, int | None]:
        torch.manual_seed(1)
        module = TinyModule()
        keeper = ModelCheckpoint(tmp_path, every_n_epochs=0, save_last=True)
        arguments = {**quiet, "enable_checkpointing": True, "accumulate_grad_batches": accumulate}
        trainer = Trainer(**arguments, max_epochs=4, val_check_interval=2, callbacks=[*callbacks, keeper])
        try:
            trainer.fit(module, tiny_loader(5, shuffle=True), tiny_loader(2), ckpt_path=path)
        except SystemExit:
            return module, trainer.global_step
        return module, None

    whole, _ = train(None)
    (tmp_path / "last.ckpt").unlink()
    _, step = train(None, Sends(signal.SIGTERM, hook=hook))
    assert step is not None
    assert step_of(tmp_path / "last.ckpt") == step
    resumed, _ = train(tmp_path / "last.ckpt")
    for mine, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, expected)

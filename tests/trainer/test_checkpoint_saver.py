"""Saving in the background: what training waits for, what becomes of errors, and of a process that is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RanksError, ranks
from tiny import TinyModule, tiny_loader
from torch import nn
from torch.utils.data import DataLoader

from paceline import Callback, Trainer
from paceline.callbacks import ModelCheckpoint
from paceline.checkpoint import atomic_write, sharded_folder, single_file
from paceline.checkpoint.read import read
from paceline.strategies import DDPStrategy, FSDPStrategy
from paceline.trainer import checkpoint_saver

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def fit(*callbacks: Callback, module: Any = None, data: Any = None, ckpt_path: Any = None, **settings: Any) -> Trainer:
    torch.manual_seed(1)
    trainer = Trainer(**{**QUIET, "max_epochs": 2, **settings}, callbacks=list(callbacks))
    trainer.fit(module or TinyModule(), data or tiny_loader(), ckpt_path=ckpt_path)
    return trainer


def every_step(folder: Path, **arguments: Any) -> ModelCheckpoint:
    settings: dict[str, Any] = {"filename": "{step}", "every_n_train_steps": 1, "save_top_k": -1, "async_save": True}
    return ModelCheckpoint(folder, **{**settings, **arguments})


class Held:
    """A place that a thread stops at until it is told to go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.go_on.wait(120)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_the_files_are_those_of_saving_at_once(tmp_path: Path):
    for name, background in (("back", True), ("once", False)):
        fit(every_step(tmp_path / name, async_save=background, save_last=True))
    names = sorted(os.listdir(tmp_path / "once"))
    assert names == sorted([*(f"step={step}.ckpt" for step in range(1, 9)), "last.ckpt"])
    assert sorted(os.listdir(tmp_path / "back")) == names
    for name in names:
        one, other = (read(tmp_path / folder / name) for folder in ("back", "once"))
        for content in (one, other):
            content["paceline"].pop("runs")
            content["paceline"]["manifest"].pop("line")
            for state in content["callbacks"].values():
                state.pop("run", None)
                state.pop("line", None)
        assert same(one, other), name


def test_a_background_write_holds_the_weights_of_its_own_step(tmp_path: Path, monkeypatch: Any):
    held, write, weights = Held(), single_file.write, {}

    def slow(checkpoint: Any, path: Any) -> None:
        held()
        write(checkpoint, path)

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            weights[trainer.global_step] = trainer.training_module.layer.weight.detach().clone()
            if trainer.global_step == 4:
                assert not (tmp_path / "step=2.ckpt").exists()
                held.go_on.set()

    monkeypatch.setattr(single_file, "write", slow)
    fit(Watch(), every_step(tmp_path, every_n_train_steps=2), max_steps=4)
    assert torch.equal(read(tmp_path / "step=2.ckpt")["state_dict"]["layer.weight"], weights[2])
    assert not torch.equal(weights[2], weights[4])


def test_small_states_are_written_at_once_and_large_ones_in_the_background(tmp_path: Path, monkeypatch: Any):
    threads: list[str] = []
    write = single_file.write
    monkeypatch.setattr(
        single_file, "write", lambda *given: (threads.append(threading.current_thread().name), write(*given))[1]
    )
    fit(every_step(tmp_path / "small", async_save=None), max_steps=1)
    monkeypatch.setattr(checkpoint_saver, "WORTH_BYTES", 8)
    fit(every_step(tmp_path / "large", async_save=None), max_steps=1)
    assert threads == ["MainThread", "paceline-save"]


def test_a_checkpoint_that_a_user_asks_for_is_there_when_the_call_returns(tmp_path: Path):
    class Asks(TinyModule):
        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.save_checkpoint(tmp_path / "mine.ckpt")
            assert read(tmp_path / "mine.ckpt")["global_step"] == self.global_step

    fit(every_step(tmp_path / "kept"), module=Asks())


# ---- errors ----------------------------------------------------------------------------------------------------------


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def fails_at(number: int) -> Callable[..., None]:
    write, calls = single_file.write, []

    def failing(*given: Any) -> None:
        calls.append(1)
        no_space() if len(calls) == number else write(*given)

    return failing


def test_an_error_in_the_background_is_raised_after_the_next_batch(tmp_path: Path, monkeypatch: Any):
    steps: list[int] = []

    class Waits(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            steps.append(trainer.global_step)
            if trainer.global_step > 2:
                trainer.saver._thread.join()

    monkeypatch.setattr(single_file, "write", fails_at(1))
    with pytest.raises(OSError, match="No space left"):
        fit(Waits(), every_step(tmp_path, every_n_train_steps=2), max_epochs=5)
    assert steps == [1, 2, 3]


def test_an_error_in_the_last_write_fails_the_fit(tmp_path: Path, monkeypatch: Any):
    keeper = every_step(tmp_path, every_n_train_steps=None)
    monkeypatch.setattr(single_file, "write", fails_at(2))
    with pytest.raises(OSError, match="No space left"):
        fit(keeper, max_epochs=2)
    assert keeper.best_model_path == str(tmp_path / "step=4.ckpt")


def test_a_write_that_failed_leaves_ranking_and_older_files_as_they_were(tmp_path: Path, monkeypatch: Any):
    keeper = every_step(tmp_path, save_top_k=1, save_last=True)
    monkeypatch.setattr(single_file, "write", fails_at(4))  # last of the second save
    with pytest.raises(OSError, match="No space left"):
        fit(keeper)
    assert (Path(keeper.best_model_path).name, Path(keeper.last_model_path).name) == ("step=1.ckpt", "last.ckpt")
    assert read(keeper.best_model_path)["global_step"] == read(keeper.last_model_path)["global_step"] == 1


def test_what_cannot_be_saved_is_an_error_at_the_save(tmp_path: Path):
    class Odd(TinyModule):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["odd"] = lambda: 0

    with pytest.raises(TypeError, match=r"checkpoint\['odd'\] is of type builtins.function"):
        fit(every_step(tmp_path), module=Odd(), max_steps=1)


def test_the_old_file_goes_only_when_the_new_one_is_on_the_disk(tmp_path: Path, monkeypatch: Any):
    write, seen = single_file.write, []

    def look(checkpoint: Any, path: Any) -> None:
        seen.append(sorted(os.listdir(tmp_path)) if tmp_path.exists() else [])
        write(checkpoint, path)
        seen.append(sorted(os.listdir(tmp_path)))

    monkeypatch.setattr(single_file, "write", look)
    fit(every_step(tmp_path, save_top_k=1), max_steps=3)
    one, two, three = (f"step={step}.ckpt" for step in (1, 2, 3))
    assert seen == [[], [one], [one], [one, two], [two], [two, three]]
    assert os.listdir(tmp_path) == [three]


def test_a_fit_that_raises_finishes_the_write_in_flight(tmp_path: Path, monkeypatch: Any):
    held, write = Held(), single_file.write

    def slow(checkpoint: Any, path: Any) -> None:
        held()
        write(checkpoint, path)

    class Boom(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                raise ZeroDivisionError

        def on_exception(self, *_: Any) -> None:
            raise AssertionError("the write comes first")

    class Late(TinyModule):
        def on_train_batch_start(self, *_: Any) -> None:
            if self.global_step == 1:
                held.reached.wait(120)
                threading.Timer(0.2, held.go_on.set).start()

    monkeypatch.setattr(single_file, "write", slow)
    with pytest.raises(ZeroDivisionError), pytest.warns(UserWarning, match="the write comes first"):
        fit(Boom(), every_step(tmp_path), module=Late())
    assert read(tmp_path / "step=1.ckpt")["global_step"] == 1
    assert not any(thread.name == "paceline-save" for thread in threading.enumerate())


def test_buffers_are_given_back_at_the_end(tmp_path: Path):
    trainer = fit(every_step(tmp_path))
    assert not trainer.saver._buffers._kept


# ---- several processes -----------------------------------------------------------------------------------------------


def test_two_processes_save_in_the_background_and_hear_of_the_first_ones_error(tmp_path: Path):
    def work(fail: bool) -> Any:
        if fail and int(os.environ["RANK"]) == 0:
            single_file.write = fails_at(2)
        fit(every_step(tmp_path / str(fail)), strategy=DDPStrategy(), devices=2)

    ranks(2, work, False)
    assert len(os.listdir(tmp_path / "False")) == 4
    with pytest.raises(RanksError) as caught:
        ranks(2, work, True)
    one, two = caught.value.errors
    assert "No space left" in str(one)
    assert "because rank 0 failed: OSError: [Errno 28]" in str(two)


def test_folders_are_written_in_the_background_over_a_line_of_their_own(tmp_path: Path):
    def work(name: str, background: bool) -> Any:
        class Talks(Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                for _ in range(20):  # the run's own line is in use while the thread writes
                    assert trainer.strategy.gather_objects(trainer.global_rank) == [0, 1]

        class Wide(TinyModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

        keeper = every_step(tmp_path / name, async_save=background)
        strategy = FSDPStrategy(state_dict_type="sharded")
        fit(Talks(), keeper, module=Wide(), strategy=strategy, devices=2)

    ranks(2, work, "back", True)
    ranks(2, work, "once", False)
    names = sorted(os.listdir(tmp_path / "back"))
    assert names == sorted(os.listdir(tmp_path / "once")) == [f"step={step}.ckpt" for step in range(1, 5)]
    for name in names:
        one, other = (read(tmp_path / folder / name) for folder in ("back", "once"))
        assert same(one["state_dict"], other["state_dict"])
        assert same(one["optimizer_states"], other["optimizer_states"])


# ---- forks and kills -------------------------------------------------------------------------------------------------


def test_workers_that_are_forked_while_a_thread_writes_leave_the_file_alone(tmp_path: Path, monkeypatch: Any):
    """The thread is between two records, with nothing on the disk that the file object knows of, when they start."""
    held, save = Held(), single_file._save

    def slow(checkpoint: Any, stream: Any) -> None:
        stream.raw.write(b"")
        save(checkpoint, stream)
        held()

    class Forks(TinyModule):
        def on_train_batch_start(self, *_: Any) -> None:
            if self.global_step == 2:
                assert held.reached.wait(120)
                list(DataLoader(list(range(8)), num_workers=2))  # pyright: ignore[reportArgumentType]
                held.go_on.set()

    monkeypatch.setattr(single_file, "_save", slow)
    fit(every_step(tmp_path, every_n_train_steps=2), module=Forks(), max_steps=3)
    assert read(tmp_path / "step=2.ckpt")["global_step"] == 2


def killed_at(place: Callable[[], None], work: Callable[[], Any]) -> None:
    """Run ``work`` in a child in which ``place`` sets up its own SIGKILL, and wait for that."""
    pid = os.fork()
    if pid == 0:
        try:
            place()
            work()
        finally:
            os._exit(7)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(owner: Any, name: str, call: int, after: bool = False) -> None:
    """Replace a function by one that ends the process at its n-th call, before it does its work or after."""
    original, calls = getattr(owner, name), []

    def deadly(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call and not after:
            die()
        result = original(*args, **kwargs)
        if len(calls) == call:
            die()
        return result

    setattr(owner, name, deadly)


#: Where the process dies in its second save, and the newest file that is there afterwards.
PLACES: dict[str, tuple[Callable[[], None], int]] = {
    "before the bytes": (partial(die_in, single_file, "_save", 2), 1),
    "after the bytes, before the manifest": (partial(die_in, single_file, "_save", 2, True), 1),
    "before the file is synced": (partial(die_in, os, "fsync", 3), 1),
    "before the rename": (partial(die_in, atomic_write, "take_place", 2), 1),
    "after the rename": (partial(die_in, atomic_write, "take_place", 2, True), 2),
    "before the folder is synced": (partial(die_in, atomic_write, "sync_folder", 2), 2),
    "before the old file is deleted": (partial(die_in, os, "remove", 1), 2),
    "after the old file is deleted": (partial(die_in, os, "remove", 1, True), 2),
}


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_a_process_killed_anywhere_in_a_save_leaves_the_old_file_or_the_new(
    place: str, background: bool, tmp_path: Path
):
    set_up, newest = PLACES[place]
    killed_at(set_up, lambda: fit(every_step(tmp_path, save_top_k=1, async_save=background)))
    there = [path for path in tmp_path.iterdir() if path.suffix == ".ckpt"]
    assert max(read(path)["global_step"] for path in there) == newest
    fit(every_step(tmp_path / "whole", save_top_k=1, async_save=background))
    fit(every_step(tmp_path, save_top_k=1, async_save=background), ckpt_path="auto")
    assert same(
        read(tmp_path / "step=8.ckpt")["optimizer_states"], read(tmp_path / "whole" / "step=8.ckpt")["optimizer_states"]
    )
    assert same(read(tmp_path / "step=8.ckpt")["state_dict"], read(tmp_path / "whole" / "step=8.ckpt")["state_dict"])


@pytest.mark.parametrize(
    ("owner", "name", "call", "after"),
    [
        (sharded_folder, "_write_parts", 2, False),
        (sharded_folder, "_write_parts", 2, True),
        (sharded_folder.manifest, "write", 2, False),
        (atomic_write, "take_place", 4, False),  # each save renames contents.ckpt, then the folder
        (atomic_write, "take_place", 4, True),
    ],
)
def test_a_process_killed_anywhere_in_writing_a_folder_leaves_the_old_or_the_new(
    owner: Any, name: str, call: int, after: bool, tmp_path: Path
):
    def work() -> Any:
        if int(os.environ["RANK"]) == 0:
            die_in(owner, name, call, after)
        keeper = every_step(tmp_path, save_top_k=1)
        fit(keeper, strategy=FSDPStrategy(state_dict_type="sharded"), devices=2)

    with pytest.raises(RanksError):
        ranks(2, work)
    found = [read(path)["global_step"] for path in tmp_path.iterdir() if path.suffix == ".ckpt"]
    assert max(found) == (2 if after and name == "take_place" else 1)

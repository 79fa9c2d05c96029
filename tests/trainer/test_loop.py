"""Epochs and batches: what is counted, when validation runs, what stops a fit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline import Callback, CombinedLoader, Trainer, TrainingModule


class Numbers(Dataset[int]):
    """The numbers from 0 on."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Counting(TrainingModule):
    """Notes every batch it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[Any] = []
        self.validated_at: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated_at.append(self.trainer.state.batches)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(count: int, batch_size: int = 1, **kwargs: Any) -> DataLoader[int]:
    return DataLoader(Numbers(count), batch_size=batch_size, **kwargs)


def fit(
    module: Counting, train: Any, val: Any = None, quiet: dict[str, Any] | None = None, **arguments: Any
) -> Trainer:
    trainer = Trainer(**{"max_epochs": 1, **(quiet or {}), **arguments})
    trainer.fit(module, train, val)
    return trainer


def test_counters_after_a_fit(quiet: dict[str, Any]) -> None:
    module = Counting()
    trainer = fit(module, loader(5), quiet=quiet, max_epochs=3, accumulate_grad_batches=2)
    assert (trainer.current_epoch, trainer.global_step, trainer.state.batches) == (3, 9, 15)
    assert trainer.state.finished
    assert not trainer.interrupted
    assert trainer.num_training_batches == 5


@pytest.mark.parametrize(("max_steps", "steps"), [(7, 7), (100, 15)])
def test_max_steps_and_max_epochs_whichever_comes_first(max_steps: int, steps: int, quiet: dict[str, Any]) -> None:
    assert fit(Counting(), loader(5), quiet=quiet, max_epochs=3, max_steps=max_steps).global_step == steps


def test_a_second_fit_goes_on_where_the_limit_allows(quiet: dict[str, Any]) -> None:
    module = Counting()
    trainer = fit(module, loader(2), quiet=quiet)
    trainer.fit(module, loader(2))
    assert len(module.seen) == 2
    trainer.max_epochs = 3
    trainer.fit(module, loader(2))
    assert (trainer.current_epoch, len(module.seen)) == (3, 6)


def test_no_limit_at_all_is_told_once_and_means_1000_epochs(quiet: dict[str, Any]) -> None:
    trainer = Trainer(limit_train_batches=0, **quiet)
    with pytest.warns(UserWarning, match="training stops after 1000 epochs"):
        trainer.fit(Counting(), loader(1))
    assert trainer.max_epochs == 1000


@pytest.mark.parametrize(
    ("arguments", "validated_at"),
    [
        ({}, [8, 16]),
        ({"val_check_interval": 3}, [3, 6, 11, 14]),
        ({"val_check_interval": 0.25}, [2, 4, 6, 8, 10, 12, 14, 16]),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None}, [5, 10, 15]),
        ({"check_val_every_n_epoch": 2}, [16]),
        ({"limit_val_batches": 0}, []),
    ],
)
def test_validation_runs_when_it_should(
    arguments: dict[str, Any], validated_at: list[int], quiet: dict[str, Any]
) -> None:
    module = Counting()
    fit(module, loader(8), loader(2), quiet=quiet, max_epochs=2, **arguments)
    assert module.validated_at == validated_at


def test_validation_by_the_clock(quiet: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.trainer import validation

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(validation, "time", clock)

    class Ticks(Counting):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            clock.now += 1

    module = Ticks()
    fit(module, loader(8), loader(1), quiet=quiet, val_check_interval={"seconds": 3})
    assert module.validated_at == [3, 6]


def test_a_loader_without_length_knows_its_last_batch(quiet: dict[str, Any]) -> None:
    last: list[bool] = []

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    class Module(Counting):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            last.append(self.trainer.is_last_batch)

    module = Module()
    trainer = fit(module, DataLoader(Stream(), batch_size=None), loader(1), quiet=quiet, max_epochs=2)
    assert last == [False, False, True] * 2
    assert module.validated_at == [3, 6]
    assert trainer.num_training_batches == float("inf")


def test_an_endless_loader_is_cut_by_the_limit(quiet: dict[str, Any]) -> None:
    class Endless:
        def __iter__(self) -> Any:
            while True:
                yield torch.ones(1)

    module = Counting()
    trainer = fit(module, Endless(), loader(1), quiet=quiet, limit_train_batches=4, max_epochs=2)
    assert len(module.seen) == 8
    assert trainer.global_step == 8
    assert module.validated_at == [4, 8]


class Liar:
    """Says that it is longer than it is."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter(torch.ones(3, 1))


class Estimated(Liar):
    """Says as a batch sampler that there are fewer batches than there are."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        return iter([[0], [1], [2]])


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (Liar(), "length 5, but yielded only 3 batches"),
        (DataLoader(torch.ones(3, 1), batch_sampler=Estimated()), "length 2, but yielded at least 3 batches"),  # type: ignore[arg-type]
    ],
)
def test_a_length_that_lies_is_an_error(loader: Any, words: str, quiet: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=rf"{words} in epoch 0.*correct __len__"):
        fit(Counting(), loader, quiet=quiet)


def test_an_evaluation_length_that_lies_is_an_error(quiet: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="length 5, but yielded 3"):
        Trainer(**quiet).validate(Counting(), Liar(), verbose=False)


@pytest.mark.parametrize(("where", "batches"), [("on_train_batch_start", 2), ("on_train_batch_end", 3)])
def test_should_stop_ends_the_fit_after_the_batch(where: str, batches: int, quiet: dict[str, Any]) -> None:
    class Stops(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == batches - 1:
                trainer.should_stop = True

    module = Counting()
    trainer = fit(module, loader(9), quiet=quiet, max_epochs=4, callbacks=[Stops()])
    assert len(module.seen) == batches
    assert trainer.current_epoch == 0


def test_a_fit_cut_short_goes_on_with_the_next_batch(quiet: dict[str, Any], tmp_path: Path) -> None:
    def cut(module: Counting, **arguments: Any) -> Trainer:
        torch.manual_seed(4)
        trainer = Trainer(**{"max_epochs": 2, **quiet, **arguments})
        trainer.fit(module, loader(4, shuffle=True))
        return trainer

    whole = Counting()
    cut(whole)
    first, resumed = Counting(), Counting()
    trainer = cut(first, max_steps=3)
    trainer.save_checkpoint(tmp_path / "cut.ckpt")
    Trainer(max_epochs=2, **quiet).fit(resumed, loader(4, shuffle=True), ckpt_path=tmp_path / "cut.ckpt")
    assert first.seen + resumed.seen == whole.seen
    trainer.max_steps = -1
    trainer.fit(first, loader(4, shuffle=True))
    assert first.seen == whole.seen


@pytest.mark.parametrize("how", ["should_stop", "-1"])
def test_a_window_is_never_left_half_way(how: str, quiet: dict[str, Any]) -> None:
    class Module(Counting):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            if batch_idx == 4 and how == "should_stop":
                self.trainer.should_stop = True
            return -1 if batch_idx == 4 and how == "-1" else None

    module = Module()
    trainer = fit(module, loader(9), quiet=quiet, accumulate_grad_batches=3)
    assert trainer.state.window == 0
    assert (len(module.seen), trainer.global_step) == {"should_stop": (6, 2), "-1": (4, 2)}[how]
    assert module.layer.weight.grad is None


def test_a_generator_that_is_used_up_is_an_error(quiet: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"yielded no batches in epoch 1. A generator can be read only once"):
        fit(Counting(), (b for b in torch.ones(3, 1)), quiet=quiet, max_epochs=None, max_steps=100)


def trained(module: Counting, quiet: dict[str, Any], **arguments: Any) -> torch.Tensor:
    torch.manual_seed(0)
    Trainer(max_epochs=1, **quiet).fit(module, loader(8), **arguments)
    return module.layer.weight.detach()


class Learns(Counting):
    """Every batch moves the weights by another amount."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.layer.weight)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch_idx)
        return (self.layer.weight * (batch_idx + 1)).sum()


def test_a_resume_from_inside_a_window_goes_on_with_its_gradients(quiet: dict[str, Any], tmp_path: Path) -> None:
    class Saves(Learns):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                self.trainer.save_checkpoint(tmp_path / "inside.ckpt")

    arguments = {**quiet, "accumulate_grad_batches": 3}
    whole, resumed = Saves(), Learns()
    weights = trained(whole, arguments)
    assert torch.equal(trained(resumed, arguments, ckpt_path=tmp_path / "inside.ckpt"), weights)
    assert resumed.seen == [5, 6, 7]
    assert resumed.trainer.global_step == whole.trainer.global_step == 3
    assert resumed.trainer.state.batches == 8


@pytest.mark.parametrize("hook", ["training_step", "on_train_batch_start", "on_after_backward"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_batch_that_failed_is_repeated(hook: str, accumulate: int, quiet: dict[str, Any], tmp_path: Path) -> None:
    class Saves(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(tmp_path / "failed.ckpt")

    arguments = {**quiet, "accumulate_grad_batches": accumulate}
    weights = trained(Learns(), arguments)
    fails, resumed = Learns(), Learns()
    inner = getattr(fails, hook)

    def fail(*args: Any) -> Any:
        if fails.trainer.state.batch_idx == 4:
            raise ValueError("mine")
        return inner(*args)

    setattr(fails, hook, fail)
    with pytest.raises(ValueError, match="mine"):
        trained(fails, {**arguments, "callbacks": [Saves()]})
    assert torch.equal(trained(resumed, arguments, ckpt_path=tmp_path / "failed.ckpt"), weights)
    assert resumed.trainer.state.batches == 8


def test_a_module_in_eval_mode_is_pointed_out(quiet: dict[str, Any]) -> None:
    module = Counting()
    module.layer.eval()
    with pytest.warns(UserWarning, match="Counting starts the fit with 1 submodule in eval mode"):
        fit(module, loader(1), quiet=quiet)


@pytest.mark.parametrize(("minimum", "seen"), [({"min_epochs": 2}, 8), ({"min_steps": 6}, 6)])
def test_should_stop_waits_for_the_minimum(minimum: dict[str, int], seen: int, quiet: dict[str, Any]) -> None:
    class Stops(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = True

    module = Counting()
    fit(module, loader(4), quiet=quiet, max_epochs=5, callbacks=[Stops()], **minimum)
    assert len(module.seen) == seen


def test_minus_one_skips_the_rest_of_the_epoch(quiet: dict[str, Any]) -> None:
    class Skips(Counting):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    module = Skips()
    trainer = fit(module, loader(5), quiet=quiet, max_epochs=2)
    assert len(module.seen) == 4
    assert trainer.current_epoch == 2


def test_shuffling_is_a_function_of_seed_and_epoch_alone(quiet: dict[str, Any]) -> None:
    def orders(noise: int, workers: int) -> list[Any]:
        torch.manual_seed(5)
        module = Counting()
        trainer = Trainer(max_epochs=2, **quiet)
        data = loader(6, shuffle=True, num_workers=workers)
        module.on_train_epoch_start = lambda: torch.rand(noise)
        trainer.fit(module, data)
        return module.seen

    first = orders(0, 0)
    assert first == orders(3, 0) == orders(7, 2)
    assert sorted(first[:6]) == sorted(first[6:]) == [[i] for i in range(6)]
    assert first[:6] != first[6:]


def test_overfit_batches_repeats_the_same_batches_in_order(quiet: dict[str, Any]) -> None:
    module = Counting()
    fit(module, loader(9, shuffle=True), loader(9, shuffle=True), quiet=quiet, overfit_batches=2, max_epochs=2)
    assert module.seen == [[0], [1], [0], [1]]


def test_several_training_loaders_give_one_combined_batch(quiet: dict[str, Any]) -> None:
    module = Counting()
    fit(module, {"a": loader(2), "b": loader(3)}, quiet=quiet)
    assert [{k: v.item() for k, v in batch.items()} for batch in module.seen] == [
        {"a": 0, "b": 0},
        {"a": 1, "b": 1},
        {"a": 0, "b": 2},
    ]


def test_combined_loader_min_size_is_respected(quiet: dict[str, Any]) -> None:
    module = Counting()
    trainer = fit(module, CombinedLoader([loader(2), loader(3)], "min_size"), quiet=quiet)
    assert trainer.num_training_batches == len(module.seen) == 2


def test_a_list_of_batches_is_one_loader(quiet: dict[str, Any]) -> None:
    module = Counting()
    fit(module, [torch.zeros(1), torch.ones(1)], quiet=quiet)
    assert module.seen == [[0.0], [1.0]]


def test_loaders_are_made_again_every_n_epochs(quiet: dict[str, Any]) -> None:
    class Makes(Counting):
        made = 0

        def train_dataloader(self) -> Any:
            self.made += 1
            return loader(self.made)

    module = Makes()
    fit(module, None, quiet=quiet, max_epochs=5, reload_dataloaders_every_n_epochs=2)
    assert [len(module.seen), module.made] == [1 + 1 + 2 + 2 + 3, 3]


def test_fast_dev_run_tries_everything_on_one_batch(quiet: dict[str, Any], tmp_path: Path) -> None:
    module = Counting()
    trainer = Trainer(fast_dev_run=True, accelerator="cpu", default_root_dir=tmp_path)
    trainer.fit(module, loader(9), loader(9))
    assert (len(module.seen), module.validated_at) == (1, [1])
    assert [*tmp_path.iterdir()] == []


def test_max_time_stops_the_run(quiet: dict[str, Any]) -> None:
    trainer = fit(Counting(), loader(10), quiet=quiet, max_epochs=-1, max_time={"milliseconds": 200})
    assert trainer.should_stop


def test_an_epoch_scheduler_steps_on_the_last_batch_and_a_plateau_after_the_epoch(quiet: dict[str, Any]) -> None:
    events: list[str] = []

    class Scheduled(Counting):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            step = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [step, {"scheduler": plateau, "monitor": "val_loss"}]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            events.append(f"{type(scheduler).__name__} {metric}")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            events.append(f"batch {batch_idx}")

        def on_train_epoch_end(self) -> None:
            events.append("epoch end")

    fit(Scheduled(), loader(2), loader(1), quiet=quiet)
    assert events == ["batch 0", "StepLR None", "batch 1", "epoch end", "ReduceLROnPlateau 1.0"]


def test_a_monitor_that_was_never_logged_lists_what_was(quiet: dict[str, Any]) -> None:
    class Scheduled(Counting):
        def on_train_epoch_end(self) -> None:
            self.log("train_acc", 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    with pytest.raises(
        RuntimeError, match=r"monitors 'val_loss', which had not been logged.*Logged so far: 'train_acc'"
    ):
        fit(Scheduled(), loader(2), quiet=quiet)


def test_teardown_and_on_exception_run_after_an_error_with_the_users_line_on_top(quiet: dict[str, Any]) -> None:
    called: list[str] = []

    class Notes(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            called.append(f"exception {exception}")

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            called.append(f"teardown {stage}")

    class Breaks(Counting):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("mine")

        def teardown(self, stage: str) -> None:
            called.append("module")

    trainer = Trainer(max_epochs=1, **quiet, callbacks=[Notes()])
    with pytest.raises(ValueError, match="mine") as caught:
        trainer.fit(Breaks(), loader(2))
    frames = [f.path for f in caught.traceback]
    own = [f for f in frames if "trainer" in Path(f).parts and "tests" not in Path(f).parts]
    assert str(frames[-1]) == __file__
    assert len(own) <= 6
    assert called == ["exception mine", "teardown fit", "module"]
    assert trainer.interrupted
    assert trainer.state.fn is None


def test_an_error_in_on_exception_does_not_hide_the_first(quiet: dict[str, Any]) -> None:
    class Worse(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            raise KeyError("second")

    class Breaks(Counting):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("first")

    with pytest.warns(UserWarning, match="the run also raised KeyError"), pytest.raises(ValueError, match="first"):
        fit(Breaks(), loader(2), quiet=quiet, callbacks=[Worse()])


def test_every_teardown_runs_and_its_first_error_is_raised(quiet: dict[str, Any]) -> None:
    called: list[str] = []

    class Breaks(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        @property
        def state_key(self) -> str:
            return self.name

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            called.append(self.name)
            raise ValueError(self.name)

    with pytest.warns(UserWarning, match="the run also raised ValueError: b"), pytest.raises(ValueError, match="a"):
        fit(Counting(), loader(1), quiet=quiet, callbacks=[Breaks("a"), Breaks("b")])
    assert called == ["a", "b"]


def test_loader_workers_end_with_the_run_even_after_an_error(quiet: dict[str, Any]) -> None:
    import multiprocessing

    class Breaks(Counting):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise ValueError("mine")
            return super().training_step(batch, batch_idx)

    module = Breaks()
    before = set(multiprocessing.active_children())
    with pytest.raises(ValueError, match="mine"):
        fit(module, loader(50, num_workers=2), quiet=quiet)
    assert not set(multiprocessing.active_children()) - before


SIGNALED = """
import os, signal, sys, torch
from paceline import Callback, Trainer, TrainingModule

class Module(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.done = 0
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            os.kill(os.getpid(), signal.{name})
        loss = self.layer(batch).sum()
        self.done = batch_idx + 1
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Notes(Callback):
    def on_exception(self, trainer, pl_module, exception):
        print("exception", type(exception).__name__, trainer.global_step, flush=True)
    def teardown(self, trainer, pl_module, stage):
        print("teardown", trainer.interrupted, flush=True)

trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                  enable_model_summary=False, accelerator="cpu", callbacks=[Notes()])
try:
    trainer.fit(Module(), [torch.ones(1)] * 100)
except KeyboardInterrupt:
    print("raised KeyboardInterrupt", signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
"""


@pytest.mark.parametrize(
    ("name", "exception", "last", "status"),
    [
        ("SIGINT", "KeyboardInterrupt", "raised KeyboardInterrupt True", 0),
        ("SIGTERM", "SystemExit", "teardown True", 128 + signal.SIGTERM),
    ],
)
def test_a_signal_finishes_the_step_tears_down_and_ends(name: str, exception: str, last: str, status: int) -> None:
    code = SIGNALED.replace("{name}", name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[0] == f"exception {exception} 4", done.stderr
    assert lines[1] == "teardown True"
    assert lines[-1] == last
    assert done.returncode == status


def test_nothing_to_train_runs_no_epoch(quiet: dict[str, Any]) -> None:
    module = Counting()
    module.on_train_start = lambda: pytest.fail("training started")
    trainer = fit(module, loader(2), quiet=quiet, limit_train_batches=0)
    assert trainer.global_step == 0
    assert trainer.state.finished

"""An error in any hook, in any step, in a worker: the run is torn down, and what it saved goes on to the same end."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader
from torch.utils.data import DataLoader, get_worker_info

from paceline import Trainer
from paceline.callbacks import Callback, ModelCheckpoint
from paceline.callbacks.base import HOOKS as ALL_HOOKS

#: Methods of the module, and at which of their calls they fail, from 0 on.
STEPS = {
    **dict.fromkeys(("configure_optimizers", "train_dataloader"), 0),
    "lr_scheduler_step": 1,
    **dict.fromkeys(("training_step", "validation_step", "backward"), 6),
    **dict.fromkeys(("on_after_batch_transfer", "transfer_batch_to_device"), 6),
    **dict.fromkeys(("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"), 3),
}
#: All that a fit calls, but those of an error and a resume.
HOOKS = [
    name
    for name in ALL_HOOKS
    if name not in ("on_exception", "teardown", "on_load_checkpoint") and not name.startswith(("on_test", "on_predict"))
]
#: Hooks that are called in one place only, and so fail there.
ONCE = (
    *("setup", "on_fit_start", "on_sanity_check_start", "on_sanity_check_end"),
    *("on_train_start", "on_train_end", "on_fit_end"),
)


class Fails(Callback):
    """Raises in one hook, at its third call if it is called more than once; notes that it was torn down."""

    def __init__(self, name: str) -> None:
        self.left = 1 if name in ONCE else 3
        self.torn_down = False
        setattr(self, name, self.fail)

    def fail(self, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError("planted")

    def teardown(self, *args: Any) -> None:
        self.torn_down = True


class Momentum(TinyModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def module() -> Momentum:
    torch.manual_seed(3)
    return Momentum()


def trainer(folder: Path, quiet: dict[str, Any], *callbacks: Callback) -> Trainer:
    keep = ModelCheckpoint(folder, save_on_exception=True, save_last=True, every_n_train_steps=1)
    more: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": 2, "val_check_interval": 0.5}
    return Trainer(**{**quiet, "enable_checkpointing": True}, **more, callbacks=[keep, *callbacks])


def fit(folder: Path, quiet: dict[str, Any], *callbacks: Callback, **more: Any) -> dict[str, Any]:
    trained = module()
    trainer(folder, quiet, *callbacks).fit(trained, tiny_loader(5, shuffle=True), tiny_loader(3), **more)
    return trained.state_dict()


@pytest.mark.parametrize("hook", HOOKS)
def test_a_run_that_an_error_in_a_hook_ended_is_torn_down_and_goes_on_to_the_same_end(
    hook: str, tmp_path: Path, quiet: dict[str, Any]
) -> None:
    wanted = fit(tmp_path / "alone", quiet)
    planted = Fails(hook)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ZeroDivisionError, match="planted"):
        fit(tmp_path / "run", quiet, planted)
    assert planted.torn_down
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert not list((tmp_path / "run").glob(".*"))
    found = fit(tmp_path / "run", quiet, ckpt_path="auto")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("step", STEPS)
def test_so_does_one_that_an_error_of_the_module_ended(step: str, tmp_path: Path, quiet: dict[str, Any]) -> None:
    wanted = fit(tmp_path / "alone", quiet)
    broken = module()
    original, calls = getattr(broken, step), iter(range(100))

    def fail(self: Any, *args: Any, **more: Any) -> Any:
        if next(calls) == STEPS[step]:
            raise ZeroDivisionError("planted")
        return original(*args, **more)

    if step == "train_dataloader":
        original = partial(tiny_loader, 5, shuffle=True)
    broken.__class__ = type("Broken", (Momentum,), {step: fail})
    loaders = [None if step == "train_dataloader" else tiny_loader(5, shuffle=True), tiny_loader(3)]
    with pytest.raises(ZeroDivisionError, match="planted"):
        trainer(tmp_path / "run", quiet).fit(broken, *loaders)
    found = fit(tmp_path / "run", quiet, ckpt_path="auto")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class DiesOnce(torch.utils.data.Dataset[Any]):
    """Its worker is killed at one sample, the first time."""

    def __init__(self, marker: Path) -> None:
        self.data = tiny_loader(5).dataset
        self.marker = marker

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None and index == 7 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.data[index]


def test_a_loader_worker_that_is_killed_ends_the_run_with_an_error_and_a_new_start_goes_on(
    tmp_path: Path, quiet: dict[str, Any]
) -> None:
    def run(folder: Path, marker: Path, **more: Any) -> dict[str, Any]:
        trained = module()
        loader = DataLoader(DiesOnce(marker), 2, shuffle=True, num_workers=2)
        trainer(folder, quiet).fit(trained, loader, tiny_loader(3), **more)
        return trained.state_dict()

    (tmp_path / "already").touch()
    wanted = run(tmp_path / "alone", tmp_path / "already")
    with pytest.raises(RuntimeError, match="worker"):
        run(tmp_path / "run", tmp_path / "marker")
    found = run(tmp_path / "run", tmp_path / "marker", ckpt_path="auto")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)

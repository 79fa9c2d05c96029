"""The recorded order of hooks equals the pseudo-code in ``callbacks/base.py``, which is run here with recorders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline import Callback, Trainer, TrainingModule
from paceline.callbacks.base import FIT_PSEUDO_CODE, HOOKS

#: Hooks that only the module has, as the pseudo-code names them.
MODULE_ONLY = (
    "configure_callbacks",
    "prepare_data",
    "configure_model",
    "configure_optimizers",
    "train_dataloader",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "training_step",
    "validation_step",
    "backward",
    "configure_gradient_clipping",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "on_validation_model_zero_grad",
    "on_validation_model_eval",
    "on_validation_model_train",
    "load_state_dict",
    "zero_grad",
)
SHARED = tuple(h for h in HOOKS if h != "on_save_checkpoint")
CALLBACK_ONLY = ("on_sanity_check_start", "on_sanity_check_end", "on_exception")


class StopOnPurposeError(Exception):
    """Raised by a step on purpose."""


class Recorder:
    """Collects who was called at which hook."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __call__(self, owner: str, name: str) -> None:
        self.calls.append((owner, name))

    def names(self, owner: str) -> list[str]:
        return [name for who, name in self.calls if who == owner]


def recording_callback(record: Recorder) -> Callback:
    """A callback that records every hook."""

    def hook(name: str, *args: Any) -> None:
        record("C", name)

    callback = Callback()
    for name in SHARED:
        setattr(callback, name, partial(hook, name))
    return callback


class Recording(TrainingModule):
    """A module that records every hook and step before doing what the base class does."""

    def __init__(self, record: Recorder, stop_at: int | None = None, fail_at: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.stop_at, self.fail_at, self.steps = stop_at, fail_at, 0
        for name in (*SHARED, *MODULE_ONLY):
            if name in CALLBACK_ONLY or name == "optimizer_step":
                continue
            setattr(self, name, partial(self._recorded, record, name, getattr(self, name)))

    @staticmethod
    def _recorded(record: Recorder, name: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        record("M", name)
        return inner(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        if self.steps == self.fail_at:
            raise StopOnPurposeError
        if self.steps == self.stop_at:
            self.trainer.should_stop = True
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).mean())

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(8)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(4)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class PlainOptimizer(torch.optim.SGD):
    """Records its steps, so that ``optimizer_step`` has its place without the module overriding it."""

    record: Recorder

    def step(self, closure: Any = None) -> Any:
        self.record("M", "optimizer_step")
        return super().step(closure)


def loader(samples: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(samples, 4)), batch_size=2)


class Stepping(Recording):
    def __init__(self, record: Recorder, **kwargs: Any) -> None:
        self.__dict__["record"] = record
        super().__init__(record, **kwargs)

    def configure_optimizers(self) -> Any:
        optimizer = PlainOptimizer(self.parameters(), lr=0.1)
        optimizer.record = self.record
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Scenario:
    """Runs the pseudo-code with functions that record, under the conditions of one run.

    ``train_batches`` is consumed batch by batch, so conditions can look at where the run stands.
    """

    def __init__(
        self,
        epochs: int = 1,
        batches: int = 4,
        val_batches: int = 2,
        accumulate: int = 1,
        val_every: int | None = None,
        stop_after: int | None = None,
        fail_at: int | None = None,
        resuming: bool = False,
        sanity: int = 0,
        first_epoch: int = 0,
    ) -> None:
        self.__dict__.update(locals())
        self.batch = self.step = 0
        self.sanity_now = False
        self.called: list[str] = []

    def expected(self, owner: str, skipped: tuple[str, ...] = ()) -> list[str]:
        """The hook names of one owner, in the pseudo-code's order."""
        scope = _Scope(self)
        exec(FIT_PSEUDO_CODE, scope)
        try:
            scope["fit"]()
        except StopOnPurposeError:
            self.called += ["on_exception", "teardown"]
        known = {*SHARED} if owner == "C" else {*SHARED, *MODULE_ONLY, "optimizer_step"} - {*CALLBACK_ONLY}
        return [name for name in self.called if name in known and name not in skipped]


class _Scope(dict[str, Any]):
    """Names of the pseudo-code: conditions and iterables from the scenario, everything else a recorder."""

    def __init__(self, scenario: Any) -> None:
        super().__init__()
        self.s = scenario

    def __missing__(self, name: str) -> Any:
        s = self.s
        values: dict[str, Callable[[], Any]] = {
            "resuming": lambda: s.resuming,
            "sanity_checking": lambda: s.sanity > 0 and not s.resuming,
            "epochs": lambda: range(s.first_epoch, s.epochs),
            "train_batches": self.train_batches,
            "val_batches": lambda: range(s.sanity if s.sanity_now else s.val_batches),
            "window_complete": lambda: (s.batch + 1) % s.accumulate == 0 or s.batch + 1 == s.batches,
            "validation_due": lambda: (s.batch + 1) % (s.val_every or s.batches) == 0 or self.stopping(),
            "stopping": self.stopping,
        }
        if name in values:
            return values[name]()
        if name in dir(__builtins__) or name == "__builtins__":
            raise KeyError(name)
        return partial(self.call, name)

    def train_batches(self) -> Any:
        for batch in range(self.s.batches):
            self.s.batch = batch
            self.s.step += 1
            yield batch

    def stopping(self) -> bool:
        return self.s.stop_after is not None and self.s.step >= self.s.stop_after

    def call(self, name: str) -> None:
        s = self.s
        if name == "on_sanity_check_start":
            s.sanity_now = True
        if name == "on_sanity_check_end":
            s.sanity_now = False
        if name == "on_validation_model_zero_grad" and s.sanity_now:
            return
        s.called.append(name)
        if name == "training_step" and s.step == s.fail_at:
            raise StopOnPurposeError


RUNS = {
    "plain": ({}, {}, {}),
    "two epochs": ({"max_epochs": 2}, {}, {"epochs": 2}),
    "sanity check": ({"num_sanity_val_steps": 1}, {}, {"sanity": 1}),
    "validation inside the epoch": ({"val_check_interval": 2}, {}, {"val_every": 2}),
    "accumulation with a short last window": ({"accumulate_grad_batches": 3}, {}, {"accumulate": 3}),
    "early stop": ({"max_epochs": 5}, {"stop_at": 2}, {"epochs": 5, "stop_after": 2}),
    "exception": ({}, {"fail_at": 3}, {"fail_at": 3}),
}


@pytest.mark.parametrize("owner", ["C", "M"])
@pytest.mark.parametrize("run", RUNS)
def test_recorded_run_equals_the_pseudo_code(run: str, owner: str, quiet: dict[str, Any]) -> None:
    arguments, module_arguments, scenario = RUNS[run]
    record = Recorder()
    module = Stepping(record, **module_arguments)
    trainer = Trainer(
        **{"max_epochs": 1, "num_sanity_val_steps": 0, **quiet, **arguments}, callbacks=[recording_callback(record)]
    )
    if "fail_at" in scenario:
        with pytest.raises(StopOnPurposeError):
            trainer.fit(module)
    else:
        trainer.fit(module)
    assert record.names(owner) == Scenario(**scenario).expected(
        owner, skipped=("on_load_checkpoint", "load_state_dict")
    )


@pytest.mark.parametrize("owner", ["C", "M"])
def test_resumed_run_equals_the_pseudo_code(owner: str, quiet: dict[str, Any], tmp_path: Any) -> None:
    first = Trainer(max_epochs=1, **quiet)
    first.fit(Stepping(Recorder()))
    first.save_checkpoint(tmp_path / "one.ckpt")
    record = Recorder()
    module = Stepping(record)
    Trainer(max_epochs=2, **quiet, callbacks=[recording_callback(record)]).fit(module, ckpt_path=tmp_path / "one.ckpt")
    assert record.names(owner) == Scenario(epochs=2, first_epoch=1, resuming=True, sanity=2).expected(owner)


def test_callbacks_come_before_the_module_and_monitors_after_it(quiet: dict[str, Any]) -> None:
    order: list[str] = []

    class Named(Callback):
        def __init__(self, name: str, monitors: bool) -> None:
            self.name = name
            self.monitors_metrics = monitors

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            order.append(self.name)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            order.append(self.name)

    module = Stepping(Recorder())
    module.on_train_epoch_end = lambda: order.append("module")
    module.on_train_start = lambda: order.append("module")
    Trainer(max_epochs=1, **quiet, callbacks=[Named("monitor", True), Named("plain", False)]).fit(module)
    assert order == ["monitor", "plain", "module", "plain", "module", "monitor"]


def test_pseudo_code_names_every_hook_of_a_fit() -> None:
    named = {line.strip().split("(")[0] for line in FIT_PSEUDO_CODE.splitlines()}
    evaluation = {h for h in HOOKS if "_test_" in h or "_predict_" in h}
    assert set(SHARED) - evaluation - {"on_exception"} <= named

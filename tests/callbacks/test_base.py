"""The base of all callbacks: its hooks, its key, its state."""

from __future__ import annotations

import inspect
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline import Callback, Trainer, TrainingModule, messages
from paceline.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    LossGuard,
    ModelCheckpoint,
    ModelSummary,
    RichProgressBar,
    RunReport,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from paceline.callbacks.base import FIT_PSEUDO_CODE, HOOKS, Rollback
from paceline.loggers import CSVLogger


def test_every_hook_takes_the_trainer_and_the_module_first() -> None:
    for name in HOOKS:
        assert list(inspect.signature(getattr(Callback, name)).parameters)[:3] == ["self", "trainer", "pl_module"], name


def test_the_hooks_are_those_of_a_fit_and_of_the_evaluations() -> None:
    assert len(set(HOOKS)) == len(HOOKS)
    for stage in ("train", "validation", "test", "predict"):
        for moment in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end"):
            assert f"on_{stage}_{moment}" in HOOKS
    assert {"setup", "teardown", "on_exception", "on_save_checkpoint", "on_load_checkpoint"} <= set(HOOKS)
    assert not {"state_dict", "load_state_dict", "state_key"} & set(HOOKS)


def test_a_hook_does_nothing_by_default() -> None:
    callback = Callback()
    for name in HOOKS:
        method = getattr(callback, name)
        assert method(*range(len(inspect.signature(method).parameters))) is None
    assert callback.state_dict() == {}
    assert callback.load_state_dict({}) is None


def test_the_pseudo_code_is_python() -> None:
    compile(FIT_PSEUDO_CODE, "fit", "exec")


def test_a_state_key_is_the_class_and_what_tells_instances_apart() -> None:
    class Keyed(Callback):
        def __init__(self, monitor: str) -> None:
            self.monitor = monitor

        @property
        def state_key(self) -> str:
            return self._generate_state_key(monitor=self.monitor)

    assert Callback().state_key == "Callback"
    assert Keyed("a").state_key == f"{Keyed.__qualname__}{{'monitor': 'a'}}"
    assert Keyed("a").state_key != Keyed("b").state_key


@pytest.mark.parametrize(
    ("kind", "arguments", "idle"),
    [
        (LearningRateMonitor, {"logging_interval": "epoch"}, ("on_before_optimizer_step",)),
        (LearningRateMonitor, {"logging_interval": "step"}, ()),
        (ModelCheckpoint, {"save_last": True}, ("on_train_batch_end",)),
        (ModelSummary, {"max_depth": 0}, ()),
        (RichProgressBar, {"refresh_rate": 0}, ("on_train_batch_end", "on_validation_batch_end")),
        (RunReport, {}, ()),
        (Timer, {"duration": "00:01:00:00", "interval": "epoch"}, ("on_train_batch_end",)),
        (Timer, {}, ("on_train_batch_end",)),
        (TQDMProgressBar, {"refresh_rate": 0}, ("on_train_batch_end", "on_validation_batch_end")),
    ],
)
def test_an_idle_hook_costs_nothing_until_a_subclass_defines_it(
    kind: Any, arguments: dict[str, Any], idle: tuple[str, ...], quiet: dict[str, Any], tmp_path: Path
) -> None:
    called: set[str] = set()

    def noting(name: str) -> Any:
        def hook(self: Any, *args: Any) -> Any:
            called.add(name)
            return getattr(super(mine, self), name)(*args)

        return hook

    bar = None if kind in (RichProgressBar, TQDMProgressBar) else False
    mine = type("Mine", (kind,), {name: noting(name) for name in HOOKS})
    plain, own = kind(**arguments), mine(**arguments)
    settings = {name: value for name, value in quiet.items() if value is not False} | {"logger": CSVLogger(tmp_path)}
    for callback in (plain, own):
        trainer = Trainer(**settings, callbacks=[callback], fast_dev_run=True, enable_progress_bar=bar)
        trainer.fit(TinyModule(), tiny_loader(1), tiny_loader(1))
    assert {name for name in HOOKS if name.startswith(("on_train_", "on_validation_", "on_fit_"))} <= called
    assert "on_before_optimizer_step" in called
    assert [name for name in idle if getattr(plain, name) is not None] == []


def test_two_callbacks_of_one_class_keep_their_states_under_their_keys(quiet: dict[str, Any], tmp_path: Any) -> None:
    class Counts(Callback):
        def __init__(self, name: str) -> None:
            self.name, self.count = name, 0

        @property
        def state_key(self) -> str:
            return self._generate_state_key(name=self.name)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.count += 1 if self.name == "a" else 10

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]

    trainer = Trainer(**quiet, max_epochs=1, callbacks=[Counts("a"), Counts("b")])
    trainer.fit(TinyModule(), tiny_loader())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = [Counts("b"), Counts("a")]
    Trainer(**quiet, max_epochs=2, callbacks=again).fit(TinyModule(), tiny_loader(), ckpt_path=tmp_path / "x.ckpt")
    assert [callback.count for callback in again] == [80, 8]


@pytest.mark.parametrize("value", [0, None, 1, "stop"])
def test_only_minus_one_from_on_train_batch_start_skips_the_epoch(value: Any, quiet: dict[str, Any]) -> None:
    class Returns(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> Any:
            return value

    trainer = Trainer(**quiet, max_epochs=1, callbacks=Returns())
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.global_step == 4


class Backbone(TinyModule):
    """Has what every callback with a state asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.batch_size = nn.Linear(4, 4), 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.backbone(x))

    def train_dataloader(self) -> Any:
        return DataLoader(tiny_loader(4, 1).dataset, self.batch_size)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-3)


KEPT = ["best_model_path", "best_model_score", "best_k_models", "kth_best_model_path", "kth_value", "last_model_path"]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: BackboneFinetuning(1), ["previous_backbone_lr"]),
        (lambda: BatchSizeFinder(max_trials=1), ["optimal_batch_size"]),
        (lambda: EarlyStopping("val_loss", patience=5, min_delta=9.0), ["wait_count", "best_score"]),
        (lambda: EMAWeightAveraging(), ["n_averaged"]),
        (lambda: LossGuard(window=5), ["running_mean"]),
        (lambda: ModelCheckpoint("best", monitor="val_loss", mode="max", save_last=True, save_top_k=2), KEPT),
        (lambda: ModelCheckpoint("new", train_time_interval="00:01:00:00", save_last=True), ["last_model_path"]),
        (lambda: StochasticWeightAveraging(1e-3, swa_epoch_start=1), ["n_averaged"]),
        (lambda: Timer(), []),
        (lambda: WeightAveraging(), ["n_averaged"]),
    ],
)
def test_on_a_resume_the_state_of_a_callback_is_back_before_any_fit_start_hook(
    make: Any, names: list[str], quiet: dict[str, Any]
) -> None:
    class Looks(Callback):
        """Comes before the other callbacks."""

        def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
            self.values = {name: getattr(callback, name) for name in names}
            self.state = callback.state_dict()

    def fit(epochs: int, **more: Any) -> Trainer:
        trainer = Trainer(**{**quiet, "enable_checkpointing": None}, callbacks=[looks, callback], max_epochs=epochs)
        trainer.fit(Backbone(), **more)
        return trainer

    looks, callback = Looks(), make()
    trainer = fit(2)
    expected = {name: getattr(callback, name) for name in names}
    trainer.save_checkpoint("x.ckpt")
    state = torch.load("x.ckpt", weights_only=True)["callbacks"][callback.state_key]
    for reused in (False, True):
        callback = callback if reused else make()
        fit(3, ckpt_path="x.ckpt")
        assert str(looks.values) == str(expected)
        assert all(value not in (None, 0, "", {}) for value in expected.values())
        if isinstance(callback, Timer):
            assert looks.state["time_elapsed"]["train"] == state["time_elapsed"]["train"] > 0
        elif isinstance(callback, ModelCheckpoint):
            own = ("waiting", "start_step", "seconds_left", "current_score", "run", "monitor_is_validated")
            assert str([looks.state.get(name) for name in own]) == str([state.get(name) for name in own])
        else:
            assert str(looks.state) == str(state)


class Skips(Callback):
    """Skips one batch, on one rank or on all."""

    def __init__(self, together: bool = False) -> None:
        self.skips_together, self.seen = together, []

    def around_training_step(self, trainer: Trainer, pl_module: TrainingModule, step: Any) -> Any:
        def judged(batch: Any, batch_idx: int) -> Any:
            output = step(batch, batch_idx)
            self.seen.append(batch_idx)
            return None if batch_idx == 1 else output

        return judged


@pytest.mark.parametrize("together", [False, True])
def test_your_callback_can_judge_each_loss_and_skip_its_batch(
    together: bool, quiet: dict[str, Any], recwarn: pytest.WarningsRecorder
) -> None:
    skips = Skips(together)
    messages._said.discard("TinyModule.training_step skips")
    trainer = Trainer(**quiet, max_epochs=1, callbacks=[skips])
    trainer.fit(TinyModule(), tiny_loader())
    assert (trainer.global_step, skips.seen) == (3, [0, 1, 2, 3])
    assert any("returned None" in str(warning.message) for warning in recwarn) is not together
    with pytest.raises(ValueError, match=r"Skips needs the loss before backward"):
        Trainer(**quiet, max_epochs=1, callbacks=[skips], compile="step").fit(TinyModule(), tiny_loader())


def test_your_callback_can_be_the_limit_of_a_training(quiet: dict[str, Any]) -> None:
    class Budget(Callback):
        limits_training = True

        def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
            trainer.should_stop = trainer.current_epoch == 1

    trainer = Trainer(**quiet, callbacks=[Budget()])
    trainer.fit(TinyModule(), tiny_loader(1))
    assert (trainer.max_epochs, trainer.global_step) == (-1, 2)


def test_your_callback_can_say_how_many_batches_make_a_step(quiet: dict[str, Any]) -> None:
    class Grows(Callback):
        def get_accumulate_grad_batches(self, epoch: int) -> int:
            return epoch + 1

        def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
            trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)

    trainer = Trainer(**quiet, max_epochs=2, callbacks=[Grows()])
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.estimated_stepping_batches == trainer.global_step == 6


def test_your_callback_gets_the_times_that_a_profiler_measured(quiet: dict[str, Any]) -> None:
    class Keeps(Callback):
        def on_profile(self, trainer: Trainer, pl_module: TrainingModule, profiler: str, seconds: Any) -> None:
            self.got = profiler, set(seconds)

    keeps = Keeps()
    Trainer(**quiet, max_epochs=1, callbacks=[keeps], profiler="simple").fit(TinyModule(), tiny_loader())
    assert keeps.got[0] == "SimpleProfiler"
    assert {"run_training_batch", "no action"} <= keeps.got[1]


def test_your_callback_can_save_when_a_signal_ends_a_fit(quiet: dict[str, Any], tmp_path: Path) -> None:
    class Saves(Callback):
        step = -1

        def on_train_batch_end(self, *_: Any) -> None:
            signal.raise_signal(signal.SIGTERM)

        def save_on_signal(self, trainer: Trainer, name: str) -> None:
            assert name == "SIGTERM"
            trainer.save_checkpoint(tmp_path / "x.ckpt")
            self.step = trainer.global_step

        def has_saved(self, step: int, weights: bool = False) -> bool:
            return step == self.step

    saves, never = Saves(), Saves()
    with pytest.raises(SystemExit):
        Trainer(**quiet, max_epochs=1, callbacks=[saves, never]).fit(TinyModule(), tiny_loader())
    assert (saves.step, never.step) == (1, -1)
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["global_step"] == 1


def test_your_callback_can_go_back_to_a_checkpoint(quiet: dict[str, Any], tmp_path: Path) -> None:
    class GoesBack(Callback):
        steps: list[int]

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            self.steps = [*getattr(self, "steps", ()), trainer.global_step]
            if self.steps == [1]:
                trainer.save_checkpoint(tmp_path / "x.ckpt")
            if self.steps == [1, 2, 3]:
                raise Rollback(tmp_path / "x.ckpt", own=True)

    back = GoesBack()
    Trainer(**quiet, max_epochs=1, callbacks=[back]).fit(TinyModule(), tiny_loader())
    assert back.steps == [1, 2, 3, 2, 3, 4]


def quiet(*callbacks: Callback, epochs: int = 1) -> Trainer:
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(callbacks=list(callbacks), max_epochs=epochs, accelerator="cpu", num_sanity_val_steps=0, **off)


class Logs(Callback):
    """Logs from its own hooks, as the module does."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("step", float(batch_idx), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log_dict({"a": 1.0, "b": 2.0}, prog_bar=True)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("late", 1.0)


def test_a_callback_logs_as_the_module_does_with_its_own_hook_as_the_place() -> None:
    callback = Logs()
    trainer = quiet(callback)
    trainer.fit(TinyModule(), tiny_loader(3), tiny_loader(1))
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    wanted = {"step_step": 2.0, "step_epoch": 1.0, "a": 1.0, "b": 2.0}
    assert {name: logged[name] for name in wanted} == wanted
    assert trainer.progress_bar_metrics["b"] == 2.0
    with pytest.raises(RuntimeError, match=r"'late'.*on_test_end"):
        trainer.test(TinyModule(), tiny_loader(1), verbose=False)
    with pytest.raises(RuntimeError, match=r"Logs\.log\('x'\).*outside of a run"):
        callback.log("x", 1.0)


def test_a_value_that_a_callback_sets_can_be_monitored_until_it_is_logged() -> None:
    class Sets(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.callback_metrics["own"] = torch.tensor(3.0)
            trainer.callback_metrics.update(other=torch.tensor(4.0), train_loss=torch.tensor(-1.0))

    stopping = EarlyStopping("own", patience=1)
    trainer = quiet(Sets(), stopping, epochs=5)
    trainer.fit(TinyModule(), tiny_loader(2))
    assert (stopping.best_score, stopping.stopped_epoch) == (3.0, 1)
    assert trainer.callback_metrics["other"] == 4.0
    assert trainer.callback_metrics["train_loss"] >= 0


class NetworkThatIsACallback(nn.Module, Callback):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def on_train_batch_end(self, *args) -> None:
        self.log("seen", 1.0)


class WithCallback(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.part = NetworkThatIsACallback()

    def configure_callbacks(self):
        return [self.part]

    def training_step(self, batch, batch_idx):
        return self.part.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_part_of_the_module_can_be_a_callback(tmp_path: Path) -> None:
    module = WithCallback()
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, logger=False, enable_checkpointing=False)
    trainer.fit(module, DataLoader(torch.ones(4, 4)))
    assert trainer.callback_metrics["seen"] == 1.0
    assert list(module.state_dict()) == ["part.layer.weight", "part.layer.bias"]

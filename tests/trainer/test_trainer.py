"""The Trainer from outside: its names, its entry points one after another, and how a run ends."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader
from torch import nn

from paceline import Callback, DataModule, Trainer, TrainingModule
from paceline.callbacks import EarlyStopping, ModelCheckpoint, Timer
from paceline.loggers import CSVLogger
from paceline.profilers.base import PassThroughProfiler
from paceline.strategies import Precision, Strategy

# ---- names -----------------------------------------------------------------------------------------------------------

Test = Callable[[Any], bool]


def is_(value: Any) -> Test:
    return lambda found: type(found) is type(value) and found == value


def empty(found: Any) -> bool:
    return found == {}


def a(kind: type) -> Test:
    return lambda found: isinstance(found, kind)


def list_of(kind: type) -> Test:
    return lambda found: isinstance(found, list) and bool(found) and all(isinstance(one, kind) for one in found)


NONE, INF, MODULE = is_(None), is_(float("inf")), a(TinyModule)

#: Each name: what it is before any run, inside the second training batch, and after the fit.
NAMES: dict[str, tuple[Test, Test, Test]] = {
    "should_stop": (is_(False),) * 3,
    "interrupted": (is_(False),) * 3,
    "training": (is_(False), is_(True), is_(False)),
    "validating": (is_(False),) * 3,
    "testing": (is_(False),) * 3,
    "predicting": (is_(False),) * 3,
    "evaluating": (is_(False),) * 3,
    "sanity_checking": (is_(False),) * 3,
    "received_sigterm": (is_(False),) * 3,
    "current_epoch": (is_(0), is_(0), is_(1)),
    "global_step": (is_(0), is_(2), is_(4)),
    "is_last_batch": (is_(False),) * 3,
    "max_epochs": (is_(1),) * 3,
    "min_epochs": (NONE,) * 3,
    "max_steps": (is_(-1),) * 3,
    "min_steps": (NONE,) * 3,
    "num_training_batches": (INF, is_(4), is_(4)),
    "num_val_batches": (is_([]), is_([3]), is_([3])),
    "num_sanity_val_batches": (is_([]), is_([2]), is_([2])),
    "num_test_batches": (is_([]),) * 3,
    "num_predict_batches": (is_([]),) * 3,
    "train_dataloader": (NONE, a(torch.utils.data.DataLoader), a(torch.utils.data.DataLoader)),
    "val_dataloaders": (NONE, a(torch.utils.data.DataLoader), a(torch.utils.data.DataLoader)),
    "test_dataloaders": (NONE,) * 3,
    "predict_dataloaders": (NONE,) * 3,
    "datamodule": (NONE,) * 3,
    "distributed_sampler_kwargs": (NONE,) * 3,
    "model": (NONE, MODULE, MODULE),
    "lightning_module": (NONE, MODULE, MODULE),
    "optimizers": (is_([]), list_of(torch.optim.SGD), list_of(torch.optim.SGD)),
    "lr_scheduler_configs": (is_([]),) * 3,
    "scaler": (NONE,) * 3,
    "precision": (is_("32-true"),) * 3,
    "precision_plugin": (a(Precision),) * 3,
    "strategy": (a(Strategy),) * 3,
    "accelerator": (lambda kind: kind == "cpu",) * 3,
    "global_rank": (is_(0),) * 3,
    "local_rank": (is_(0),) * 3,
    "node_rank": (is_(0),) * 3,
    "world_size": (is_(1),) * 3,
    "num_nodes": (is_(1),) * 3,
    "num_devices": (is_(1),) * 3,
    "device_ids": (is_([0]),) * 3,
    "is_global_zero": (is_(True),) * 3,
    "logger": (a(CSVLogger),) * 3,
    "loggers": (list_of(CSVLogger),) * 3,
    "log_dir": (a(str),) * 3,
    "callback_metrics": (
        lambda m: m == {},
        lambda m: "train_loss" in m,
        lambda m: {"train_loss", "val_loss"} <= set(m),
    ),
    "logged_metrics": (lambda m: m == {}, lambda m: isinstance(m["train_loss"], float), lambda m: "val_loss" in m),
    "progress_bar_metrics": (empty,) * 3,
    "log_every_n_steps": (is_(1),) * 3,
    "profiler": (a(PassThroughProfiler),) * 3,
    "callbacks": (list_of(Callback),) * 3,
    "checkpoint_callback": (a(ModelCheckpoint),) * 3,
    "checkpoint_callbacks": (list_of(ModelCheckpoint),) * 3,
    "early_stopping_callback": (a(EarlyStopping),) * 3,
    "early_stopping_callbacks": (list_of(EarlyStopping),) * 3,
    "progress_bar_callback": (NONE,) * 3,
    "default_root_dir": (lambda path: os.path.isabs(path),) * 3,
    "ckpt_path": (NONE,) * 3,
    "limit_train_batches": (is_(4),) * 3,
    "limit_val_batches": (is_(1.0),) * 3,
    "limit_test_batches": (is_(1.0),) * 3,
    "limit_predict_batches": (is_(1.0),) * 3,
    "overfit_batches": (is_(0.0),) * 3,
    "val_check_interval": (is_(1.0),) * 3,
    "check_val_every_n_epoch": (is_(1),) * 3,
    "num_sanity_val_steps": (is_(2),) * 3,
    "accumulate_grad_batches": (is_(1),) * 3,
    "gradient_clip_val": (is_(1.5),) * 3,
    "gradient_clip_algorithm": (NONE,) * 3,
    "fast_dev_run": (is_(False),) * 3,
    "reload_dataloaders_every_n_epochs": (is_(0),) * 3,
    "barebones": (is_(False),) * 3,
}


def test_every_name_has_a_meaningful_value_before_during_and_after_a_fit(tmp_path: Path) -> None:
    def wrong(moment: int) -> dict[str, Any]:
        return {
            name: getattr(trainer, name) for name, tests in NAMES.items() if not tests[moment](getattr(trainer, name))
        }

    found: list[dict[str, Any]] = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                found.append(wrong(1))
                assert trainer.enable_validation is True
                assert trainer.estimated_stepping_batches == 4
                assert trainer.state.fn == "fit"

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        callbacks=[Looks(), EarlyStopping("val_loss")],
        limit_train_batches=4,
        gradient_clip_val=1.5,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    assert wrong(0) == {}
    assert (trainer.state.fn, trainer.state.status, trainer.state.finished) == (None, "initializing", False)
    trainer.fit(TinyModule(), tiny_loader(batches=6), tiny_loader(batches=3))
    assert found == [{}]
    assert wrong(2) == {}
    assert (trainer.state.fn, trainer.state.status, trainer.state.finished) == (None, "finished", True)
    assert trainer.estimated_stepping_batches == 4


def test_names_that_need_a_module_say_so(quiet: dict[str, Any]) -> None:
    trainer = Trainer(**quiet, max_epochs=1)
    assert trainer.enable_validation is False
    for name in ("training_module", "estimated_stepping_batches"):
        with pytest.raises(AttributeError, match=r"This Trainer has no module yet\. Call fit"):
            getattr(trainer, name)


def test_what_a_callback_may_replace_in_a_run_can_be_set(quiet: dict[str, Any]) -> None:
    trainer = Trainer(**quiet, max_epochs=1)
    for name in ("model", "datamodule", "lr_scheduler_configs", "optimizers"):
        value: Any = [] if name in ("lr_scheduler_configs", "optimizers") else None
        setattr(trainer, name, value)
        assert getattr(trainer, name) == value


def test_the_constructors_signature_is_told_to_tools() -> None:
    parameters = inspect.signature(Trainer).parameters
    assert len(parameters) > 40
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    assert parameters["max_steps"].default == -1


def test_names_that_can_be_set(quiet: dict[str, Any], tmp_path: Path) -> None:
    trainer = Trainer(**quiet, max_epochs=1)
    loggers = [CSVLogger(tmp_path / name) for name in "ab"]
    trainer.loggers = list(loggers)
    assert trainer.logger is loggers[0]
    trainer.loggers = None  # type: ignore[assignment]
    assert (trainer.loggers, trainer.logger) == ([], None)
    trainer.loggers = loggers
    trainer.logger = loggers[1]
    assert trainer.loggers == [loggers[1]]
    trainer.logger = None
    assert (trainer.loggers, trainer.log_dir) == ([], trainer.default_root_dir)
    trainer.sanity_checking = True
    assert (trainer.sanity_checking, trainer.evaluating) == (True, True)
    trainer.sanity_checking = False
    assert trainer.state.stage is None
    trainer.should_stop = True
    assert trainer.state.should_stop is True


def test_optimizers_set_by_a_callback_are_those_that_step(quiet: dict[str, Any]) -> None:
    class Replaces(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.optimizers = [torch.optim.SGD(pl_module.parameters(), lr=0.0)]
            assert pl_module.optimizers().param_groups[0]["lr"] == 0.0
            assert pl_module.optimizers(use_pl_optimizer=False) is trainer.optimizers[0]

    module = TinyModule()
    before = module.layer.weight.detach().clone()
    trainer = Trainer(**quiet, max_epochs=1, callbacks=Replaces())
    trainer.fit(module, tiny_loader())
    assert torch.equal(module.layer.weight, before)
    assert trainer.global_step == 4


# ---- entry points ----------------------------------------------------------------------------------------------------


class Data(DataModule):
    def __init__(self) -> None:
        self.stages: list[str] = []

    def setup(self, stage: str) -> None:
        self.stages.append(stage)

    def train_dataloader(self) -> Any:
        return tiny_loader(batches=2)

    def val_dataloader(self) -> Any:
        return [tiny_loader(batches=3), tiny_loader(batches=1)]

    def test_dataloader(self) -> Any:
        return {"a": tiny_loader(batches=2)}

    def predict_dataloader(self) -> Any:
        return tiny_loader(batches=5)


class Several(TinyModule):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("joint", 1.0, add_dataloader_idx=False) if dataloader_idx == 0 else None


@pytest.mark.parametrize("keyword", [False, True], ids=["in place of the loaders", "as datamodule"])
def test_a_data_module_feeds_every_entry_point(keyword: bool, quiet: dict[str, Any]) -> None:
    data, module, trainer = Data(), Several(), Trainer(**quiet, max_epochs=1)
    given: dict[str, Any] = {"datamodule": data} if keyword else {}
    place: tuple[Any, ...] = () if keyword else (data,)
    trainer.fit(module, *place, **given)
    assert trainer.datamodule is data
    assert data.trainer is trainer
    assert (trainer.global_step, trainer.num_val_batches) == (2, [3, 1])
    validated = trainer.validate(module, *place, **given, verbose=False)
    assert [sorted(one) for one in validated] == [["joint", "val_loss/dataloader_idx_0"], ["val_loss/dataloader_idx_1"]]
    tested = trainer.test(module, *place, **given, verbose=False)
    assert [sorted(one) for one in tested] == [["test_loss"]]
    predicted = trainer.predict(module, *place, **given)
    assert [tuple(one.shape) for one in predicted] == [(2, 1)] * 5
    assert data.stages == ["fit", "validate", "test", "predict"]


def test_results_are_plain_numbers_that_a_table_shows_when_verbose(
    quiet: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, module = Trainer(**quiet), TinyModule()
    results = trainer.test(module, tiny_loader())
    shown = capsys.readouterr().out
    assert [type(v) for one in results for v in one.values()] == [float]
    assert "test_loss" in shown
    assert f"{results[0]['test_loss']:.4f}"[:5] in shown
    assert trainer.test(module, tiny_loader(), verbose=False) == results
    assert capsys.readouterr().out == ""


def test_predictions_are_lists_of_lists_for_several_loaders_and_can_be_left_out(quiet: dict[str, Any]) -> None:
    class Predicts(TinyModule):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return dataloader_idx, batch_idx

    trainer = Trainer(**quiet)
    loaders = [tiny_loader(batches=2), tiny_loader(batches=1)]
    assert trainer.predict(Predicts(), loaders) == [[(0, 0), (0, 1)], [(1, 0)]]
    assert trainer.predict(Predicts(), loaders[0]) == [(0, 0), (0, 1)]
    assert trainer.predict(Predicts(), loaders[0], return_predictions=False) is None


def test_one_trainer_runs_one_module_after_another(quiet: dict[str, Any]) -> None:
    trainer = Trainer(**quiet, max_epochs=1)
    first, second = TinyModule(), TinyModule()
    trainer.fit(first, tiny_loader(), tiny_loader())
    trainer.test(first, tiny_loader(), verbose=False)
    trainer.max_epochs = 3
    trainer.fit(second, tiny_loader(batches=2))
    assert trainer.training_module is second
    assert trainer.global_step == 4 + 2 * 2
    assert trainer.val_dataloaders is None
    assert trainer.test_dataloaders is None
    assert second.trainer is trainer
    assert trainer.optimizers[0].param_groups[0]["params"][0] is second.layer.weight


def test_an_evaluation_leaves_the_training_modes_as_they_were(quiet: dict[str, Any]) -> None:
    class Frozen(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Dropout(0.5).eval()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert not any(m.training for m in self.modules())

    module = Frozen()
    trainer = Trainer(**quiet, max_epochs=1)
    trainer.fit(module, tiny_loader(), tiny_loader())
    trainer.validate(module, tiny_loader(), verbose=False)
    assert (module.training, module.layer.training, module.frozen.training) == (True, True, False)


@pytest.mark.parametrize(
    "limits", [{"val_check_interval": 100}, {"check_val_every_n_epoch": 5}, {"val_check_interval": "00:01:00:00"}]
)
def test_fast_dev_run_tries_validation_whatever_its_rhythm(limits: dict[str, Any], quiet: dict[str, Any]) -> None:
    seen: list[int] = []
    module = TinyModule()
    module.validation_step = lambda batch, batch_idx: seen.append(batch_idx)  # type: ignore[method-assign]
    trainer = Trainer(**quiet, fast_dev_run=2, **limits)
    trainer.fit(module, tiny_loader(batches=5), tiny_loader(batches=5))
    assert (seen, trainer.global_step) == ([0, 1], 2)


def test_overfitting_can_leave_validation_out(quiet: dict[str, Any]) -> None:
    module = TinyModule()
    module.validation_step = lambda batch, batch_idx: pytest.fail("validated")  # type: ignore[method-assign]
    trainer = Trainer(**quiet, max_epochs=3, overfit_batches=2, limit_val_batches=0)
    trainer.fit(module, tiny_loader(batches=5), tiny_loader(batches=5))
    assert trainer.global_step == 6


def test_a_timer_without_a_duration_is_no_limit(quiet: dict[str, Any]) -> None:
    module = TinyModule()
    module.on_train_start = lambda: setattr(module.trainer, "should_stop", True)  # type: ignore[method-assign]
    trainer = Trainer(**quiet, callbacks=Timer())
    with pytest.warns(UserWarning, match="training stops after 1000 epochs"):
        trainer.fit(module, tiny_loader())
    assert trainer.max_epochs == 1000


def test_the_estimate_is_infinite_for_a_loader_without_length(quiet: dict[str, Any]) -> None:
    seen: list[float] = []

    class Asks(TinyModule):
        def configure_optimizers(self) -> Any:
            seen.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    for max_steps, want in ((-1, float("inf")), (3, 3)):
        trainer = Trainer(**quiet, max_epochs=1, max_steps=max_steps)
        trainer.fit(Asks(), (batch for batch in list(tiny_loader())))
        assert seen.pop() == want


# ---- how a run ends --------------------------------------------------------------------------------------------------


class Notes(Callback):
    """Notes how a run ends."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.calls.append("setup")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.calls.append(type(exception).__name__)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.calls.append(f"teardown {trainer.state.status}")


def press(signum: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_ctrl_c_in_an_evaluation_finishes_its_batch_and_tears_down(entry: str, quiet: dict[str, Any]) -> None:
    done: list[int] = []

    class Pressed(TinyModule):
        def evaluate(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                press()
            done.append(batch_idx)

        validation_step = test_step = predict_step = evaluate

    notes = Notes()
    trainer = Trainer(**quiet, callbacks=notes)
    with pytest.raises(KeyboardInterrupt):
        getattr(trainer, entry)(Pressed(), tiny_loader())
    assert done == [0, 1]
    assert notes.calls == ["setup", "KeyboardInterrupt", "teardown interrupted"]
    assert trainer.interrupted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_the_validation_of_a_fit_ends_the_fit(quiet: dict[str, Any]) -> None:
    module, notes = TinyModule(), Notes()
    module.validation_step = lambda batch, batch_idx: press()  # type: ignore[method-assign]
    trainer = Trainer(**quiet, max_epochs=5, num_sanity_val_steps=0, callbacks=notes)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(module, tiny_loader(), tiny_loader())
    assert trainer.global_step == 4
    assert notes.calls == ["setup", "KeyboardInterrupt", "teardown interrupted"]


@pytest.mark.parametrize("hook", ["prepare_data", "setup", "configure_optimizers", "on_fit_start"])
def test_ctrl_c_while_nothing_trains_interrupts_at_once(hook: str, quiet: dict[str, Any]) -> None:
    class Pressed(TinyModule):
        pass

    def pressed(self: Any, *args: Any) -> None:
        press()
        pytest.fail("went on")

    setattr(Pressed, hook, pressed)
    with pytest.raises(KeyboardInterrupt):
        Trainer(**quiet, max_epochs=1).fit(Pressed(), tiny_loader())


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end"])
@pytest.mark.parametrize(("signum", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_after_the_last_step_is_not_lost(hook: str, signum: int, error: Any, quiet: dict[str, Any]) -> None:
    module, notes = TinyModule(), Notes()
    setattr(module, hook, lambda: press(signum))
    trainer = Trainer(**quiet, max_epochs=1, callbacks=notes)
    with pytest.raises(error):
        trainer.fit(module, tiny_loader())
    assert trainer.global_step == 4
    assert notes.calls == ["setup", error.__name__, "teardown interrupted"]


def test_a_signal_at_the_end_of_an_evaluation_is_not_lost(quiet: dict[str, Any]) -> None:
    module = TinyModule()
    module.on_test_end = lambda: press(signal.SIGTERM)  # type: ignore[method-assign]
    with pytest.raises(SystemExit) as caught:
        Trainer(**quiet).test(module, tiny_loader(), verbose=False)
    assert caught.value.code == 143


def test_an_error_in_teardown_is_raised_after_everybody_had_their_turn(quiet: dict[str, Any], tmp_path: Path) -> None:
    class Breaks(Callback):
        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            raise KeyError("in teardown")

    class Finalized(CSVLogger):
        status = ""

        def finalize(self, status: str) -> None:
            self.status = status
            super().finalize(status)

    logger, notes = Finalized(tmp_path), Notes()
    trainer = Trainer(**{**quiet, "logger": logger}, max_epochs=1, callbacks=[Breaks(), notes])
    with pytest.raises(KeyError, match="in teardown"):
        trainer.fit(TinyModule(), tiny_loader())
    assert logger.status == "success"
    assert notes.calls == ["setup", "teardown finished"]
    assert trainer.state.fn is None


def test_the_order_of_setup_and_teardown_is_data_callbacks_module(quiet: dict[str, Any]) -> None:
    order: list[str] = []

    def noting(who: str) -> dict[str, Any]:
        return {
            "setup": lambda self, *args: order.append(f"{who} setup"),
            "teardown": lambda self, *args: order.append(f"{who} teardown"),
            "on_exception": lambda self, *args: order.append(f"{who} on_exception"),
        }

    data = type("D", (Data,), noting("D"))()
    callback = type("C", (Callback,), noting("C"))()
    module = type("M", (Several,), noting("M"))()
    module.training_step = lambda batch, batch_idx: 1 / 0
    with pytest.raises(ZeroDivisionError):
        Trainer(**quiet, max_epochs=1, callbacks=callback).fit(module, datamodule=data)
    assert order == [f"{who} {what}" for what in ("setup", "on_exception", "teardown") for who in "DCM"]


def test_a_trainer_can_run_again_after_an_error(quiet: dict[str, Any]) -> None:
    class Once(TrainingModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)
            self.failed = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not self.failed:
                self.failed = True
                raise KeyError("once")
            return self.layer(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, trainer = Once(), Trainer(**quiet, max_epochs=1)
    with pytest.raises(KeyError):
        trainer.fit(module, tiny_loader())
    assert (trainer.state.status, trainer.state.stopped, trainer.state.finished) == ("interrupted", True, False)
    trainer.fit(module, tiny_loader())
    assert trainer.state.finished
    assert trainer.current_epoch == 1

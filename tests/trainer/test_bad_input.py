"""What cannot work is refused as early as possible, with the value received, why, and how to fix it."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import resource
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

from paceline import Callback, DataModule, Trainer, TrainingModule
from paceline.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ModelSummary,
    RichProgressBar,
    Timer,
)
from paceline.loggers import CSVLogger
from paceline.strategies import MixedPrecision, SingleDevice, TruePrecision


def refused(call: Callable[[], Any], error: type[BaseException], *parts: str) -> str:
    """Run ``call``, which must raise ``error``, saying every one of ``parts`` in this order. Returns what it says."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    text, place = str(caught.value), 0
    for part in parts:
        found = text.find(part, place)
        assert found >= 0, f"{part!r} does not follow in: {text}"
        place = found + len(part)
    return text


# ---- the values of Trainer(...) --------------------------------------------------------------------------------------

LIMIT = "an int of 0 or more (batches) or a float from 0.0 to 1.0"
COUNT = "Pass an integer of 0 or more"
SWITCH = "Pass True or False"

VALUES: list[tuple[str, Any, type[Exception], tuple[str, ...]]] = [
    ("accelerator", "cup", ValueError, ("Unknown accelerator 'cup'", "Did you mean 'cpu'?", "Choose 'auto', 'cpu'")),
    ("accelerator", "tpu", RuntimeError, ("sees no TPU", 'pip install "paceline[tpu]"', "accelerator='auto' or 'cpu'")),
    ("accelerator", 3, TypeError, ("accelerator=3", "an int", "Pass one of 'auto'")),
    ("strategy", "dpp", ValueError, ("Unknown strategy 'dpp'", "Did you mean 'ddp'?", "or pass a Strategy")),
    ("strategy", "dp", ValueError, ("strategy='dp'", "slower", "Use strategy='ddp'")),
    ("strategy", "xla", ValueError, ("strategy='xla'", "a TPU is a device", "Choose accelerator='tpu'")),
    ("strategy", SingleDevice, TypeError, ("SingleDevice", "Did you mean SingleDevice()?")),
    ("strategy", 5, TypeError, ("strategy=5", "an int", "Pass a name such as 'auto', or a Strategy object")),
    ("devices", 0, ValueError, ("devices=0", "no device", "Pass a positive number")),
    ("devices", [], ValueError, ("devices=[]", "no device", "Pass a positive number")),
    ("devices", ",", ValueError, ("devices=','", "no device", "Pass a positive number")),
    ("devices", -2, ValueError, ("devices=-2", "no device", "Pass a positive number")),
    ("devices", "two", ValueError, ("devices='two'", "is not a valid number of devices", "Pass 2, '2', [0, 1]")),
    ("devices", 1.5, ValueError, ("devices=1.5", "is not a valid number of devices", "Pass 2")),
    ("devices", True, ValueError, ("devices=True", "is not a valid number of devices", "Pass 2")),
    ("devices", None, ValueError, ("devices=None", "is not a valid number of devices", "Pass 2")),
    ("devices", [3], ValueError, ("devices=[3]", "CPU", "without an index", "devices=1")),
    ("num_nodes", 0, ValueError, ("num_nodes=0", "not a valid number of machines", "Pass 1 or more")),
    ("num_nodes", "1", ValueError, ("num_nodes='1'", "not a valid number of machines", "Pass 1 or more")),
    ("num_nodes", True, ValueError, ("num_nodes=True", "not a valid number of machines", "Pass 1 or more")),
    ("precision", "bf17-mixed", ValueError, ("precision 'bf17-mixed'", "Did you mean 'bf16-mixed'?", "Choose")),
    ("precision", 8, ValueError, ("Unknown precision 8", "Choose '32-true'", "or pass a Precision")),
    ("precision", MixedPrecision, TypeError, ("MixedPrecision", "a class", "Did you mean MixedPrecision()?")),
    ("logger", "tensorboard", TypeError, ("logger='tensorboard'", "str", "True for TensorBoard")),
    ("logger", 5, TypeError, ("5", "int", "True for TensorBoard")),
    ("logger", [CSVLogger], TypeError, ("CSVLogger", "True for TensorBoard")),
    ("callbacks", Timer, TypeError, ("Timer", "Did you mean Timer()?", "Pass Callback objects")),
    ("callbacks", [3], TypeError, ("3", "not a Callback", "Pass Callback objects")),
    ("callbacks", 3, TypeError, ("3", "not a Callback", "Pass Callback objects")),
    ("callbacks", "bar", TypeError, ("'bar'", "not a Callback", "Pass Callback objects")),
    ("fast_dev_run", -1, ValueError, ("fast_dev_run=-1", "out of range", "Pass True, False, or a number")),
    ("fast_dev_run", 1.0, TypeError, ("fast_dev_run=1.0", "a float", "Pass True, or a number")),
    ("max_epochs", -2, ValueError, ("max_epochs=-2", "out of range", COUNT, "-1 for no limit")),
    ("max_epochs", "3", TypeError, ("max_epochs='3'", "a str", COUNT)),
    ("max_epochs", True, TypeError, ("max_epochs=True", "a bool", COUNT)),
    ("min_epochs", -1, ValueError, ("min_epochs=-1", "out of range", COUNT)),
    ("max_steps", None, TypeError, ("max_steps=None", "a NoneType", "-1 for no limit")),
    ("max_steps", -5, ValueError, ("max_steps=-5", "out of range", "-1 for no limit")),
    ("min_steps", 1.5, TypeError, ("min_steps=1.5", "a float", COUNT)),
    ("max_time", "soon", ValueError, ("max_time", "'soon'", "'DD:HH:MM:SS'", "or pass a timedelta")),
    ("max_time", {"hour": 2}, ValueError, ("max_time", "'hour'", "Did you mean 'hours'?", "Choose")),
    ("max_time", 3600, TypeError, ("max_time", "3600", "unit is unknown", "Pass timedelta")),
    ("max_time", timedelta(-1), ValueError, ("max_time", "-1", "Pass a duration")),
    ("grace_seconds", 5, ValueError, ("grace_seconds=5", "without max_time", "Pass max_time")),
    ("signals", {"SIGTREM": "stop"}, ValueError, ("'SIGTREM'", "Did you mean 'SIGTERM'?", "Choose")),
    ("signals", {"SIGTERM": "halt"}, ValueError, ("'SIGTERM'", "'halt'", "Choose 'stop' or 'requeue'", "Pass None")),
    ("signals", {"SIGKILL": "stop"}, ValueError, ("'SIGKILL'", "no program can catch", "Leave 'SIGKILL' out")),
    ("signals", ["SIGTERM"], TypeError, ("signals=['SIGTERM']", "signals to actions", "Pass a dict")),
    *[
        (name, value, error, (f"{name}={value!r}", why, "Pass an int" if error is ValueError else "Pass a number"))
        for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
        for value, error, why in (
            (-1, ValueError, "out of range"),
            (1.5, ValueError, "out of range"),
            (float("nan"), ValueError, "out of range"),
            ("all", TypeError, "a str"),
            (True, TypeError, "a bool"),
        )
    ],
    ("overfit_batches", 2.0, ValueError, ("overfit_batches=2.0", "out of range", LIMIT)),
    ("overfit_batches", "1", TypeError, ("overfit_batches='1'", "a str", "Pass a number of batches")),
    ("val_check_interval", 0, ValueError, ("val_check_interval=0", "out of range", "Pass a number of at least 1")),
    ("val_check_interval", 1.5, ValueError, ("val_check_interval=1.5", "out of range", "Pass a float in (0.0, 1.0]")),
    ("val_check_interval", "often", ValueError, ("val_check_interval", "'often'", "'DD:HH:MM:SS'", "timedelta")),
    ("val_check_interval", "00:00:00:00", ValueError, ("val_check_interval", "00:00:00:00", "positive duration")),
    ("val_check_interval", [1], TypeError, ("val_check_interval=[1]", "a list", "Pass a fraction")),
    ("val_check_interval", True, TypeError, ("val_check_interval=True", "a bool", "Pass a fraction")),
    ("check_val_every_n_epoch", 0, ValueError, ("check_val_every_n_epoch=0", "out of range", "1 or more", "None")),
    ("check_val_every_n_epoch", 1.0, TypeError, ("check_val_every_n_epoch=1.0", "a float", "1 or more")),
    ("num_sanity_val_steps", -2, ValueError, ("num_sanity_val_steps=-2", "out of range", COUNT)),
    ("log_every_n_steps", -1, ValueError, ("log_every_n_steps=-1", "out of range", COUNT)),
    ("log_every_n_steps", 0.5, TypeError, ("log_every_n_steps=0.5", "a float", COUNT)),
    ("accumulate_grad_batches", 0, ValueError, ("accumulate_grad_batches=0", "out of range", "1 or more")),
    (
        "accumulate_grad_batches",
        {0: 2},
        TypeError,
        ("accumulate_grad_batches={0: 2}", "a dict", "1 or more", "GradientAccumulationScheduler"),
    ),
    ("gradient_clip_val", -1.0, ValueError, ("gradient_clip_val=-1.0", "must be a positive number", "or None")),
    ("gradient_clip_val", float("nan"), ValueError, ("gradient_clip_val=nan", "must be a positive number", "or None")),
    ("gradient_clip_val", "1", ValueError, ("gradient_clip_val='1'", "must be a positive number", "or None")),
    ("gradient_clip_algorithm", "l2", ValueError, ("gradient_clip_algorithm 'l2'", "Choose 'norm' or 'value'")),
    ("deterministic", "warning", ValueError, ("deterministic", "'warning'", "Did you mean 'warn'?", "True or False")),
    ("deterministic", 1.0, ValueError, ("deterministic", "1.0", "True or False")),
    *[
        (name, "no", TypeError, (f"{name}='no'", "a str", SWITCH))
        for name in (
            "enable_checkpointing",
            "enable_progress_bar",
            "enable_model_summary",
            "enable_autolog_hparams",
            "benchmark",
            "inference_mode",
            "use_distributed_sampler",
            "detect_anomaly",
            "barebones",
            "sync_batchnorm",
        )
    ],
    (
        "enable_checkpointing",
        ModelCheckpoint(),
        TypeError,
        ("enable_checkpointing=", "a ModelCheckpoint", SWITCH, "callbacks=["),
    ),
    ("inference_mode", None, TypeError, ("inference_mode=None", "a NoneType", SWITCH)),
    ("profiler", "simpel", ValueError, ("Unknown profiler 'simpel'", "Did you mean 'simple'?", "or pass a Profiler")),
    ("profiler", True, TypeError, ("profiler=True", "a bool", "'simple'", "or a Profiler")),
    ("plugins", "16", TypeError, ("plugins=...", "a str", "Pass a Precision")),
    ("reload_dataloaders_every_n_epochs", -1, ValueError, ("reload_dataloaders_every_n_epochs=-1", COUNT)),
    ("default_root_dir", 5, TypeError, ("default_root_dir=5", "an int", "Pass the path of a folder")),
    ("default_root_dir", "", ValueError, ("default_root_dir=''", "Pass the path of a folder")),
    (
        "default_root_dir",
        "s4://bucket/runs",
        ValueError,
        ("'s4://bucket/runs'", "Unknown protocol 's4'", "pass a local path"),
    ),
    ("default_root_dir", __file__, ValueError, (repr(__file__), "is a file", "Pass the path of a folder")),
    ("compile", 3, TypeError, ("compile=3", "an int", "Pass True, 'step'", "or a dict")),
    ("compile", "stepp", ValueError, ("compile", "'stepp'", "Did you mean 'step'?", "'graphs'")),
    ("compile", {"scope": "all"}, ValueError, ("compile", "'all'", "'networks', 'step' or 'graphs'")),
    ("compile", {"scope": "step", "fullgraph": False}, ValueError, ("fullgraph", "one graph", "Leave")),
    ("compile", {"scope": "step", "mode": "reduce-overhead"}, ValueError, ("CUDA graphs", "compile='graphs'")),
    ("compile", {"scope": "graphs", "backend": "eager"}, ValueError, ("backend='eager'", "Pass 'inductor'")),
    ("compile", {"scope": "graphs", "options": {}}, ValueError, ("options={}", "Leave out options")),
    ("compile", {"mod": "default"}, ValueError, ("torch.compile", "'mod'", "Did you mean 'mode'?", "Choose")),
    ("compile", {"model": 1}, ValueError, ("torch.compile", "'model'", "Choose")),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "parts"), VALUES, ids=[f"{name}={value!r:.24}" for name, value, _, _ in VALUES]
)
def test_a_value_that_cannot_work_is_refused_when_the_trainer_is_made(
    name: str, value: Any, error: type[Exception], parts: tuple[str, ...]
) -> None:
    refused(lambda: Trainer(**{"accelerator": "cpu", name: value}), error, *parts)


def test_every_argument_of_the_trainer_is_checked() -> None:
    assert {name for name, *_ in VALUES} == set(inspect.signature(Trainer).parameters)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("max_epoch", ("max_epoch", "Did you mean 'max_epochs'?", "help(Trainer)")),
        ("gpus", ("gpus", "accelerator='gpu', devices=...")),
        ("resume_from_checkpoint", ("resume_from_checkpoint", "Trainer.fit(ckpt_path=...)")),
        ("model_registry", ("model_registry", "ckpt_path")),
        ("zebra", ("zebra", "help(Trainer)")),
    ],
)
def test_an_unknown_argument_of_the_trainer_is_named_with_the_nearest(name: str, parts: tuple[str, ...]) -> None:
    refused(lambda: Trainer(**{name: 1}), TypeError, *parts)


def test_a_subclass_of_the_trainer_may_take_arguments_of_its_own() -> None:
    class Mine(Trainer):
        def __init__(self, budget: int, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.budget = budget

    assert Mine(3, accelerator="cpu", max_epochs=2).budget == 3
    assert copy.copy(Mine(budget=4, accelerator="cpu")).budget == 4
    refused(lambda: Mine(3, max_epoch=2), TypeError, "max_epoch", "Did you mean 'max_epochs'?")


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=numpy.int64(3),
        limit_train_batches=numpy.int32(2),
        val_check_interval=numpy.int64(2),
    )
    assert (type(trainer.max_epochs), trainer.max_epochs) == (int, 3)
    assert (type(trainer.limit_train_batches), trainer.limit_train_batches) == (int, 2)
    assert (type(trainer.val_check_interval), trainer.val_check_interval) == (int, 2)


# ---- flags that contradict each other --------------------------------------------------------------------------------

BAR, SUMMARY, SAVE = RichProgressBar, ModelSummary, ModelCheckpoint
CONTRADICTIONS: list[tuple[Callable[[], dict[str, Any]], type[Exception], tuple[str, ...]]] = [
    *[
        (lambda a=a: {"barebones": True, **a}, ValueError, ("barebones=True", next(iter(a)), "contradict", "Leave"))
        for a in (
            {"logger": True},
            {"enable_checkpointing": True},
            {"enable_progress_bar": True},
            {"enable_model_summary": True},
            {"num_sanity_val_steps": 2},
            {"fast_dev_run": True},
            {"detect_anomaly": True},
            {"log_every_n_steps": 10},
        )
    ],
    *[
        (
            lambda kind=kind: {"barebones": True, "callbacks": kind()},
            ValueError,
            ("barebones=True", "contradicts", kind.__name__, "Leave out one of them"),
        )
        for kind in (BAR, SUMMARY, SAVE)
    ],
    *[
        (
            lambda flag=flag, kind=kind: {flag: False, "callbacks": [kind()]},
            ValueError,
            (f"{flag}=False", "contradicts", kind.__name__, "Leave out one of them"),
        )
        for flag, kind in (
            ("enable_progress_bar", BAR),
            ("enable_model_summary", SUMMARY),
            ("enable_checkpointing", SAVE),
        )
    ],
    (
        lambda: {"fast_dev_run": 3, "overfit_batches": 2},
        ValueError,
        ("overfit_batches=2", "fast_dev_run=3", "contradict", "Leave out one"),
    ),
    *[
        (
            lambda name=name: {"overfit_batches": 2, name: 3},
            ValueError,
            ("overfit_batches=2", f"{name}=3", "contradict", "Leave out one"),
        )
        for name in ("limit_train_batches", "limit_val_batches")
    ],
    *[
        (
            lambda value=value: {"deterministic": value, "benchmark": True},
            ValueError,
            (f"deterministic={value!r}", "benchmark=True", "contradict", "Leave out one"),
        )
        for value in (True, "warn")
    ],
    (
        lambda: {"min_epochs": 3, "max_epochs": 2},
        ValueError,
        ("min_epochs=3", "max_epochs=2", "contradict", "Raise max_epochs or lower min_epochs"),
    ),
    (
        lambda: {"min_steps": 30, "max_steps": 2},
        ValueError,
        ("min_steps=30", "max_steps=2", "contradict", "Raise max_steps or lower min_steps"),
    ),
    (
        lambda: {"gradient_clip_algorithm": "value"},
        ValueError,
        ("gradient_clip_algorithm='value'", "has no effect", "Pass gradient_clip_val too"),
    ),
    (
        lambda: {"check_val_every_n_epoch": None, "val_check_interval": 0.5},
        ValueError,
        ("val_check_interval=0.5", "is a fraction of an epoch", "check_val_every_n_epoch=None", "number of batches"),
    ),
    (
        lambda: {"max_time": "00:01:00:00", "callbacks": [Timer("00:02:00:00")]},
        ValueError,
        ("max_time='00:01:00:00'", "contradicts the Timer", "Leave out one of them"),
    ),
    (
        lambda: {"precision": "16-mixed", "plugins": TruePrecision("bf16-true")},
        ValueError,
        ("precision='16-mixed'", "TruePrecision", "Leave one out"),
    ),
    (
        lambda: {"precision": MixedPrecision(), "plugins": [TruePrecision("bf16-true")]},
        ValueError,
        ("Two precisions", "'bf16-mixed'", "'bf16-true'", "Leave one out"),
    ),
    (
        lambda: {"plugins": [MixedPrecision(), TruePrecision()]},
        ValueError,
        ("MixedPrecision", "TruePrecision", "only one Precision is allowed"),
    ),
    (
        lambda: {"strategy": SingleDevice("cpu", TruePrecision("bf16-true")), "precision": "64-true"},
        ValueError,
        ("precision='64-true'", "SingleDevice", "'bf16-true'", "Leave precision out"),
    ),
    (
        lambda: {"strategy": SingleDevice("cpu"), "devices": 2},
        ValueError,
        ("devices=2", "SingleDevice", "on cpu", "Leave devices out"),
    ),
    (
        lambda: {"strategy": SingleDevice("cpu"), "num_nodes": 2},
        ValueError,
        ("num_nodes=2", "SingleDevice", "Leave num_nodes out"),
    ),
    (
        lambda: {"strategy": "single_device", "devices": 2},
        ValueError,
        ("strategy='single_device'", "devices=2", "contradict", "Leave"),
    ),
    (
        lambda: {"strategy": "cpu", "devices": 2},
        ValueError,
        ("strategy='cpu'", "devices=2", "contradict", "Leave"),
    ),
    (
        lambda: {"callbacks": [*[Timer()] * 2]},
        ValueError,
        ("Timer", "twice", "Remove one"),
    ),
    (
        lambda: {"callbacks": [EarlyStopping("loss"), EarlyStopping("loss")]},
        ValueError,
        ("the same key", "EarlyStopping", "overwrite the other", "give one a different key with a subclass"),
    ),
]


@pytest.mark.parametrize(
    ("arguments", "error", "parts"), CONTRADICTIONS, ids=[" ".join(p[:2]) for *_, p in CONTRADICTIONS]
)
def test_flags_that_contradict_each_other_are_refused_when_the_trainer_is_made(
    arguments: Callable[[], dict[str, Any]], error: type[Exception], parts: tuple[str, ...]
) -> None:
    given = arguments()
    if "strategy" not in given:
        given["accelerator"] = "cpu"
    refused(lambda: Trainer(**given), error, *parts)


def test_a_strategy_for_the_cpu_contradicts_another_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    refused(
        lambda: Trainer(strategy="cpu", accelerator="gpu"),
        ValueError,
        "strategy='cpu' and accelerator='gpu'",
        "contradict",
        "Leave one out",
    )
    refused(
        lambda: Trainer(strategy=SingleDevice("cpu"), accelerator="gpu"),
        ValueError,
        "accelerator='gpu'",
        "contradicts strategy=SingleDevice",
        "on cpu",
        "Leave accelerator out",
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"strategy": SingleDevice("cpu"), "accelerator": "cpu", "devices": 1, "num_nodes": 1},
        {"strategy": SingleDevice("cpu", MixedPrecision()), "precision": "bf16-mixed"},
        {"overfit_batches": 2, "limit_val_batches": 0, "accelerator": "cpu"},
        {"barebones": True, "accelerator": "cpu", "enable_checkpointing": False, "logger": False},
        {"deterministic": False, "benchmark": True, "accelerator": "cpu"},
        {"fast_dev_run": True, "limit_train_batches": 5, "accelerator": "cpu"},
        {"min_epochs": 3, "max_epochs": -1, "accelerator": "cpu"},
        {"min_epochs": 3, "max_epochs": 2, "fast_dev_run": True, "accelerator": "cpu"},
    ],
    ids=lambda a: ", ".join(a),
)
def test_flags_that_agree_are_accepted(arguments: dict[str, Any]) -> None:
    assert Trainer(**arguments).strategy.device.type == "cpu"


# ---- the module and the data of an entry point -----------------------------------------------------------------------


@pytest.fixture
def trainer(quiet: dict[str, Any]) -> Trainer:
    return Trainer(**quiet, max_epochs=1)


class Data(DataModule):
    def train_dataloader(self) -> Any:
        return tiny_loader()


@pytest.mark.parametrize(
    ("module", "parts"),
    [
        (TinyModule, ("Trainer.fit() got the class TinyModule", "TrainingModule object", "Did you mean TinyModule()?")),
        (nn.Linear(1, 1), ("Trainer.fit() got a Linear", "TrainingModule object", "Make it an attribute")),
        (3, ("Trainer.fit() got an int", "needs a TrainingModule object")),
        (None, ("Trainer.fit() needs a module", "Pass it as the first argument")),
    ],
)
def test_what_is_no_module_is_refused(module: Any, parts: tuple[str, ...], trainer: Trainer) -> None:
    refused(lambda: trainer.fit(module, tiny_loader()), TypeError, *parts)


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_an_entry_point_without_any_module_asks_for_one(entry: str, trainer: Trainer) -> None:
    refused(lambda: getattr(trainer, entry)(), TypeError, f"Trainer.{entry}() needs a module", "first argument")


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [
        (
            {"train_dataloaders": Data(), "datamodule": Data()},
            ValueError,
            ("two DataModules", "Pass only one, as datamodule="),
        ),
        ({"train_dataloaders": Data(), "val_dataloaders": Data()}, ValueError, ("two DataModules", "Pass only one")),
        (
            {"train_dataloaders": tiny_loader(), "datamodule": Data()},
            ValueError,
            ("loaders and a DataModule", "not clear which", "Pass only one of them"),
        ),
        (
            {"train_dataloaders": Data(), "val_dataloaders": tiny_loader()},
            ValueError,
            ("loaders and a DataModule", "not clear which", "Pass only one of them"),
        ),
        ({"datamodule": tiny_loader()}, TypeError, ("datamodule=...", "a DataLoader", "Pass a DataModule object")),
        ({"datamodule": Data}, TypeError, ("datamodule=...", "a type", "Pass a DataModule object")),
        (
            {},
            TypeError,
            ("no data for training_step", "neither TinyModule nor a DataModule", "Pass a loader, or define"),
        ),
        ({"train_dataloaders": 5}, TypeError, ("5 (int)", "not an iterable of batches", "Pass a DataLoader")),
        ({"train_dataloaders": tiny_loader(), "ckpt_path": 5}, TypeError, ("ckpt_path=5", "an int", "Pass the path")),
    ],
)
def test_data_that_cannot_be_used_are_refused(
    arguments: dict[str, Any], error: type[Exception], parts: tuple[str, ...], trainer: Trainer
) -> None:
    refused(lambda: trainer.fit(TinyModule(), **arguments), error, *parts)


@pytest.mark.parametrize(
    ("entry", "step", "hook"),
    [("validate", "validation_step", "val_dataloader"), ("test", "test_step", "test_dataloader")],
)
def test_an_evaluation_without_its_step_or_its_data_says_what_to_define(
    entry: str, step: str, hook: str, trainer: Trainer
) -> None:
    class Bare(TinyModule):
        validation_step = test_step = None  # type: ignore[assignment]

    run = getattr(trainer, entry)
    refused(
        lambda: run(Bare(), tiny_loader()), NotImplementedError, f"Bare has no {step}", f"Define {step}(self, batch"
    )
    refused(lambda: run(TinyModule()), TypeError, f"no data for {step}", f"defines {hook}()", "Pass a loader")


def test_an_entry_point_called_inside_a_run_is_refused(quiet: dict[str, Any]) -> None:
    class Nested(TinyModule):
        def on_train_epoch_end(self) -> None:
            self.trainer.validate(self, tiny_loader())

    trainer = Trainer(**quiet, max_epochs=1)
    refused(
        lambda: trainer.fit(Nested(), tiny_loader()),
        RuntimeError,
        "Trainer.validate() was called while fit is running",
        "one run at a time",
        "another Trainer",
    )
    assert trainer.interrupted
    trainer.fit(TinyModule(), tiny_loader())


def test_a_refused_module_leaves_the_callbacks_of_the_run_before_alone(quiet: dict[str, Any]) -> None:
    class Counts(Callback):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self.calls.append("setup")

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.calls.append("on_exception")

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self.calls.append("teardown")

    class NoStep(TinyModule):
        training_step = None  # type: ignore[assignment]

    counts = Counts()
    trainer = Trainer(**quiet, max_epochs=1, callbacks=counts)
    trainer.fit(TinyModule(), tiny_loader())
    for wrong in (3, NoStep()):
        with pytest.raises((TypeError, NotImplementedError)):
            trainer.fit(wrong, tiny_loader())  # type: ignore[arg-type]
    assert counts.calls == ["setup", "teardown"]


def test_arguments_of_methods_that_do_nothing_are_refused(trainer: Trainer) -> None:
    trainer.validate(TinyModule(), tiny_loader())
    refused(
        lambda: trainer.save_checkpoint("a.ckpt", storage_options={"x": 1}),
        ValueError,
        "storage_options={'x': 1}",
        "fsspec's settings",
        "Leave the argument out",
    )


def test_saving_before_any_run_says_what_to_call(trainer: Trainer) -> None:
    refused(
        lambda: trainer.save_checkpoint("a.ckpt"),
        AttributeError,
        "'a.ckpt'",
        "before the Trainer had a module to save",
        "Call fit",
    )


def test_a_module_given_after_its_loaders_is_told_the_order(trainer: Trainer) -> None:
    refused(
        lambda: trainer.fit(tiny_loader(), TinyModule()),  # type: ignore[arg-type]
        TypeError,
        "Trainer.fit() got a DataLoader as its module",
        "Pass the module first, then the loaders",
    )


def test_a_module_that_did_not_call_its_base_is_told_to(trainer: Trainer) -> None:
    class Hasty(TinyModule):
        def __init__(self) -> None:
            self.__dict__["lr"] = 0.1

    refused(
        lambda: trainer.fit(Hasty(), tiny_loader()),
        TypeError,
        "Hasty.__init__",
        "super().__init__()",
        "Call super().__init__() first",
    )


def test_a_fit_without_training_data_is_refused_before_the_sanity_check(trainer: Trainer) -> None:
    module = TinyModule()
    module.validation_step = lambda batch, batch_idx: pytest.fail("too late")  # type: ignore[method-assign]
    refused(
        lambda: trainer.fit(module, val_dataloaders=tiny_loader()), TypeError, "no data for training_step", "Pass a"
    )


# ---- the steps and what they return ----------------------------------------------------------------------------------


class Bare(TrainingModule):
    """A module with the one layer and an optimizer, whose step is a test's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def with_method(name: str, method: Any, base: type[TrainingModule] = Bare) -> TrainingModule:
    return type("Mine", (base,), {name: method})()


def test_a_module_without_training_step_is_refused_before_anything_runs(trainer: Trainer) -> None:
    def prepare_data(self: Any) -> None:
        raise AssertionError("too late")

    module = type("Mine", (Bare,), {"training_step": None, "prepare_data": prepare_data})()
    refused(
        lambda: trainer.fit(module, tiny_loader()),
        NotImplementedError,
        "Mine has no training_step",
        "nothing to run",
        "Define training_step(self, batch, batch_idx)",
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("trainig_step", "training_step"),
        ("configure_optimizer", "configure_optimizers"),
        ("train_step", "training_step"),
    ],
)
def test_a_missing_method_points_to_the_misspelled_one(written: str, meant: str, trainer: Trainer) -> None:
    method = vars(Bare)[meant]
    module = type("Mine", (Bare,), {meant: None, written: method})()
    refused(
        lambda: trainer.fit(module, tiny_loader()),
        NotImplementedError,
        f"Mine has no {meant}",
        f"Did you mean {written}",
        f"Rename it to {meant}",
    )


@pytest.mark.parametrize(
    ("step", "parts"),
    [
        (lambda self: None, ("training_step takes ()", "(batch, batch_idx)", "Define it as training_step(self, batch")),
        (lambda self, a, b, c: None, ("training_step takes (a, b, c)", "(batch, batch_idx)", "Define it as")),
        (
            lambda self, batch, *, scale: None,
            ("training_step takes (batch, *, scale)", "(batch, batch_idx)", "Define it as"),
        ),
        (3, ("training_step", "3", "not callable", "Define training_step(self, batch, batch_idx)")),
    ],
)
def test_a_step_that_takes_other_arguments_is_refused_before_anything_runs(
    step: Any, parts: tuple[str, ...], trainer: Trainer
) -> None:
    def setup(self: Any, stage: str) -> None:
        raise AssertionError("too late")

    module = type("Mine", (Bare,), {"training_step": step, "setup": setup})()
    refused(lambda: trainer.fit(module, tiny_loader()), TypeError, "Mine.", *parts)


def test_a_prediction_without_step_and_forward_is_refused(trainer: Trainer) -> None:
    refused(
        lambda: trainer.predict(Bare(), tiny_loader()),
        NotImplementedError,
        "Bare has neither predict_step nor forward",
        "nothing to run",
        "Define predict_step(self, batch, batch_idx)",
    )


def test_an_async_step_is_refused(trainer: Trainer) -> None:
    async def step(self: Any, batch: Any, batch_idx: int) -> None: ...

    refused(
        lambda: trainer.fit(with_method("training_step", step), tiny_loader()),
        TypeError,
        "Mine.training_step is a coroutine",
        "never run",
        "Define it with a plain def",
    )


@pytest.mark.parametrize("name", ["validation_step", "test_step", "predict_step"])
def test_an_evaluation_step_that_takes_other_arguments_is_refused(name: str, trainer: Trainer) -> None:
    entry = {"validation_step": trainer.validate, "test_step": trainer.test, "predict_step": trainer.predict}[name]
    module = with_method(name, lambda self, a, b, c, d: None)
    refused(
        lambda: entry(module, tiny_loader()), TypeError, f"Mine.{name} takes (a, b, c, d)", f"Define it as {name}(self"
    )
    module = with_method(name, lambda self, batch, batch_idx: None)
    refused(
        lambda: entry(module, [tiny_loader(), tiny_loader()]),
        RuntimeError,
        f"Mine.{name} takes (batch, batch_idx)",
        "several loaders",
        "dataloader_idx",
    )


def test_a_validation_step_that_takes_other_arguments_is_refused_before_training(trainer: Trainer) -> None:
    module = with_method("validation_step", lambda self: None, TinyModule)
    module.training_step = lambda batch, batch_idx: pytest.fail("too late")  # type: ignore[method-assign]
    refused(
        lambda: trainer.fit(module, tiny_loader(), tiny_loader()), TypeError, "Mine.validation_step takes ()", "Define"
    )


@pytest.mark.parametrize(
    ("output", "error", "parts"),
    [
        (0.5, TypeError, ("float (0.5)", "nothing to run backward on", "Return the loss tensor")),
        (
            {"logits": 1},
            TypeError,
            ("a dict without 'loss' (keys: 'logits')", "nothing to run backward", "under 'loss'"),
        ),
        (
            torch.ones(2, requires_grad=True),
            ValueError,
            ("shape (2,)", "not a scalar", "Return its mean: loss.mean()"),
        ),
        (torch.ones(()), RuntimeError, ("does not require gradients", "without .item()", "or return None to skip")),
    ],
)
@pytest.mark.parametrize("overridden", [False, True], ids=["straight", "closure"])
def test_what_is_no_loss_is_named_with_what_to_return(
    overridden: bool, output: Any, error: type[Exception], parts: tuple[str, ...], trainer: Trainer
) -> None:
    module = with_method("training_step", lambda self, batch, batch_idx: output)
    if overridden:
        module.optimizer_step = lambda e, b, optimizer, closure: optimizer.step(closure)  # type: ignore[method-assign]
    refused(lambda: trainer.fit(module, tiny_loader()), error, "Mine.training_step returned", *parts)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_under_detect_anomaly(value: float, quiet: dict[str, Any]) -> None:
    module = with_method("training_step", lambda self, batch, idx: {"loss": self.layer(batch[0]).mean() * value})
    before = copy.deepcopy(module.state_dict())
    trainer = Trainer(**quiet, max_epochs=1, detect_anomaly=True)
    refused(
        lambda: trainer.fit(module, tiny_loader()),
        RuntimeError,
        "Mine.training_step returned a loss of",
        "nan" if value != value else "inf",
        "detect_anomaly=True",
        "Check the batch and the learning rate",
    )
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


# ---- optimizers and schedulers ---------------------------------------------------------------------------------------


def test_a_module_without_optimizers_is_refused_with_an_example(trainer: Trainer) -> None:
    refused(
        lambda: trainer.fit(with_method("configure_optimizers", None), tiny_loader()),
        NotImplementedError,
        "Mine has no configure_optimizers",
        "cannot change its weights",
        "torch.optim.AdamW(self.parameters(), lr=1e-3)",
    )


def test_configure_optimizers_may_return_none_and_is_warned_about(trainer: Trainer) -> None:
    module = with_method("configure_optimizers", lambda self: None)
    with pytest.warns(UserWarning, match=r"Mine\.configure_optimizers\(\) returned None, .*\. Return an optimizer"):
        trainer.fit(module, tiny_loader())
    assert trainer.global_step == 4


def plateau(self: Any, **settings: Any) -> Any:
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **settings}}


def test_a_plateau_scheduler_without_monitor_is_refused(trainer: Trainer) -> None:
    refused(
        lambda: trainer.fit(with_method("configure_optimizers", plateau), tiny_loader()),
        ValueError,
        "Mine.configure_optimizers() returned a ReduceLROnPlateau without 'monitor'",
        "no value to react to",
        "{'optimizer': ..., 'lr_scheduler': {'scheduler': ..., 'monitor': 'val_loss'}}",
    )


def test_a_plateau_schedulers_monitor_that_was_never_logged_lists_what_was(trainer: Trainer) -> None:
    module = with_method("configure_optimizers", lambda self: plateau(self, monitor="val_los"), TinyModule)
    refused(
        lambda: trainer.fit(module, tiny_loader(), tiny_loader()),
        RuntimeError,
        "ReduceLROnPlateau monitors 'val_los'",
        "not been logged",
        "'train_loss' and 'val_loss'",
        "choose another 'monitor'",
    )


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint])
def test_a_callbacks_monitor_that_was_never_logged_lists_what_was(kind: Any, quiet: dict[str, Any]) -> None:
    quiet.pop("enable_checkpointing")
    trainer = Trainer(**quiet, max_epochs=1, callbacks=kind(monitor="val_los"))
    refused(
        lambda: trainer.fit(TinyModule(), tiny_loader(), tiny_loader()),
        ValueError,
        f"{kind.__name__}(monitor='val_los')",
        "was not logged",
        "Did you mean 'val_loss'?",
        "'train_loss' and 'val_loss'",
        "Call self.log('val_los', ...), or monitor a metric that is logged",
    )


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            {"accumulate_grad_batches": 2},
            ("accumulate_grad_batches=2", "no effect", "Mine", "Leave out accumulate_grad_batches"),
        ),
        ({"gradient_clip_val": 1.0}, ("gradient_clip_val=1.0", "no effect", "Mine", "self.clip_gradients")),
    ],
)
def test_what_manual_optimization_does_itself_is_refused_as_an_argument(
    arguments: dict[str, Any], parts: tuple[str, ...], quiet: dict[str, Any]
) -> None:
    module = with_method("setup", lambda self, stage: pytest.fail("too late"))
    module.automatic_optimization = False
    trainer = Trainer(**quiet, max_epochs=1, **arguments)
    refused(lambda: trainer.fit(module, tiny_loader()), ValueError, *parts)


def test_manual_optimization_contradicts_an_accumulation_scheduler(quiet: dict[str, Any]) -> None:
    module = Bare()
    module.automatic_optimization = False
    trainer = Trainer(**quiet, max_epochs=1, callbacks=GradientAccumulationScheduler({1: 2}))
    refused(
        lambda: trainer.fit(module, tiny_loader()),
        RuntimeError,
        "Bare.automatic_optimization is False",
        "GradientAccumulationScheduler({0: 1, 1: 2}) would have no effect",
        "Remove the callback",
    )


def test_two_ways_to_accumulate_contradict_each_other(quiet: dict[str, Any]) -> None:
    trainer = Trainer(**quiet, max_epochs=1, accumulate_grad_batches=2, callbacks=GradientAccumulationScheduler({1: 2}))
    refused(
        lambda: trainer.fit(Bare(), tiny_loader()),
        ValueError,
        "accumulate_grad_batches=2",
        "GradientAccumulationScheduler",
        "Remove one of them",
    )


def test_an_iterator_step_contradicts_accumulation(quiet: dict[str, Any]) -> None:
    module = with_method("training_step", lambda self, dataloader_iter: None)
    trainer = Trainer(**quiet, max_epochs=1, accumulate_grad_batches=2)
    refused(
        lambda: trainer.fit(module, tiny_loader()),
        ValueError,
        "accumulate_grad_batches=2",
        "dataloader_iter",
        "does not see how many batches",
        "Use training_step(batch, batch_idx)",
    )


def test_lbfgs_with_a_scaled_loss_is_refused_before_the_first_step(quiet: dict[str, Any]) -> None:
    module = with_method("configure_optimizers", lambda self: torch.optim.LBFGS(self.parameters()))
    module.training_step = lambda batch, batch_idx: pytest.fail("too late")  # type: ignore[method-assign]
    trainer = Trainer(**quiet, max_epochs=1, precision="16-mixed")
    refused(
        lambda: trainer.fit(module, tiny_loader()),
        ValueError,
        "'16-mixed' does not work with LBFGS",
        "several times",
        "Use 'bf16-mixed'",
    )


def test_an_optimizer_of_another_networks_parameters_is_warned_about(trainer: Trainer) -> None:
    other = nn.Linear(4, 1)
    module = with_method("configure_optimizers", lambda self: torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.warns(
        UserWarning, match=r"Mine\.configure_optimizers\(\).*do not belong to the module.*Build them from self\.param"
    ):
        trainer.fit(module, tiny_loader())


def test_two_optimizers_of_the_same_parameters_need_manual_optimization(trainer: Trainer) -> None:
    optimizers = lambda self: [torch.optim.SGD(self.parameters(), lr=0.1) for _ in "ab"]  # noqa: E731
    refused(
        lambda: trainer.fit(with_method("configure_optimizers", optimizers), tiny_loader()),
        ValueError,
        "Mine.configure_optimizers() returned SGD and SGD, and the parameter",
        "Give each parameter to one optimizer",
        "self.automatic_optimization = False",
    )


# ---- hooks -----------------------------------------------------------------------------------------------------------


class Early(Callback):
    """Fails if the run gets as far as ``setup``."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pytest.fail("too late")


def callback_with(**methods: Any) -> Callback:
    return type("Mine", (Callback,), methods)()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("on_train_batch_ends", "on_train_batch_end"),
        ("on_validation_epoch_ended", "on_validation_epoch_end"),
        ("on_expection", "on_exception"),
        ("on_save_checkpoints", "on_save_checkpoint"),
        ("on_epoch_end", "on_train_epoch_end"),
        ("on_batch_start", "on_train_batch_start"),
        ("on_keyboard_interrupt", "on_exception"),
    ],
)
@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_misspelled_hook_of_a_callback_is_refused_at_attach_time(
    where: str, written: str, meant: str, quiet: dict[str, Any]
) -> None:
    if where == "class":
        callback = callback_with(**{written: lambda self, *args: None})
    else:
        callback = callback_with()
        setattr(callback, written, lambda *args: None)
    trainer = Trainer(**quiet, callbacks=[Early(), callback])
    refused(
        lambda: trainer.fit(TinyModule(), tiny_loader()),
        TypeError,
        f"Mine.{written} is not a hook",
        "never be called",
        f"Did you mean {meant!r}?",
        "Rename it",
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("on_train_batch_ends", "on_train_batch_end"),
        ("on_before_batch_transfers", "on_before_batch_transfer"),
        ("on_validation_model_evals", "on_validation_model_eval"),
        ("on_loads_checkpoint", "on_load_checkpoint"),
        ("training_epoch_end", "on_train_epoch_end"),
        ("validation_epoch_end", "on_validation_epoch_end"),
        ("test_epoch_end", "on_test_epoch_end"),
        ("training_step_end", "on_train_batch_end"),
        ("validation_step_end", "on_validation_batch_end"),
        ("optimizer_steps", "optimizer_step"),
        ("configure_callback", "configure_callbacks"),
        ("val_dataloaders", "val_dataloader"),
        ("validation_steps", "validation_step"),
    ],
)
def test_a_misspelled_hook_of_a_module_is_refused_at_attach_time(written: str, meant: str, trainer: Trainer) -> None:
    module = type(
        "Mine",
        (Bare,),
        {written: lambda self, *args: None, "setup": lambda self, stage: pytest.fail("too late")},
    )()
    refused(
        lambda: trainer.fit(module, tiny_loader()),
        TypeError,
        f"Mine.{written} is not a hook",
        "never be called",
        f"Did you mean {meant!r}?",
        "Rename it",
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [("on_exeption", "on_exception"), ("val_dataloaders", "val_dataloader"), ("prepare_datas", "prepare_data")],
)
def test_a_misspelled_hook_of_a_data_module_is_refused_at_attach_time(
    written: str, meant: str, trainer: Trainer
) -> None:
    data = type("Mine", (Data,), {written: lambda self, *args: None})()
    refused(
        lambda: trainer.fit(TinyModule(), datamodule=data),
        TypeError,
        f"Mine.{written} is not a hook",
        f"{meant!r}",
        "Rename",
    )


class Builds(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.built: list[str] = []
        self.configure_models()

    def configure_models(self) -> None:
        self.built.append("base")

    def on_train_epoch_end(self) -> None:
        self.training_epoch_end()

    def training_epoch_end(self) -> None:
        self.built.append("epoch")


class BuildsMore(Builds):
    def configure_models(self) -> None:
        super().configure_models()
        self.built.append("own")


def test_a_method_that_the_class_itself_calls_is_no_misspelled_hook(quiet: dict[str, Any]) -> None:
    module = BuildsMore()
    Trainer(max_epochs=1, **quiet).fit(module, tiny_loader())
    assert module.built == ["base", "own", "epoch"]


def test_a_misspelled_hook_that_only_calls_its_base_is_refused(trainer: Trainer) -> None:
    class Base(TinyModule):
        def configure_models(self) -> None: ...

    class Mine(Base):
        def configure_models(self) -> None:
            super().configure_models()

    refused(lambda: trainer.fit(Mine(), tiny_loader()), TypeError, "Mine.configure_models is not a hook")


@pytest.mark.parametrize("name", ["on_my_own", "on_request", "once", "training_state", "configure_everything", "step"])
def test_a_method_that_is_like_no_hook_is_the_users_own(name: str, quiet: dict[str, Any]) -> None:
    module = with_method(name, lambda self: None)
    Trainer(**quiet, max_epochs=1, callbacks=callback_with(**{name: lambda self: None})).fit(module, tiny_loader())


@pytest.mark.parametrize(
    ("name", "hook", "parts"),
    [
        (
            "on_train_batch_end",
            lambda self, trainer: None,
            ("on_train_batch_end(trainer)", "(trainer, pl_module, outputs"),
        ),
        ("on_train_start", lambda self: None, ("on_train_start()", "(trainer, pl_module)")),
        ("on_exception", lambda self, error: None, ("on_exception(error)", "(trainer, pl_module, exception)")),
        ("setup", lambda self, trainer, pl_module: None, ("setup(trainer, pl_module)", "(trainer, pl_module, stage)")),
        ("state_dict", lambda self, x: None, ("state_dict(x)", "()")),
        ("load_state_dict", lambda self: None, ("load_state_dict()", "(state_dict)")),
        ("on_train_end", 3, ("on_train_end", "3", "not callable")),
    ],
)
def test_a_callbacks_hook_with_another_signature_is_refused_at_attach_time(
    name: str, hook: Any, parts: tuple[str, ...], quiet: dict[str, Any]
) -> None:
    trainer = Trainer(**quiet, callbacks=[Early(), callback_with(**{name: hook})])
    refused(lambda: trainer.fit(TinyModule(), tiny_loader()), TypeError, "Mine.", *parts, f"def {name}(self")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("on_train_batch_end", "(outputs, batch, batch_idx)"),
        ("on_validation_batch_start", "(batch, batch_idx)"),
        ("setup", "(stage)"),
        ("on_exception", "(exception)"),
        ("transfer_batch_to_device", "(batch, device, dataloader_idx)"),
        ("on_after_batch_transfer", "(batch, dataloader_idx)"),
        ("optimizer_step", "(epoch, batch_idx, optimizer, optimizer_closure)"),
        ("optimizer_zero_grad", "(epoch, batch_idx, optimizer)"),
        ("lr_scheduler_step", "(scheduler, metric)"),
        ("configure_gradient_clipping", "(optimizer, gradient_clip_val, gradient_clip_algorithm)"),
        ("backward", "(loss)"),
        ("on_save_checkpoint", "(checkpoint)"),
    ],
)
def test_a_modules_hook_with_another_signature_is_refused_at_attach_time(
    name: str, wanted: str, trainer: Trainer
) -> None:
    module = type(
        "Mine",
        (TinyModule,),
        {"prepare_data": lambda self: pytest.fail("too late"), name: lambda self, a, b, c, d, e: None},
    )()
    refused(
        lambda: trainer.fit(module, tiny_loader()),
        TypeError,
        f"Mine.{name}(a, b, c, d, e) cannot be called with {wanted}",
        f"Write it as def {name}(self, ",
    )


async def coroutine(self: Any, *args: Any) -> None: ...


def generator(self: Any, *args: Any) -> Any:
    yield 1


@pytest.mark.parametrize(
    ("hook", "kind"), [(coroutine, "a coroutine (async def)"), (generator, "a generator (it yields)")]
)
def test_a_hook_whose_body_would_never_run_is_refused(hook: Any, kind: str, quiet: dict[str, Any]) -> None:
    parts = (f"Mine.on_train_start is {kind}", "never run", "Write it as def on_train_start(self")
    module = with_method("on_train_start", hook, TinyModule)
    refused(lambda: Trainer(**quiet, max_epochs=1).fit(module, tiny_loader()), TypeError, *parts)
    trainer = Trainer(**quiet, max_epochs=1, callbacks=callback_with(on_train_start=hook))
    refused(lambda: trainer.fit(TinyModule(), tiny_loader()), TypeError, *parts)


def test_a_loader_hook_may_be_a_generator(quiet: dict[str, Any]) -> None:
    class Yields(TinyModule):
        def train_dataloader(self) -> Any:
            yield from tiny_loader()

    trainer = Trainer(**quiet, max_epochs=1)
    trainer.fit(Yields())
    assert trainer.global_step == 4


def test_a_hook_with_other_names_defaults_or_stars_is_accepted(quiet: dict[str, Any]) -> None:
    class Free(TinyModule):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)

        def on_train_batch_end(self, *args: Any) -> None: ...

        def configure_gradient_clipping(self, optimizer: Any, *rest: Any, extra: int = 1) -> None: ...

        def on_before_batch_transfer(self, b: Any, i: int, more: int = 0) -> Any:
            return b

    callback = callback_with(on_train_batch_start=lambda self, t, m, b, i, *more: None, on_train_end=lambda *all_: None)
    Trainer(**quiet, max_epochs=1, callbacks=callback).fit(Free(), tiny_loader())


def test_two_callbacks_with_one_state_key_are_refused(quiet: dict[str, Any]) -> None:
    class Keeps(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

    parts = ("the same key 'test_two_callbacks", "(Keeps and Keeps)", "overwrite", "Remove one")
    said = refused(lambda: Trainer(**quiet, callbacks=[Keeps(), Keeps()]), ValueError, *parts)
    line = said.partition("with a subclass: ")[2]
    named = {"Keeps": Keeps}
    exec(line, named)
    Trainer(**quiet, callbacks=[Keeps(), named["SecondKeeps"]()])
    quiet.pop("enable_checkpointing")
    refused(
        lambda: Trainer(**quiet, callbacks=[ModelCheckpoint(), ModelCheckpoint()]),
        ValueError,
        "the same key",
        "overwrite",
    )


def test_what_a_module_brings_may_not_contradict_the_trainer(quiet: dict[str, Any]) -> None:
    brings = with_method("configure_callbacks", lambda self: [ModelCheckpoint()])
    refused(
        lambda: Trainer(**quiet).fit(brings, tiny_loader()),
        ValueError,
        "enable_checkpointing=False",
        "contradicts",
        "ModelCheckpoint",
        "Leave out one of them",
    )
    wrong = with_method("configure_callbacks", lambda self: ["bar"])
    refused(
        lambda: Trainer(**quiet).fit(wrong, tiny_loader()),
        TypeError,
        "Mine.configure_callbacks() returned 'bar'",
        "not a Callback",
        "Return a list of Callback objects",
    )


# ---- logging ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "error", "parts"),
    [
        ("high", TypeError, ("self.log('x')", "'high' (str)", "a number", "self.logger.experiment")),
        (torch.ones(3), ValueError, ("self.log('x')", "shape (3,)", "a single number is needed", "Log value.mean()")),
        ([1.0], TypeError, ("self.log('x')", "[1.0] (list)", "a number", "self.log_dict")),
        (None, TypeError, ("self.log('x')", "None (NoneType)", "a number")),
    ],
)
@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_logging_what_is_no_number_is_refused(
    step: str, value: Any, error: type[Exception], parts: tuple[str, ...], trainer: Trainer
) -> None:
    module = with_method(step, lambda self, batch, batch_idx: self.log("x", value), TinyModule)
    refused(lambda: trainer.fit(module, tiny_loader(), tiny_loader()), error, *parts)


@pytest.mark.parametrize(
    ("hook", "entry", "instead"),
    [
        ("setup", "fit", "training_step or on_train_epoch_end"),
        ("configure_optimizers", "fit", "training_step or on_train_epoch_end"),
        ("on_fit_start", "fit", "training_step or on_train_epoch_end"),
        ("on_before_batch_transfer", "fit", "the step that gets the batch"),
        ("lr_scheduler_step", "fit", "LearningRateMonitor"),
        ("on_train_end", "fit", "on_train_epoch_end"),
        ("on_fit_end", "fit", "on_train_epoch_end"),
        ("on_validation_end", "validate", "on_validation_epoch_end"),
        ("on_test_end", "test", "on_test_epoch_end"),
        ("predict_step", "predict", "validation_step or test_step"),
        ("on_predict_epoch_end", "predict", "validation_step or test_step"),
    ],
)
def test_logging_where_no_metrics_are_kept_says_where_to_log(
    hook: str, entry: str, instead: str, trainer: Trainer
) -> None:
    def scheduled(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    methods = {"configure_optimizers": scheduled, hook: lambda self, *args: self.log("x", 1.0)}
    module = type("Mine", (TinyModule,), methods)()
    refused(
        lambda: getattr(trainer, entry)(module, tiny_loader()),
        RuntimeError,
        "self.log('x') was called in",
        "metrics cannot be logged",
        "Log it in",
        instead,
    )


def test_logging_a_step_value_where_there_is_no_step_is_refused(trainer: Trainer) -> None:
    module = with_method("on_train_epoch_end", lambda self: self.log("x", 1.0, on_step=True), TinyModule)
    refused(
        lambda: trainer.fit(module, tiny_loader()),
        ValueError,
        "self.log('x', on_step=True)",
        "once per epoch",
        "Leave out on_step",
    )


# ---- loaders ---------------------------------------------------------------------------------------------------------


class Says:
    """A loader that yields other than it says."""

    def __init__(self, says: int, gives: int) -> None:
        self.says, self.gives = says, gives

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Any:
        return iter([torch.ones(2, 4)] * self.gives)


class OfTensor(Bare):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def test_step(self, batch: Any, batch_idx: int) -> None: ...

    def predict_step(self, batch: Any, batch_idx: int) -> None: ...


def test_an_empty_training_loader_is_refused_before_training(trainer: Trainer) -> None:
    empty = DataLoader(torch.utils.data.TensorDataset(torch.ones(0, 4)))
    module = with_method("on_train_start", lambda self: pytest.fail("too late"))
    refused(
        lambda: trainer.fit(module, empty), ValueError, "train_dataloader is empty", "is 0", "limit_train_batches=0"
    )


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_an_empty_loader_of_an_evaluation_is_refused(entry: str, trainer: Trainer) -> None:
    hook = {"validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}[entry]
    refused(
        lambda: getattr(trainer, entry)(OfTensor(), Says(0, 0)),
        ValueError,
        hook,
        "is empty",
        "is 0",
        "Check the dataset",
    )


def test_a_training_loader_that_ends_before_its_length_is_caught(trainer: Trainer) -> None:
    refused(
        lambda: trainer.fit(OfTensor(), Says(5, 3)),
        RuntimeError,
        "train_dataloader has length 5",
        "yielded only 3",
        "rely on the length",
        "correct __len__, or remove it",
    )


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_an_evaluation_loader_that_ends_before_its_length_is_caught(entry: str, trainer: Trainer) -> None:
    refused(
        lambda: getattr(trainer, entry)(OfTensor(), Says(5, 3)),
        RuntimeError,
        "dataloader has length 5",
        "yielded 3",
        "Correct __len__, or remove it",
    )


def test_reloading_loaders_that_were_given_is_told(quiet: dict[str, Any]) -> None:
    trainer = Trainer(**quiet, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    with pytest.warns(UserWarning, match=r"reload_dataloaders_every_n_epochs=1.*passed to fit.*train_dataloader\(\)"):
        trainer.fit(OfTensor(), Says(2, 2))


def test_a_limit_that_leaves_no_batch_is_refused_with_the_numbers(quiet: dict[str, Any]) -> None:
    trainer = Trainer(**quiet, max_epochs=1, limit_train_batches=0.1)
    refused(lambda: trainer.fit(OfTensor(), Says(5, 5)), ValueError, "limit", "0.1", "5", "train_dataloader")


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(trainer: Trainer, tmp_path: Path) -> Path:
    trainer.fit(TinyModule(), tiny_loader())
    trainer.save_checkpoint(tmp_path / "good.ckpt")
    return tmp_path / "good.ckpt"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def make_newer(path: Path) -> None:
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["paceline"]["format"] = 99
    torch.save(checkpoint, path)


def make_other(path: Path) -> None:
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["state_dict"]
    state["head.weight"] = state.pop("layer.bias")
    state["layer.weight"] = torch.ones(3, 3)
    torch.save(checkpoint, path)


def make_something_else(path: Path) -> None:
    torch.save({"weights": torch.ones(1)}, path)


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (cut, ("good.ckpt", "damaged", "Use a different checkpoint")),
        (make_newer, ("good.ckpt", "99", "reads only formats up to 1", "Upgrade paceline")),
        (
            make_other,
            (
                "does not match TinyModule",
                "1 missing from the checkpoint (layer.bias)",
                "1 unexpected (head.weight)",
                "layer.weight (3, 3) in the file, (1, 4) in the module",
            ),
        ),
        (make_something_else, ("good.ckpt", "state_dict", "'weights'")),
        (Path.unlink, ("good.ckpt", "does not exist", "contains no files")),
    ],
    ids=["truncated", "newer", "of another model", "no checkpoint", "missing"],
)
@pytest.mark.parametrize("entry", ["fit", "validate"])
def test_a_checkpoint_that_cannot_be_used_says_why(
    entry: str, spoil: Callable[[Path], Any], parts: tuple[str, ...], saved: Path, quiet: dict[str, Any]
) -> None:
    spoil(saved)
    trainer = Trainer(**quiet, max_epochs=2)
    with pytest.raises((OSError, ValueError, RuntimeError)) as caught:
        getattr(trainer, entry)(TinyModule(), tiny_loader(), ckpt_path=saved)
    for part in parts:
        assert part in str(caught.value), (part, str(caught.value))


@pytest.mark.parametrize("entry", ["fit", "validate", "test", "predict"])
def test_best_with_nothing_saved_is_refused_before_anything_runs(entry: str, trainer: Trainer) -> None:
    module = with_method("setup", lambda self, stage: pytest.fail("too late"), TinyModule)
    refused(
        lambda: getattr(trainer, entry)(module, tiny_loader(), ckpt_path="best"),
        ValueError,
        f"Trainer.{entry}(ckpt_path='best')",
        "found no best checkpoint",
        "Train with a ModelCheckpoint",
    )


def test_a_disk_that_is_full_leaves_the_old_file_and_names_path_and_bytes(saved: Path, trainer: Trainer) -> None:
    before = saved.read_bytes()
    trainer.fit(TinyModule(), tiny_loader())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=re.escape(str(saved))) as caught:
            trainer.save_checkpoint(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.search(r"[\d.,]+ ?(bytes|[KMG]i?B)", str(caught.value)), caught.value
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.glob("*.ckpt*")] == ["good.ckpt"]


def test_a_module_that_ran_can_be_pickled_for_an_error_report(trainer: Trainer) -> None:
    module = TinyModule()
    trainer.fit(module, tiny_loader())
    assert torch.equal(pickle.loads(pickle.dumps(module)).layer.weight, module.layer.weight)


def test_a_disabled_scaler_of_ones_own_is_the_users_choice(quiet: dict[str, Any]) -> None:
    precision = MixedPrecision("16-mixed", scaler=GradScaler("cpu", enabled=False))
    trainer = Trainer(**quiet, max_epochs=1, precision=precision)
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.global_step == 4

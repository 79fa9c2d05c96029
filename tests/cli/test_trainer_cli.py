"""A command line made from classes: what its words and files make, what it saves, and how checkpoints are loaded."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pickle
import sys
import types
import typing
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rank_processes import RanksError, ranks
from tiny import TinyModule, tiny_loader
from torch import nn

import paceline.strategies as strategies
from paceline import DataModule, Trainer, TrainingModule
from paceline.callbacks import Callback, EarlyStopping, LearningRateMonitor, Timer
from paceline.checkpoint import single_file
from paceline.checkpoint.instantiate import MARK
from paceline.cli import (
    ArgumentParser,
    LRSchedulerCallable,
    OptimizerCallable,
    ReduceLROnPlateau,
    SaveConfigCallback,
    TrainerCLI,
    instantiate_class,
)
from paceline.loggers import CSVLogger, TensorBoardLogger
from paceline.messages import PacelineWarning
from paceline.processes.seed import SEED_VARIABLE

pytestmark = pytest.mark.usefixtures("only_torchs_optimizers")
SHORT: dict[str, Any] = {
    "max_epochs": 1,
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
QUIET: dict[str, Any] = SHORT | {"logger": False, "enable_checkpointing": False}


class CommandedNet(TinyModule):
    def __init__(
        self,
        width: int = 4,
        lr: float = 0.1,
        activation: nn.Module | None = None,
        optimizer: OptimizerCallable = torch.optim.SGD,
        scheduler: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
    ) -> None:
        super().__init__(lr)
        self.save_hyperparameters()
        self.width, self.activation, self.optimizer, self.scheduler = width, activation, optimizer, scheduler


class WiderNet(CommandedNet):
    def __init__(self, extra: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.extra = extra


class Outer(TinyModule):
    def __init__(self, inner: TrainingModule, width: int = 9) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.inner = inner


class CommandedData(DataModule):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size, self.features = batch_size, 6

    def train_dataloader(self) -> Any:
        return tiny_loader(2, self.batch_size)

    def val_dataloader(self) -> Any:
        return tiny_loader(1, self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class Linked(TrainerCLI):
    def add_arguments_to_parser(self, parser: ArgumentParser) -> None:
        parser.link_arguments("data.batch_size", "model.lr", compute_fn=lambda size: size / 100)
        parser.link_arguments("data.features", "model.width", apply_on="instantiate")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.delenv(SEED_VARIABLE, raising=False)


def made(*args: str, model: Any = CommandedNet, data: Any = None, **options: Any) -> TrainerCLI:
    """A command line's objects, without a run."""
    kind = options.pop("kind", TrainerCLI)
    return kind(model, data, run=False, args=list(args), trainer_defaults=QUIET, **options)


def ran(
    *args: str, model: Any = CommandedNet, data: Any = CommandedData, defaults: dict[str, Any] = QUIET, **options: Any
) -> TrainerCLI:
    """A command line that ran a subcommand."""
    kind = options.pop("kind", TrainerCLI)
    return kind(model, data, args=list(args), trainer_defaults=defaults, **options)


# ---- what words and files make ---------------------------------------------------------------------------------------


def test_words_set_arguments_of_the_trainer_the_module_and_the_data_module() -> None:
    cli = made("--model.lr=0.5", "--data.batch_size=3", "--trainer.max_steps", "7", data=CommandedData)
    assert (cli.model.lr, cli.datamodule.batch_size, cli.trainer.max_steps) == (0.5, 3, 7)
    assert (cli.config.model.lr, cli.config.trainer.max_epochs) == (0.5, 1)


@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
def test_a_subcommand_runs_between_the_methods_before_and_after_it(subcommand: str) -> None:
    called = []

    class Own(TrainerCLI):
        def before_instantiate_classes(self) -> None:
            called.append(f"making {self.subcommand}")

        def __getattr__(self, name: str) -> Callable[[], None]:
            if not name.startswith(("before_", "after_")):
                raise AttributeError(name)
            return lambda: called.append(name)

    cli = ran(subcommand, kind=Own)
    assert called == [f"making {subcommand}", f"before_{subcommand}", f"after_{subcommand}"]
    assert cli.trainer.current_run.request.fn == subcommand
    assert cli.trainer.global_step == (2 if subcommand == "fit" else 0)


def test_a_method_of_the_command_line_takes_the_place_of_the_trainers() -> None:
    class Own(TrainerCLI):
        def test(self, **given: Any) -> None:
            self.given = given

    cli: Any = ran("test", "--verbose=false", "--ckpt_path=last", kind=Own)
    given = {"model": cli.model, "datamodule": cli.datamodule, "verbose": False, "ckpt_path": "last"}
    assert cli.given == {**given, "weights_only": None}


def test_config_files_give_the_values_that_words_do_not() -> None:
    Path("run.yaml").write_text("fit: {model: {lr: 0.2, width: 8}, trainer: {max_epochs: 2}}")
    Path("more.yaml").write_text("model: {width: 9}")
    cli = ran("--config=run.yaml", "fit", "--config=more.yaml", "--trainer.max_epochs=1")
    assert (cli.model.lr, cli.model.width, cli.trainer.max_epochs) == (0.2, 9, 1)


@pytest.mark.filterwarnings("ignore:`CommandedNet.configure_optimizers`")
def test_print_config_prints_a_file_that_makes_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--optimizer=Adam", "--optimizer.lr=0.3", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=2"]
    with pytest.raises(SystemExit) as ended:
        made(*words, "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=x", "--print_config")
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# paceline==")
    Path("again.yaml").write_text(printed)
    cli = made("--config=again.yaml")
    (optimizer,), (scheduler,) = cli.model.configure_optimizers()
    assert (type(optimizer), optimizer.param_groups[0]["lr"], scheduler.step_size) == (torch.optim.Adam, 0.3, 2)
    assert [c.monitor for c in cli.trainer.callbacks if isinstance(c, EarlyStopping)] == ["x"]


@pytest.mark.parametrize("args", [{"model": {"lr": 0.5}}, {"model": {"lr": "0.5"}}])
def test_arguments_can_be_a_dict(args: dict[str, Any]) -> None:
    assert TrainerCLI(CommandedNet, run=False, args=args, trainer_defaults=QUIET).model.lr == 0.5


def test_arguments_given_in_code_beside_those_of_the_command_line_are_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--model.lr=1"])
    with pytest.warns(PacelineWarning, match=r"have no effect: \['--model.lr=1'\]"):
        assert made("--model.lr=2").model.lr == 2


@pytest.mark.parametrize("words", [["--model.lrr=1"], ["--trainer.max_epochs=many"]])
def test_a_wrong_word_ends_the_program_and_says_which(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        made(*words)
    assert ended.value.code == 2
    assert words[0].partition("=")[0].lstrip("-").rpartition(".")[2] in capsys.readouterr().err


def test_classes_are_chosen_by_their_short_names() -> None:
    cli = made(
        "--model=WiderNet",
        "--model.width=3",
        "--data=CommandedData",
        "--data.batch_size=5",
        "--trainer.logger=TensorBoardLogger",
        "--trainer.logger.save_dir=logs",
        "--trainer.logger.max_queue=4",
        "--trainer.strategy=DDPStrategy",
        "--trainer.strategy.find_unused_parameters=true",
        "--trainer.callbacks+=LearningRateMonitor",
        "--trainer.callbacks.logging_interval=step",
        "--trainer.callbacks+=Timer",
        model=None,
    )
    assert (type(cli.model), cli.model.extra, cli.model.width) == (WiderNet, True, 3)
    assert cli.datamodule.batch_size == 5
    assert isinstance(cli.trainer.logger, TensorBoardLogger)
    assert cli.config.trainer.logger.init_args.max_queue == 4
    assert cli.trainer.strategy.find_unused_parameters is True
    kinds = {type(callback) for callback in cli.trainer.callbacks}
    assert kinds >= {LearningRateMonitor, Timer, SaveConfigCallback}


def test_a_subclass_can_be_chosen_if_asked_for() -> None:
    cli = made("--model=WiderNet", "--model.extra=false", model=CommandedNet, subclass_mode_model=True)
    assert (type(cli.model), cli.model.extra) == (WiderNet, False)


@pytest.mark.parametrize("time", [1, 2])
def test_functions_that_return_a_module_or_a_trainer_serve_as_classes(time: int) -> None:
    def net(width: int) -> CommandedNet:
        return CommandedNet(width)

    def trainer(limit_train_batches: int, callbacks: list[Callback] | None = None) -> Trainer:
        return Trainer(**QUIET, limit_train_batches=limit_train_batches, callbacks=callbacks)

    cli = TrainerCLI(net, run=False, trainer_class=trainer, args=["--model.width=7", "--trainer.limit_train_batches=3"])
    assert (cli.model.width, cli.trainer.limit_train_batches) == (7, 3)


def test_a_trainer_without_callbacks_works_with_a_warning() -> None:
    class Bare(Trainer):
        def __init__(self) -> None:
            super().__init__(**QUIET)

    with pytest.warns(PacelineWarning, match="Bare does not expose the argument 'callbacks'"):
        cli = TrainerCLI(CommandedNet, run=False, args=[], trainer_class=Bare)
    assert isinstance(cli.trainer, Bare)


def test_callbacks_of_trainer_defaults_are_added_to_the_chosen_ones() -> None:
    defaults = QUIET | {"callbacks": [{"class_path": "paceline.callbacks.Timer", "init_args": {"duration": None}}]}
    cli = TrainerCLI(
        CommandedNet, run=False, args=["--trainer.callbacks=LearningRateMonitor"], trainer_defaults=defaults
    )
    assert {type(one) for one in cli.trainer.callbacks} >= {LearningRateMonitor, Timer, SaveConfigCallback}


def test_another_trainer_can_be_made_from_the_same_config() -> None:
    cli = made("--trainer.max_steps=3")
    again = cli.instantiate_trainer(max_epochs=9, callbacks=[Timer()])
    assert (again.max_steps, again.max_epochs, cli.trainer.max_epochs) == (3, 9, 1)
    assert any(isinstance(one, Timer) for one in again.callbacks)


def test_arguments_can_be_linked_before_and_after_objects_are_made() -> None:
    cli = made("--data.batch_size=20", data=CommandedData, kind=Linked)
    assert (cli.model.lr, cli.model.width) == (0.2, 6)
    assert (cli.model.hparams.lr, cli.model.hparams.width) == (0.2, 6)


def test_a_callback_can_have_arguments_of_its_own() -> None:
    class Own(TrainerCLI):
        def add_arguments_to_parser(self, parser: ArgumentParser) -> None:
            parser.add_lightning_class_args(LearningRateMonitor, "monitor")
            parser.set_defaults({"monitor.log_momentum": True})

    cli = made("--monitor.logging_interval=epoch", kind=Own)
    (monitor,) = [one for one in cli.trainer.callbacks if isinstance(one, LearningRateMonitor)]
    assert (monitor.logging_interval, monitor.log_momentum) == ("epoch", True)


def test_only_classes_that_a_trainer_knows_are_added() -> None:
    with pytest.raises(TypeError, match="which is not a Trainer, TrainingModule, DataModule or Callback class"):
        ArgumentParser().add_lightning_class_args(nn.Linear, "layer")


# ---- where values come from ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error::paceline.messages.PacelineWarning")
def test_environment_variables_are_read_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER__MAX_STEPS", "4")
    monkeypatch.setenv("PL_MODEL__LR", "0.7")
    cli = made("--model.width=2", parser_kwargs={"default_env": True})
    assert (cli.trainer.max_steps, cli.model.lr, cli.model.width) == (4, 0.7, 2)


def test_variables_of_the_trainer_count_before_its_defaults_and_after_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "5")
    monkeypatch.setenv("PL_TRAINER_MIN_EPOCHS", "3")
    monkeypatch.setenv("PL_TRAINER_PRECISION", "bf16-mixed")
    cli = made("--trainer.min_epochs=1")
    assert (cli.trainer.max_steps, cli.trainer.min_epochs, cli.trainer.precision) == (5, 1, "bf16-mixed")
    assert cli.config.trainer.max_steps == 5


def test_parsers_of_subcommands_take_arguments_of_their_own() -> None:
    Path("fit.yaml").write_text("trainer: {limit_train_batches: 1}")
    cli = ran("fit", parser_kwargs={"fit": {"default_config_files": ["fit.yaml"]}})
    assert cli.trainer.limit_train_batches == 1


@pytest.mark.parametrize(
    ("default", "words", "seed"),
    [
        (True, [], 0),
        (True, ["--seed_everything=3"], 3),
        (False, ["--seed_everything=true"], 0),
        (7, [], 7),
        (False, [], False),
        (7, ["--seed_everything=false"], False),
    ],
)
def test_the_seed_is_set_before_objects_are_made(default: Any, words: list[str], seed: Any) -> None:
    torch.manual_seed(99)
    cli = made(*words, seed_everything_default=default)
    assert cli.config.seed_everything is seed if seed is False else cli.config.seed_everything == seed
    torch.manual_seed(99 if seed is False else seed)
    assert torch.equal(cli.model.layer.weight, CommandedNet().layer.weight)


def test_the_seed_of_the_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED_VARIABLE, "12")
    assert made().config.seed_everything == 12


# ---- optimizers ------------------------------------------------------------------------------------------------------


def test_a_chosen_optimizer_replaces_that_of_the_module_and_says_so() -> None:
    with pytest.warns(PacelineWarning, match=r"`CommandedNet.configure_optimizers` will be overridden by `TrainerCLI"):
        cli = ran("fit", "--optimizer=Adam", "--optimizer.lr=0.5")
    assert (type(cli.trainer.optimizers[0]), cli.trainer.optimizers[0].param_groups[0]["lr"]) == (torch.optim.Adam, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ran("validate", "--optimizer=Adam", save_config_callback=None)  # does not optimize


def test_without_a_choice_the_module_keeps_its_optimizer() -> None:
    assert isinstance(ran("fit").trainer.optimizers[0], torch.optim.SGD)
    assert made("--lr_scheduler=StepLR", "--lr_scheduler.step_size=1").model.configure_optimizers.__func__ is (
        TinyModule.configure_optimizers
    )


@pytest.mark.filterwarnings("ignore:`CommandedNet.configure_optimizers`")
def test_a_plateau_scheduler_watches_the_metric_that_was_given() -> None:
    words = ["--optimizer=SGD", "--optimizer.lr=1", "--lr_scheduler=ReduceLROnPlateau", "--lr_scheduler.monitor=x"]
    scheduler = made(*words).model.configure_optimizers()["lr_scheduler"]
    assert isinstance(scheduler["scheduler"], ReduceLROnPlateau)
    assert scheduler["monitor"] == "x"


@pytest.mark.filterwarnings("ignore:`CommandedNet.configure_optimizers`")
def test_the_optimizer_is_made_when_the_trainer_asks_so_that_late_parameters_are_in_it() -> None:
    cli = made("--optimizer=SGD", "--optimizer.lr=1")
    cli.model.late = nn.Linear(1, 1)
    optimizer = cli.model.configure_optimizers()
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in cli.model.parameters()}
    assert pickle.loads(pickle.dumps(cli.model)).configure_optimizers().param_groups[0]["lr"] == 1


def test_one_class_can_be_set_and_configure_optimizers_replaced() -> None:
    class Own(TrainerCLI):
        def add_arguments_to_parser(self, parser: ArgumentParser) -> None:
            parser.add_optimizer_args(torch.optim.AdamW)
            parser.add_lr_scheduler_args(torch.optim.lr_scheduler.ExponentialLR)

        @staticmethod
        def configure_optimizers(lightning_module: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
            return lightning_module, optimizer, lr_scheduler

    with pytest.warns(PacelineWarning, match="overridden by `Own"):
        cli = made("--optimizer.lr=0.2", "--lr_scheduler.gamma=0.5", kind=Own)
    module, optimizer, scheduler = cli.model.configure_optimizers()
    assert module is cli.model
    assert (type(optimizer), optimizer.param_groups[0]["lr"], scheduler.gamma) == (torch.optim.AdamW, 0.2, 0.5)


def test_optimizers_can_be_linked_to_arguments_of_the_module() -> None:
    class Two(TinyModule):
        def __init__(self, first: dict, second: dict, decay: dict) -> None:
            super().__init__()
            self.first = instantiate_class(self.parameters(), first)
            self.second = instantiate_class((self.parameters(),), second)
            self.decay = instantiate_class(self.first, decay)

    class Own(TrainerCLI):
        def add_arguments_to_parser(self, parser: ArgumentParser) -> None:
            parser.add_optimizer_args(nested_key="one", link_to="model.first")
            parser.add_optimizer_args(torch.optim.SGD, nested_key="two", link_to="model.second")
            parser.add_lr_scheduler_args(torch.optim.lr_scheduler.ExponentialLR, link_to="model.decay")

    cli = made("--one=Adam", "--one.lr=0.5", "--two.lr=0.25", "--lr_scheduler.gamma=0.5", model=Two, kind=Own)
    assert (type(cli.model.first), cli.model.first.param_groups[0]["lr"]) == (torch.optim.Adam, 0.5)
    assert (type(cli.model.second), cli.model.second.param_groups[0]["lr"]) == (torch.optim.SGD, 0.25)
    assert cli.model.decay.gamma == 0.5


def test_two_optimizers_for_configure_optimizers_are_an_error() -> None:
    class Own(TrainerCLI):
        def add_arguments_to_parser(self, parser: ArgumentParser) -> None:
            parser.add_optimizer_args(torch.optim.Adam, "one")
            parser.add_optimizer_args(torch.optim.Adam, "two")

    with pytest.raises(ValueError, match="the parser has 'one', 'two' and 'lr_scheduler'"):
        made(kind=Own)


def test_an_argument_of_the_module_can_make_an_optimizer() -> None:
    words = ["--model.optimizer=Adam", "--model.optimizer.lr=0.5", "--model.scheduler=StepLR"]
    cli = made(*words, "--model.scheduler.step_size=3", auto_configure_optimizers=False)
    optimizer = cli.model.optimizer(cli.model.parameters())
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (torch.optim.Adam, 0.5)
    assert cli.model.scheduler(optimizer).step_size == 3


# ---- the saved config ------------------------------------------------------------------------------------------------


def test_the_config_is_saved_in_the_folder_of_the_run_and_makes_the_same_run() -> None:
    logger = {"class_path": "paceline.loggers.CSVLogger", "init_args": {"save_dir": "logs"}}
    cli = ran("fit", "--model.lr=0.3", defaults=QUIET | {"logger": logger})
    saved = Path(cli.trainer.log_dir or "", "config.yaml")
    assert saved.parent.parent.parent == Path("logs")
    again = ran("fit", f"--config={saved}", "--restore=model")
    assert again.model.lr == 0.3
    assert (again.config.fit.restore, again.trainer.current_run.request.restore) == ("model", ("model",))
    assert isinstance(again.trainer.logger, CSVLogger)
    assert not Path("config.yaml").exists()
    evaluated = ran("validate", f"--config={saved}", save_config_callback=None)  # has no argument `restore`
    assert evaluated.model.lr == 0.3


def test_a_config_of_another_run_is_not_overwritten_unless_asked_for() -> None:
    ran("fit", "--model.lr=0.3")
    with pytest.raises(RuntimeError, match=r"already exists from another run\. Aborting to avoid overwriting"):
        ran("fit")
    assert yaml.safe_load(Path("config.yaml").read_text())["model"]["lr"] == 0.3
    ran("fit", save_config_kwargs={"config_filename": "other.yaml"})
    ran("fit", save_config_kwargs={"overwrite": True})
    assert yaml.safe_load(Path("config.yaml").read_text())["model"]["lr"] == 0.1


def test_a_fit_that_resumes_in_the_same_folder_saves_its_config_again() -> None:
    ran("fit").trainer.save_checkpoint("x.ckpt")
    ran("fit", "--ckpt_path=x.ckpt", "--trainer.max_epochs=2")
    assert yaml.safe_load(Path("config.yaml").read_text())["trainer"]["max_epochs"] == 2


def test_the_config_is_saved_once_and_not_in_a_dry_run() -> None:
    assert not ran("fit", "--trainer.fast_dev_run=1").trainer.log_dir or not Path("config.yaml").exists()
    cli = made(data=CommandedData)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    cli.trainer.test(cli.model, datamodule=cli.datamodule)
    assert Path("config.yaml").exists()


def test_the_config_can_be_saved_elsewhere_only_by_an_override() -> None:
    with pytest.raises(ValueError, match=r"does not override save_config\(trainer, pl_module, stage\)"):
        made(save_config_kwargs={"save_to_log_dir": False})
    stages = []

    class Elsewhere(SaveConfigCallback):
        def save_config(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
            stages.append((stage, self.config.model.lr))

    ran("test", "--model.lr=2", save_config_callback=Elsewhere, save_config_kwargs={"save_to_log_dir": False})
    assert stages == [("test", 2)]
    assert not Path("config.yaml").exists()
    made(save_config_callback=None)


def test_rank_0_alone_saves_the_config_and_all_ranks_learn_if_it_cannot() -> None:
    def fit() -> int:
        class Counts(SaveConfigCallback):
            def save_config(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
                Path(f"saved by {trainer.global_rank}").touch()

        ran("fit", "--trainer.strategy=ddp", "--trainer.devices=2", save_config_callback=Counts)
        return 0

    assert ranks(2, fit) == [0, 0]
    assert {path.name for path in Path().glob("saved by *")} == {"saved by 0"}
    with pytest.raises(RanksError) as caught:
        ranks(2, fit)
    first, second = map(str, caught.value.errors)
    assert "already exists from another run" in first
    assert second == f"Rank 0 could not save the config: RuntimeError: {first}"


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_hyperparameters_are_plain_data_from_which_the_same_objects_are_made() -> None:
    words = ["--model.activation=torch.nn.LeakyReLU", "--model.activation.negative_slope=0.5", "--model.width=3"]
    cli = ran("fit", *words, "--model.optimizer=Adam", auto_configure_optimizers=False)
    assert isinstance(cli.model.activation, nn.LeakyReLU)
    cli.trainer.save_checkpoint("x.ckpt")
    saved = torch.load("x.ckpt", weights_only=True)["hyper_parameters"]
    assert saved["activation"]["init_args"]["negative_slope"] == 0.5
    loaded = CommandedNet.load_from_checkpoint("x.ckpt", lr=0.7)
    assert (loaded.activation.negative_slope, loaded.width, loaded.lr) == (0.5, 3, 0.7)
    assert type(loaded.optimizer(loaded.parameters())) is torch.optim.Adam
    assert loaded.hparams == {**saved, "lr": 0.7}


def test_a_checkpoint_names_the_class_that_was_chosen() -> None:
    cli = ran("fit", "--model=WiderNet", "--model.extra=false", "--data=CommandedData", model=None, data=None)
    cli.trainer.save_checkpoint("x.ckpt")
    assert cli.model.hparams["_class_path"] == f"{WiderNet.__module__}.WiderNet"
    loaded = TrainingModule.load_from_checkpoint("x.ckpt")
    assert (type(loaded), loaded.extra, loaded.width) == (WiderNet, False, 4)
    assert type(DataModule.load_from_checkpoint("x.ckpt")) is CommandedData


def test_the_logged_hyperparameters_of_both_do_not_contradict_each_other() -> None:
    logger = {"class_path": "paceline.loggers.CSVLogger", "init_args": {"save_dir": "logs"}}
    cli = ran(
        "fit", "--model=WiderNet", "--data=CommandedData", model=None, data=None, defaults=QUIET | {"logger": logger}
    )
    logged = yaml.safe_load(Path(cli.trainer.log_dir or "", "hparams.yaml").read_text())
    assert (logged["batch_size"], logged["extra"], logged["_instantiator"]) == (2, True, MARK)
    assert "_class_path" not in logged


def test_only_named_hyperparameters_are_stored_if_names_are_given() -> None:
    class Chosen(TinyModule):
        def __init__(self, lr: float = 0.1, layer: nn.Module | None = None, other: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters("lr", "layer")
            self.inner = layer

    cli = ran("fit", "--model.layer=torch.nn.Tanh", model=Chosen)
    cli.trainer.save_checkpoint("x.ckpt")
    assert set(cli.model.hparams) == {"lr", "layer", "_instantiator"}
    assert isinstance(Chosen.load_from_checkpoint("x.ckpt").inner, nn.Tanh)


def test_a_submodule_stores_its_own_arguments() -> None:
    cli = made("--model=Outer", "--model.inner=CommandedNet", "--model.inner.width=2", model=None)
    assert cli.model.hparams.width == 9
    assert cli.model.inner.hparams.width == 2


def test_without_support_for_loading_hyperparameters_are_the_objects() -> None:
    cli = made("--model.width=3", load_from_checkpoint_support=False)
    assert "_instantiator" not in cli.model.hparams


@pytest.mark.parametrize("chosen_there", [False, True])
@pytest.mark.parametrize("chosen_here", [False, True])
def test_the_model_for_a_checkpoint_has_its_hyperparameters(
    chosen_there: bool, chosen_here: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline")
    words = ["--model=WiderNet"] if chosen_there else []
    ran("fit", *words, "--model.width=5", subclass_mode_model=chosen_there).trainer.save_checkpoint("x.ckpt")
    model = WiderNet if chosen_there else CommandedNet
    words = ["--model=CommandedNet"] if chosen_here else []
    options: dict[str, Any] = {"subclass_mode_model": chosen_here, "save_config_callback": None}
    here = ran("predict", *words, "--ckpt_path=x.ckpt", model=CommandedNet if chosen_here else model, **options)
    assert here.model.width == here.config.predict.model.get("init_args", here.config.predict.model).width == 5
    assert type(here.model) is model
    assert "The model's arguments were taken from the hyperparameters in x.ckpt" in caplog.text


def test_hyperparameters_of_another_model_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    ran("fit").trainer.save_checkpoint("x.ckpt")
    with pytest.raises(SystemExit):
        ran("test", "--ckpt_path=x.ckpt", model=TinyModule)
    assert (
        "Parsing of ckpt_path hyperparameters failed, because the hyperparameters in 'x.ckpt'"
        in capsys.readouterr().err
    )


def written(**hyperparameters: Any) -> None:
    content = {
        "state_dict": CommandedNet().state_dict(),
        "hyper_parameters": {"_instantiator": MARK, **hyperparameters},
    }
    single_file.write(content, Path("x.ckpt"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_class_path", "stranger.Net"),
        ("activation", {"class_path": "stranger.Net"}),
        ("activation", "stranger.Net"),
        ("activation", '{"class_path": "stran\\u0067er.Net"}'),
    ],
)
def test_a_file_cannot_make_a_program_import_code(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("stranger.py").write_text("raise RuntimeError('it ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    written(width=4, **{name: value})
    said = r"mention 'stranger(\.Net)?', which has not been imported"
    with pytest.raises(ValueError, match=said):
        CommandedNet.load_from_checkpoint("x.ckpt")
    chosen = ["--model=CommandedNet"] if name == "_class_path" else []
    with pytest.raises(ValueError, match=said):
        ran("test", *chosen, "--ckpt_path=x.ckpt", subclass_mode_model=bool(chosen))


@pytest.mark.parametrize(
    "values", [{"_class_path": "torch.nn.Linear"}, {"activation": {"class_path": "fractions.Fraction"}}]
)
def test_a_file_cannot_name_a_class_that_the_signature_does_not_allow(values: dict[str, Any]) -> None:
    written(**values)
    with pytest.raises(ValueError, match="do not match"):
        CommandedNet.load_from_checkpoint("x.ckpt")


def test_a_file_of_lightnings_command_line_is_loaded_too() -> None:
    written(activation={"class_path": "torch.nn.ReLU"}, _instantiator="lightning.pytorch.cli.instantiate_module")
    assert isinstance(CommandedNet.load_from_checkpoint("x.ckpt").activation, nn.ReLU)


# ---- the package jsonargparse ----------------------------------------------------------------------------------------


def test_without_jsonargparse_names_can_be_imported_and_a_parser_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "paceline.cli.argument_parser"
    saved = sys.modules[name]
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    monkeypatch.delitem(sys.modules, name)
    without = importlib.import_module(name)
    try:
        with pytest.raises(ModuleNotFoundError, match=r"Run: pip install jsonargparse\[signatures\]"):
            without.ArgumentParser()
    finally:
        sys.modules["paceline.cli"].argument_parser = saved  # type: ignore[attr-defined]


HINTED = [
    *(getattr(Trainer, name) for name in ("__init__", "fit", "validate", "test", "predict")),
    *(
        getattr(strategies, name).__init__
        for name in ("DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy", "SingleDevice")
    ),
]


@pytest.mark.parametrize("function", HINTED, ids=lambda function: function.__qualname__)
def test_the_types_of_signatures_can_be_read_when_the_program_runs(function: Any) -> None:
    assert typing.get_type_hints(function)


def test_the_config_of_a_strategy_makes_the_same_strategy_again() -> None:
    words = ["--trainer.strategy=DDPStrategy", "--trainer.strategy.timeout=0:05:00"]
    cli = made(*words, "--trainer.strategy.gradient_as_bucket_view=true")
    Path("again.yaml").write_text(cli.parser.dump(cli.config))
    again = made("--config=again.yaml").trainer.strategy
    assert isinstance(again, strategies.DDPStrategy)
    assert again.timeout == timedelta(minutes=5)


def test_with_a_jsonargparse_that_is_too_old_names_can_be_imported_and_parsers_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "jsonargparse.typing", types.ModuleType("jsonargparse.typing"))
    file = sys.modules[ArgumentParser.__module__].__file__ or ""
    spec = importlib.util.spec_from_file_location("paceline.cli.argument_parser_again", file)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.instantiate_class((), {"class_path": "torch.nn.Identity"}).__class__ is nn.Identity
    with pytest.raises(ImportError, match=r"needs jsonargparse 4\.49 or newer, but [\d.]+ is installed\. Run: pip"):
        again.ArgumentParser()

"""What ties a Trainer to a module: the callbacks it brings, the checkpoint that is meant, what is prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from tiny import TinyModule, tiny_loader

from paceline import Callback, DataModule, Trainer, messages
from paceline.callbacks import EarlyStopping, ModelCheckpoint, RunReport, Timer
from paceline.loggers import CSVLogger, Logger, TensorBoardLogger


class Brings(TinyModule):
    """Brings callbacks, new ones each time it is asked."""

    def configure_callbacks(self) -> Any:
        return [EarlyStopping("val_loss", patience=7), Mine()]


class Mine(Callback):
    pass


class Other(Callback):
    pass


def kinds(trainer: Trainer) -> list[str]:
    return [type(callback).__name__ for callback in trainer.callbacks]


# ---- callbacks of the module -----------------------------------------------------------------------------------------


def test_callbacks_of_a_module_join_the_trainers_and_replace_those_of_their_type(quiet: dict[str, Any]) -> None:
    own = EarlyStopping("val_loss", patience=1)
    trainer = Trainer(**quiet, max_epochs=1, callbacks=[own, Other()])
    trainer.fit(Brings(), tiny_loader(), tiny_loader())
    assert kinds(trainer) == ["Other", "EarlyStopping", "Mine"]
    assert trainer.early_stopping_callback is not own
    assert trainer.early_stopping_callback.patience == 7


def test_a_single_callback_or_none_may_be_returned(quiet: dict[str, Any]) -> None:
    for returned, want in ((Mine(), ["Mine"]), (None, []), ([], []), ((Mine(), Other()), ["Mine", "Other"])):
        module = TinyModule()
        module.configure_callbacks = lambda returned=returned: returned  # type: ignore[method-assign]
        trainer = Trainer(**quiet, max_epochs=1)
        trainer.fit(module, tiny_loader())
        assert kinds(trainer) == want


def test_callbacks_that_save_stay_last(quiet: dict[str, Any]) -> None:
    quiet.pop("enable_checkpointing")
    module = TinyModule()
    module.configure_callbacks = lambda: [ModelCheckpoint(every_n_epochs=2), Mine()]  # type: ignore[method-assign]
    trainer = Trainer(**quiet, max_epochs=1, callbacks=[ModelCheckpoint(), Other()])
    trainer.fit(module, tiny_loader())
    assert kinds(trainer) == ["Other", "Mine", "ModelCheckpoint"]


def test_a_second_run_of_a_module_goes_on_with_the_callbacks_it_brought(quiet: dict[str, Any]) -> None:
    module = Brings()
    trainer = Trainer(**quiet, max_epochs=1)
    trainer.fit(module, tiny_loader(), tiny_loader())
    before = list(trainer.callbacks)
    trainer.validate(module, tiny_loader(), verbose=False)
    trainer.test(dataloaders=tiny_loader(), verbose=False)
    assert all(one is other for one, other in zip(trainer.callbacks, before, strict=True))


def test_another_modules_run_is_free_of_them_and_has_the_trainers_own_again(quiet: dict[str, Any]) -> None:
    own = EarlyStopping("val_loss", patience=1)
    trainer = Trainer(**quiet, max_epochs=1, callbacks=[own, Other()])
    trainer.fit(Brings(), tiny_loader(), tiny_loader())
    added = Callback()
    trainer.callbacks.append(added)
    trainer.fit(TinyModule(), tiny_loader(), tiny_loader())
    assert kinds(trainer) == ["Other", "Callback", "EarlyStopping"]
    assert trainer.early_stopping_callback is own
    assert trainer.callbacks[1] is added


# ---- the checkpoint that is meant ------------------------------------------------------------------------------------


class Saves(TinyModule):
    def configure_callbacks(self) -> Any:
        return ModelCheckpoint(monitor="val_loss")


@pytest.mark.parametrize("again", ["the same module", "none", "another object"])
def test_best_is_found_where_the_module_brings_its_own_checkpoint_callback(
    again: str, quiet: dict[str, Any], tmp_path: Path
) -> None:
    quiet.pop("enable_checkpointing")
    trainer = Trainer(**quiet, max_epochs=2, default_root_dir=tmp_path)
    module = Saves()
    trainer.fit(module, tiny_loader(), tiny_loader())
    best = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
    with torch.no_grad():
        module.layer.weight.zero_()
    tested = {"the same module": module, "none": None, "another object": Saves()}[again]
    trainer.test(tested, tiny_loader(), ckpt_path="best", verbose=False)
    assert torch.equal(trainer.training_module.layer.weight, best["layer.weight"])


def test_a_path_set_on_the_trainer_is_used_until_it_is_taken_back(quiet: dict[str, Any], tmp_path: Path) -> None:
    trainer, module = Trainer(**quiet, max_epochs=1), TinyModule()
    trainer.fit(module, tiny_loader())
    for name in "ab":
        torch.nn.init.constant_(module.layer.weight, float(ord(name)))
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
    trainer.ckpt_path = tmp_path / "a.ckpt"
    trainer.validate(module, tiny_loader(), ckpt_path=tmp_path / "b.ckpt", verbose=False)
    assert (module.layer.weight[0, 0].item(), trainer.ckpt_path) == (float(ord("a")), str(tmp_path / "a.ckpt"))
    trainer.ckpt_path = None
    trainer.validate(module, tiny_loader(), ckpt_path=tmp_path / "b.ckpt", verbose=False)
    assert (module.layer.weight[0, 0].item(), trainer.ckpt_path) == (float(ord("b")), str(tmp_path / "b.ckpt"))
    trainer.validate(module, tiny_loader(), verbose=False)
    assert trainer.ckpt_path is None


# ---- what is prepared ------------------------------------------------------------------------------------------------


def test_layers_made_in_configure_model_are_trained_in_the_runs_dtype(quiet: dict[str, Any]) -> None:
    class Later(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            del self.layer

        def configure_model(self) -> None:
            if not hasattr(self, "layer"):
                assert torch.get_default_dtype() == torch.bfloat16
                self.layer = torch.nn.Linear(4, 1)

    module = Later()
    trainer = Trainer(**quiet, max_epochs=1, precision="bf16-true")
    trainer.fit(module, tiny_loader())
    layer = module.layer
    assert layer.weight.dtype == torch.bfloat16
    trainer.validate(module, tiny_loader(), verbose=False)
    assert module.layer is layer


def test_a_hook_that_setup_adds_is_called(quiet: dict[str, Any]) -> None:
    called: list[str] = []

    class Adds(TinyModule):
        def setup(self, stage: str) -> None:
            self.on_train_start = lambda: called.append(stage)  # type: ignore[method-assign]

    Trainer(**quiet, max_epochs=1).fit(Adds(), tiny_loader())
    assert called == ["fit"]


def test_hyperparameters_go_to_the_loggers_once_a_fit_unless_told_not_to(quiet: dict[str, Any], tmp_path: Path) -> None:
    class Logs(CSVLogger):
        params: list[Any]

        def log_hyperparams(self, params: Any = None) -> None:
            self.params = [*getattr(self, "params", []), dict(params)]

    class Has(TinyModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()

    for wanted in (True, False):
        logger = Logs(tmp_path)
        trainer = Trainer(**{**quiet, "logger": logger}, max_epochs=1, enable_autolog_hparams=wanted)
        trainer.fit(Has(3), tiny_loader())
        assert getattr(logger, "params", []) == ([{"width": 3}] if wanted else [])


def test_max_time_is_a_limit_that_needs_no_other(quiet: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    trainer = Trainer(**quiet, max_time={"seconds": 0})
    assert [type(c) for c in trainer.callbacks] == [Timer]
    assert trainer.max_epochs is Trainer(**quiet, max_steps=5).max_epochs is None  # until a fit begins
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.max_epochs == -1
    assert not [w for w in recwarn if "1000 epochs" in str(w.message)]


def test_a_person_is_told_once_where_a_run_logs_and_where_each_step_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="paceline")

    def trainer(epochs: int) -> Trainer:
        loggers: list[Logger] = [TensorBoardLogger("logs"), CSVLogger(tmp_path)]
        return Trainer(
            logger=loggers,
            max_epochs=epochs,
            log_every_n_steps=1,
            callbacks=[RunReport()],
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    first = trainer(1)
    first.fit(TinyModule(), tiny_loader(3), tiny_loader(1))
    first.test(dataloaders=tiny_loader(1), verbose=False)
    first.predict(dataloaders=tiny_loader(1))
    best = "logs/paceline_logs/version_0/checkpoints/epoch=0-step=3.ckpt"
    assert caplog.messages == [
        "Logging to logs/paceline_logs/version_0, paceline_logs/version_0",
        "Report of the run: logs/paceline_logs/version_0/run_report.html",
        f"test() without a module uses the best checkpoint of the last fit: {best}",
        f"predict() without a module uses the best checkpoint of the last fit: {best}",
    ]
    caplog.clear()
    messages.forget()
    trainer(2).fit(TinyModule(), tiny_loader(3), tiny_loader(1), ckpt_path=best)
    assert caplog.messages == [
        "Logging continues in logs/paceline_logs/version_0, paceline_logs/version_0",
        f"Continuing at epoch 1, step 3 from {best}",
        "Report of the run: logs/paceline_logs/version_0/run_report.html",
    ]
    caplog.clear()
    second = trainer(3)
    second.fit(TinyModule(), tiny_loader(3), tiny_loader(1), ckpt_path=best, restore=["model"])
    second.validate(TinyModule(), tiny_loader(1), ckpt_path=best, verbose=False)
    assert f"Starting at epoch 0, step 0 with 'model' from {best}" in caplog.messages
    assert caplog.messages[-1] == f"validate() uses the checkpoint {best}"


def test_a_run_on_several_processes_says_so_once_and_one_alone_says_nothing(
    quiet: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    def fit_and_test(devices: int) -> None:
        trainer = Trainer(**quiet, strategy="ddp", devices=devices, max_steps=1)
        for _ in range(2):
            trainer.fit(TinyModule(), tiny_loader())
        trainer.test(dataloaders=tiny_loader(), verbose=False)

    ranks(2, fit_and_test, 2)
    said = [line for line in capfd.readouterr().err.splitlines() if " processes " in line]
    assert said == ["Training on 2 processes (ddp, gloo, cpu).", "Testing on 2 processes (ddp, gloo, cpu)."]
    ranks(1, fit_and_test, 1)
    assert "process" not in capfd.readouterr().err


def test_an_optimizer_is_told_to_clear_its_gradients_once_a_step_and_never_before(quiet: dict[str, Any]) -> None:
    class Counts(torch.optim.SGD):
        cleared = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            Counts.cleared += 1
            super().zero_grad(set_to_none)

    class Module(TinyModule):
        def configure_optimizers(self) -> Any:
            return Counts(self.parameters(), lr=0.1)

    module = Module()
    module.layer.weight.grad = torch.full_like(module.layer.weight, 1e6)
    Trainer(**quiet, max_epochs=1).fit(module, tiny_loader(4))
    assert Counts.cleared == 4
    assert module.layer.weight.abs().max() < 1e3


def test_loggers_get_metrics_and_step_by_their_names_and_hyperparameters_must_agree(quiet: dict[str, Any]) -> None:
    class Named(Logger):
        name = version = "named"
        got: list[tuple[str, ...]] = []  # noqa: RUF012

        def log_metrics(self, *args: Any, **kwargs: Any) -> None:
            self.got.append((*args, *kwargs))

        def log_hyperparams(self, params: Any = None, metrics: Any = None) -> None: ...

    class Data(DataModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()

    class Module(TinyModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()

    quiet["logger"] = logger = Named()
    Trainer(**quiet, max_epochs=1, log_every_n_steps=1).fit(TinyModule(), tiny_loader(1))
    assert logger.got == [("metrics", "step")]
    data = Data(2)
    data.train_dataloader = tiny_loader  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"both saved a hyperparameter 'width', with the values 3 and 2"):
        Trainer(**quiet, max_epochs=1).fit(Module(3), datamodule=data)

"""What a checkpoint holds, and what is said when it does not fit the run it is given to."""

from __future__ import annotations

import platform
import re
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import QUIET, TinyModule, tiny_loader
from torch import nn
from torch.optim import lr_scheduler

import paceline
from paceline import Callback, Trainer
from paceline.checkpoint import single_file
from paceline.trainer.checkpoint_contents import gather


class Configured(TinyModule):
    def __init__(self, lr: float = 0.1, size: int = 3, activation: Any = None) -> None:
        super().__init__(lr)
        self.save_hyperparameters()


class Counter(Callback):
    def __init__(self, name: str = "a") -> None:
        self.name, self.count = name, 0

    @property
    def state_key(self) -> str:
        return f"Counter[{self.name}]"

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def fit(module: Any = None, path: Path | None = None, ckpt_path: Any = None, **arguments: Any) -> Trainer:
    trainer = Trainer(**{**QUIET, "max_epochs": 2, **arguments})
    trainer.fit(module or TinyModule(), tiny_loader(), ckpt_path=ckpt_path)
    if path is not None:
        trainer.save_checkpoint(path)
    return trainer


# ---- gathered --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_has_lightnings_keys_and_a_section_of_ours(tmp_path: Path):
    trainer = fit(Configured(), tmp_path / "x.ckpt", callbacks=[Counter()])
    found = single_file.read(tmp_path / "x.ckpt")
    assert set(found) == {
        "epoch",
        "global_step",
        "pytorch-lightning_version",
        "state_dict",
        "loops",
        "callbacks",
        "optimizer_states",
        "lr_schedulers",
        "hparams_name",
        "hyper_parameters",
        "paceline",
    }
    assert (found["epoch"], found["global_step"]) == (2, 8)
    assert found["hyper_parameters"] == {"lr": 0.1, "size": 3, "activation": None}
    assert found["callbacks"] == {"Counter[a]": {"count": 8}}
    assert found["paceline"]["progress"] == trainer.state.state_dict() | {"accumulate": 1}
    assert found["paceline"]["versions"] == {
        "paceline": paceline.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def test_a_file_of_weights_only_has_no_optimizers_callbacks_or_random_states(tmp_path: Path):
    trainer = fit(Configured(), callbacks=[Counter()])
    trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    found = single_file.read(tmp_path / "x.ckpt")
    assert found.keys().isdisjoint({"callbacks", "optimizer_states", "lr_schedulers"})
    assert found["paceline"].keys().isdisjoint({"ranks", "precision", "metrics"})
    assert torch.equal(found["state_dict"]["layer.weight"], trainer.training_module.layer.weight)


def test_states_are_asked_for_in_order_and_the_module_has_the_last_word():
    said: list[str] = []

    class Module(TinyModule):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            said.append("module.state_dict")
            return super().state_dict(*args, **kwargs)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            said.append("module.on_save_checkpoint")
            checkpoint["mine"] = 1

    class Saying(Callback):
        def state_dict(self) -> dict[str, Any]:
            said.append("callback.state_dict")
            return {}

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            said.append("callback.on_save_checkpoint")
            assert "mine" not in checkpoint

    trainer = fit(Module(), callbacks=[Saying()])
    said.clear()
    assert gather(trainer.current_run)["mine"] == 1
    expected = ["module.state_dict", "callback.state_dict", "callback.on_save_checkpoint", "module.on_save_checkpoint"]
    assert said == expected


def test_what_a_hook_adds_is_checked_and_named(tmp_path: Path):
    class Module(TinyModule):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["tokenizer"] = {"vocabulary": lambda: 0}

    with pytest.raises(
        TypeError,
        match=r"checkpoint\['tokenizer'\]\['vocabulary'\] is of type builtins.function.*cannot be pickled either",
    ):
        fit(Module(), tmp_path / "x.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_hyperparameters_that_are_not_plain_stay_out_with_one_warning(tmp_path: Path):
    trainer = fit(Configured(activation=lambda x: x))
    with pytest.warns(UserWarning, match=r"leave them out: activation \(function\).*ignore=\['activation'\]"):
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.save_checkpoint(tmp_path / "y.ckpt")
    assert single_file.read(tmp_path / "y.ckpt")["hyper_parameters"] == {"lr": 0.1, "size": 3}


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=100),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)]
    ),
    "ReduceLROnPlateau": lambda o: {"scheduler": lr_scheduler.ReduceLROnPlateau(o), "monitor": "train_loss"},
}
OPTIMIZERS = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD"]


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [*[("SGD", name) for name in SCHEDULERS], *[(name, "StepLR") for name in OPTIMIZERS[1:]]],
)
def test_torchs_optimizers_and_schedulers_go_through_a_file(tmp_path: Path, optimizer: str, scheduler: str):
    class Module(TinyModule):
        def configure_optimizers(self) -> Any:
            extra = {"momentum": 0.9} if optimizer == "SGD" else {}
            made = getattr(torch.optim, optimizer)(self.parameters(), lr=0.01, **extra)
            return [made], [SCHEDULERS[scheduler](made)]

    whole = fit(Module(), tmp_path / "x.ckpt").optimizers[0].state_dict()
    resumed = fit(Module(), ckpt_path=tmp_path / "x.ckpt")
    found = resumed.optimizers[0].state_dict()
    assert str(found) == str(whole)
    saved = single_file.read(tmp_path / "x.ckpt")["lr_schedulers"][0]
    assert str(resumed.lr_scheduler_configs[0].scheduler.state_dict()) == str(saved)


# ---- given back ------------------------------------------------------------------------------------------------------


def test_callbacks_get_their_state_by_key_and_the_file_by_hook(tmp_path: Path):
    fit(path=tmp_path / "x.ckpt", callbacks=[Counter("a"), Counter("b")])
    counters = [Counter("b"), Counter("c")]
    with pytest.warns(
        UserWarning, match=r"callbacks that this Trainer does not have: 'Counter\[a\]'\. Their state is dropped"
    ):
        fit(ckpt_path=tmp_path / "x.ckpt", callbacks=counters)
    assert [counter.count for counter in counters] == [8, 0]


def test_a_hook_may_change_the_weights_before_they_are_loaded(tmp_path: Path):
    class Renamed(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = self.__dict__["_modules"].pop("layer")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {key.replace("layer", "linear"): value for key, value in weights.items()}

    whole = fit(path=tmp_path / "x.ckpt").training_module
    resumed = fit(Renamed(), ckpt_path=tmp_path / "x.ckpt").training_module
    assert torch.equal(resumed.linear.weight, whole.layer.weight)


class Other(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.head = nn.ModuleList(nn.Linear(1, 1) for _ in range(8))


def test_the_file_of_another_model_lists_what_is_missing_unexpected_and_of_another_shape(tmp_path: Path):
    fit(path=tmp_path / "tiny.ckpt")
    with pytest.raises(RuntimeError) as caught:
        fit(Other(), ckpt_path=tmp_path / "tiny.ckpt")
    message = str(caught.value)
    assert message.startswith(
        "The checkpoint does not match Other: 16 missing from the checkpoint (head.0.weight, head.0.bias, "
    )
    assert ", and 6 more)" in message
    assert (
        "2 with a different shape (layer.weight (1, 4) in the file, (2, 4) in the module, layer.bias (1,) in" in message
    )
    assert "Build the module with the arguments that it had" in message
    trainer = Trainer(**QUIET)
    trainer.predict(Other(), tiny_loader())
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(
        RuntimeError, match=r"does not match TinyModule: 16 unexpected \(head\.0\.weight, .*2 with a different shape"
    ):
        Trainer(**QUIET).test(TinyModule(), tiny_loader(), ckpt_path=tmp_path / "other.ckpt")


def test_weights_under_a_prefix_get_a_hint(tmp_path: Path):
    fit(path=tmp_path / "x.ckpt")
    content = single_file.read(tmp_path / "x.ckpt")
    content["state_dict"] = {f"model.net.{key}": value for key, value in content["state_dict"].items()}
    single_file.write(content, tmp_path / "x.ckpt")
    with pytest.raises(
        RuntimeError, match=r"names would match without the prefix 'model\.net\.', so remove the prefix in on_load"
    ):
        fit(ckpt_path=tmp_path / "x.ckpt")


def test_strict_loading_off_loads_what_matches_and_says_what_did_not(tmp_path: Path):
    fit(path=tmp_path / "x.ckpt")
    module = TinyModule()
    module.extra = nn.Linear(1, 1)
    module.strict_loading = False
    with pytest.warns(
        UserWarning,
        match=r"only partly loaded into TinyModule .*2 missing from the checkpoint \(extra\.weight, extra\.bias\)",
    ):
        Trainer(**QUIET).test(module, tiny_loader(), ckpt_path=tmp_path / "x.ckpt", verbose=False)
    assert torch.equal(module.layer.weight, single_file.read(tmp_path / "x.ckpt")["state_dict"]["layer.weight"])


class NotSet(TinyModule):
    strict_loading = None


class Off(TinyModule):
    strict_loading = False


def set_to(value: bool | None) -> TinyModule:
    module = TinyModule()
    module.strict_loading = value
    return module


@pytest.mark.parametrize("make", [TinyModule, NotSet, lambda: set_to(None), lambda: set_to(True)])
def test_strict_loading_that_is_not_set_is_strict(make: Any, tmp_path: Path):
    fit(path=tmp_path / "x.ckpt")
    module = make()
    assert module.strict_loading in ((None,) if make is NotSet else (True,))
    module.extra = nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match="2 missing from the checkpoint"):
        Trainer(**QUIET).test(module, tiny_loader(), ckpt_path=tmp_path / "x.ckpt")


def test_strict_loading_may_be_switched_off_in_the_class(tmp_path: Path):
    fit(path=tmp_path / "x.ckpt")
    module = Off()
    module.extra = nn.Linear(1, 1)
    with pytest.warns(UserWarning, match="only partly loaded"):
        Trainer(**QUIET).test(module, tiny_loader(), ckpt_path=tmp_path / "x.ckpt", verbose=False)


def test_a_fit_cannot_go_on_from_weights_only(tmp_path: Path):
    fit().save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    with pytest.raises(ValueError, match=r"contains only weights .*TinyModule\.load_from_checkpoint\(path\)"):
        fit(ckpt_path=tmp_path / "x.ckpt")


class Two(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.layer.weight], 0.1), torch.optim.SGD([self.layer.bias], 0.1)]


class Adam(TinyModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Groups(TinyModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": [self.layer.weight]}, {"params": [self.layer.bias]}], 0.1)


class Frozen(TinyModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.layer.weight], 0.1)


class Scheduled(TinyModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1)]


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Adam, "does not match optimizer 0 (Adam): it was saved by SGD, which has no 'betas', 'eps', "),
        (Groups, "does not match optimizer 0 (SGD): the number of parameter groups was 1 but is now 2"),
        (Frozen, "does not match optimizer 0 (SGD): the number of parameters in group 0 was 2 but is now 1"),
        (Scheduled, "learning rate schedulers in the checkpoint is 0, but configure_optimizers returned 1"),
    ],
)
def test_other_optimizers_or_schedulers_are_an_error_that_says_how_they_differ(tmp_path: Path, module: Any, said: str):
    fit(path=tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        fit(module(), ckpt_path=tmp_path / "x.ckpt")
    assert "load only the weights (load_from_checkpoint) and start a new fit" in str(caught.value)


def test_another_number_of_optimizers_is_an_error(tmp_path: Path):
    fit(path=tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="optimizers in the checkpoint is 1, but configure_optimizers returned 2"):
        fit(Two(), ckpt_path=tmp_path / "x.ckpt")


def test_adamw_goes_on_from_adam(tmp_path: Path):
    class AdamW(TinyModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    fit(Adam(), tmp_path / "x.ckpt")
    assert fit(AdamW(), ckpt_path=tmp_path / "x.ckpt").global_step == 8


def test_a_scheduler_and_optimizer_state_are_where_they_were(tmp_path: Path):
    whole = fit(Scheduled(), tmp_path / "x.ckpt")
    resumed = fit(Scheduled(), ckpt_path=tmp_path / "x.ckpt")
    assert resumed.optimizers[0].param_groups[0]["lr"] == whole.optimizers[0].param_groups[0]["lr"] != 0.1


# ---- Lightning's files -----------------------------------------------------------------------------------------------


def lightning_file(path: Path, epochs: int = 1, batches: int = 4) -> dict[str, Any]:
    """What Lightning 2.6 writes at the end of an epoch, for ``TinyModule`` with SGD."""

    def four(n: int) -> dict[str, int]:
        return {"ready": n, "started": n, "processed": n, "completed": n}

    module, steps = TinyModule(), epochs * batches
    epoch = {**four(epochs), "completed": epochs - 1}
    content = {
        "epoch": epochs - 1,
        "global_step": steps,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": module.state_dict(),
        "loops": {
            "fit_loop": {
                "state_dict": {},
                "epoch_loop.state_dict": {"_batches_that_stepped": steps},
                "epoch_loop.batch_progress": {"total": four(steps), "current": four(batches), "is_last_batch": True},
                "epoch_progress": {"total": epoch, "current": epoch},
            },
        },
        "callbacks": {},
        "optimizer_states": [torch.optim.SGD(module.parameters(), 0.25).state_dict()],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.25},
    }
    torch.save(content, path)
    return content


def test_a_lightning_file_gives_its_weights(tmp_path: Path):
    content = lightning_file(tmp_path / "x.ckpt")
    module = TinyModule.load_from_checkpoint(tmp_path / "x.ckpt")
    assert torch.equal(module.layer.weight, content["state_dict"]["layer.weight"])
    assert module.lr == 0.25


def test_a_fit_goes_on_from_a_lightning_file_and_says_what_it_does_not_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    lightning_file(tmp_path / "x.ckpt", epochs=1)
    with caplog.at_level("INFO", "paceline"):
        trainer = fit(ckpt_path=tmp_path / "x.ckpt", max_epochs=3)
    assert any("was not written by Paceline" in message for message in caplog.messages)
    assert (trainer.current_epoch, trainer.global_step, trainer.state.updates, trainer.state.batches) == (3, 12, 12, 12)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


def test_a_file_without_loops_counts_by_epoch_and_step(tmp_path: Path):
    content = lightning_file(tmp_path / "x.ckpt", epochs=2)
    del content["loops"]
    torch.save(content, tmp_path / "x.ckpt")
    trainer = fit(ckpt_path=tmp_path / "x.ckpt", max_epochs=3)
    assert (trainer.current_epoch, trainer.global_step) == (3, 12)


def test_the_counters_stand_where_lightning_looks_for_them(tmp_path: Path):
    class Saving(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    fit(path=tmp_path / "after.ckpt", callbacks=[Saving()])
    inside = single_file.read(tmp_path / "1.ckpt")["loops"]["fit_loop"]
    assert inside["epoch_progress"]["current"] == {"ready": 2, "started": 2, "processed": 2, "completed": 1}
    assert inside["epoch_loop.batch_progress"]["current"]["completed"] == 4
    assert inside["epoch_loop.batch_progress"]["total"]["completed"] == 8
    assert inside["epoch_loop.state_dict"] == {"_batches_that_stepped": 8}
    after = single_file.read(tmp_path / "after.ckpt")["loops"]["fit_loop"]
    assert after["epoch_progress"]["current"] == {"ready": 2, "started": 2, "processed": 2, "completed": 2}


class KeepsSettings(TinyModule):
    """Adds an object of a class to its checkpoints, and notes what it gets back."""

    found: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["settings"] = Namespace(width=4)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint.get("settings")

    def test_step(self, batch: Any, batch_idx: int) -> None: ...

    def predict_step(self, batch: Any, batch_idx: int) -> None: ...


@pytest.mark.parametrize("where", ["paceline", "foreign"])
def test_each_entry_point_opens_objects_only_where_it_is_told_to(tmp_path: Path, where: str) -> None:
    path = tmp_path / "a.ckpt"
    fit(KeepsSettings(), path)
    if where == "foreign":
        checkpoint = single_file.read(path, trusted=True)
        del checkpoint["paceline"]["objects"]
        torch.save(checkpoint, path)
    for name in ("fit", "validate", "test", "predict"):
        module, run = KeepsSettings(), getattr(Trainer(**QUIET, max_epochs=3), name)
        if where == "foreign":
            with pytest.raises(ValueError, match=r"creates 'argparse.Namespace'.*weights_only=False"):
                run(module, tiny_loader(1), ckpt_path=path)
        else:
            run(module, tiny_loader(1), ckpt_path=path)
            assert module.found is None, name
        run(module, tiny_loader(1), ckpt_path=path, weights_only=False)
        assert module.found == Namespace(width=4), name


class KeepsObject(Callback):
    """Has an object of a class in its state."""

    found: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 3, "kept": [Namespace(width=4)]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.found = state_dict


def test_an_object_in_a_callbacks_state_is_named_by_its_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.ckpt"
    fit(path=path, callbacks=[KeepsObject()])
    for trusted in (None, False):
        callback = KeepsObject()
        with caplog.at_level("INFO", "paceline"):
            trainer = Trainer(**QUIET, max_epochs=3, callbacks=[callback])
            trainer.fit(TinyModule(), tiny_loader(1), ckpt_path=path, weights_only=trusted)
        assert callback.found == (None if trusted is None else KeepsObject().state_dict())
    assert any(
        "also contains objects ('callbacks/KeepsObject (argparse.Namespace)')" in said for said in caplog.messages
    )

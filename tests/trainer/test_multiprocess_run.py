"""Runs in processes that were started for them: what comes back to the Trainer that asked."""

from __future__ import annotations

import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny import TinyModule, tiny_loader
from torch import nn
from torch.utils.data import DataLoader

from paceline import DataModule, Trainer
from paceline.callbacks import Callback, EarlyStopping, ModelCheckpoint
from paceline.checkpoint import single_file
from paceline.loggers import CSVLogger
from paceline.strategies import FSDPStrategy

pytestmark = [pytest.mark.cold]

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Notes(Callback):
    """Has state of its own, and looks at the module's."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.layer: Any = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.epochs.append(trainer.current_epoch)
        self.layer = pl_module.layer


class Rich(TinyModule):
    """Brings a callback, builds a layer in ``setup``, counts its batches, and warms up by a lambda."""

    def configure_callbacks(self) -> Any:
        return [EarlyStopping("val_loss", patience=9)]

    def setup(self, stage: str) -> None:
        if not hasattr(self, "head"):
            self.head = nn.Linear(1, 1)
            nn.init.ones_(self.head.weight)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.layers = [self.layer, self.head]

    def forward(self, x: Any) -> Any:
        return self.head(self.layer(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True, on_step=False, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.counted = [*getattr(self, "counted", []), self.global_step]
        self.seen += 1

    def on_train_end(self) -> None:
        self.head.bias.requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counted"] = list(self.counted)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]


class Fitted(NamedTuple):
    trainer: Trainer
    module: Rich
    folder: Path


def rich_fit(folder: Path, strategy: Any, devices: int, batch_size: int, kind: type[Rich] = Rich) -> Fitted:
    torch.manual_seed(7)
    module = kind()
    keeper = ModelCheckpoint(folder / "ckpt", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = Trainer(
        **(QUIET | {"logger": CSVLogger(folder, name="run")}),
        strategy=strategy,
        devices=devices,
        max_epochs=3,
        log_every_n_steps=2,
        callbacks=[Notes(), keeper],
    )
    loader = tiny_loader(batches=24 // batch_size, batch_size=batch_size, shuffle=True)
    trainer.fit(module, loader, tiny_loader(batches=12 // batch_size, batch_size=batch_size))
    return Fitted(trainer, module, folder)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    return rich_fit(tmp_path_factory.mktemp("here"), "cpu", 1, 4)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    return rich_fit(tmp_path_factory.mktemp("there"), "ddp_fork", 2, 2)


#: Of two processes, and not of one.
OF_TWO = {
    "world_size": 2,
    "num_devices": 2,
    "device_ids": [0, 1],
    "distributed_sampler_kwargs": {"num_replicas": 2, "rank": 0},
}
#: Objects of a process: what matters of them is looked at by name.
PARTS = {"strategy", "profiler", "saver", "state", "loggers", "logger", "settings_in_force", "current_run"}

#: What a ModelCheckpoint draws for each run.
DRAWN = {"run", "line"}


def told(value: Any, folder: Path, number: Any = float) -> Any:
    """A value as it can be compared between two runs: numbers, and the types and states of objects."""
    if isinstance(value, dict):
        return {key: told(entry, folder, number) for key, entry in value.items() if key not in DRAWN}
    if isinstance(value, (list, tuple)):
        return [told(entry, folder, number) for entry in value]
    if isinstance(value, (str, Path)):
        return str(value).replace(str(folder), "...")
    if isinstance(value, torch.Tensor):
        return [number(entry) for entry in value.detach().double().flatten().tolist()]
    if isinstance(value, float):
        return number(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, DataLoader):
        return "DataLoader", len(value.dataset)
    state = value.state_dict() if hasattr(value, "state_dict") else {}
    return type(value).__name__, told(state, folder, number)


def test_everything_that_a_trainer_tells_after_a_forked_fit_is_as_after_a_fit_in_this_process(
    here: Fitted, there: Fitted
) -> None:
    properties = {name for name, value in inspect.getmembers(Trainer) if isinstance(value, property)}
    names = {name for name in properties | set(vars(here.trainer)) if not name.startswith("_")} - PARTS
    assert names > {"current_epoch", "callback_metrics", "optimizers", "lr_scheduler_configs", "callbacks", "log_dir"}
    for name in sorted(names):
        expected = OF_TWO.get(name, told(getattr(here.trainer, name), here.folder, partial(pytest.approx, rel=1e-4)))
        assert told(getattr(there.trainer, name), there.folder) == expected, name
    for slot in type(here.trainer.state).__slots__:
        if slot != "shuffle_seed":
            assert getattr(there.trainer.state, slot) == getattr(here.trainer.state, slot), slot
    assert isinstance(there.trainer.logger, CSVLogger)
    assert Path(there.trainer.log_dir or "", "metrics.csv").is_file()


def test_the_module_and_its_callbacks_are_after_a_forked_fit_as_after_one_in_this_process(
    here: Fitted, there: Fitted
) -> None:
    torch.testing.assert_close(there.module.state_dict(), here.module.state_dict(), rtol=1e-4, atol=1e-6)
    assert there.module.counted == here.module.counted == [6, 12, 18]
    assert there.module.seen == here.module.seen == 3
    assert [p.requires_grad for p in there.module.parameters()] == [p.requires_grad for p in here.module.parameters()]
    assert there.module.layers == [there.module.layer, there.module.head]
    assert there.trainer.callbacks[0].epochs == [0, 1, 2]
    assert there.trainer.callbacks[0].layer is there.module.layer
    assert there.trainer.early_stopping_callback.best_score < 10
    [group] = there.trainer.optimizers[0].param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in there.module.parameters()]
    assert pickle.loads(pickle.dumps(there.module)).counted == [6, 12, 18]


def without_ranks(checkpoint: dict[str, Any]) -> dict[str, Any]:
    section = {k: v for k, v in checkpoint["paceline"].items() if k not in ("ranks", "manifest", "fn", "stage")}
    return {**checkpoint, "paceline": section}


def test_the_checkpoint_that_is_saved_after_a_forked_fit_holds_what_the_last_one_in_it_holds(
    there: Fitted, tmp_path: Path
) -> None:
    there.trainer.save_checkpoint(tmp_path / "after.ckpt")
    after, last = single_file.read(tmp_path / "after.ckpt"), single_file.read(there.folder / "ckpt" / "last.ckpt")
    assert after["counted"] == [6, 12, 18]
    assert after.keys() == last.keys()
    assert after["paceline"].keys() == last["paceline"].keys()
    assert after["paceline"]["manifest"]["sequence"] > last["paceline"]["manifest"]["sequence"]
    assert [kept.keys() for kept in after["paceline"]["ranks"]] == [kept.keys() for kept in last["paceline"]["ranks"]]
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters"):
        torch.testing.assert_close(after.get(name), last.get(name), rtol=0, atol=0)


class Dropping(Rich):
    """Its numbers depend on every rank's random states."""

    def forward(self, x: Any) -> Any:
        return self.head(nn.functional.dropout(self.layer(x), 0.3, self.training))


@pytest.mark.parametrize("strategy", ["ddp_fork", FSDPStrategy(start_method="fork")])
def test_a_checkpoint_saved_after_a_forked_fit_resumes_to_the_same_bits_as_one_saved_in_it(
    tmp_path: Path, strategy: Any
) -> None:
    def resumed(path: Path) -> dict[str, Any]:
        module = Dropping()
        trainer = Trainer(**QUIET, strategy=strategy, devices=2, max_epochs=4, callbacks=[Notes()])
        trainer.fit(module, tiny_loader(batches=12, shuffle=True), tiny_loader(batches=6), ckpt_path=path)
        assert trainer.global_step == 24
        return module.state_dict()

    left = rich_fit(tmp_path, strategy, 2, 2, Dropping)
    left.trainer.save_checkpoint(tmp_path / "after.ckpt")
    torch.testing.assert_close(
        resumed(tmp_path / "after.ckpt"), resumed(tmp_path / "ckpt" / "last.ckpt"), rtol=0, atol=0
    )


def fit_on(fitted: Fitted) -> Any:
    fitted.trainer.max_epochs = 4
    size = 4 // fitted.trainer.world_size
    loader = tiny_loader(batches=24 // size, batch_size=size, shuffle=True)
    fitted.trainer.fit(fitted.module, loader, tiny_loader(batches=12 // size, batch_size=size))
    return fitted.trainer.global_step, fitted.module.state_dict(), fitted.trainer.callback_metrics


def loaded(fitted: Fitted) -> Any:
    fitted.trainer.save_checkpoint(fitted.folder / "x.ckpt")
    return single_file.read(fitted.folder / "x.ckpt")["state_dict"]


#: Every public method of a Trainer, called after a fit, in an order in which a person might call them.
CALLS: dict[str, Callable[[Fitted], Any]] = {
    "print": lambda fitted: fitted.trainer.print("printed"),
    "log_metrics": lambda fitted: fitted.trainer.log_metrics({"more": 1.0}, step=99),
    "may_stop": lambda fitted: fitted.trainer.may_stop(),
    "init_module": lambda fitted: type(fitted.trainer.init_module()),
    "save_checkpoint": loaded,
    "validate": lambda fitted: fitted.trainer.validate(fitted.module, tiny_loader(batches=4), verbose=False),
    "test": lambda fitted: fitted.trainer.test(dataloaders=tiny_loader(batches=4), verbose=False),
    "predict": lambda fitted: fitted.trainer.predict(fitted.module, tiny_loader(batches=4), gather=True),
    "fit": fit_on,
}


def test_every_method_works_after_a_forked_fit_as_after_one_in_this_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public = {name for name, _ in inspect.getmembers(Trainer, inspect.isfunction) if not name.startswith("_")}
    assert public == set(CALLS)
    here, there = (
        rich_fit(tmp_path / name, strategy, count, 4 // count)
        for name, strategy, count in (("here", "cpu", 1), ("there", "ddp_fork", 2))
    )
    for name, call in CALLS.items():
        expected = told(call(here), here.folder, partial(pytest.approx, rel=1e-4, abs=1e-5))
        assert told(call(there), there.folder) == expected, name
    assert capsys.readouterr().out == "printed\n" * 2
    for fitted in (here, there):
        loaded(fitted)
        assert "99" in Path(fitted.trainer.log_dir or "", "metrics.csv").read_text()


def fit(folder: Path, strategy: str, devices: int, batch_size: int) -> tuple[Trainer, TinyModule]:
    torch.manual_seed(7)
    module, keeper = TinyModule(), ModelCheckpoint(folder, monitor="val_loss", save_top_k=2)
    stopper = EarlyStopping("val_loss", patience=9)
    trainer = Trainer(**QUIET, strategy=strategy, devices=devices, max_epochs=3, callbacks=[stopper, keeper])
    loader = tiny_loader(batches=24 // batch_size, batch_size=batch_size, shuffle=True)
    trainer.fit(module, loader, tiny_loader(batches=3))
    return trainer, module


def test_a_fit_in_forked_processes_leaves_its_trainer_as_a_fit_here_does(tmp_path: Path) -> None:
    here, expected = fit(tmp_path / "here", "cpu", 1, 4)
    there, module = fit(tmp_path / "there", "ddp_fork", 2, 2)
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-7)
    assert there.state.status == "finished"
    assert (there.current_epoch, there.global_step) == (here.current_epoch, here.global_step) == (3, 18)
    assert there.callback_metrics["val_loss"] == pytest.approx(here.callback_metrics["val_loss"].item(), rel=1e-5)
    best = there.checkpoint_callback.best_model_path
    assert Path(best).name == Path(here.checkpoint_callback.best_model_path).name
    assert Path(best).exists()
    assert there.early_stopping_callback.best_score == pytest.approx(
        here.early_stopping_callback.best_score.item(), rel=1e-5
    )
    again = pickle.loads(pickle.dumps(there))
    assert (again.global_step, again.callback_metrics) == (18, there.callback_metrics)
    found = there.predict(module, tiny_loader(batches=3), gather=True)
    torch.testing.assert_close(torch.cat(found), module.eval()(tiny_loader(batches=3).dataset.tensors[0]))


class Data(DataModule):
    """Has its data only where ``setup`` ran, and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def setup(self, stage: str) -> None:
        self.rows = tiny_loader(batches=8).dataset

    def train_dataloader(self) -> Any:
        self.made += 1
        return DataLoader(self.rows, batch_size=2)

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.made = state_dict["made"]


def test_a_model_of_configure_model_and_a_datamodule_are_there_after_a_forked_fit(tmp_path: Path) -> None:
    class Late(TinyModule):
        def configure_model(self) -> None:
            self.layer = nn.Linear(4, 1, bias=False)

        def configure_optimizers(self) -> Any:
            class Mine(torch.optim.SGD):
                pass

            return Mine(self.parameters(), lr=0.1)

    data, module = Data(), Late()
    trainer = Trainer(**QUIET, strategy="ddp_fork", devices=2, max_epochs=2, default_root_dir=tmp_path)
    trainer.fit(module, datamodule=data)
    assert (data.made, trainer.num_training_batches, trainer.estimated_stepping_batches) == (1, 4, 8)
    assert trainer.train_dataloader is None
    with pytest.raises(RuntimeError, match=r"(?s)'.*Mine'.*cannot save a checkpoint to resume.*weights_only=True\)"):
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    saved = single_file.read(tmp_path / "x.ckpt")
    assert (saved["Data"], list(saved["state_dict"])) == ({"made": 1}, ["layer.weight"])
    assert torch.equal(saved["state_dict"]["layer.weight"], module.layer.weight)


def test_layers_that_setup_made_come_back_whole_though_the_ranks_had_split_them() -> None:
    class Late(TinyModule):
        def setup(self, stage: str) -> None:
            self.layer = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    module = Late()
    del module.layer
    trainer = Trainer(**QUIET, enable_checkpointing=False, strategy="model_parallel", devices=2, max_epochs=1)
    trainer.fit(module, tiny_loader(batches=2, batch_size=4))
    assert [tuple(weight.shape) for weight in module.parameters()] == [(8, 4), (8,), (1, 8), (1,)]
    assert module(torch.ones(2, 4)).shape == (2, 1)


def test_an_error_in_a_forked_process_comes_back(tmp_path: Path) -> None:
    class Fails(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError(f"wrong on rank {self.global_rank}")

    with pytest.raises(RuntimeError, match=r"(?s)of 2 failed.*ValueError: wrong on rank \d"):
        Trainer(**QUIET, strategy="ddp_fork", devices=2, max_epochs=1).fit(Fails(), tiny_loader())


SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
import torch
from tiny import TinyModule, tiny_loader
from paceline import Trainer

if __name__ == "__main__":
    torch.manual_seed(7)
    module = TinyModule()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(**quiet, accelerator="cpu", strategy=sys.argv[1], devices=int(sys.argv[2]), max_epochs=3)
    trainer.fit(module, tiny_loader(batches=24 // int(sys.argv[3]), batch_size=int(sys.argv[3]), shuffle=True))
    trainer.save_checkpoint("after.ckpt")
    if trainer.is_global_zero:
        print(json.dumps([trainer.global_step, module.layer.weight.flatten().tolist()]))
"""


def test_fresh_processes_shuffle_as_the_one_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).resolve().parent.parent)))

    def run(*options: str) -> Any:
        done = subprocess.run(
            [sys.executable, script, *options], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300
        )
        return *json.loads(done.stdout.splitlines()[-1]), done.stderr

    torch.manual_seed(7)
    module = TinyModule()
    trainer = Trainer(**QUIET, enable_checkpointing=False, strategy="cpu", max_epochs=3)
    trainer.fit(module, tiny_loader(batches=6, batch_size=4, shuffle=True))
    steps, weights = trainer.global_step, module.layer.weight.flatten().tolist()
    for strategy in ("ddp_spawn", "ddp"):
        found = run(strategy, "2", "2")
        assert found[0] == steps
        again = "; each process runs the script, so code above this call runs in all processes"
        line = f"Training on 2 processes (ddp, gloo, cpu){again if strategy == 'ddp' else ''}."
        assert [said for said in found[2].splitlines() if " processes (" in said] == [line]
        saved = single_file.read(tmp_path / "after.ckpt")
        assert saved["state_dict"]["layer.weight"].flatten().tolist() == found[1]
        assert len(saved["paceline"]["ranks"]) == 2
        (tmp_path / "after.ckpt").unlink()
        assert found[1] == pytest.approx(weights, rel=1e-5)

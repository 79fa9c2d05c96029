"""The stand-in for ``lightning``: programs written for it run on Paceline, in this process and in those it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.compat.lightning import names

ROOT = str(Path(paceline.__file__).absolute().parent.parent)


def run(*words: str, folder: Path, **variables: str) -> str:
    """What a program prints; the stand-in is installed by ``words`` or ``variables``."""
    environment = {name: value for name, value in os.environ.items() if name != "PACELINE_STANDS_IN"}
    environment |= {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


NAMES = """
import importlib, importlib.metadata
from paceline import compat
compat.install("lightning")
compat.install("lightning")  # does nothing
from paceline.compat.lightning import names
import lightning as L, lightning.pytorch as pl, pytorch_lightning, lightning_fabric, lightning.fabric
import paceline
assert pl is pytorch_lightning and lightning_fabric is lightning.fabric
assert L.Trainer is pl.Trainer is paceline.Trainer and pl.LightningModule is paceline.TrainingModule
for module, targets in names.PACKAGE.modules.items():
    for name in targets:
        getattr(importlib.import_module(module), name)
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment  # that it has from another module
from lightning.pytorch.trainer.trainer import LightningModule, seed_everything
from unittest import mock
from paceline.loggers import base
assert Logger is base.Logger and rank_zero_experiment is base.rank_zero_experiment
with mock.patch("lightning.pytorch.loggers.csv_logs.rank_zero_experiment", 1):
    assert base.rank_zero_experiment == 1
assert base.rank_zero_experiment is rank_zero_experiment
import inspect, typing
methods = [
    method
    for one in (L.LightningModule, L.LightningDataModule, L.Callback, pl.tuner.Tuner, pl.strategies.FSDPStrategy)
    for name, method in inspect.getmembers(one, inspect.isroutine)
    if name[0] != "_" and method.__module__.startswith("paceline")
]
assert len(methods) > 100 and all(isinstance(typing.get_type_hints(method), dict) for method in methods)
assert typing.get_type_hints(L.Callback.on_fit_start)["trainer"] is L.Trainer
for package in ("lightning", "pytorch-lightning", "pytorch_lightning", "lightning_fabric"):
    assert importlib.metadata.version(package) == names.VERSION == pl.__version__
found = [(one.metadata["Name"], one.version) for one in importlib.metadata.distributions()]
replaced = [("lightning", pl.__version__), ("lightning-fabric", pl.__version__), ("pytorch-lightning", pl.__version__)]
assert sorted(one for one in found if one[0] in dict(replaced)) == replaced, found
assert len(found) > 20 and importlib.metadata.packages_distributions()["pytorch_lightning"] == ["pytorch-lightning"]
from lightning.pytorch.utilities.imports import _TORCH_GREATER_EQUAL_2_1, _RICH_AVAILABLE, _SOMETHING_AVAILABLE
assert _TORCH_GREATER_EQUAL_2_1 is True and _RICH_AVAILABLE is True and _SOMETHING_AVAILABLE is False
from lightning.pytorch.strategies import XLAStrategy
for call, text in ((lambda: XLAStrategy(), "does not support TPUs"), (lambda: pl.Trianer, "Did you mean 'Trainer'")):
    try:
        call()
    except (NotImplementedError, AttributeError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
"""

BEHAVIOUR = """
import os, signal, sys, warnings
from unittest import mock
import torch
from paceline import compat
compat.install("lightning")
import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch.utils.data import DataLoader

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).sum()
        self.log("loss", loss)
        return loss
    def test_step(self, batch, batch_idx):
        self.layer(batch)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

for wrong in (lambda: pl.Trainer(max_epochs="x"), lambda: pl.callbacks.ModelCheckpoint(mode="up")):
    try:
        wrong()
    except MisconfigurationException as error:
        assert isinstance(error, (TypeError, ValueError))
    else:
        raise AssertionError("no error")
trainer = pl.Trainer(max_epochs=1, log_every_n_steps=1, accelerator="cpu", enable_progress_bar=False)
trainer.fit(Net(), DataLoader(torch.ones(4, 4)))
assert set(trainer.logged_metrics) == {"loss"}, trainer.logged_metrics
assert isinstance(trainer.logged_metrics["loss"], torch.Tensor)
assert os.listdir() == ["lightning_logs"], os.listdir()
assert trainer.lightning_module.fabric is None
assert (trainer.state.fn, trainer.state.status) == (None, "finished"), trainer.state
assert repr(trainer.lightning_module.optimizers()).startswith("LightningSGD (")
assert trainer.state != pl.trainer.states.TrainerState() == pl.Trainer().state
plain = {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False, "logger": False}
few = pl.Trainer(**plain)
few.fit(Net(), DataLoader(torch.ones(4, 4)))
assert set(few.logged_metrics) == {"loss"}, "a value that was not sent yet"

class Ends(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        os.kill(os.getpid(), signal.SIGTERM)

try:
    pl.Trainer(**plain).fit(Ends(), DataLoader(torch.ones(4, 4)))
except SIGTERMException as end:
    assert end.code == 143
else:
    raise AssertionError("no end")

class Interrupts(Net):
    def on_train_batch_start(self, batch, batch_idx):
        raise KeyboardInterrupt

interrupted = pl.Trainer(**plain)
try:
    interrupted.fit(Interrupts(), DataLoader(torch.ones(4, 4)))
except SystemExit as end:
    assert end.code == 1 and interrupted.interrupted
else:
    raise AssertionError("no end")

twice = pl.Trainer(**plain | {"max_epochs": 2})
twice.fit(Net(), DataLoader(torch.ones(4, 4)))
twice.save_checkpoint("twice.ckpt")
try:
    pl.Trainer(**plain).fit(Net(), DataLoader(torch.ones(4, 4)), ckpt_path="twice.ckpt")
except MisconfigurationException as error:
    assert "saved after 2 epochs, which is more than Trainer(max_epochs=1)" in str(error), error
else:
    raise AssertionError("no error")
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert pl.Trainer(overfit_batches=2, limit_train_batches=1).overfit_batches == 2
assert any("(overfit_batches=2) replaces limit_train_batches=1." in str(one.message) for one in told), told
logger = mock.Mock()
pl.Trainer(**plain | {"logger": logger, "log_every_n_steps": 4}).fit(Net(), DataLoader(torch.ones(4, 4)))
assert logger.log_metrics.call_args.kwargs["step"] == 3, logger.mock_calls

class Data(pl.LightningDataModule):
    def setup(self, stage):
        self.numbers = torch.ones(4, 4)
    def train_dataloader(self):
        return DataLoader(self.numbers)
    def val_dataloader(self):
        return [DataLoader(self.numbers), DataLoader(self.numbers[:2])]

data, lines = Data(), [f"{{{word} dataloader: %s}}" for word in ("Train", "Validation", "Test", "Predict")]
assert str(data) == os.linesep.join(lines) % (("None",) * 4), str(data)
data.setup("fit")
assert str(data) == os.linesep.join(lines) % ("size=4", "1. size=4 ; 2. size=2", "None", "None"), str(data)
with mock.patch("paceline.compat.lightning.texts.suggested_max_num_workers", return_value=8):
    for _ in range(2):  # each run warns again
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer.test(Net(), DataLoader(torch.ones(4, 4)), verbose=False)
        assert any("test_dataloader has num_workers=0" in str(one.message) for one in told), told

class Nan(Net):
    def training_step(self, batch, batch_idx):
        self.log("nan", float("nan"))
        return super().training_step(batch, batch_idx)

class Ranks(pl.callbacks.ModelCheckpoint):
    def _save_monitor_checkpoint(self, trainer, monitor_candidates):
        pass

try:
    Ranks()
except MisconfigurationException as error:
    assert "defines '_save_monitor_checkpoint', which Paceline never calls" in str(error), error
else:
    raise AssertionError("no error")
kept = pl.callbacks.ModelCheckpoint("kept", monitor="nan")
stats = pl.callbacks.DeviceStatsMonitor(filter_keys={"heat"})
csv = pl.loggers.CSVLogger("csv")
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    pl.Trainer(**plain | {"logger": csv, "callbacks": [kept, stats]}).fit(Nan(), DataLoader(torch.ones(4, 4)))
assert any("keys not found" in str(one.message) and "'heat'" in str(one.message) for one in told), told
assert kept.current_score == kept.best_model_score == float("inf") and os.path.exists(kept.best_model_path)
try:
    pl.Trainer(**plain | {"callbacks": [pl.callbacks.EarlyStopping("nope")]}).fit(Net(), DataLoader(torch.ones(4, 4)))
except RuntimeError as error:
    assert "'nope' was not logged" in str(error), error
else:
    raise AssertionError("no error")
unranked = pl.callbacks.ModelCheckpoint("unranked", monitor="val_loss", save_last=True)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    pl.Trainer(**plain | {"callbacks": [unranked]}).fit(Net(), DataLoader(torch.ones(4, 4)))
assert any("'val_loss' was not logged" in str(one.message) for one in told), told
assert unranked.best_model_path == "" and os.listdir("unranked") == ["last.ckpt"]
board = pl.loggers.TensorBoardLogger("board", comment="x")
board.save()
assert "hparams.yaml" in os.listdir(board.log_dir)
csv.log_metrics(metrics={"a": 1, "stage": "train"}, step=4)
csv.save()
assert open(csv.experiment.metrics_file_path).read().split() == ["step,a,stage", "4,1,train"]
tuner, net = pl.tuner.Tuner(pl.Trainer(**plain)), Net()
net.lr = 0.1
assert tuner.lr_find(net, DataLoader(torch.ones(4, 4)), num_training=1).suggestion() is None and net.lr == 0.1
rates = tuner.lr_find(net, DataLoader(torch.ones(4, 4)), min_lr=1.0, max_lr=0.1, num_training=3).results["lr"]
assert rates[0] == 1.0 and 0.1 <= rates[-1] < rates[0], rates
with mock.patch("lightning.pytorch.accelerators.cuda.num_cuda_devices", return_value=3):
    assert pl.accelerators.CUDAAccelerator.auto_device_count() == 3, "patched"
assert pl.accelerators.CUDAAccelerator.auto_device_count() == torch.cuda.device_count()
"""


LIKE_LIGHTNING = """
import inspect, os, warnings
from unittest import mock
import torch
from paceline import compat
compat.install("lightning")
import lightning.pytorch as pl
from torch.utils.data import DataLoader

class Net(pl.LightningModule):
    def __init__(self, rate=0.1, batch_size=1):
        super().__init__()
        self.save_hyperparameters()
        self.layer, self.called = torch.nn.Linear(4, 1), []
        self.register_buffer("wave", torch.ones(1, dtype=torch.complex64))
    def training_step(self, batch, batch_idx):
        self.log("loss", loss := self.layer(batch).sum())
        return loss
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("by_step", 1.0, on_step=True, on_epoch=False)
        self.log("by_epoch", 1.0)
    test_step = validation_step
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch, batch_idx, dataloader_idx
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.rate)
    def train_dataloader(self):
        return DataLoader(torch.ones(4, 4))

class Spy(pl.Callback):
    def __init__(self):
        self.grads, self.order, self.keys = [], [], set()
    def on_train_epoch_start(self, trainer, pl_module):
        self.order.append("epoch")
    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.order.append("zero")
    def on_before_backward(self, trainer, pl_module, loss):
        self.order.append("backward")
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.grads.append(pl_module.layer.bias.grad)
    def on_validation_start(self, trainer, pl_module):
        self.grads.append(pl_module.layer.bias.grad)
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.keys |= checkpoint.keys()
        checkpoint["mine"] = 1
    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.keys |= checkpoint.keys()

class Modes(Net):
    def on_predict_model_train(self):
        raise AssertionError("called")

class ByHand(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(self.layer(batch).sum())
        assert self.optimizers().step(lambda: "loss") == "loss" and self.optimizers().step() is None
    def configure_optimizers(self):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer := super().configure_optimizers(), 1)
        return [optimizer], [{"scheduler": scheduler, "monitor": "loss"}]

def caught(call):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    return told

data = DataLoader(torch.ones(4, 4))
plain = dict(max_epochs=1, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, logger=False)

# the order of a step, what is left after it, and what callbacks see of checkpoints
spy, logger = Spy(), mock.Mock()
more = {"callbacks": [spy], "num_sanity_val_steps": 0, "logger": logger, "log_every_n_steps": 1}
trainer = pl.Trainer(**plain | more | {"limit_train_batches": 2, "limit_val_batches": 2})
trainer.fit(Net(), val_dataloaders=[data, data])
assert spy.order == ["epoch", "zero", "backward", "zero", "backward"], spy.order
assert [grad is None for grad in spy.grads] == [False, False, True], spy.grads
sent = [(call.kwargs["metrics"].keys(), call.kwargs["step"]) for call in logger.log_metrics.mock_calls]
steps = [({f"by_step/dataloader_idx_{index}"}, step) for index in (0, 1) for step in (0, 1)]
means = ({f"by_epoch/dataloader_idx_{index}" for index in (0, 1)} | {"epoch"}, 1)
assert sent == [({"loss", "epoch"}, 0), ({"loss", "epoch"}, 1), *steps, means], sent
trainer.save_checkpoint("a.ckpt")
assert "paceline" not in spy.keys and torch.load("a.ckpt", weights_only=True).keys() > {"paceline", "mine"}
assert torch.load("a.ckpt", weights_only=True)["pytorch-lightning_version"] == pl.__version__
half, again = pl.Trainer(**plain | {"max_steps": 2, "callbacks": [Spy()]}), Spy()
half.fit(Net())
half.save_checkpoint("half.ckpt")
pl.Trainer(**plain | {"callbacks": [again]}).fit(Net(), ckpt_path="half.ckpt")
assert again.order == ["zero", "backward"] * 2 and "mine" in again.keys and "paceline" not in again.keys, again.order
pl.Trainer(**plain).predict(Modes(), data)
spy = Spy()
told = caught(lambda: pl.Trainer(**plain | {"callbacks": [spy]}).fit(ByHand()))
assert "zero" not in spy.order and any(issubclass(one.category, RuntimeWarning) for one in told), told

# parts of its own
class Own(pl.strategies.SingleDeviceStrategy):
    def load_optimizer_state_dict(self, checkpoint):
        self.given = checkpoint["optimizer_states"]

class Kept(pl.plugins.TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.given = checkpoint

own, kept, weights = Own("cpu"), Kept(), torch.zeros(1)
pl.Trainer(**plain | {"strategy": own}).fit(Net(), ckpt_path="half.ckpt")
assert len(own.given) == 1
pl.plugins.AsyncCheckpointIO(kept).save_checkpoint({"weights": weights}, "unused")
weights += 1
assert kept.given["weights"].item() == 0
pl.Trainer(**plain | {"callbacks": pl.callbacks.ModelCheckpoint("named", "{nothing:.1f}")}).fit(Net())
assert os.listdir("named") == ["nothing=0.0.ckpt"], os.listdir("named")

# hooks by their names
hooks = {name for name, _ in inspect.getmembers(pl.Callback, inspect.isfunction) if name[0] != "_"}
hooks -= {"state_dict", "load_state_dict"}
extra = {"log", "log_dict", "on_profile", "get_accumulate_grad_batches", "around_training_step"}
assert "on_fit_start" in hooks and not hooks & extra, hooks & extra
pl.Trainer(**plain, callbacks=[pl.callbacks.LambdaCallback(**dict.fromkeys(hooks, lambda *_, **__: None))])

# data
assert pl.Trainer(**plain).predict(Net(), [[0, 1], [2]]) == [[(0, 0, 0), (1, 1, 0)], [(2, 0, 1)]]
empty = pl.Trainer(**plain | {"max_epochs": 2})
told = caught(lambda: empty.fit(Net(), (one for one in ())))
assert empty.current_epoch == 2 and any("yielded no batch" in str(one.message) for one in told), told

# callbacks and precision
dry = [pl.callbacks.EarlyStopping("nothing"), pl.callbacks.ModelCheckpoint(monitor="nothing")]
pl.Trainer(**plain | {"callbacks": dry, "fast_dev_run": True}).fit(Net())
timer, stats = pl.callbacks.Timer(), pl.callbacks.DeviceStatsMonitor()
csv = {"callbacks": [timer, stats], "logger": pl.loggers.CSVLogger("stats"), "log_every_n_steps": 1}
pl.Trainer(**plain | csv | {"max_steps": 1}).fit(Net(), val_dataloaders=data)
assert timer.time_elapsed("validate") > 0
assert "on_train_batch_start" in open("stats/lightning_logs/version_0/metrics.csv").readline()
net = Net()
pl.Trainer(**plain | {"precision": "64-true"}).fit(net)
assert (net.layer.weight.dtype, net.wave.dtype) == (torch.float64, torch.complex64)
lbfgs = Net()
lbfgs.configure_optimizers = lambda: torch.optim.LBFGS(lbfgs.parameters())
told = caught(lambda: pl.Trainer(**plain | {"accumulate_grad_batches": 2}).fit(lbfgs))
assert any("does not work with LBFGS" in str(one.message) for one in told), told
ema = pl.callbacks.EMAWeightAveraging(update_every_n_steps=4, update_starting_at_step=2)
assert [step for step in range(10) if ema.should_update(step_idx=step)] == [4, 8]
rates, logger = pl.callbacks.ThroughputMonitor(lambda batch: len(batch), window_size=2), mock.Mock()
more = {"callbacks": rates, "logger": logger, "log_every_n_steps": 1, "limit_val_batches": 1}
with mock.patch("time.perf_counter", side_effect=[0, 7, 11, 13, 14, 15, 17, 18, 19]):  # training, validation, training
    pl.Trainer(**plain | more | {"val_check_interval": 2}).fit(Net(), val_dataloaders=data)
logged = [one.kwargs["metrics"] for one in logger.log_metrics.mock_calls]
assert [one["train/time"] for one in logged if "train/time" in one] == [7, 11, 12, 14], logged
assert [one["validate/time"] for one in logged if "validate/time" in one] == [1, 1], logged
assert "train/device/batches_per_sec" not in logged[0] and "epoch" not in logged[4], logged

twice = [pl.callbacks.EarlyStopping("loss"), pl.callbacks.EarlyStopping("loss")]
try:
    pl.Trainer(**plain | {"callbacks": twice})
except RuntimeError as error:
    assert isinstance(error, ValueError) and "under the same key" in str(error), error
else:
    raise AssertionError("no error")
assert pl.Trainer(**plain).enable_validation is False

# a summary's columns
class Columns(pl.callbacks.RichModelSummary):
    given = []
    @staticmethod
    def summarize(summary_data, total_parameters, trainable_parameters, model_size, total_training_modes, **more):
        Columns.given.append((summary_data, total_parameters, trainable_parameters, model_size, total_training_modes))
        Columns.given.append(more)
        pl.callbacks.ModelSummary.summarize(*Columns.given[-2], **more)

class Sized(Net):
    def __init__(self):
        super().__init__()
        self.scale, self.example_input_array = torch.nn.Parameter(torch.ones(3)), torch.ones(2, 4)
    def forward(self, x):
        return self.layer(x)

class Wrong(pl.callbacks.ModelSummary):
    def summarize(self, table):
        pass

for one in (Net(), Sized()):
    pl.Trainer(**plain | {"enable_model_summary": True, "callbacks": [Columns(1, width=9)]}).fit(one)
first, more, sized, flops = Columns.given
cells = {" ": ["0"], "Name": ["layer"], "Type": ["Linear"], "Params": ["5"], "Mode": ["train"], "FLOPs": ["0"]}
assert first == (list(cells.items()), 5, 5, 2e-5, {"train": 1, "eval": 0}) and more == {"total_flops": 0, "width": 9}
last = [" ", "other params", "n/a", "3", "n/a", "n/a", "n/a", "n/a"]
assert [column[-1] for _, column in sized[0]] == last and sized[1] == 8 and flops["total_flops"] == 16, sized
assert sized[0][-2:] == [("In sizes", ["[2, 4]", "n/a"]), ("Out sizes", ["[2, 1]", "n/a"])], sized
try:
    pl.Trainer(**plain | {"enable_model_summary": True, "callbacks": [Wrong()]}).fit(Net())
except TypeError as error:
    assert "Wrong.summarize(table) cannot be called" in str(error), error
else:
    raise AssertionError("no error")

# several optimizers
class Halves(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.backbone = False, torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward((self.layer(batch) + self.backbone(batch)).sum())
            optimizer.step()
    def configure_optimizers(self):
        return [torch.optim.SGD([one], lr=0.1 * (place + 1)) for place, one in enumerate(self.layer.parameters())]

tuned = pl.callbacks.BackboneFinetuning(1, should_align=False)
trainer = pl.Trainer(**plain | {"max_epochs": 3, "callbacks": [tuned]})
trainer.fit(Halves())
rates = [[round(group["lr"], 6) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
assert rates == [[0.1, 0.04], [0.2, 0.08]] and round(tuned.previous_backbone_lr, 6) == 0.08, rates

# batches without a loss
class Skips(Net):
    def training_step(self, batch, batch_idx):
        self.called.append(self.trainer.global_step)
        return None if self.trainer.global_step == 1 else super().training_step(batch, batch_idx)
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.called.append(sorted(outputs))

skips = Skips()
pl.Trainer(**plain | {"max_steps": 3}).fit(skips)
assert skips.called == [0, ["loss"], 1, [], 2, ["loss"]], skips.called
found = pl.tuner.Tuner(pl.Trainer(**plain)).lr_find(Skips(), num_training=3, update_attr=False).results
assert len(found["lr"]) == 3 and [loss == loss for loss in found["loss"]] == [True, False, True], found

# the tuner
trainer, net = pl.Trainer(**plain | {"logger": True}), Net()
told = caught(lambda: pl.tuner.Tuner(trainer).scale_batch_size(net, max_trials=1))
assert any("does not use that value" in str(one.message) for one in told) and net.logger is trainer.logger

# files of earlier runs
def rows(**more):
    fixed = {"logger": pl.loggers.CSVLogger("again", version=0), "log_every_n_steps": 1, "limit_train_batches": 2}
    trainer = pl.Trainer(**plain | fixed | {"enable_checkpointing": True} | more.pop("arguments", {}))
    told = caught(lambda: trainer.fit(Net(), **more))
    deleted = any("exists and is not empty" in str(one.message) for one in told)
    return trainer, deleted, len(open("again/lightning_logs/version_0/metrics.csv").readlines())

_, kept, lines = rows()
trainer, deleted, more = rows()
assert (kept, deleted, more) == (False, True, lines)
path = trainer.checkpoint_callback.best_model_path
state = torch.load(path, weights_only=True)["callbacks"]
(state,) = (value for key, value in state.items() if key.startswith("ModelCheckpoint"))
assert state["best_model_path"] == path and state["dirpath"] == os.path.dirname(path) and os.path.isabs(path), state
trainer, deleted, more = rows(ckpt_path=path, arguments={"max_epochs": 2})
assert not deleted and more > lines and trainer.checkpoint_callback.best_model_path != path

# what is logged, and where
class Written(pl.loggers.logger.Logger):
    name, version = "written", 0
    def __init__(self):
        super().__init__()
        self.calls = []
    def log_hyperparams(self, params, *args):
        self.calls.append(params)
    def log_metrics(self, metrics, step):
        self.calls.append((step, *metrics))
    def save(self):
        self.calls.append("save")

class Rarely(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).sum()
        self.manual_backward(loss)
        self.log("loss", loss)
        if batch_idx == 1:
            self.optimizers().step()

written = Written()
pl.Trainer(**plain | {"logger": written, "log_every_n_steps": 1}).fit(Rarely(), DataLoader(torch.ones(3, 4)))
steps = [one for step in range(3) for one in ((step, "epoch", "loss"), "save")]
assert written.calls[1:8] == ["save", *steps], written.calls
class Half(Net):
    def validation_step(self, batch, batch_idx):
        self.log("half", 1.0)

written = Written()
more = {"logger": written, "accumulate_grad_batches": 2, "val_check_interval": 1, "num_sanity_val_steps": 0}
pl.Trainer(**plain | more).fit(Half(), DataLoader(torch.ones(5, 4)), data)
assert [one[0] for one in written.calls if "half" in one] == [0, 0, 1, 1, 2], written.calls

class Sometimes(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 3}]
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.called.append(self.trainer.optimizers[0].param_groups[0]["lr"])

for window, rates in ((1, [1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]), (2, [1] * 8)):  # counts the batches of the epoch
    pl.Trainer(**plain | {"max_epochs": 2, "accumulate_grad_batches": window}).fit(sometimes := Sometimes())
    assert sometimes.called == rates, (window, sometimes.called)

class Kept(pl.Callback):
    def __init__(self):
        self.weights = []
    def on_train_epoch_start(self, trainer, pl_module):
        self.weights.append(pl_module.layer.weight.detach().clone())

averaged, kept = Net(), Kept()
mean = pl.callbacks.StochasticWeightAveraging(0.1, swa_epoch_start=2)
pl.Trainer(**plain | {"max_epochs": 4, "callbacks": [kept, mean]}).fit(averaged)
assert torch.allclose(averaged.layer.weight, torch.stack(kept.weights[1:]).mean(0)), kept.weights

tested = Net()
first = tested.layer(torch.ones(4)).item()
asked = {"num_training": 4, "min_lr": 0.01, "max_lr": 1.0, "attr_name": "rate"}
asked |= {"update_attr": False, "early_stop_threshold": None}  # the loss may fall below 0
found = pl.tuner.Tuner(pl.Trainer(**plain)).lr_find(tested, **asked)
assert torch.allclose(torch.tensor(found.results["lr"]), 0.01 * 100 ** torch.tensor([0, 0.5, 0.75, 1])), found.results
assert abs(found.results["loss"][0] - first / 1.98) < 1e-5, (found.results, first)
four = DataLoader(torch.ones(4, 4))
for epochs, steps in ((1, 4), (2, 8), (-1, 10), (None, 10)):
    limited = pl.tuner.Tuner(pl.Trainer(**plain | {"max_epochs": epochs}))
    rates = limited.lr_find(Net(), four, **asked | {"num_training": 10}).results["lr"]
    assert len(rates) == steps, (epochs, rates)
found.results = {"lr": [1.0, 2.0, 20.0, 30.0], "loss": [4.0, 3.0, -4.0, 5.0]}
assert found.suggestion(skip_begin=0) == 1.0 and found.suggestion(skip_begin=9) is None

monitor = pl.callbacks.LearningRateMonitor()
trainer = pl.Trainer(**plain | {"logger": Written(), "callbacks": [monitor]})
trainer.fit(Net(rate=0.25))  # no scheduler: at the start of the epoch too
assert monitor.lrs == {"lr-SGD": [0.25]} and trainer.callback_metrics["lr-SGD"] == 0.25, monitor.lrs
assert repr(type(net.hparams)(lr=1, b=2)) == '"b":  2\\n"lr": 1', net.hparams
"""


PARTS = """
import inspect, logging, typing, warnings
import torch
from paceline import compat
compat.install("lightning")
import lightning.pytorch as pl
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator, XLAAccelerator
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch.utils.data import DataLoader

told = []
logging.getLogger("paceline").setLevel(logging.DEBUG)
logging.getLogger("paceline").addHandler(type("Kept", (logging.Handler,), {"emit": lambda _, r: told.append(r)})())

def says(call, kind, *texts):
    try:
        call()
    except kind as error:
        assert all(text in str(error) for text in texts), error
    else:
        raise AssertionError(texts)

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen, self.ends = torch.nn.Linear(4, 1), [], []
    def training_step(self, batch, batch_idx):
        loop = self.trainer.fit_loop
        self.ends.append((loop.done, loop.skip, loop.epoch_loop.done))
        self.seen.append((loop.epoch_progress.current.completed, loop.epoch_loop.batch_idx,
                          loop.epoch_loop._should_check_val_fx(), loop.epoch_loop.total_batch_idx))
        return self.layer(batch).sum()
    def on_train_epoch_end(self):
        loop = self.trainer.fit_loop
        self.ends.append((loop.done, loop.skip, loop.epoch_loop.done))
    def validation_step(self, batch, batch_idx):
        self.log("x", 1.0)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

# what a Trainer shows
quiet = dict(accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, logger=False)
trainer, net, loader = pl.Trainer(max_epochs=1, **quiet), Net(), DataLoader(torch.ones(2, 4))
trainer.fit_loop.max_epochs = 2
trainer.fit(net, loader, loader)
assert net.seen == [(0, 0, False, 0), (0, 1, True, 1), (1, 0, False, 2), (1, 1, True, 3)], net.seen
first, last, over = (False, False, False), (False, False, True), (True, True, True)
assert net.ends == [first, last, last, first, last, over], net.ends
assert net.device_mesh is None
assert trainer.fit_loop.epoch_progress.current.processed == 2 == trainer.max_epochs
assert trainer.fit_loop.epoch_loop._batches_that_stepped == trainer.fit_loop.epoch_loop.global_step == 4
assert trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed == 4
assert (pl.Trainer(**quiet).val_check_batch, trainer.val_check_batch) == (None, 2)
wrong = type("Wrong", (Net,), {"training_step": lambda self, batch, batch_idx: self.log("x", "text")})
says(lambda: pl.Trainer(max_epochs=1, **quiet).fit(wrong(), loader), ValueError, "text")
assert trainer.fit_loop.max_batches == 2 and trainer.validate_loop.max_batches == [2]
assert trainer._logger_connector.callback_metrics.keys() == {"x"}
assert trainer._checkpoint_connector.dump_checkpoint()["global_step"] == 4
strategy = trainer.strategy
assert strategy.lightning_module is net and strategy.optimizers is trainer.optimizers
assert strategy.lightning_module_state_dict().keys() == net.state_dict().keys()
says(lambda: trainer._signal_connector, AttributeError, "private to Lightning", "on_exception")
says(lambda: trainer.fit_loop.epoch_loop.val_loop._run, AttributeError, "private to Lightning", "callback_metrics")
says(lambda: trainer._callback_connector._attach(), AttributeError, "trainer.callbacks")
says(lambda: setattr(trainer.fit_loop, "epoch_progress", 1), AttributeError, "only reflects")
progress = trainer.fit_loop.epoch_progress.current
says(lambda: setattr(progress, "completed", 3), AttributeError, "completed = 3", "pass ckpt_path to fit")
assert sum("epoch_loop.batch_idx" in r.getMessage() for r in told) == 1

# where loaders come from
class Asks(Net):
    def configure_optimizers(self):
        loop = self.trainer.fit_loop
        train, val = loop._data_source, loop.epoch_loop.val_loop._data_source
        self.found = len(train.dataloader()), train.name, train.is_module(), val.is_defined(), val.instance
        return super().configure_optimizers()
class Loads(Asks):
    train_dataloader = val_dataloader = lambda self: loader
for asks, given in ((Asks(), [loader]), (Asks(), [loader, loader]), (Loads(), [])):
    pl.Trainer(max_epochs=1, **quiet).fit(asks, *given)
    own = isinstance(asks, Loads)
    val = asks if own else given[1] if len(given) == 2 else None
    assert asks.found[:4] == (2, "train_dataloader", own, val is not None), asks.found
    assert asks.found[4] is (val or asks), asks.found

# what would be chosen
chosen = _AcceleratorConnector(accelerator="cpu", devices=3, plugins=TorchCheckpointIO())
assert (chosen._accelerator_flag, chosen._devices_flag, chosen.is_distributed) == ("cpu", 3, True)
assert isinstance(chosen.strategy, DDPStrategy) and isinstance(chosen.accelerator, CPUAccelerator)
assert chosen.strategy.parallel_devices == [torch.device("cpu")] * 3 and chosen.strategy.num_processes == 3
assert chosen._parallel_devices == [torch.device("cpu")] * 3
printed = []
class Prints(Net):
    def on_validation_start(self):
        printed.append(self.trainer._evaluation_loop.verbose)
        self.trainer._evaluation_loop._print_results = lambda results, stage: printed.append((results, stage))
Prints.on_test_start, Prints.test_step = Prints.on_validation_start, Net.validation_step
evaluator = pl.Trainer(**quiet)
evaluator.test(Prints(), loader), evaluator.validate(Prints(), loader, verbose=False)
assert printed == [True, ([{"x": 1.0}], "test"), False], printed
assert trainer._accelerator_connector.strategy is strategy and trainer._accelerator_connector._devices_flag == 1
for one in inspect.signature(_AcceleratorConnector).parameters.values():
    assert inspect.signature(pl.Trainer).parameters[one.name].default == one.default, one
says(lambda: chosen._nothing, AttributeError, "trainer.strategy")

# parts
assert {"cpu", "cuda", "mps", "tpu"} <= set(AcceleratorRegistry.available_accelerators())
assert not XLAAccelerator.is_available() and CPUAccelerator().get_device_stats(object())
assert DoublePrecision().connect(net, [], [])[0] is net
mixed, optimizer = MixedPrecision("16-mixed", "cuda:0"), torch.optim.Adam(net.parameters(), fused=True)
says(lambda: mixed.clip_gradients(optimizer, 1.0), RuntimeError, "unscales the gradients only inside")
net.layer(torch.ones(4)).sum().backward()
MixedPrecision("bf16-mixed", "cpu").clip_gradients(optimizer, 0.1, "value")
called = []
class Own(MixedPrecision):
    def convert_input(self, data): called.append("input"); return super().convert_input(data)
    def clip_gradients(self, *args, **kwargs): called.append("clip"); super().clip_gradients(*args, **kwargs)
assert float(net.layer.bias.grad) == torch.tensor(0.1).item()
own = [Own("bf16-mixed", "cpu")]
pl.Trainer(max_steps=1, plugins=own, gradient_clip_val=1.0, enable_checkpointing=False, **quiet).fit(Net(), loader)
assert called == ["input", "clip"], called
plain = SingleDeviceStrategy(device="cpu", accelerator=CPUAccelerator(), checkpoint_io=TorchCheckpointIO())
plain.save_checkpoint({"state_dict": {}, "x": 1}, "a.ckpt")
assert plain.load_checkpoint("a.ckpt")["x"] == 1 and not plain.restore_checkpoint_after_setup
assert plain.reduce_boolean_decision(True) and plain.batch_to_device([1])[0] == 1

# FSDP 1's arguments
policy = torch.distributed.fsdp.MixedPrecision(param_dtype=torch.bfloat16)
fsdp = FSDPStrategy(
    sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy={torch.nn.Linear}, use_orig_params=True,
    activation_checkpointing_policy={torch.nn.Linear}, mixed_precision=policy, limit_all_gathers=True,
)
assert fsdp.reshard_after_forward is False and fsdp.wrap == fsdp.activation_checkpointing == (torch.nn.Linear,)
assert fsdp.mixed_precision.param_dtype is torch.bfloat16 and fsdp.mixed_precision_config is policy
assert FSDPStrategy(device_mesh=(1, 4)).sizes == (1, 4)
assert "device_mesh" in typing.get_type_hints(FSDPStrategy.__init__)
assert not isinstance(inspect.signature(FSDPStrategy).parameters["device_mesh"].annotation, str)
says(lambda: fsdp.save_checkpoint({}, "b.ckpt", storage_options=1), TypeError, "storage_options")

# helpers
import random
from lightning.fabric.utilities.apply_func import convert_to_tensors
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities import LightningEnum, is_shared_filesystem

drawn = []
for worker in (0, 0, 1):
    torch.manual_seed(5 + worker)  # as torch seeds workers
    pl_worker_init_function(worker)
    drawn.append((random.random(), torch.rand(1).item()))
assert drawn[0] == drawn[1] != drawn[2], drawn
made = convert_to_tensors({"a": [True, 2], "b": (0.5, "x", torch.ones(1).numpy())}, "cpu")
assert [one.dtype for one in made["a"]] == [torch.uint8, torch.int] and made["b"][1] == "x"
assert made["b"][0].dtype is torch.float and isinstance(made["b"][2], torch.Tensor)
Word = LightningEnum("Word", {"one": "first", "two": "second"})
assert Word.one == "FIRST" and Word.from_str("Two") is Word.two and Word.try_from_str("x") is None
assert Word.from_str("First", source="value") is Word.one and len({Word.one, Word.one}) == 1
assert is_shared_filesystem(trainer.strategy)
assert Tqdm(total=4, disable=True).total == 4
assert "ddp_spawn" in StrategyRegistry
"""


def test_every_name_is_there_under_every_name_of_its_module(tmp_path: Path) -> None:
    run("-c", NAMES, folder=tmp_path)


def test_errors_folders_and_values_are_those_that_programs_expect(tmp_path: Path) -> None:
    run("-c", BEHAVIOUR, folder=tmp_path)


def test_a_run_does_what_it_does_under_lightning(tmp_path: Path) -> None:
    run("-c", LIKE_LIGHTNING, folder=tmp_path)


def test_parts_and_private_places_show_what_a_run_does(tmp_path: Path) -> None:
    run("-c", PARTS, folder=tmp_path)


CHILDREN = """
import multiprocessing, subprocess, sys
import lightning

def tell():
    import lightning
    print("spawned", lightning.Trainer.__module__, flush=True)

if __name__ == "__main__":
    print(sys.argv[1:], lightning.Trainer.__module__, flush=True)
    subprocess.run([sys.executable, "-c", "import pytorch_lightning as pl; print('child', pl.Trainer.__module__)"])
    one = multiprocessing.get_context("spawn").Process(target=tell)
    one.start()
    one.join()
"""
TOLD = ["['--lr', '1'] paceline.trainer.trainer", "child paceline.trainer.trainer", "spawned paceline.trainer.trainer"]


@pytest.mark.cold
@pytest.mark.parametrize("start", [["train.py"], ["-m", "train"]])
def test_a_program_and_the_processes_that_it_starts_find_it(start: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CHILDREN)
    told = run("-m", "paceline.compat", "lightning", *start, "--lr", "1", folder=tmp_path)
    assert told.splitlines() == TOLD


def test_code_can_be_run_too(tmp_path: Path) -> None:
    code = (
        "import pickle, sys, lightning\nclass Own: pass\n"
        "assert type(pickle.loads(pickle.dumps(Own()))) is Own\nprint(sys.argv, lightning.__version__)"
    )
    told = run("-m", "paceline.compat", "lightning", "-c", code, "x", folder=tmp_path)
    assert told == f"['-c', 'x'] {names.VERSION}\n"


@pytest.mark.cold
def test_the_variable_installs_it_where_paceline_is_imported_and_in_pytest(tmp_path: Path) -> None:
    code = "import paceline, lightning; print(lightning.Trainer is paceline.Trainer)"
    assert run("-c", code, folder=tmp_path, PACELINE_STANDS_IN="lightning") == "True\n"
    (tmp_path / "test_it.py").write_text(
        "def test_it():\n    import lightning\n    assert lightning.__version__ == '2.6.1'\n"
    )
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider")  # the plugin is an entry point of the package
    assert "1 passed" in run(*words, folder=tmp_path, PACELINE_STANDS_IN="lightning")


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    for words, text in (
        (["-m", "paceline.compat"], "usage: python -m paceline.compat"),
        (["-m", "paceline.compat", "lightnin", "x.py"], "Did you mean 'lightning'"),
        (["-m", "paceline.compat", "lightning", "-m"], "-m must be followed by a module"),
        (
            ["-c", "import sys; sys.modules['lightning'] = sys; import paceline.compat as c; c.install('lightning')"],
            "Call compat.install before",
        ),
    ):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": ROOT},
            capture_output=True,
            text=True,
        )
        assert done.returncode != 0
        assert text in done.stderr


def test_callbacks_of_installed_packages_are_found_once_under_both_names_of_lightning(tmp_path: Path) -> None:
    info = tmp_path / "brings_callbacks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brings-callbacks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lightning.pytorch.callbacks_factory]\nmake = brings_callbacks:make\nown = brings_callbacks:Own\n\n"
        "[pytorch_lightning.callbacks_factory]\nmake = brings_callbacks:make\nother = brings_callbacks:Other\n"
    )
    (tmp_path / "brings_callbacks.py").write_text(
        "from pytorch_lightning import Callback\n\n\nclass Own(Callback):\n    pass\n\n\n"
        "class Other(Callback):\n    pass\n\n\nclass Made(Callback):\n    pass\n\n\n"
        "def make():\n    return [Made()]\n"
    )
    program = """
import lightning as L
off = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
print([type(callback).__name__ for callback in L.Trainer(accelerator="cpu", **off).callbacks])
"""
    words = ("-m", "paceline.compat", "lightning", "-c", program)
    paths = os.pathsep.join([ROOT, str(tmp_path)])
    assert run(*words, folder=tmp_path, PYTHONPATH=paths) == "['Made', 'Own', 'Other']\n"

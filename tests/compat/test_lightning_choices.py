"""Callbacks written for Lightning that decide, save and restore in their own way."""

from __future__ import annotations

from pathlib import Path

from .test_lightning import run

BEGINNING = """
import os
from paceline import compat
compat.install("lightning")
import lightning.pytorch as pl, pytest, torch
from torch.utils.data import DataLoader
from lightning.pytorch.callbacks import BaseFinetuning, Callback, EarlyStopping, ModelCheckpoint

def batches():
    return DataLoader(torch.arange(16.0).view(4, 4) / 16, batch_size=2)

class Net(pl.LightningModule):
    values = (5.0, 3.0, 4.0, 2.0, 1.0, 6.0, 6.0, 6.0)
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 4)
        self.last = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.last(self.first(batch)).square().mean()
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.values[self.trainer.current_epoch], sync_dist=True)
    def configure_optimizers(self):
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

def fitted(*callbacks, epochs=6, net=None, **more):
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    if not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        quiet["enable_checkpointing"] = False
    trainer = pl.Trainer(max_epochs=epochs, callbacks=list(callbacks), **quiet)
    trainer.fit(net or Net(), batches(), batches(), **more)
    return trainer
"""

STOPPING = """
class Mixin:
    def __init__(self):
        super().__init__()
        self.mixed = True

class Own(EarlyStopping, Mixin):
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.seen = []
    def _evaluate_stopping_criteria(self, current):
        self.seen.append(float(current))
        if self.monitor_op(current - self.min_delta, self.best_score):
            self.best_score = current
            return False, self._improvement_message(current)
        return len(self.seen) == 4, "four are enough"

own = Own("val_loss", min_delta=1.0, patience=1)
assert own.mixed and own.min_delta == -1.0 and EarlyStopping("x_acc", 0.5, mode="max").min_delta == 0.5
trainer = fitted(own)
assert own.seen == [5.0, 3.0, 4.0, 2.0] and own.best_score == 3.0 and own.stopped_epoch == 3, own.seen
assert trainer.should_stop and own.stopping_reason_message == "four are enough"

class Usual(EarlyStopping):
    told = []
    def _evaluate_stopping_criteria(self, current):
        return super()._evaluate_stopping_criteria(current)
    def _improvement_message(self, current):
        return f"from {self.best_score:g} to {current:g}"
    @staticmethod
    def _log_info(trainer, message, log_rank_zero_only):
        Usual.told.append(message)
    def _run_early_stopping_check(self, trainer):
        self.checks = getattr(self, "checks", 0) + 1
        super()._run_early_stopping_check(trainer)

class Words(Usual):
    _evaluate_stopping_criteria = EarlyStopping._evaluate_stopping_criteria

for kind in (Usual, Words):
    Usual.told.clear()
    usual = kind("val_loss", patience=2, min_delta=0.5, verbose=True)
    trainer = fitted(usual, epochs=8)
    assert trainer.current_epoch == 7 and usual.checks == 7 and usual.stopping_reason.name == "PATIENCE_EXHAUSTED"
    assert usual.best_score == 1.0 and usual.wait_count == 2
    if kind is Words:
        assert Usual.told[:2] == ["from inf to 5", "from 5 to 3"], Usual.told

class Late(EarlyStopping):
    def _should_skip_check(self, trainer):
        return trainer.current_epoch < 5 or super()._should_skip_check(trainer)
late = Late("val_loss", patience=1)
fitted(late, epochs=8)
assert late.best_score == 6.0 and late.stopped_epoch == 6
class Blind(EarlyStopping):
    def _validate_condition_metric(self, logs):
        return "other" in logs and super()._validate_condition_metric(logs)
blind = Blind("val_loss", patience=1)
assert fitted(blind, epochs=8).current_epoch == 8 and blind.best_score == float("inf")
with pytest.raises(RuntimeError, match="was not logged"):
    EarlyStopping("gone")._validate_condition_metric({})
assert EarlyStopping("gone", strict=False)._validate_condition_metric({}) is False
asked = EarlyStopping("val_loss")
asked._check_on_train_epoch_end = False
assert asked.check_on_train_epoch_end is False
class Asks(EarlyStopping):
    checked = 0
    def _should_skip_check(self, trainer):
        return False
    def _evaluate_stopping_criteria(self, current):
        self.checked += 1
        return False, None
asks = Asks("val_loss", check_on_train_epoch_end=False)
pl.Trainer(logger=False, enable_progress_bar=False, accelerator="cpu", callbacks=[asks]).validate(
    Net(), batches(), verbose=False
)
assert asks.checked == 1
"""

SAVING = """
class Wraps(ModelCheckpoint):
    noted = 0
    def _save_topk_checkpoint(self, trainer, monitor_candidates):
        before, files = self.best_model_path, len(self.best_k_models)
        super()._save_topk_checkpoint(trainer, {**monitor_candidates, "mine": torch.tensor(7)})
        self.noted += before != self.best_model_path
    def state_dict(self):
        return {**super().state_dict(), "noted": self.noted}

wraps = Wraps("wraps", "{epoch}-{mine}", monitor="val_loss", save_top_k=2, save_last=True)
fitted(wraps)
assert wraps.noted == 4 and wraps.best_model_score == 1.0, (wraps.noted, wraps.best_model_score)
assert sorted(os.listdir("wraps")) == ["epoch=3-mine=7.ckpt", "epoch=4-mine=7.ckpt", "last.ckpt"], os.listdir("wraps")
last = torch.load("wraps/last.ckpt", weights_only=False)
assert last["global_step"] == 12 and next(iter(last["callbacks"].values()))["noted"] == 4

class Drops(ModelCheckpoint):
    def _save_topk_checkpoint(self, trainer, monitor_candidates):
        if trainer.current_epoch == 1:
            super()._save_topk_checkpoint(trainer, monitor_candidates)
fitted(Drops("drops", save_top_k=-1), epochs=3)
assert os.listdir("drops") == ["epoch=1-step=4.ckpt"], os.listdir("drops")
fitted(Drops("last", save_last=True), epochs=3)
assert sorted(os.listdir("last")) == ["epoch=1-step=4.ckpt", "last.ckpt"], os.listdir("last")
assert torch.load("last/last.ckpt", weights_only=False)["epoch"] == 2
"""

RESTORING = """
class Returns(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch != 5:
            return
        path, connector = trainer.checkpoint_callback.best_model_path, trainer._checkpoint_connector
        connector.resume_start(checkpoint_path=path)
        connector.restore_datamodule()
        connector._loaded_checkpoint = dict(trainer._checkpoint_connector._loaded_checkpoint)
        connector.restore_model()
        connector.restore_precision_plugin_state()
        connector.restore_optimizers_and_schedulers()
        connector.resume_end()
        assert trainer._checkpoint_connector._loaded_checkpoint == {}
        saved = torch.load(path, weights_only=False)
        self.epoch = saved["epoch"]
        assert all(torch.equal(value, saved["state_dict"][name]) for name, value in pl_module.state_dict().items())
        optimizer, kept = trainer.optimizers[0], saved["optimizer_states"][0]
        assert torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], kept["state"][0]["momentum_buffer"])
        assert optimizer.param_groups[0]["lr"] == kept["param_groups"][0]["lr"] < 0.1
        assert trainer.lr_scheduler_configs[0].scheduler.state_dict() == saved["lr_schedulers"][0]
        assert trainer.global_step == 10 and trainer.current_epoch == 5  # the counters stay
        self.done = True

returns = Returns()
trainer = fitted(returns, ModelCheckpoint("best", monitor="val_loss"))
assert returns.done and returns.epoch == 4 and trainer.global_step == 12

class Weights(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            connector = trainer._checkpoint_connector
            connector.resume_start(trainer.checkpoint_callback.best_model_path)
            connector.restore_model()
            with pytest.raises(KeyError, match="only weights"):
                connector.restore_optimizers()
            connector.resume_end()
fitted(Weights(), ModelCheckpoint("weights", save_weights_only=True), epochs=2)

# parameter groups and optimizers that a callback replaces
class Thaws(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.first)
    def on_train_epoch_start(self, trainer, pl_module):
        optimizer = trainer.strategy.optimizers[0]
        if trainer.current_epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.first, optimizer, lr=0.01)
            optimizer.param_groups = self._apply_mapping_to_param_groups(
                self._apply_mapping_to_param_groups(optimizer.param_groups, {p: p for p in pl_module.parameters()}),
                {p: p for p in pl_module.parameters()},
            )
        known = len(self._internal_optimizer_metadata.get(0, []))
        self._store(pl_module, 0, known, optimizer.param_groups)
    def state_dict(self):
        return {"kept": self._internal_optimizer_metadata}
    def load_state_dict(self, state_dict):
        self._restarting, self._internal_optimizer_metadata = True, state_dict["kept"]

class Groups(Callback):
    def on_train_start(self, trainer, pl_module):
        self.sizes = [len(group["params"]) for group in trainer.optimizers[0].param_groups]

thaws, checkpoint = Thaws(), ModelCheckpoint("thaws")
fitted(thaws, checkpoint, epochs=2)
names = [group["params"] for group in thaws._internal_optimizer_metadata[0]]
assert names == [["last.weight", "last.bias"], ["first.weight", "first.bias"]], names
groups = Groups()
fitted(Thaws(), groups, epochs=3, ckpt_path=checkpoint.best_model_path)
assert groups.sizes == [2, 2], groups.sizes

class Replaces(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            optimizer = torch.optim.Adam(pl_module.parameters(), lr=0.3)
            trainer.strategy.optimizers = [optimizer]
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
            trainer.strategy.lr_scheduler_configs = [pl.utilities.types.LRSchedulerConfig(schedule)]
trainer = fitted(Replaces(), epochs=2)
assert type(trainer.optimizers[0]) is torch.optim.Adam and trainer.optimizers[0].state
assert abs(trainer.optimizers[0].param_groups[0]["lr"] - 0.03) < 1e-9
with pytest.raises(AttributeError, match="no Trainer has this strategy yet"):
    pl.strategies.DDPStrategy().optimizers = []
assert trainer.strategy.strategy_name == "single_device" and pl.strategies.FSDPStrategy().strategy_name == "fsdp"

# what is logged, and with which arguments
class Reads(Callback):
    def on_validation_end(self, trainer, pl_module):
        found = {metric.meta.name: metric for metric in trainer._results.result_metrics}
        self.metric = found["val_loss"]
    def on_train_epoch_start(self, trainer, pl_module):
        loop = trainer.fit_loop
        setattr(loop, "epoch_progress.current.completed", trainer.current_epoch)
        assert trainer._results.result_metrics == []
reads = Reads()
trainer = fitted(reads, epochs=1)
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
assert isinstance(reads.metric, _ResultMetric) and reads.metric.is_tensor
assert reads.metric.meta.sync.should is True and trainer._results is None
one, two = ModelCheckpoint("x"), reads
assert trainer._callback_connector._reorder_callbacks([one, two]) == [two, one]
assert Net()._compiler_ctx is None
from lightning.pytorch.core.optimizer import _MockOptimizer
mock = _MockOptimizer()
schedule = torch.optim.lr_scheduler.StepLR(mock, 1)
mock.step()
schedule.step()
assert mock.param_groups == [] and mock.step(lambda: 2) == 2 and isinstance(mock, torch.optim.Optimizer)
"""

RANKS = """
from paceline import compat
compat.install("lightning")
from lightning_utilities.core.rank_zero import rank_zero_only as shared
import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only
print(shared.rank, shared(lambda: "first")(), rank_zero_only.rank)
rank_zero_only.rank = 3
print(shared.rank, shared(lambda: "first", default="other")())
"""

OUTSIDE = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.migration import migrate_checkpoint

# a module is saved without a run
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
for name in ("connect", "_lightning_module"):
    trainer, net = pl.Trainer(enable_checkpointing=False, **quiet), Net()
    if name == "connect":
        trainer.strategy.connect(net)
    else:
        trainer.strategy._lightning_module = net
    assert trainer.strategy._lightning_module is net is trainer.lightning_module and net.trainer is trainer
    trainer.save_checkpoint("unfit.ckpt")
    found = torch.load("unfit.ckpt", weights_only=False)
    assert all(torch.equal(value, found["state_dict"][name]) for name, value in net.state_dict().items())
    assert type(Net.load_from_checkpoint("unfit.ckpt")) is Net
with pytest.raises(AttributeError, match="needs a Trainer"):
    DDPStrategy().connect(Net())
class Swaps(Net):
    def on_train_start(self):
        with pytest.raises(RuntimeError, match="before the run"):
            self.trainer.strategy.connect(Net())
        self.trainer.strategy.connect(self)
fitted(net=Swaps(), epochs=1)

# checkpoints of other versions
assert migrate_checkpoint(found) == (found, {}) and "legacy_pytorch-lightning_version" not in found
migrated, changes = migrate_checkpoint({"pytorch-lightning_version": "2.1.0", "epoch": 3}, target_version="2.2")
now = {"pytorch-lightning_version": pl.__version__, "legacy_pytorch-lightning_version": "2.1.0", "epoch": 3}
assert migrated == now and changes == {}, migrated
with pytest.raises(ValueError, match="saved by version 1.9.5 of Lightning"):
    migrate_checkpoint({"pytorch-lightning_version": "1.9.5"})

# methods that a program overrides
class Launches(DDPStrategy):
    def _configure_launcher(self):
        self._launcher = None
with pytest.raises(TypeError, match="defines '_configure_launcher', which Paceline never calls"):
    Launches()
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
original = _AcceleratorConnector._check_and_init_precision
assert original(trainer._accelerator_connector) is trainer.precision_plugin
with pytest.warns(UserWarning, match="_check_and_init_precision was replaced by .* which Paceline never calls"):
    _AcceleratorConnector._check_and_init_precision = lambda self: original(self)
from types import ModuleType
from lightning.fabric.utilities.registry import _register_classes
from lightning.pytorch.accelerators import Accelerator
class Made(Accelerator):
    @classmethod
    def register_accelerators(cls, registry):
        registry["made"] = cls
module, registry = ModuleType("made_up"), {}
module.Made, module.Other, module.Accelerator = Made, Net, Accelerator
_register_classes(registry, "register_accelerators", module, Accelerator)
assert registry == {"made": Made}
class Loads(Net):
    def train_dataloader(self):
        return batches()
class CLI(LightningCLI):
    asked = []
    def _parse_ckpt_path(self):
        self.asked.append(self.config.subcommand)
    def _set_seed(self):
        self.asked.append("seed")
options = ["--trainer.fast_dev_run=true", "--trainer.logger=false", "--trainer.accelerator=cpu"]
CLI(Loads, args=["fit", *options], save_config_callback=None)
assert CLI.asked == ["fit", "seed"], CLI.asked
"""


def test_rank_zero_only_of_lightning_utilities_knows_the_rank(tmp_path: Path) -> None:
    assert run("-c", RANKS, folder=tmp_path).splitlines() == ["0 first 0", "3 other"]
    assert run("-c", RANKS, folder=tmp_path, RANK="1", WORLD_SIZE="2").splitlines() == ["1 None 1", "3 other"]


def test_a_module_is_saved_without_a_run_and_overridden_methods_are_called_or_refused(tmp_path: Path) -> None:
    run("-c", BEGINNING + OUTSIDE, folder=tmp_path)


def test_callbacks_decide_save_and_restore_in_their_own_way(tmp_path: Path) -> None:
    run("-c", BEGINNING + STOPPING + SAVING + RESTORING, folder=tmp_path)

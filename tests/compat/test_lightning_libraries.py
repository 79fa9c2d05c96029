"""What libraries written for Lightning override and import, although it is not part of its documented interface."""

from __future__ import annotations

from pathlib import Path

from .test_lightning import run

PROGRAM = """
import os
from argparse import Namespace
from dataclasses import dataclass
from paceline import compat
compat.install("lightning")
import lightning.pytorch as pl, numpy as np, pytest, torch
from torch.utils.data import DataLoader
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.callbacks.progress.rich_progress import CustomProgress, MetricsTextColumn
from lightning.pytorch.core.saving import _load_from_checkpoint
from lightning.pytorch.loggers.utilities import _scan_checkpoints
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.compile import _maybe_unwrap_optimized
from lightning.fabric.utilities.logger import (
    _add_prefix, _convert_json_serializable, _convert_params, _flatten_dict, _sanitize_callable_params, _sanitize_params
)

quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")

def batches():
    return DataLoader(torch.ones(4, 4), batch_size=2)

class Net(pl.LightningModule):
    def __init__(self, size=4):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(size, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()
    def validation_step(self, batch, batch_idx):
        self.log("epoch_seen", float(self.trainer.current_epoch))
    test_step = validation_step
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def kept(callback, *entries):
    trainer = pl.Trainer(max_epochs=4, callbacks=[callback], **quiet)
    for entry in entries:
        if entry == "validate":
            trainer.validate(Net(), batches(), verbose=False)
        else:
            trainer.fit(Net(), batches(), batches())
    return sorted(os.listdir(callback.dirpath)) if callback.dirpath and os.path.isdir(callback.dirpath) else []

# a ModelCheckpoint that decides when to save
class Untrained(pl.callbacks.ModelCheckpoint):
    def _should_skip_saving_checkpoint(self, trainer):
        return trainer.state.fn not in (TrainerFn.FITTING, TrainerFn.VALIDATING) or trainer.sanity_checking
    def _should_save_on_train_epoch_end(self, trainer):
        return bool(self._save_on_train_epoch_end)
class OddEpochs(pl.callbacks.ModelCheckpoint):
    def _should_skip_saving_checkpoint(self, trainer):
        return trainer.current_epoch % 2 == 0 or super()._should_skip_saving_checkpoint(trainer)
class Usual(pl.callbacks.ModelCheckpoint):
    def _should_save_on_train_epoch_end(self, trainer):
        return super()._should_save_on_train_epoch_end(trainer)
untrained = Untrained("untrained")
assert kept(untrained, "validate") == ["epoch=0-step=0.ckpt"] and untrained._last_global_step_saved == 0
assert torch.load(untrained.best_model_path, weights_only=False)["state_dict"].keys() == {"layer.weight", "layer.bias"}
both = kept(Untrained("both", monitor="epoch_seen", save_top_k=-1, save_last=True), "validate", "fit")
ends = [f"epoch={n}-step={2 * (n + 1)}.ckpt" for n in range(4)]
assert both == ["epoch=0-step=0.ckpt", *ends, "last.ckpt"], both
assert kept(OddEpochs("odd", save_top_k=-1, monitor="epoch_seen"), "fit") == ends[1::2]
assert kept(OddEpochs("none", save_top_k=-1), "validate") == []
assert kept(Usual("usual", save_top_k=-1, monitor="epoch_seen"), "fit") == ends
asked = pl.callbacks.ModelCheckpoint("x")
asked._save_on_train_epoch_end = False
assert asked.save_on_train_epoch_end is False

# a test loop that prints in its own way
printed = []
class Loop(_EvaluationLoop):
    @staticmethod
    def _print_results(results, stage):
        printed.append((stage, [{name: value.item() for name, value in one.items()} for one in results]))
class Own(pl.Trainer):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.test_loop = Loop(self, TrainerFn.TESTING, RunningStage.TESTING, inference_mode=True)
trainer = Own(**quiet)
assert trainer.test(Net(), batches()) == [{"epoch_seen": 0.0}]
trainer.test(Net(), batches(), verbose=False)
assert trainer.test_loop.max_batches == [2] and not trainer.test_loop.verbose
trainer.validate(Net(), batches(), verbose=False)
assert printed == [("test", [{"epoch_seen": 0.0}])] and type(trainer.test_loop) is Loop
class Runs(_EvaluationLoop):
    def run(self): pass
with pytest.raises(Exception, match="defines 'run', which Paceline never calls"):
    Runs(trainer, TrainerFn.TESTING, RunningStage.TESTING)
with pytest.raises(AttributeError, match="subclass of Lightning's _EvaluationLoop"):
    trainer.validate_loop = object()

# kinds of devices of a library's own
class NPU(Accelerator):
    @property
    def name(self): return "made_up"
AcceleratorRegistry.register("made_up", NPU, description="made up")
assert NPU() == "made_up" and AcceleratorRegistry["made_up"] is NPU
with pytest.raises(Exception, match="override=True"):
    AcceleratorRegistry.register("made_up", Accelerator)
class Two(NPU): pass
assert AcceleratorRegistry.register("made_up", override=True)(Two) is Two is AcceleratorRegistry["made_up"]
AcceleratorRegistry.remove("made_up")
AcceleratorRegistry.register("cpu", NPU)
assert "made_up" not in AcceleratorRegistry and AcceleratorRegistry["cpu"] is not NPU

# helper functions
class Loads(Net):
    @classmethod
    def load_from_checkpoint(cls, path, **more):
        return _load_from_checkpoint(cls, path, "cpu", None, False, **more)
trainer = pl.Trainer(max_epochs=1, enable_checkpointing=False, **quiet)
trainer.fit(Loads(), batches())
trainer.save_checkpoint("one.ckpt")
assert type(Loads.load_from_checkpoint("one.ckpt", size=4)) is Loads
@dataclass
class Options:
    depth: int = 2
assert _convert_params(Namespace(a=1)) == {"a": 1} and _convert_params(None) == {}
nested = {"a": {"b": 1, 2: Options()}, "l": [{"c": 3}, {"c": 4}], "m": [1, 2], "n": Namespace(d=5)}
assert _flatten_dict(nested) == {"a/b": 1, "a/2/depth": 2, "l/0/c": 3, "l/1/c": 4, "m": [1, 2], "n/d": 5}
assert _flatten_dict({"a": {"b": 1}}, ".") == {"a.b": 1}
def fails(): raise ValueError
calls = {"net": Net, "three": lambda: 3, "fails": fails, "makes": lambda: fails, "n": 1}
assert _sanitize_callable_params(calls) == {"net": "Net", "three": 3, "fails": "fails", "makes": "<lambda>", "n": 1}
assert _sanitize_params({"x": np.float32(0.5), "y": [1], "z": True}) == {"x": 0.5, "y": "[1]", "z": True}
assert _convert_json_serializable({"x": Net, "y": [1]}) == {"x": str(Net), "y": [1]}
assert _add_prefix({"x": 1}, "val", "-") == {"val-x": 1} and _add_prefix({"x": 1}, "", "-") == {"x": 1}
ranked = pl.callbacks.ModelCheckpoint("ranked", monitor="epoch_seen", save_top_k=2, save_last=True)
kept(ranked, "fit")
found = _scan_checkpoints(ranked, {})
assert sorted((os.path.basename(path), tag) for _, path, _, tag in found) == [
    (ends[0], "best_k"), (ends[1], "best_k"), ("last.ckpt", "latest")
], found
assert found == sorted(found, key=lambda one: one[0]) and float(found[0][2]) == 0.0
assert _scan_checkpoints(ranked, {path: time for time, path, _, _ in found}) == []
assert _maybe_unwrap_optimized(untrained_net := Net()) is untrained_net
assert DDPStrategy(broadcast_buffers=False)._ddp_kwargs == {"broadcast_buffers": False}
with pytest.raises(NotImplementedError, match="override get_metrics"):
    CustomProgress()
due = []
class Asks(pl.Callback):
    def on_train_batch_start(self, trainer, *rest): due.append(trainer._logger_connector.should_update_logs)
    def on_train_batch_end(self, trainer, *rest): due.append(trainer._logger_connector.should_update_logs)
arguments = quiet | dict(enable_checkpointing=False, accumulate_grad_batches=2, log_every_n_steps=2, max_epochs=2)
pl.Trainer(callbacks=[Asks()], **arguments).fit(Net(), DataLoader(torch.ones(4, 4)))
assert due == [*[False] * 4, *[True] * 4] * 2, due
"""


def test_libraries_find_what_they_override_and_import(tmp_path: Path) -> None:
    run("-c", PROGRAM, folder=tmp_path)

"""``Trainer(plugins=...)``: objects that replace a part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RanksError, ranks
from tiny import TinyModule, tiny_loader
from torch import nn

from paceline import Trainer
from paceline.callbacks import LambdaCallback, ModelCheckpoint
from paceline.checkpoint.checkpoint_io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from paceline.strategies import MixedPrecision, TruePrecision
from paceline.strategies.sync_batch_norm import LayerSync, TorchSyncBatchNorm


class InTwoFiles(CheckpointIO):
    """Writes weights and the rest apart, without Paceline's form."""

    def __init__(self) -> None:
        self.options: list[Any] = []
        self.paths: list[Any] = []
        self.removed: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.options.append(storage_options)
        torch.save(checkpoint, path)
        Path(f"{path}.json").write_text(json.dumps({"step": checkpoint["global_step"]}))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        self.paths.append(path)
        assert json.loads(Path(f"{path}.json").read_text())["step"] > 0
        return torch.load(path, map_location=map_location, weights_only=True)

    def remove_checkpoint(self, path: Any) -> None:
        self.removed.append(Path(path).name)
        Path(path).unlink()


def fitted(quiet: dict[str, Any], folder: Path, plugin: CheckpointIO, epochs: int = 3, **more: Any) -> Trainer:
    keeper = ModelCheckpoint(folder, "{epoch}")
    options = {**quiet, "max_epochs": epochs, "callbacks": [keeper], "enable_checkpointing": None}
    trainer = Trainer(**options, plugins=[plugin])
    torch.manual_seed(0)
    trainer.fit(TinyModule(), tiny_loader(), **more)
    return trainer


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in trainer.training_module.parameters()]


def test_checkpoints_go_through_a_users_own_and_a_fit_resumes_from_them(quiet: dict[str, Any], tmp_path: Path) -> None:
    mine = InTwoFiles()
    whole = fitted(quiet, tmp_path / "whole", mine)
    assert mine.removed == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert whole.strategy.checkpoint_io is mine
    whole.save_checkpoint(tmp_path / "by_hand.ckpt", storage_options={"a": 1})
    assert mine.options[-1] == {"a": 1}
    fitted(quiet, tmp_path / "cut", mine, epochs=1)
    again = fitted(quiet, tmp_path / "cut", mine, ckpt_path=tmp_path / "cut" / "epoch=0.ckpt")
    assert mine.paths == [str(tmp_path / "cut" / "epoch=0.ckpt")]
    torch.testing.assert_close(weights(again), weights(whole), rtol=0, atol=0)


class InBackground(AsyncCheckpointIO):
    """A subclass; notes which files are there after each write."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.left, self.ended = folder, [], 0

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        self.left.append(sorted(file.name for file in self.folder.glob("*.ckpt")))

    def teardown(self) -> None:
        super().teardown()
        self.ended += 1


def test_a_write_in_the_background_is_on_disk_before_older_files_go_and_a_run_ends_its_plugin(
    quiet: dict[str, Any], tmp_path: Path
) -> None:
    plugin = InBackground(tmp_path)
    trainer = fitted(quiet, tmp_path, plugin)
    assert plugin.left == [["epoch=0.ckpt"], ["epoch=0.ckpt", "epoch=1.ckpt"], ["epoch=1.ckpt", "epoch=2.ckpt"]]
    assert (plugin.ended, sorted(file.name for file in tmp_path.glob("*.ckpt"))) == (1, ["epoch=2.ckpt"])
    assert plugin.load_checkpoint(tmp_path / "epoch=2.ckpt")["global_step"] == trainer.global_step


@pytest.mark.parametrize("plugin", [TorchCheckpointIO, AsyncCheckpointIO])
def test_paceline_s_own_writes_what_is_written_without_it(
    plugin: type[CheckpointIO], quiet: dict[str, Any], tmp_path: Path
) -> None:
    trainer = fitted(quiet, tmp_path, plugin(), epochs=1)
    trainer.save_checkpoint(tmp_path / "by_hand.ckpt")
    assert plugin().load_checkpoint(tmp_path / "by_hand.ckpt")["global_step"] == trainer.global_step
    with pytest.raises(ValueError, match=r"storage_options=\{\}\. Storage options come from the environment"):
        trainer.save_checkpoint(tmp_path / "x.ckpt", storage_options={})
    plugin().remove_checkpoint(tmp_path / "by_hand.ckpt")
    assert not (tmp_path / "by_hand.ckpt").exists()


def test_each_part_is_replaced_once(quiet: dict[str, Any]) -> None:
    trainer = Trainer(**quiet, plugins=[TruePrecision("bf16-true"), TorchCheckpointIO(), TorchSyncBatchNorm()])
    assert (trainer.precision, trainer.sync_batchnorm) == ("bf16-true", True)
    with pytest.raises(ValueError, match="'TruePrecision' and 'MixedPrecision', but only one Precision is allowed"):
        Trainer(**quiet, plugins=[TruePrecision("bf16-true"), MixedPrecision()])
    with pytest.raises(TypeError, match=r"got a str\. Pass a Precision, a CheckpointIO"):
        Trainer(**quiet, plugins="ddp")


def test_a_layer_sync_contradicts_sync_batchnorm() -> None:
    assert Trainer(accelerator="cpu", sync_batchnorm=True, plugins=TorchSyncBatchNorm()).sync_batchnorm
    with pytest.raises(ValueError, match=r"sync_batchnorm=True, plugins=\[Doubled\(...\)\]\) asks for two ways"):
        Trainer(accelerator="cpu", sync_batchnorm=True, plugins=Doubled())


class Doubled(LayerSync):
    """Layers that a user's plugin changes: one that multiplies by the number of processes."""

    def apply(self, model: nn.Module) -> nn.Module:
        self.own = dict(model.named_children())
        for name, layer in self.own.items():
            setattr(model, name, nn.Sequential(layer, nn.Identity()))
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        for name, layer in self.own.items():
            setattr(model, name, layer)
        return model


class Returns(Doubled):
    def apply(self, model: nn.Module) -> nn.Module:
        return nn.Sequential(model)


def test_a_users_layer_sync_changes_the_layers_of_a_fit_with_several_processes(quiet: dict[str, Any]) -> None:
    def fit(devices: int, plugin: LayerSync) -> Any:
        seen: list[Any] = []
        module = TinyModule()
        before = dict(module.named_children())
        look = LambdaCallback(
            on_train_start=lambda trainer, module: seen.append(dict(module.named_children()) == before)
        )
        options = {**quiet, "strategy": "ddp", "devices": devices, "callbacks": [look], "max_steps": 1}
        Trainer(**options, plugins=[plugin]).fit(module, tiny_loader())
        return seen, dict(module.named_children()) == before

    assert ranks(2, fit, 2, Doubled()) == [([False], True)] * 2
    assert ranks(1, fit, 1, Doubled()) == [([True], True)]
    with pytest.raises(RanksError, match=r"Returns\.apply returned a Sequential instead of the module"):
        ranks(2, fit, 2, Returns())


def test_synchronized_batch_norms_can_be_taken_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))
    before, plugin = list(model.modules()), TorchSyncBatchNorm()
    assert sum(isinstance(layer, nn.SyncBatchNorm) for layer in plugin.apply(model).modules()) == 2
    assert [id(layer) for layer in plugin.revert(model).modules()] == [id(layer) for layer in before]

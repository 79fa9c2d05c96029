"""Helpers that libraries import from Lightning's ``utilities`` and ``demos``."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch
from rank_processes import ranks
from tiny import TinyModule, tiny_loader
from torch import nn

from paceline import Trainer, TrainingModule
from paceline.compat.lightning import demos, library_functions


def test_a_base_class_reads_and_stores_the_arguments_of_its_init() -> None:
    class Base(TrainingModule):
        def __init__(self, width: int, *, lr: float = 0.1, **more: Any) -> None:
            super().__init__()
            self.found = library_functions.get_init_args(cast(FrameType, inspect.currentframe()))
            library_functions.save_hyperparameters(self, ignore="width")

    module = Base(3, depth=2)
    assert module.found == {"width": 3, "lr": 0.1, "depth": 2}
    assert module.hparams == {"lr": 0.1, "depth": 2}


def test_attributes_are_found_in_the_module_and_its_hyperparameters() -> None:
    class Net(TrainingModule):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.batch_size = 4

    net = Net()
    assert library_functions.lightning_hasattr(net, "lr")
    assert not library_functions.lightning_hasattr(net, "rate")
    library_functions.lightning_setattr(net, "lr", 0.5)
    library_functions.lightning_setattr(net, "batch_size", 8)
    assert (library_functions.lightning_getattr(net, "lr"), net.hparams.lr, net.batch_size) == (0.5, 0.5, 8)
    with pytest.raises(AttributeError, match="'rate' is not an attribute or hyperparameter of Net"):
        library_functions.lightning_getattr(net, "rate")


def test_detached_copies_keep_the_structure() -> None:
    weight = torch.ones(2, requires_grad=True)
    copy = library_functions.recursive_detach({"a": weight, "b": [weight, (1, "x")]}, to_cpu=True)
    assert not copy["a"].requires_grad
    assert not copy["b"][0].requires_grad
    assert copy["b"][1] == (1, "x")


def test_files_are_written_whole_and_read_with_and_without_loading_their_values(tmp_path: Path) -> None:
    path = tmp_path / "new" / "weights.pt"
    library_functions.atomic_save({"w": torch.ones(3)}, path)
    assert [file.name for file in path.parent.iterdir()] == ["weights.pt"]
    assert torch.equal(library_functions.load(path)["w"], torch.ones(3))
    assert torch.equal(library_functions.lazy_load(path)["w"], torch.ones(3))
    with path.open("rb") as file:
        assert torch.equal(library_functions.load(file, map_location="cpu")["w"], torch.ones(3))
    assert library_functions.get_filesystem(path).isfile(str(path))
    assert library_functions.is_local(path)
    assert not library_functions.is_local("s3://bucket/x")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        library_functions.lazy_load(tmp_path / "other.pt")


def test_tensors_without_values_get_initialized_ones() -> None:
    with torch.device("meta"):
        network = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.BatchNorm1d(2))
    library_functions.materialize_meta_tensors(network, "cpu")
    assert not any(tensor.is_meta for tensor in network.state_dict().values())
    assert torch.equal(network[2].running_var, torch.ones(2))

    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(2, device="meta"))

    with pytest.raises(TypeError, match=r"1 \(Raw\) has tensors on the meta device, but no reset_parameters"):
        library_functions.materialize_meta_tensors(nn.Sequential(nn.Linear(1, 1), Raw()), "cpu")


def test_objects_that_cannot_be_pickled_are_recognized() -> None:
    assert library_functions.is_picklable({"a": torch.ones(1)})
    assert not library_functions.is_picklable(lambda: None)


def test_more_gpus_than_there_are_cannot_be_found() -> None:
    with pytest.raises(ValueError, match=r"this process sees only \d+ GPUs"):
        library_functions.find_usable_cuda_devices(torch.cuda.device_count() + 1)


@pytest.mark.parametrize("model", [demos.BoringModel, demos.ManualOptimBoringModel])
def test_the_demo_models_train_on_the_demo_data(model: type[demos.BoringModel], tmp_path: Path) -> None:
    trainer = Trainer(fast_dev_run=2, accelerator="cpu", enable_progress_bar=False, default_root_dir=tmp_path)
    module, data = model(), demos.BoringDataModule()
    before = module.layer.weight.detach().clone()
    trainer.fit(module, datamodule=data)
    assert not torch.equal(module.layer.weight, before)
    trainer.test(module, datamodule=data)
    assert len(trainer.predict(module, datamodule=data) or ()) == 2


class Looks(TinyModule):
    def on_fit_start(self) -> None:
        strategy, rank = self.trainer.strategy, self.global_rank
        shared = library_functions.is_shared_filesystem
        same, other = Path("same"), Path(f"of_rank_{rank}")
        same.mkdir(exist_ok=True)
        other.mkdir()
        self.found = [shared(strategy, same), shared(strategy, other), os.listdir(same)]
        with pytest.raises(FileNotFoundError, match="is not visible to every process"):
            shared(strategy, "nowhere")


def look() -> Any:
    module = Looks()
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    Trainer(strategy="ddp", max_steps=1, enable_model_summary=False, **quiet).fit(module, tiny_loader(2))
    return module.found


def test_a_folder_that_all_processes_see_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ranks(2, look) == [[True, False, []]] * 2

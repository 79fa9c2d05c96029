"""A model that a device map has spread: in the Trainer, in a loop of one's own, in other modules and threads."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from big_models import Net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, Trainer, TrainingModule, disk_offload, load_checkpoint_and_dispatch, plan_device_map
from paceline.big_model.deferred_weights import noting
from paceline.big_model.hooks import remove_hook_from_submodules
from paceline.messages import PacelineWarning
from paceline.strategies import DDPStrategy, FSDPStrategy

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))


def spread(folder: Path) -> tuple[Net, Net]:
    """A model on disk, and the same in memory."""
    torch.manual_seed(4)
    whole = Net()
    model = copy.deepcopy(whole)
    disk_offload(model, folder)
    return model, whole


class Module(TrainingModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.network(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X), batch_size=2)


@pytest.mark.filterwarnings("ignore::paceline.messages.PacelineWarning")
def test_the_trainer_trains_it_where_it_is_with_the_same_losses(quiet: dict[str, Any], tmp_path: Path) -> None:
    model, whole = spread(tmp_path)
    losses = []
    for network in (model, whole):
        module = Module(network)
        Trainer(**quiet, max_epochs=2).fit(module, loader())
        losses.append(module.losses)
    assert losses[0] == losses[1]
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), whole.parameters(), strict=True))


def test_a_loop_of_ones_own_leaves_it_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, whole = spread(tmp_path)
    with caplog.at_level("INFO"):
        prepared = Accelerator(cpu=True).prepare(model)
    assert "Net stays on the devices of its device map" in caplog.text
    with torch.inference_mode():
        assert torch.equal(prepared(X), whole(X))


@pytest.mark.parametrize("strategy", [DDPStrategy(), FSDPStrategy()], ids=["ddp", "fsdp"])
def test_many_processes_refuse_it(strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = spread(tmp_path)
    monkeypatch.setattr(type(strategy), "world_size", 2)
    strategy.device = torch.device("cpu")
    with pytest.raises(RuntimeError, match=r"Net was dispatched by .*world size 2.* load_checkpoint_in_model"):
        strategy.places(Module(model))


def test_a_precision_that_converts_weights_is_refused(quiet: dict[str, Any], tmp_path: Path) -> None:
    model, _ = spread(tmp_path)
    with pytest.raises(RuntimeError, match=r"would move or convert Net.* a different device_map, max_memory or"):
        Trainer(**quiet, max_epochs=1, precision="bf16-true").fit(Module(model), loader())


@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.half, lambda module: module.to("meta")])
def test_what_it_is_a_part_of_cannot_move_or_convert_it(convert: Any, tmp_path: Path) -> None:
    model, whole = spread(tmp_path)
    for module in (nn.Sequential(model), model, model.blocks[1]):
        with pytest.raises(RuntimeError, match="which was dispatched to host memory or disk"):
            convert(module)
    assert torch.equal(model(X), whole(X))
    remove_hook_from_submodules(model)
    assert nn.Sequential(model).double()(X.double()).dtype == torch.float64


def test_a_second_thread_is_an_error_while_the_first_one_runs(tmp_path: Path) -> None:
    model, whole = spread(tmp_path)
    problems: list[Exception] = []

    def second() -> None:
        try:
            model(X)
        except Exception as error:
            problems.append(error)

    def hook(*_: Any) -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    handle = model.blocks[0].norm.register_forward_hook(hook)
    assert torch.equal(model(X), whole(X))
    assert [str(error).startswith("A model with offloaded weights was called while") for error in problems] == [True]
    handle.remove()
    assert torch.equal(model(X), whole(X))


def test_what_limits_and_maps_cannot_mean_is_an_error() -> None:
    model = Net()
    with pytest.raises(TypeError, match=r"max_memory='2GB' is not a dict\. Pass .* such as \{'cpu': '2GB'\}"):
        plan_device_map(model, max_memory="2GB")  # type: ignore[arg-type]
    with pytest.warns(PacelineWarning, match=r"no_split_module_classes contains 'Blok'.* Did you mean 'Block'"):
        plan_device_map(model, no_split_module_classes=["Blok"])
    with pytest.raises(ValueError, match=r"such as \{'': 'cuda'\} for the entire model"):
        plan_device_map(model, "cuda")
    with pytest.raises(FileNotFoundError, match="weights are never downloaded"):
        load_checkpoint_and_dispatch(model, "someone/something")


def test_spreading_where_a_strategy_is_about_to_split_is_an_error(tmp_path: Path) -> None:
    with noting(), pytest.raises(RuntimeError, match=r"places weights on the devices .* Call load_checkpoint_in_model"):
        load_checkpoint_and_dispatch(Net(), tmp_path)

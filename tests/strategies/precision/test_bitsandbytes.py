"""Linear layers with 4- and 8-bit weights: what is quantized, what trains, and runs that resume to the bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from paceline import Accelerator, Callback, Trainer, TrainingModule
from paceline.big_model.quantized_layers import quantized_layers
from paceline.callbacks.throughput_monitor import compute_dtype
from paceline.estimate.memory_estimate import estimate_memory
from paceline.strategies import BitsandbytesPrecision, DDPStrategy, FSDPStrategy

FROZEN = ("nf4", "nf4-dq", "fp4", "int8")


def batches() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(2)
    return [(torch.randn(4, 64, generator=made), torch.randn(4, 1, generator=made)) for _ in range(4)]


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter that trains."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Adapted(64, 64), nn.LayerNorm(64), nn.GELU(), Adapted(64, 32), nn.Linear(32, 1))


class Net(TrainingModule):
    def __init__(self, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.net = network()
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", mse_loss(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return self.optimizer([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Saves(Callback):
    """Saves a checkpoint in the middle of the second epoch, after a validation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(self.folder / "5.ckpt")


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture
def trainer(quiet: dict[str, Any]) -> Any:
    def make(precision: Any, **arguments: Any) -> Trainer:
        return Trainer(**{"max_epochs": 2, **quiet, **arguments}, precision=precision)

    return make


@pytest.mark.parametrize("mode", [*FROZEN, "int8-training"])
def test_a_run_resumed_in_the_middle_is_bit_identical(mode: Any, trainer: Any, tmp_path: Path) -> None:
    whole = Net()
    before = copy.deepcopy(whole.net)
    first = trainer(f"bnb.{mode}", callbacks=[Saves(tmp_path)])
    loaders = (batches(), None if mode == "int8-training" else batches())
    first.fit(whole, *loaders)
    every = {"net.0.base", "net.0.down", "net.0.up", "net.3.base", "net.3.down", "net.3.up", "net.4"}
    frozen = {"net.0.base", "net.3.base"}
    assert quantized_layers(whole).keys() == (every if mode == "int8-training" else frozen)
    assert whole.net[4].weight.requires_grad
    assert not whole.net[0].base.weight.requires_grad
    assert not torch.equal(whole.net[0].up.weight, before[0].up.weight)

    resumed = Net()
    torch.nn.init.zeros_(resumed.net[0].base.weight)
    second = trainer(f"bnb.{mode}")
    second.fit(resumed, *loaders, ckpt_path=tmp_path / "5.ckpt")
    same(resumed.state_dict(), whole.state_dict())
    assert second.callback_metrics == first.callback_metrics
    if mode == "int8-training":
        with pytest.raises(RuntimeError, match="can train 'int8-training' layers on a CPU, but cannot evaluate"):
            trainer(f"bnb.{mode}").validate(resumed, batches(), verbose=False)
        return
    saved = torch.load(tmp_path / "5.ckpt")["state_dict"]
    assert not [
        name for name in saved if ".base.weight" in name and not torch.equal(saved[name], whole.state_dict()[name])
    ]
    predicted = trainer(f"bnb.{mode}").predict(Net(), batches(), ckpt_path=tmp_path / "5.ckpt")
    assert torch.cat(predicted).isfinite().all()


@pytest.mark.parametrize("mode", FROZEN)
def test_weights_of_plain_layers_are_quantized_when_they_are_loaded(mode: Any, trainer: Any, tmp_path: Path) -> None:
    torch.save({"state_dict": {f"net.{name}": value for name, value in network().state_dict().items()}}, tmp_path / "a")
    zeros = Net()
    for parameter in zeros.parameters():
        nn.init.zeros_(parameter)
    same_values, loaded = (
        trainer(BitsandbytesPrecision(mode, torch.float32)).predict(net, batches(), ckpt_path=path)
        for net, path in ((Net(), None), (zeros, tmp_path / "a"))
    )
    assert torch.equal(torch.cat(same_values), torch.cat(loaded))
    rounded = torch.cat(loaded) - network()(torch.cat([x for x, _ in batches()]))
    assert 0 < rounded.abs().max() < 0.5


def test_layers_on_the_meta_device_are_initialized_and_then_quantized(trainer: Any) -> None:
    class Empty(Net):
        def __init__(self) -> None:
            TrainingModule.__init__(self)

        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                with torch.device("meta"):
                    self.net = network()
                for layer in (self.net[0].base, self.net[3].base):
                    layer.requires_grad_(False)

        optimizer = torch.optim.SGD

    torch.manual_seed(1)
    module = Empty()
    fit = trainer("bnb.nf4", max_epochs=1)
    fit.fit(module, batches())
    assert len(quantized_layers(module)) == 2
    assert fit.global_step == 4
    fit.fit(module, batches())  # a quantized module can be used again
    assert len(quantized_layers(module)) == 2


def test_which_layers_are_quantized() -> None:
    class Own(nn.Linear):
        pass

    def chosen(net: nn.Module, **arguments: Any) -> list[str]:
        precision = BitsandbytesPrecision("nf4", **arguments)
        precision.use_on(torch.device("cpu"))
        return list(quantized_layers(precision.move_module(net, torch.device("cpu"))))

    assert chosen(network()) == ["0.base", "3.base"]
    assert chosen(network().requires_grad_(True), ignore_modules=["0.down", "up", "4"]) == [
        "0.base",
        "3.base",
        "3.down",
    ]
    tied = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), Own(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    assert chosen(tied) == ["3"]
    twice = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    twice.append(twice[0])
    assert chosen(twice) == ["0"]
    assert twice[2] is twice[0]
    with pytest.raises(
        ValueError, match=r"precision='bnb.nf4' found no layer to quantize in Sequential \(linear layers: 1\)"
    ):
        chosen(nn.Sequential(nn.Linear(8, 8)), ignore_modules={"0"})


def test_both_doors_train_the_same_weights(trainer: Any) -> None:
    module = Net()
    trainer("bnb.nf4-dq", max_epochs=1).fit(module, batches())
    accelerator = Accelerator(cpu=True, mixed_precision=BitsandbytesPrecision("nf4-dq"))
    net = network()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    net, optimizer = accelerator.prepare(net, optimizer)
    for x, y in batches():
        accelerator.backward(mse_loss(net(x), y))
        optimizer.step()
        optimizer.zero_grad()
    same(accelerator.unwrap_model(net).state_dict(), module.net.state_dict())
    assert net(batches()[0][0]).dtype == torch.float32  # as under every mixed precision, for the loss
    assert [compute_dtype(name) for name in ("bnb.nf4", "bf16-mixed")] == ["bfloat16"] * 2


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit"])
def test_the_state_of_8_bit_optimizers_resumes_under_both_doors(name: str, trainer: Any, tmp_path: Path) -> None:
    import bitsandbytes

    optimizer = getattr(bitsandbytes.optim, name)

    class Wide(Net):
        def __init__(self) -> None:
            super().__init__(optimizer)
            self.net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    torch.manual_seed(3)
    start = Wide()
    whole, resumed = copy.deepcopy(start), copy.deepcopy(start)
    trainer("32-true", callbacks=[Saves(tmp_path)]).fit(whole, batches())
    state = torch.load(tmp_path / "5.ckpt")["optimizer_states"][0]["state"][0]
    assert next(iter(value for value in state.values() if isinstance(value, dict)))["state1"].dtype == torch.uint8
    trainer("32-true").fit(resumed, batches(), ckpt_path=tmp_path / "5.ckpt")
    same(resumed.state_dict(), whole.state_dict())

    def loop(passes: int, net: nn.Module) -> tuple[Accelerator, nn.Module]:
        accelerator = Accelerator(cpu=True)
        net, own = accelerator.prepare(net, optimizer(net.parameters(), lr=0.01))
        for turn in range(2):
            if turn == 0 and passes == 1:
                accelerator.load_state(str(tmp_path / "state"))
                continue
            for x, y in batches():
                accelerator.backward(mse_loss(net(x), y))
                own.step()
                own.zero_grad()
            if turn == 0:
                accelerator.save_state(str(tmp_path / "state"))
        return accelerator, net

    nets = [loop(passes, copy.deepcopy(start.net))[1] for passes in (2, 1)]
    same(nets[0].state_dict(), nets[1].state_dict())
    same(nets[0].state_dict(), whole.net.state_dict())


def test_ranks_start_from_the_weights_and_scales_of_rank_0(trainer: Any, tmp_path: Path) -> None:
    def run() -> dict[str, Tensor]:
        fit = Trainer(
            precision=BitsandbytesPrecision("nf4-dq"),
            strategy=DDPStrategy(),
            devices=2,
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        module = Net()
        fit.strategy.setup_environment()
        if fit.global_rank:
            module.net[0].base.weight.data.mul_(3)
        fit.fit(module, batches())
        return {name: value.clone() for name, value in module.state_dict().items()}

    one, other = ranks(2, run)
    same(one, other)


def test_what_is_wrong_is_said(trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Everything(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(
        ValueError, match=r"2 of the 12 parameters of SGD cannot be trained, because precision='bnb.int8'"
    ):
        trainer("bnb.int8").fit(Everything(), batches())
    net = network().requires_grad_(True)
    with pytest.raises(ValueError, match=r"cannot be trained, .* quantized them.*create the optimizer after prepare"):
        Accelerator(cpu=True, mixed_precision=BitsandbytesPrecision("nf4")).prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.1)
        )
    with pytest.raises(ValueError, match=r"precision='bnb.nf4' quantizes weights, which FSDPStrategy cannot shard"):
        Trainer(precision="bnb.nf4", strategy="fsdp", accelerator="cpu")
    with pytest.raises(ValueError, match="which FSDPStrategy cannot shard"):
        Trainer(strategy=FSDPStrategy(BitsandbytesPrecision("nf4")), accelerator="cpu")
    with pytest.raises(ValueError, match=r"Unknown BitsandbytesPrecision mode 'nf5'\. Did you mean 'nf4'\?"):
        BitsandbytesPrecision("nf5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dtype=torch.int8\. Choose"):
        BitsandbytesPrecision("nf4", torch.int8)
    with pytest.raises(TypeError, match="ignore_modules='head' is a string"):
        BitsandbytesPrecision("nf4", ignore_modules="head")
    with pytest.raises(ValueError, match=r"estimate_memory does not support precision='bnb.nf4'"):
        estimate_memory(Net(), batches()[0], precision="bnb.nf4")
    fit = trainer("bnb.nf4", callbacks=[Saves(tmp_path)])
    fit.fit(Net(), batches())
    for mode in ("fp4", "nf4-dq", "int8"):
        with pytest.raises(
            ValueError,
            match=f"net.0.base.weight: the weight to load has the format nf4.*, but the layer has the format {mode}",
        ):
            trainer(f"bnb.{mode}").predict(Net(), batches(), ckpt_path=tmp_path / "5.ckpt")
    monkeypatch.setattr("paceline.messages.is_installed", lambda package: package != "bitsandbytes")
    with pytest.raises(ModuleNotFoundError, match=r"'bnb.nf4' needs the package 'bitsandbytes'.*pip install bits"):
        trainer("bnb.nf4")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", [*FROZEN, "int8-training"])
def test_a_gpu_trains_validates_and_resumes(mode: Any, trainer: Any, tmp_path: Path) -> None:
    whole, resumed = Net(), Net()
    on_gpu = {"accelerator": "gpu", "devices": 1}
    first = trainer(f"bnb.{mode}", callbacks=[Saves(tmp_path)], **on_gpu)
    first.fit(whole, batches(), batches())
    second = trainer(f"bnb.{mode}", **on_gpu)
    second.fit(resumed, batches(), batches(), ckpt_path=tmp_path / "5.ckpt")
    same(resumed.state_dict(), whole.state_dict())
    assert second.callback_metrics == first.callback_metrics

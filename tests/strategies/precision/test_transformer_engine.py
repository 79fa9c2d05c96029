"""TransformerEngine's layers and autocast: Paceline's side of the interface, and the package itself on a GPU."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine_stand_in as stand_in
from tiny import QUIET
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from paceline import Accelerator, Trainer, TrainingModule
from paceline.accelerator.kwargs_handlers import TERecipeKwargs
from paceline.devices.kinds import kind_of
from paceline.estimate.memory_estimate import estimate_memory
from paceline.messages import PacelineWarning
from paceline.strategies import TransformerEnginePrecision


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TransformerEngine's interface, and a CPU that counts as a GPU with 8-bit products."""
    monkeypatch.setattr(type(kind_of("cpu")), "capability", lambda self, device: (9, 0))
    return stand_in.install(monkeypatch)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 16, bias=False))


def batches(device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(2)
    pairs = [(torch.randn(8, 16, generator=made), torch.randn(8, 16, generator=made)) for _ in range(3)]
    return [(x.to(device), y.to(device)) for x, y in pairs]


class Net(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def by_hand(te: Any, dtype: torch.dtype, device: str = "cpu", epochs: int = 1) -> dict[str, Any]:
    """The same training with torch and TransformerEngine alone."""
    source, made = network().to(dtype), {"params_dtype": dtype, "device": device}
    net = nn.Sequential(
        te.Linear(16, 32, **made),
        te.LayerNorm(32, dtype=dtype, device=device),
        nn.Tanh(),
        te.Linear(32, 16, bias=False, **made),
    )
    with torch.no_grad():
        for new, old in zip(net.parameters(), source.parameters(), strict=True):
            new.copy_(old)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for x, y in batches(device) * epochs:
        inputs = (x, y) if dtype is torch.float32 else (x.to(dtype), y.to(dtype))
        with torch.autocast(device, torch.bfloat16), te.autocast(enabled=True):
            loss = mse_loss(net(inputs[0]), inputs[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


def weights(state: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if not key.endswith("_extra_state")}


def test_layers_change_and_their_parameters_stay_the_same_objects(engine: Any) -> None:
    net = nn.Sequential(*network(), nn.Linear(16, 24), nn.LayerNorm(24, bias=False), nn.Linear(24, 16))
    net.append(net[0])  # a layer in two places
    net[0].weight.requires_grad_(False)
    net.eval()
    old, names = dict(net.named_parameters()), list(net.state_dict())
    precision = TransformerEnginePrecision(None)
    assert precision.convert_module(net) is net
    kinds = [type(one).__module__.partition(".")[0] for one in net]
    assert kinds == [*["transformer_engine"] * 2, "torch", "transformer_engine", *["torch"] * 3, "transformer_engine"]
    assert all(new is old[name] for name, new in net.named_parameters())
    assert list(weights(net.state_dict())) == names
    assert net[7] is net[0]
    assert not net[0].training
    layers = list(net)
    precision.convert_module(net)  # a converted module can be used again
    assert list(net) == layers

    own = nn.Sequential(nn.Linear(16, 16), engine.Linear(16, 16, device="cpu"))
    precision.convert_module(own)
    assert type(own[0]) is nn.Linear
    with pytest.warns(
        PacelineWarning, match="no layer of Sequential multiplies in 8 bits: replace_layers is False.*in float32"
    ):
        TransformerEnginePrecision(torch.float32, replace_layers=False).convert_module(network())
    with pytest.warns(PacelineWarning, match="none of its linear layers has sizes that are multiples of 16.*bfloat16"):
        TransformerEnginePrecision().convert_module(nn.Sequential(nn.Linear(8, 16)))


def test_both_doors_train_as_a_loop_with_the_package(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = by_hand(engine, torch.bfloat16)
    module = Validated()
    stand_in.opened.clear()
    trainer = Trainer(precision="transformer-engine", max_epochs=1, num_sanity_val_steps=0, **QUIET)
    trainer.fit(module, batches(), batches())
    assert trainer.precision == "transformer-engine"
    torch.testing.assert_close(weights(module.net.state_dict()), weights(expected), rtol=0, atol=0)
    assert stand_in.opened == [(True, stand_in.DelayedScaling())] * 6

    handler = TERecipeKwargs(margin=1, amax_history_len=16, fp8_format="E4M3")
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler])
    assert (accelerator.mixed_precision, accelerator.fp8_backend) == ("fp8", "TE")
    expected = by_hand(engine, torch.float32)
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net, optimizer = accelerator.prepare(net, optimizer)
    stand_in.opened.clear()
    for x, y in batches():
        accelerator.backward(mse_loss(net(x), y))
        optimizer.step()
        optimizer.zero_grad()
    recipe = stand_in.DelayedScaling(1, stand_in.Format.E4M3, 16, "most_recent")
    assert stand_in.opened == [(True, recipe)] * 3
    torch.testing.assert_close(weights(net.state_dict()), weights(expected), rtol=0, atol=1e-6)
    with torch.no_grad():
        assert net(batches()[0][0]).dtype is torch.float32
    assert stand_in.opened[-1] == (False, recipe)

    monkeypatch.delattr(engine, "autocast")  # the name that older versions have
    monkeypatch.setattr(engine, "fp8_autocast", stand_in.fp8_autocast, raising=False)
    with TransformerEnginePrecision(recipe=recipe).forward_context():
        assert stand_in.inside == [(True, recipe)]


def test_checkpoints_hold_the_history_of_scales_and_fit_modules_without_it(engine: Any, tmp_path: Path) -> None:
    whole, first = Net(), Net()
    Trainer(precision="transformer-engine", max_epochs=2, **QUIET).fit(whole, batches())
    trainer = Trainer(precision="transformer-engine", max_epochs=1, **QUIET)
    trainer.fit(first, batches())
    trainer.save_checkpoint(tmp_path / "1.ckpt")
    saved = torch.load(tmp_path / "1.ckpt")
    torch.save(saved | {"state_dict": weights(saved["state_dict"])}, tmp_path / "plain.ckpt")
    for path, same in (("1.ckpt", True), ("plain.ckpt", False)):
        resumed = Net()
        trainer = Trainer(precision="transformer-engine", max_epochs=2, **QUIET)
        trainer.fit(resumed, batches(), ckpt_path=tmp_path / path)
        equal = all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
        assert equal is same
    for found in (Validated.load_from_checkpoint(tmp_path / "1.ckpt"), Validated()):
        Trainer(**QUIET).validate(found, batches(), ckpt_path=tmp_path / "1.ckpt", verbose=False)
        assert list(found.state_dict()) == list(weights(saved["state_dict"]))
        torch.testing.assert_close(found.state_dict(), weights(saved["state_dict"]), check_dtype=False)


def test_what_is_wrong_is_said(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def entered(**arguments: Any) -> None:
        with TransformerEnginePrecision(**arguments).forward_context():
            raise AssertionError("no error")

    with pytest.raises(ValueError, match=r"does not support weights_dtype=torch.int8\. Choose torch.bfloat16"):
        TransformerEnginePrecision(torch.int8)
    with pytest.raises(
        ValueError, match=r"Unknown TransformerEnginePrecision recipe key 'margins'\. Did you mean 'margin'\?"
    ):
        entered(recipe={"margins": 1})
    with pytest.raises(ValueError, match=r"Unknown TransformerEnginePrecision fp8_format 'E5M2'"):
        entered(recipe={"fp8_format": "E5M2"})
    with pytest.raises(ValueError, match=r"Unknown TransformerEnginePrecision recipe key 'interval'"):
        entered(recipe=TERecipeKwargs(interval=2).precision("cpu").recipe)
    with pytest.raises(ValueError, match="TERecipeKwargs has no effect with mixed_precision='no'"):
        Accelerator(cpu=True, kwargs_handlers=[TERecipeKwargs()])
    with pytest.raises(ValueError, match="estimate_memory does not support precision='transformer-engine'"):
        estimate_memory(network(), batches()[0][0], precision="transformer-engine")
    half = TransformerEnginePrecision(torch.float16)
    half.use_on(torch.device("cpu"))
    assert (half.name, half.dtype, half.scaler) == ("transformer-engine-float16", torch.float16, None)
    assert type(Trainer(precision="transformer-engine-float16", **QUIET).strategy.precision) is type(half)

    monkeypatch.undo()
    stand_in.install(monkeypatch)
    with pytest.raises(ValueError, match=r"='transformer-engine' needs a CUDA GPU with .* 8\.9 .* runs on 'cpu'"):
        Trainer(precision="transformer-engine", max_epochs=1, **QUIET).fit(Net(), batches())
    monkeypatch.setattr("paceline.messages.is_installed", lambda package: package != "transformer_engine")
    for use in (
        lambda: Trainer(precision="transformer-engine", **QUIET),
        lambda: Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()]),
    ):
        with pytest.raises(ModuleNotFoundError, match=re.escape('"transformer_engine[pytorch]". Or use precision=')):
            use()
    assert Accelerator(cpu=True, mixed_precision="fp8").fp8_backend == "AO"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs 8-bit matrix products"
)
def test_a_gpu_trains_as_a_loop_with_the_package_and_resumes_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    te = pytest.importorskip("transformer_engine.pytorch")
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    options = QUIET | {"precision": "transformer-engine", "accelerator": "gpu", "devices": 1}
    first, resumed = Net(), Net()
    trainer = Trainer(max_epochs=1, **options)
    trainer.fit(first, batches())
    trainer.save_checkpoint(tmp_path / "1.ckpt")
    Trainer(max_epochs=2, **options).fit(resumed, batches(), ckpt_path=tmp_path / "1.ckpt")
    expected = weights(by_hand(te, torch.bfloat16, "cuda", epochs=2))
    found = {name: value.cuda() for name, value in weights(resumed.net.state_dict()).items()}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert isinstance(resumed.net[0], import_module("transformer_engine.pytorch").Linear)

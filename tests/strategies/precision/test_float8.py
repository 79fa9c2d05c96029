"""Linear layers that multiply in 8 bits: equal to torchao's own loop, sharded as whole, with plain checkpoints."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from tiny import QUIET
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from paceline import Accelerator, Trainer, TrainingModule
from paceline.accelerator.kwargs_handlers import AORecipeKwargs
from paceline.messages import PacelineWarning
from paceline.strategies import DDPStrategy, Float8Precision, FSDPStrategy

SETTINGS: dict[str, Any] = QUIET | {"max_epochs": 1}


def network() -> nn.Sequential:
    torch.manual_seed(1)
    sizes = (16, 32, 32, 24, 16, 1)  # 24 is not a multiple of 16
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def batches() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(2)
    return [(torch.randn(8, 16, generator=made), torch.randn(8, 1, generator=made)) for _ in range(4)]


class Net(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def by_hand(config: Float8LinearConfig, layers: tuple[str, ...] = ("1",)) -> dict[str, Tensor]:
    """The same training with torch and torchao alone."""
    net = convert_to_float8_training(network(), config=config, module_filter_fn=lambda _, name: name in layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for x, y in batches():
        with torch.autocast("cpu", torch.bfloat16):
            loss = mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_both_doors_train_as_a_loop_with_torchao(recipe: Any) -> None:
    config = Float8LinearConfig.from_recipe_name(recipe or "tensorwise")
    expected = by_hand(Float8LinearConfig(**vars(config) | {"emulate": True}))
    module = Net()
    trainer = Trainer(precision="fp8" if recipe is None else Float8Precision(recipe), **SETTINGS)
    trainer.fit(module, batches())
    torch.testing.assert_close(module.net.state_dict(), expected, rtol=0, atol=0)
    assert [name for name, one in module.named_modules() if isinstance(one, Float8Linear)] == ["net.1"]
    trainer.fit(module, batches())  # a converted module can be used again

    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config)])
    assert (accelerator.mixed_precision, accelerator.fp8_backend) == ("fp8", "AO")
    net = network()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    for x, y in batches():
        accelerator.backward(mse_loss(net(x), y))
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(accelerator.unwrap_model(net).state_dict(), expected, rtol=0, atol=0)


def trained(kind: Any, path: str) -> None:
    """Train on both ranks, where FSDP gathers the converted layer's weight in 8 bits, and save."""
    strategy = kind() if kind is DDPStrategy else kind(wrap=(nn.Linear,))
    trainer = Trainer(plugins=Float8Precision(), strategy=strategy, devices=2, num_nodes=1, **SETTINGS)
    module = Net()
    trainer.fit(module, batches())
    trainer.save_checkpoint(path)


def test_sharded_weights_are_those_of_whole_ones_and_checkpoints_are_plain(tmp_path: Path) -> None:
    saved = []
    for kind in (DDPStrategy, FSDPStrategy):
        path = tmp_path / f"{kind.__name__}.ckpt"
        ranks(2, trained, kind, str(path))
        saved.append(torch.load(path)["state_dict"])
    assert {type(value) for weights in saved for value in weights.values()} == {Tensor}
    torch.testing.assert_close(saved[0], saved[1], rtol=0, atol=1e-6)
    Net().load_state_dict(saved[1])


def test_a_filter_chooses_the_layers_and_none_is_a_warning() -> None:
    module = copy.deepcopy(Net())
    Trainer(precision=Float8Precision(filter=lambda layer, name: name == "net.4"), **SETTINGS).fit(module, batches())
    assert [name for name, one in module.named_modules() if isinstance(one, Float8Linear)] == ["net.4"]
    with pytest.warns(PacelineWarning, match=r"converts no layer of Net.*there are 5\)"):
        Trainer(precision=Float8Precision(filter=lambda layer, name: False), **SETTINGS).fit(Net(), batches())


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"Unknown Float8Precision recipe 'rowise'. Did you mean 'rowwise'\?"):
        Float8Precision("rowise")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"recipe='rowwise' and config=... contradict each other\. Leave one out"):
        Float8Precision("rowwise", Float8LinearConfig())
    precision = Float8Precision()
    precision.use_on(torch.device("mps"))
    with pytest.raises(ValueError, match=r"needs a CUDA GPU .* runs on 'mps'\. Use precision='bf16-mixed'"):
        precision.convert_module(Net())
    with pytest.raises(ValueError, match="AORecipeKwargs has no effect with mixed_precision='no'"):
        Accelerator(cpu=True, kwargs_handlers=[AORecipeKwargs()])
    with pytest.raises(ValueError, match="AORecipeKwargs got config and 'pad_inner_dim'"):
        AORecipeKwargs(Float8LinearConfig(), pad_inner_dim=True).precision("cpu")
    monkeypatch.setattr("paceline.messages.is_installed", lambda package: package != "torchao")
    with pytest.raises(ModuleNotFoundError, match=r"'fp8-mixed' needs the package 'torchao'.*pip install torchao"):
        Trainer(precision="fp8", **SETTINGS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs 8-bit matrix products"
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_multiplies_in_8_bits(compiled: bool) -> None:
    module = Net()
    Trainer(precision="fp8", compile=compiled, **SETTINGS | {"accelerator": "gpu", "devices": 1}).fit(module, batches())
    for name, value in by_hand(Float8LinearConfig(emulate=True)).items():
        torch.testing.assert_close(module.net.state_dict()[name].cpu(), value, rtol=0.1, atol=0.02)

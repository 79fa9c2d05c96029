"""``torch.compile`` by the Trainer or by the user: other speed, the same numbers and names."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Trainer, TrainingModule
from paceline.strategies.compile_networks import compile_one, compile_repeated, uncompiled


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Counts:
    """A backend that runs the graph as it is and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


class Net(TrainingModule):
    """A network in a container, one beside it, and a ``forward`` over both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(4, 1)
        self.metric = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self(batch).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByParts(Net):
    """Its step calls the networks, never ``self(x)``."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.blocks[1](self.blocks[0](batch))).pow(2).mean()


def batches() -> list[Tensor]:
    return list(torch.randn(12, 4, generator=torch.Generator().manual_seed(2)).split(4))


def trained(kind: type[Net], quiet: dict[str, Any], **arguments: Any) -> tuple[Net, Trainer]:
    module, trainer = kind(), Trainer(**{**quiet, "max_epochs": 1, **arguments})
    trainer.fit(module, batches(), batches())
    return module, trainer


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("kind", [Net, ByParts])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_a_compiled_run_trains_to_the_same_bits(kind: type[Net], precision: str, quiet: dict[str, Any]) -> None:
    plain, first = trained(kind, quiet, precision=precision)
    backend = Counts()
    compiled, second = trained(kind, quiet, precision=precision, compile={"backend": backend})
    assert backend.graphs > 0
    assert same(compiled, plain)
    assert {k: float(v) for k, v in second.callback_metrics.items()} == {
        k: float(v) for k, v in first.callback_metrics.items()
    }
    assert "val" in second.callback_metrics


class OfTorch(Net):
    """Steps that call torch's own layers alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.blocks[1](self.blocks[0](batch))).pow(2).mean()


def test_torchs_own_layers_are_compiled_too(quiet: dict[str, Any]) -> None:
    plain, _ = trained(OfTorch, quiet)
    backend = Counts()
    compiled, _ = trained(OfTorch, quiet, compile={"backend": backend, "fullgraph": True})
    assert backend.graphs >= 2
    assert same(compiled, plain)
    hooked: list[Any] = []
    compiled.blocks[0].register_forward_hook(lambda *_: hooked.append(1))
    assert torch.equal(compiled(torch.ones(2, 4)), plain(torch.ones(2, 4)))
    assert hooked == [1]


def test_many_layers_of_torchs_own_are_compiled_each() -> None:
    backend, model = Counts(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected = model(torch.ones(2, 4))
    assert compile_repeated(model, {"backend": backend})
    assert torch.equal(model(torch.ones(2, 4)), expected)
    assert backend.graphs == 2
    for width in range(5, 17):  # more than torch compiles one piece of code
        layer = nn.Linear(width, 1)
        compile_one(layer, {"backend": backend, "dynamic": False})
        layer(torch.ones(2, width))
    assert backend.graphs == 14


def test_another_real_backend_gives_the_same_numbers(quiet: dict[str, Any]) -> None:
    plain, _ = trained(Net, quiet)
    compiled, _ = trained(Net, quiet, compile={"backend": "aot_eager", "fullgraph": True})
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value)


def test_without_compile_nothing_is_compiled(quiet: dict[str, Any]) -> None:
    module, _ = trained(Net, quiet)
    assert all(m._compiled_call_impl is None for m in module.modules())


def test_an_empty_dict_compiles_with_torchs_defaults(quiet: dict[str, Any]) -> None:
    module = Net()
    trainer = Trainer(**quiet, compile={}, limit_train_batches=0, max_epochs=1)
    trainer.fit(module, batches())
    assert module._compiled_call_impl is not None
    assert module.head._compiled_call_impl is not None


def test_logging_inside_the_compiled_forward_works(quiet: dict[str, Any]) -> None:
    class Logs(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.log("mean", y.mean(), on_step=True, on_epoch=True)
            return y

    plain, first = trained(Logs, quiet)
    compiled, second = trained(Logs, quiet, compile={"backend": "eager"})
    assert same(compiled, plain)
    for name in ("mean_step", "mean_epoch", "loss"):
        torch.testing.assert_close(second.callback_metrics[name], first.callback_metrics[name])


def test_a_compiled_runs_checkpoint_goes_on_uncompiled_and_back(quiet: dict[str, Any], tmp_path: Path) -> None:
    whole, _ = trained(Net, quiet, max_epochs=3)
    _, first = trained(Net, quiet, compile={"backend": "eager"})
    first.save_checkpoint(tmp_path / "1.ckpt")
    assert list(torch.load(tmp_path / "1.ckpt", weights_only=True)["state_dict"]) == list(whole.state_dict())
    second = Trainer(**quiet, max_epochs=2)
    second.fit(Net(), batches(), batches(), ckpt_path=tmp_path / "1.ckpt")
    second.save_checkpoint(tmp_path / "2.ckpt")
    module, third = Net(), Trainer(**quiet, max_epochs=3, compile={"backend": "eager"})
    third.fit(module, batches(), batches(), ckpt_path=tmp_path / "2.ckpt")
    assert same(module, whole)
    assert same(Net.load_from_checkpoint(tmp_path / "1.ckpt"), first.training_module)


def test_a_second_run_compiles_nothing_again(quiet: dict[str, Any]) -> None:
    backend = Counts()
    module, trainer = trained(Net, quiet, compile={"backend": backend})
    call = module.head._compiled_call_impl
    trainer.validate(module, batches(), verbose=False)
    assert module.head._compiled_call_impl is call


def test_a_compiled_module_can_be_pickled_and_copied(quiet: dict[str, Any]) -> None:
    module, _ = trained(Net, quiet, compile={"backend": "eager"})
    assert same(pickle.loads(pickle.dumps(module)), module)
    assert same(copy.deepcopy(module), module)


@pytest.mark.parametrize("entry", ["fit", "validate", "predict"])
def test_what_torch_compile_returned_may_be_given_to_every_entry_point(entry: str, quiet: dict[str, Any]) -> None:
    backend = Counts()
    plain, module = Net(), Net()
    trainer = Trainer(**quiet, max_epochs=1)
    result = getattr(trainer, entry)(torch.compile(module, backend=backend), batches())
    assert trainer.training_module is module
    assert backend.graphs > 0
    torch.compiler.reset()
    want = getattr(Trainer(**quiet, max_epochs=1), entry)(plain, batches())
    assert same(module, plain)
    assert str(result) == str(want)


def test_only_what_torch_compile_returned_is_unwrapped() -> None:
    module = Net()
    assert uncompiled(torch.compile(module, backend="eager")) is module
    assert uncompiled(module) is module
    assert uncompiled(3) == 3


def test_an_error_inside_a_compiled_forward_comes_out(quiet: dict[str, Any]) -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(x[:, :2])

    with pytest.raises(Exception, match=r"shape|size|multipl"):
        trained(Fails, quiet, compile={"backend": "eager"})

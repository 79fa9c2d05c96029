"""``Trainer(compile=...)`` changes speed, nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Trainer, TrainingModule


class Net(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.heads = nn.ModuleList([nn.Linear(1, 1)])

    def forward(self, x: Any) -> Any:
        return self.heads[0](self.net(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.net(batch) + self(batch)).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> list[torch.Tensor]:
    return list(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)).split(4))


def trained(quiet: dict[str, Any], **arguments: Any) -> tuple[Net, Trainer]:
    module = Net()
    trainer = Trainer(max_epochs=1, **quiet, **arguments)
    trainer.fit(module, batches())
    return module, trainer


def test_a_compiled_run_has_the_same_numbers_and_names(quiet: dict[str, Any], tmp_path: Path) -> None:
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    torch.compiler.reset()
    plain, _ = trained(quiet)
    compiled, trainer = trained(quiet, compile={"backend": backend})
    assert graphs
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value)
    assert "loss" in trainer.callback_metrics
    trainer.save_checkpoint(tmp_path / "compiled.ckpt")
    loaded = Net.load_from_checkpoint(tmp_path / "compiled.ckpt")
    assert torch.equal(loaded.net[0].weight, compiled.net[0].weight)


def test_a_module_wrapped_by_torch_compile_is_unwrapped(quiet: dict[str, Any]) -> None:
    torch.compiler.reset()
    plain, _ = trained(quiet)
    module = Net()
    trainer = Trainer(max_epochs=1, **quiet)
    trainer.fit(torch.compile(module, backend="eager"), batches())
    assert trainer.training_module is module
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value)


def test_what_is_no_setting_is_refused(quiet: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"compile=3 is an int. Pass True, 'step', 'graphs', or a dict"):
        Trainer(**quiet, compile=3)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"Unknown Trainer\(compile=...\) value 'inductor'. Choose 'networks', 'step' or 'graphs'"
    ):
        Trainer(**quiet, compile="inductor")

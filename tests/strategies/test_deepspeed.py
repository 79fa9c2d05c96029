"""ZeRO by DeepSpeed on real gloo processes: the numbers of one process with the global batch."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import RanksError, ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline import Trainer, TrainingModule
from paceline.strategies import DeepSpeedStrategy

pytest.importorskip("deepspeed.git_version_info_installed", reason="needs DeepSpeed: pip install deepspeed")

VOCABULARY, WIDTH, LENGTH = 11, 8, 6
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
STAGES = (1, 2, 3)
ADAMW = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(y := self.norm(x), y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Transformer(TrainingModule):
    """Next-token prediction. Uses a parameter of its own and a layer's weight without its layer."""

    def __init__(self, optimizer: Any = ADAMW, tied: bool = False, late: bool = False) -> None:
        super().__init__()
        self.optimizer, self.tied = optimizer, tied
        self.losses: list[float] = []
        if not late:
            self.make()

    def make(self) -> None:
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(1))
        if self.tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.head.weight) * self.scale

    def loss(self, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> float:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return float(loss)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Late(Transformer):
    """Makes its layers in ``configure_model``."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, late=True)

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            self.make()


class Tokens(Dataset):
    def __init__(self, count: int, seed: int = 5) -> None:
        self.data = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


def strategy(stage: int, **given: Any) -> DeepSpeedStrategy:
    """ZeRO that takes small parameters apart too."""
    zero = {"stage3_param_persistence_threshold": 0, **given.pop("zero", {})}
    return DeepSpeedStrategy(stage=stage, config={"zero_optimization": zero}, **given)


def state(trainer: Trainer, module: TrainingModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.strategy.model_state(module).items()}


def fit(
    made: Any, module: Any, count: int = 40, batch_size: int = 2, val: int = 0, ckpt_path: Any = None, **given: Any
) -> Trainer:
    trainer = Trainer(**QUIET, strategy=made, **{"max_epochs": 1, **given})
    torch.manual_seed(5)
    val_loader = DataLoader(Tokens(val, 6), batch_size) if val else None
    trainer.fit(module, DataLoader(Tokens(count), batch_size, shuffle=True), val_loader, ckpt_path=ckpt_path)
    return trainer


def weights(made: Any, module: Any, **given: Any) -> dict[str, Tensor]:
    return state(fit(made, module, **given), module)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 2e-5, atol: float = 2e-7) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


# ---- the same numbers ------------------------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": SGD},
    "windows of 3, the last of 1": {"accumulate_grad_batches": 3},
    "uneven windows": {"accumulate_grad_batches": 3, "count": 37, "optimizer": SGD},
    "norm": {"gradient_clip_val": 0.3, "accumulate_grad_batches": 3, "optimizer": SGD},
    "value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value", "optimizer": SGD},
    "tied": {"tied": True},
}


def run_all(make: Any, batch_size: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, given in RUNS.items():
        own = {key: given[key] for key in ("optimizer", "tied") if key in given}
        rest = {key: value for key, value in given.items() if key not in own}
        found[name] = weights(make(), Transformer(**own), batch_size=batch_size, **rest)
    return found


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_learn_what_one_process_with_their_batches_together_learns(stage: int, offload: bool) -> None:
    alone = run_all(lambda: "cpu", 4)

    def together() -> Any:
        given = {"offload_parameters": True} if offload and stage == 3 else {}
        return run_all(lambda: strategy(stage, offload_optimizer=offload, **given), 2)

    found, _ = ranks(2, together)
    for name, expected in alone.items():
        assert_same(found[name], expected)

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from tiny import TinyModule, tiny_loader

from paceline import Trainer
from paceline.callbacks import LossGuard
from paceline.loggers import CSVLogger
from paceline.messages import PacelineWarning

Logs = Mapping[str, Mapping[str, Any]]


class Spoiled(TinyModule):
    """Its loss is ``value`` times what it was from step 6 on, in the second epoch; it is logged under each name.

    Or a value that stands among the name's options.
    """

    def __init__(self, logs: Logs, value: float = math.nan) -> None:
        super().__init__()
        self.logs, self.value = logs, value

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * (self.value if self.global_step >= 5 else 1.0)
        for name, options in self.logs.items():
            self.log(name, options.get("value", loss), **{k: v for k, v in options.items() if k != "value"})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer.weight.sum())


def warned(module: TinyModule, *loaders: Any, **arguments: Any) -> list[str]:
    """What a fit of three epochs says about losses that are not finite."""
    settings: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "max_epochs": 3,
    }
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Trainer(**{**settings, **arguments}).fit(module, tiny_loader(4), *loaders)
    texts = [str(one.message) for one in found if isinstance(one.message, PacelineWarning)]
    return [text for text in texts if "Training continues, but a loss" in text]


@pytest.mark.parametrize(
    ("logs", "arguments", "beginning"),
    [
        ({"train_loss": {}}, {"log_every_n_steps": 1}, "train_loss is nan as of step 6, epoch 1."),
        ({"train_loss": {}}, {"log_every_n_steps": 3}, "train_loss is nan as of step 6, epoch 1."),
        ({"train_loss": {}}, {}, "train_loss is nan as of step 8, epoch 1."),
        ({"Loss": {"on_epoch": True, "on_step": False}}, {}, "Loss is nan as of step 8, epoch 1."),
        ({"loss": {"logger": False, "prog_bar": True}}, {}, "loss is nan as of step 8, epoch 1."),
        ({}, {"log_every_n_steps": 3}, "The loss that Spoiled.training_step returned is nan as of step 6, epoch 1."),
        (
            {"kl_loss": {"value": 0.5}},
            {"log_every_n_steps": 1},
            "The loss that Spoiled.training_step returned is nan as of step 6, epoch 1.",
        ),
        ({"kl_loss": {"value": 0.5}}, {}, "The loss that Spoiled.training_step returned is nan as of step 8, epoch 1."),
        (
            {"nll": {}},
            {"barebones": True},
            "The loss that Spoiled.training_step returned is nan as of step 8, epoch 1.",
        ),
    ],
)
def test_the_first_loss_that_is_not_finite_is_warned_of_once(
    logs: Logs, arguments: dict[str, Any], beginning: str
) -> None:
    found = warned(Spoiled(logs), **arguments)
    assert [text.partition(" Training continues")[0] for text in found] == [beginning]


def test_infinite_losses_and_those_of_validation_are_warned_of_too(tmp_path: Path) -> None:
    (text,) = warned(Spoiled({"a/loss": {}}, -math.inf), logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert text.startswith("a/loss is -inf as of step 6, epoch 1.")
    (text,) = warned(Spoiled({}), tiny_loader(1), limit_train_batches=3, val_check_interval=3, log_every_n_steps=9)
    assert text.startswith("val_loss is nan as of step 6, epoch 1.")


@pytest.mark.parametrize("quiet", ["finite", "another name", "guarded"])
def test_nothing_is_said_of_finite_losses_of_other_values_and_under_a_guard(quiet: str) -> None:
    module = Spoiled({"train_loss": {}}, 2.0 if quiet == "finite" else math.nan)
    if quiet == "another name":
        module = TinyModule()
        names = ("perplexity", "lossless_size", "glossary")
        module.on_train_epoch_end = lambda: [module.log(n, math.inf) for n in names]  # type: ignore[method-assign]
    assert warned(module, callbacks=[LossGuard()] if quiet == "guarded" else [], log_every_n_steps=1) == []


def test_rank_0_warns_of_another_ranks_loss() -> None:
    class OnRank1(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("aux_loss", math.nan if self.global_rank else 1.0, on_step=False, on_epoch=True)
            return self.loss(batch)

    def fit() -> list[str]:
        torch.manual_seed(0)
        return warned(OnRank1(), strategy="ddp", devices=2, max_epochs=1)

    (first, second) = ranks(2, fit)
    assert [text.partition(".")[0] for text in first] == ["aux_loss is nan as of step 2, epoch 0"]
    assert second == []


def test_last_batches_of_combined_loaders_that_cannot_be_weighted_are_warned_of() -> None:
    class Both(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch[0]) + self.loss(batch[1])

    def fit(size: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaders = [tiny_loader(8, batch_size=3), tiny_loader(size, batch_size=3)]
            quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "max_epochs": 2}
            Trainer(accelerator="cpu", strategy="ddp", devices=2, **quiet).fit(Both(), loaders)
        return [str(one.message) for one in caught if "unevenly" in str(one.message)]

    (text,), other = ranks(2, fit, 5)
    assert text.startswith("The 2 processes share the last batch of loader 1 of the CombinedLoader unevenly.")
    assert "drop_last=True to that loader" in text
    assert other == []
    assert ranks(2, fit, 4) == [[], []]

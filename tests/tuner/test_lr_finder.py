from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from tiny import TinyModule, tiny_loader

from paceline import Callback, Trainer
from paceline.callbacks import LearningRateFinder, ModelCheckpoint

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


class Rates(Callback):
    """Remembers the rate of each step of the fit."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


class Momentum(TinyModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def fit(strategy: str = "cpu", epochs: int = 2, **given: Any) -> tuple[Any, ...]:
    torch.manual_seed(2)
    module, rates = Momentum(), Rates()
    finder = LearningRateFinder(num_training_steps=20, **given) if given else None
    callbacks = [rates, *([finder] if finder else [])]
    trainer = Trainer(**QUIET, strategy=strategy, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=False)
    trainer.fit(module, tiny_loader(6, 4, shuffle=True))
    moments = [s["momentum_buffer"] for s in trainer.optimizers[0].state_dict()["state"].values()]
    found = finder.optimal_lr.suggestion() if finder and finder.optimal_lr else None
    return module.layer.weight.detach(), moments, rates.seen, found, module.lr, trainer.global_step


def test_a_fit_trains_with_the_rate_that_was_found() -> None:
    *_, seen, found, rate, steps = fit(min_lr=1e-4)
    assert seen == [found] * 12
    assert rate == found
    assert steps == 12


@pytest.mark.parametrize("strategy", ["cpu", "ddp"])
@pytest.mark.parametrize("given", [{"min_lr": 1e-4}, {"milestones": (1, 2)}], ids=["start", "milestones"])
def test_a_search_whose_result_is_not_taken_changes_nothing(given: dict[str, Any], strategy: str) -> None:
    def both(tunes: bool) -> Any:
        return fit(strategy, 3, **(given | {"update_attr": False} if tunes else {}))[:3]

    pairs = (
        [(both(True), both(False))]
        if strategy == "cpu"
        else list(zip(ranks(2, both, True), ranks(2, both, False), strict=True))
    )
    for (weight, moments, seen), (plain, plain_moments, plain_seen) in pairs:
        assert torch.equal(weight, plain)
        assert all(torch.equal(a, b) for a, b in zip(moments, plain_moments, strict=True))
        assert seen == plain_seen == [0.1] * len(seen)


def test_milestones_change_the_rate_on_the_way() -> None:
    *_, seen, found, rate, _ = fit(milestones=[1], min_lr=1e-4)
    assert len(set(seen[:6])) == len(set(seen[6:])) == 1
    assert seen[6] != seen[5]
    assert seen[6] == found == rate


def test_a_fit_that_goes_on_keeps_the_rate_of_its_checkpoint(tmp_path: Path) -> None:
    def trainer(epochs: int, rates: Rates) -> Trainer:
        save = ModelCheckpoint(dirpath=tmp_path, save_last=True)
        finder = LearningRateFinder(min_lr=1e-4, num_training_steps=20)
        return Trainer(**QUIET, max_epochs=epochs, callbacks=[save, rates, finder])

    first, second = Rates(), Rates()
    trainer(1, first).fit(TinyModule(), tiny_loader(6, 4))
    trainer(2, second).fit(TinyModule(), tiny_loader(6, 4), ckpt_path="last")
    assert len(second.seen) == 6
    assert set(second.seen) == set(first.seen)


def test_tuning_callbacks_come_first() -> None:
    trainer = Trainer(**QUIET, callbacks=[Rates(), LearningRateFinder()])
    assert [type(c).__name__ for c in trainer.callbacks][:2] == ["LearningRateFinder", "Rates"]


def test_a_dry_run_searches_for_nothing() -> None:
    finder = LearningRateFinder()
    Trainer(**QUIET, fast_dev_run=True, callbacks=[finder]).fit(TinyModule(), tiny_loader())
    assert finder.optimal_lr is None

"""The learning rate range test with Lightning's rates, smoothing and suggestion."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch


def install() -> None:
    """Make the range test behave as in Lightning."""
    tests: Any = import_module("paceline.tuner.lr_range_test")
    tests.SETTLING = 1
    tests.LossCurve.head_start = 1
    tests.LossCurve.ends_early = ends_early
    tests.RangeTest.rate = rate
    tests.LRFinder.suggestion = _suggesting(tests.LRFinder.suggestion)


def rate(test: Any, step: int) -> float:
    """Return the learning rate for a step (0-based). The rate rises twice as much after step 0 as after later steps."""
    share = (step + 1) / test.num_training if step else 0
    if test.mode == "linear":
        return test.min_lr + (test.max_lr - test.min_lr) * share
    return test.min_lr * (test.max_lr / test.min_lr) ** share


def ends_early(curve: Any) -> bool:
    """Return True at the end of the Trainer's last epoch, because ``max_epochs`` also limits the test."""
    trainer, state = curve.run.trainer, curve.run.state
    return bool(trainer.is_last_batch) and 0 <= trainer.max_epochs <= state.epoch + 1


def _suggesting(without: Callable[..., float | None]) -> Callable[..., float | None]:
    """Wrap ``suggestion`` to return the rate where the loss falls fastest if rates are on a linear, not a log scale."""

    def suggestion(found: Any, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        losses, rates = torch.tensor(found.results["loss"]), torch.tensor(found.results["lr"])
        at = torch.arange(len(losses))[skip_begin : len(losses) - skip_end]
        at = at[losses[at].isfinite()]
        if len(at) < 2:
            return without(found, skip_begin, skip_end)
        (slope,) = torch.gradient(losses[at], spacing=(rates[at],))
        found._optimal_idx = int(at[slope.argmin()])
        return found.results["lr"][found._optimal_idx]

    return suggestion

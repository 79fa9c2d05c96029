"""Scripts that resume as Accelerate's examples do: a state every n steps or every epoch, and skipped batches."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Noisy, same
from rank_processes import ranks
from torch import nn
from torch.utils.data import DataLoader

from paceline import DataLoaderConfiguration, set_seed
from paceline.compat.accelerate.accelerator import Accelerator

SAMPLES, SIZE, EPOCHS = 24, 4, 2


def begin(name: str, batches: int, steps: int, by_update: bool) -> tuple[int, int | None]:
    """Starting epoch and batches to skip in it, read from the name of a state."""
    kind, number = name.split("_")
    if kind == "epoch":
        return int(number) + 1, None
    return divmod(int(number) * (steps if by_update else 1), batches)


def example(
    folder: Path,
    every: int | str,
    resume_from_checkpoint: str = "",
    drops: bool = False,
    by_update: bool = False,
    steps: int = 1,
    **config: Any,
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """One run of an example, which saves unless it resumes.

    Returns the samples that this process trained on, by batch, and the weights.

    Args:
        every: save a state every so many steps, or every ``"epoch"``.
        drops: whether the loop takes and drops finished batches, instead of calling ``skip_first_batches``.
        by_update: whether steps are updates, as in transformers' examples, instead of batches.
        steps: number of micro-batches in a window.
    """
    settings = DataLoaderConfiguration(**config)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, dataloader_config=settings)
    set_seed(9 if resume_from_checkpoint else 1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    train = DataLoader(Noisy(SAMPLES), SIZE // accelerator.num_processes, shuffle=True)
    test = DataLoader(Noisy(6), 2)
    model, optimizer, train, test, schedule = accelerator.prepare(model, optimizer, train, test, schedule)
    overall, updates, starting_epoch, resume_step = 0, 0, 0, None
    if resume_from_checkpoint:
        accelerator.load_state(folder / resume_from_checkpoint)
        starting_epoch, resume_step = begin(resume_from_checkpoint, len(train), steps, by_update)
        overall = starting_epoch * len(train) + (resume_step or 0)
        updates = overall // steps
    seen = []
    for epoch in range(starting_epoch, EPOCHS):
        model.train()
        first = resume_step if epoch == starting_epoch else None
        active = accelerator.skip_first_batches(train, first) if first is not None and not drops else train
        for step, (x, y, index) in enumerate(active):
            if drops and first is not None and step < first:
                continue
            seen.append(index.tolist())
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            overall += 1
            updates += accelerator.sync_gradients
            done = updates if by_update else overall
            counts = accelerator.sync_gradients or not by_update
            if isinstance(every, int) and done % every == 0 and counts and not resume_from_checkpoint:
                accelerator.save_state(folder / f"step_{done}")
        model.eval()
        for x, y, _ in test:
            with torch.no_grad():
                accelerator.gather_for_metrics((model(x), y))
        if every == "epoch" and not resume_from_checkpoint:
            accelerator.save_state(folder / f"epoch_{epoch}")
    return seen, [value.detach().clone() for value in model.state_dict().values()]


#: How an example saves.
GIVEN: dict[str, dict[str, Any]] = {
    "every 4 steps": {"every": 4},
    "every epoch": {"every": "epoch"},
    "every 3 steps, in windows of 2": {"every": 3, "steps": 2},
    "every 2 updates": {"every": 2, "steps": 2, "by_update": True},
    "every 4 steps, seedable": {"every": 4, "use_seedable_sampler": True},
    "every epoch, seedable": {"every": "epoch", "use_seedable_sampler": True},
}
TWO = ["every epoch", "every 2 updates"]


def resume_each(folder: Path, names: list[str]) -> list[list[list[int]]]:
    """Resume from each state of these examples, and compare with the whole run; returns its samples, by batch."""
    found = []
    for name in names:
        given = GIVEN[name]
        whole, weights = example(folder / name, **given)
        batches = len(whole) // EPOCHS
        for state in sorted((folder / name).iterdir()):
            epoch, step = begin(state.name, batches, given.get("steps", 1), given.get("by_update", False))
            for drops in (False, True) if step else (False,):
                seen, resumed = example(folder / name, resume_from_checkpoint=state.name, drops=drops, **given)
                expected = whole[epoch * batches + (step or 0) :]
                if step == 0:  # the resumed run does not repeat the evaluation, whose loader draws random numbers
                    assert len(seen) == len(expected), (name, state.name, drops)
                    continue
                assert seen == expected, (name, state.name, drops)
                assert same(resumed, weights), (name, state.name, drops)
        found.append(whole)
    return found


EACH_ONCE = Counter([*range(SAMPLES)] * EPOCHS)


def test_each_sample_comes_once_and_the_weights_are_those_of_a_run_without_a_stop(tmp_path: Path) -> None:
    for whole in resume_each(tmp_path, [*GIVEN]):
        assert Counter(chain(*whole)) == EACH_ONCE


def test_an_order_that_accelerate_would_draw_anew_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paceline")
    for name, seedable in (("seedable", True), ("drawn", False)):
        example(tmp_path / name, 4, use_seedable_sampler=seedable)
        example(tmp_path / name, 4, "step_4", use_seedable_sampler=seedable)
        assert caplog.text.count("continues in its original order") == (not seedable)


def test_so_do_two_processes(tmp_path: Path) -> None:
    for mine, yours in zip(*ranks(2, resume_each, tmp_path, TWO), strict=True):
        assert Counter(chain(*mine, *yours)) == EACH_ONCE

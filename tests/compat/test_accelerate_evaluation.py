"""Loops in transformers' arithmetic, whose last batch is shared unevenly: one process's numbers on several."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from paceline import DataLoaderConfiguration
from paceline.accelerator.process_state import AcceleratorState
from paceline.compat.accelerate.accelerator import Accelerator

#: How many tokens of each sample count, and the sum of their losses.
TOKENS = torch.tensor([3, 1, 5, 2, 4, 1, 1, 6, 2, 3, 5, 1, 4])
SUMS = TOKENS * torch.tensor([1.0, 4, 2, 8, 5, 7, 3, 0, 6, 9, 1, 4, 2], dtype=torch.float64)
#: Configurations, numbers of samples, and sizes of a process's batches.
ONE_SHAPE = [({}, 13, 4)]
SHAPES = [({}, 1, 4), ({}, 8, 2), ({}, 2, 1), ({"split_batches": True}, 11, 2), ({"dispatch_batches": True}, 13, 4)]


class Stream(IterableDataset[int]):
    """The numbers of the samples."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(range(self.samples))


# ---- evaluation ------------------------------------------------------------------------------------------------------


def in_one_row(samples: Iterable[int]) -> Tensor:
    return torch.tensor([list(samples)])


def in_two_rows(samples: Iterable[int]) -> Tensor:
    return torch.tensor([[sample, sample] for sample in samples]).flatten()


#: The samples of a batch, by the function that collates them.
SAMPLES: dict[Any, Any] = {
    None: lambda batch: batch,
    in_one_row: lambda batch: batch[0],
    in_two_rows: lambda batch: batch[::2],
}


def evaluated(accelerator: Any, loader: Any, by_tokens: bool, collate: Any) -> tuple[float, list[int]]:
    """The loss, and the samples in the order of their predictions."""
    losses, seen = [], []
    for batch in loader:
        samples = SAMPLES[collate](batch)
        if by_tokens:
            items = accelerator.gather(TOKENS[samples].sum()).sum()
            loss = SUMS[samples].sum() / items * accelerator.num_processes
        else:
            loss = (SUMS[samples] / TOKENS[samples]).mean()
        losses.append(accelerator.gather_for_metrics(loss.repeat(loader.batch_size)))
        if collate is None:
            seen += accelerator.gather_for_metrics(batch).tolist()
    return torch.cat(losses).mean().item(), seen


def on_one_process(samples: int, size: int, by_tokens: bool) -> float:
    """The mean of the batches' losses, weighted by their numbers of samples."""
    total = 0.0
    for batch in torch.arange(samples).split(size):
        sums, tokens = SUMS[batch], TOKENS[batch]
        total += (sums.sum() / tokens.sum() * len(batch) if by_tokens else (sums / tokens).sum()).item()
    return total / samples


def evaluate(shapes: list[tuple[dict[str, bool], int, int]]) -> None:
    for config, samples, size in shapes:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        world = accelerator.num_processes
        data: Any = Stream(samples) if "dispatch_batches" in config else list(range(samples))
        for by_tokens, collate in itertools.product((True, False), SAMPLES if shapes is ONE_SHAPE else (None,)):
            whole = DataLoader(data, size * world if "split_batches" in config else size, collate_fn=collate)
            loss, seen = evaluated(accelerator, accelerator.prepare(whole), by_tokens, collate)
            shape = f"{samples} samples in batches of {size}, {config}, {by_tokens=}, {collate}"
            assert loss == pytest.approx(on_one_process(samples, size * world, by_tokens), rel=1e-12), shape
            assert seen == ([] if collate else list(range(samples))), shape


def test_a_loss_gathered_once_per_sample_is_that_of_one_process() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    evaluate(ONE_SHAPE)
    ranks(2, evaluate, ONE_SHAPE)
    ranks(3, evaluate, SHAPES)


# ---- training --------------------------------------------------------------------------------------------------------


#: How a loop adds a process's number of tokens to those of the others.
COUNTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "gather": lambda accelerator, own: accelerator.gather(own).sum(),
    "gather rows": lambda accelerator, own: accelerator.gather(own.reshape(1)).sum(),
    "reduce": lambda accelerator, own: accelerator.reduce(own, "sum"),
}


def prepared(accelerator: Accelerator, samples: int, size: int) -> Any:
    """A model with the weight 0, its optimizer, and a loader of the samples' numbers."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    loader: Any = DataLoader(list(range(samples)), size)  # type: ignore[arg-type]
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)


def trained(samples: int, size: int, steps: int, count: str | None, sets_sync: bool = True) -> list[float]:
    """The weight after each update of a loop that fetches a window's batches before it runs them.

    Args:
        count: one of ``COUNTS``; None if the loop does not count tokens.
        sets_sync: whether the loop sets ``sync_gradients``, as transformers' does. If False, it is the one in
            Accelerate's guide to accumulation with samples of different sizes.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1 if sets_sync else steps)
    model, optimizer, loader = prepared(accelerator, samples, size)
    fetched, found = iter(loader), []
    for start in range(0, len(loader), steps):
        window = [next(fetched) for _ in range(min(steps, len(loader) - start))]
        own = torch.stack([TOKENS[batch].sum() for batch in window]).sum()
        items = COUNTS[count](accelerator, own) if count else None
        for number, batch in enumerate(window, 1):
            last, waits = number == len(window), contextlib.nullcontext
            if sets_sync:
                accelerator.gradient_state._set_sync_gradients(last)
            elif accelerator.num_processes > 1 and not last:
                waits = model.no_sync
            with waits():
                sums = model(SUMS[batch].unsqueeze(1)).squeeze(1)
                whole = sums.mean() / len(window)
                loss = whole if items is None else sums.sum() / items * accelerator.num_processes
                accelerator.backward(loss * accelerator.gradient_accumulation_steps)
        optimizer.step()
        optimizer.zero_grad()
        found.append(model.weight.item())
    return found


def test_a_loop_that_fetches_whole_windows_has_the_updates_of_one_process() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    for count in ("gather", None):
        alone = trained(13, 8, 2, count)
        for found in ranks(2, trained, 13, 4, 2, count):
            assert found == pytest.approx(alone, rel=1e-12), count


def test_a_loop_that_counts_the_items_of_a_window_has_the_updates_of_one_process() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    for count in COUNTS:
        alone = trained(13, 8, 2, count, sets_sync=False)
        for found in ranks(2, trained, 13, 4, 2, count, False):
            assert found == pytest.approx(alone, rel=1e-12), count


def trained_with_a_metric(samples: int, size: int) -> list[float]:
    """The weight after each update of a loop that gathers a number of samples before each backward pass."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator, samples, size)
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            outputs = model(SUMS[batch].unsqueeze(1))
            accelerator.gather((outputs > 0).sum())
            accelerator.backward(outputs.mean())
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.weight.item())
    return found


def test_a_number_that_is_gathered_in_accumulate_does_not_change_the_updates() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    alone = trained_with_a_metric(13, 8)
    for found in ranks(2, trained_with_a_metric, 13, 4):
        assert found == pytest.approx(alone, rel=1e-12)


def gradient_without_sync() -> tuple[float, list[Any]]:
    """This process's gradient of its own number, and what ``no_sync`` of two copies of the model returns."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    with model.no_sync():
        accelerator.backward(model(torch.full((1, 1), float(accelerator.process_index))).sum())
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    return model.weight.grad.item(), [type(one.no_sync()) for one in copies]


def test_a_model_of_several_processes_has_no_sync_and_its_copies_ignore_it() -> None:
    ignored = [contextlib.nullcontext] * 2
    assert ranks(2, gradient_without_sync) == [(0.0, ignored), (1.0, ignored)]

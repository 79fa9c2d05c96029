"""Loaders for programs written for Accelerate: their order and random numbers, written out by hand in plain torch."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline import DataLoaderConfiguration, messages, set_seed
from paceline.accelerator.process_state import AcceleratorState
from paceline.compat.accelerate.accelerator import Accelerator
from paceline.compat.accelerate.loaders import DataLoaderShard

SAMPLES, SIZE, PASSES, SEED = 16, 2, 3, 42


class Noisy(Dataset[Any]):
    """Samples with random noise."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((4,), index / SAMPLES) + torch.randn(4) / 10, index


class Stream(IterableDataset[Any]):
    """The samples in a random order of Python's."""

    def __iter__(self) -> Iterator[Any]:
        yield from (Noisy()[index] for index in random.sample(range(SAMPLES), SAMPLES))


def shuffled(**given: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), SIZE, shuffle=True, **given)


def batch_sampler() -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_sampler=BatchSampler(RandomSampler(Noisy()), SIZE, False))


def sampled(sampler: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), SIZE, sampler=sampler)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffle": shuffled,
    "own generator": lambda: shuffled(generator=torch.Generator().manual_seed(5)),
    "batch sampler": batch_sampler,
    "replacement": lambda: sampled(RandomSampler(Noisy(), replacement=True)),
    "weighted": lambda: sampled(WeightedRandomSampler([*range(1, SAMPLES + 1)], SAMPLES)),
    "subset": lambda: sampled(SubsetRandomSampler(range(SAMPLES))),
    "stream": lambda: DataLoader(Stream(), SIZE),
}


def ahead(batches: Any) -> Iterator[Any]:
    """The batches; each is given out after the next one was fetched."""
    fetched = iter(batches)
    batch = next(fetched)
    for following in fetched:
        yield batch
        batch = following
    yield batch


def train(batches: Callable[[int], Any], model: nn.Module, backward: Callable[[Tensor], Any]) -> list[Any]:
    """Indices and losses of all passes, and a number of each generator that is drawn next."""
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for number in range(PASSES):
        for x, index in batches(number):
            loss = (model(x) - 1).square().mean()
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append((index.tolist(), loss.item()))
    return [*found, torch.rand(()).item(), random.random()]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))


def prepared(loader: Callable[[], DataLoader[Any]], seed: int = SEED, **config: Any) -> list[Any]:
    """What a script sees, on each process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    set_seed(seed)
    model, batches = accelerator.prepare(network(), loader())
    return train(lambda number: batches, model, accelerator.backward)


def by_hand(batches_of: Callable[[], Callable[[int], Any]]) -> list[Any]:
    """What it should see on one process."""
    set_seed(SEED)
    model, batches = network(), batches_of()
    return train(lambda number: ahead(batches(number)), model, Tensor.backward)


def in_order(order: Tensor, **given: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), SIZE, sampler=order.tolist(), **given)


# ---- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS.keys())
def test_a_loop_on_one_process_is_the_plain_loop_to_the_bit(loader: Callable[[], DataLoader[Any]]) -> None:
    def batches() -> Callable[[int], Any]:
        same = loader()
        return lambda number: same

    assert prepared(loader) == by_hand(batches)


@pytest.mark.parametrize("data_seed", [None, 7])
def test_a_seedable_order_depends_on_the_seed_and_the_pass(data_seed: int | None) -> None:
    def batches() -> Callable[[int], Any]:
        order = torch.Generator()
        return lambda number: in_order(
            torch.randperm(SAMPLES, generator=order.manual_seed((data_seed or SEED) + number))
        )

    assert prepared(shuffled, use_seedable_sampler=True, data_seed=data_seed) == by_hand(batches)


def test_a_pass_that_is_left_early_does_not_count_and_set_epoch_sets_the_number() -> None:
    def order(number: int) -> list[int]:
        return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED + number)).tolist()

    def seen(count: int) -> list[int]:
        return [int(index) for _, batch in itertools.islice(loader, count) for index in batch]

    set_seed(SEED)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    loader = accelerator.prepare(shuffled())
    assert isinstance(loader, DataLoaderShard)
    assert seen(3) == order(0)[:6]
    assert seen(SAMPLES) == order(0)
    assert seen(1) == order(1)[:2]
    loader.set_epoch(5)
    assert seen(SAMPLES) == order(5)
    assert seen(SAMPLES) == order(6)


# ---- two processes ---------------------------------------------------------------------------------------------------


def read(passes: Callable[[int], Any]) -> list[Any]:
    """What a loop sees: the batches of all passes, a draw of its own after each, and the draws that follow."""
    found: list[Any] = []
    for number in range(PASSES):
        found += [(x.tolist(), index.tolist(), torch.rand(()).item()) for x, index in passes(number)]
    return [*found, torch.rand(()).item(), random.random()]


CONFIGS: dict[str, dict[str, Any]] = {
    "whole batches": {},
    "whole batches, seedable": {"use_seedable_sampler": True},
    "split": {"split_batches": True},
    "dispatched": {"dispatch_batches": True},
    "dispatched, seedable": {"dispatch_batches": True, "use_seedable_sampler": True},
}


def read_on_rank() -> dict[str, Any]:
    found = {}
    for name, config in CONFIGS.items():
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        set_seed(SEED)
        batches = accelerator.prepare(shuffled())
        found[name] = read(lambda number, batches=batches: batches)
    return found


def expected(rank: int, split: bool, seedable: bool) -> list[Any]:
    """A pass walks the whole order, and the rank takes its part of each round."""
    set_seed(SEED)
    order = torch.Generator()
    if not seedable:
        order.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))

    def part(number: int) -> Any:
        if seedable:
            order.manual_seed(SEED + number)
        indices = torch.randperm(SAMPLES, generator=order)
        torch.randperm(SAMPLES, generator=order)  # torch's sampler draws once more at its end
        rows = indices.view(-1, 2, SIZE // 2 if split else SIZE)[:, rank].tolist()
        return ahead(DataLoader(Noisy(), batch_sampler=rows))

    return read(part)


def expected_if_dispatched(seedable: bool) -> list[list[Any]]:
    """Process 0 reads two batches at a time; the other one draws only the loader's seed."""
    parts: list[Any] = []

    def rounds(number: int) -> Iterator[Any]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED + number))
        batches = iter(in_order(order) if seedable else shuffled())
        for first, second in ahead(zip(batches, batches, strict=True)):
            parts.append(second)
            yield first

    set_seed(SEED)
    reader = read(rounds)
    taken = iter(parts)

    def received(number: int) -> Iterator[Any]:
        torch.empty((), dtype=torch.int64).random_()
        return itertools.islice(taken, SAMPLES // SIZE // 2)

    set_seed(SEED)
    return [reader, read(received)]


def test_two_processes_see_what_their_parts_of_one_order_give_by_hand() -> None:
    for rank, found in enumerate(ranks(2, read_on_rank)):
        for name, config in CONFIGS.items():
            seedable = "use_seedable_sampler" in config
            if "dispatch_batches" in config:
                assert found[name] == expected_if_dispatched(seedable)[rank], (rank, name)
            else:
                assert found[name] == expected(rank, "split_batches" in config, seedable), (rank, name)


def apart() -> tuple[list[Any], ...]:
    """Ranks with random states and generators of their own."""
    rank = Accelerator(cpu=True).process_index
    found = []
    for config, generator in (
        ({}, None),
        ({}, torch.Generator().manual_seed(rank)),
        ({"use_seedable_sampler": True}, None),
    ):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        set_seed(SEED, device_specific=True)
        loader = accelerator.prepare(shuffled(generator=generator))
        for count in (2 + rank, SAMPLES, SAMPLES):  # the ranks leave the first pass at different batches
            found.append([index.tolist() for _, index in itertools.islice(loader, count)])
    accelerator = Accelerator(cpu=True, rng_types=["torch", "generator"])
    set_seed(SEED, device_specific=True)
    loader = accelerator.prepare(DataLoader(Noisy(), SIZE))
    iter(loader)
    return found, torch.rand(3).tolist()


def test_ranks_keep_one_order_where_their_random_states_differ_and_share_those_of_rng_types() -> None:
    (first, draws), (second, others) = ranks(2, apart)
    for start in range(0, len(first), 3):
        for mine, yours in zip(first[start + 1 : start + 3], second[start + 1 : start + 3], strict=True):
            assert sorted(itertools.chain(*mine, *yours)) == list(range(SAMPLES))
    assert draws == others


def read_by_the_first() -> list[list[int]]:
    loader = Accelerator(cpu=True).prepare(DataLoader(Stream(), SIZE))
    random.seed(torch.distributed.get_rank())
    return [index.tolist() for _, index in loader]


def test_an_iterable_dataset_is_read_by_one_process() -> None:
    """Each of these ranks would read it in another order."""
    assert sorted(index for part in ranks(2, read_by_the_first) for batch in part for index in batch) == list(
        range(SAMPLES)
    )


# ---- where Accelerate's numbers are wrong ----------------------------------------------------------------------------


def with_differences() -> list[list[str]]:
    """What has been said after one epoch without and one with even batches.

    The loop has a schedule, clears gradients at the beginning of each micro-batch and clips them at its end. Its last
    window and last batches are short.
    """
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage().partition(".")[0])
    messages.log.setLevel("INFO")
    messages.log.addHandler(handler)
    found = []
    for even in (False, True):
        config = DataLoaderConfiguration(use_seedable_sampler=True, even_batches=even)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, dataloader_config=config)
        set_seed(SEED)
        model = network()
        set_seed(SEED, device_specific=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        loader = DataLoader(Noisy(), 5, shuffle=True)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        for x, _ in itertools.islice(loader, len(loader)):  # like transformers.Trainer, which counts its batches
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(model(x).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
        found.append([*said])
    return found


def test_what_differs_from_accelerate_is_said_once() -> None:
    (uneven, even), others = ranks(2, with_differences)
    assert uneven == [
        "The processes have different seeds (set_seed(",
        "Prepared schedules advance once per update",
        "Gradients are clipped once, when their accumulation window is complete",
        "optimizer",
        "The last window of a pass has 2 of 3 micro-batches",
        "The dataset's last samples (6 of 16) do not fill a batch on each of 2 processes",
    ]
    assert even == uneven
    assert others == [[], []]


def test_a_pass_that_skips_batches_and_windows_of_several_models_are_told_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paceline")
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config)
    first, second, loader = accelerator.prepare(network(), network(), shuffled())
    for models, batches, told in (
        ([first], loader, False),
        ([first, second], accelerator.skip_first_batches(loader, 2), True),
    ):
        for x, _ in batches:
            for model in models:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).square().mean())
        assert ("Each group of models passed to accumulate has its own accumulation window" in caplog.text) == told
        assert ("uses the order of the next epoch" in caplog.text) == told


#: What Accelerate 1.15.0 gives for 19 samples in batches of 4 after ``set_seed(7)``: a random number drawn between
#: prepare and the first pass, the first batch and the number drawn after it.
STATEFUL = {
    (False, 0): (0.659212, [18, 2, 16, 8], 0.425061),
    (False, 2): (0.232762, [11, 2, 15, 18], 0.425061),
    (True, 0): (0.659212, [13, 5, 10, 9], 0.65689),
    (True, 2): (0.232762, [13, 5, 10, 9], 0.425061),  # Accelerate's first pass has another order: 11, 2, 15, 18
}


@pytest.mark.parametrize(("seedable", "workers"), STATEFUL)
def test_a_stateful_loader_draws_the_numbers_of_its_first_pass_when_it_is_prepared(
    seedable: bool, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paceline")
    pytest.importorskip("torchdata")
    set_seed(7)
    config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=seedable)
    loader: Any = DataLoader(range(19), 4, shuffle=True, num_workers=workers)  # type: ignore[arg-type]
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(loader)
    between = torch.rand(()).item()
    found, *_ = [(batch.tolist(), torch.rand(()).item()) for batch in loader]
    before, batch, after = STATEFUL[seedable, workers]
    assert (between, found[1]) == pytest.approx((before, after), abs=1e-6)
    assert found[0] == batch
    told = "torch's global generator determines the order of the first pass." in caplog.text
    assert told == (seedable and workers > 0)

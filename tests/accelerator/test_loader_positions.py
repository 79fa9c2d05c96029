"""Scripts that go on from a state: those that leave the position to load_state, and those that skip by themselves."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from loops import Noisy, same
from rank_processes import ranks
from torch import nn
from torch.utils.data import DataLoader

from paceline import Accelerator, DataLoaderConfiguration, messages
from paceline.accelerator.loaders import PreparedLoader
from paceline.compat.accelerate.accelerator import Accelerator as StandIn
from paceline.messages import PacelineWarning

BATCHES, EPOCHS = 6, 3


class Still(Noisy):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.x[index].sum().reshape(1), index


class Script:
    """A program that makes everything, may load a state, and trains; unless ``plain`` with everything random in it.

    Attributes:
        seen: indices of the samples that this rank trained on, by batch.
    """

    def __init__(
        self, kind: type[Accelerator], steps: int = 1, seed: int = 0, plain: bool = False, **given: Any
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        self.accelerator = kind(cpu=True, gradient_accumulation_steps=steps, **given)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0 if plain else 0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        loader = DataLoader(Still(24) if plain else Noisy(24), 4 // self.accelerator.num_processes, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.seen: list[list[int]] = []

    def step(self, batch: Any) -> None:
        x, y, index = batch
        self.seen.append(index.tolist())
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(nn.functional.mse_loss(self.model(x), y))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def whole(self, folder: Path | None = None, stop_at: int = -1) -> Script:
        """Train from the beginning; stop after so many batches of all epochs, with a state in the folder."""
        for batch in itertools.chain.from_iterable(self.loader for _ in range(EPOCHS)):
            self.step(batch)
            if len(self.seen) == stop_at:
                self.accelerator.save_state(folder)
                break
        return self

    def weights(self) -> list[torch.Tensor]:
        return [value.detach().clone() for value in self.model.state_dict().values()]


# ---- how scripts go on -----------------------------------------------------------------------------------------------


def leaves_it(script: Script, epoch: int, step: int) -> None:
    """for epoch in range(first_epoch, epochs)"""
    for _ in range(epoch, EPOCHS):
        for batch in script.loader:
            script.step(batch)


def asks_the_loader(script: Script, epoch: int, step: int) -> None:
    leaves_it(script, script.loader.epoch, step)


def sets_epochs(script: Script, epoch: int, step: int) -> None:
    for number in range(epoch, EPOCHS):
        script.loader.set_epoch(number)
        for batch in script.loader:
            script.step(batch)


def continues(script: Script, epoch: int, step: int) -> None:
    for number in range(epoch, EPOCHS):
        for index, batch in enumerate(script.loader):
            if number == epoch and index < step:
                continue
            script.step(batch)


def continues_within(script: Script, epoch: int, step: int) -> None:
    """The same in the block, with the epoch set."""
    for number in range(epoch, EPOCHS):
        script.loader.set_epoch(number)
        for index, batch in enumerate(script.loader):
            with script.accelerator.accumulate(script.model):
                if number == epoch and index < step:
                    continue
                script.step(batch)


def draws(script: Script, epoch: int, step: int) -> None:
    for number in range(epoch, EPOCHS):
        batches = iter(script.loader)
        if number == epoch:
            for _ in range(step):
                next(batches, None)
        for batch in batches:
            script.step(batch)


def slices(script: Script, epoch: int, step: int) -> None:
    for number in range(epoch, EPOCHS):
        for batch in itertools.islice(script.loader, step if number == epoch else 0, None):
            script.step(batch)


def skips(script: Script, epoch: int, step: int) -> None:
    for number in range(epoch, EPOCHS):
        first = number == epoch and step
        active = script.accelerator.skip_first_batches(script.loader, step) if first else script.loader
        for batch in active:
            script.step(batch)


Idiom = Callable[[Script, int, int], None]
DROP: list[Idiom] = [continues, continues_within, draws, slices]


def gone_on(kind: type[Accelerator], folder: Path, idiom: Idiom, epoch: int, step: int, **given: Any) -> Script:
    script = Script(kind, seed=9, **given)
    script.accelerator.load_state(folder)
    idiom(script, epoch, step)
    return script


def counted(done: int) -> Iterator[tuple[int, int]]:
    """How scripts count what is done: as a step of the next epoch where one is over, or as the last step of that."""
    yield divmod(done, BATCHES)
    if done % BATCHES == 0:
        yield done // BATCHES - 1, BATCHES


# ---- each sample once, to the bit ------------------------------------------------------------------------------------


def exact(folder: str, kind: type[Accelerator], idioms: list[Idiom], steps: int, stops: list[int]) -> None:
    alone = Script(kind, steps).whole()
    for done in stops:
        Script(kind, steps).whole(Path(folder), done)
        for idiom, (epoch, step) in itertools.product(idioms, counted(done)):
            if idiom in (leaves_it,) and step == BATCHES:
                continue  # counts its epochs wrong
            found = gone_on(kind, Path(folder), idiom, epoch, step, steps=steps)
            assert found.seen == alone.seen[done:], (idiom, done, epoch, step)
            assert same(found.weights(), alone.weights()), (idiom, done, epoch, step)


EXACT: list[tuple[type[Accelerator], list[Idiom]]] = [
    (Accelerator, [leaves_it, asks_the_loader, sets_epochs, skips]),
    (StandIn, [*DROP, skips]),
]


@pytest.mark.parametrize("steps", [1, 2], ids=["", "in a window"])
@pytest.mark.parametrize(("kind", "idioms"), EXACT, ids=["own names", "stand-in"])
def test_each_sample_comes_once_and_the_weights_are_those_of_a_run_without_a_stop(
    tmp_path: Path, kind: type[Accelerator], idioms: list[Idiom], steps: int
) -> None:
    """Saved in the middle and at the end of an epoch."""
    exact(str(tmp_path / "s"), kind, idioms, steps, [3, 6, 9])


@pytest.mark.parametrize(("kind", "idioms"), EXACT, ids=["own names", "stand-in"])
def test_so_do_two_processes(tmp_path: Path, kind: type[Accelerator], idioms: list[Idiom]) -> None:
    ranks(2, exact, str(tmp_path / "s"), kind, [idioms[0], skips], 2, [3, 6])


# ---- what is noticed -------------------------------------------------------------------------------------------------


def warned(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What it returns, and what it and the end of its objects warn of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run()
    return found, [str(one.message) for one in caught if issubclass(one.category, PacelineWarning)]


@pytest.mark.parametrize("idiom", DROP)
@pytest.mark.parametrize(("done", "ahead"), [(2, False), (3, False), (3, True), (5, False)])
def test_batches_that_a_script_skips_after_load_state_has_skipped_are_named(
    tmp_path: Path, idiom: Idiom, done: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where batches are fetched one ahead, as for a GPU."""
    monkeypatch.setattr(PreparedLoader, "_looks_ahead", lambda self: ahead)
    alone = Script(Accelerator).whole()
    Script(Accelerator).whole(tmp_path / "s", done)
    found, said = warned(lambda: gone_on(Accelerator, tmp_path / "s", idiom, 0, done))
    lost = min(done, BATCHES - done)
    assert found.seen == alone.seen[done + lost :]
    which = f"batch {done + 1}" if lost == 1 else f"batches {done + 1} to {done + lost}"
    assert len(said) == 1
    assert f"the loop took {which} of epoch 0 from the loader but did not train on" in said[0]
    assert "Delete the code that skips batches (such as `if step < resume_step: continue`)" in said[0]


def test_so_are_those_of_the_next_epoch_where_the_state_was_at_the_end_of_one(tmp_path: Path) -> None:
    Script(Accelerator).whole(tmp_path / "s", BATCHES)
    _, said = warned(lambda: gone_on(Accelerator, tmp_path / "s", continues, 0, BATCHES))
    assert "took batches 1 to 6 of epoch 1 from the loader" in "".join(said)


def test_a_script_that_drops_all_it_had_left_gets_a_note_without_a_location_when_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Script(Accelerator).whole(tmp_path / "s", 3 * BATCHES - 1)

    def run() -> int:
        script = gone_on(Accelerator, tmp_path / "s", continues, EPOCHS - 1, BATCHES - 1)
        steps = len(script.seen)
        del script
        gc.collect()
        return steps

    with caplog.at_level(logging.INFO, logger="paceline"):
        steps, said = warned(run)
    assert steps == 0
    assert said == []
    assert "took batch 6 of epoch 2 from the loader but did not train on it" in caplog.text
    assert "Delete the code that skips batches" in caplog.text


@pytest.mark.parametrize("after", ["the same loader", "another loader", "nothing"])
def test_a_pass_that_counts_or_evaluates_is_told_that_it_had_the_rest_of_the_epoch(
    tmp_path: Path, after: str, caplog: pytest.LogCaptureFixture
) -> None:
    Script(Accelerator).whole(tmp_path / "s", 3)

    def evaluate(script: Script, epoch: int, step: int) -> None:
        with torch.no_grad():
            assert sum(1 for _ in script.loader) == BATCHES - 3
        for batch in script.loader if after == "the same loader" else reread if after == "another loader" else ():
            script.step(batch)

    def run() -> None:
        gone_on(Accelerator, tmp_path / "s", evaluate, 0, 3)
        gc.collect()

    reread = list(Script(Accelerator).loader)
    with caplog.at_level(logging.INFO, logger="paceline"):
        _, said = warned(run)
    (text,) = said or [text for text in caplog.messages if "did not train" in text]
    assert bool(said) == (after != "nothing")
    assert "the loop took batches 4 to 6 of epoch 0 from the loader but did not train on them." in text
    assert "The pass covered only the rest of epoch 0" in text
    assert "To count the batches of an epoch, or to evaluate all of them, use a separate loader." in text


@pytest.mark.parametrize(("step", "what"), [(5, "skips batches 4 to 5"), (1, "repeats batches 2 to 3")])
def test_skip_first_batches_with_another_number_counts_and_says_what_that_means(
    tmp_path: Path, step: int, what: str
) -> None:
    alone = Script(Accelerator, 4).whole()
    Script(Accelerator, 4).whole(tmp_path / "s", 3)
    script = Script(Accelerator, 4, seed=9)
    script.accelerator.load_state(tmp_path / "s")
    _, said = warned(lambda: iter(script.accelerator.skip_first_batches(script.loader, step)))
    assert (
        f"had moved the loader to batch 3 of epoch 0, so the pass {what}. To continue after batch 3, delete the call"
        in said[0]
    )
    waits = script.accelerator.gradient_state.window.count
    assert waits == (3 if step == 5 else 0)  # what comes again does not count twice
    assert all((p.grad is None) is (waits == 0) for p in script.model.parameters())
    script.accelerator.load_state(tmp_path / "s")
    warned(lambda: skips(script, 0, step))
    assert script.seen == alone.seen[step:]


def test_where_a_pass_continues_is_said_and_so_is_a_skip_that_has_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paceline")
    Script(Accelerator, 2).whole(tmp_path / "s", 3)
    found, said = warned(lambda: gone_on(Accelerator, tmp_path / "s", skips, 0, 3, steps=2))
    again = gone_on(Accelerator, tmp_path / "s", skips, 0, 2, steps=2)  # where the window began
    assert found.seen == again.seen
    assert same(found.weights(), again.weights())
    assert not said
    assert "The next pass over loader 0 continues epoch 0 after batch 3" in caplog.text
    for number in (3, 2):
        assert f"skip_first_batches(loader, {number}) has no effect after accelerator.load_state" in caplog.text
    Script(Accelerator).whole(tmp_path / "s", 6)
    Script(Accelerator).accelerator.load_state(tmp_path / "s")
    assert "saved at the last batch of epoch 0, so the next pass over loader 0 is epoch 1" in caplog.text


def reads_ahead(script: Script, epoch: int, step: int, window: int = 2) -> None:
    """As loops do that count the items of a window before they train on it."""
    for _ in range(epoch, EPOCHS):
        batches = iter(script.loader)
        while found := list(itertools.islice(batches, window)):
            for batch in found:
                script.step(batch)


def reads_one_ahead(script: Script, epoch: int, step: int) -> None:
    """As loops do that copy the next batch while they train on one."""
    for _ in range(epoch, EPOCHS):
        batches = iter(script.loader)
        following = next(batches, None)
        while following is not None:
            batch, following = following, next(batches, None)
            script.step(batch)


def reads_all(script: Script, epoch: int, step: int) -> None:
    reads_ahead(script, epoch, step, BATCHES)


@pytest.mark.parametrize("idiom", [reads_ahead, reads_one_ahead, reads_all])
def test_a_loop_that_reads_ahead_leaves_nothing_out(tmp_path: Path, idiom: Idiom) -> None:
    alone = Script(Accelerator).whole()
    for done in (1, 2, 5):
        Script(Accelerator).whole(tmp_path / "s", done)
        found, said = warned(lambda: gone_on(Accelerator, tmp_path / "s", idiom, 0, 0))
        assert found.seen == alone.seen[done:]
        assert not said


def test_a_program_without_an_optimizer_may_read_from_the_position_without_training(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    for _ in accelerator.prepare(DataLoader(range(12), 2)):
        accelerator.save_state(tmp_path / "s")
        break
    again = Accelerator(cpu=True)
    prepared = again.prepare(DataLoader(range(12), 2))
    again.load_state(tmp_path / "s")
    found, said = warned(lambda: [batch.tolist() for _ in range(2) for batch in prepared])
    assert found == [[i, i + 1] for i in (*range(2, 12, 2), *range(0, 12, 2))]
    assert not said


# ---- the stand-in ----------------------------------------------------------------------------------------------------


def test_under_the_stand_in_a_script_that_does_not_skip_begins_the_epoch_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As it does with Accelerate; the gradients of the incomplete window are not counted twice."""
    caplog.set_level("INFO", "paceline")
    given = {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True)}
    alone = Script(StandIn, 2, **given).whole()
    Script(StandIn, 2, **given).whole(tmp_path / "s", 3)
    for idiom in (leaves_it, sets_epochs):
        script = Script(StandIn, 2, seed=9, **given)
        script.accelerator.load_state(tmp_path / "s")
        assert all(p.grad is None for p in script.model.parameters())
        idiom(script, 0, 0)
        assert script.seen == alone.seen
    assert "saved after batch 3 of epoch 0, but the loop restarts that epoch" in caplog.text
    found = gone_on(StandIn, tmp_path / "s", sets_epochs, 1, 0, steps=2, **given)
    assert found.seen == alone.seen[BATCHES:]


@pytest.mark.parametrize("idiom", [leaves_it, sets_epochs])
def test_under_the_stand_in_a_script_may_begin_the_next_epoch_after_one_that_was_over(
    tmp_path: Path, idiom: Idiom
) -> None:
    alone = Script(StandIn, 2).whole()
    Script(StandIn, 2).whole(tmp_path / "s", BATCHES)
    found = gone_on(StandIn, tmp_path / "s", idiom, 1, 0, steps=2)
    assert found.seen == alone.seen[BATCHES:]
    assert same(found.weights(), alone.weights())


@pytest.mark.parametrize("idiom", [*DROP, skips])
def test_under_the_stand_in_a_script_that_goes_back_to_the_beginning_of_the_window_counts_its_batches_once(
    tmp_path: Path, idiom: Idiom
) -> None:
    """As scripts do that count updates: ``resume_step = updates * gradient_accumulation_steps``."""
    alone = Script(StandIn, 2, plain=True).whole()
    Script(StandIn, 2, plain=True).whole(tmp_path / "s", 3)
    found = gone_on(StandIn, tmp_path / "s", idiom, 0, 2, steps=2, plain=True)
    assert found.seen == alone.seen[2:]
    assert same(found.weights(), alone.weights())


def test_under_the_stand_in_a_loader_that_is_to_know_its_position_continues_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "is_installed", lambda package: True)
    given = {"dataloader_config": DataLoaderConfiguration(use_stateful_dataloader=True)}
    alone = Script(StandIn, **given).whole()
    Script(StandIn, **given).whole(tmp_path / "s", 3)
    found = gone_on(StandIn, tmp_path / "s", leaves_it, 0, 3, **given)
    assert found.seen == alone.seen[3:]
    assert same(found.weights(), alone.weights())

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from rank_processes import ranks
from tiny import TinyModule, tiny_loader
from torch.utils.data import DataLoader, Dataset

from paceline import Callback, Trainer
from paceline.callbacks import GarbageCollection, LambdaCallback, garbage_collection
from paceline.callbacks.garbage_collection import _PROCESS, FULL_EVERY, MOST_UNSEEN, frozen_objects
from paceline.doctor.doctor import Doctor
from paceline.processes import launch


def collector() -> tuple[bool, tuple[int, int, int], int]:
    """The collector of the process, as it stands."""
    return gc.isenabled(), gc.get_threshold(), frozen_objects()


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """The suite freezes what it has collected; here nobody has. Each test leaves the collector as it found it."""
    gc.unfreeze()
    before = collector()
    yield
    after = collector()
    gc.enable()
    gc.set_threshold(*before[1])
    gc.unfreeze()
    gc.freeze()
    assert after == before
    assert (_PROCESS.holders, _PROCESS.froze) == (0, False)


class Runs(Callback):
    """Which generations the callback collected after which step."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, int]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.trainer = trainer
        gc.callbacks.append(self.note)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        gc.callbacks.remove(self.note)

    def note(self, phase: str, info: dict[str, int]) -> None:
        by_hand = sys._getframe(1).f_code.co_filename == garbage_collection.__file__
        if phase == "start" and by_hand:
            self.runs.append((self.trainer.state.updates, info["generation"]))


class Notes(Runs):
    """The collector too, as it was after each batch; Python counts all that is frozen for it, which takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[tuple[bool, tuple[int, int, int], bool]]] = {}

    def look(self, where: str) -> None:
        enabled, thresholds, frozen = collector()
        self.seen.setdefault(where, []).append((enabled, thresholds, frozen > 0))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.look("train")

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.look("validate")


class Ring:
    """An object that only the collector can free; it holds a tensor."""

    alive: ClassVar[list[weakref.ref[Ring]]] = []

    def __init__(self) -> None:
        self.itself = self
        self.tensor = torch.ones(10)
        Ring.alive.append(weakref.ref(self))

    @classmethod
    def count(cls) -> int:
        cls.alive = [one for one in cls.alive if one() is not None]
        return len(cls.alive)


def fit(quiet: dict[str, Any], *callbacks: Callback, steps: int = 12, model: Any = None, **arguments: Any) -> Trainer:
    trainer = Trainer(**{**quiet, "max_epochs": 1, "callbacks": [*callbacks], "limit_val_batches": 0, **arguments})
    trainer.fit(model or TinyModule(), tiny_loader(steps), tiny_loader(2))
    return trainer


@pytest.fixture(autouse=True)
def no_rings() -> Iterator[None]:
    Ring.alive = []
    yield
    Ring.alive = []


# ---- when it collects ------------------------------------------------------------------------------------------------


def test_it_begins_after_the_first_step_and_collects_at_multiples_of_n(quiet: dict[str, Any]) -> None:
    notes = Notes()
    fit(quiet, GarbageCollection(every_n_steps=5), notes, steps=18)
    assert [step for step, _ in notes.runs] == [1, 5, 10, 15, 18]
    assert notes.runs[0][1] == 2  # what is garbage is not frozen
    assert {generation for _, generation in notes.runs[1:-1]} == {1}
    default = gc.get_threshold()
    assert notes.seen["train"][0] == (True, default, False)
    assert notes.seen["train"][1:] == [(True, (MOST_UNSEEN, *default[1:]), True)] * 17


def test_steps_are_optimizer_steps(quiet: dict[str, Any]) -> None:
    notes = Runs()
    fit(quiet, GarbageCollection(every_n_steps=2), notes, steps=12, accumulate_grad_batches=3)
    assert [step for step, _ in notes.runs] == [1, 2, 4]


def test_one_collection_in_ten_is_full_if_much_has_arisen(quiet: dict[str, Any]) -> None:
    kept: list[Any] = []

    class Keeps(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            kept.extend([[]] for _ in range(100))
            return super().training_step(batch, batch_idx)

    steady, growing = Runs(), Runs()
    fit(quiet, GarbageCollection(every_n_steps=1, freeze=False), steady, steps=3 * FULL_EVERY)
    fit(quiet, GarbageCollection(every_n_steps=1), growing, steps=3 * FULL_EVERY, model=Keeps())
    assert [step for step, generation in steady.runs if generation == 2] == [1]
    full = [step for step, generation in growing.runs if generation == 2]
    assert full == [1, FULL_EVERY + 1, 2 * FULL_EVERY + 1, 3 * FULL_EVERY]  # the last at the epoch's end


def test_objects_that_pile_up_are_gone_over_ever_more_rarely(quiet: dict[str, Any]) -> None:
    kept: list[Any] = []

    class Keeps(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            kept.extend([] for _ in range(1000))
            return super().training_step(batch, batch_idx)

    notes = Runs()
    fit(quiet, GarbageCollection(every_n_steps=1), notes, steps=300, model=Keeps())
    full = [step for step, generation in notes.runs if generation == 2]
    gaps = [after - before for before, after in pairwise(full[:-1])]
    assert gaps[0] == FULL_EVERY
    assert gaps[-1] >= 3 * FULL_EVERY, full


def test_without_n_python_keeps_its_rhythm(quiet: dict[str, Any]) -> None:
    notes = Notes()
    fit(quiet, GarbageCollection(every_n_steps=None), notes, steps=8)
    assert notes.seen["train"][1:] == [(True, gc.get_threshold(), True)] * 7


def test_without_freezing_nothing_is_frozen(quiet: dict[str, Any]) -> None:
    notes = Notes()
    fit(quiet, GarbageCollection(freeze=False), notes)
    assert {frozen for _, _, frozen in notes.seen["train"]} == {False}


def collected_at(folder: Path) -> list[tuple[int, int]]:
    gc.unfreeze()
    notes = Runs()
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[GarbageCollection(every_n_steps=3), notes],
    )
    if trainer.global_rank == 1:  # another amount of objects
        notes.kept = [[] for _ in range(50_000)]  # type: ignore[attr-defined]
    trainer.fit(TinyModule(), tiny_loader(16))
    return notes.runs


def test_all_ranks_collect_in_front_of_the_same_steps(tmp_path: Path) -> None:
    first, second = ranks(2, collected_at, tmp_path)
    steps = [1, 3, 6, 8, 9, 12, 15, 16]
    assert [step for step, _ in first] == steps
    assert [step for step, _ in second] == steps


# ---- how it leaves the process ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False])
def test_a_fit_leaves_the_collector_as_it_was(quiet: dict[str, Any], enabled: bool) -> None:
    before = gc.get_threshold()
    gc.set_threshold(650, 11, 12)
    if not enabled:
        gc.disable()
    try:
        for _ in range(3):
            notes = Runs()
            fit(quiet, GarbageCollection(every_n_steps=5), notes)
            assert collector() == (enabled, (650, 11, 12), 0)
            assert [step for step, _ in notes.runs] == [1, 5, 10, 12]
    finally:
        gc.enable()
        gc.set_threshold(*before)


@pytest.mark.parametrize("own", [0, 5 * MOST_UNSEEN])
def test_a_collector_that_hardly_runs_anyway_is_not_made_to(quiet: dict[str, Any], own: int) -> None:
    before, notes = gc.get_threshold(), Notes()
    gc.set_threshold(own, 10, 10)
    try:
        fit(quiet, GarbageCollection(), notes)
    finally:
        gc.set_threshold(*before)
    assert {thresholds[0] for _, thresholds, _ in notes.seen["train"]} == {own}


@pytest.mark.parametrize("where", ["on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end"])
def test_an_exception_leaves_the_collector_as_it_was(quiet: dict[str, Any], where: str) -> None:
    def fail(trainer: Any, *_: Any) -> None:
        if trainer.state.updates >= 3:
            raise RuntimeError("planted")

    before = collector()
    with pytest.raises(RuntimeError, match="planted"):
        fit(quiet, GarbageCollection(every_n_steps=2), LambdaCallback(**{where: fail}), limit_val_batches=2)
    assert collector() == before


def test_a_signal_leaves_the_collector_as_it_was(quiet: dict[str, Any]) -> None:
    before, kill = collector(), LambdaCallback(on_train_batch_end=lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        fit(quiet, GarbageCollection(), kill)
    assert collector() == before


def test_what_somebody_else_froze_stays_frozen(quiet: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    theirs = [[] for _ in range(100)]
    gc.freeze()
    try:
        frozen = frozen_objects()
        with caplog.at_level("INFO"):
            fit(quiet, GarbageCollection())
        assert 0.9 * frozen < frozen_objects() <= frozen  # some of them were freed
        assert "does not freeze any objects" in caplog.text
        assert "gc.unfreeze()" in caplog.text
    finally:
        gc.unfreeze()
    del theirs


def frozen_in_a_copy(quiet: dict[str, Any]) -> list[int]:
    frozen = [frozen_objects()]
    fit(quiet, GarbageCollection(), LambdaCallback(on_train_end=lambda *_: frozen.append(frozen_objects())))
    return [*frozen, frozen_objects()]


def test_in_a_forked_rank_what_the_parent_left_stays_frozen(
    quiet: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    before, during, after = launch.start(frozen_in_a_copy, (quiet,), 2, "fork")
    assert 0 < 0.9 * before < during <= before
    assert 0.9 * before < after <= before
    assert "does not freeze any objects" not in capfd.readouterr().err


def test_a_fit_inside_of_a_fit_leaves_the_outer_one_its_rhythm(
    quiet: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    outer = Notes()
    inner = Notes()

    def nested(trainer: Any, *_: Any) -> None:
        fit(quiet, GarbageCollection(every_n_steps=2), inner, steps=4)
        outer.look("after")

    before = collector()
    with caplog.at_level("INFO"):
        fit(quiet, GarbageCollection(), outer, LambdaCallback(on_train_epoch_end=nested))
    raised = (True, (MOST_UNSEEN, *before[1][1:]), True)
    assert outer.seen["after"] == [raised]
    assert inner.seen["train"][1:] == [raised] * 3
    assert collector() == before
    assert "does not freeze any objects" not in caplog.text


def test_two_fits_that_overlap_put_the_thresholds_back_when_the_last_has_ended() -> None:
    before = gc.get_threshold()
    _PROCESS.hold(True)
    _PROCESS.hold(True)
    _PROCESS.hold(False)
    assert gc.get_threshold()[0] == MOST_UNSEEN
    _PROCESS.hold(False)
    assert gc.get_threshold() == before


def test_python_collects_as_always_while_a_validation_runs(quiet: dict[str, Any]) -> None:
    notes, before = Notes(), gc.get_threshold()
    fit(quiet, GarbageCollection(), notes, limit_val_batches=2, val_check_interval=4)
    assert {thresholds for _, thresholds, _ in notes.seen["validate"]} == {before}
    assert {thresholds[0] for _, thresholds, _ in notes.seen["train"][1:]} == {MOST_UNSEEN}


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_it_acts_in_fits_only(quiet: dict[str, Any], entry: str) -> None:
    notes, before = Notes(), gc.get_threshold()
    getattr(Trainer(**quiet, callbacks=[GarbageCollection(), notes]), entry)(TinyModule(), tiny_loader())
    assert notes.runs == []
    assert {thresholds for _, thresholds, _ in notes.seen.get("validate", [])} <= {before}


class Thresholds(Dataset):
    """Says what the collector of the process is like that reads it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([gc.get_threshold()[0], int(gc.isenabled()), os.getpid()])


@pytest.mark.parametrize("persistent", [False, True])
def test_the_workers_of_a_loader_collect_as_always(quiet: dict[str, Any], persistent: bool) -> None:
    class Reads(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch[0].tolist())
            return self.layer(torch.ones(1, 4)).sum()

    seen: list[list[int]] = []
    loader = DataLoader(Thresholds(), batch_size=4, num_workers=1, persistent_workers=persistent)
    trainer = Trainer(**{**quiet, "max_epochs": 3, "callbacks": [GarbageCollection()]})
    trainer.fit(Reads(), loader, tiny_loader(1))
    assert {(threshold, enabled) for threshold, enabled, _ in seen} == {(gc.get_threshold()[0], 1)}
    assert os.getpid() not in {process for *_, process in seen}


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_cyclic_garbage_of_every_step_does_not_pile_up(quiet: dict[str, Any], freeze: bool, enabled: bool) -> None:
    class Leaves(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            Ring()
            counts.append(Ring.count())
            return super().training_step(batch, batch_idx)

    counts: list[int] = []
    if not enabled:
        gc.disable()
    try:
        fit(quiet, GarbageCollection(every_n_steps=10, freeze=freeze), steps=200, model=Leaves())
    finally:
        gc.enable()
    assert max(counts[20:]) == 10


def test_garbage_that_outlives_a_collection_is_freed_by_a_full_one(quiet: dict[str, Any]) -> None:
    class Holds(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            held.append([Ring() for _ in range(20)])
            if len(held) > 7:
                del held[0]
            counts.append(Ring.count())
            return super().training_step(batch, batch_idx)

    counts: list[int] = []
    held: list[Any] = []
    fit(quiet, GarbageCollection(every_n_steps=2), steps=1000, model=Holds())
    assert max(counts[500:]) <= max(counts[:500]) < 5000


def test_garbage_of_a_long_validation_does_not_pile_up(quiet: dict[str, Any]) -> None:
    class Leaves(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            for _ in range(50):
                Ring()
            counts.append(Ring.count())

    counts: list[int] = []
    trainer = Trainer(**{**quiet, "max_epochs": 1, "callbacks": [GarbageCollection(10_000)]})
    trainer.fit(Leaves(), tiny_loader(4), tiny_loader(200))
    assert max(counts) < 3000


def test_what_was_frozen_can_be_collected_after_the_fit(quiet: dict[str, Any]) -> None:
    class Owns(TinyModule):
        def on_train_start(self) -> None:
            self.ring = Ring()

        def on_train_end(self) -> None:
            del self.ring
            gc.collect()
            found.append(Ring.count())

    found: list[int] = []
    fit(quiet, GarbageCollection(), model=Owns())
    gc.collect()
    assert found == [1]  # as documented
    assert Ring.count() == 0


# ---- together with the rest ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, {"backend": "aot_eager"}])
def test_the_weights_are_those_of_a_fit_without_it(quiet: dict[str, Any], compiled: Any) -> None:
    def trained(*callbacks: Callback) -> list[torch.Tensor]:
        torch.manual_seed(1)
        module = TinyModule()
        fit(quiet, *callbacks, model=module, max_epochs=3, compile=compiled)
        return [parameter.detach() for parameter in module.parameters()]

    pairs = zip(trained(), trained(GarbageCollection(every_n_steps=3)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_doctor_counts_these_collections_too(quiet: dict[str, Any]) -> None:
    doctor = Doctor(write=False)
    fit(quiet, GarbageCollection(every_n_steps=5), steps=33, profiler=doctor)
    assert doctor.report is not None
    facts = doctor.report.ranks[0]
    assert facts.collections == 7  # at 5, 10, ... 30 and at the end of the epoch; the first comes before they count
    assert 0 < facts.collection_seconds < facts.run_seconds


def test_it_can_be_sent_to_other_processes(quiet: dict[str, Any]) -> None:
    callback = pickle.loads(pickle.dumps(GarbageCollection(7, freeze=False)))
    assert (callback.every_n_steps, callback.freeze) == (7, False)
    fit(quiet, callback)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "5"])
def test_a_number_of_steps_that_is_none_is_an_error(value: Any) -> None:
    with pytest.raises(ValueError, match=r"GarbageCollection: every_n_steps=.*must be a whole number"):
        GarbageCollection(every_n_steps=value)


def test_doing_nothing_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="would do nothing"):
        GarbageCollection(every_n_steps=None, freeze=False)

"""Compiling is told apart from training, and what makes it happen again is named."""

from __future__ import annotations

import linecache

import pytest
import torch
from own_loop import data, network
from tiny import TinyModule, tiny_loader

from paceline import Accelerator, TorchDynamoPlugin, Trainer
from paceline.messages import PacelineWarning
from paceline.strategies import recompile_watch
from paceline.strategies.recompile_watch import watch_compiling


def test_e6_recompilations_are_counted_and_the_argument_that_changes_is_named() -> None:
    torch._dynamo.reset()
    accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager", dynamic=False))
    model = accelerator.prepare(network())
    before = watch_compiling().recompilations.total()
    batches = [data(size)[:][0] for size in range(2, 3 + recompile_watch.MANY)]
    with pytest.warns(
        PacelineWarning, match=r"5 times.*tensor 'args\[0\]' size mismatch at index 0.*drop_last=True"
    ) as caught:
        _ = [model(batch) for batch in batches]  # the line that makes torch compile again
    assert watch_compiling().recompilations.total() - before == recompile_watch.MANY
    (found,) = [one for one in caught if issubclass(one.category, PacelineWarning)]
    assert found.filename == __file__
    assert "makes torch compile again" in linecache.getline(found.filename, found.lineno)


def test_e6_the_time_of_compiling_is_told_apart(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompile_watch, "WORTH_SECONDS", 0.0)
    caplog.set_level("INFO", logger="paceline")
    torch._dynamo.reset()
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    model = accelerator.prepare(network())
    before = watch_compiling().compilations
    for _ in range(3):
        model(data(4)[:][0])
    assert watch_compiling().compilations == before + 1
    assert len([r for r in caplog.records if "Steps without compilation will be faster" in r.message]) == 1


def test_e6_the_trainers_compiling_is_watched_too() -> None:
    torch._dynamo.reset()
    before = watch_compiling().compilations
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(**silent, accelerator="cpu", max_steps=2, compile={"backend": "eager"})
    trainer.fit(TinyModule(), tiny_loader())
    assert watch_compiling().compilations > before

"""Train or evaluate a run on a few batches, without validation, logging or saving."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..data.batches import Batches
from ..trainer import phases
from ..trainer.bind_steps import bind_mover, bind_step
from ..trainer.evaluation import WORDS, EvalLoop
from ..trainer.loop import FitLoop
from ..trainer.states import RunningStage
from ..trainer.step import detached
from ..trainer.stopping import Stops

if TYPE_CHECKING:
    from ..trainer.run import Run

Method = Literal["fit", "validate", "test", "predict"]


def train(run: Run, before: Callable[[], Any], after: Callable[[list[Tensor]], bool]) -> None:
    """Train with the run's own step until ``after`` returns True, for as many epochs as that takes.

    Args:
        run: the trial's run (see :func:`.trial_run.stand_in`).
        before: called before each accumulation window.
        after: called after each window with its batches' losses, tensors of shape (); returns True to stop.
    """
    run.stops = Stops(run, {})
    state, hooks = run.state, run.hooks
    state.stage = RunningStage.TRAINING
    loop = FitLoop(run, None)
    run.source.train()
    if run.source.num_training_batches == 0:
        raise ValueError("limit_train_batches=0 leaves no batches to train on. Leave out limit_train_batches.")
    loop.bind()
    run.metrics.enter(phases.ON_TRAIN_START)
    for hook in hooks.on_train_start:
        hook()
    while not _train_epoch(run, loop, before, after):
        if state.next_batch == 0:
            loop.check_length(0, None)
        loop.enter_next_epoch()


def _train_epoch(run: Run, loop: FitLoop, before: Callable[[], Any], after: Callable[[list[Tensor]], bool]) -> bool:
    """Train for one epoch; return whether to stop."""
    state, hooks, metrics = run.state, run.hooks, run.metrics
    loop.start_epoch()
    step, batches, losses = loop.step(), loop.batches(0), []
    number = run.source.num_training_batches
    with closing(batches):
        for batch_idx, batch in enumerate(batches):
            state.batch_idx, state.stepped = batch_idx, False
            state.is_last_batch = batch_idx + 1 == number or batches.exhausted
            metrics.batch = batch
            if not state.window:
                losses = []
                before()
            if -1 in [hook(batch, batch_idx) for hook in hooks.on_train_batch_start]:
                step.finish_window()
                return False
            outputs = detached(step(batch, batch_idx))
            state.batches += 1
            state.next_batch = batch_idx + 1
            losses += _loss_of(outputs)
            for hook in hooks.on_train_batch_end:
                hook(outputs, batch, batch_idx)
            if not state.window and after(losses):
                return True
    return False


def _loss_of(outputs: Mapping[str, Any] | None) -> list[Tensor]:
    loss = None if outputs is None else outputs.get("loss")
    return [loss] if isinstance(loss, Tensor) else []


def evaluate(run: Run, kind: Literal["validate", "test", "predict"], steps: int) -> None:
    """Evaluate on the first ``steps`` batches of each loader of a stage."""
    run.state.stage = RunningStage(kind)
    loop, metrics = EvalLoop(run, kind), run.metrics
    mode, moment = (phases.PREDICT,) * 2 if kind == "predict" else (phases.EVAL_MODE, phases.EVAL_BATCH)
    loaders, _ = run.source.evaluation(kind)
    several = len(loaders) > 1
    with torch.inference_mode() if run.trainer.inference_mode else torch.no_grad():
        metrics.enter(mode)
        loop.switch("eval")
        try:
            step = bind_step(run, f"{WORDS[kind]}_step", several_loaders=several)
            for index, loader in enumerate(loaders):
                metrics.enter(moment, index if several else None)
                _evaluate_loader(run, step, loader, (index,) if several else (), steps)
        finally:
            metrics.enter(mode)
            loop.switch("train")


def _evaluate_loader(run: Run, step: Callable[..., Any], loader: Any, index: tuple[int, ...], steps: int) -> None:
    mover = bind_mover(run, index[0] if index else 0)
    with closing(Batches(loader, mover, run.source.looks_ahead(loader))) as batches:
        for batch_idx, batch in enumerate(islice(iter(batches), steps)):
            run.metrics.batch = batch
            step(batch, batch_idx, *index)

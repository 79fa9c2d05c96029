"""``transformers.Trainer``: optimizers, schedules, accumulation, evaluation, resuming, two processes, FSDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers

EVALUATION = {"eval_strategy": "steps", "eval_steps": 5}
CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adafactor": {"optim": "adafactor"},
    "sgd": {"optim": "sgd", "learning_rate": 0.1},
    "weight decay": {"weight_decay": 0.1, "max_grad_norm": 0.1},
    "cosine with warmup": {"lr_scheduler_type": "cosine", "warmup_steps": 5},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", **EVALUATION},
    "accumulation": {"gradient_accumulation_steps": 2},
    "evaluation": EVALUATION,
    "epochs": {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch"},
    "61 samples": {"samples": 61},
    "61 samples, accumulation": {"samples": 61, "gradient_accumulation_steps": 3},
    "by length": {"train_sampling_strategy": "group_by_length"},
    "balanced": {"train_sampling_strategy": "batch_rebalance"},
    "not seedable": {"accelerator_config": {"use_seedable_sampler": False}},
    "split batches": {"accelerator_config": {"split_batches": True}},
    "dispatched": {"accelerator_config": {"dispatch_batches": True}},
    "workers": {"dataloader_num_workers": 2, "max_steps": 10},
    "checkpointed activations": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "average tokens": {"average_tokens_across_devices": True, "gradient_accumulation_steps": 2},
}
SHARDED = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["GPT2Block"]}}


def trainer(folder: Path, samples: int = 64, **more: Any) -> tuple[transformers.Trainer, tiny.Losses]:
    """Return a Trainer for the language model, and the callback that collects its losses."""
    losses, arguments = tiny.Losses(), transformers.TrainingArguments(**tiny.settings(folder, **more))
    data = {"train_dataset": tiny.tokens(samples), "eval_dataset": tiny.tokens(13)}
    return transformers.Trainer(model=tiny.language_model(), args=arguments, callbacks=[losses], **data), losses


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_training(record_losses: Callable[..., None], case: str, processes: int) -> None:
    def train(folder: Path) -> list[float]:
        run, losses = trainer(folder, **CASES[case])
        run.train()
        return losses.seen

    record_losses(train, processes)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("more", [{}, {"gradient_accumulation_steps": 2}], ids=["steps", "windows"])
def test_resuming(record_losses: Callable[..., None], more: dict[str, Any], processes: int) -> None:
    def train(folder: Path) -> list[float]:
        trainer(folder, save_strategy="steps", save_steps=6, max_steps=12, **more)[0].train()
        run, losses = trainer(folder, **more)
        run.train(resume_from_checkpoint=str(folder / "output" / "checkpoint-6"))
        return losses.seen

    record_losses(train, processes)


@pytest.mark.parametrize("processes", [1, 2])
def test_evaluation_and_prediction(record_losses: Callable[..., None], processes: int) -> None:
    def evaluate(folder: Path) -> list[float]:
        run, _ = trainer(folder)
        predicted = run.predict(tiny.tokens(13))
        assert len(predicted.predictions) == 13
        return [run.evaluate()["eval_loss"], predicted.metrics["test_loss"], float(predicted.predictions.mean())]

    record_losses(evaluate, processes)


@pytest.mark.parametrize(
    "more", [{}, {"gradient_accumulation_steps": 2}, EVALUATION], ids=["steps", "windows", "evaluation"]
)
def test_sharded_training(record_losses: Callable[..., None], more: dict[str, Any]) -> None:
    def train(folder: Path) -> list[float]:
        run, losses = trainer(folder, **SHARDED, **more)
        run.train()
        return losses.seen

    record_losses(train, processes=2)


def test_sharded_training_resumes(record_losses: Callable[..., None]) -> None:
    def train(folder: Path) -> list[float]:
        trainer(folder, **SHARDED, save_strategy="steps", save_steps=6, max_steps=12)[0].train()
        run, losses = trainer(folder, **SHARDED)
        run.train(resume_from_checkpoint=str(folder / "output" / "checkpoint-6"))
        return losses.seen

    record_losses(train, processes=2)


def test_own_optimizer_and_schedule(record_losses: Callable[..., None]) -> None:
    def train(folder: Path) -> list[float]:
        model, losses = tiny.language_model(), tiny.Losses()
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
        arguments = transformers.TrainingArguments(**tiny.settings(folder))
        data = {"train_dataset": tiny.tokens(64), "callbacks": [losses]}
        transformers.Trainer(model=model, args=arguments, optimizers=(optimizer, schedule), **data).train()
        return losses.seen

    record_losses(train)

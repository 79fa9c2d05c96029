"""sentence-transformers: its Trainer for encoders, with one dataset and with two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import tiny
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses

CASES: dict[str, dict[str, Any]] = {
    "plain": {"max_steps": 50},
    "61 samples": {"samples": 61, "max_steps": -1, "num_train_epochs": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "no duplicates": {"batch_sampler": "no_duplicates"},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 5},
}


def pairs(count: int) -> datasets.Dataset:
    """Return pairs of texts that belong together."""
    return datasets.Dataset.from_dict({"anchor": tiny.sentences(count), "positive": tiny.sentences(count, 4)})


def scored(count: int) -> datasets.Dataset:
    """Return pairs of texts with their similarity."""
    return pairs(count).add_column("score", [i % 5 / 4 for i in range(count)])


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_training(record_losses: Callable[..., None], case: str, processes: int) -> None:
    def train(folder: Path, samples: int = 64, **more: Any) -> list[float]:
        model, seen = tiny.encoder(), tiny.Losses()
        arguments = SentenceTransformerTrainingArguments(**tiny.settings(folder, **more))
        data = {"train_dataset": pairs(samples), "eval_dataset": pairs(13)}
        loss = losses.MultipleNegativesRankingLoss(model)
        SentenceTransformerTrainer(model=model, args=arguments, loss=loss, callbacks=[seen], **data).train()
        return seen.seen

    record_losses(lambda folder: train(folder, **CASES[case]), processes)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("order", ["proportional", "round_robin"])
def test_two_data_sets(record_losses: Callable[..., None], order: str, processes: int) -> None:
    def train(folder: Path) -> list[float]:
        model, seen = tiny.encoder(), tiny.Losses()
        more = tiny.settings(folder, multi_dataset_batch_sampler=order)
        arguments = SentenceTransformerTrainingArguments(**more)
        kinds = {"pairs": losses.MultipleNegativesRankingLoss(model), "scored": losses.CosineSimilarityLoss(model)}
        data = {"pairs": pairs(64), "scored": scored(48)}
        run = SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=kinds, callbacks=[seen])
        run.train()
        return seen.seen

    record_losses(train, processes)

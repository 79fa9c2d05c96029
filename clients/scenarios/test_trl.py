"""trl's trainers for supervised fine-tuning, preferences and rewards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import tiny
import trl

EVALUATION = {"eval_strategy": "steps", "eval_steps": 5}
FINE_TUNING: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "packing": {"packing": True, **EVALUATION},
    "evaluation": EVALUATION,
    "61 samples": {"samples": 61, "gradient_accumulation_steps": 3},
}
PREFERENCES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "evaluation": EVALUATION,
    "reference first": {"precompute_ref_log_probs": True},
}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("case", FINE_TUNING)
def test_fine_tuning(record_losses: Callable[..., None], case: str, processes: int) -> None:
    def train(folder: Path, samples: int = 64, **more: Any) -> list[float]:
        losses, arguments = tiny.Losses(), trl.SFTConfig(max_length=16, **tiny.settings(folder, **more))
        texts = [datasets.Dataset.from_dict({"text": tiny.sentences(count)}) for count in (samples, 13)]
        data = {"train_dataset": texts[0], "eval_dataset": texts[1], "processing_class": tiny.tokenizer()}
        trl.SFTTrainer(model=tiny.language_model(), args=arguments, callbacks=[losses], **data).train()
        return losses.seen

    record_losses(lambda folder: train(folder, **FINE_TUNING[case]), processes)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("case", PREFERENCES)
def test_preferences(record_losses: Callable[..., None], case: str, processes: int) -> None:
    def train(folder: Path) -> list[float]:
        losses, arguments = tiny.Losses(), trl.DPOConfig(max_length=32, **tiny.settings(folder, **PREFERENCES[case]))
        data = {"train_dataset": pairs(), "processing_class": tiny.tokenizer(), "ref_model": tiny.language_model()}
        data["eval_dataset"] = pairs().select(range(13))
        trl.DPOTrainer(model=tiny.language_model(), args=arguments, callbacks=[losses], **data).train()
        return losses.seen

    record_losses(train, processes)


@pytest.mark.parametrize("processes", [1, 2])
def test_rewards(record_losses: Callable[..., None], processes: int) -> None:
    def train(folder: Path) -> list[float]:
        import transformers

        body = tiny.language_model()
        model = transformers.GPT2ForSequenceClassification(body.config.__class__(**body.config.to_dict(), num_labels=1))
        model.transformer.load_state_dict(body.transformer.state_dict())
        losses, arguments = tiny.Losses(), trl.RewardConfig(max_length=32, **tiny.settings(folder))
        data = {"train_dataset": pairs(), "processing_class": tiny.tokenizer()}
        trl.RewardTrainer(model=model, args=arguments, callbacks=[losses], **data).train()
        return losses.seen

    record_losses(train, processes)


def pairs() -> datasets.Dataset:
    """Return prompts, each with a better and a worse continuation."""
    columns = {"prompt": tiny.sentences(64), "chosen": tiny.sentences(64, 4), "rejected": tiny.sentences(64, 5)}
    return datasets.Dataset.from_dict(columns)

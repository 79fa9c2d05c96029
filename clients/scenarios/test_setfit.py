"""setfit: an encoder trained on pairs, then a head on its embeddings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import setfit
import tiny
from sklearn.linear_model import LogisticRegression


@pytest.mark.parametrize("head", ["logistic regression", "layer"])
def test_training(record_losses: Callable[..., None], head: str) -> None:
    def train(folder: Path) -> list[float]:
        body = tiny.encoder()  # seeds the head, too
        last: Any = setfit.SetFitHead(in_features=16, out_features=2) if head == "layer" else LogisticRegression()
        model = setfit.SetFitModel(model_body=body, model_head=last)
        arguments = setfit.TrainingArguments(
            str(folder / "output"),
            batch_size=8,
            max_steps=20,
            num_epochs=2,
            seed=tiny.SEED,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            end_to_end=head == "layer",
            show_progress_bar=False,
        )
        run = setfit.Trainer(model=model, args=arguments, train_dataset=labeled(16), eval_dataset=labeled(12))
        run.train()
        logs = run.st_trainer.state.log_history
        chances = model.predict_proba(tiny.sentences(8, 9), as_numpy=True)[:, 0]
        return [log["embedding_loss"] for log in logs if "embedding_loss" in log] + chances.tolist()

    record_losses(train)


def labeled(count: int) -> datasets.Dataset:
    """Return labeled texts of two classes."""
    return datasets.Dataset.from_dict({"text": tiny.sentences(count), "label": [i % 2 for i in range(count)]})

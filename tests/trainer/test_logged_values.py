"""What is said about a logged value that is not there."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader

from paceline import Trainer


class Reads(TinyModule):
    """Reads values in the middle of an epoch that come at its end, later, or never."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("alone", loss, rank_zero_only=True)
        self.log("unsent", loss, logger=False)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for reader, name in ASKED:
            with pytest.raises(KeyError) as caught:
                getattr(self.trainer, reader)[name]
            assert caught.value.args == (name,)
            self.said[reader, name] = str(caught.value)

    def on_train_start(self) -> None:
        self.said: dict[tuple[str, str], str] = {}
        with pytest.raises(KeyError) as caught:
            self.trainer.callback_metrics["train_loss"]
        assert str(caught.value) == (
            "'train_loss' has not been logged yet. Nothing is available yet. It appears after the first "
            "self.log('train_loss', ...), or, with on_epoch=True, at the end of the epoch."
        )

    def on_validation_batch_end(self, *args: Any) -> None:
        with pytest.raises(KeyError) as caught:
            self.trainer.callback_metrics["val_loss"]
        self.said["callback_metrics", "val_loss"] = str(caught.value)


END = "is logged with on_epoch=True, on_step={}, so it appears at the end of the training epoch. "
ASKED = {
    ("callback_metrics", "train_loss"): "'train_loss' " + END.format(False) + "Available: 'both', 'both_step' and",
    ("callback_metrics", "both_epoch"): "'both_epoch' " + END.format(True),
    ("callback_metrics", "alone"): "'alone' is logged with rank_zero_only=True, so it cannot be monitored.",
    ("callback_metrics", "both_stp"): "'both_stp' has not been logged yet. Did you mean 'both_step'? Available: ",
    ("callback_metrics", "train_los"): "'train_los' has not been logged yet. Did you mean 'train_loss'? Available: ",
    ("progress_bar_metrics", "train_loss"): "'train_loss' " + END.format(False) + "Nothing is available yet.",
    ("progress_bar_metrics", "both"): "'both' is logged without prog_bar=True. Nothing is available yet.",
    ("logged_metrics", "unsent"): "'unsent' is logged with logger=False.",
    ("logged_metrics", "both_step"): "'both_step' is a step value, which goes to the loggers every log_every_n_steps",
    ("logged_metrics", "train_loss"): "'train_loss' " + END.format(False),
}


def test_the_error_for_a_value_that_is_read_too_early_says_when_it_comes(quiet: dict[str, Any]) -> None:
    module = Reads()
    trainer = Trainer(**quiet, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, tiny_loader(2), tiny_loader(1))
    for place, text in ASKED.items():
        assert module.said[place].startswith(text), place
    at_end = "is logged with on_epoch=True, on_step=False, so it appears at the end of the validation."
    assert module.said["callback_metrics", "val_loss"].startswith(f"'val_loss' {at_end}")
    assert float(trainer.callback_metrics["train_loss"]) == pytest.approx(trainer.logged_metrics["train_loss"])


def test_logged_values_are_an_ordinary_dict_otherwise(quiet: dict[str, Any]) -> None:
    trainer = Trainer(**quiet, max_epochs=1)
    trainer.fit(TinyModule(), tiny_loader(2))
    for values in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics):
        assert isinstance(values, dict)
        assert values.get("none") is None
        assert "none" not in values
        file = io.BytesIO()
        torch.save(values, file)
        file.seek(0)
        again = torch.load(file, weights_only=True)
        for other in (dict(values), {**values}, copy.copy(values), copy.deepcopy(values), again, values | {}):
            assert other == values
        assert pickle.loads(pickle.dumps(values)) == values
        assert repr(values) == repr(dict(values))
    with pytest.raises(KeyError) as caught:
        trainer.callback_metrics["val_loss"]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

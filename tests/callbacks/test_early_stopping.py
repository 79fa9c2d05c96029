from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from tiny import QUIET, TinyModule, tiny_loader

from paceline import Trainer
from paceline.callbacks.base import Callback
from paceline.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
from paceline.callbacks.model_checkpoint import ModelCheckpoint
from paceline.messages import PacelineWarning
from paceline.strategies.base import SingleDevice
from paceline.trainer.optimizers import configure

NAN, INF = math.nan, math.inf


class Scored(TinyModule):
    """Logs the given ``score`` values, one in each validation; ``sanity`` in the sanity check."""

    def __init__(self, *scores: float, sanity: float = 0.0) -> None:
        super().__init__()
        self.scores = list(scores)
        self.sanity = sanity
        self.validations = 0

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            self.log("score", self.sanity)
            return
        self.log("score", self.scores[self.validations])
        self.validations += 1


def fit(module: TinyModule, *callbacks: Callback, epochs: int = 10, resume: Any = None, **arguments: Any) -> Trainer:
    given = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "accelerator": "cpu",
    }
    if "strategy" in arguments:
        del given["accelerator"]
    trainer = Trainer(callbacks=list(callbacks), max_epochs=epochs, **(given | arguments))
    trainer.fit(module, tiny_loader(), tiny_loader(seed=1), ckpt_path=resume)
    return trainer


@pytest.mark.parametrize(
    ("mode", "scores", "epochs"),
    [
        ("min", [3.0, 2.0, 2.0, 2.5, 1.0], 4),
        ("max", [1.0, 2.0, 2.0, 1.5, 3.0], 4),
        ("min", [3.0, 2.0, 2.5, 1.0, 1.5, 1.5], 6),
    ],
    ids=["min", "max", "an improvement starts the count again"],
)
def test_stops_after_patience_checks_without_an_improvement(mode: Any, scores: list[float], epochs: int) -> None:
    stopping = EarlyStopping("score", patience=2, mode=mode)
    trainer = fit(Scored(*scores), stopping)
    assert trainer.current_epoch == epochs
    assert stopping.wait_count == 2
    assert stopping.stopped_epoch == epochs - 1
    assert stopping.best_score == (min if mode == "min" else max)(scores[:epochs])
    assert stopping.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
    assert stopping.stopping_reason_message is not None
    assert "'score' did not improve" in stopping.stopping_reason_message
    assert "in 2 checks" in stopping.stopping_reason_message


def test_a_run_that_keeps_improving_is_not_stopped() -> None:
    stopping = EarlyStopping("score", patience=1)
    trainer = fit(Scored(4.0, 3.0, 2.0, 1.0), stopping, epochs=4)
    assert trainer.current_epoch == 4
    assert not trainer.should_stop
    assert (stopping.stopped_epoch, stopping.wait_count) == (0, 0)
    assert stopping.stopping_reason is EarlyStoppingReason.NOT_STOPPED
    assert stopping.stopping_reason_message is None


@pytest.mark.parametrize(("mode", "scores"), [("min", [3.0, 2.5, 2.0]), ("max", [2.0, 2.5, 3.0])])
def test_a_change_of_exactly_min_delta_is_no_improvement(mode: Any, scores: list[float]) -> None:
    stopping = EarlyStopping("score", min_delta=0.5, patience=1, mode=mode)
    assert fit(Scored(*scores), stopping).current_epoch == 2
    assert stopping.best_score == scores[0]


@pytest.mark.parametrize(
    ("arguments", "scores", "reason", "words"),
    [
        (
            {"stopping_threshold": 1.0},
            [2.0, 1.0, 0.5],
            "STOPPING_THRESHOLD",
            "Stopping threshold reached: 'score' is 0.5, better than 1.",
        ),
        ({"stopping_threshold": 1.0, "mode": "max"}, [0.0, 1.0, 2.0], "STOPPING_THRESHOLD", "2, better than"),
        (
            {"divergence_threshold": 9.0},
            [2.0, 9.0, 9.5],
            "DIVERGENCE_THRESHOLD",
            "Divergence threshold reached: 'score' is 9.5, worse than 9.",
        ),
        ({"divergence_threshold": -1.0, "mode": "max"}, [2.0, -1.0, -2.0], "DIVERGENCE_THRESHOLD", "-2, worse than"),
        ({}, [3.0, 2.0, NAN], "NON_FINITE_METRIC", "nan, which is not finite (best so far: 2)"),
        ({}, [3.0, 2.0, INF], "NON_FINITE_METRIC", "inf, which is not finite"),
    ],
)
def test_stops_at_once_and_says_why(arguments: Any, scores: list[float], reason: str, words: str) -> None:
    stopping = EarlyStopping("score", **arguments)
    assert fit(Scored(*scores), stopping).current_epoch == 3
    assert stopping.stopping_reason.name == reason
    assert stopping.stopping_reason_message is not None
    assert words in stopping.stopping_reason_message
    assert stopping.stopped_epoch == 2


def test_a_value_that_is_not_finite_counts_as_no_improvement_where_that_is_allowed() -> None:
    stopping = EarlyStopping("score", patience=2, check_finite=False)
    assert fit(Scored(1.0, NAN, INF), stopping).current_epoch == 3
    assert stopping.best_score == 1.0


def test_the_sanity_check_is_not_judged() -> None:
    stopping = EarlyStopping("score", check_on_train_epoch_end=False)
    trainer = fit(Scored(2.0, 1.0, sanity=NAN), stopping, epochs=2)
    assert trainer.current_epoch == 2
    assert stopping.best_score == 1.0


def test_a_validation_of_its_own_is_not_judged() -> None:
    stopping = EarlyStopping("score", check_on_train_epoch_end=False, patience=1)
    module = Scored(1.0, 2.0)
    trainer = fit(module, stopping, epochs=1)
    trainer.validate(module, tiny_loader(), verbose=False)
    assert stopping.wait_count == 0


@pytest.mark.parametrize(
    ("arguments", "checks"),
    [
        ({}, 2),
        ({"val_check_interval": 0.5}, 4),
        ({"check_val_every_n_epoch": 2}, 1),
        ({"limit_val_batches": 0}, 2),
        ({"limit_val_batches": 0, "check_val_every_n_epoch": 2}, 2),
    ],
    ids=["once an epoch", "twice an epoch", "every second epoch", "never", "never, whatever the rhythm"],
)
def test_checks_follow_the_validations_and_without_them_the_epochs(arguments: dict[str, Any], checks: int) -> None:
    seen = []

    class Counting(EarlyStopping):
        def _judge(self, value: torch.Tensor) -> Any:
            seen.append(value)
            return super()._judge(value)

    metric = "train_loss" if "limit_val_batches" in arguments else "val_loss"
    fit(TinyModule(), Counting(metric), epochs=2, **arguments)
    assert len(seen) == checks


def test_a_metric_that_the_module_logs_at_the_epochs_end_is_seen() -> None:
    class Late(TinyModule):
        def on_train_epoch_end(self) -> None:
            self.log("late", float(self.current_epoch))

    stopping = EarlyStopping("late", patience=2)
    assert fit(Late(), stopping).current_epoch == 3
    assert stopping.best_score == 0.0


def test_stopping_waits_for_min_epochs() -> None:
    stopping = EarlyStopping("score", patience=1)
    trainer = fit(Scored(1.0, 2.0, 3.0, 4.0), stopping, min_epochs=4)
    assert trainer.current_epoch == 4


def test_every_process_stops_when_one_wants_to() -> None:
    class OneOfTwo(SingleDevice):
        def agree(self, flag: bool, all: bool = False) -> bool:
            return True

    stopping = EarlyStopping("score")
    assert fit(Scored(1.0, 2.0), stopping, strategy=OneOfTwo("cpu")).current_epoch == 1
    assert stopping.stopping_reason_message == "Another process requested the stop."


class OwnLoss(TinyModule):
    """Logs the loss of each batch, and in each process another part of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        wave = 5.0 * (1 - self.global_rank * 2) * (self.current_epoch % 2) * (self.trainer.world_size - 1)
        self.log("own", loss.detach() + wave)
        return loss


def stop_of_a_fit(strategy: str, batch_size: int) -> tuple[int, int, float]:
    torch.manual_seed(1)
    stopping = EarlyStopping("own", patience=1, min_delta=0.1, check_on_train_epoch_end=True)
    trainer = Trainer(**QUIET, callbacks=[stopping], max_epochs=30, strategy=strategy)
    trainer.fit(OwnLoss(), tiny_loader(8 // batch_size, batch_size))
    return stopping.stopped_epoch, stopping.wait_count, round(stopping.best_score.item(), 4)


def test_processes_with_values_of_their_own_stop_where_one_process_would() -> None:
    alone = stop_of_a_fit("single_device", 4)
    assert alone[0] > 2
    assert ranks(2, stop_of_a_fit, "ddp", 2) == [alone, alone]


class Same(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("same", 0.85)
        return super().training_step(batch, batch_idx)


def best_of_a_fit() -> float:
    stopping = EarlyStopping("same", mode="max", stopping_threshold=0.85, check_on_train_epoch_end=True)
    trainer = Trainer(**QUIET, callbacks=[stopping], max_epochs=2, strategy="ddp")
    trainer.fit(Same(), tiny_loader(3, 3))
    assert trainer.current_epoch == 2
    return stopping.best_score.item()


def test_a_value_that_is_the_same_on_all_processes_is_judged_as_it_is() -> None:
    assert ranks(3, best_of_a_fit) == [torch.tensor(0.85).item()] * 3


# ---- the metric is not there -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"fast_dev_run": True}], ids=["fit", "fast_dev_run"])
def test_a_monitor_that_is_not_logged_is_an_error_that_lists_what_was(arguments: dict[str, Any]) -> None:
    message = r"monitor='val_los'.*not logged\. Did you mean 'val_loss'\? .*'train_loss' and 'val_loss'.*self\.log"
    with pytest.raises(ValueError, match=message):
        fit(TinyModule(), EarlyStopping("val_los"), **arguments)


def test_without_strict_a_missing_monitor_is_warned_about_once() -> None:
    stopping = EarlyStopping("absent", strict=False)
    with pytest.warns(PacelineWarning, match="'absent' was not logged") as said:
        trainer = fit(TinyModule(), stopping, epochs=3)
    assert trainer.current_epoch == 3
    assert len([w for w in said if "absent" in str(w.message)]) == 1


def test_a_metric_of_the_validation_may_come_later_than_the_first_check() -> None:
    stopping = EarlyStopping("score", check_on_train_epoch_end=True)
    with pytest.warns(PacelineWarning, match="EarlyStopping skips its checks until '.*' is logged"):
        fit(Scored(2.0), stopping, check_val_every_n_epoch=2, epochs=2, num_sanity_val_steps=0)
    assert stopping.best_score == 2.0


# ---- resume ----------------------------------------------------------------------------------------------------------


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    first = EarlyStopping("score", patience=3)
    trainer = fit(Scored(1.0, 2.0, 2.0), first, epochs=3)
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    assert first.wait_count == 2
    second = EarlyStopping("score", patience=3)
    trainer = fit(Scored(2.0, 2.0, 2.0), second, resume=tmp_path / "file.ckpt")
    assert trainer.current_epoch == 4
    assert (second.wait_count, second.stopped_epoch, second.best_score.item()) == (3, 3, 1.0)
    assert second.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED


def test_the_patience_given_on_resume_applies(tmp_path: Path) -> None:
    trainer = fit(Scored(1.0, 2.0), EarlyStopping("score", patience=3), epochs=2)
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    saved = torch.load(tmp_path / "file.ckpt", weights_only=True)["callbacks"]
    assert saved["EarlyStopping{'monitor': 'score', 'mode': 'min'}"] == {
        "wait_count": 1,
        "stopped_epoch": 0,
        "best_score": torch.tensor(1.0),
        "patience": 3,
        "stopping_reason": 0,
        "stopping_reason_message": None,
    }
    trainer = fit(Scored(*[2.0] * 5), EarlyStopping("score", patience=5), resume=tmp_path / "file.ckpt")
    assert trainer.current_epoch == 6


def test_a_run_that_was_stopped_stays_stopped_when_it_is_started_again(tmp_path: Path) -> None:
    fit(Scored(1.0, 2.0, 2.0), EarlyStopping("score", patience=2)).save_checkpoint(tmp_path / "file.ckpt")
    again = fit(Scored(*[0.0] * 9), EarlyStopping("score", patience=2), resume=tmp_path / "file.ckpt")
    assert again.current_epoch == 3
    more = fit(Scored(*[2.0] * 9), EarlyStopping("score", patience=4), resume=tmp_path / "file.ckpt")
    assert more.current_epoch == 5


def test_the_reason_is_saved(tmp_path: Path) -> None:
    stopping = EarlyStopping("score")
    fit(Scored(NAN), stopping).save_checkpoint(tmp_path / "file.ckpt")
    state = torch.load(tmp_path / "file.ckpt", weights_only=True)["callbacks"][stopping.state_key]
    again = EarlyStopping("score")
    again.load_state_dict({**state, "stopping_reason": EarlyStoppingReason.PATIENCE_EXHAUSTED.value})
    assert again.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
    again.load_state_dict(state)
    assert again.stopping_reason is EarlyStoppingReason.NON_FINITE_METRIC
    assert again.stopping_reason_message == stopping.stopping_reason_message


# ---- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verbose", [True, False])
def test_verbose_tells_improvements_and_the_stop_is_always_told(
    verbose: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline")
    fit(Scored(3.0, 2.0, 2.0), EarlyStopping("score", patience=1, verbose=verbose))
    assert ("'score' improved from 3 to 2." in caplog.text) == verbose
    assert "'score' did not improve on 2 in 1 check, so training stops." in caplog.text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"monitor": ""}, TypeError, r"monitor=''.*is not the name of a metric.*self\.log"),
        ({"monitor": None}, TypeError, r"monitor=None.*is not the name of a metric.*self\.log"),
        (
            {"monitor": "x", "mode": "mim"},
            ValueError,
            r"EarlyStopping mode 'mim'\. Did you mean 'min'\?.*are better",
        ),
        ({"monitor": "x", "min_delta": -0.1}, ValueError, r"min_delta=-0\.1.*a worse metric.*0 or more"),
        ({"monitor": "x", "patience": -1}, ValueError, r"patience=-1.*must be a non-negative integer"),
        ({"monitor": "x", "patience": 2.5}, ValueError, r"patience=2\.5.*must be a non-negative integer"),
    ],
)
def test_bad_arguments_are_errors_that_say_what_to_do(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EarlyStopping(**arguments)


@pytest.mark.parametrize(
    ("monitor", "higher"),
    [
        ("val_acc", True),
        ("Accuracy", True),
        ("val/f1", True),
        ("test.top1-acc", True),
        ("acc5", True),
        ("val_R2", True),
        ("mAP50", True),
        ("rouge2/recall", True),
        ("val_acc/dataloader_idx_0", True),
        ("val_MulticlassAccuracy", True),
        ("valF1Score", True),
        ("valacc", True),
        ("val/top1", True),
        ("ap_latency", False),
        ("acc_time", False),
        ("map_size", False),
        ("recall/seconds", False),
        ("top5_errors", False),
        ("trainer", False),
        ("vacancy_loss", False),
        ("acc_loss", False),
        ("accuracy_error", False),
        ("dice_loss", False),
        ("val_loss", False),
        ("remap", False),
        ("psnr_std", False),
        ("epoch", False),
    ],
)
def test_mode_min_with_a_name_that_says_that_higher_is_better_is_pointed_out_once(
    monitor: str, higher: bool, recwarn: pytest.WarningsRecorder
) -> None:
    class Plateau(TinyModule):
        def __init__(self, mode: Any = "min") -> None:
            super().__init__()
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode=mode)
            self.made = [optimizer], [{"scheduler": scheduler, "monitor": monitor}]
            configure(self)

        def configure_optimizers(self) -> Any:
            return self.made

    kinds = {
        "EarlyStopping": partial(EarlyStopping, monitor),
        "ModelCheckpoint": partial(ModelCheckpoint, monitor=monitor),
        "ReduceLROnPlateau": Plateau,
    }
    for name, kind in kinds.items():
        for mode in ({"mode": "max"}, {}, {}):
            kind(**mode)
        said = [str(one.message) for one in recwarn.list]
        assert len(said) == higher
        assert all(f"{name}(monitor={monitor!r}, mode='min')" in text and "mode='max'" in text for text in said)
        recwarn.clear()


def test_a_monitor_of_a_validation_that_the_fit_does_not_have_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"'val_loss' was not logged.*This fit has no validation.*pass val_dataloaders"
    ):
        Trainer(logger=False, max_epochs=1, enable_progress_bar=False, callbacks=[EarlyStopping("val_loss")]).fit(
            TinyModule(), tiny_loader()
        )

"""Bad batches planted in the data: what the guard leaves out is as if it had not been there."""

from __future__ import annotations

import csv
import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Trainer, TrainingModule, seed_everything
from paceline.callbacks import Callback, LossGuard, ModelCheckpoint, Timer
from paceline.callbacks import timer as timer_module
from paceline.checkpoint.restore import PARTS
from paceline.loggers import CSVLogger
from paceline.messages import PacelineWarning

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
BATCHES = 12
BAD = {4: math.nan, 8: 1e6, 11: math.inf}


class Linear(nn.Linear):
    """Without MKL, whose products differ in the last bit with where in memory their factors lie."""

    def forward(self, input: Tensor) -> Tensor:
        return (input[:, None] * self.weight).sum(-1) + self.bias


class Net(TrainingModule):
    """Batch norm, dropout, momentum and a scheduler, all of which a bad batch would spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Linear(4, 1))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x,) = batch
        self.seen.append(x[0, 1].item())
        loss = (self.layers(x) - x[:, :1]).pow(2).mean() + x[:, 2].mean()
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


class OwnStep(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)


def data(bad: dict[int, float], left_out: bool = False, size: int = 4) -> DataLoader[Any]:
    """``BATCHES`` batches with what is bad in the last column; or those alone that are not bad."""
    x = torch.randn(BATCHES, size, 3, generator=torch.Generator().manual_seed(3))
    x[:, :, 1] = torch.arange(BATCHES)[:, None]
    x[:, :, 2] = 0.0
    for index, value in bad.items():
        x[index, :, 2] = value
    kept = [index for index in range(BATCHES) if not (left_out and index in bad)]
    return DataLoader(TensorDataset(x[kept].flatten(0, 1)), batch_size=size)


def fit(
    loader: Any,
    *callbacks: Any,
    kind: type[Net] = Net,
    ckpt_path: Any = None,
    restore: Any = PARTS,
    **options: Any,
) -> Trainer:
    seed_everything(1, verbose=False)
    settings = {"max_epochs": 2, "enable_checkpointing": False, **options}
    trainer = Trainer(callbacks=list(callbacks), **{**QUIET, **settings})
    trainer.fit(kind(), loader, ckpt_path=ckpt_path, restore=restore)
    return trainer


def guard(**options: Any) -> LossGuard:
    return LossGuard(window=5, warmup=3, rtol=50.0, **options)


def same_state(one: Trainer, other: Trainer) -> None:
    states = [trainer.training_module.state_dict() for trainer in (one, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    momenta: list[list[Tensor]] = [
        [s["momentum_buffer"] for s in t.optimizers[0].state_dict()["state"].values()] for t in (one, other)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*momenta, strict=True))
    assert one.optimizers[0].param_groups[0]["lr"] == other.optimizers[0].param_groups[0]["lr"]
    assert one.global_step == other.global_step


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", [Net, OwnStep])
def test_skipped_batches_leave_no_trace(accumulate: int, kind: type[Net]) -> None:
    careful = guard()
    guarded = fit(data(BAD), careful, accumulate_grad_batches=accumulate, kind=kind)
    same_state(guarded, fit(data(BAD, left_out=True), accumulate_grad_batches=accumulate, kind=kind))
    assert sorted(careful.batches) == [(epoch, batch) for epoch in range(2) for batch in BAD]
    assert careful.left_out == 6
    assert math.isfinite(guarded.callback_metrics["train_loss_epoch"])


@pytest.mark.gpu
def test_skipped_batches_leave_no_trace_on_a_gpu() -> None:
    guarded = fit(data(BAD), guard(), accelerator="gpu", devices=1)
    same_state(guarded, fit(data(BAD, left_out=True), accelerator="gpu", devices=1))


def test_every_event_is_told_in_one_message_and_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    with pytest.warns(PacelineWarning, match="LossGuard") as told:
        fit(data({4: math.nan}), guard(), max_epochs=1, logger=logger, log_every_n_steps=1)
    (text,) = [str(one.message) for one in told if "LossGuard" in str(one.message)]
    assert re.search(
        r"the loss is nan \(running mean [\d.]+ of 4 losses\) at step 4, epoch 0, batch 4, so the batch is skip", text
    )
    assert column(logger, "loss_guard/left_out") == [("4", "1")]
    assert [step for step, _ in column(logger, "train_loss_step")] == [str(step) for step in range(1, BATCHES)]


def test_without_a_guard_the_same_data_spoil_the_weights() -> None:
    weights = fit(data(BAD)).training_module.state_dict()
    assert not all(torch.isfinite(value).all() for value in weights.values())


def on_two_ranks(bad: dict[int, float], bad_rank: int | None, accumulate: int) -> Any:
    """Each rank has half of each batch; what is bad lies in the half of ``bad_rank``, or is left out of the data."""
    careful = guard()
    x = data({}).dataset.tensors[0].view(BATCHES, 2, 2, 3).clone()
    for index, value in bad.items():
        if bad_rank is not None:
            x[index, :, bad_rank, 2] = value
    kept = [index for index in range(BATCHES) if bad_rank is not None or index not in bad]
    loader = DataLoader(TensorDataset(x[kept].flatten(0, 2)), batch_size=2)
    trainer = fit(loader, careful, strategy="ddp", devices=2, accumulate_grad_batches=accumulate)
    weights = {name: value.clone() for name, value in trainer.training_module.state_dict().items()}
    return weights, sorted(careful.batches), [about["loss"] for about in careful.batches.values()]


@pytest.mark.parametrize(
    ("accumulate", "bad", "tolerance"),
    [
        (1, BAD, 0.0),
        (3, {4: math.nan, 8: 1e6}, 0.0),
        (
            3,
            {4: math.nan, 11: math.nan},
            1e-6,
        ),  # the epoch's last: its window is summed over the ranks in another order
    ],
)
def test_all_ranks_leave_out_what_is_bad_on_one(accumulate: int, bad: dict[int, float], tolerance: float) -> None:
    found = ranks(2, on_two_ranks, bad, 1, accumulate)
    clean = ranks(2, on_two_ranks, bad, None, accumulate)
    for rank in range(2):
        assert found[rank][1] == [(epoch, batch) for epoch in range(2) for batch in bad]
        assert str(found[rank][2]) == str(found[0][2])
        for name, value in clean[rank][0].items():
            torch.testing.assert_close(found[rank][0][name], value, rtol=tolerance, atol=tolerance)


class Nothing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.global_rank == 1 and batch_idx == 2 else loss


def one_rank_gives_up() -> int:
    return fit(data({}), guard(), strategy="ddp", devices=2, kind=Nothing, max_epochs=1).global_step


def test_a_step_that_returns_none_on_one_rank_skips_the_batch_on_all() -> None:
    assert ranks(2, one_rank_gives_up) == [BATCHES // 2 - 1] * 2


@pytest.mark.parametrize("accumulate", [1, 3])
def test_rollback_ends_as_if_the_batches_had_never_been_there(tmp_path: Path, accumulate: int) -> None:
    careful = guard(action="rollback")
    keeper = ModelCheckpoint(tmp_path / "files", every_n_train_steps=1 if accumulate == 3 else 3)
    logger, clean_logger = CSVLogger(tmp_path), CSVLogger(tmp_path / "clean")
    bad = {4: math.nan, 8: 1e6, 11: math.nan}
    options = {"accumulate_grad_batches": accumulate, "enable_checkpointing": None, "log_every_n_steps": 1}
    went_back = fit(data(bad), careful, keeper, logger=logger, **options)
    same_state(went_back, fit(data(bad, left_out=True), logger=clean_logger, **options))
    assert sorted(careful.batches) == [(epoch, batch) for epoch in range(2) for batch in bad]
    assert careful.left_out == 6
    for name in ("train_loss_step", "train_loss_epoch"):
        assert column(logger, name) == column(clean_logger, name)


def column(logger: CSVLogger, name: str) -> list[tuple[str, str]]:
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        return [(row["step"], row[name]) for row in csv.DictReader(file) if row[name]]


def test_rollback_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs checkpoints to go back to"):
        fit(data(BAD), guard(action="rollback"))
    with pytest.raises(RuntimeError, match=r"no checkpoint yet to go back to\. Save earlier"):
        fit(data(BAD), guard(action="rollback"), ModelCheckpoint(tmp_path), enable_checkpointing=None)


class Visits(Callback):
    """Notes the checkpoints that the training goes on from, and spoils a step's gradient as often as told."""

    def __init__(self, spoil_at: int = -1, times: int = 1) -> None:
        self.files: list[str] = []
        self.spoil_at, self.times = spoil_at, times

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.files.append(Path(trainer.ckpt_path).name if trainer.ckpt_path else "")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.spoil_at and self.times:
            self.times -= 1
            next(pl_module.parameters()).grad.fill_(math.nan)


class Certain(Net):
    """Without dropout, so that random states, which a fine-tuning does not restore, make no difference."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = nn.Identity()


def every_step(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=1, **{"save_top_k": -1, **options})


def test_a_rollback_before_the_first_save_begins_again_as_the_fit_did(tmp_path: Path) -> None:
    source = tmp_path / "source.ckpt"
    fit(data({}), kind=Certain).save_checkpoint(source)
    start: dict[str, Any] = {"ckpt_path": source, "restore": ("model",), "kind": Certain}
    careful, visits, bad = guard(action="rollback"), Visits(), {4: math.nan, 8: 1e6}
    keeper = ModelCheckpoint(tmp_path / "own", "{step}", every_n_train_steps=6)
    went_back = fit(data(bad), careful, keeper, visits, enable_checkpointing=None, **start)
    assert visits.files[:3] == ["source.ckpt", "source.ckpt", "step=6.ckpt"]
    assert careful.left_out == 4
    same_state(went_back, fit(data(bad, left_out=True), **start))


def test_a_rollback_before_the_first_save_of_a_resumed_run_restores_all(tmp_path: Path) -> None:
    source = tmp_path / "source.ckpt"
    fit(data({}), max_epochs=1).save_checkpoint(source)
    keeper = ModelCheckpoint(tmp_path / "own", every_n_train_steps=100, save_on_train_epoch_end=False)
    went_back = fit(data(BAD), guard(action="rollback"), keeper, enable_checkpointing=None, ckpt_path=source)
    same_state(went_back, fit(data(BAD), guard(), ckpt_path=source))


def test_a_rollback_with_nothing_but_weights_to_go_back_to_is_an_error(tmp_path: Path) -> None:
    weights = every_step(tmp_path / "weights", save_weights_only=True)
    with pytest.raises(ValueError, match=r"save_weights_only=True\) writes none that a fit can resume from"):
        fit(data(BAD), guard(action="rollback"), weights, enable_checkpointing=None)
    late = ModelCheckpoint(tmp_path / "late", every_n_epochs=1)
    with pytest.raises(RuntimeError, match="no checkpoint yet to go back to"):
        fit(data(BAD), guard(action="rollback"), weights, late, enable_checkpointing=None)


def test_a_rollback_passes_over_files_of_other_runs_and_of_weights_that_no_loss_proved(tmp_path: Path) -> None:
    fit(data({}), every_step(tmp_path), enable_checkpointing=None)
    careful, visits = guard(action="rollback"), Visits(spoil_at=4)
    trainer = fit(data({}), careful, every_step(tmp_path), visits, enable_checkpointing=None)
    assert visits.files == ["", "step=4-v1.ckpt"]
    assert list(careful.batches) == [(0, 4)]  # its gradient it was
    assert all(torch.isfinite(value).all() for value in trainer.training_module.state_dict().values())


def test_a_batch_whose_gradient_always_spoils_the_weights_is_the_one_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline")

    class Spoils(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.seen[-1] == 4:
                self.layers[0].weight.grad.fill_(math.nan)

    careful, logger, clean_logger = guard(action="rollback"), CSVLogger(tmp_path / "a"), CSVLogger(tmp_path / "b")
    options = {"enable_checkpointing": None, "log_every_n_steps": 1}
    went_back = fit(data({}), careful, every_step(tmp_path), kind=Spoils, logger=logger, **options)
    assert sorted(careful.batches) == [(0, 4), (1, 4)]
    same_state(went_back, fit(data({4: math.nan}, left_out=True), logger=clean_logger, **options))
    assert column(logger, "train_loss_step") == column(clean_logger, "train_loss_step")
    assert [path.name for path in (tmp_path / "a").rglob("metrics.csv")] == ["metrics.csv"]
    assert "another run" not in caplog.text


def go_back_on_two_ranks(folder: Path, bad: dict[int, float], left_out: bool) -> Any:
    """A window of two halves, so that a batch is bad on rank 1 alone."""
    x = data(bad, left_out).dataset.tensors[0].clone()
    x[0::2, 2] = 0.0
    careful = guard(action="rollback")
    loader = DataLoader(TensorDataset(x), batch_size=2)
    keeper = every_step(folder / str(left_out))
    trainer = fit(loader, careful, keeper, Visits(), strategy="ddp", devices=2, enable_checkpointing=None)
    return {k: v.clone() for k, v in trainer.training_module.state_dict().items()}, sorted(careful.batches)


def test_all_ranks_go_back_to_the_same_file(tmp_path: Path) -> None:
    found = ranks(2, go_back_on_two_ranks, tmp_path, {4: math.nan, 5: 1e6}, False)
    clean = ranks(2, go_back_on_two_ranks, tmp_path, {4: math.nan, 5: 1e6}, True)
    for rank in range(2):
        assert found[rank][1] == [(0, 4), (0, 5), (1, 4), (1, 5)]
        assert all(torch.equal(found[rank][0][name], value) for name, value in clean[rank][0].items())


def test_a_second_bad_loss_at_the_same_place_goes_further_back_before_it_blames_a_batch(tmp_path: Path) -> None:
    class Drifted(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            drifted = self.trainer.global_step == 5 and "step=3" not in str(self.trainer.ckpt_path)
            return loss * math.nan if drifted else loss

    careful, visits = guard(action="rollback"), Visits()
    fit(data({}), careful, every_step(tmp_path), visits, enable_checkpointing=None, kind=Drifted)
    assert visits.files == ["", "step=4.ckpt", "step=3.ckpt"]
    assert list(careful.batches) == [(0, 5)]


@pytest.mark.parametrize("save_top_k", [-1, 1])
def test_bad_batches_side_by_side_are_all_left_out(tmp_path: Path, save_top_k: int) -> None:
    bad, careful = {4: math.nan, 5: 1e6, 6: math.nan}, guard(action="rollback")
    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=save_top_k)
    went_back = fit(data(bad), careful, keeper, enable_checkpointing=None)
    same_state(went_back, fit(data(bad, left_out=True)))
    assert sorted(careful.batches) == [(epoch, batch) for epoch in range(2) for batch in bad]


def test_when_the_only_file_has_spoiled_weights_the_run_ends(tmp_path: Path) -> None:
    keeper = every_step(tmp_path, save_top_k=1)
    with pytest.raises(RuntimeError, match=r"again after going back to '.*step=5.ckpt'.*damaged before it was saved"):
        fit(data({}), guard(action="rollback"), keeper, Visits(spoil_at=4), enable_checkpointing=None)


def test_a_rollback_gives_no_time_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(Callback):
        now = 1000.0

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.now += 10

    clock, timer = Clock(), Timer({"seconds": 115})
    monkeypatch.setattr(timer_module, "perf_counter", lambda: clock.now)
    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=3)
    trainer = fit(data({5: math.nan}), guard(action="rollback"), keeper, timer, clock, enable_checkpointing=None)
    assert (clock.now, timer.time_elapsed()) == (1120, 120)
    assert trainer.global_step == 8  # of the 12 batches, 2 came again, the bad one twice


def test_raise_ends_the_run_before_the_weights_change(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    with pytest.raises(RuntimeError, match=r"loss is nan \(running mean .* step 4, epoch 0, batch 4\. The batch"):
        fit(data(BAD), guard(action="raise", exclude_batches_path=path))
    assert [one["batch"] for one in json.loads(path.read_text())["batches"]] == [4]


def test_a_restart_keeps_the_counters_and_the_running_mean(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole, again = guard(), guard()
    trainer = fit(data(BAD), whole, keeper, enable_checkpointing=None)
    resumed = fit(data(BAD), again, ckpt_path=tmp_path / "epoch=0.ckpt")
    same_state(trainer, resumed)
    assert str(again.state_dict()) == str(whole.state_dict())
    assert whole.left_out == 6


def test_a_file_of_excluded_batches_leaves_them_out_of_the_next_start_unseen(tmp_path: Path) -> None:
    path = tmp_path / "below" / "bad.json"
    first = fit(data(BAD), guard(exclude_batches_path=path))
    listed = json.loads(path.read_text())["batches"]
    assert listed[0]["epoch"] == 0
    assert [one["batch"] for one in listed] == [*BAD, *BAD]
    assert [one["loss"] for one in listed[:3]] == ["nan", pytest.approx(1e6, rel=1e-3), "nan"]
    careful = guard(exclude_batches_path=path)
    second = fit(data(BAD), careful)
    same_state(first, second)
    assert careful.left_out == 6
    assert len(second.training_module.seen) == 2 * (BATCHES - len(BAD))
    path.write_text("[]")
    with pytest.raises(ValueError, match="was not written by LossGuard"):
        fit(data(BAD), guard(exclude_batches_path=path))


def test_too_many_bad_batches_are_an_error() -> None:
    with pytest.raises(
        RuntimeError, match=r"batch 11. This is bad batch number 3, which exceeds max_events=2, so the cause is"
    ):
        fit(data(BAD), guard(max_events=2))


@pytest.mark.parametrize(
    ("options", "losses", "bad"),
    [
        ({"rtol": 1.0}, [1, 1, 1.9, 3.0, 0.1], [3]),
        ({"rtol": None, "atol": 0.5}, [1, 1, 1.6, 0.1], [2]),
        ({"rtol": 1.0, "atol": 5.0}, [1, 1, 4.0, 9.0], [3]),
        ({"rtol": None}, [1, 1, 1e9, math.nan], [3]),
        ({"rtol": 0.5, "mode": "max"}, [1, 1, 0.4, 9.0], [2]),
        ({"rtol": 1.0, "warmup": 3}, [1, 9, 1, 11], [3]),
        ({"finite_only": False}, [1, 1, math.nan], []),
    ],
)
def test_a_loss_is_bad_when_it_is_off_by_both_distances(options: Any, losses: list[float], bad: list[int]) -> None:
    class Given(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * 0.0 + losses[batch_idx]

    careful = LossGuard(**{"window": 2, "warmup": 2, **options})
    fit(data({}), careful, max_epochs=1, limit_train_batches=len(losses), kind=Given)
    assert [batch for _, batch in careful.batches] == bad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "skp"}, "Unknown LossGuard action 'skp'. Did you mean 'skip'"),
        ({"mode": "low"}, "mode"),
        ({"window": 0}, r"window=0 must be a whole number of at least 1"),
        ({"rtol": -1.0}, r"rtol=-1.0 must be a number"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossGuard(**arguments)


def test_what_has_no_place_for_it_is_refused() -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(ValueError, match="LossGuard cannot be used with manual optimization, which Manual uses"):
        fit(data({}), guard(), kind=Manual)

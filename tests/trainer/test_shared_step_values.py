"""Step values of ``self.log(..., sync_dist=True)``: reduced over all processes, name by name, once a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RanksError, ranks, wait_at_most
from tiny import QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Trainer, TrainingModule
from paceline.loggers import Logger
from paceline.trainer import shared_step_values

SETTINGS: dict[str, Any] = QUIET | {"strategy": "ddp", "devices": 2, "max_epochs": 1, "num_sanity_val_steps": 0}


class Logs(TrainingModule):
    """Calls ``logs(module, batch_idx)`` in the training step, and keeps what callbacks see after each batch."""

    def __init__(self, logs: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.logs = logs
        self.seen: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.logs(self, batch_idx)
        return self.layer(batch[0]).sum() if output is None else output

    def note(self) -> None:
        self.seen.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(samples: int) -> Any:
    return DataLoader(TensorDataset(torch.ones(samples, 1)), 1)


def fit(module: Logs, batches: int = 2, **arguments: Any) -> Trainer:
    trainer = Trainer(**{**SETTINGS, **arguments})
    trainer.fit(module, loader(2 * batches))
    return trainer


def each(values: dict[str, float]) -> Callable[..., Any]:
    def logs(module: Logs, batch_idx: int) -> None:
        for name, value in values.items():
            module.log(name, value, sync_dist=True)

    return logs


def test_names_logged_in_another_order_are_not_mixed_up() -> None:
    def swapped(module: Logs, batch_idx: int) -> None:
        names = ["a", "b", "least"] if module.global_rank == 0 else ["least", "b", "a"]
        for name in names:
            value = {"a": 1.0, "b": 10.0, "least": 3.0 - 2 * module.global_rank}[name]
            module.log(name, value, sync_dist=True, reduce_fx="min" if name == "least" else "mean")

    def run() -> list[dict[str, float]]:
        fit(module := Logs(swapped))
        return module.seen

    assert ranks(2, run) == [[{"a": 1.0, "b": 10.0, "least": 1.0}] * 2] * 2


@pytest.mark.parametrize(
    ("mine", "theirs", "says"),
    [
        (["a", "b"], ["b", "c"], ["'a' (reduce_fx='mean') on rank 0, not on rank 1", "'c' (reduce_fx='mean') on rank"]),
        ([f"n{i}" for i in range(90)], ["n0"], ["'n89' (reduce_fx='mean') on rank 0, not on rank 1"]),
        ([], ["the name"], ["'the name' (reduce_fx='mean') on rank 1, not on rank 0"]),
    ],
    ids=["as many", "fewer", "none"],
)
def test_names_that_are_not_on_every_rank_are_refused_on_every_rank(
    mine: list[str], theirs: list[str], says: list[str]
) -> None:
    def logs(module: Logs, batch_idx: int) -> None:
        each(dict.fromkeys(mine if module.global_rank == 0 else theirs, 1.0))(module, batch_idx)

    with pytest.raises(RanksError) as caught:
        ranks(2, lambda: fit(Logs(logs)) and None)
    for error in caught.value.errors:
        assert isinstance(error, ValueError)
        assert all(part in str(error) for part in [*says, "a training batch", "sync_dist=False", "rank_zero_only=True"])


def test_a_name_that_later_batches_lack_on_one_rank_is_refused() -> None:
    def logs(module: Logs, batch_idx: int) -> None:
        module.log("a", 1.0, sync_dist=True)
        if batch_idx == 1 and module.global_rank == 1:
            module.log("late", 1.0, sync_dist=True)

    with pytest.raises(RanksError) as caught:
        ranks(2, lambda: fit(Logs(logs)) and None)
    assert all("'late' (reduce_fx='mean') on rank 1, not on rank 0" in str(e) for e in caught.value.errors)


def test_a_rank_that_is_the_first_to_log_and_alone_says_what_it_waits_for() -> None:
    def logs(module: Logs, batch_idx: int) -> None:
        if batch_idx == 1 and module.global_rank == 0:
            wait_at_most(1.0)
            module.log("alone", 1.0, sync_dist=True)

    with pytest.raises(RanksError) as caught:
        ranks(2, lambda: fit(Logs(logs), batches=4) and None)
    said = str(caught.value.errors[0])
    assert "Rank 0 timed out waiting for another rank at" in said
    assert "batch 1" in said
    assert "self.log('alone', sync_dist=True), here for the first time" in said


def test_names_first_logged_in_a_later_batch_are_reduced_and_may_be_logged_now_and_then() -> None:
    def logs(module: Logs, batch_idx: int) -> None:
        if batch_idx % 2:
            module.log("now and then", float(module.global_rank + batch_idx), sync_dist=True)

    def run() -> list[Any]:
        fit(module := Logs(logs), batches=4)
        return [seen.get("now and then") for seen in module.seen]

    assert ranks(2, run) == [[None, 1.5, 1.5, 3.5]] * 2


@pytest.mark.parametrize(("names", "collectives"), [(0, 0), (10, 1), (shared_step_values.ROOM + 10, 2)])
def test_all_values_of_a_batch_take_one_collective(names: int, collectives: int) -> None:
    def run() -> Any:
        module = Logs(each({f"n{i}": float(i) for i in range(names)}))
        reduced: list[str] = []
        trainer = Trainer(**SETTINGS)
        reduce = trainer.strategy.reduce
        trainer.strategy.reduce = lambda tensor, *more: reduced.append("") or reduce(tensor, *more)  # type: ignore[method-assign]
        trainer.fit(module, loader(6))
        return len(reduced), module.seen[-1]

    assert ranks(2, run) == [(3 * collectives, {f"n{i}": float(i) for i in range(names)})] * 2


def test_values_of_rank_zero_only_stay_its_own_and_take_nobody_else() -> None:
    def logs(module: Logs, batch_idx: int) -> None:
        module.log("shared", float(module.global_rank), sync_dist=True)
        if module.global_rank == 0:
            module.log("mine", 7.0, sync_dist=True, rank_zero_only=True)

    class Kept(Logger):
        name, version = "kept", 0  # type: ignore[assignment]

        def __init__(self) -> None:
            self.rows: list[dict[str, float]] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.rows.append(dict(metrics))

        def log_hyperparams(self, params: Any, metrics: Any = None) -> None:
            return None

    def run() -> Any:
        trainer = fit(Logs(logs), logger=(kept := Kept()), log_every_n_steps=1)
        return {name: v for name, v in trainer.logged_metrics.items() if name != "epoch"}, len(kept.rows)

    mine, theirs = ranks(2, run)
    assert mine == ({"shared": 0.5, "mine": 7.0}, 2)
    assert theirs[0] == {"shared": 0.5}


def test_a_value_of_some_ranks_takes_only_those() -> None:
    groups: list[Any] = []

    def logs(module: Logs, batch_idx: int) -> None:
        if not groups:
            groups.append(torch.distributed.new_group([0, 2]))
        if module.global_rank != 1 and batch_idx:
            module.log("some", float(module.global_rank), sync_dist=True, sync_dist_group=groups[0])
        module.log("all", float(module.global_rank), sync_dist=True)

    def run() -> dict[str, float]:
        module = Logs(logs)
        Trainer(**{**SETTINGS, "devices": 3}).fit(module, loader(9))
        return module.seen[-1]

    assert ranks(3, run) == [{"all": 1.0, "some": 1.0}, {"all": 1.0}, {"all": 1.0, "some": 1.0}]


def by_hand(module: Logs) -> Any:
    optimizer: Any = module.optimizers()
    loss = module.layer(torch.ones(1, 1)).sum()
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()
    return loss


@pytest.mark.parametrize("how", ["accumulated", "by hand", "in the hook"])
def test_values_are_shared_in_every_form_of_a_batch(how: str) -> None:
    def logs(module: Logs, batch_idx: int) -> Any:
        if how != "in the hook":
            module.log("v", float(module.global_rank + batch_idx), sync_dist=True)
        return by_hand(module) if how == "by hand" else None

    class InHook(Logs):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if how == "in the hook":
                self.log("v", float(self.global_rank + batch_idx), sync_dist=True)
            else:
                self.note()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if how == "in the hook" and batch_idx:
                self.note()

        def on_train_epoch_end(self) -> None:
            if how == "in the hook":
                self.note()

    def run() -> list[Any]:
        module = InHook(logs)
        module.automatic_optimization = how != "by hand"
        fit(module, batches=3, accumulate_grad_batches=2 if how == "accumulated" else 1)
        return [seen["v"] for seen in module.seen]

    assert ranks(2, run) == [[0.5, 1.5, 2.5]] * 2


def test_values_are_shared_after_a_resume_inside_an_epoch(tmp_path: Path) -> None:
    def logs(module: Logs, batch_idx: int) -> None:
        module.log("own", float(module.global_rank + batch_idx), on_step=True, on_epoch=True, sync_dist=True)

    class Saved(Logs):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.trainer.save_checkpoint(tmp_path / "half.ckpt")

    def run() -> list[float]:
        fit(Saved(logs), 4)
        resumed = Logs(logs)
        Trainer(**SETTINGS).fit(resumed, loader(8), ckpt_path=tmp_path / "half.ckpt")
        return [seen["own_step"] for seen in resumed.seen]

    assert ranks(2, run) == [[2.5, 3.5], [2.5, 3.5]]


class Rows(Logger):
    def __init__(self) -> None:
        self.rows: list[float] = []

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows += [float(metrics["v_step"])] if "v_step" in metrics else []

    def log_hyperparams(self, params: Any) -> None:
        pass


@pytest.mark.parametrize("after", [1, 2])
def test_values_of_a_hook_are_shared_by_a_run_that_resumes_from_a_checkpoint_of_that_hook(
    tmp_path: Path, after: int
) -> None:
    class Saved(Logs):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("v", float(batch_idx + 3 * self.global_rank), on_step=True, on_epoch=True, sync_dist=True)
            if batch_idx == after and not (tmp_path / "hook.ckpt").exists():
                self.trainer.strategy.barrier("both know that the file is missing")
                self.trainer.save_checkpoint(tmp_path / "hook.ckpt")

        def on_train_epoch_end(self) -> None:
            self.note()

    def run(path: Path | None) -> tuple[list[float], float]:
        module, rows = Saved(lambda *_: None), Rows()
        settings = SETTINGS | {"logger": rows, "log_every_n_steps": 1}
        Trainer(**settings).fit(module, loader(5), ckpt_path=path)
        return rows.rows, module.seen[-1]["v_step"]

    whole = ranks(2, run, None)
    rest = ranks(2, run, tmp_path / "hook.ckpt")
    assert whole[0][0] == [1.5, 2.5, 2.0]  # rank 1 only repeats a sample in the last batch
    for (rows, last), (expected, expected_last) in zip(rest, whole, strict=True):
        assert rows == expected[after:]
        assert last == expected_last


def test_a_rank_without_a_sample_in_the_last_batch_shows_what_the_others_logged() -> None:
    def logs(module: Logs, batch_idx: int) -> None:
        module.log("mean", float(module.global_rank + 2 * batch_idx), sync_dist=True)
        module.log("most", float(5 * module.global_rank + batch_idx), sync_dist=True, reduce_fx="max")

    def run() -> list[dict[str, float]]:
        module = Logs(logs)
        Trainer(**SETTINGS).fit(module, loader(3))
        return module.seen

    assert ranks(2, run) == [[{"mean": 0.5, "most": 5.0}, {"mean": 2.0, "most": 1.0}]] * 2


class Evaluated(Logs):
    """Logs in each validation batch, and keeps what the progress bar shows of it."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        mine = self.global_rank + 1.0
        shared: dict[str, Any] = {"on_step": True, "sync_dist": True, "prog_bar": True}
        self.log("v", mine, on_epoch=True, **shared)
        self.log("total", mine, on_epoch=False, reduce_fx="sum", **shared)
        self.log("most", mine - 10, on_epoch=False, reduce_fx="max", **shared)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(self.trainer.progress_bar_metrics)
        self.log("hook", float(self.global_rank + 1), on_step=True, on_epoch=False, sync_dist=True)


@pytest.mark.parametrize("samples", [4, 3, 1])
def test_evaluation_shares_step_values_among_the_ranks_that_have_a_batch(samples: int) -> None:
    def run() -> Any:
        module = Evaluated(each({}))
        trainer = Trainer(**SETTINGS)
        for _ in range(2):
            trainer.validate(module, loader(samples), verbose=False)
        seen = [(values["v_step"], values["total"], values["most"]) for values in module.seen]
        return seen, trainer.logged_metrics

    (mine, logged), (theirs, _) = ranks(2, run)
    both, alone = (1.5, 3.0, -8.0), (1.0, 1.0, -9.0)
    one_pass = {4: [both, both], 3: [both, alone], 1: [alone]}[samples]
    assert mine == one_pass * 2
    assert theirs == [both] * (samples // 2) * 2
    assert (logged["v_step"], logged["total"], logged["most"]) == one_pass[-1]
    assert logged["hook"] == (1.5 if samples == 4 else 1.0)


@pytest.mark.parametrize("samples", [(3, 4), (1, 3)])
def test_several_loaders_of_different_lengths_end_together(samples: tuple[int, int]) -> None:
    def run() -> float:
        trainer = Trainer(**SETTINGS)
        trainer.validate(Evaluated(each({})), [loader(count) for count in samples], verbose=False)
        return trainer.callback_metrics["v/dataloader_idx_1"].item()

    count = samples[1]
    mean = ((count + 1) // 2 + 2 * (count // 2)) / count
    assert ranks(2, run) == [pytest.approx(mean)] * 2

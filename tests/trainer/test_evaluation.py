"""Validate, test, predict: one loop with another step."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from rank_processes import ranks
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline import Callback, DataModule, Trainer, TrainingModule
from paceline.callbacks.base import HOOKS
from paceline.data import CombinedLoader


class Net(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        self.frozen = nn.BatchNorm1d(2).eval()

    def forward(self, x: Any) -> Any:
        return self.body(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self(batch[0]).sum())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("acc", 0.5)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch[0] * 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(rows: int = 4, batch_size: int = 2, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(2.0 * rows).view(rows, 2)), batch_size=batch_size, **kwargs)


@pytest.mark.parametrize("fail", [False, True])
def test_every_submodule_gets_its_mode_back(fail: bool, quiet: dict[str, Any]) -> None:
    class Module(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert not self.body.training
            assert not torch.is_grad_enabled()
            if fail:
                raise ValueError("mine")

    module = Module()
    trainer = Trainer(**quiet)
    if fail:
        with pytest.raises(ValueError, match="mine"):
            trainer.validate(module, loader(), verbose=False)
    else:
        trainer.validate(module, loader(), verbose=False)
    assert module.body.training
    assert module.body[2].training
    assert not module.frozen.training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("flag", [True, False])
def test_inference_mode_is_the_users_choice(flag: bool, quiet: dict[str, Any]) -> None:
    seen: list[bool] = []
    module = Net()
    module.validation_step = lambda batch, batch_idx: seen.append(torch.is_inference_mode_enabled())
    Trainer(**quiet, inference_mode=flag).validate(module, loader(2), verbose=False)
    assert seen == [flag]


def test_results_are_numbers_a_dict_per_loader(quiet: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    class Module(Net):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("first", batch[0].mean())

        def on_test_epoch_end(self) -> None:
            self.log("whole", 1.0)

    results = Trainer(**quiet).test(Module(), [loader(2), loader(4)])
    assert results == [
        {"first/dataloader_idx_0": 1.5, "whole": 1.0},
        {"first/dataloader_idx_1": 3.5, "whole": 1.0},
    ]
    shown = capsys.readouterr().out
    assert "first/dataloader_idx_1" in shown
    assert "3.5" in shown


def test_verbose_false_prints_nothing(quiet: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(**quiet).validate(Net(), loader(), verbose=False)
    assert capsys.readouterr().out == ""


def test_predict_returns_what_the_step_returned(quiet: dict[str, Any]) -> None:
    one = Trainer(**quiet).predict(Net(), loader())
    assert [p.tolist() for p in one] == [[[0.0, 2.0], [4.0, 6.0]], [[8.0, 10.0], [12.0, 14.0]]]
    two = Trainer(**quiet).predict(Net(), [loader(2), loader(4)])
    assert [len(p) for p in two] == [1, 2]


def test_predict_step_is_forward_by_default(quiet: dict[str, Any]) -> None:
    class Module(TrainingModule):
        def forward(self, batch: Any) -> Any:
            return batch + 1

    assert [p.item() for p in Trainer(**quiet).predict(Module(), [torch.tensor([1.0])])] == [2.0]


def test_predict_can_stream_and_keeps_nothing(quiet: dict[str, Any]) -> None:
    alive: list[int] = []
    outputs: list[weakref.ref[Any]] = []

    class Sink(Callback):
        def on_predict_batch_end(
            self, trainer: Any, pl_module: Any, outputs_: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            outputs.append(weakref.ref(outputs_))
            gc.collect()
            alive.append(sum(ref() is not None for ref in outputs))

    trainer = Trainer(**quiet, callbacks=[Sink()])
    assert trainer.predict(Net(), loader(12), return_predictions=False) is None
    assert max(alive) <= 2
    gc.collect()
    assert [ref() for ref in outputs] == [None] * 6


def test_a_step_may_leave_out_what_it_does_not_need(quiet: dict[str, Any]) -> None:
    seen: list[Any] = []
    module = Net()
    module.validation_step = lambda batch: seen.append(len(batch))
    Trainer(**quiet).validate(module, loader(), verbose=False)
    assert seen == [1, 1]


def test_with_several_loaders_dataloader_idx_is_needed_and_asked_for(quiet: dict[str, Any]) -> None:
    seen: list[Any] = []
    module, callback = Net(), Callback()
    module.on_test_batch_start = lambda batch, batch_idx, dataloader_idx: seen.append(dataloader_idx)
    callback.on_test_batch_end = lambda trainer, module, outputs, batch, batch_idx, dataloader_idx: seen.append(-1)
    module.test_step = lambda batch, batch_idx, dataloader_idx: None
    Trainer(**quiet, callbacks=callback).test(module, [loader(1), loader(1)], verbose=False)
    assert seen == [0, -1, 1, -1]
    with pytest.raises(RuntimeError, match=r"Net.validation_step takes .*, but there are several loaders"):
        Trainer(**quiet).validate(Net(), [loader(), loader()], verbose=False)
    for name in ("on_predict_batch_start", "predict_step"):
        module = Net()
        setattr(module, name, lambda batch, batch_idx, dataloader_idx: None)
        with pytest.raises(RuntimeError, match=f"Net.{name} needs dataloader_idx.*there is only one. Write it as def"):
            Trainer(**quiet).predict(module, loader())
    module = Net()
    module.on_predict_batch_start = lambda batch, batch_idx: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="takes no dataloader_idx, but there are several loaders"):
        Trainer(**quiet).predict(module, [loader(), loader()])


def test_hooks_of_a_batch_get_the_loaders_index(quiet: dict[str, Any]) -> None:
    seen: list[tuple[int, int]] = []

    class Module(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            pass

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            seen.append((batch_idx, dataloader_idx))

    Trainer(**quiet).validate(Module(), [loader(4), loader(2)], verbose=False)
    assert seen == [(0, 0), (1, 0), (0, 1)]


def test_limits_cut_each_loader(quiet: dict[str, Any]) -> None:
    trainer = Trainer(**quiet, limit_predict_batches=0.5)
    assert len(trainer.predict(Net(), loader(12))) == 3
    assert trainer.num_predict_batches == [3]


def test_transfer_hooks_run_in_order_and_the_datamodules_win(quiet: dict[str, Any]) -> None:
    order: list[str] = []

    class Module(Net):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            order.append("module before")
            return batch

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            order.append("module after")
            return batch

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            order.append(f"step {batch}")

    class Data(DataModule):
        def val_dataloader(self) -> Any:
            return [torch.zeros(1)]

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            order.append("data before")
            return batch + 1

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            order.append(f"to {device}")
            return batch

    Trainer(**quiet).validate(Module(), datamodule=Data(), verbose=False)
    assert order == ["data before", "to cpu", "module after", "step tensor([1.])"]


def test_batches_of_many_forms_arrive_whole(quiet: dict[str, Any]) -> None:
    class Pair(NamedTuple):
        x: torch.Tensor
        y: str

    seen: list[Any] = []
    module = Net()
    module.validation_step = lambda batch, batch_idx: seen.append(batch)
    batch = {"a": [torch.ones(2), Pair(torch.zeros(2), "text")], "b": 3}
    Trainer(**quiet, precision="64-true").validate(module, [batch], verbose=False)
    assert seen[0]["a"][0].dtype == torch.float64
    assert isinstance(seen[0]["a"][1], Pair)
    assert (seen[0]["a"][1].y, seen[0]["b"]) == ("text", 3)


def test_validation_inside_a_fit_changes_no_training_number(quiet: dict[str, Any]) -> None:
    def weights(val: Any) -> torch.Tensor:
        torch.manual_seed(3)
        module = Net()
        module.body[2] = nn.Identity()
        Trainer(max_epochs=2, **quiet).fit(module, loader(), val)
        return module.body[0].weight.detach()

    assert torch.equal(weights(None), weights(loader(6)))


def test_without_a_module_the_last_one_is_tested(quiet: dict[str, Any]) -> None:
    trainer = Trainer(max_epochs=1, **quiet)
    with pytest.raises(TypeError, match=r"Trainer.test\(\) needs a module. Pass it as the first argument"):
        trainer.test(dataloaders=loader())
    trainer.fit(Net(), loader())
    assert trainer.test(dataloaders=loader(), verbose=False) == [{"acc": 0.5}]


@pytest.mark.parametrize(
    "hook",
    [
        "on_validation_model_eval",
        "on_validation_start",
        "on_validation_epoch_start",
        "on_validation_batch_start",
        "on_validation_batch_end",
        "on_validation_epoch_end",
        "on_validation_end",
    ],
)
def test_an_error_in_a_hook_leaves_modes_and_gradients_as_they_were(hook: str, quiet: dict[str, Any]) -> None:
    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError

    module = Net()
    before = [m.training for m in module.modules()]
    setattr(module, hook, fail)
    with pytest.raises(ZeroDivisionError):
        Trainer(**quiet).validate(module, loader(), verbose=False)
    assert [m.training for m in module.modules()] == before
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_a_module_may_keep_its_training_mode_in_validation(quiet: dict[str, Any]) -> None:
    seen: list[bool] = []
    module = Net()
    module.on_validation_model_eval = lambda: None
    module.validation_step = lambda batch: seen.append(module.training)
    Trainer(**quiet).validate(module, loader(2), verbose=False)
    assert seen == [True]


def test_gradients_can_be_had_in_a_validation_without_inference_mode(quiet: dict[str, Any]) -> None:
    found: list[Any] = []

    class Module(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            with torch.enable_grad():
                loss = self.body(batch[0]).sum()
                found.extend(torch.autograd.grad(loss, list(self.body.parameters())))

    module = Module()
    Trainer(inference_mode=False, **quiet).validate(module, loader(2), verbose=False)
    assert len(found) == len(list(module.body.parameters()))


def test_predict_gives_dataloader_idx_and_keeps_the_loaders_apart(quiet: dict[str, Any]) -> None:
    seen: list[tuple[int, int]] = []

    class Module(Net):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:  # type: ignore[override]
            seen.append((batch_idx, dataloader_idx))
            return len(batch[0]) * 10 + dataloader_idx

    loaders = [loader(4), loader(2)]
    assert Trainer(**quiet).predict(Module(), loaders) == [[20, 20], [21]]
    assert Trainer(**quiet).predict(Module(), loaders, return_predictions=False) is None
    assert seen == [(0, 0), (1, 0), (0, 1)] * 2


@pytest.mark.parametrize(("loaders", "want"), [(1, [0, 0]), (2, [0, 0, 1, 1])])
def test_a_step_may_take_the_loaders_index_only(loaders: int, want: list[int], quiet: dict[str, Any]) -> None:
    seen: list[int] = []
    module = Net()
    module.validation_step = lambda batch, dataloader_idx: seen.append(dataloader_idx)
    Trainer(**quiet).validate(module, [loader(4)] * loaders if loaders > 1 else loader(4), verbose=False)
    assert seen == want


def test_a_decorated_step_is_seen_through(quiet: dict[str, Any]) -> None:
    class Module(Net):
        @torch.no_grad()
        def validation_step(self, batch: Any) -> None:  # type: ignore[override]
            self.log("rows", float(len(batch[0])))

    assert Trainer(**quiet).validate(Module(), loader(4), verbose=False) == [{"rows": 2.0}]


def test_each_pass_of_validation_starts_over(quiet: dict[str, Any]) -> None:
    class Module(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("mean", batch[0].mean())
            self.log("batches", 1.0, reduce_fx="sum")

    trainer, data = Trainer(**quiet), loader(6)
    assert [trainer.validate(Module(), data, verbose=False) for _ in range(2)] == [[{"mean": 5.5, "batches": 3.0}]] * 2


@pytest.mark.parametrize("fn", ["validate", "test", "predict"])
def test_no_batches_call_no_hook_and_gradients_are_cleared_first(fn: str, quiet: dict[str, Any]) -> None:
    module, called = Net(), []
    module.body[0].weight.grad = torch.ones(2, 2)
    for name in HOOKS:
        if name not in ("setup", "teardown"):
            setattr(module, name, lambda *args, name=name: called.append(name))
    trainer = Trainer(**quiet, limit_val_batches=0, limit_test_batches=0, limit_predict_batches=0)
    assert getattr(trainer, fn)(module, loader()) == []
    assert called == []
    assert module.body[0].weight.grad is None


@pytest.mark.parametrize(
    ("sanity", "every", "reload", "validated", "asked"),
    [
        (1, 1, 2, [0, 1, 2, 3, 4], ["sanity_check", 2, 4]),
        (0, 1, 2, [0, 1, 2, 3, 4], [0, 2, 4]),
        (1, 2, 3, [1, 3], ["sanity_check", 1]),
        (0, 2, 1, [1, 3], [1, 3]),
    ],
)
def test_loaders_that_are_made_again_are_made_when_a_validation_is_due(
    sanity: int, every: int, reload: int, validated: list[int], asked: list[Any], quiet: dict[str, Any]
) -> None:
    seen: list[int] = []
    made: list[Any] = []

    class Module(Net):
        def val_dataloader(self) -> Any:
            made.append("sanity_check" if self.trainer.sanity_checking else self.current_epoch)
            torch.rand(1)
            return loader()

        def on_validation_start(self) -> None:
            if not self.trainer.sanity_checking:
                seen.append(self.current_epoch)

    settings = {"num_sanity_val_steps": sanity, "check_val_every_n_epoch": every, "max_epochs": 5}
    torch.manual_seed(0)
    Trainer(**quiet, **settings, reload_dataloaders_every_n_epochs=reload).fit(Module(), loader())
    drawn = torch.rand(1)
    assert (seen, made) == (validated, asked)
    torch.manual_seed(0)
    Trainer(**quiet, **settings).fit(Net(), loader(), loader())
    assert torch.equal(torch.rand(1), drawn)  # what the hook draws does not change the training


def test_the_trainer_shows_loaders_in_the_structure_in_which_they_were_given(quiet: dict[str, Any]) -> None:
    class Module(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch["a"][0]).sum()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            """Two loaders."""

    trainer, one, two = Trainer(**quiet, max_epochs=1, limit_train_batches=1), loader(), loader()
    trainer.fit(Module(), {"a": one, "b": two}, [one])
    assert trainer.train_dataloader == {"a": one, "b": two}
    assert trainer.val_dataloaders == [one]
    trainer.validate(Module(), {"x": one, "y": two}, verbose=False)
    assert trainer.val_dataloaders == {"x": one, "y": two}
    trainer.validate(Module(), CombinedLoader([one, two], "sequential"), verbose=False)
    assert trainer.val_dataloaders == [one, two]
    trainer.test(Module(), one, verbose=False)
    assert trainer.test_dataloaders is one


@pytest.mark.parametrize("num_sanity_val_steps", [0, 2])
def test_a_generator_is_used_up_after_one_validation_which_is_an_error(
    num_sanity_val_steps: int, quiet: dict[str, Any]
) -> None:
    trainer = Trainer(max_epochs=2, num_sanity_val_steps=num_sanity_val_steps, **quiet)
    with pytest.raises(RuntimeError, match=r"yielded no batches. A generator can be read only once"):
        trainer.fit(Net(), loader(), (batch for batch in loader(rows=8)))
    assert trainer.current_epoch == 1


def test_an_endless_iterator_gives_each_validation_its_next_batches(quiet: dict[str, Any]) -> None:
    class Module(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(batch)

    seen: list[int] = []
    trainer = Trainer(max_epochs=2, num_sanity_val_steps=0, limit_val_batches=2, **quiet)
    trainer.fit(Module(), loader(), itertools.count())
    assert seen == [0, 1, 2, 3]


def test_overfit_batches_says_that_it_turns_shuffling_off(quiet: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=r"train_dataloader shuffles, but Trainer\(overfit_batches=1\)"):
        Trainer(**quiet, max_epochs=1, overfit_batches=1).fit(Net(), loader(shuffle=True))


def test_a_step_of_an_evaluation_may_fetch_its_batches_itself(quiet: dict[str, Any]) -> None:
    class Fetches(TrainingModule):
        def __init__(self) -> None:
            super().__init__()
            self.before: list[Any] = []
            self.after: list[Any] = []

        def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.before.append((batch, batch_idx, dataloader_idx))

        def predict_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return next(dataloader_iter)

        def validation_step(self, dataloader_iter: Any) -> None:
            self.log("mean", next(dataloader_iter)[0].mean(), batch_size=2)

        def test_step(self, dataloader_iter: Any) -> None:
            """Fetches nothing."""

        def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            assert outputs == (batch, batch_idx, dataloader_idx)
            self.after.append(outputs)

    module, trainer = Fetches(), Trainer(**quiet, limit_predict_batches=2)
    first, second = [(5, 0, 0), (6, 1, 0)], [(7, 0, 1), (8, 1, 1)]
    assert trainer.predict(module, {"a": [5, 6], "b": [7, 8, 9]}) == [first, second]
    assert module.after == first + second
    assert module.before == [(None, 0, 0), *module.after[:-1]]
    assert trainer.predict(module, [5]) == [(5, 0, 0)]
    data = [torch.zeros(2), torch.ones(2)]
    assert trainer.validate(module, data, verbose=False) == [{"mean": 0.5}]
    with pytest.raises(RuntimeError, match=r"test_step\(dataloader_iter\) returned without calling next"):
        trainer.test(module, data, verbose=False)


def test_step_values_of_an_evaluation_go_to_the_loggers_only(quiet: dict[str, Any]) -> None:
    class Logs(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("both", float(batch_idx), on_step=True, on_epoch=True)
            self.log("alone", float(batch_idx), on_step=True, on_epoch=False)

    trainer = Trainer(**quiet)
    assert trainer.test(Logs(), loader(), verbose=False) == [{"both_epoch": 0.5}]
    assert trainer.callback_metrics == {"both": 0.5, "both_epoch": 0.5}
    assert trainer.logged_metrics == {"both_step": 1.0, "alone": 1.0, "both_epoch": 0.5}
    with pytest.raises(KeyError, match="an evaluation's step value, which goes only to the loggers"):
        trainer.callback_metrics["both_step"]


# ---- several processes -----------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(torch.arange(float(self.size))[:, None])


class Sums(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("sum", batch.sum() + 0 * self.layer(batch).sum(), reduce_fx="sum")
        self.log("mean", batch.mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch.flatten() + 0 * self.layer(batch).flatten()


def evaluated_streams(strategy: str, workers: int) -> list[Any]:
    found: list[Any] = []
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    for size, batch_size, drops in ((29, 4, True), (29, 1, False), (1, 4, False)):
        trainer, module = Trainer(accelerator="cpu", strategy=strategy, devices=2, **quiet), Sums()
        loader = DataLoader(Stream(size), batch_size, drop_last=drops, num_workers=workers)
        found += trainer.validate(module, loader, verbose=False)
        predicted = trainer.predict(module, loader, gather=True)
        found.append(torch.cat(predicted).tolist())  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 0), ("ddp", 1), ("fsdp", 0)])
def test_samples_of_a_stream_are_evaluated_once(strategy: str, workers: int) -> None:
    expected: list[Any] = []
    for size in (28, 29, 1):
        samples = list(map(float, range(size)))
        expected += [{"sum": sum(samples), "mean": pytest.approx(sum(samples) / size)}, samples]
    for found in ranks(2, evaluated_streams, strategy, workers):
        assert found == expected


class MeasuresTwo(Sums):
    def __init__(self) -> None:
        import torchmetrics

        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.mean.update(self.layer(batch) * 0 + batch)
        self.log("mean", self.mean)


def measured_on_two_loaders(strategy: str) -> list[Any]:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", strategy=strategy, devices=2, **quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainer.validate(MeasuresTwo(), [DataLoader(Stream(9), 2), DataLoader(Stream(5), 2)], verbose=False)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_metric_that_two_loaders_share_is_computed_after_each(strategy: str) -> None:
    pytest.importorskip("torchmetrics")
    expected = [{"mean/dataloader_idx_0": 4.0}, {"mean/dataloader_idx_1": pytest.approx(46 / 14)}]
    assert ranks(2, measured_on_two_loaders, strategy) == [expected] * 2

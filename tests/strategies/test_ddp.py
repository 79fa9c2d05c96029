"""Replicas: the numbers of one process, what is communicated when, and what is said about common mistakes."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clocks import Clock
from rank_processes import RanksError, ranks, wait_at_most
from tiny import QUIET, TinyModule, tiny_loader
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset

from paceline import Trainer, TrainingModule
from paceline.callbacks import Callback
from paceline.strategies import DDPStrategy, ModelParallelStrategy
from paceline.trainer import validation


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]], dtype=torch.float64))


class Net(TinyModule):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(lr=0.05)
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.double()


def fit(strategy: Any, count: int, batch_size: int, accumulate: int = 1, module: Any = Net, **given: Any) -> Any:
    torch.manual_seed(5)
    made = module()
    trainer = Trainer(**QUIET, strategy=strategy, max_epochs=2, accumulate_grad_batches=accumulate, **given)
    loader = DataLoader(data(count), batch_size, shuffle=True)
    trainer.fit(made, loader, DataLoader(data(7), 2))
    return [p.detach().clone() for p in made.parameters()], {k: float(v) for k, v in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("count", "accumulate"),
    [(16, 1), (18, 1), (13, 3), (9, 2)],
    ids=["even", "short last", "uneven last", "empty rank"],
)
def test_two_processes_learn_what_one_with_their_batches_together_learns(count: int, accumulate: int) -> None:
    alone, _ = fit("cpu", count, 4, accumulate)
    for together, _ in ranks(2, fit, "ddp", count, 2, accumulate):
        for mine, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-14)


class Items(Net):
    """Weighs its losses by the number of positive targets, which differs from batch to batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        kept = (y > -3).squeeze(1)
        error = (self(x[kept]) - y[kept]).pow(2)
        return {"loss": error.sum() / max(int(kept.sum()), 1), "num_items": int(kept.sum())}


@pytest.mark.parametrize("count", [16, 13, 9])
def test_items_are_weighed_over_all_ranks(count: int) -> None:
    alone, _ = fit("cpu", count, 4, 2, Items)
    for together, _ in ranks(2, fit, "ddp", count, 2, 2, Items):
        for mine, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-14)


class Synced(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", batch[1].max(), on_step=False, on_epoch=True, reduce_fx="max")
        if self.global_rank == 0:
            self.log("odd", 1.0, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))
        self.log("own", float(len(batch[0])), reduce_fx="sum", sync_dist=False)
        self.log("samples", float(len(batch[0])), reduce_fx="sum")

    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.log("found", self.trainer.callback_metrics["val_loss"], rank_zero_only=True)


@pytest.mark.parametrize("count", [16, 9])
def test_epoch_values_are_those_of_one_process(count: int) -> None:
    _, alone = fit("cpu", count, 4, 1, Synced)
    for _, together in ranks(2, fit, "ddp", count, 2, 1, Synced):
        for name in ("loss_epoch", "largest", "val_loss", "samples"):
            assert together[name] == pytest.approx(alone[name], rel=1e-10), name
    assert alone["samples"] == 7
    assert together["own"] in (3, 4)


class Accuracy(Net):
    def __init__(self) -> None:
        super().__init__()
        import torchmetrics

        self.error = torchmetrics.MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.error.update(self(x), y)
        self.log("error", self.error)


@pytest.mark.parametrize("val", [7, 1])
def test_torchmetrics_count_every_sample_once(val: int) -> None:
    def validate(strategy: str, batch_size: int) -> float:
        module = Accuracy()
        trainer = Trainer(**QUIET, strategy=strategy)
        return trainer.validate(module, DataLoader(data(val), batch_size), verbose=False)[0]["error"]

    alone = validate("cpu", 4)
    assert ranks(2, validate, "ddp", 2) == [pytest.approx(alone, rel=1e-6)] * 2


def test_predictions_of_all_ranks_come_in_the_order_of_the_data() -> None:
    def predict(gather: bool) -> list[Any]:
        class Echo(TrainingModule):
            def predict_step(self, batch: Any, batch_idx: int) -> Any:
                return batch

        loader = DataLoader(torch.arange(11), batch_size=2)  # type: ignore[arg-type]
        return Trainer(**QUIET, strategy="ddp").predict(Echo(), loader, gather=gather)

    for gathered in ranks(2, predict, True):
        assert torch.cat(gathered).tolist() == list(range(11))
    mine, theirs = ranks(2, predict, False)
    assert sorted(torch.cat([*mine, *theirs]).tolist()) == list(range(11))
    assert len(mine) == len(theirs)


def test_processes_that_hold_parts_of_one_model_give_each_prediction_once() -> None:
    def predict() -> list[Any]:
        class Echo(TrainingModule):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in "ab")

            def predict_step(self, batch: Any, batch_idx: int) -> Any:
                return batch

        strategy = ModelParallelStrategy(tensor_parallel=2, data_parallel_shard=1)
        loader = DataLoader(torch.arange(5), batch_size=2)  # type: ignore[arg-type]
        return Trainer(**QUIET, strategy=strategy).predict(Echo(), loader, gather=True)

    for gathered in ranks(2, predict):
        assert torch.cat(gathered).tolist() == list(range(5))


def test_a_generator_of_each_ranks_own_is_left_alone_with_loaders_that_are_split_already() -> None:
    def orders() -> Any:
        seen: list[int] = []

        class Notes(TinyModule):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                seen.extend(batch[2].tolist())
                return super().training_step(batch[:2], batch_idx)

        generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        x = torch.randn(8, 4)
        loader = DataLoader(TensorDataset(x, x[:, :1], torch.arange(8)), 2, shuffle=True, generator=generator)
        Trainer(**QUIET, strategy="ddp", max_epochs=1, use_distributed_sampler=False).fit(Notes(), loader)
        return seen

    mine, theirs = ranks(2, orders)
    assert sorted(mine) == sorted(theirs) == list(range(8))
    assert mine != theirs


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_evaluate_with_rank_0s_buffers_which_are_those_of_a_checkpoint(strategy: str) -> None:
    class Normal(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))  # type: ignore[assignment]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("mean", self.layer[0].running_mean.sum(), on_step=False, on_epoch=True, sync_dist=False)

    def run() -> Any:
        torch.manual_seed(0)
        trainer = Trainer(**QUIET, strategy=strategy, max_epochs=1)
        module = Normal()
        trainer.fit(module, tiny_loader(), tiny_loader())
        return trainer.callback_metrics["mean"].item(), module.layer[0].running_mean.sum().item()

    mine, theirs = ranks(2, run)
    assert mine[0] == theirs[0] == mine[1]


def test_ranks_whose_clocks_differ_validate_at_the_same_batches() -> None:
    def run() -> Any:
        class Notes(TinyModule):
            def on_validation_start(self) -> None:
                at.append(self.trainer.state.batches)

        at: list[int] = []
        clock = Clock(tick=0.3 + int(os.environ["RANK"]))
        validation.time = SimpleNamespace(monotonic=clock)  # type: ignore[assignment]
        strategy, interval = DDPStrategy(), {"seconds": 1}
        trainer = Trainer(**QUIET, strategy=strategy, max_epochs=4, num_sanity_val_steps=0, val_check_interval=interval)
        trainer.fit(Notes(), tiny_loader(32), tiny_loader())
        return at

    mine, theirs = ranks(2, run)
    assert mine == theirs
    assert mine


def counted(strategy: Any, accumulate: int, batches: int = 6) -> dict[str, int]:
    """How often each collective is called in the batches of a fit."""
    found: dict[str, int] = {}
    inside = False

    def count(name: str) -> Callable[..., Any]:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if inside:
                found[name] = found.get(name, 0) + 1
            return real(*args, **kwargs)

        return call

    class Counts(Net):
        def on_train_start(self) -> None:
            def hook(state: Any, bucket: Any) -> Any:
                found["buckets"] = found.get("buckets", 0) + 1
                return allreduce_hook(None, bucket)

            hook.__annotations__ = {"bucket": dist.GradBucket}
            self.trainer.model.register_comm_hook(None, hook)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            nonlocal inside
            inside = True

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            nonlocal inside
            inside = False

    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object", "broadcast_object_list"):
        setattr(dist, name, count(name))
    loader = DataLoader(data(4 * batches), 2)
    Trainer(**QUIET, strategy=strategy, max_epochs=1, accumulate_grad_batches=accumulate).fit(Counts(), loader)
    return found


@pytest.mark.parametrize(("accumulate", "reduced"), [(1, 6), (3, 2), (4, 2)])
def test_only_the_last_micro_batch_of_a_window_communicates(accumulate: int, reduced: int) -> None:
    for found in ranks(2, counted, "ddp", accumulate):
        # The hook that counts buckets reduces them itself; once a run the ranks agree whether they share step values.
        assert found == {"buckets": reduced, "all_reduce": reduced + 1}


class Skips(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


def test_a_window_that_a_hook_ends_early_is_reduced_too() -> None:
    alone, _ = fit("cpu", 16, 4, 3, Skips)
    for together, _ in ranks(2, fit, "ddp", 16, 2, 3, Skips):
        for mine, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-14)


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "state", "wrapper"),
    [
        ("fp16", None, None),
        ("powersgd", None, "fp16"),
        ("powersgd", {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}, None),
    ],
)
def test_communication_hooks_by_name_train(hook: str, state: Any, wrapper: Any) -> None:
    alone, _ = fit("cpu", 16, 4)

    def compressed() -> Any:
        strategy = DDPStrategy(ddp_comm_hook=hook, ddp_comm_state=state, ddp_comm_wrapper=wrapper)
        return fit(strategy, 16, 2, module=Single)[0]

    class Single(Net):
        def __init__(self) -> None:
            super().__init__()
            self.float()

        def loss(self, batch: Any) -> Any:
            x, y = batch
            return nn.functional.mse_loss(self(x.float()), y.float())

    mine, theirs = ranks(2, compressed)
    for a, b, exact in zip(mine, theirs, alone, strict=True):
        assert torch.equal(a, b)
        assert torch.isfinite(a).all()
        rounded = torch.allclose(a.double(), exact, rtol=0.05, atol=0.02)
        assert rounded if state is None else not torch.allclose(a.double(), exact, rtol=1e-4)
        assert not torch.equal(a, exact.float())


def test_a_static_graph_accumulates_from_the_first_window_on() -> None:
    alone, _ = fit("cpu", 18, 4, 2)
    for together, _ in ranks(2, fit, DDPStrategy(static_graph=True), 18, 2, 2):
        for mine, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-14)


def test_a_static_graph_is_refused_in_manual_optimization() -> None:
    def refused() -> str:
        class ByHand(Net):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False

        with pytest.raises(ValueError, match="static_graph=True") as error:
            fit(DDPStrategy(static_graph=True), 16, 2, module=ByHand)
        return str(error.value)

    for text in ranks(2, refused):
        assert text.startswith("DDPStrategy(static_graph=True) does not work with manual optimization, which ByHand")
        assert "Leave static_graph out" in text


def test_options_reach_distributed_data_parallel() -> None:
    def options() -> Any:
        class Looks(Net):
            def on_train_start(self) -> None:
                wrapped = self.trainer.model
                seen.append((wrapped.gradient_as_bucket_view, wrapped.static_graph, wrapped.bucket_bytes_cap))

        seen: list[Any] = []
        fit(DDPStrategy(gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=1), 16, 2, module=Looks)
        return seen

    assert ranks(2, options) == [[(True, True, 1 << 20)]] * 2


def test_local_sgd_averages_parameters_every_so_many_steps() -> None:
    def local() -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
            PostLocalSGDState,
            post_localSGD_hook,
        )

        class Watches(Net):
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                weight = self.layer[0].weight.detach()
                same.append(bool((self.all_gather(weight)[0] == self.all_gather(weight)[1]).all()))

        same: list[bool] = []
        state = PostLocalSGDState(process_group=None, subgroup=dist.new_subgroups(1)[0], start_localSGD_iter=2)
        strategy = DDPStrategy(ddp_comm_hook=post_localSGD_hook, ddp_comm_state=state, model_averaging_period=2)
        fit(strategy, 32, 2, module=Watches)
        return same

    def main() -> Any:
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
        return local()

    same, also = ranks(2, main)
    assert same == also
    assert False in same
    assert same[:2] == [True, True]
    assert same.count(True) > same.count(False)


# ---- common mistakes -------------------------------------------------------------------------------------------------


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(2, 2).double()


def test_parameters_without_a_gradient_are_named() -> None:
    with pytest.raises(RanksError, match=r"got no gradients: never.weight, never.bias") as caught:
        ranks(2, fit, "ddp", 16, 2, 1, Unused)
    assert "strategy='ddp_find_unused_parameters_true'" in str(caught.value)
    mine, theirs = ranks(2, fit, "ddp_find_unused_parameters_true", 16, 2, 1, Unused)
    assert all(torch.equal(a, b) for a, b in zip(mine[0], theirs[0], strict=True))


class FrozenLate(Net):
    """Freezes its last parameter after one batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        *_, (_, last) = self.named_parameters()
        last.requires_grad_(batch_idx == 0)


def test_a_parameter_that_was_frozen_in_the_fit_is_named_when_its_gradient_does_not_come() -> None:
    last = list(dict(FrozenLate().named_parameters()))[-1]
    with pytest.raises(RanksError, match=f"these parameters got no gradients: {last}\\. "):
        ranks(2, fit, "ddp", 16, 2, 1, FrozenLate)


def test_models_that_differ_between_ranks_are_named() -> None:
    def differ() -> None:
        class Other(Net):
            def __init__(self) -> None:
                super().__init__()

                self.extra = nn.Linear(2, 2 + int(os.environ["RANK"])).double()

        fit("ddp", 16, 2, module=Other)

    with pytest.raises(RanksError) as caught:
        ranks(2, differ)
    for error in caught.value.errors:
        assert "Other differs between the ranks" in str(error)
        assert "('extra.weight', (2, 2)," in str(error)
        assert "('extra.weight', (3, 2)," in str(error)


def test_every_rank_starts_from_rank_0s_weights_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    def differ() -> Any:
        class Seeded(Net):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(int(os.environ["RANK"]))
                nn.init.normal_(self.layer[0].weight)

        return fit("ddp", 16, 2, module=Seeded)[0]

    mine, theirs = ranks(2, differ)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    said = capfd.readouterr().err
    assert said.count("built Seeded with different weights (layer.0.weight), so all ranks start from rank 0's") == 1


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()


def normed(strategy: str, batch_size: int, sync: bool) -> Any:
    torch.manual_seed(5)
    module, seen = Normed(), []
    before = vars(module.layer[1]).copy()
    module.layer[1].register_forward_hook(lambda layer, *_: seen.append(type(layer) is nn.BatchNorm1d))
    trainer = Trainer(**QUIET, strategy=strategy, max_epochs=2, sync_batchnorm=sync)
    trainer.fit(module, DataLoader(data(20), batch_size), DataLoader(data(7), 2))
    is_as_before = vars(module.layer[1]).keys() == before.keys()
    return {name: value.clone() for name, value in module.state_dict().items()}, all(seen), len(seen), is_as_before


def test_synchronized_batch_norm_equals_one_process(capfd: pytest.CaptureFixture[str]) -> None:
    alone, *_ = normed("cpu", 4, True)
    for together, keeps_its_class, calls, is_as_before in ranks(2, normed, "ddp", 2, True):
        assert keeps_its_class
        assert calls
        assert is_as_before
        for name, expected in alone.items():
            torch.testing.assert_close(together[name], expected, rtol=1e-11, atol=1e-13, msg=name)
    assert "batch norms" not in capfd.readouterr().err


def test_batch_norm_of_one_process_each_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    ranks(2, normed, "ddp", 2, False)
    said = capfd.readouterr().err
    assert said.count("Normed has batch norm layers (1 in total) that see only their own process's batch") == 1
    assert "Trainer(sync_batchnorm=True)" in said


def on_one_rank(what: str) -> None:
    class Alone(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1 and self.global_rank == 0:
                wait_at_most(1.0)
                if what == "gather":
                    self.all_gather(torch.ones(1))
                else:
                    self.trainer.save_checkpoint("alone.ckpt")
            return super().training_step(batch, batch_idx)

    fit(DDPStrategy(), 16, 2, module=Alone)


@pytest.mark.parametrize(("what", "place"), [("gather", "all_gather"), ("save", "barrier 'save_checkpoint'")])
def test_a_collective_on_one_rank_only_names_both_places(what: str, place: str) -> None:
    with pytest.raises(RanksError) as caught:
        ranks(2, on_one_rank, what)
    said = str(caught.value.errors[0])
    assert "Rank 0 timed out waiting for another rank at" in said
    assert "in training_step (train, epoch 0, batch 1, " in said
    assert place in said
    assert "Rank 1 " in said
    assert "if trainer.is_global_zero" in said


class Interrupts(Callback):
    """Ends the fit between a forward pass and its backward pass; counts what the fit's wrapper reduces after that."""

    reduced = 0

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        wrapped: Any = trainer.model
        wrapped.register_comm_hook(None, lambda state, bucket: self.reduce(bucket))

    def reduce(self, bucket: dist.GradBucket) -> Any:
        self.reduced += 1
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    def on_before_backward(self, trainer: Trainer, pl_module: TrainingModule, loss: Any) -> None:
        raise KeyError("between forward and backward")


def after_an_interrupted_fit() -> int:
    module, interrupts = Net(), Interrupts()
    trainer = Trainer(**QUIET, strategy="ddp", max_epochs=1, callbacks=[interrupts])
    with pytest.raises(KeyError, match="between forward and backward"):
        trainer.fit(module, DataLoader(data(8), 2))
    Trainer(**QUIET, strategy="ddp", max_epochs=1).fit(module, DataLoader(data(8), 2))
    return interrupts.reduced


def test_a_later_fit_reduces_nothing_for_an_interrupted_one() -> None:
    """Its gradient hooks lived as long as its garbage, which each rank collects when it likes: the ranks hung."""
    assert ranks(2, after_an_interrupted_fit) == [0, 0]


def test_a_skipped_batch_is_refused() -> None:
    class Skip(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    with pytest.raises(RanksError, match="returned None to skip a batch on rank"):
        ranks(2, fit, "ddp", 16, 2, 1, Skip)


def test_unknown_and_own_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"DDPStrategy argument 'bucket_cap'\. Did you mean 'bucket_cap_mb'"):
        DDPStrategy(bucket_cap=1)
    with pytest.raises(TypeError, match=r"DDPStrategy\(device_ids=...\): the strategy sets this argument itself"):
        DDPStrategy(device_ids=[0])
    with pytest.raises(ValueError, match=r"Unknown ddp_comm_hook 'fp61'\. Did you mean 'fp16'"):
        DDPStrategy(ddp_comm_hook="fp61")
    with pytest.raises(ValueError, match=r"ddp_comm_hook='bf16'.*needs NCCL.*'fp16'"):
        Trainer(**QUIET, strategy=DDPStrategy(ddp_comm_hook="bf16"))
    with pytest.raises(ValueError, match=r"ddp_comm_wrapper='bf16'.*needs NCCL.*'fp16'"):
        Trainer(**QUIET, strategy=DDPStrategy(ddp_comm_hook="powersgd", ddp_comm_wrapper="bf16"))
    with pytest.raises(ValueError, match=r"Unknown ddp_comm_wrapper 'fp61'\. Did you mean 'fp16'"):
        DDPStrategy(ddp_comm_hook="fp16", ddp_comm_wrapper="fp61")
    with pytest.raises(ValueError, match="have no effect without ddp_comm_hook"):
        DDPStrategy(ddp_comm_state={"matrix_approximation_rank": 1})
    with pytest.raises(ValueError, match=r"process_group_backend='nccl'\): NCCL only works with CUDA devices"):
        Trainer(**QUIET, strategy=DDPStrategy(process_group_backend="nccl"))


def test_a_module_inside_data_parallel_is_taken_out() -> None:
    module = Net()
    with pytest.warns(UserWarning, match=r"passed wrapped in DataParallel\. The wrapper was removed"):
        Trainer(**QUIET, max_epochs=1).fit(nn.DataParallel(module), DataLoader(data(4), 2))  # type: ignore[arg-type]


class Gan(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.generator, self.critic = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        first, second = self.optimizers()
        fake = self.generator(real)
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(-self.critic(fake).mean())
        first.step()
        self.untoggle_optimizer(first)
        second.zero_grad()
        self.manual_backward((self.critic(fake.detach()) - self.critic(real)).pow(2).mean())
        second.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.generator, self.critic)]


def gan(strategy: str, batch_size: int) -> Any:
    module = Gan()
    Trainer(**QUIET, strategy=strategy, max_epochs=2).fit(module, DataLoader(data(16), batch_size))
    return [p.detach() for p in module.parameters()]


def test_two_networks_optimized_by_hand_equal_one_process() -> None:
    alone = gan("cpu", 4)
    for together in ranks(2, gan, "ddp", 2):
        for mine, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-14)


def test_lbfgs_evaluates_over_all_ranks() -> None:
    class Quasi(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=4)

    alone, _ = fit("cpu", 16, 4, 1, Quasi)
    for together, _ in ranks(2, fit, "ddp", 16, 2, 1, Quasi):
        for mine, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-8, atol=1e-10)


def test_loaders_of_different_lengths_stop_together() -> None:
    def uneven() -> Any:
        rank = int(os.environ["RANK"])
        module = TinyModule()
        trainer = Trainer(**QUIET, strategy="ddp", max_epochs=2, use_distributed_sampler=False)
        trainer.fit(module, tiny_loader(batches=5 - 2 * rank))
        return trainer.global_step

    assert ranks(2, uneven) == [6, 6]


def test_streams_of_different_lengths_stop_together() -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            for _ in range(5 - 2 * int(os.environ["RANK"])):
                yield torch.ones(4), torch.ones(1)

    def uneven() -> Any:
        trainer = Trainer(**QUIET, strategy="ddp", max_epochs=2, use_distributed_sampler=False)
        trainer.fit(TinyModule(), DataLoader(Stream(), batch_size=1))
        return trainer.global_step

    assert ranks(2, uneven) == [6, 6]

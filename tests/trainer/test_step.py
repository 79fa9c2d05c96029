"""Forward, backward, update: what reaches the weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_processes import ranks
from tiny import QUIET, TinyModule, tiny_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from paceline import Callback, Trainer, TrainingModule, messages


class Net(TrainingModule):
    """Regression in float64, so that a difference is a difference of arithmetic and not of rounding."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.layer = nn.Linear(3, 1).double()
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(1, 3, generator=generator))
            self.layer.bias.zero_()
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class ByItems(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "num_items": len(batch[0])}


def data(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(rows, 3, generator=generator).double(), torch.randn(rows, 1, generator=generator).double()


def by_hand(module: Net, groups: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One plain step for each group; returns the weights."""
    module = copy.deepcopy(module)
    optimizer = module.configure_optimizers()
    for x, y in groups:
        optimizer.zero_grad()
        nn.functional.mse_loss(module.layer(x), y).backward()
        optimizer.step()
    return module.layer.weight.detach()


def fit(module: Net, batches: Any, **arguments: Any) -> Trainer:
    trainer = Trainer(**{"max_epochs": 1, **QUIET, **arguments})
    trainer.fit(module, batches)
    return trainer


@settings(max_examples=15, deadline=None)
@given(batches=st.integers(1, 9), accumulate=st.integers(1, 4))
def test_a_window_of_micro_batches_equals_one_big_batch(batches: int, accumulate: int) -> None:
    x, y = data(batches * 2)
    micro = [(x[i : i + 2], y[i : i + 2]) for i in range(0, batches * 2, 2)]
    big = [(x[i : i + 2 * accumulate], y[i : i + 2 * accumulate]) for i in range(0, batches * 2, 2 * accumulate)]
    module = Net()
    want = by_hand(module, big)
    trainer = fit(module, micro, accumulate_grad_batches=accumulate)
    torch.testing.assert_close(module.layer.weight.detach(), want, rtol=1e-12, atol=1e-14)
    assert trainer.global_step == len(big)


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=8), accumulate=st.integers(1, 4))
def test_num_items_weighs_uneven_micro_batches_exactly(sizes: list[int], accumulate: int) -> None:
    x, y = data(sum(sizes))
    micro = list(zip(x.split(sizes), y.split(sizes), strict=True))
    windows = [micro[i : i + accumulate] for i in range(0, len(micro), accumulate)]
    big = [(torch.cat([a for a, _ in w]), torch.cat([b for _, b in w])) for w in windows]
    module = ByItems()
    want = by_hand(module, big)
    fit(module, micro, accumulate_grad_batches=accumulate)
    torch.testing.assert_close(module.layer.weight.detach(), want, rtol=1e-12, atol=1e-14)


def test_last_window_is_exact_for_a_loader_without_length() -> None:
    x, y = data(10)

    class NoLength:
        def __iter__(self) -> Any:
            return iter(list(zip(x.split(2), y.split(2), strict=True)))

    module = Net()
    want = by_hand(module, [(x[:6], y[:6]), (x[6:], y[6:])])
    assert fit(module, NoLength(), accumulate_grad_batches=3).global_step == 2
    torch.testing.assert_close(module.layer.weight.detach(), want, rtol=1e-12, atol=1e-14)


def test_num_items_as_a_tensor_works() -> None:
    class Tokens(ByItems):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {**super().training_step(batch, batch_idx), "num_items": torch.tensor(len(batch[0]))}

    x, y = data(8)
    module = Tokens()
    want = by_hand(module, [(x, y)])
    fit(module, list(zip(x.split([1, 7]), y.split([1, 7]), strict=True)), accumulate_grad_batches=2)
    torch.testing.assert_close(module.layer.weight.detach(), want, rtol=1e-6, atol=1e-8)


def test_num_items_on_some_batches_only_is_an_error() -> None:
    class Sometimes(ByItems):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            return output if batch_idx == 0 else {"loss": output["loss"]}

    x, y = data(4)
    with pytest.raises(
        ValueError, match=r"Sometimes\.training_step returned 'num_items' for some batches but not for all"
    ):
        fit(Sometimes(), list(zip(x.split(2), y.split(2), strict=True)))


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        ({"logits": 1, "targets": 2}, TypeError, r"a dict without 'loss' \(keys: 'logits', 'targets'\)"),
        ("loss", TypeError, r"returned str \('loss'\), so there is nothing to run backward on"),
        (3.0, TypeError, "Return the loss tensor, or put it under 'loss'"),
        (torch.ones(3, requires_grad=True), ValueError, r"a loss of shape \(3,\).*loss\.mean\(\)"),
        (torch.tensor(1.0), RuntimeError, r"does not require gradients.*without \.item\(\)"),
        ({"loss": torch.tensor(1.0)}, RuntimeError, "does not require gradients"),
    ],
)
def test_what_is_no_loss_is_named(output: Any, error: type[Exception], message: str) -> None:
    class Wrong(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return output

    with pytest.raises(error, match=message):
        fit(Wrong(), [data(2)])


def test_an_error_in_backward_that_is_not_the_loss_passes_through() -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("mine")

    class Module(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return Breaks.apply(super().training_step(batch, batch_idx))

    with pytest.raises(RuntimeError, match=r"^mine"):
        fit(Module(), [data(2)])


def test_none_skips_the_batch_but_not_the_window() -> None:
    x, y = data(8)

    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (1, 2) else super().training_step(batch, batch_idx)

    module = Skips()
    batches = list(zip(x.split(2), y.split(2), strict=True))
    want = by_hand(module, [(torch.cat([x[:2], x[6:]]), torch.cat([y[:2], y[6:]]))])
    trainer = fit(module, batches, accumulate_grad_batches=2)
    torch.testing.assert_close(module.layer.weight.detach(), want, rtol=1e-12, atol=1e-14)
    assert trainer.global_step == 1


def test_nan_loss_under_detect_anomaly_stops_before_the_weights_are_spoiled() -> None:
    class Nan(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * float("nan")

    module = Nan()
    before = module.layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"Nan\.training_step returned a loss of nan"):
        fit(module, [data(2)], detect_anomaly=True)
    assert torch.equal(module.layer.weight, before)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped_before_the_step(algorithm: str) -> None:
    norms: list[float] = []

    class Watch(Callback):
        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            grads = torch.cat([p.grad.flatten() for p in pl_module.parameters()])
            norms.append(float(grads.norm() if algorithm == "norm" else grads.abs().max()))

    x, y = data(4)
    fit(Net(), [(x, y * 100)], gradient_clip_val=0.5, gradient_clip_algorithm=algorithm, callbacks=[Watch()])
    assert norms[0] == pytest.approx(0.5, rel=1e-5)


def test_gradients_are_gone_after_the_step_and_whole_before_it() -> None:
    seen: dict[str, list[bool]] = {"before": [], "after": []}

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen["before"].append(all(p.grad is not None for p in pl_module.parameters()))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen["after"].append(all(p.grad is None for p in pl_module.parameters()))
            assert outputs["loss"].shape == ()
            assert not outputs["loss"].requires_grad

    fit(Net(), [data(2)] * 3, callbacks=[Watch()])
    assert seen == {"before": [True] * 3, "after": [True] * 3}


def test_a_parameter_group_added_during_the_run_is_stepped_and_cleared() -> None:
    class Grows(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + (self.extra - 1).pow(2).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.layer.parameters(), lr=0.1)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.extra.grad = None
                self.optimizers().add_param_group({"params": [self.extra], "lr": 0.25})

    module = Grows()
    fit(module, [data(2)] * 2)
    assert module.extra.item() == pytest.approx(0.5)
    assert module.extra.grad is None


def test_lbfgs_gets_its_closure_and_minimizes() -> None:
    class Second(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=1, max_iter=20, line_search_fn="strong_wolfe")

    x, _ = data(16)
    y = x @ torch.tensor([[1.0], [2.0], [3.0]]).double() + 0.5
    module = Second()
    trainer = fit(module, [(x, y)] * 2)
    assert trainer.global_step == 2
    torch.testing.assert_close(
        module.layer.weight.detach(), torch.tensor([[1.0, 2.0, 3.0]]).double(), rtol=1e-4, atol=1e-4
    )


def test_lbfgs_with_accumulation_is_refused() -> None:
    class Second(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ValueError, match=r"accumulate_grad_batches=2\) does not work with LBFGS"):
        fit(Second(), [data(2)] * 2, accumulate_grad_batches=2)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_overridden_optimizer_step_trains_as_the_straight_line_does(accumulate: int) -> None:
    class Own(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)

    batches = [data(2 + i % 2) for i in range(7)]
    plain, own = Net(), Own()
    first = fit(plain, batches, accumulate_grad_batches=accumulate)
    second = fit(own, batches, accumulate_grad_batches=accumulate)
    assert torch.equal(plain.layer.weight, own.layer.weight)
    assert first.global_step == second.global_step
    assert second.state.updates == first.state.updates


def test_a_scheduler_moves_once_per_update() -> None:
    rates: list[float] = []

    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            rates.append(self.optimizers().param_groups[0]["lr"])

    fit(Scheduled(), [data(2)] * 5, accumulate_grad_batches=2)
    assert rates == [0.1, 0.05, 0.05, 0.025, 0.0125]


def test_onecycle_without_interval_is_stepped_every_update_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(messages, "info", told.append)

    class Cycle(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
            return [optimizer], [self.cycle]

    module = Cycle()
    fit(module, [data(2)] * 4)
    assert module.cycle.last_epoch == 4
    assert [t for t in told if "OneCycleLR advances at every optimizer step" in t]


@pytest.mark.parametrize("kind", ["step", "closure", "manual", "free"])
def test_a_batch_that_is_none_is_skipped_and_does_not_count(kind: str) -> None:
    seen: list[Any] = []

    class Skips(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = kind != "manual"

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch_idx)
            return super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            assert batch is not None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert (outputs is None) is (batch is None)

        def configure_optimizers(self) -> Any:
            return None if kind == "free" else super().configure_optimizers()

    module, one, two = Skips(), data(2), data(4)
    if kind == "closure":
        module.optimizer_step = lambda epoch, idx, optimizer, closure: optimizer.step(closure)  # type: ignore[method-assign]
    optimized = kind in ("step", "closure")
    plain = copy.deepcopy(module)
    messages.forget()
    with pytest.warns(UserWarning, match="yielded None instead of a batch, so this batch is skipped"):
        fit(module, [one, None, two, None], accumulate_grad_batches=3 if optimized else 1)
    assert seen == [0, 2]
    if optimized:
        fit(plain, [one, two], accumulate_grad_batches=3)
        assert torch.equal(module.layer.weight, plain.layer.weight)
        assert not torch.equal(module.layer.weight, Net().layer.weight)


class Unsized(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.data = tiny_loader(1, size).dataset

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(len(self.data)))  # type: ignore[arg-type]


class Averaged(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("mean", loss, on_step=False, on_epoch=True)
        self.log("step", loss, sync_dist=True)
        return loss


class Counted(Averaged):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "num_items": len(batch[0])}


def fit_streams(kind: type[TinyModule], batch_size: int) -> list[Any]:
    """Train on streams whose last batch has 5 of 8 samples, and 1 of 8."""
    found: list[Any] = []
    for size, accumulate in ((21, 1), (17, 1), (17, 2)):
        torch.manual_seed(5)
        module, strategy = kind(), "ddp" if batch_size == 4 else "single_device"
        trainer = Trainer(**QUIET, strategy=strategy, max_epochs=2, accumulate_grad_batches=accumulate)
        trainer.fit(module, DataLoader(Unsized(size), batch_size))
        found += [module.layer.weight.detach().clone(), trainer.callback_metrics["mean"]]
        found += [trainer.callback_metrics["step"]]
    return found


@pytest.mark.parametrize("kind", [Averaged, Counted])
def test_each_sample_of_the_uneven_last_batch_of_a_stream_has_the_same_weight(kind: type[TinyModule]) -> None:
    alone = fit_streams(kind, 8)
    torch.testing.assert_close(ranks(2, fit_streams, kind, 4), [alone] * 2, rtol=1e-5, atol=1e-6)

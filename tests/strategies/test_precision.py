"""Every precision computes what the same loop written by hand computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import QUIET
from torch import nn
from torch.amp.grad_scaler import GradScaler

from paceline import Callback, Trainer, TrainingModule
from paceline.strategies import (
    DDPStrategy,
    FSDPStrategy,
    MixedPrecision,
    Precision,
    SingleDevice,
    TruePrecision,
    choose_strategy,
)

SETTINGS: dict[str, Any] = QUIET | {"max_epochs": 1}
DTYPES = {"32-true": torch.float32, "64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}
MIXED = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


class Net(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x)
        self.seen = {"input": x.dtype, "output": out.dtype, "made": torch.ones(1).dtype, "labels": y.dtype}
        return nn.functional.mse_loss(out.squeeze(1), y.to(out.dtype))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["evaluated"] = self.net(batch[0]).dtype

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(count: int = 5) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(6, 4, generator=generator), torch.arange(6)) for _ in range(count)]


def by_hand(name: str, clip: float | None = None) -> list[torch.Tensor]:
    """The same training with torch alone."""
    model = net()
    true = DTYPES.get(name)
    scaler = GradScaler("cpu", enabled=name == "16-mixed")
    if true is not None:
        model = model.to(true)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches():
        with torch.autocast("cpu", dtype=MIXED.get(name, torch.bfloat16), enabled=name in MIXED):
            out = model(x.to(true) if true is not None else x)
            loss = nn.functional.mse_loss(out.squeeze(1), y.to(out.dtype))
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("name", [*DTYPES, *MIXED])
def test_the_weights_are_those_of_a_loop_by_hand_to_the_bit(name: str, clip: float | None) -> None:
    module = Net()
    Trainer(**SETTINGS, precision=name, gradient_clip_val=clip).fit(module, batches())
    for mine, theirs in zip(module.parameters(), by_hand(name, clip), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", DTYPES)
def test_true_precisions_hold_everything_in_one_dtype(name: str) -> None:
    module, dtype = Net(), DTYPES[name]
    trainer = Trainer(**SETTINGS, precision=name)
    trainer.fit(module, batches())
    assert module.dtype == dtype
    assert module.seen == {"input": dtype, "output": dtype, "made": dtype, "labels": torch.int64}
    trainer.validate(module, batches(), verbose=False)
    assert module.seen["evaluated"] == dtype
    assert trainer.predict(module, batches(1))[0].dtype == dtype
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", MIXED)
def test_mixed_precisions_compute_in_16_bits_and_keep_float32_weights(name: str) -> None:
    module = Net()
    trainer = Trainer(**SETTINGS, precision=name)
    trainer.fit(module, batches())
    assert module.dtype == torch.float32
    assert (module.seen["input"], module.seen["output"]) == (torch.float32, MIXED[name])
    trainer.validate(module, batches(), verbose=False)
    assert module.seen["evaluated"] == MIXED[name]


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        (32, "32-true"),
        ("64", "64-true"),
        (16, "16-mixed"),
        ("bf16", "bf16-mixed"),
        (None, "32-true"),
        ("no", "32-true"),
    ],
)
def test_aliases(alias: Any, name: str) -> None:
    assert Trainer(**SETTINGS, precision=alias).precision == name


def small_scale() -> MixedPrecision:
    """fp16 with a loss scale that these gradients do not overflow with."""
    return MixedPrecision("16-mixed", scaler=GradScaler("cpu", init_scale=64.0))


class Overflows(Net):
    """Its loss is infinite in the batches named."""

    def __init__(self, at: tuple[int, ...]) -> None:
        super().__init__()
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (float("inf") if batch_idx in self.at else 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": self.schedule, "interval": "step"}]


def test_a_step_that_fp16_skips_counts_nowhere() -> None:
    module = Overflows(at=(1, 3))
    weights: list[torch.Tensor] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            weights.append(pl_module.net[0].weight.detach().clone())

    trainer = Trainer(**SETTINGS, precision=small_scale(), callbacks=[Watch()])
    trainer.fit(module, batches())
    assert (trainer.global_step, trainer.state.updates, trainer.state.batches) == (3, 3, 5)
    assert module.schedule.last_epoch == 3
    assert trainer.precision_plugin.skipped_steps == 2
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[3], weights[4])
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("how", ["straight", "closure", "by hand"])
def test_gradients_are_unscaled_once_before_hooks_and_clipping(how: str) -> None:
    norms: list[float] = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            norms.append(float(torch.cat([p.grad.flatten() for p in pl_module.parameters()]).norm()))

    class Module(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.automatic_optimization:
                return loss
            optimizer = self.optimizers()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 1e6)
            self.clip_gradients(optimizer, 1e6)
            optimizer.step()
            optimizer.zero_grad()
            return None

    def run(precision: Any) -> list[float]:
        module = Module()
        module.automatic_optimization = how != "by hand"
        if how == "closure":
            module.optimizer_step = lambda epoch, idx, optimizer, closure: optimizer.step(closure=closure)
        clip = None if how == "by hand" else 1e6
        norms.clear()
        Trainer(**SETTINGS, precision=precision, gradient_clip_val=clip, callbacks=[Watch()]).fit(module, batches(3))
        return list(norms)

    scaled, plain = run(small_scale()), run("32-true")
    assert len(scaled) == 3
    assert scaled == pytest.approx(plain, rel=0.05)


def test_the_scale_goes_through_a_checkpoint(tmp_path: Any) -> None:
    first = Trainer(**SETTINGS, precision=MixedPrecision("16-mixed", scaler=GradScaler("cpu", init_scale=1024.0)))
    first.fit(Overflows(at=(1,)), batches())
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = Trainer(**{**SETTINGS, "max_epochs": 2}, precision="16-mixed")
    scales: list[float] = []
    module = Overflows(at=())
    module.on_train_start = lambda: scales.append(second.scaler.get_scale())
    second.fit(module, batches(), ckpt_path=tmp_path / "a.ckpt")
    assert scales == [512.0]
    assert second.precision_plugin.skipped_steps == 1


def test_lbfgs_under_fp16_is_refused() -> None:
    class Second(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ValueError, match=r"precision='16-mixed' does not work with LBFGS.*Use 'bf16-mixed'"):
        Trainer(**SETTINGS, precision="16-mixed").fit(Second(), batches(1))


@pytest.mark.parametrize("name", DTYPES)
def test_init_module_makes_layers_in_the_precisions_dtype(name: str) -> None:
    with Trainer(**SETTINGS, precision=name).init_module():
        layer = nn.Linear(2, 2)
    assert layer.weight.dtype == DTYPES[name]
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("give", [lambda p: {"precision": p}, lambda p: {"plugins": p}, lambda p: {"plugins": [p]}])
def test_a_precision_object_can_be_given(give: Callable[[Any], dict[str, Any]]) -> None:
    mine = TruePrecision("64-true")
    assert Trainer(**SETTINGS, **give(mine)).precision_plugin is mine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "b16"}, r"Unknown precision 'b16'. Did you mean 'bf16'\?.*or pass a Precision"),
        ({"precision": 8}, "Unknown precision 8"),
        (
            {"precision": "16", "plugins": Precision()},
            r"precision='16'\) and plugins=Precision\(...\) both set the precision. Leave one out",
        ),
        ({"plugins": [Precision(), TruePrecision("64-true")]}, "only one Precision is allowed"),
    ],
)
def test_wrong_and_contradictory_precisions(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(**SETTINGS, **arguments)


def test_bf16_needs_no_scaler() -> None:
    with pytest.raises(ValueError, match="bf16 needs no loss scaling"):
        MixedPrecision("bf16-mixed", scaler=GradScaler("cpu"))
    assert choose_strategy("cpu", precision="bf16").precision.scaler is None


@pytest.mark.parametrize("kind", [SingleDevice, DDPStrategy, FSDPStrategy])
def test_a_name_given_to_a_strategy_is_an_error_that_says_where_names_go(kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__}: precision='bf16-mixed' is a str, not a Precision.*Trainer"):
        kind(precision="bf16-mixed")

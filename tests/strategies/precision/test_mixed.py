"""The loss scale of fp16 where several optimizers, skipped batches and devices meet it; autocast around a step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from paceline import Callback, Trainer, TrainingModule
from paceline.loggers import CSVLogger
from paceline.strategies import MixedPrecision, SingleDevice


def batches(count: int = 6) -> list[Tensor]:
    return list(torch.randn(count * 4, 4, generator=torch.Generator().manual_seed(2)).split(4))


class Two(TrainingModule):
    """Two networks, an optimizer each; ``order`` spells what a step does: B and b backward, C clip, S and s step."""

    def __init__(self, order: str, bad: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.nets = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        self.order, self.bad = order, bad
        self.norms: list[float] = []

    def loss(self, which: int, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.nets[which](batch).pow(2).mean()
        return loss * float("inf") if which == 0 and batch_idx in self.bad else loss

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for letter in self.order:
            which = int(letter.islower())
            if letter in "Bb":
                self.manual_backward(self.loss(which, batch, batch_idx))
            elif letter in "Cc":
                self.clip_gradients(optimizers[which], 0.1)
            else:
                optimizers[which].step()
                optimizers[which].zero_grad()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad.flatten() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.norms.append(float(torch.cat(grads).norm()) if grads else 0.0)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in self.nets]


def by_hand(module: Two, scaler: GradScaler) -> Two:
    """The same with torch alone, where each optimizer is unscaled once and the scale follows at the end of a batch."""
    module = copy.deepcopy(module)
    optimizers = module.configure_optimizers()
    for batch_idx, batch in enumerate(batches()):
        unscaled: set[int] = set()
        for letter in module.order:
            which = int(letter.islower())
            if letter in "Bb":
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = module.loss(which, batch, batch_idx)
                scaler.scale(loss).backward()
            elif letter in "Cc":
                scaler.unscale_(optimizers[which])
                unscaled.add(which)
                nn.utils.clip_grad_norm_(module.nets[which].parameters(), 0.1)
            else:
                scaler.step(optimizers[which])
                optimizers[which].zero_grad()
        scaler.update()
    return module


def grows(scale: float = 64.0) -> GradScaler:
    """A scale that doubles after every second step, so that each scale is seen."""
    return GradScaler("cpu", init_scale=scale, growth_interval=2)


@pytest.mark.parametrize("order", ["BSbs", "BbSs", "BbsS", "BCbcSs", "BbcSs", "BCSbcs", "bcBSs"])
@pytest.mark.parametrize("bad", [(), (0,), (1, 2)], ids=str)
def test_two_optimizers_step_as_in_a_loop_by_hand(order: str, bad: tuple[int, ...], quiet: dict[str, Any]) -> None:
    module = Two(order, bad)
    want = by_hand(module, grows())
    scaler = grows()
    trainer = Trainer(**quiet, max_epochs=1, precision=MixedPrecision("16-mixed", scaler=scaler))
    trainer.fit(module, batches())
    assert trainer.precision_plugin.skipped_steps == len(bad)
    assert trainer.global_step == 2 * len(batches()) - len(bad)
    for mine, theirs in zip(module.parameters(), want.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_gradients_of_both_optimizers_are_unscaled_exactly_once_before_the_hook(quiet: dict[str, Any]) -> None:
    def norms(order: str, precision: Any) -> list[float]:
        module = Two(order)
        Trainer(**quiet, max_epochs=1, precision=precision).fit(module, batches())
        return module.norms

    for order in ("BbSs", "BSbs", "BCbSs", "BbcSs"):
        scaled = norms(order, MixedPrecision("16-mixed", scaler=grows(1024.0)))
        assert len(scaled) == 2 * len(batches())
        assert scaled == pytest.approx(norms(order, "32-true"), rel=0.02), order


def test_a_closure_by_hand_is_unscaled_before_the_hook(quiet: dict[str, Any]) -> None:
    class Closes(Two):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for which, optimizer in enumerate(self.optimizers()):

                def closure(which: int = which, optimizer: Any = optimizer) -> Tensor:
                    optimizer.zero_grad()
                    loss = self.loss(which, batch, batch_idx)
                    self.manual_backward(loss)
                    return loss

                optimizer.step(closure)

    def run(precision: Any) -> Two:
        module = Closes("")
        trainer = Trainer(**quiet, max_epochs=1, precision=precision)
        trainer.fit(module, batches())
        assert trainer.global_step == len(module.norms) == 2 * len(batches())
        return module

    plain, scaled = run("32-true"), run(MixedPrecision("16-mixed", scaler=grows(1024.0)))
    assert min(plain.norms) > 0
    assert scaled.norms == pytest.approx(plain.norms, rel=0.02)


def test_an_optimizer_may_step_several_times_in_a_batch(quiet: dict[str, Any]) -> None:
    module = Two("BSBSbsBS")
    trainer = Trainer(**quiet, max_epochs=1, precision="16-mixed")
    trainer.fit(module, batches())
    assert trainer.global_step + trainer.precision_plugin.skipped_steps == 4 * len(batches())
    assert trainer.precision_plugin.skipped_steps < 4


def test_an_optimizer_without_gradients_steps_as_in_full_precision(quiet: dict[str, Any]) -> None:
    steps = []
    for precision in ("32-true", MixedPrecision("16-mixed", scaler=grows())):
        trainer = Trainer(**quiet, max_epochs=1, precision=precision)
        trainer.fit(Two("BSsbs"), batches())
        steps.append(trainer.global_step)
    assert steps == [3 * len(batches())] * 2


class Net(TrainingModule):
    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 1)
        self.bad = bad

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        return loss * float("inf") if batch_idx in self.bad else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_skipped_step_does_not_move_the_logs_x_axis(quiet: dict[str, Any], tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="run")
    precision = MixedPrecision("16-mixed", scaler=GradScaler("cpu", init_scale=64.0))
    trainer = Trainer(**{**quiet, "logger": logger}, max_epochs=1, log_every_n_steps=1, precision=precision)
    trainer.fit(Net(bad=(1, 3)), batches())
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    steps = [int(line.split(",")[lines[0].split(",").index("step")]) for line in lines[1:]]
    assert sorted(set(steps)) == [1, 2, 3, 4]
    assert trainer.global_step == 4
    assert trainer.precision_plugin.skipped_steps == 2


@pytest.mark.parametrize("bad", [(), (1,), (3,)], ids=str)
def test_a_run_resumed_at_any_batch_is_bit_identical(
    bad: tuple[int, ...], quiet: dict[str, Any], tmp_path: Path
) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    def make(**arguments: Any) -> Trainer:
        return Trainer(**quiet, max_epochs=1, precision=MixedPrecision("16-mixed", scaler=grows()), **arguments)

    whole = Net(bad)
    first = make(callbacks=Saves())
    first.fit(whole, batches())
    for stop in (0, 1, 3, 4):
        module, trainer = Net(bad), make()
        trainer.fit(module, batches(), ckpt_path=tmp_path / f"{stop}.ckpt")
        assert torch.equal(module.layer.weight, whole.layer.weight)
        assert trainer.scaler.state_dict() == first.scaler.state_dict()
        assert trainer.precision_plugin.skipped_steps == len(bad)


def test_a_skipped_batch_needs_no_gradients_to_check(quiet: dict[str, Any]) -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    for own_step in (False, True):
        module = Skips()
        if own_step:
            module.optimizer_step = lambda e, i, optimizer, closure: optimizer.step(closure)  # type: ignore[method-assign]
        before = module.layer.weight.detach().clone()
        trainer = Trainer(**quiet, max_epochs=1, precision=MixedPrecision("16-mixed", scaler=grows()))
        trainer.fit(module, batches())
        assert trainer.precision_plugin.skipped_steps == 0
        assert trainer.global_step == trainer.state.updates == len(batches()) // 2
        assert not torch.equal(before, module.layer.weight)


def test_the_precision_computes_where_the_strategy_does() -> None:
    precision = MixedPrecision("16-mixed")
    assert precision.scaler is None
    strategy = SingleDevice("meta", precision)
    assert precision.device == "meta"
    assert strategy.precision.scaler is not None
    own = MixedPrecision("bf16-mixed", device="cuda")
    with pytest.raises(ValueError, match=r"device='cuda'\) cannot run on cpu, where.*float32\. Leave device"):
        Trainer(accelerator="cpu", precision=own)
    with pytest.raises(ValueError, match="device='cuda'"):
        Trainer(strategy=SingleDevice("cpu"), plugins=own)


def test_gradients_by_hand_are_those_of_a_backward_outside_of_autocast(quiet: dict[str, Any]) -> None:
    """Part of the forward is kept out of autocast; its backward, started inside a step, may not compute in 16 bits."""

    def forward(layers: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = layers[0](x)
        return layers[1](x).float().pow(2).mean()

    class Manual(TrainingModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(3)
            self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 1)])
            self.grads: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(forward(self.layers, batch))
            self.grads.append(self.layers[0].weight.grad.clone())
            self.zero_grad()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Manual()
    want = []
    for batch in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = forward(module.layers, batch)
        loss.backward()
        want.append(module.layers[0].weight.grad.clone())
        module.zero_grad()
    Trainer(**quiet, max_epochs=1, precision="bf16-mixed").fit(module, batches())
    assert all(torch.equal(a, b) for a, b in zip(module.grads, want, strict=True))


def test_a_device_with_its_number_is_a_kind_of_device() -> None:
    assert MixedPrecision("bf16-mixed", "cuda:0").device == "cuda"
    with MixedPrecision("bf16-mixed", "cpu").autocast_context_manager():
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()


def test_weights_in_16_bits_are_not_kept_for_the_whole_step_if_they_are_sharded(quiet: dict[str, Any]) -> None:
    class Looks(TrainingModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.keeps = torch.is_autocast_cache_enabled()
            return self.layer(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def keeps(strategy: str, precision: Any) -> bool:
        module = Looks()
        Trainer(**quiet, max_steps=1, devices=1, precision=precision, strategy=strategy).fit(module, batches())
        return module.keeps

    assert keeps("auto", "bf16-mixed")
    assert not keeps("fsdp", "bf16-mixed")
    assert keeps("fsdp", MixedPrecision("bf16-mixed", cache=True))

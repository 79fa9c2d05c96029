"""Both doors on one device of any kind: ``PACELINE_TEST_DEVICE=tpu`` names it, the CPU is the default."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, Trainer, TrainingModule, seed_everything
from paceline.callbacks import Callback, DeviceStatsMonitor, ModelCheckpoint, ThroughputMonitor
from paceline.loggers import CSVLogger
from paceline.processes import process_group

KIND = os.environ.get("PACELINE_TEST_DEVICE", "cpu")
QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
#: Sums are added in another order than on the CPU.
CLOSE: Any = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Later tests fork ranks of their own."""
    yield
    process_group.leave()


def loader(batches: int = 6, size: int = 8) -> DataLoader:
    torch.manual_seed(7)
    x = torch.randn(batches * size, 12)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(dim=1)), batch_size=size)


class Module(TrainingModule):
    """A classifier; keeps the losses of its steps."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        #: RMSNorm, because TorchTPU 0.2.0 fails with LayerNorm under autocast.
        self.net = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.RMSNorm(32), nn.Dropout(dropout), nn.Linear(32, 3))
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        assert x.device.type == self.device.type
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.detach())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_accuracy", (self.net(x).argmax(dim=1) == y).float().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}


def fit(kind: str, module: Module | None = None, ckpt_path: Any = None, **options: Any) -> tuple[Module, Trainer]:
    module = Module() if module is None else module
    trainer = Trainer(**{"accelerator": kind, "devices": 1, "max_epochs": 2, **QUIET, **options})
    seed_everything(11, verbose=False)
    trainer.fit(module, loader(), loader(2), ckpt_path=ckpt_path)
    return module, trainer


def losses(module: Module) -> Tensor:
    return torch.stack(module.losses).cpu()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"strategy": "ddp"},
        {"strategy": "fsdp", "gradient_clip_val": 0.1},
    ],
    ids=["plain", "accumulated and clipped", "clipped by value", "ddp", "fsdp"],
)
def test_the_losses_are_those_of_the_cpu(options: dict[str, Any]) -> None:
    expected, _ = fit("cpu", **{name: value for name, value in options.items() if name != "strategy"})
    module, trainer = fit(KIND, **options)
    assert len(expected.losses) == 12
    assert trainer.strategy.root_device.type == KIND
    torch.testing.assert_close(losses(module), losses(expected), **CLOSE)
    torch.testing.assert_close(trainer.callback_metrics["train_loss"].cpu(), losses(expected)[6:].mean(), **CLOSE)


def test_half_precision_trains_in_bfloat16_and_keeps_whole_weights() -> None:
    class Seen(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert self.net(batch[0]).dtype is torch.bfloat16
            return super().training_step(batch, batch_idx)

    module, _ = fit(KIND, Seen(), precision="bf16-mixed")
    expected, _ = fit("cpu", precision="bf16-mixed")
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    torch.testing.assert_close(losses(module).float(), losses(expected).float(), rtol=0.05, atol=0.02)


def test_a_compiled_module_has_the_same_losses() -> None:
    expected, _ = fit("cpu")
    module = Module()
    module.net.compile(**({} if KIND != "cpu" else {"backend": "eager"}))
    fit(KIND, module)
    torch.testing.assert_close(losses(module), losses(expected), **CLOSE)


class Stop(Callback):
    """Ends the process's run after a step, as a kill would: nothing after it is done."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 8:
            raise KeyboardInterrupt


def test_a_resumed_run_with_dropout_ends_with_the_same_weights_to_the_bit(tmp_path: Path) -> None:
    whole, _ = fit(KIND, Module(dropout=0.3))
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    first = Module(dropout=0.3)
    trainer = Trainer(accelerator=KIND, devices=1, max_epochs=2, callbacks=[Stop(), keep], **QUIET)
    seed_everything(11, verbose=False)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(first, loader(), loader(2))
    (file,) = tmp_path.glob("*step=4*.ckpt")
    again = Module(dropout=0.3)
    seed_everything(99, verbose=False)
    trainer = Trainer(accelerator=KIND, devices=1, max_epochs=2, callbacks=[keep], **QUIET)
    trainer.fit(again, loader(), loader(2), ckpt_path=file)
    assert torch.equal(losses(again), losses(whole)[4:])
    for one, other in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_of_the_device_is_read_on_the_cpu_and_back(tmp_path: Path) -> None:
    module, trainer = fit(KIND)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    for kind in ("cpu", KIND):
        read, _ = fit(kind, Module(), ckpt_path=tmp_path / "x.ckpt", max_epochs=3)
        assert len(read.losses) == 6
    state = torch.load(tmp_path / "x.ckpt", map_location="cpu", weights_only=True)["state_dict"]
    for name, value in module.state_dict().items():
        assert torch.equal(state[name], value.cpu()), name


def test_evaluation_prediction_and_monitors_run(tmp_path: Path) -> None:
    callbacks: list[Callback] = [DeviceStatsMonitor(), ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]))]
    module, trainer = fit(KIND, callbacks=callbacks, logger=CSVLogger(tmp_path), log_every_n_steps=2)
    (metrics,) = trainer.validate(module, loader(2), verbose=False)
    assert metrics["val_accuracy"] == pytest.approx(float(trainer.callback_metrics["val_accuracy"]))
    predictions = trainer.predict(module, loader(2))
    assert predictions is not None
    assert [tuple(one.shape) for one in predictions] == [(8, 3), (8, 3)]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_an_own_loop_trains_saves_and_goes_on(precision: str, tmp_path: Path) -> None:
    def start() -> tuple[Accelerator, Any, Any, Any]:
        accelerator = Accelerator(cpu=KIND == "cpu", mixed_precision=precision, gradient_accumulation_steps=2)
        assert accelerator.device.type == KIND
        net = Module(dropout=0.2).net
        return accelerator, *accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01), loader())

    def epoch(accelerator: Accelerator, net: Any, optimizer: Any, data: Any) -> list[Tensor]:
        seen = []
        for x, y in data:
            with accelerator.accumulate(net):
                loss = nn.functional.cross_entropy(net(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            seen.append(accelerator.gather_for_metrics(loss.detach()))
        return seen

    seed_everything(5, verbose=False)
    run = start()
    epoch(*run)
    run[0].save_state(tmp_path / "state")
    expected = epoch(*run)
    weights = copy.deepcopy({k: v.cpu() for k, v in run[0].unwrap_model(run[1]).state_dict().items()})
    seed_everything(50, verbose=False)
    again = start()
    again[0].load_state(tmp_path / "state")
    seen = epoch(*again)
    assert torch.equal(torch.stack(seen).cpu(), torch.stack(expected).cpu())
    for name, value in again[0].unwrap_model(again[1]).state_dict().items():
        assert torch.equal(value.cpu(), weights[name]), name

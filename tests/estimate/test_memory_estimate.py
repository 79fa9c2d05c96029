"""What is said about a training's memory before it runs, against what the training then takes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline import TrainingModule
from paceline.estimate.memory_estimate import estimate_memory, largest_layer
from paceline.strategies import DDPStrategy, FSDPStrategy

MB = 2**20


class Net(TrainingModule):
    """Blocks of two layers, 16 MB of weights; a batch of 512 rows keeps about as much for backward."""

    def __init__(self, width: int = 512, depth: int = 8, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(depth)
        )
        self.kind = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch
        for block in self.blocks:
            x = x + block(x)
        loss = F.mse_loss(x, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return getattr(torch.optim, self.kind)(self.parameters(), lr=0.001)


WEIGHTS = sum(4 * p.numel() for p in Net().parameters())


def test_the_lasting_parts_are_exact() -> None:
    found = estimate_memory(Net(), torch.empty(512, 512))
    assert (found.weights, found.gradients) == (WEIGHTS, WEIGHTS)
    assert found.optimizer == 2 * WEIGHTS + 4 * 32  # two moments, and a step of 4 bytes for each of 32 parameters
    assert found.batch_size == 512
    # Each block keeps its input, and the output of its first layer before and after GELU: 1 MB each; and the batch.
    assert 24 * MB <= found.activations <= 30 * MB  # type: ignore[operator]
    assert found.training_phase == "backward"
    assert sum(found.training_at_peak.values()) == found.training
    assert WEIGHTS < found.inference < found.training  # type: ignore[operator]


def test_the_optimizer_and_the_precision_change_what_they_change_in_a_training() -> None:
    batch = torch.empty(512, 512)
    full, sgd = estimate_memory(Net(), batch), estimate_memory(Net(optimizer="SGD"), batch)
    assert sgd.optimizer == 0
    assert full.training - sgd.training == full.optimizer
    assert estimate_memory(Net(), batch, optimizer="sgd").training == sgd.training
    true = estimate_memory(Net(), batch, precision="bf16-true")
    assert (true.weights, true.activations) == (full.weights // 2, full.activations // 2)  # type: ignore[operator]
    mixed = estimate_memory(Net(), batch, precision="bf16-mixed")
    assert mixed.weights == full.weights
    same = estimate_memory(Net(), batch, precision="16-mixed")
    assert same.training == mixed.training


def test_activation_checkpointing_and_a_smaller_batch_shrink_the_activations() -> None:
    full = estimate_memory(Net(), torch.empty(2048, 512))
    recomputed = estimate_memory(Net(), torch.empty(2048, 512), activation_checkpointing=True)
    assert recomputed.activations < 0.5 * full.activations  # type: ignore[operator]
    assert recomputed.training < full.training - 40 * MB
    small = estimate_memory(Net(), torch.empty(1024, 512))
    assert small.activations == pytest.approx(full.activations / 2, rel=0.05)  # type: ignore[operator]


def test_accumulation_keeps_gradients_while_a_micro_batch_runs() -> None:
    batch = torch.empty(2048, 512)
    one, two = (estimate_memory(Net(), batch, accumulate_grad_batches=number) for number in (1, 2))
    assert two.training - one.training == pytest.approx(WEIGHTS, rel=0.1)


def test_ddp_has_buckets_and_fsdp_parts() -> None:
    batch = torch.empty(512, 512)
    alone = estimate_memory(Net(), batch)
    ddp = estimate_memory(Net(), batch, strategy="ddp", num_processes=2)
    assert ddp.training - alone.training == WEIGHTS
    views = estimate_memory(Net(), batch, strategy=DDPStrategy(gradient_as_bucket_view=True), num_processes=2)
    assert alone.training < views.training < ddp.training
    for processes in (2, 4):
        fsdp = estimate_memory(Net(), batch, strategy="fsdp", num_processes=processes)
        assert fsdp.weights == WEIGHTS // processes
        assert fsdp.gradients == WEIGHTS // processes
        assert fsdp.training < alone.training
        assert fsdp.training_at_peak["gathered"] > 0
    kept = estimate_memory(Net(), batch, strategy=FSDPStrategy(sharding="grad_op"), num_processes=4)
    assert kept.training > fsdp.training  # gathered weights stay from forward to backward
    offloaded = estimate_memory(Net(), batch, strategy="fsdp_cpu_offload", num_processes=4)
    assert offloaded.host == fsdp.weights + fsdp.gradients + fsdp.optimizer
    assert offloaded.training < fsdp.training
    assert not torch.distributed.is_initialized()


def test_what_is_estimated_stays_as_it_is_and_nothing_takes_memory() -> None:
    module = Net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    estimate_memory(module, torch.empty(4, 512), strategy="fsdp", num_processes=2)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module._trainer is None
    with torch.device("meta"):
        huge = Net(width=32768, depth=8)  # 69 GB
        batch = torch.empty(100_000, 32768)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert estimate_memory(huge, batch).training > 300 * 10**9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 200 * 1024


def test_a_plain_module_is_trained_on_its_own_loss_or_a_given_one() -> None:
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    own = estimate_memory(net, torch.empty(4096, 256))
    given = estimate_memory(net, torch.empty(4096, 256), loss=lambda module, batch: module(batch).sum())
    assert own.weights == given.weights == 4 * 2 * (256 * 256 + 256)
    assert own.activations == pytest.approx(given.activations, rel=0.01)
    alone = estimate_memory(net)
    assert alone.activations is alone.inference is None
    assert alone.training >= own.weights + own.gradients + own.optimizer
    assert estimate_memory(net, strategy="fsdp", num_processes=2).weights == own.weights // 2


def test_a_step_that_reads_values_is_guessed_and_one_that_cannot_run_says_why() -> None:
    class Reads(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * 2 if loss.item() > 0 else loss

    assert estimate_memory(Reads(), torch.empty(4, 512)).guessed
    assert not estimate_memory(Net(), torch.empty(4, 512)).guessed

    class Chooses(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch[batch.sum(1) > 0], batch_idx)

    with pytest.raises(RuntimeError, match=r"a step of Chooses needs cannot be estimated.*Leave out the batch"):
        estimate_memory(Chooses(), torch.empty(4, 512))


def test_manual_optimization_is_followed() -> None:
    class ByHand(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()

    by_hand, alone = estimate_memory(ByHand(), torch.empty(512, 512)), estimate_memory(Net(), torch.empty(512, 512))
    assert by_hand.training == pytest.approx(alone.training, rel=0.02)
    assert by_hand.optimizer == alone.optimizer


def test_a_modules_own_backward_and_clipping_run() -> None:
    class Own(Net):
        called: ClassVar[list[str]] = []

        def backward(self, loss: torch.Tensor) -> None:
            self.called.append("backward")
            loss.backward()

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.called.append("clipping")
            self.clip_gradients(optimizer, gradient_clip_val=self.trainer.gradient_clip_val * 2)

    own, plain = Own(width=64), Net(width=64)
    found = estimate_memory(own, torch.empty(4, 64), accumulate_grad_batches=2)
    assert found == estimate_memory(plain, torch.empty(4, 64), accumulate_grad_batches=2)
    assert Own.called == ["backward", "backward", "clipping"] * 2

    class Detached(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx).detach()

    with pytest.raises(RuntimeError, match=r"Detached\.training_step returned a loss that does not require gradients"):
        estimate_memory(Detached(width=64), torch.empty(4, 64))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"strategy": "dpd"}, "Unknown strategy 'dpd'. Did you mean 'ddp'"),
        ({"strategy": "single_device", "num_processes": 2}, "contradict each other"),
        ({"optimizer": "adamv"}, "Unknown optimizer 'adamv'. Did you mean 'Adam"),
        ({"precision": "bf17"}, "Unknown precision 'bf17'"),
    ],
)
def test_what_cannot_be_meant_is_an_error(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        estimate_memory(nn.Linear(4, 4), torch.empty(1, 4), **arguments)


def test_the_largest_layer_is_a_block_where_blocks_have_numbers() -> None:
    sizes = {"embed.weight": 9, "blocks.0.a.weight": 5, "blocks.0.b.weight": 5, "blocks.1.a.weight": 5, "scale": 1}
    assert largest_layer(sizes) == ("blocks.0", 10)
    assert largest_layer({}) == ("", 0)


# ---- against what is measured ----------------------------------------------------------------------------------------

PROGRAM = """
import gc, json, sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_memory_estimate import Net
from paceline import Trainer
torch.set_num_threads(1)

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1024

def fit(width, rows):
    trainer = Trainer(max_steps=2, max_epochs=-1, accelerator="cpu", precision=sys.argv[2], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Net(width), torch.utils.data.DataLoader(torch.zeros(2 * rows, width), rows))

fit(8, 2)
gc.collect()
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
fit(1024, 1024)
print(json.dumps(resident("VmHWM") - before))
"""


@pytest.mark.cold
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_c16_the_estimate_is_near_what_a_training_takes(precision: str) -> None:
    rows = 1024
    said = estimate_memory(Net(1024), torch.empty(rows, 1024), precision=precision).training / MB
    data = 2 * rows * 1024 * 4 / MB  # the data set itself
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, os.path.dirname(__file__), precision]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    took = json.loads(done.stdout.splitlines()[-1]) - data
    assert said > 250
    assert said == pytest.approx(took, rel=0.15)

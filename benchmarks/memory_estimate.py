"""What ``estimate_memory`` says before a training, against the memory the training then takes on the CPU.

    python benchmarks/memory_estimate.py              # about six minutes
    python benchmarks/memory_estimate.py --only convolutions

Measured: the highest resident memory (VmHWM) of a fresh process while ``Trainer.fit`` runs three steps, from the
building of the model on, less its resident memory before. A fit of a tiny model comes first, so that what torch loads
and keeps is there already; then the peak is set back. glibc is told to give back at once what is freed (blocks from
1 MB on): with its own settings it keeps up to 32 MB of each size for later, which is memory of the process and none of
the training. With several processes each is looked at, and the largest counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import example, machine, progress, quiet_environment, rss_mb, table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from paceline import Trainer, TrainingModule
from paceline.estimate.memory_estimate import estimate_memory

MB = 2**20
STEPS = 3


class Case(NamedTuple):
    """One training."""

    model: str
    strategy: str
    processes: int
    precision: str
    batch_size: int
    activation_checkpointing: bool = False


CASES = [
    *(Case("transformer", "single_device", 1, "32-true", size) for size in (4, 16, 32)),
    *(Case("transformer", "single_device", 1, "bf16-mixed", size) for size in (4, 16)),
    Case("transformer", "single_device", 1, "bf16-true", 16),
    *(Case("transformer", strategy, 2, "32-true", size) for strategy in ("ddp", "fsdp") for size in (4, 16)),
    Case("transformer", "fsdp", 2, "bf16-mixed", 4),
    Case("transformer", "fsdp", 2, "32-true", 16, activation_checkpointing=True),
    *(Case("convolutions", "single_device", 1, "32-true", size) for size in (16, 64)),
    Case("convolutions", "single_device", 1, "bf16-mixed", 64),
    Case("convolutions", "ddp", 2, "32-true", 32),
]


class Convolutions(TrainingModule):
    """A residual net on images of 64 x 64."""

    def __init__(self, width: int, depth: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
            )
            for _ in range(depth)
        )  # fmt: skip
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        x = self.first(images)
        for block in self.blocks:
            x = F.relu(x + block(x))
        loss = F.cross_entropy(self.head(x.mean((2, 3))), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Samples(Dataset):
    """The same sample over and over."""

    def __init__(self, sample: tuple[Tensor, ...], count: int) -> None:
        self.sample, self.count = sample, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        return self.sample


def transformer(large: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model of examples/02_language_model.py, 57 million parameters, and a sample."""
    script = example("02_language_model")
    text = torch.ones(script.CONTEXT + 1, dtype=torch.uint8)
    return script.LanguageModel(dim=768 if large else 32, depth=8 if large else 2), (text,)


def convolutions(large: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A convolutional net, 0.9 million parameters, and a sample."""
    return Convolutions(96 if large else 8), (torch.zeros(3, 64, 64), torch.tensor(1))


MODELS = {"transformer": transformer, "convolutions": convolutions}


def fit(case: Case, large: bool) -> Trainer:
    """Train for real."""
    from paceline.strategies import FSDPStrategy

    module, sample = MODELS[case.model](large)
    strategy = FSDPStrategy(activation_checkpointing=True) if case.activation_checkpointing else case.strategy
    trainer = Trainer(
        max_steps=STEPS,
        max_epochs=-1,
        accelerator="cpu",
        devices=case.processes,
        strategy=strategy,
        precision=case.precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    size = case.batch_size if large else 2
    trainer.fit(module, DataLoader(Samples(sample, STEPS * size * case.processes), batch_size=size))
    return trainer


def child(case: Case, out: str) -> None:
    """Measure, and write megabytes to a file a process."""
    torch.set_num_threads(1)
    fit(case, large=False)
    gc.collect()
    before = rss_mb()
    Path("/proc/self/clear_refs").write_text("5")
    trainer = fit(case, large=True)
    Path(out, str(trainer.global_rank)).write_text(str(rss_mb("VmHWM") - before))


def measured(case: Case) -> float:
    """Megabytes of the training, in fresh processes."""
    environment = {**quiet_environment(), "MALLOC_MMAP_THRESHOLD_": str(MB), "MALLOC_TRIM_THRESHOLD_": str(MB)}
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, __file__, "--child", json.dumps(case), out]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        found = [float(file.read_text()) for file in Path(out).iterdir()]
    if done.returncode or len(found) != case.processes:
        raise RuntimeError(done.stderr[-2000:])
    return max(found)


def estimated(case: Case) -> float:
    """Megabytes, without training."""
    module, sample = MODELS[case.model](large=True)
    batch = tuple(torch.stack([value] * case.batch_size) for value in sample)
    found = estimate_memory(
        module,
        batch,
        strategy=case.strategy,
        num_processes=case.processes,
        precision=case.precision,
        activation_checkpointing=case.activation_checkpointing or None,
    )
    return found.training / MB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MODELS))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(Case(*json.loads(args.child[0])), args.child[1])
        sys.stdout.flush()
        os._exit(0)
    rows = []
    for case in CASES:
        if args.only in (None, case.model):
            said, took = estimated(case), measured(case)
            what = f"{case.strategy} x{case.processes}" if case.processes > 1 else "one process"
            what += ", checkpointing" if case.activation_checkpointing else ""
            rows.append([case.model, what, case.precision, case.batch_size, said, took, f"{said / took:.3f}"])
            progress(" ".join(map(str, rows[-1])))
    print(machine(), end="\n\n")
    header = ["", "strategy", "precision", "batch", "estimated, MB", "measured, MB", "ratio"]
    print(table(header, rows))
    ratios = [float(row[-1]) for row in rows]
    print(f"\nRatios from {min(ratios):.3f} to {max(ratios):.3f}.")


if __name__ == "__main__":
    main()

"""One program, every strategy: the command line chooses how the work is spread, the losses stay the same.

    python examples/05_every_strategy.py                                   # one process
    python examples/05_every_strategy.py --strategy ddp --devices 2        # two copies of the model
    python examples/05_every_strategy.py --strategy fsdp --devices 2       # one model in two parts
    python examples/05_every_strategy.py --pipeline-parallel 2 --devices 2 # its layers on two processes
    python examples/05_every_strategy.py --tensor-parallel 2 --devices 2   # each of its layers on two processes
    torchrun --nproc-per-node 2 examples/05_every_strategy.py --strategy fsdp

``--model cnn`` trains a convolutional network (batch norm over all processes' pictures), ``--model transformer`` one
that reads a picture row by row. Processes share each batch of 64, so every command prints the same curve, up to
rounding.

Needs scikit-learn (for the 1,797 images it ships): pip install ".[examples]".
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from paceline import Callback, DataModule, Trainer, TrainingModule, seed_everything
from paceline.loggers import TensorBoardLogger
from paceline.strategies import ModelParallelStrategy

CLASSES, BATCH, ROWS, HEADS = 10, 64, 8, 4


class Digits(DataModule):
    """Images of 8 x 8 gray values in [0, 1]. Every process gets its part of ``batch_size * processes``."""

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        data = TensorDataset(
            torch.tensor(images, dtype=torch.float32).view(-1, 1, ROWS, ROWS) / 16, torch.tensor(labels)
        )
        self.train, self.val = random_split(data, [1408, 389], torch.Generator().manual_seed(0))
        self.batch_size = BATCH // self.trainer.strategy.num_data_ranks

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            f(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.fc2(F.gelu(self.fc1(self.mlp_norm(x))))


class Transformer(nn.Module):
    """Reads the rows of a picture as a sentence."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(ROWS, width)
        self.positions = nn.Parameter(torch.randn(ROWS, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.embed(pictures.squeeze(1)) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def cnn(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8 * width, CLASSES),
    )  # fmt: skip


class Classifier(TrainingModule):
    def __init__(self, model: str) -> None:
        super().__init__()
        self.net = cnn() if model == "cnn" else Transformer()

    def loss(self, batch: Any) -> Tensor:
        pictures, labels = batch
        return F.cross_entropy(self.net(pictures), labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, eps=1e-5)


class Curve(Callback):
    """Prints the losses of every epoch."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        train, val = (float(trainer.callback_metrics[name]) for name in ("train_loss", "val_loss"))
        trainer.print(f"epoch {trainer.current_epoch + 1}: training loss {train:.5f}, validation loss {val:.5f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["cnn", "transformer"], default="transformer")
    parser.add_argument(
        "--strategy", default="auto", help="any name: ddp, ddp_spawn, fsdp, hybrid_shard, deepspeed, ..."
    )
    parser.add_argument("--devices", default="auto", help="processes on this machine")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="processes that share each layer")
    parser.add_argument("--pipeline-parallel", type=int, default=1, help="processes that hold successive layers")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--fast", action="store_true", help="two batches, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("runs/every_strategy"))
    args = parser.parse_args()

    strategy: Any = args.strategy
    if args.tensor_parallel * args.pipeline_parallel > 1:
        strategy = ModelParallelStrategy(tensor_parallel=args.tensor_parallel, pipeline_parallel=args.pipeline_parallel)
    seed_everything(0, verbose=False)
    trainer = Trainer(
        strategy=strategy,
        devices=args.devices,
        num_nodes=args.num_nodes,
        accelerator=args.accelerator,
        precision=args.precision,
        sync_batchnorm=True,
        max_epochs=1 if args.fast else args.epochs,
        limit_train_batches=2 if args.fast else None,
        limit_val_batches=2 if args.fast else None,
        num_sanity_val_steps=0,
        logger=TensorBoardLogger(args.out, name=f"{args.model}-{args.strategy}"),
        callbacks=[Curve()],
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(args.model), datamodule=Digits())
    trainer.print(f"{type(trainer.strategy).__name__} on {trainer.world_size} process(es): {trainer.global_step} steps")


if __name__ == "__main__":
    main()

"""A small language model, byte by byte, on text that every machine has: the source of Python's standard library.

    python examples/02_language_model.py              # about three minutes on a CPU; ends by writing some Python
    python examples/02_language_model.py --steps 2000

Shows bf16-mixed precision, accumulation that weighs every byte the same however windows are filled (``num_items``), and
a cosine schedule with warm-up.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from paceline import Trainer, TrainingModule, seed_everything
from paceline.callbacks import LearningRateMonitor
from paceline.loggers import TensorBoardLogger

CONTEXT = 96
NOTHING = 0  # the byte behind the end of a file, which no source has: no loss there


def corpus() -> list[Subset]:
    """Windows of the library's files, (CONTEXT + 1,) uint8, each file's last one padded; 95 % are to train on."""
    windows: list[Tensor] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        windows += text.split(CONTEXT + 1)
    data = TensorDataset(nn.utils.rnn.pad_sequence(windows, batch_first=True, padding_value=NOTHING))
    return random_split(data, [0.95, 0.05], torch.Generator().manual_seed(0))


def num_bytes(batch: Any) -> Tensor:
    """How many bytes of a batch the model has to predict, ()."""
    return (batch[0][:, 1:] != NOTHING).sum()


class Block(nn.Module):
    """Attention to what came before, then a small network, each added to its input."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, dim // self.heads)
        attended = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.norm_mlp(x))


class LanguageModel(TrainingModule):
    def __init__(self, dim: int = 96, depth: int = 3, lr: float = 3e-3, warmup_steps: int = 50) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed, self.position = nn.Embedding(256, dim), nn.Embedding(CONTEXT, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads=2) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 256))

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the next byte, (batch, length, 256), for bytes (batch, length)."""
        positions = torch.arange(text.shape[1], device=text.device)
        return self.head(self.blocks(self.embed(text) + self.position(positions)))

    def loss(self, batch: Any) -> Tensor:
        text = batch[0].long()
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten(), ignore_index=NOTHING)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return {"loss": loss, "num_items": num_bytes(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, batch_size=int(num_bytes(batch)))

    def configure_optimizers(self) -> dict[str, Any]:
        warmup, total = self.hparams["warmup_steps"], int(self.trainer.estimated_stepping_batches)

        def factor(step: int) -> float:
            done = (step - warmup) / max(1, total - warmup)
            return (step + 1) / (warmup + 1) if step < warmup else 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def write(self, beginning: str, length: int = 300, temperature: float = 0.7) -> str:
        """Go on with a text, one byte after the other."""
        text = torch.tensor([list(beginning.encode())], device=self.device)
        for _ in range(length):
            logits = self(text[:, -CONTEXT:])[:, -1].float() / temperature
            text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/language_model"), help="folder for log and checkpoint")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps, each over 2 batches of 32 windows")
    parser.add_argument("--fast", action="store_true", help="a few batches only, to see that it works")
    args = parser.parse_args()

    seed_everything(1)
    train, val = corpus()
    model = LanguageModel(dim=32, depth=1) if args.fast else LanguageModel()
    trainer = Trainer(
        max_steps=3 if args.fast else args.steps,
        max_epochs=-1,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=4 if args.fast else 300,
        check_val_every_n_epoch=None,
        limit_val_batches=2 if args.fast else 10,
        callbacks=LearningRateMonitor("step"),
        logger=TensorBoardLogger(args.out, name="log"),
        log_every_n_steps=1 if args.fast else 10,
    )
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True, drop_last=True), DataLoader(val, batch_size=64))
    loss = trainer.validate(model, DataLoader(val, batch_size=64))[0]["val_loss"]
    print(f"validation: {loss / math.log(2):.2f} bits a byte\n\n{model.eval().write('def ', 20 if args.fast else 300)}")


if __name__ == "__main__":
    main()

"""A ``transformers`` model as the module's network: which package of the standard library does a snippet come from?

    python examples/04_finetune_transformers.py      # about a minute on a CPU

The network is made from a config, so nothing is downloaded. To fine-tune published weights, replace the one line that
makes it with these two, and the words by the tokenizer of the model:

    self.net = AutoModelForSequenceClassification.from_pretrained(name, num_labels=len(PACKAGES), dtype=torch.float32)
    self.net.train()

``from_pretrained`` returns a model in eval mode, which a fit does not change. It keeps the dtype of the files, usually
bfloat16, in which small updates are lost. For a model other than BERT, ``self.net.bert`` in ``configure_optimizers`` is
``self.net.base_model``. docs/data.md shows the data with the package datasets.

Needs transformers: pip install ".[examples]".
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForSequenceClassification

from paceline import Trainer, TrainingModule, seed_everything
from paceline.callbacks import EarlyStopping, ModelCheckpoint
from paceline.loggers import TensorBoardLogger

PACKAGES = ("asyncio", "email", "logging", "multiprocessing", "unittest", "xml")
LENGTH = 48  # words a snippet
WORDS = 2000  # words the model knows; token 0 is padding, 1 any other word


def read(validation: bool) -> list[tuple[list[str], int]]:
    """Snippets, as lists of words, with their package's number. Every fifth file is kept for validation."""
    snippets = []
    for label, package in enumerate(PACKAGES):
        for i, file in enumerate(sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py"))):
            if (i % 5 == 4) == validation:
                words = re.findall("[a-z]+", file.read_text(encoding="utf-8", errors="replace").lower())
                snippets += [(words[k : k + LENGTH], label) for k in range(0, len(words), LENGTH)]
    return snippets


class Snippets(Dataset):
    """Snippets as a model of ``transformers`` takes them."""

    def __init__(self, snippets: list[tuple[list[str], int]], tokens: dict[str, int]) -> None:
        self.snippets, self.tokens = snippets, tokens

    def __len__(self) -> int:
        return len(self.snippets)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        words, label = self.snippets[i]
        ids = torch.zeros(LENGTH, dtype=torch.long)
        ids[: len(words)] = torch.tensor([self.tokens.get(word, 1) for word in words])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor(label)}


class SnippetClassifier(TrainingModule):
    def __init__(self, hidden: int = 96, layers: int = 2, lr: float = 5e-4, head_lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = BertConfig(
            vocab_size=WORDS + 2, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
            intermediate_size=4 * hidden, max_position_embeddings=LENGTH, num_labels=len(PACKAGES), pad_token_id=0,
        )  # fmt: skip
        self.net = BertForSequenceClassification(config)
        self.accuracy = MulticlassAccuracy(len(PACKAGES), average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self.net(**batch)
        self.accuracy(output.logits, batch["labels"])
        self.log("val_loss", output.loss)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """The new head learns faster than the body, the usual setting for fine-tuning."""
        groups = [
            {"params": self.net.bert.parameters(), "lr": self.hparams["lr"]},
            {"params": self.net.classifier.parameters(), "lr": self.hparams["head_lr"]},
        ]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/transformers"), help="folder for log and checkpoint")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--fast", action="store_true", help="a few batches only, to see that it works")
    args = parser.parse_args()

    seed_everything(1)
    train, val = read(validation=False), read(validation=True)
    common = Counter(word for words, _ in train for word in words).most_common(WORDS)
    tokens = {word: token for token, (word, _) in enumerate(common, 2)}
    train_loader = DataLoader(Snippets(train, tokens), batch_size=64, shuffle=True)
    val_loader = DataLoader(Snippets(val, tokens), batch_size=256)
    model = SnippetClassifier(hidden=16, layers=1) if args.fast else SnippetClassifier()
    best = ModelCheckpoint(args.out / "checkpoints", monitor="val_loss")
    trainer = Trainer(
        max_epochs=1 if args.fast else args.epochs,
        limit_train_batches=3 if args.fast else None,
        limit_val_batches=2 if args.fast else None,
        gradient_clip_val=1.0,
        callbacks=[best, EarlyStopping("val_loss", patience=2)],
        logger=TensorBoardLogger(args.out, name="log"),
        log_every_n_steps=2 if args.fast else 20,
    )
    trainer.fit(model, train_loader, val_loader)
    accuracy = trainer.validate(model, val_loader, ckpt_path="best")[0]["val_accuracy"]
    print(f"{accuracy:.1%} of {len(val):,} snippets from files it never saw put in the right one of {len(PACKAGES)}")


if __name__ == "__main__":
    main()

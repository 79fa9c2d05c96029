"""What wrote the checkpoints in ``golden/``, which every later version has to read.

    PYTHONPATH=.. python tests/golden_files.py    # in the repository's root; overwrites them

They are written once per format, with a release, and stay as they are from then on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rank_processes import ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Callback, Trainer, TrainingModule
from paceline.callbacks import EarlyStopping
from paceline.strategies import FSDPStrategy

GOLDEN = Path(__file__).parent / "golden"
EPOCHS = 3
SAVED_STEP = 5  # one step into the second epoch


class Net(TrainingModule):
    """Two layers and a buffer, AdamW, a schedule."""

    seen: Tensor

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.layers = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen += 1
        loss = (self.layers(x) - y).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def loader(rank: int = 0, world: int = 1) -> DataLoader:
    """Four batches of four samples an epoch, of which each rank gets its share."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(16, 3, generator=generator)
    share = 4 // world
    order = [batch * 4 + rank * share + i for batch in range(4) for i in range(share)]
    return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=share, sampler=order)


def train(ckpt_path: Any = None, save: Path | None = None, strategy: Any = "auto", **settings: Any) -> Net:
    """Train to the end, perhaps from a checkpoint, and perhaps save one on the way."""

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if save is not None and trainer.global_step == SAVED_STEP:
                trainer.save_checkpoint(save)

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        callbacks=[EarlyStopping("loss_epoch", patience=10), Saves()],
        strategy=strategy,
        **settings,
    )
    module = Net()
    trainer.fit(module, loader(trainer.strategy.data_rank, trainer.strategy.num_data_ranks), ckpt_path=ckpt_path)
    return module


def main() -> None:
    """Write both."""
    torch.set_num_threads(1)
    train(save=GOLDEN / "single.ckpt")
    sharded = FSDPStrategy(state_dict_type="sharded")
    ranks(2, lambda: train(save=GOLDEN / "sharded.ckpt", strategy=sharded, devices=2) and None)


if __name__ == "__main__":
    main()

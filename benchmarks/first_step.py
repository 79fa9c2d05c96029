"""The shortest training in two processes, each way; ``distributed.py`` starts it and looks when the first step ends."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

#: Ways to write and start it.
WAYS = (
    "by hand, torchrun",
    "paceline, torchrun",
    "paceline, python",
    "lightning, torchrun",
    "lightning, python",
    "accelerate, torchrun",
)
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def command(way: str, folder: str) -> list[str]:
    """The command line; every rank writes the time its first step ends into a file ``stamp*`` in ``folder``."""
    who, _, how = way.partition(", ")
    return [sys.executable, *(TORCHRUN if how == "torchrun" else []), __file__, who, folder]


def stamp_first_step(folder: str) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    file = Path(folder, f"stamp{os.getpid()}")
    register_optimizer_step_post_hook(lambda *_: file.exists() or file.write_text(repr(time.time())))


def by_hand(batches: list) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def with_trainer(library, base: type, batches: list) -> None:
    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(32, 2)

        def training_step(self, batch, batch_idx):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    library.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", **off).fit(Module(), loader)


def with_accelerate(batches: list) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = nn.Linear(32, 2)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for batch in batches:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    import torch
    from torch import nn

    who = sys.argv[1]
    stamp_first_step(sys.argv[2])
    ready = [torch.ones(8, 32)] * 4
    if who == "paceline":
        import paceline

        with_trainer(paceline, paceline.TrainingModule, ready)
    elif who == "lightning":
        import pytorch_lightning

        with_trainer(pytorch_lightning, pytorch_lightning.LightningModule, ready)
    else:
        {"by hand": by_hand, "accelerate": with_accelerate}[who](ready)

"""A program of a user, with an annotation wherever strict type checkers ask for one. It is checked, not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline import Accelerator, Callback, DataModule, Trainer, TrainingModule, seed_everything
from paceline.callbacks import EarlyStopping, ModelCheckpoint
from paceline.loggers import CSVLogger, Logger
from paceline.strategies import DDPStrategy, DistributedStrategy

Batch = tuple[Tensor, Tensor]


class Net(TrainingModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"twice": 2 * loss, "rank": float(self.global_rank)})
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def on_train_epoch_end(self) -> None:
        print(self.current_epoch, self.trainer.global_step, self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Data(DataModule):
    def setup(self, stage: str) -> None:
        points = torch.randn(64, 8)
        self.data: Dataset[Any] = TensorDataset(points, points.sum(1, keepdim=True))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=8, shuffle=True)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [DataLoader(self.data, batch_size=8)]


class Count(Callback):
    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainingModule,
        outputs: Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self.batches += 1
        if trainer.is_global_zero and outputs is not None:
            pl_module.log("batches", self.batches)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        trainer.should_stop = self.batches > 100

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


class Lines(Logger):
    def __init__(self) -> None:
        self.lines: list[str] = []

    @property
    def name(self) -> str:
        return "lines"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.lines += [f"{step} {name} {value}" for name, value in metrics.items()]

    def log_hyperparams(
        self, params: Mapping[str, Any] | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        self.lines.append(str(params))


class AfterBackward(DistributedStrategy):
    synchronizes = True

    def wrap_for_training(self, module: nn.Module) -> nn.Module:
        self.same_model(module)
        for tensor in module.state_dict().values():
            tensor.copy_(self.broadcast_tensor(tensor))
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return module

    def sync_gradients(self, enabled: bool) -> None:
        self.synchronizes = enabled

    def backward(self, loss: Tensor, how: Any = None) -> None:
        super().backward(loss, how)
        for parameter in self.trained if self.synchronizes else []:
            if parameter.grad is not None:
                parameter.grad = self.reduce(parameter.grad, "mean")


def fit(strategy: str) -> dict[str, Tensor]:
    seed_everything(1)
    best = ModelCheckpoint(monitor="val_loss", save_last=True)
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy=AfterBackward() if strategy == "own" else DDPStrategy(find_unused_parameters=True),
        callbacks=[Count(), best, EarlyStopping("val_loss")],
        logger=[Lines(), CSVLogger("runs")],
        precision="bf16-mixed",
    )
    net = Net()
    trainer.fit(net, datamodule=Data(), ckpt_path="auto")
    print(best.best_model_path, trainer.validate(net, datamodule=Data())[0]["val_loss"])
    loaded = Net.load_from_checkpoint(best.best_model_path, width=8)
    outputs: list[Any] = trainer.predict(loaded, DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=4))
    return {name: value for name, value in trainer.callback_metrics.items() if outputs}


def loop(net: nn.Module, optimizer: Optimizer, loader: DataLoader[Any]) -> float:
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", log_with="tensorboard")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    accelerator.init_trackers("project", config={"lr": 0.1})
    total = 0.0
    for x, y in loader:
        with accelerator.accumulate(net):
            loss = nn.functional.mse_loss(net(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total += float(accelerator.gather_for_metrics(loss).mean())
    accelerator.log({"loss": total}, step=1)
    accelerator.save_state("state")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.save(accelerator.unwrap_model(net).state_dict(), "weights.pt")
    accelerator.end_training()
    return total

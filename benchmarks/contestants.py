"""The same training by hand, with Paceline and with its peers. Peers that are not installed are left out.

Each class has ``run(task)``, which builds everything, trains and returns the network. Configurations:

off          everything optional switched off
log          off, and the loss logged every step
metric       off, and a torchmetrics metric updated every step, its epoch value logged
accumulate   off, an optimizer step every 4 batches
manual       the user's step runs backward and the optimizer itself (a hand-written loop does nothing else)
validate     the evaluation loop, with the mean loss
predict      the outputs for every batch, kept
realistic    three values logged every step, sent to TensorBoard every 50 steps; a progress bar; a checkpoint at the end
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any, ClassVar

import torch
from measuring import LOG_EVERY, Batches, Net, Task, sgd
from torch import Tensor, nn
from torch.nn.functional import mse_loss

#: Three values a step. One tensor under three names: what is timed is the logging, not the arithmetic behind a value.
LOGGED = ("train_loss", "train_loss_a", "train_loss_b")


class Contestant:
    module: ClassVar[str] = "torch"
    configs: ClassVar[tuple[str, ...]] = ("off", "accumulate", "validate", "predict", "realistic")

    @classmethod
    def available(cls) -> bool:
        return importlib.util.find_spec(cls.module) is not None

    def run(self, task: Task) -> nn.Module:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.train(task, Net(task), Batches(task), Path(folder))

    def train(self, task: Task, net: Net, batches: Batches, folder: Path) -> nn.Module:
        raise NotImplementedError


class Raw(Contestant):
    """By hand: nothing but the work, and for each configuration what a careful person would write for it."""

    configs = ("off", "log", "metric", "accumulate", "validate", "predict", "realistic")

    def train(self, task: Task, net: Net, batches: Batches, folder: Path) -> nn.Module:
        loop = getattr(self, task.config)
        if task.config in ("validate", "predict"):
            loop(net.eval(), batches)
        else:
            loop(net.train(), sgd(net), batches, task, folder)
        return net

    def off(self, net: Net, optimizer: Any, batches: Batches, *_: Any) -> None:
        for x, y in batches:
            loss = mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def log(self, net: Net, optimizer: Any, batches: Batches, *_: Any) -> None:
        logged = {}
        for x, y in batches:
            loss = mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            logged["train_loss"] = loss.detach()

    def metric(self, net: Net, optimizer: Any, batches: Batches, *_: Any) -> None:
        metric = mean_squared_error()
        for x, y in batches:
            guess = net(x)
            loss = mse_loss(guess, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            metric.update(guess.detach(), y)
        metric.compute().item()

    def accumulate(self, net: Net, optimizer: Any, batches: Batches, task: Task, _: Path) -> None:
        last = len(batches)
        for i, (x, y) in enumerate(batches, 1):
            (mse_loss(net(x), y) / task.accumulate).backward()
            if i % task.accumulate == 0 or i == last:
                optimizer.step()
                optimizer.zero_grad()

    def validate(self, net: Net, batches: Batches) -> None:
        total, count = torch.zeros(()), 0
        with torch.inference_mode():
            for x, y in batches:
                total += mse_loss(net(x), y) * len(x)
                count += len(x)
        (total / count).item()

    def predict(self, net: Net, batches: Batches) -> None:
        with torch.inference_mode():
            kept = [net(x) for x, _ in batches]
        del kept

    def realistic(self, net: Net, optimizer: Any, batches: Batches, _: Task, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        writer, logged = SummaryWriter(folder), {}
        bar = tqdm(batches, total=len(batches))
        for step, (x, y) in enumerate(bar, 1):
            loss = mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for name in LOGGED:
                logged[name] = loss.detach()
            if step % LOG_EVERY == 0:
                for name, value in logged.items():
                    writer.add_scalar(name, value.item(), step)
                bar.set_postfix(loss=loss.item(), refresh=False)
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, folder / "last.ckpt")
        writer.close()


def mean_squared_error() -> Any:
    import torchmetrics

    return torchmetrics.MeanSquaredError()


class LightningLike(Contestant):
    """Paceline and Lightning: the same program, but for the name of the module class."""

    base: ClassVar[str]
    configs = (*Raw.configs, "manual")

    def library(self) -> Any:
        for room in ("callbacks", "loggers"):
            importlib.import_module(f"{self.module}.{room}")
        return importlib.import_module(self.module)

    def train(self, task: Task, net: Net, batches: Batches, folder: Path) -> nn.Module:
        library = self.library()
        module = user_module(getattr(library, self.base), task.config)(net)
        trainer = library.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            accumulate_grad_batches=task.accumulate,
            log_every_n_steps=LOG_EVERY,
            enable_model_summary=False,
            **self.extras(library, task, folder),
        )
        if task.config == "validate":
            trainer.validate(module, batches, verbose=False)
        elif task.config == "predict":
            trainer.predict(module, batches)
        else:
            trainer.fit(module, batches)
        return net

    def extras(self, library: Any, task: Task, folder: Path) -> dict[str, Any]:
        if task.config == "realistic":
            callbacks = [library.callbacks.ModelCheckpoint(folder), library.callbacks.TQDMProgressBar()]
            return {"logger": library.loggers.TensorBoardLogger(folder), "callbacks": callbacks}
        return {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}


def user_module(base: type, config: str) -> type:
    """What a user of Paceline or Lightning writes for a configuration."""

    class Plain(base):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return mse_loss(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return sgd(self)

    return type("Written", (WRITTEN[config], Plain), {}) if config in WRITTEN else Plain


class LogsOne:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss


class LogsThree:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self.net(x), y)
        self.log(LOGGED[0], loss, prog_bar=True)
        self.log(LOGGED[1], loss)
        self.log(LOGGED[2], loss)
        return loss


class LogsMetric:
    def __init__(self: Any, net: nn.Module) -> None:
        super().__init__(net)
        self.metric = mean_squared_error()

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        guess = self.net(x)
        self.metric.update(guess.detach(), y)
        self.log("mse", self.metric, on_step=False, on_epoch=True)
        return mse_loss(guess, y)


class Manual:
    def __init__(self: Any, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        self.manual_backward(mse_loss(self.net(x), y))
        optimizer.step()
        optimizer.zero_grad()


class Predicts:
    def predict_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


class Validates:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", mse_loss(self.net(x), y), batch_size=len(x))


WRITTEN: dict[str, type] = {
    "log": LogsOne,
    "realistic": LogsThree,
    "metric": LogsMetric,
    "manual": Manual,
    "predict": Predicts,
    "validate": Validates,
}


class Paceline(LightningLike):
    module, base = "paceline", "TrainingModule"


class Lightning(LightningLike):
    module, base = "pytorch_lightning", "LightningModule"

    def library(self) -> Any:
        for name in ("pytorch_lightning", "lightning_fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        return super().library()


class Accelerate(Contestant):
    """A hand-written loop on Accelerate, as its documentation shows it."""

    module = "accelerate"

    def library(self) -> Any:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        # In one process a second Accelerator would go on with the first one's settings.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        return Accelerator

    def train(self, task: Task, net: Net, batches: Batches, folder: Path) -> nn.Module:
        tracking = {"log_with": "tensorboard", "project_dir": folder} if task.config == "realistic" else {}
        accelerator = self.library()(cpu=True, gradient_accumulation_steps=task.accumulate, **tracking)
        if task.config in ("validate", "predict"):
            getattr(self, task.config)(accelerator, net, batches)
        else:
            model, optimizer, loader = accelerator.prepare(net.train(), sgd(net), batches)
            loop = getattr(self, task.config)
            loop(accelerator, model, optimizer, loader, folder)
        accelerator.free_memory()
        return net

    def off(self, accelerator: Any, model: Any, optimizer: Any, loader: Any, _: Path) -> None:
        for x, y in loader:
            accelerator.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    def accumulate(self, accelerator: Any, model: Any, optimizer: Any, loader: Any, _: Path) -> None:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    def predict(self, accelerator: Any, net: Net, batches: Batches) -> None:
        model, loader = accelerator.prepare(net.eval(), batches)
        with torch.inference_mode():
            kept = [accelerator.gather_for_metrics(model(x)) for x, _ in loader]
        del kept

    def validate(self, accelerator: Any, net: Net, batches: Batches) -> None:
        model, loader = accelerator.prepare(net.eval(), batches)
        total, count = torch.zeros(()), 0
        with torch.inference_mode():
            for x, y in loader:
                guess, y = accelerator.gather_for_metrics((model(x), y))
                total += mse_loss(guess, y) * len(y)
                count += len(y)
        (total / count).item()

    def realistic(self, accelerator: Any, model: Any, optimizer: Any, loader: Any, folder: Path) -> None:
        from tqdm import tqdm

        accelerator.init_trackers("run")
        logged = {}
        bar = tqdm(loader, total=len(loader))
        for step, (x, y) in enumerate(bar, 1):
            with accelerator.accumulate(model):
                loss = mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            for name in LOGGED:
                logged[name] = loss.detach()
            if step % LOG_EVERY == 0:
                accelerator.log({name: value.item() for name, value in logged.items()}, step=step)
                bar.set_postfix(loss=loss.item(), refresh=False)
        accelerator.save_state(os.path.join(folder, "state"))
        accelerator.end_training()


class Fabric(Accelerate):
    """A hand-written loop on Lightning Fabric."""

    module = "lightning_fabric"

    def train(self, task: Task, net: Net, batches: Batches, folder: Path) -> nn.Module:
        from lightning_fabric import Fabric
        from lightning_fabric.loggers import TensorBoardLogger

        loggers = [TensorBoardLogger(folder)] if task.config == "realistic" else []
        fabric = Fabric(accelerator="cpu", devices=1, loggers=loggers)
        if task.config in ("validate", "predict"):
            getattr(self, task.config)(fabric, net, batches)
            return net
        model, optimizer = fabric.setup(net.train(), sgd(net))
        if task.config == "accumulate":
            self.in_windows(fabric, model, optimizer, batches, task)
        else:
            getattr(self, task.config)(fabric, model, optimizer, batches, folder)
        return net

    def in_windows(self, fabric: Any, model: Any, optimizer: Any, batches: Batches, task: Task) -> None:
        last = len(batches)
        for i, (x, y) in enumerate(batches, 1):
            stepping = i % task.accumulate == 0 or i == last
            with fabric.no_backward_sync(model, enabled=not stepping):
                fabric.backward(mse_loss(model(x), y) / task.accumulate)
            if stepping:
                optimizer.step()
                optimizer.zero_grad()

    def validate(self, fabric: Any, net: Net, batches: Batches) -> None:
        model = fabric.setup_module(net.eval())
        total, count = torch.zeros(()), 0
        with torch.inference_mode():
            for x, y in batches:
                total += mse_loss(model(x), y) * len(y)
                count += len(y)
        (total / count).item()

    def predict(self, fabric: Any, net: Net, batches: Batches) -> None:
        model = fabric.setup_module(net.eval())
        with torch.inference_mode():
            kept = [model(x) for x, _ in batches]
        del kept

    def realistic(self, fabric: Any, model: Any, optimizer: Any, batches: Batches, folder: Path) -> None:
        from tqdm import tqdm

        logged = {}
        bar = tqdm(batches, total=len(batches))
        for step, (x, y) in enumerate(bar, 1):
            loss = mse_loss(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            for name in LOGGED:
                logged[name] = loss.detach()
            if step % LOG_EVERY == 0:
                fabric.log_dict({name: value.item() for name, value in logged.items()}, step=step)
                bar.set_postfix(loss=loss.item(), refresh=False)
        fabric.save(folder / "last.ckpt", {"model": model, "optimizer": optimizer})


class PacelineAccelerator(Accelerate):
    """The same loop, but for the import line."""

    module = "paceline"

    def library(self) -> Any:
        from paceline import Accelerator

        return Accelerator


class Ignite(Contestant):
    """Ignite's engine around a hand-written update."""

    module = "ignite"

    def train(self, task: Task, net: Net, batches: Batches, folder: Path) -> nn.Module:
        from ignite.engine import Engine

        if task.config in ("validate", "predict"):
            getattr(self, task.config)(net.eval(), batches)
            return net
        net.train()
        optimizer, accumulate, last = sgd(net), task.accumulate, len(batches)

        def update(engine: Any, batch: Any) -> Any:
            x, y = batch
            loss = mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        def accumulating_update(engine: Any, batch: Any) -> Any:
            x, y = batch
            (mse_loss(net(x), y) / accumulate).backward()
            if engine.state.iteration % accumulate == 0 or engine.state.iteration == last:
                optimizer.step()
                optimizer.zero_grad()

        trainer = Engine(update if accumulate == 1 else accumulating_update)
        if task.config == "realistic":
            self.attach(trainer, net, optimizer, folder)
        trainer.run(batches, max_epochs=1)
        return net

    def predict(self, net: Net, batches: Batches) -> None:
        from ignite.engine import Engine

        kept: list[Tensor] = []
        with torch.inference_mode():
            Engine(lambda engine, batch: kept.append(net(batch[0]))).run(batches)

    def validate(self, net: Net, batches: Batches) -> None:
        from ignite.engine import create_supervised_evaluator
        from ignite.metrics import Loss

        create_supervised_evaluator(net, metrics={"loss": Loss(mse_loss)}).run(batches)

    def attach(self, trainer: Any, net: Net, optimizer: Any, folder: Path) -> None:
        from ignite.engine import Events
        from ignite.handlers import ModelCheckpoint
        from ignite.handlers.tensorboard_logger import TensorboardLogger
        from ignite.handlers.tqdm_logger import ProgressBar

        ProgressBar(persist=True).attach(trainer, output_transform=lambda loss: {"loss": loss.item()})
        logger = TensorboardLogger(log_dir=folder)
        logger.attach_output_handler(
            trainer,
            Events.ITERATION_COMPLETED(every=LOG_EVERY),
            tag="train",
            output_transform=lambda loss: dict.fromkeys(LOGGED, loss.item()),
        )
        save = ModelCheckpoint(folder, "run", require_empty=False)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, save, {"net": net, "optimizer": optimizer})
        trainer.add_event_handler(Events.COMPLETED, lambda: logger.close())


CONTESTANTS: dict[str, type[Contestant]] = {
    "raw": Raw,
    "paceline": Paceline,
    "paceline accelerator": PacelineAccelerator,
    "ignite": Ignite,
    "fabric": Fabric,
    "accelerate": Accelerate,
    "lightning": Lightning,
}

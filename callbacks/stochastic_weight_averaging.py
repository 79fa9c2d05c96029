"""Callback for stochastic weight averaging: it averages the last epochs' weights and anneals the learning rate."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR

from .. import messages
from ..torch_private import BatchNorm
from .base import Callback
from .weight_averaging import (
    CURRENT_KEY,
    AverageOne,
    WeightAverage,
    checked_count,
    checked_device,
    equal_weights,
    load_current,
    one_by_one,
    save_own_buffers,
)

if TYPE_CHECKING:
    from ..trainer.module import TrainingModule
    from ..trainer.trainer import Trainer

_CPU = torch.device("cpu")


class StochasticWeightAveraging(Callback):
    """Average the weights at the end of each of the last epochs and load the mean into the module when the fit ends.

    From the start epoch on, a schedule toward ``swa_lrs`` replaces the run's scheduler. When the fit ends, the mean
    replaces the weights, and BatchNorm statistics are re-estimated for the mean: ``training_step`` runs on all training
    data once more, without gradients or logging. Validation and the checkpoints written during the fit use the current
    weights; the average is part of this callback's state. A checkpoint written after the fit contains both the mean and
    the trained weights.

    Args:
        swa_lrs: the learning rate to anneal to: one number for all parameter groups, or a list with one number for
            each.
        swa_epoch_start: first epoch whose weights are averaged, counted from 1. A float is a fraction of ``max_epochs``
            (0.8 of 10 epochs is the 8th).
        annealing_epochs: number of epochs over which the learning rate changes to ``swa_lrs``; 0 changes it
            immediately.
        annealing_strategy: ``"cos"`` or ``"linear"``.
        avg_fn: ``avg_fn(average, current, n_averaged)`` returns the new average of one tensor; None means the mean.
        device: device of the average; None means the device of the weights.

    Raises:
        TypeError: for an argument of the wrong type.
        ValueError: for an argument out of range, or, when the fit starts, for a setup that this callback does not
            support.

    References:
        Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, 2018.
    """

    #: Average the weights that each epoch starts with, not those that it ends with.
    _before_epochs = False

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: AverageOne | None = None,
        device: torch.device | str | None = _CPU,
    ) -> None:
        name = type(self).__name__
        _check_rates(name, swa_lrs)
        _check_start(name, swa_epoch_start)
        if annealing_strategy not in ("cos", "linear"):
            raise ValueError(messages.unknown("annealing_strategy", annealing_strategy, ("cos", "linear")))
        if avg_fn is not None and not callable(avg_fn):
            raise TypeError(
                f"{name}: avg_fn={avg_fn!r} is not callable. Pass a function that takes (average, current, "
                "n_averaged) and returns a tensor, or None for the mean."
            )
        self._swa_lrs = swa_lrs
        self._swa_epoch_start = swa_epoch_start
        self._annealing_epochs = checked_count(name, "annealing_epochs", annealing_epochs, 0)
        self._annealing_strategy: Literal["cos", "linear"] = annealing_strategy
        self._avg_fn = avg_fn
        self._device = checked_device(name, device)
        self._forget()

    def _forget(self) -> None:
        self._average: WeightAverage | None = None
        self._restored: dict[str, Any] = {}
        self._start = 0
        self._last_epoch = -1
        self._final = False
        self._held_statistics: dict[str, Tensor] = {}
        self._finished: Mapping[str, Any] | None = None

    @property
    def swa_start(self) -> int:
        """The first epoch (0-based) whose weights are averaged; known once a fit has started."""
        return self._start

    @property
    def n_averaged(self) -> int:
        """The number of epochs in the average."""
        return self._average.n_averaged if self._average else self._restored.get("n_averaged", 0)

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        if stage == "fit":
            self._forget()

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._check_run(trainer, pl_module)
        self._start = self._start_epoch(trainer)
        self._last_epoch = self._restored.get("latest_epoch", -1)
        if self._restored.get("active"):
            self._begin(trainer, pl_module)
            state = self._restored["average_model_state"]
            if self._average is not None and self._restored["n_averaged"]:
                self._average.load(trainer.strategy, state, self._restored["n_averaged"])
        self._restored = {}

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._finished = None

    def _check_run(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        me, module = type(self).__name__, type(pl_module).__name__
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"{me} anneals the learning rate of one optimizer, but {module}.configure_optimizers returned "
                f"{len(trainer.optimizers)}. Use EMAWeightAveraging, which leaves learning rates alone."
            )
        if len(trainer.lr_scheduler_configs) > 1:
            raise ValueError(
                f"{me} can replace only one learning rate scheduler, but {module}.configure_optimizers returned "
                f"{len(trainer.lr_scheduler_configs)}. Return one scheduler (SequentialLR combines several) or none."
            )
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"{me} advances its own schedule, and runs training_step without gradients to estimate BatchNorm "
                f"statistics, but {module} uses manual optimization. Use WeightAveraging or EMAWeightAveraging."
            )
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters and _training_layers(pl_module):
            raise ValueError(
                f"{me} estimates BatchNorm statistics batch by batch, but {module}.training_step(dataloader_iter) "
                "fetches batches itself. Write it as training_step(batch, batch_idx), or use WeightAveraging."
            )

    def _start_epoch(self, trainer: Trainer) -> int:
        start = self._swa_epoch_start
        if isinstance(start, float):
            if trainer.max_epochs is None or trainer.max_epochs < 0:
                raise ValueError(
                    f"{type(self).__name__}: swa_epoch_start={start} is a fraction of max_epochs, but this run has "
                    f"max_epochs={trainer.max_epochs}. Set max_epochs, or pass the first epoch as an integer."
                )
            start = int(trainer.max_epochs * start)
        return max(start - 1, 0)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        epoch = trainer.current_epoch
        if self._average is None and epoch >= self._start:
            if epoch > self._start:
                messages.warn(
                    f"{type(self).__name__} starts in epoch {epoch} instead of epoch {self._start}, because the run "
                    "was resumed from a checkpoint without the callback's state. Earlier epochs are not averaged."
                )
            self._begin(trainer, pl_module)
            self._last_epoch = epoch - 1 - self._before_epochs
        self._take_in(epoch - 1)  # in case a callback before this one wrote the checkpoint

    def _begin(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        average = partial(one_by_one, self._avg_fn) if self._avg_fn is not None else equal_weights
        self._average = WeightAverage(pl_module, average, self._device, use_buffers=False)
        optimizer = trainer.optimizers[0]
        rates, groups = self._swa_lrs, len(optimizer.param_groups)
        if isinstance(rates, list) and len(rates) != groups:
            raise ValueError(
                f"{type(self).__name__}: swa_lrs={rates} has length {len(rates)}, but the number of parameter groups "
                f"in the optimizer of {type(pl_module).__name__} is {groups}. Pass one learning rate for each group, "
                "or one number for all."
            )
        scheduler = SWALR(
            optimizer,
            rates,  # type: ignore[arg-type]  # torch also accepts a list
            anneal_epochs=self._annealing_epochs,
            anneal_strategy=self._annealing_strategy,
        )
        _replace_scheduler(trainer.lr_scheduler_configs, scheduler)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if not self._before_epochs:
            self._take_in(trainer.current_epoch)

    def _take_in(self, epoch: int) -> None:
        if self._average is not None and epoch > self._last_epoch:
            self._average.update()
            self._last_epoch = epoch

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if self.n_averaged:
            self._show(pl_module)
            if self._held_statistics:
                _estimate_statistics(trainer, pl_module)
        else:
            messages.warn(
                f"{type(self).__name__} averaged no weights, because the fit ended after {trainer.current_epoch} "
                f"epoch{'' if trainer.current_epoch == 1 else 's'}, but averaging starts at the end of epoch "
                f"{self._start} (0-based). {type(pl_module).__name__} keeps its last weights. Train longer, or lower "
                "swa_epoch_start."
            )

    def _show(self, pl_module: TrainingModule) -> None:
        if self._average is not None:
            self._held_statistics = _statistics(pl_module)
            self._average.show()
            self._final = True

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if self._final or not self.n_averaged:
            return
        if self._finished is not None:  # the checkpoint was saved after the run ended, so nothing was left to train
            self._show(pl_module)
            trainer.strategy.load_model_state(pl_module, self._finished, strict=pl_module.strict_loading is not False)
        else:
            messages.warn(
                f"The resumed run had nothing left to train, so {type(pl_module).__name__} keeps the checkpoint's "
                f"weights, not the mean of the {self.n_averaged} averaged epoch{'' if self.n_averaged == 1 else 's'}. "
                "Raise max_epochs to continue training."
            )

    def state_dict(self) -> dict[str, Any]:
        return self._restored or {
            "active": self._average is not None,
            "n_averaged": self.n_averaged,
            "latest_epoch": self._last_epoch,
            "average_model_state": self._average.averages() if self._average is not None else {},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        resumable = "callbacks" in checkpoint  # otherwise, the file contains only weights
        if resumable and self._average is not None and not self._restored:  # state_dict has only this process's shards
            own = checkpoint["callbacks"][self.state_key]
            own["average_model_state"] = self._average.average_state(trainer.strategy)
        if resumable and self._final and self._average is not None and self._average.module is pl_module:
            trained = self._average.held_state(trainer.strategy) | self._held_statistics
            checkpoint[CURRENT_KEY] = {n: trained.get(n, value) for n, value in checkpoint["state_dict"].items()}
            save_own_buffers(trainer, checkpoint, self._held_statistics)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        if CURRENT_KEY in checkpoint:
            load_current(trainer, pl_module, checkpoint)
            self._finished = checkpoint["state_dict"]


def _check_rates(owner: str, rates: Any) -> None:
    values = rates if isinstance(rates, list) else [rates]
    if not values or any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in values):
        raise TypeError(
            f"{owner}: swa_lrs={rates!r} must be a positive number, or a list with a positive number for each "
            "parameter group."
        )
    if not all(0 < v < math.inf for v in values):
        raise ValueError(
            f"{owner}: swa_lrs={rates!r} contains an invalid learning rate. Learning rates must be positive and finite."
        )


def _check_start(owner: str, start: Any) -> None:
    if isinstance(start, bool) or not isinstance(start, (int, float)):
        raise TypeError(
            f"{owner}: swa_epoch_start={start!r} is {messages.a(start)}, not a number. Pass the epoch at which "
            "averaging starts, as an integer (counted from 1) or as a fraction of max_epochs from 0.0 to 1.0."
        )
    if (isinstance(start, int) and start < 1) or (isinstance(start, float) and not 0.0 <= start <= 1.0):
        raise ValueError(
            f"{owner}: swa_epoch_start={start} is out of range. Pass the first epoch as an integer of at least 1, or "
            "as a fraction of max_epochs (a float from 0.0 to 1.0)."
        )


def _replace_scheduler(configs: list[Any], scheduler: SWALR) -> None:
    """Replace the existing scheduler, if any, with ``scheduler``, which runs once per epoch."""
    ours = {"scheduler": scheduler, "interval": "epoch", "frequency": 1, "monitor": None, "strict": True, "name": None}
    ours["reduce_on_plateau"] = False
    if configs:
        if configs[0].interval != "epoch":
            messages.warn(
                f"The scheduler {type(configs[0].scheduler).__name__} advances every {configs[0].interval}, but "
                "SWALR, which replaces it, advances every epoch. To keep your scheduler, use EMAWeightAveraging."
            )
        messages.info(f"Swapping scheduler `{type(configs[0].scheduler).__name__}` for `{type(scheduler).__name__}`.")
        for name, value in ours.items():
            setattr(configs[0], name, value)
    else:
        configs.append(SimpleNamespace(**ours))


def _training_layers(module: nn.Module) -> dict[str, BatchNorm]:
    """Return a dict, by name, of the BatchNorm layers whose statistics a training step changes."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, BatchNorm) and layer.training}


def _statistics(module: nn.Module) -> dict[str, Tensor]:
    """Return a dict, by ``state_dict`` name, of copies of the BatchNorm statistics that a training step changes."""
    return {
        f"{name}.{key}" if name else key: buffer.clone()
        for name, layer in _training_layers(module).items()
        for key, buffer in layer.named_buffers(recurse=False)
    }


def _estimate_statistics(trainer: Trainer, module: TrainingModule) -> None:
    """Replace the BatchNorm statistics with their means over one pass through the training data on all ranks."""
    fit: Any = trainer.current_run.fit  # never None while a fit is ending
    layers = list(_training_layers(module).values())
    momenta = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the plain mean over all batches
        fit.forward_pass()
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    for layer in layers:
        for buffer in (layer.running_mean, layer.running_var):
            if buffer is not None:
                buffer.copy_(trainer.strategy.reduce(buffer, "mean"))

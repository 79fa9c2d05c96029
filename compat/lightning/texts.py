"""Messages that Lightning shows but Paceline does not, such as warnings about loaders."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from ... import messages
from ...callbacks.base import overridden
from ...data.combined_loader import length_of
from ...data.datamodule import DataModule
from ...data.loaders import leaves_of
from ...trainer.data_source import HOOK
from ...utilities.data import advise_about_length, suggested_max_num_workers

#: The hooks that create a DataModule's loaders, under the names that the description uses.
_LOADERS = {
    "Train": "train_dataloader",
    "Validation": "val_dataloader",
    "Test": "test_dataloader",
    "Predict": "predict_dataloader",
}


def speak_again(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an entry point so that each call shows its warnings, even if an earlier call has already shown them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        messages.forget()
        return method(*args, **kwargs)

    return call


def advising_train(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``FitLoop.advise`` to also give advice about the training loader."""

    def advise(loop: Any) -> None:
        method(loop)
        source = loop.run.source
        _advise(source.run.trainer, [source.train_loader], HOOK["train"])
        _advise_interval(source.run.trainer, source.num_training_batches)

    return advise


def advising_evaluation(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DataSource.load_evaluation`` to give advice about the loaders that it creates."""

    def load_evaluation(source: Any, kind: str) -> Any:
        is_new = kind not in source.eval
        loaders, limits = method(source, kind)
        if is_new:
            _advise(source.run.trainer, loaders, HOOK[kind])
        return loaders, limits

    return load_evaluation


def _advise(trainer: Any, loaders: Iterable[Any], name: str) -> None:
    for loader in (leaf for one in loaders for leaf in leaves_of(one)):
        if isinstance(loader, DataLoader):
            _advise_workers(trainer, loader, name)
        advise_about_length(loader, name)


def _advise_interval(trainer: Any, batches: int | float) -> None:
    if trainer.loggers and not trainer.fast_dev_run and batches < trainer.log_every_n_steps < 2**62:
        messages.warn(
            f"The number of batches in an epoch ({batches}) is lower than "
            f"log_every_n_steps={trainer.log_every_n_steps}. To log step values in every epoch, lower "
            "log_every_n_steps."
        )


def _advise_workers(trainer: Any, loader: DataLoader[Any], name: str) -> None:
    context, workers = loader.multiprocessing_context, loader.num_workers
    most = suggested_max_num_workers(trainer.num_devices)
    method = multiprocessing.get_start_method() if context is None else context.get_start_method()
    if (
        workers
        and "spawn" in (method, getattr(trainer.strategy, "start_method", None))
        and not loader.persistent_workers
    ):
        messages.warn(
            f"{name} starts new workers for every epoch. To keep workers between epochs, use "
            "DataLoader(persistent_workers=True)."
        )
    elif workers <= 2 < most or workers < 2 <= most:
        messages.warn(
            f"{name} has num_workers={workers}, so loading may be slower than training. Increase "
            f"num_workers; this machine supports up to {most}."
        )
    if loader.persistent_workers and loader.pin_memory and trainer.reload_dataloaders_every_n_epochs:
        messages.warn(
            f"{name} keeps its workers (persistent_workers=True, pin_memory=True) and is recreated during "
            f"training (reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}), so the old "
            "workers may stay alive. Leave out persistent_workers, pin_memory or reload_dataloaders_every_n_epochs."
        )


def datamodule_text(datamodule: DataModule) -> str:
    """Describe a DataModule as text that lists the sizes of its loaders' datasets."""
    return os.linesep.join(f"{{{word} dataloader: {_sizes(datamodule, hook)}}}" for word, hook in _LOADERS.items())


def _sizes(datamodule: DataModule, hook: str) -> str:
    method = overridden(datamodule, hook, DataModule)
    try:
        loaders = None if method is None else method()
    except Exception:  # datasets may be created only in setup
        loaders = None
    if loaders is None:
        return "None"
    if hasattr(loaders, "dataset"):
        return _size(loaders)
    found = list(loaders.values() if isinstance(loaders, Mapping) else loaders)
    return " ; ".join(f"{number}. {_size(loader)}" for number, loader in enumerate(found, start=1))


def _size(loader: Any) -> str:
    length = length_of(getattr(loader, "dataset", None))
    return f"size={'NA' if length is None else length}"


def hparams_text(hparams: dict[str, Any]) -> str:
    """Return the hyperparameters as Lightning prints them, sorted and with quoted names."""
    width = max((len(str(name)) for name in hparams), default=0) + 3
    return "\n".join(f'"{name}":'.ljust(width) + f" {hparams[name]}" for name in sorted(hparams))


def print_results(results: list[dict[str, Any]], fn: str) -> None:
    """Print the results of ``validate`` or ``test`` with all digits, sorted by name, in one column per loader."""
    from rich.console import Console
    from rich.table import Table

    columns = [{name.split("/dataloader_idx_")[0]: value for name, value in one.items()} for one in results]
    names = sorted({name for one in columns for name in one})
    if not names:
        return
    table = Table()
    for heading in (f"{fn.capitalize()} metric", *(f"DataLoader {idx}" for idx in range(len(columns)))):
        table.add_column(heading, justify="center", min_width=25)
    for name in names:
        values = (one.get(name, " ") for one in columns)
        table.add_row(name, *(str(value.item() if isinstance(value, torch.Tensor) else value) for value in values))
    Console(soft_wrap=True).print(table)


def with_tensors(show: Callable[[Any, str], Any]) -> Callable[[list[dict[str, float]], str], Any]:
    """Wrap a program's own ``_print_results`` so that it receives tensors, which is what Lightning's loops pass."""
    return lambda results, fn: show([{name: torch.tensor(one) for name, one in each.items()} for each in results], fn)

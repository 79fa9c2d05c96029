"""The DataModule, which downloads a run's data, splits it and creates its loaders."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..callbacks.base import overridden
from ..checkpoint.class_methods import making
from ..checkpoint.hyperparameters import HyperparametersMixin
from ..devices.kinds import present
from ..processes import device_transfer
from .combined_loader import length_of

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

    from ..trainer.trainer import Trainer

_LOADER_HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")


class DataModule(HyperparametersMixin):
    """Defines a run's data: how to obtain it, how to split it, and its loaders.

    Subclass this class and define the loaders that you need. A hook counts as defined if your class defines it or if it
    is set on the instance.

    Attributes:
        trainer: the Trainer that uses this data module; None before a run starts.
        prepare_data_per_node: if True (the default), :meth:`prepare_data` runs once per machine; if False (for a shared
            disk), once per run.
        allow_zero_length_dataloader_with_multiple_devices: whether a process is allowed to have no batches at all.

    Example:
        >>> class Digits(DataModule):
        ...     def setup(self, stage):
        ...         self.data = torch.utils.data.TensorDataset(torch.zeros(8, 64))
        ...
        ...     def train_dataloader(self):
        ...         return DataLoader(self.data, batch_size=4, shuffle=True)
    """

    #: Checkpoint keys for the hyperparameters: their values, the argument that takes all of them, and their type.
    CHECKPOINT_HYPER_PARAMS_KEY: ClassVar[str] = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME: ClassVar[str] = "datamodule_hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE: ClassVar[str] = "datamodule_hparams_type"

    _defines_defaults: ClassVar[bool] = True

    trainer: Trainer | None = None
    prepare_data_per_node: bool = True
    allow_zero_length_dataloader_with_multiple_devices: bool = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "trainer"}

    def prepare_data(self) -> None:
        """Download data, but set no attributes. Runs once per machine before :meth:`setup`; other ranks wait."""

    def setup(self, stage: str) -> None:
        """Called when fit, validate, test or predict begins, in every process. Create the datasets and splits here."""

    def teardown(self, stage: str) -> None:
        """Called when fit, validate, test or predict has ended, even after an exception, in every process."""

    def train_dataloader(self) -> Any:
        """Return the loader or loaders for training: a DataLoader, an iterable of batches, or a collection of them."""
        raise self._undefined("train_dataloader", "fit")

    def val_dataloader(self) -> Any:
        """Return the loader or loaders for validation."""
        raise self._undefined("val_dataloader", "validate")

    def test_dataloader(self) -> Any:
        """Return the loader or loaders for testing."""
        raise self._undefined("test_dataloader", "test")

    def predict_dataloader(self) -> Any:
        """Return the loader or loaders for prediction."""
        raise self._undefined("predict_dataloader", "predict")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Called before a batch moves to the device, while it is still on the CPU. Return the batch, changed or not."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device, convert it to the run's input dtype, and return it.

        Define this method for batch types that Paceline cannot traverse.
        """
        dtype = None if self.trainer is None else self.trainer.strategy.precision.input_dtype
        return device_transfer.move(batch, device, dtype)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Called after a batch has moved to the device, where it can be augmented. Return the batch, changed or not."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the data module's state for a checkpoint: plain data and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned when the checkpoint was written."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when an exception or Ctrl-C stops the run early."""

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> Self:
        """Create a data module from datasets. A list or mapping of datasets becomes a list or mapping of loaders.

        Args:
            train_dataset: for training; shuffled every epoch, unless it is an ``IterableDataset``.
            val_dataset: for validation; not shuffled.
            test_dataset: for testing; not shuffled.
            predict_dataset: for prediction; not shuffled.
            batch_size: number of samples per batch.
            num_workers: number of worker processes per loader; 0 loads in the main process.
            **datamodule_kwargs: further arguments for the class.
        """
        accepted = inspect.signature(cls).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        sizes = {"batch_size": batch_size, "num_workers": num_workers}
        own = {name: value for name, value in sizes.items() if open_ended or name in accepted}
        module = cls(**own, **datamodule_kwargs)
        datasets = (train_dataset, val_dataset, test_dataset, predict_dataset)
        for hook, dataset in zip(_LOADER_HOOKS, datasets, strict=True):
            if dataset is not None:
                loaders = _LoaderOf(dataset, batch_size, num_workers, shuffle=hook == "train_dataloader")
                setattr(module, hook, loaders)
        return module

    @making
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Create an instance with a checkpoint's hyperparameters and state.

        The arguments are the same as for ``TrainingModule.load_from_checkpoint``.
        """
        from ..checkpoint.load_from_checkpoint import load_from_checkpoint

        return load_from_checkpoint(
            cls, checkpoint_path, map_location, hparams_file, weights_only=weights_only, **kwargs
        )

    def __str__(self) -> str:
        lines = [f"  {hook.removesuffix('_dataloader')}: {self._describe(hook)}" for hook in _LOADER_HOOKS]
        return "\n".join([f"{type(self).__name__}:", *lines])

    def _describe(self, hook: str) -> str:
        if overridden(self, hook, DataModule) is None:
            return "none"
        try:
            return _describe_loaders(getattr(self, hook)())
        except Exception as error:
            return f"not ready ({type(error).__name__}: {error})"

    def _undefined(self, hook: str, entry_point: str) -> NotImplementedError:
        name = type(self).__name__
        return NotImplementedError(
            f"{name} does not define {hook}(), but {entry_point} needs its batches. Define this method in {name}, or "
            f"pass the loader to {entry_point}."
        )


class _LoaderOf:
    """Callable that creates the loaders for a dataset, or for a list or mapping of datasets."""

    def __init__(self, dataset: Any, batch_size: int, num_workers: int, shuffle: bool) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._num_workers = num_workers
        self._shuffle = shuffle

    def __call__(self) -> Any:
        datasets = self._dataset
        if isinstance(datasets, Mapping):
            return {key: self._loader(dataset) for key, dataset in datasets.items()}
        if isinstance(datasets, (list, tuple)) and datasets and all(map(_is_dataset, datasets)):
            return [self._loader(dataset) for dataset in datasets]
        return self._loader(datasets)

    def _loader(self, dataset: Any) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=self._batch_size,
            shuffle=self._shuffle and not isinstance(dataset, IterableDataset),
            num_workers=self._num_workers,
            pin_memory=present().overlaps_copies(),
        )


def _is_dataset(value: Any) -> bool:
    """Return True if an entry of a list is a dataset. Otherwise, the entry is a sample, and the list is the dataset."""
    if isinstance(value, Dataset):
        return True
    sample = isinstance(value, (str, bytes, Sequence, Mapping, torch.Tensor)) or hasattr(value, "__array__")
    return not sample and hasattr(value, "__getitem__") and hasattr(value, "__len__")


def _describe_loaders(loaders: Any) -> str:
    if isinstance(loaders, Mapping):
        return "; ".join(f"{key}: {_describe_loaders(loader)}" for key, loader in loaders.items())
    if isinstance(loaders, (list, tuple)) and any(hasattr(loader, "dataset") for loader in loaders):
        return "; ".join(_describe_loaders(loader) for loader in loaders)
    length = length_of(loaders)
    text = f"{type(loaders).__name__}, {'unknown number of' if length is None else length} batches"
    samples = length_of(getattr(loaders, "dataset", None))
    return text if samples is None else f"{text} of {samples} samples"

"""``accelerate``'s loader classes, which programs can instantiate. Prepared loaders are instances of them too."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from ... import messages
from ...accelerator.loaders import DataLoaderConfiguration, PreparedLoader, refuse_slice_fn
from ...accelerator.process_state import PartialState
from ...accelerator.random_seeds import synchronize_rng_states
from ...data.loaders import replaced
from ...strategies.base import Strategy
from . import loaders
from .gradient_state import GradientState as NewestGradientState


class DataLoaderAdapter(loaders.DataLoaderShard):
    """A loader that counts its batches and can save its position.

    Args:
        dataset: the dataset.
        use_stateful_dataloader: whether the loader is also a torchdata StatefulDataLoader.
        batch_sampler: sampler that yields the indices of each batch.
        **kwargs: arguments of DataLoader.
    """

    def __new__(cls, *args: Any, use_stateful_dataloader: bool = False, **kwargs: Any) -> Any:
        """Create a loader, which is also a torchdata StatefulDataLoader if ``use_stateful_dataloader`` is set."""
        return object.__new__(_stateful(cls) if use_stateful_dataloader else cls)

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        loader = DataLoader(dataset, batch_sampler=batch_sampler, **kwargs)
        self._set_up(loader, Strategy(), DataLoaderConfiguration(dispatch_batches=False))

    def _set_up(
        self,
        loader: DataLoader[Any],
        strategy: Strategy,
        config: DataLoaderConfiguration,
        skip_batches: int = 0,
        device_placement: bool = False,
    ) -> None:
        super().__init__(loader, strategy, config, device_placement, gradient_state=NewestGradientState())
        vars(self)["_skip"] = skip_batches


class SkipDataLoader(DataLoaderAdapter):
    """A loader that skips the first ``skip_batches`` batches of each pass.

    Args:
        dataset: the dataset.
        skip_batches: number of batches to skip.
        use_stateful_dataloader: whether the loader is also a torchdata StatefulDataLoader.
        **kwargs: arguments of DataLoader.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        config = DataLoaderConfiguration(dispatch_batches=False)
        self._set_up(DataLoader(dataset, **kwargs), Strategy(), config, skip_batches)


class DataLoaderShard(DataLoaderAdapter):
    """A loader whose data is already this process's shard, or the loader that ``prepare`` returns.

    Args:
        dataset: the dataset.
        device: where to move batches; None leaves them on the CPU.
        rng_types: RNG states that all processes copy from process 0 when a pass begins.
        synchronized_generator: the generator to synchronize if ``rng_types`` contains ``"generator"``.
        skip_batches: number of batches to skip at the beginning of each pass.
        use_stateful_dataloader: whether the loader is also a torchdata StatefulDataLoader.
        **kwargs: arguments of DataLoader. Accelerate's private arguments are accepted and ignored.
    """

    _synchronized: tuple[Sequence[str], torch.Generator | None] = ((), None)

    def __init__(
        self,
        dataset: Any,
        device: Any = None,
        rng_types: Sequence[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        **kwargs: Any,
    ) -> None:
        config, strategy = DataLoaderConfiguration(dispatch_batches=False), Strategy(device or "cpu")
        self._set_up(DataLoader(dataset, **_public(kwargs)), strategy, config, skip_batches, device is not None)
        vars(self)["_synchronized"] = (list(map(str, rng_types or ())), synchronized_generator)

    @property
    def rng_types(self) -> list[str]:
        """RNG states that all processes copy from process 0 when a pass begins."""
        return list(self._synchronized[0]) or super().rng_types

    @property
    def synchronized_generator(self) -> torch.Generator | None:
        """The generator that all processes copy from process 0 if ``rng_types`` contains ``"generator"``."""
        return self._synchronized[1] or super().synchronized_generator

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        kinds, generator = self._synchronized
        if kinds:
            synchronize_rng_states(kinds, generator)
        return super().__iter__()


class DataLoaderDispatcher(DataLoaderAdapter):
    """A loader that process 0 reads for all processes. ``prepare`` can also return such a loader.

    Args:
        dataset: the dataset.
        split_batches: whether to split each batch across processes; otherwise each process gets full batches.
        skip_batches: number of batches to skip at the beginning of each pass.
        use_stateful_dataloader: whether the loader is also a torchdata StatefulDataLoader.
        slice_fn: not supported.
        **kwargs: arguments of DataLoader. Accelerate's private arguments are accepted and ignored.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        slice_fn: Any = None,
        **kwargs: Any,
    ) -> None:
        config = DataLoaderConfiguration(split_batches=split_batches, dispatch_batches=True)
        self._set_up(DataLoader(dataset, **_public(kwargs)), PartialState().strategy, config, skip_batches)
        refuse_slice_fn("DataLoaderDispatcher", self, slice_fn=slice_fn)


def prepared(
    loader: DataLoader[Any],
    strategy: Strategy,
    config: DataLoaderConfiguration,
    device_placement: bool = True,
    **options: Any,
) -> PreparedLoader:
    """Create the loader that ``prepare`` returns; see :class:`.loaders.DataLoaderShard`."""
    central = loaders.dispatches(loader, config, device_placement)
    if not central:
        loader = _own_shards(loader, strategy)
    kind = DataLoaderDispatcher if central else DataLoaderShard
    found = object.__new__(_stateful(kind) if config.use_stateful_dataloader else kind)
    loaders.DataLoaderShard.__init__(found, loader, strategy, config, device_placement, **options)
    return found


def _own_shards(loader: DataLoader[Any], strategy: Strategy) -> DataLoader[Any]:
    """Make each process read its own files of a ``datasets`` stream, if the files can be divided equally."""
    dataset: Any = loader.dataset
    world, shards = strategy.num_data_ranks, getattr(dataset, "num_shards", None)
    if world == 1 or not shards or shards % world or not type(dataset).__module__.startswith("datasets."):
        return loader
    split = importlib.import_module("datasets.distributed").split_dataset_by_node
    return replaced(loader, dataset=split(dataset, strategy.data_rank, world))


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler that yields a loader's sample indices; None if there is none."""
    return loaders.sampler_of(dataloader)


def _public(arguments: dict[str, Any]) -> dict[str, Any]:
    messages.ignored(
        "DataLoaderShard",
        "the loader uses the run's processes",
        torch_device_mesh=arguments.get("torch_device_mesh"),
    )
    private = ("_drop_last", "_non_blocking", "torch_device_mesh")
    return {name: value for name, value in arguments.items() if name not in private}


@functools.cache
def _stateful(kind: type) -> type:
    """Return the variant of a loader class that is also a torchdata StatefulDataLoader."""
    torchdatas = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader

    def __reduce__(self: Any) -> Any:  # noqa: N807 - pickle cannot find the class by its name
        return _new_stateful, (kind,), self.__getstate__()

    names = {"__module__": kind.__module__, "__reduce__": __reduce__, "use_stateful_dataloader": True}
    return type(kind.__name__, (kind, torchdatas), names)


def _new_stateful(kind: type) -> Any:
    return object.__new__(_stateful(kind))

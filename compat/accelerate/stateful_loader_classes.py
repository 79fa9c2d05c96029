"""The loader classes for ``use_stateful_dataloader=True``, which are also torchdata StatefulDataLoaders.

A module of their own, because torchdata need not be installed.
"""

from __future__ import annotations

from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[reportMissingImports]

from . import loader_classes


class DataLoaderAdapter(loader_classes.DataLoaderAdapter, StatefulDataLoader):
    """A stateful loader."""


class DataLoaderShard(loader_classes.DataLoaderShard, StatefulDataLoader):
    """A stateful loader whose data is this process's part."""


class DataLoaderDispatcher(loader_classes.DataLoaderDispatcher, StatefulDataLoader):
    """A stateful loader that process 0 reads for all processes."""


class SkipDataLoader(loader_classes.SkipDataLoader, StatefulDataLoader):
    """A stateful loader that skips batches."""

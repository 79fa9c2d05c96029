"""Sort the objects in ``Trainer(plugins=...)`` by the part of the Trainer that each replaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import messages
from ..checkpoint.checkpoint_io import CheckpointIO
from ..processes.environments import ClusterEnvironment
from ..strategies.precision.base import Precision
from ..strategies.sync_batch_norm import LayerSync

Plugin = Precision | CheckpointIO | ClusterEnvironment | LayerSync


@dataclass
class Plugins:
    """The plugins of a Trainer, by the part of the Trainer that each replaces.

    Attributes:
        precision: the Precision, or None.
        checkpoint_io: the object that writes and reads checkpoints, or None.
        environment: the object that gets each process's rank from the launcher; detected if None.
        layer_sync: the object that makes layers use the batches of all processes, or None.
    """

    precision: Precision | None = None
    checkpoint_io: CheckpointIO | None = None
    environment: ClusterEnvironment | None = None
    layer_sync: LayerSync | None = None


def sort_plugins(given: Any) -> Plugins:
    """Sort plugins by the part of the Trainer that each replaces.

    Raises:
        TypeError: an object is not a plugin.
        ValueError: two objects replace the same part.
    """
    plugins, kinds = Plugins(), (Precision, CheckpointIO, ClusterEnvironment, LayerSync)
    listed = given if isinstance(given, Sequence) and not isinstance(given, str) else [] if given is None else [given]
    for kind in kinds:
        found = [plugin for plugin in listed if isinstance(plugin, kind)]
        if len(found) > 1:
            names = messages.names([type(plugin).__name__ for plugin in found], last="and")
            raise ValueError(
                f"Trainer(plugins=...) got {names}, but only one {kind.__name__} is allowed. Pass only one of them."
            )
    for plugin in listed:
        if isinstance(plugin, Precision):
            plugins.precision = plugin
        elif isinstance(plugin, CheckpointIO):
            plugins.checkpoint_io = plugin
        elif isinstance(plugin, ClusterEnvironment):
            plugins.environment = plugin
        elif isinstance(plugin, LayerSync):
            plugins.layer_sync = plugin
        else:
            raise TypeError(
                f"Trainer(plugins=...) got {messages.a(plugin)}. Pass a Precision, a CheckpointIO, a "
                "ClusterEnvironment or a LayerSync; to replace other parts, use strategy= (with a Strategy "
                "object), logger= or callbacks=."
            )
    return plugins

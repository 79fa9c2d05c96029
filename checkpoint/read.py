"""Read a checkpoint, which is either a single file or a folder."""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING, Any

from . import manifest, sharded_folder, single_file
from .storage import Remote, location

if TYPE_CHECKING:
    from ..strategies.base import Strategy


def read(
    path: str | os.PathLike[str] | Remote | IO[bytes],
    map_location: Any = "cpu",
    strategy: Strategy | None = None,
    trusted: bool = False,
) -> dict[str, Any]:
    """Verify the checksums of a checkpoint and read it.

    Args:
        path: path or URL of a file or of a sharded checkpoint's folder, or an open, seekable binary file.
        map_location: device for the tensors, as for ``torch.load``; ``"meta"`` verifies the tensors without loading
            them.
        strategy: decides which shards of a folder's tensors this process needs; None means all shards.
        trusted: whether to load pickled objects too, which runs code that the file specifies.

    Raises:
        FileNotFoundError: if the file does not exist; the message lists the files in the folder.
        IsADirectoryError: if the path is a folder that is not a checkpoint.
        ValueError: if the file is damaged, is not a checkpoint, was written by a newer version, or would run code when
            loaded.
    """
    if isinstance(path, (str, os.PathLike, Remote)) and manifest.is_folder(path):
        return sharded_folder.read(location(path), map_location, strategy, trusted)
    return single_file.read(path, map_location, trusted)

"""Read a checkpoint, whichever of its two forms it has: one file, or a folder."""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING, Any

from . import manifest, sharded_folder, single_file
from .storage import Remote, location

if TYPE_CHECKING:
    from ..strategies.base import Strategy


def read(
    path: str | os.PathLike[str] | Remote | IO[bytes], map_location: Any = "cpu", strategy: Strategy | None = None
) -> dict[str, Any]:
    """Read a checkpoint after its checksums were found right.

    Args:
        path: a file, an open binary file that can seek, or the folder of a sharded checkpoint; or an address of one.
        map_location: where its tensors go, as for ``torch.load``; ``"meta"`` checks it without loading them.
        strategy: says what of a folder's tensors this process needs; all if None.

    Raises:
        FileNotFoundError: no such file; the message says what lies in the folder.
        IsADirectoryError: a folder that is no checkpoint.
        ValueError: damaged, not a checkpoint, written by a newer version, or it names code.
    """
    if isinstance(path, (str, os.PathLike, Remote)) and manifest.is_folder(path):
        return sharded_folder.read(location(path), map_location, strategy)
    return single_file.read(path, map_location)

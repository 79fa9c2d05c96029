"""The class of the bars of ``TQDMProgressBar``. Importing this module needs tqdm."""

from __future__ import annotations

from ...callbacks.tqdm_progress import tqdm_class

Tqdm = tqdm_class()

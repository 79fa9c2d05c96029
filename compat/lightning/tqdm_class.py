"""The class of ``TQDMProgressBar``'s bars. Importing this module requires tqdm."""

from __future__ import annotations

from ...callbacks.tqdm_progress import tqdm_class

Tqdm = tqdm_class()

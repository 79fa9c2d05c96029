"""One place that knows which value of a setting counts: code, launch flag, environment, file or default.

``resolve`` gives the values in force, and from where each comes. Nothing here imports torch.
"""

from __future__ import annotations

from .files import CONFIG_VARIABLE, ConfigFile, find_file, own_file, read_file, write_file
from .names import SETTINGS, Setting
from .resolver import FLAGS, Given, Origin, Row, Settings, fill, hand_over, if_set, resolve

__all__ = [
    "CONFIG_VARIABLE",
    "FLAGS",
    "SETTINGS",
    "ConfigFile",
    "Given",
    "Origin",
    "Row",
    "Setting",
    "Settings",
    "fill",
    "find_file",
    "hand_over",
    "if_set",
    "own_file",
    "read_file",
    "resolve",
    "write_file",
]

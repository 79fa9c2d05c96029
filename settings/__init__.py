"""Resolve settings from code, launch flags, environment variables, a file, and defaults, in this order of priority.

``resolve`` returns the value of each setting and where it comes from. This package does not import torch.
"""

from __future__ import annotations

from .files import CONFIG_VARIABLE, ConfigFile, find_file, own_file, read_file, write_file
from .names import SETTINGS, Setting
from .resolver import FLAGS, Given, Origin, Row, Settings, fill, hand_over, if_set, resolve, written

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
    "written",
]

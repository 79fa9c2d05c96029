"""Replaces ``lightning_fabric`` in the child processes of a program that uses Paceline's replacement."""

import importlib
import sys

if "." not in __name__:  # found on the path, not as a part of Paceline
    del sys.modules[__name__]
    importlib.import_module("paceline.compat").found_on_path(__name__)

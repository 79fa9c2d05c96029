"""Replaces ``lightning`` in the child processes of a program that uses Paceline's replacement."""

import importlib
import sys

if "." not in __name__:  # imported from the path, not as part of Paceline
    del sys.modules[__name__]
    importlib.import_module("paceline.compat").found_on_path(__name__)

"""The package ``accelerate`` in a Python that a program with the stand-in has started: Paceline's."""

import importlib
import sys

if "." not in __name__:  # found on the path, not as a part of Paceline
    del sys.modules[__name__]
    importlib.import_module("paceline.compat").found_on_path(__name__)

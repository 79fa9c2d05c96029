"""The package ``lightning`` in a Python that a program with the stand-in has started: Paceline's."""

import sys

del sys.modules[__name__]

from paceline import compat  # noqa: E402

compat.found_on_path(__name__)

"""Pytest's entry point: replace the packages that the variable ``PACELINE_STANDS_IN`` lists in tests too."""

from __future__ import annotations

import os

if os.environ.get("PACELINE_STANDS_IN"):
    from . import install_from_environment

    install_from_environment()

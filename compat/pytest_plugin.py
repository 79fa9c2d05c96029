"""Pytest's entry point: the packages that the variable ``PACELINE_STANDS_IN`` names are Paceline's in tests too."""

from __future__ import annotations

import os

if os.environ.get("PACELINE_STANDS_IN"):
    from . import install_from_environment

    install_from_environment()

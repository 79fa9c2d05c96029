"""Pytest plugin that replaces the packages listed in the environment variable ``PACELINE_STANDS_IN``."""

from __future__ import annotations

import os

if os.environ.get("PACELINE_STANDS_IN"):
    from . import install_from_environment

    install_from_environment()

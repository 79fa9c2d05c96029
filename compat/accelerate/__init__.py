"""Replaces the package ``accelerate``, so that programs and libraries written for it run on Paceline."""

from __future__ import annotations

import sys

from ... import messages


def install() -> None:
    """Former name of ``paceline.compat.install("accelerate")``."""
    from .. import install

    messages.info_once('paceline.compat.accelerate.install() is now paceline.compat.install("accelerate").')
    install("accelerate")


def main() -> None:
    """Former name of ``python -m paceline.compat accelerate train.py ...``."""
    from ..__main__ import main

    messages.info_once("python -m paceline.compat.accelerate is now python -m paceline.compat accelerate.")
    main(["accelerate", *sys.argv[1:]])

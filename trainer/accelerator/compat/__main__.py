"""``python -m paceline.trainer.accelerator.compat train.py ...`` runs a script."""

from . import main

main()

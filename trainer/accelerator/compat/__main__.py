"""``python -m paceline.trainer.accelerator.compat train.py ...``"""

from . import main

main()

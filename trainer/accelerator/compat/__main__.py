"""For ``python -m paceline.trainer.accelerator.compat train.py ...``."""

from . import main

if __name__ == "__main__":
    main()

"""Entry point of ``python -m paceline.compat.accelerate train.py ...``."""

from . import main

if __name__ == "__main__":
    main()

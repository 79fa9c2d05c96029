"""``python -m paceline``: runs the command line, even if the program ``paceline`` is not on the PATH."""

from __future__ import annotations

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())

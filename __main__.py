"""``python -m paceline``: the command line if the script ``paceline`` is not on the path."""

from __future__ import annotations

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())

"""Draw all pictures of the documentation, each for light and for dark pages.

Usage: python docs/pictures/make.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import accumulation_window
import checkpoint_way
import hook_order
import resumed_loss
import step_costs
import strategy_placement
from canvas import DARK, LIGHT

HERE = Path(__file__).resolve().parent
PICTURES = (hook_order, strategy_placement, accumulation_window, checkpoint_way, resumed_loss, step_costs)


def drawn() -> Iterator[tuple[str, str]]:
    """(file name, content) of every picture in both schemes."""
    for picture in PICTURES:
        for scheme in (LIGHT, DARK):
            yield f"{picture.NAME}-{scheme.name}.svg", picture.draw(scheme)


def main() -> None:
    """Write the files."""
    for name, content in drawn():
        (HERE / name).write_text(content, encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main()

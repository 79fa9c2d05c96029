"""Layout of the model summary's table: wrapped to fit a terminal without breaking words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest

#: Columns whose cells may wrap.
FOLDED = ("Name", "In sizes", "Out sizes")
#: Columns that are omitted, one after the other, if wrapping is not enough.
LEFT_OUT = ("Mode", "FLOPs", "In sizes", "Out sizes")
#: Columns whose words are shortened if that is still not enough, and the smallest width.
SHORTENED, SHORTEST = ("Name", "Type"), 8
_BETWEEN = " | "
#: Unit of wrapping: text up to a dot, comma or colon.
_PIECE = re.compile(r".+?(?:[.,:] ?|$)")


def fitted(columns: Sequence[Sequence[str]], width: int | None) -> tuple[list[str], list[str]]:
    """Lay out columns side by side; the first cell of each is its name.

    Args:
        columns: columns of equal length.
        width: longest line in characters; None for no limit.

    Returns:
        the rows, of one or more lines each, and the names of the omitted columns.
    """
    count, kept = 0, list(columns)
    widths, too_much = _widths(kept, width)
    while too_much > 0 and count < len(LEFT_OUT):
        count += 1
        kept = [cells for cells in columns if cells[0] not in LEFT_OUT[:count]]
        widths, too_much = _widths(kept, width)
    least = [SHORTEST if cells[0] in SHORTENED else at for cells, at in zip(kept, widths, strict=True)]
    _shrink(widths, least, too_much)
    folded = [[_folded(cell, at) for cell in cells] for cells, at in zip(kept, widths, strict=True)]
    widths = [max(len(line) for lines in cells for line in lines) for cells in folded]
    rows = ["\n".join(_lines(row, widths)) for row in zip(*folded, strict=True)]
    return rows, [cells[0] for cells in columns if cells[0] in LEFT_OUT[:count]]


def _widths(columns: Sequence[Sequence[str]], width: int | None) -> tuple[list[int], int]:
    """Return the columns' widths after wrapping, and by how much they are still too wide together."""
    widths = [max(map(len, cells)) for cells in columns]
    if width is None:
        return widths, 0
    least = [
        max(len(piece.rstrip()) for cell in cells for piece in _PIECE.findall(cell) or [""])
        if cells[0] in FOLDED
        else at
        for cells, at in zip(columns, widths, strict=True)
    ]
    return widths, _shrink(widths, least, sum(widths) + len(_BETWEEN) * (len(columns) - 1) - width)


def _shrink(widths: list[int], least: Sequence[int], too_much: int) -> int:
    """Narrow columns, the widest first, none below its ``least``; return the excess that remains."""
    while too_much > 0:
        wider = [at for at, width in enumerate(widths) if width > least[at]]
        if not wider:
            break
        widths[max(wider, key=lambda at: widths[at])] -= 1
        too_much -= 1
    return too_much


def _folded(cell: str, width: int) -> list[str]:
    """Wrap a cell to lines of at most ``width`` characters."""
    lines = [""]
    for piece in _PIECE.findall(cell):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [_shortened(line.rstrip(), width) for line in lines]


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _lines(row: Sequence[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a row of wrapped cells."""
    for cells in zip_longest(*row, fillvalue=""):
        yield _BETWEEN.join(map(str.ljust, cells, widths)).rstrip()

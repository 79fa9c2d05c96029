"""Lays out text tables that fit into a terminal, without breaking words."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import zip_longest

#: Minimum width to which the words in a column are shortened.
_SHORTEST = 8
#: The unit of wrapping: text up to a space or a separator. Numbers and their suffixes stay whole (0.212.ckpt).
_PIECE = re.compile(r".+?(?:(?<!\d)\. ?|[,:] ?|[-/ ]|$)")


def fitted(
    columns: Sequence[Sequence[str]],
    width: int | None,
    folded: Collection[str],
    left_out: Sequence[str],
    shortened: Collection[str],
    between: str = "  ",
) -> tuple[list[str], list[str]]:
    """Lay out columns side by side. The first cell of each column is its name.

    Args:
        columns: columns of equal length.
        width: maximum line length in characters; None means no limit.
        folded: names of columns whose cells may be wrapped.
        left_out: names of columns to omit, one after the other, if the table is too wide despite wrapping.
        shortened: names of columns whose words are shortened if the table is still too wide.
        between: text between two columns.

    Returns:
        The rows, each of which has one or more lines, and the names of the omitted columns.
    """
    count, kept = 0, list(columns)
    widths, too_much = _widths(kept, width, folded, between)
    while too_much > 0 and count < len(left_out):
        count += 1
        kept = [cells for cells in columns if cells[0] not in left_out[:count]]
        widths, too_much = _widths(kept, width, folded, between)
    least = [_SHORTEST if cells[0] in shortened else at for cells, at in zip(kept, widths, strict=True)]
    _shrink(widths, least, too_much)
    wrapped = [[_wrapped(cell, at) for cell in cells] for cells, at in zip(kept, widths, strict=True)]
    widths = [max(len(line) for lines in cells for line in lines) for cells in wrapped]
    rows = [
        "\n".join(between.join(map(str.ljust, line, widths)).rstrip() for line in zip_longest(*row, fillvalue=""))
        for row in zip(*wrapped, strict=True)
    ]
    return rows, [cells[0] for cells in columns if cells[0] in left_out[:count]]


def _widths(
    columns: Sequence[Sequence[str]], width: int | None, folded: Collection[str], between: str
) -> tuple[list[int], int]:
    """Return the widths of the columns after wrapping, and the number of characters that still exceed the width."""
    widths = [max(map(len, cells)) for cells in columns]
    if width is None:
        return widths, 0
    least = [
        max(len(piece.rstrip()) for cell in cells for piece in _PIECE.findall(cell) or [""])
        if cells[0] in folded
        else at
        for cells, at in zip(columns, widths, strict=True)
    ]
    return widths, _shrink(widths, least, sum(widths) + len(between) * (len(columns) - 1) - width)


def _shrink(widths: list[int], least: Sequence[int], too_much: int) -> int:
    """Narrow columns, widest first, but none below its minimum in ``least``; return the remaining excess width."""
    while too_much > 0:
        wider = [at for at, width in enumerate(widths) if width > least[at]]
        if not wider:
            break
        widths[max(wider, key=lambda at: widths[at])] -= 1
        too_much -= 1
    return too_much


def _wrapped(cell: str, width: int) -> list[str]:
    """Wrap a cell into lines of at most ``width`` characters."""
    lines = [""]
    for piece in _PIECE.findall(cell):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line if len(line) <= width else f"{line[: width - 3]}..." for line in map(str.rstrip, lines)]

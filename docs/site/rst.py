"""The few forms of reStructuredText that the generated pages use."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence


def heading(text: str, line: str) -> str:
    return f"{text}\n{line * len(text)}\n\n"


def block(language: str, text: str) -> str:
    return indented(text, f".. code-block:: {language}")


def indented(text: str, *head: str) -> str:
    """Return a directive with its content."""
    return "\n".join(head) + "\n\n" + textwrap.indent(text.rstrip(), "   ") + "\n\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [".. list-table::", "   :header-rows: 1", "   :widths: auto", ""]
    for row in (header, *rows):
        for place, cell in enumerate(row):
            lines.append(f"   {'  ' if place else '* '}- {' '.join(cell.split())}".rstrip())
    return "\n".join(lines) + "\n\n"


def literal(text: str) -> str:
    return f"``{text}``" if text else ""


def plain(text: str) -> str:
    """Escape the characters that have a meaning in reStructuredText."""
    return "".join("\\" + sign if sign in "*`|_\\" else sign for sign in text)

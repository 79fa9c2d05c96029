"""Creates a self-contained HTML page with text and tables, for reports that are opened in a browser.

This module uses only the standard library. The functions return :class:`Html`; anything else on a page is treated as
text and escaped. Colors follow the reader's light or dark color scheme.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

#: Colors of series and chart segments for each color scheme, distinguishable with red-green color blindness.
_LIGHT = ("#3b6fb6", "#e08a1e", "#3a9a6a", "#b4467e", "#7a6bc4", "#8a8d93")
_LIGHT += ("#c4a000", "#2fa3b5", "#a0522d", "#5b7c2a", "#1f4e79", "#d98cb3")
_DARK = ("#7aa7e8", "#f0a94a", "#63c497", "#e07fb2", "#a99bee", "#a9adb5")
_DARK += ("#e2c33c", "#62cddd", "#cf8a63", "#9cbf5f", "#b9cbe6", "#f2c4da")

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1d2126; --soft: #667; --line: #d9dce1; --back: #fff; --box: #f6f7f9; %(light)s }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa1ab; --line: #3a4048; --back: #15181c; --box: #1d2126; %(dark)s }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 24px 20px 60px; max-width: 860px; color: var(--ink); background: var(--back);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 17px; margin: 34px 0 8px } p { margin: 6px 0 }
.scroll { overflow-x: auto; margin-bottom: 10px }
table { border-collapse: collapse; font-size: 14px } th, td { text-align: left; padding: 4px 14px 4px 0;
  border-bottom: 1px solid var(--line); vertical-align: top } th { color: var(--soft); font-weight: 600 }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
.card { background: var(--box); border-left: 4px solid var(--c0); border-radius: 4px;
  padding: 8px 14px; margin: 10px 0 }
.card h3 { margin: 0 0 4px; font-size: 15px } .card.good { border-color: var(--c2) }
.card.bad { border-color: var(--c1) }
.charts { display: flex; flex-wrap: wrap; gap: 12px 36px } figure { margin: 0 0 14px }
.charts figure { max-width: 235px }
figcaption { color: var(--soft); font-size: 13px } pre { background: var(--box); padding: 10px; overflow-x: auto }
svg { max-width: 100%%; height: auto; display: block } svg text { fill: var(--soft); font-size: 12px }
.legend { list-style: none; padding: 0; margin: 4px 0; display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px }
"""


class Html(str):
    """Finished HTML, which is put on a page without escaping."""

    __slots__ = ()


class Section(NamedTuple):
    """A section of a page: a heading and its contents, which are HTML or plain text."""

    heading: str
    parts: Sequence[str]


def escaped(value: object) -> str:
    """Return HTML unchanged and any other value as escaped text."""
    return value if isinstance(value, Html) else html.escape(str(value))


def page(title: str, sections: Iterable[Section], lead: str = "") -> str:
    """Return a complete, self-contained page. ``lead`` is a line of text below the title."""
    colors = {"light": _variables(_LIGHT), "dark": _variables(_DARK)}
    parts = [f"<h1>{escaped(title)}</h1>", paragraph(lead) if lead else ""]
    for section in sections:
        body = "\n".join(part if isinstance(part, Html) else paragraph(part) for part in section.parts)
        parts.append(f"<section><h2>{escaped(section.heading)}</h2>\n{body}</section>")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escaped(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE % colors}</style></head>\n<body>\n" + "\n".join(part for part in parts if part) + "\n"
        "</body></html>\n"
    )


def _variables(colors: Sequence[str]) -> str:
    return " ".join(f"--c{index}: {color};" for index, color in enumerate(colors))


def color(index: int) -> str:
    """Return the CSS color for the series or chart segment at ``index``; colors repeat after the twelfth."""
    return f"var(--c{index % len(_LIGHT)})"


def paragraph(text: object) -> Html:
    """Return a paragraph of text."""
    return Html(f"<p>{escaped(text)}</p>")


def verbatim(text: object) -> Html:
    """Return text in a fixed-width font, with its line breaks preserved."""
    return Html(f"<pre>{escaped(text)}</pre>")


def card(heading: str, lines: Iterable[object], kind: str = "") -> Html:
    """Return a box with a heading; ``kind`` is ``"good"``, ``"bad"`` or empty."""
    body = "".join(paragraph(line) for line in lines)
    return Html(f'<div class="card {escaped(kind)}"><h3>{escaped(heading)}</h3>{body}</div>')


def table(rows: Iterable[Sequence[object]], header: Sequence[object] = ()) -> Html:
    """Return a table. Columns of numbers are right-aligned."""
    rows = [list(row) for row in rows]
    words = {place for row in rows for place, cell in enumerate(row) if not _is_number(cell) and cell not in ("", None)}

    def cells(row: Sequence[object], tag: str) -> str:
        return "".join(
            f"<{tag}{'' if place in words else ' class=number'}>{escaped(_shown(cell))}</{tag}>"
            for place, cell in enumerate(row)
        )

    head = f"<thead><tr>{cells(header, 'th')}</tr></thead>" if header else ""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return Html(f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>')


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value

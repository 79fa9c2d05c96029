"""Pages: whole, self-contained, safe to put anything on."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from paceline.report import html_page as pages
from paceline.report.html_page import Html, Section
from paceline.report.svg_charts import line_chart, pie, stacked_bars


class Balanced(HTMLParser):
    """Fails on a tag that is closed in the wrong place."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(text: str) -> Balanced:
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert not parser.open
    return parser


EVERYTHING = [
    line_chart({"loss": [(0, 1.0), (1, 0.5), (2, float("nan")), (3, 0.2), (4, 0.1)]}, "step", "loss"),
    line_chart({"a": [(0, 1.0), (1, 1e-4)], "b": [(0, 2.0), (1, 0.0)]}, "step", "value", log=True),
    pie({"data": 3.0, "forward": 1.0, "nothing": 0.0}, "rank 0"),
    stacked_bars({"rank 0": {"data": 1.0, "forward": 2.0}, "rank 1": {"data": 0.0, "forward": 4.0}}, "ms"),
    pages.table([["a", 1], ["b", 2.5]], ["name", "value"]),
    pages.card("Slow", ["because"], "bad"),
    pages.verbatim("x\n  y"),
]


def test_a_page_is_whole_and_needs_nothing_from_elsewhere() -> None:
    text = pages.page("Report", [Section("All", EVERYTHING)], lead="A run")
    read(text)
    assert "http" not in text
    assert "<script" not in text
    assert "prefers-color-scheme: dark" in text


def test_text_is_escaped_wherever_it_stands() -> None:
    evil = "<script>alert('&')</script>"
    parts = [
        evil,
        pages.paragraph(evil),
        pages.card(evil, [evil]),
        pages.table([[evil]], [evil]),
        pie({evil: 1.0, "x": 2.0}, evil),
        stacked_bars({evil: {evil: 1.0}}, evil),
        line_chart({evil: [(0, 1), (1, 2)], "b": [(0, 1)]}, evil, evil, caption=evil),
        pages.verbatim(evil),
    ]
    text = pages.page(evil, [Section(evil, parts)], lead=evil)
    assert "<script" not in text
    assert "".join(read(text).text).count(evil) >= 15


def test_pieces_are_put_on_a_page_as_they_are() -> None:
    assert pages.escaped(Html("<b>x</b>")) == "<b>x</b>"
    assert pages.escaped("<b>") == "&lt;b&gt;"


def test_columns_of_numbers_stand_to_the_right_with_their_headings_and_others_do_not() -> None:
    shown = pages.table([["a", 1, "", 3], ["b", 2.5, 3, "-"]], ["name", "value", "rows", "either"])
    assert re.findall(r"<th( .*?)?>", shown) == ["", " class=number", " class=number", ""]
    assert re.findall(r"<td( .*?)?>", shown) == ["", " class=number", " class=number", ""] * 2

"""Set what surrounds a page's text: title, description, frames, columns, and whether the search covers it."""

from __future__ import annotations

from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

#: Pages that mention every subject and would be found first by every search. They are left out of the search.
UNSEARCHED = ("licenses", "sources/CHANGELOG", "sources/README", "sources/benchmarks/README")
LONGEST = 300
#: Sections of the start page that are in the right column of a wide screen. What comes before them is in the left one.
RIGHT = ("never-a-lost-step", "almost-no-cost")


def leave_out_of_search(app: Sphinx, doctree: nodes.document) -> None:
    if app.env.docname in UNSEARCHED:
        app.env.metadata[app.env.docname]["nosearch"] = "true"


def frame_pictures(app: Sphinx, doctree: nodes.document) -> None:
    """Put each picture of a page into a separate element, which can scroll on a narrow screen."""
    for picture in list(doctree.findall(nodes.image)):
        if isinstance(picture.parent, nodes.section):
            frame = nodes.container(classes=["picture", *picture["classes"]])
            picture.replace_self(frame)
            frame += picture


def widen_start_page(app: Sphinx, doctree: nodes.document) -> None:
    """Give the start page the whole width: its few sections need no list beside them."""
    if app.env.docname == app.config.root_doc:
        app.env.metadata[app.env.docname]["html_theme.sidebar_secondary.remove"] = "true"


def arrange_start_page(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Put what the start page shows first into two columns, so that one screen has all of it."""
    if page != app.config.root_doc:
        return
    title, *parts = (text := next(doctree.findall(nodes.section))).children
    places = [at for at, part in enumerate(parts) if isinstance(part, nodes.section) and set(part["ids"]) & set(RIGHT)]
    first, end = places[0], places[-1] + 1
    columns = [nodes.container("", *column) for column in (parts[:first], parts[first:end])]
    text.clear()
    text += [title, nodes.container("", *columns, classes=["start"]), *parts[end:]]


def describe(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Use a page's first paragraph as its description, and give the start page a title that names Paceline once."""
    if page == app.config.root_doc:
        context["title"], context["docstitle"] = f"{app.config.html_title}: training for PyTorch", ""
    first = next(doctree.findall(nodes.paragraph), None) if doctree else None
    if first is not None:
        words = " ".join(first.astext().split())
        short = words if len(words) <= LONGEST else words[:LONGEST].rpartition(" ")[0] + " ..."
        context["metatags"] += f'\n<meta name="description" content="{escape(short)}">'


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", leave_out_of_search)
    app.connect("doctree-read", frame_pictures)
    app.connect("doctree-read", widen_start_page)
    app.connect("doctree-resolved", arrange_start_page)
    app.connect("html-page-context", describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

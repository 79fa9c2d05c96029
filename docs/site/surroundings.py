"""Set what surrounds a page's text: title, description, frames of pictures, and whether the search covers it."""

from __future__ import annotations

from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

#: Pages that mention every subject and would be found first by every search. They are left out of the search.
UNSEARCHED = ("licenses", "sources/CHANGELOG", "sources/README", "sources/benchmarks/README")
LONGEST = 300


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
    app.connect("html-page-context", describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

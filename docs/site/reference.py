"""Writes the pages of the reference from the package itself, whenever the site is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import errors
import objects
import tables
from docutils import nodes
from rst import heading
from sources import write
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

#: Pages that are made from tables, before those of classes and functions.
TABLES = {"hooks": tables.hooks, "commands": tables.commands, "settings": tables.settings, "errors": errors.page}


def write_pages(app: Sphinx, config: Any) -> None:
    """Write every page of the reference."""
    folder = Path(app.srcdir) / "reference"
    index = heading("Reference", "=") + (
        "Every class and function, from the docstrings of the code; every hook, command, setting and environment variable; "
        "and the errors that people meet most.\n\n"
    )
    for name, made in TABLES.items():
        write(folder / f"{name}.rst", made())
    index += toctree("Tables", list(TABLES))
    for group, pages in objects.PAGES.items():
        index += toctree(group, list(pages))
        for name, page in pages.items():
            write(folder / f"{name}.rst", objects.text(page))
    write(folder / "index.rst", index)


def toctree(caption: str, pages: list[str]) -> str:
    lines = "\n".join(f"   {page}" for page in pages)
    return f".. toctree::\n   :caption: {caption}\n   :maxdepth: 1\n\n{lines}\n\n"


def find_by_last_part(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: Any) -> nodes.reference | None:
    """Resolve a docstring's reference to a name that is written without its module, or with the one that defines it."""
    if node.get("refdomain") != "py":
        return None
    *_, owner, name = ["", *node["reftarget"].split(".")]
    described = env.domains.python_domain.objects
    found = [full for full in described if full.endswith(f".{name}")]
    closer = [full for full in found if full.endswith(f".{owner}.{name}")] if owner else []
    best = closer or found
    if len(best) != 1 and len({described[one].node_id for one in best}) != 1:
        return None
    there = described[best[0]]
    return make_refnode(app.builder, node["refdoc"], there.docname, there.node_id, content, best[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", write_pages)
    app.connect("missing-reference", find_by_last_part)
    return {"parallel_read_safe": True}

"""Write the pages of the reference from the package itself, whenever the site is built."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import errors
import objects
import tables
from docutils import nodes
from sources import write
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

#: Pages that are built from tables; they come before the pages of classes and functions.
TABLES = {"hooks": tables.hooks, "commands": tables.commands, "settings": tables.settings, "errors": errors.page}


def write_pages(app: Sphinx, config: Any) -> None:
    """Write every page of the reference; docs/reference.md has their table of contents."""
    folder = Path(app.srcdir) / "reference"
    for name, made in TABLES.items():
        write(folder / f"{name}.rst", made())
    for name, page in objects.PAGES.items():
        write(folder / f"{name}.rst", objects.text(page))


def describe_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Show each list of pages in docs/reference.md as a table that describes each page."""
    if page == "reference":
        source[0] = re.sub(r"```\{toctree\}\n:caption: (.*)\n:maxdepth: 1\n\n([^`]*)```", described(app), source[0])


def described(app: Sphinx) -> Callable[[re.Match[str]], str]:
    """Return a function that replaces a list of pages with a heading, a table, and the list for the sidebar."""

    def row(name: str) -> str:
        title, _, about = re.split(r"\n", Path(app.srcdir, f"{name}.rst").read_text(encoding="utf-8"), maxsplit=2)
        about = re.search(r"^(?!\.\.)(.+?[.])(?= |$)", about.lstrip("\n"), re.M)
        words = re.sub(r":\w+:`(?:\w+[.])*(\w+)`", r"``\1``", about[1] if about else "")
        return f"| [{title}]({name}.rst) | {words} |\n"

    def table(found: re.Match[str]) -> str:
        rows = "".join(map(row, found[2].split()))
        listed = f"```{{toctree}}\n:caption: {found[1]}\n:hidden:\n\n{found[2]}```"
        return f"## {found[1]}\n\n| page | what it has |\n|---|---|\n{rows}\n{listed}"

    return table


def mean_what_the_file_means(app: Sphinx, page: nodes.document) -> None:
    """Resolve a bare name in a class's types as in the file that defines the class: there are two Accelerators."""
    for node in page.findall(pending_xref):
        if node.get("refdomain") != "py" or not node.get("py:class") or "." in node["reftarget"]:
            continue
        module = sys.modules.get(str(node.get("py:module")))
        owner = getattr(module, node["py:class"].partition(".")[0], None)
        meant = getattr(sys.modules.get(getattr(owner, "__module__", "")), node["reftarget"], None)
        if inspect.isclass(meant):
            node["reftarget"] = f"{meant.__module__}.{meant.__qualname__}"


def set_dashes(app: Sphinx, page: nodes.document) -> None:
    """Put a dash between an argument's name and its description; Sphinx does so only with smart quotes."""
    for node in list(page.findall(nodes.Text)):
        if node.astext() == " -- ":
            node.parent.replace(node, nodes.Text(" \N{EN DASH} "))


@cache
def by_last_part(env: BuildEnvironment) -> dict[str, list[str]]:
    """Return every described name, grouped by its last part."""
    names: dict[str, list[str]] = {}
    for full in env.domains.python_domain.objects:
        names.setdefault(full.rpartition(".")[2], []).append(full)
    return names


def find_by_last_part(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: Any) -> nodes.reference | None:
    """Resolve a docstring's reference to a name that is written without its module, or with the one that defines it."""
    if node.get("refdomain") != "py":
        return None
    *_, owner, name = ["", *node["reftarget"].split(".")]
    described = env.domains.python_domain.objects
    found = by_last_part(env).get(name, [])
    closer = [full for full in found if full.endswith(f".{owner}.{name}")] if owner else []
    best = closer or ([] if owner[:1].isupper() else found)  # another class's method of that name is a wrong guess
    if len(best) != 1 and len({described[one].node_id for one in best}) != 1:
        return None
    there = described[best[0]]
    return make_refnode(app.builder, node["refdoc"], there.docname, there.node_id, content, best[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", write_pages)
    app.connect("source-read", describe_pages)
    app.connect("doctree-read", mean_what_the_file_means)
    app.connect("doctree-read", set_dashes)
    app.connect("missing-reference", find_by_last_part)
    return {"parallel_read_safe": True}

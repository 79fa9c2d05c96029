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
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.nodes import make_refnode
from sphinx.util.typing import stringify_annotation

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


def write_aliases_out(app: Sphinx, page: nodes.document) -> None:
    """Replace the name of a type alias, which the reference does not describe, by the type that it stands for."""
    known = aliases(tuple(sorted(name for name in sys.modules if name.partition(".")[0] == "paceline")))
    for node in list(page.findall(pending_xref)):
        named = known.get(node["reftarget"].rpartition(".")[2], {}) if node.get("refdomain") == "py" else {}
        owner = getattr(sys.modules.get(str(node.get("py:module"))), str(node.get("py:class")).partition(".")[0], None)
        texts = {named[owner.__module__]} if getattr(owner, "__module__", "") in named else set(named.values())
        if len(texts) != 1:
            continue
        bar, following = (*node.parent[node.parent.index(node) + 1 :][:2], None, None)[:2]
        if texts == {"str"} and following is not None and (bar.astext(), following.astext()) == (" | ", "str"):
            node.parent.remove(bar)
            node.parent.remove(node)
        else:
            node.replace_self(nodes.emphasis("", texts.pop()))
    for node in list(page.findall(lambda one: isinstance(one, nodes.emphasis) and one.astext().startswith("~"))):
        node.replace_self(nodes.emphasis("", node.astext().rpartition(".")[2]))  # Sphinx leaves it after a Literal


@cache
def aliases(modules: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Return the type aliases of some modules, written out, by name and module. A long list of strings is a ``str``."""
    line = re.compile(r"^([A-Z]\w+)(?:: TypeAlias)? = (?=Any$|Literal\[|Callable\[|\w[\w.\[\], ]* \| )", re.M)
    found: dict[str, dict[str, str]] = {}
    for module in map(sys.modules.__getitem__, modules):
        path = getattr(module, "__file__", None)
        for name in line.findall(Path(path).read_text(encoding="utf-8")) if path else ():
            text = re.sub(r"~|\b(?:\w+[.])+", "", stringify_annotation(getattr(module, name), "smart"))
            if len(text) <= 100 or text.startswith("Literal"):
                found.setdefault(name, {})[module.__name__] = text if len(text) <= 100 else "str"
    return found


def whole_text(docstring: GoogleDocstring) -> tuple[str, list[str]]:
    """Return an attribute's docstring without a type: by default the words before its first colon would be one."""
    return "", GoogleDocstring(docstring._dedent(docstring._consume_to_end()), docstring._config).lines()


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
    GoogleDocstring._consume_inline_attribute = whole_text
    app.connect("config-inited", write_pages)
    app.connect("source-read", describe_pages)
    app.connect("doctree-read", write_aliases_out)
    app.connect("doctree-read", mean_what_the_file_means)
    app.connect("doctree-read", set_dashes)
    app.connect("missing-reference", find_by_last_part)
    return {"parallel_read_safe": True}

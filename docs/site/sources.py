"""Makes a page of every file of the repository that a page of the documentation links to, so that the link works."""

import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

#: Files that have a page already.
PAGES = {"CHANGELOG.md": "changelog.md", "README.md": "index.md"}
FOLDER = "sources"
LANGUAGES = {".py": "python", ".sh": "sh", ".toml": "toml", ".yaml": "yaml"}
LINK = re.compile(r"(?<=\]\()((?:\.\./)+[^)#\s]+)(?=[)#])")


def outside(docs: Path, page: Path, target: str) -> str | None:
    """The path in the repository of a link's target, None if it is in docs/."""
    goal = Path(os.path.normpath(page.parent / target))
    return None if goal.is_relative_to(docs) else goal.relative_to(docs.parent).as_posix()


def write_pages(app: Sphinx, config: Any) -> None:
    """Write one page for each linked file or folder outside docs/."""
    docs = Path(app.srcdir)
    pages = [path for path in docs.rglob("*.md") if FOLDER not in path.relative_to(docs).parts]
    links = {outside(docs, page, m[1]) for page in pages for m in LINK.finditer(page.read_text())}
    for path in sorted(links - {None, *PAGES}):
        text = f":orphan:\n\n{path}\n{'=' * len(path)}\n"
        up = "../" * (len(Path(path).parts) + 1)
        for file in files(docs.parent / path):
            name = file.relative_to(docs.parent).as_posix()
            text += f"\n{name}\n{'-' * len(name)}\n" if name != path else ""
            if file.suffix == ".md":
                text += f"\n.. include:: {up}{name}\n   :parser: myst_parser.sphinx_\n   :start-line: 1\n"
            else:
                text += f"\n.. literalinclude:: {up}{name}\n   :language: {LANGUAGES.get(file.suffix, 'text')}\n"
        write(docs / FOLDER / f"{path}.rst", text)


def files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [one for one in sorted(path.iterdir()) if one.suffix in LANGUAGES or one.suffix == ".md"]


def write(path: Path, text: str) -> None:
    """Write a file unless it has this text: Sphinx reads again what is newer than its last build."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def lead_to_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Point links to files outside docs/ at their pages."""
    docs, here = Path(app.srcdir), app.env.doc2path(page)

    def there(link: re.Match[str]) -> str:
        path = outside(docs, Path(here), link[1])
        if path is None:
            return link[1]
        goal = docs / PAGES.get(path, f"{FOLDER}/{path}.rst")
        return Path(os.path.relpath(goal, Path(here).parent)).as_posix()

    source[0] = LINK.sub(there, source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", write_pages)
    app.connect("source-read", lead_to_pages)
    return {"parallel_read_safe": True}

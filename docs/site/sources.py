"""Write a page for every file of the repository that the documentation links to, so that the link works."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rst import heading
from sphinx.application import Sphinx

FOLDER = "sources"
LANGUAGES = {".py": "python", ".sh": "sh", ".toml": "toml", ".yaml": "yaml"}
#: The target of a Markdown link within the repository, without its anchor.
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|/)[^)#\s]+")


def write_pages(app: Sphinx, config: Any) -> None:
    """Write one page for each linked file or folder outside docs/, and for those that a written page links to."""
    docs = Path(app.srcdir)
    root = docs.parent
    waiting = [path.relative_to(root).as_posix() for path in docs.rglob("*.md") if FOLDER not in path.parts]
    seen = set(waiting)
    while waiting:
        origin = waiting.pop()
        text = (root / origin).read_text(encoding="utf-8") if origin.endswith(".md") else ""
        for path in set(linked(root, origin, text)) - seen:
            seen.add(path)
            waiting.append(path)
        if not origin.startswith("docs/"):
            made = f"---\norphan: true\n---\n\n{led(root, origin, text)}" if text else listing(root, origin)
            write(docs / place(origin), made)


def linked(root: Path, origin: str, text: str) -> Iterator[str]:
    """Yield the paths in the repository that a Markdown file links to, without those in docs/."""
    for link in LINK.finditer(text):
        path = goal(origin, link[0])
        if (root / path).exists() and not path.startswith("docs/"):
            yield path


def goal(origin: str, target: str) -> str:
    """Return the path of a link's target in the repository."""
    return Path(os.path.normpath(Path(origin).parent / target)).as_posix()


def place(path: str) -> str:
    """Return the path below docs/ of the page that shows a file."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{FOLDER}/{path}" if path.endswith(".md") else f"{FOLDER}/{path}.rst"


def led(root: Path, origin: str, text: str) -> str:
    """Return the text of a Markdown file, with its links pointing to pages of the site."""
    here = Path(place(origin)).parent

    def there(link: re.Match[str]) -> str:
        path = goal(origin, link[0])
        return Path(os.path.relpath(place(path), here)).as_posix() if (root / path).exists() else link[0]

    return LINK.sub(there, text)


def listing(root: Path, path: str) -> str:
    """Return a page that shows a file, or the files of a folder."""
    text = ":orphan:\n:nosearch:\n\n" + heading(path, "=")
    up = "../" * (len(Path(path).parts) + 1)
    whole = root / path
    for file in [whole] if whole.is_file() else sorted(one for one in whole.iterdir() if one.suffix in LANGUAGES):
        name = file.relative_to(root).as_posix()
        text += heading(name, "-") if name != path else ""
        text += f".. literalinclude:: {up}{name}\n   :language: {LANGUAGES.get(file.suffix, 'text')}\n\n"
    return text


def write(path: Path, text: str) -> None:
    """Write a file unless it already has this text: Sphinx reads files again that are newer than its last build."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def lead_to_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Point the links of a page of docs/ at pages of the site."""
    docs = Path(app.srcdir)
    path = Path(app.env.doc2path(page)).relative_to(docs)
    if path.suffix == ".md" and path.parts[0] != FOLDER:
        source[0] = led(docs.parent, f"docs/{path.as_posix()}", source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", write_pages)
    app.connect("source-read", lead_to_pages)
    return {"parallel_read_safe": True}

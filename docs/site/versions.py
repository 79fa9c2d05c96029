"""Publish the built site beside its other versions: python docs/site/versions.py FOLDER, after make docs.

FOLDER is the folder that a web server publishes, at any address. The site is copied to FOLDER/VERSION and replaces what
was there. FOLDER/index.html leads to the newest version, and the list in every version names all of them.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

SITE = Path(__file__).resolve().parent.parent.parent / "build" / "docs"
#: Files of each version that static/site.js reads: all published versions, newest first, and the pages of this one.
VERSIONS, PAGES = "_static/versions.js", "_static/pages.js"
START = """<!DOCTYPE html>
<meta charset="utf-8">
<title>Paceline</title>
<meta http-equiv="refresh" content="0; url={newest}/index.html">
<a href="{newest}/index.html">Paceline {newest}</a>
"""


def publish(site: Path, folder: Path) -> list[str]:
    """Copy a built site into the folder of all versions, and return the versions in it, newest first."""
    (version,) = read(site / VERSIONS)
    shutil.rmtree(folder / version, ignore_errors=True)
    shutil.copytree(site, folder / version, ignore=shutil.ignore_patterns(".buildinfo*", ".doctrees"))
    found = sorted((path.name for path in folder.iterdir() if is_version(path)), key=Version, reverse=True)
    for one in found:
        write(folder / one / VERSIONS, "PACELINE_VERSIONS", found)
    newest = next((one for one in found if not Version(one).is_prerelease), found[0])
    (folder / "index.html").write_text(START.format(newest=newest), encoding="utf-8")
    return found


def is_version(folder: Path) -> bool:
    """Return whether a folder is a published version."""
    try:
        Version(folder.name)
    except InvalidVersion:
        return False
    return (folder / VERSIONS).is_file()


def read(path: Path) -> list[str]:
    """Return the list in a script that ``write`` wrote."""
    return json.loads(path.read_text(encoding="utf-8").partition("= ")[2].rstrip(";\n"))


def write(path: Path, name: str, values: list[str]) -> None:
    """Write a script that sets a variable to a list. A script, unlike JSON, can be loaded from file://."""
    path.write_text(f"var {name} = {json.dumps(values)};\n", encoding="utf-8")


def write_lists(app: Any, error: Exception | None) -> None:
    """Write the list of the built site's pages, and a list of versions with only this one."""
    if error is None and app.builder.name == "html":
        write(Path(app.outdir, VERSIONS), "PACELINE_VERSIONS", [app.config.version])
        write(Path(app.outdir, PAGES), "PACELINE_PAGES", sorted({*app.env.found_docs, "genindex", "search"}))


def setup(app: Any) -> dict[str, Any]:
    app.connect("build-finished", write_lists)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (SITE / VERSIONS).is_file():
        sys.exit("Pass the folder of all versions, and run make docs first: python docs/site/versions.py FOLDER")
    sys.stdout.write(f"{', '.join(publish(SITE, Path(sys.argv[1])))}\n")

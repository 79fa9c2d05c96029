"""Create the description that package indexes show from README.md. All other metadata is in pyproject.toml.

On a package index, relative links do not work, and there is no folder ``.`` to install. Therefore, the description
shows the paths of linked files instead of relative links, and its commands install the package by name.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup


def description(readme: str) -> str:
    """Return the README with the paths of linked files in place of relative links."""

    def named(link: re.Match[str]) -> str:
        text, path = link[1], link[2].partition("#")[0]
        return text if path in text else f"{text} ({path})"

    linked = re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)", named, readme)
    return re.sub(r'pip install (")?\.', r"pip install \1paceline", linked)


if __name__ == "__main__":
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    # This file is in the package's folder. Because its name is passed, setuptools leaves it out of the package.
    setup(
        script_name="setup.py",
        long_description=description(readme),
        long_description_content_type="text/markdown",
    )

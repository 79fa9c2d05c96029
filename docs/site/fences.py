"""Show blocks ``text output``, which contain what the program before them prints, as output."""

import re
from typing import Any

from sphinx.application import Sphinx


def mark_outputs(app: Sphinx, page: str, source: list[str]) -> None:
    """Turn fences that only the tests of the pages know into a directive of Sphinx."""
    source[0] = re.sub(r"^```text output\n", "```{code-block} text\n:class: output\n", source[0], flags=re.M)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", mark_outputs)
    return {"parallel_read_safe": True}

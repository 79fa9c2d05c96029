"""Every public name of Lightning is answered, and ``docs/lightning_names.md`` says with what.

PYTHONPATH=.. python tests/compat/test_lightning_surface.py    # in the repository's root; writes the page anew
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paceline
from paceline.compat.finder import UNKNOWN, Finder
from paceline.compat.lightning import names

PAGE = Path(paceline.__file__).parent / "docs" / "lightning_names.md"
HEAD = f"""# Names of Lightning

Every public name of Lightning {names.VERSION}, and what a program gets that imports it under [the
stand-in](from_lightning.md). Every module of `lightning` has these names, so a name can be imported wherever Lightning
itself imports it. A name that Paceline does not have can be imported too, for `isinstance` and to inherit from; calling
it is an error that says what this table says.

| name | in `lightning...` | Paceline |
|---|---|---|
"""


def homes() -> dict[str, str]:
    """Each public name, and the shortest module that has it."""
    found: dict[str, str] = {}
    for module, text in sorted(names.SURFACE.items(), key=lambda item: (item[0].count("."), item[0])):
        for name in text.split():
            found.setdefault(name, module)
    return found


def answer(module: str, name: str) -> str:
    """What Paceline has for a name, for a table."""
    target = names.PACKAGE.modules[module].get(name)
    if target is not None:
        return f"`paceline.{target.module}.{target.name}`"
    if name in names.UNSUPPORTED:
        return f"not here: {names.UNSUPPORTED[name]}"
    raise KeyError(name)


def page() -> str:
    """The whole page."""
    rows = sorted(homes().items(), key=lambda item: item[0].lower())
    return HEAD + "".join(
        f"| `{name}` | `{module.removeprefix('lightning').removeprefix('.')}` | {answer(module, name)} |\n"
        for name, module in rows
    )


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), __doc__


def test_every_public_name_of_every_module_is_there_or_says_what_to_use() -> None:
    unanswered = []
    for module, text in names.SURFACE.items():
        for name in text.split():
            target = names.PACKAGE.modules[module].get(name)
            try:
                value: Any = names.fallback(name) if target is None else target.value()
            except AttributeError:
                value = UNKNOWN
            if value is UNKNOWN:
                unanswered.append(f"{module}.{name}")
    assert not unanswered


def test_every_module_can_be_imported() -> None:
    finder = Finder(names.PACKAGE)
    assert [module for module in names.SURFACE if finder.find_spec(module) is None] == []


if __name__ == "__main__":
    PAGE.write_text(page())

"""Every public name of Accelerate is answered, and ``docs/accelerate_names.md`` says with what.

PYTHONPATH=.. python tests/compat/test_accelerate_surface.py    # in the repository's root; writes the page anew

``write_surface.py`` writes down the names.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.compat.accelerate import names
from paceline.compat.finder import UNKNOWN, Finder

PAGE = Path(paceline.__file__).parent / "docs" / "accelerate_names.md"
PARAMETERS = Path(__file__).with_name("accelerate_parameters.txt")  # by write_parameters.py
#: Arguments and methods that the stand-in does not have, by the reason.
DIFFERENT = {
    "instances look them up in the wrapped scheduler": "AcceleratedScheduler.get_lr AcceleratedScheduler.print_lr",
    "instances look them up in the PartialState": (
        "AcceleratorState.destroy_process_group AcceleratorState.local_main_process_first "
        "AcceleratorState.main_process_first AcceleratorState.print AcceleratorState.split_between_processes "
        "AcceleratorState.wait_for_everyone"
    ),
    "an Accelerator calls them itself, with parts that Paceline does not have": (
        "DataLoaderAdapter.adjust_state_dict_for_prefetch DataLoaderShard.adjust_state_dict_for_prefetch "
        "FullyShardedDataParallelPlugin.validate_cpu_offload "
        "FullyShardedDataParallelPlugin.validate_mixed_precision_policy"
    ),
}
HEAD = f"""# Names of Accelerate

Every public name of Accelerate {names.VERSION}, and what a program gets that imports it under [the
stand-in](from_accelerate.md). A name that Paceline does not have can be imported too, for `isinstance` and to inherit
from; calling it is an error that says what this table says.

| name | in `accelerate...` | Paceline |
|---|---|---|
"""


def homes() -> dict[str, str]:
    """Each public name, and the shortest module that has it."""
    found: dict[str, str] = {}
    for module, text in sorted(names.SURFACE.items(), key=lambda item: (item[0].count("."), item[0])):
        for name in text.split():
            if f"{module}.{name}" not in names.SURFACE:
                found.setdefault(name, module)
    return found


def answer(module: str, name: str) -> str:
    """What Paceline has for a name, for a table."""
    target = names.PACKAGE.modules[module].get(name)
    if target is not None:
        return f"`paceline.{target.module}.{target.name}`"
    if name in names.UNSUPPORTED:
        return f"not here: {names.UNSUPPORTED[name]}"
    return "a value" if name in names.CONSTANTS else "answers for this machine"


def page() -> str:
    """The whole page."""
    rows = sorted(homes().items(), key=lambda item: (item[0].lower(), item[0]))
    listed = "".join(
        f"| `{name}` | `{module.removeprefix('accelerate').removeprefix('.')}` | {answer(module, name)} |\n"
        for name, module in rows
    )
    absent: dict[str, list[str]] = {}
    for name, module in rows:
        if answer(module, name).startswith("not here"):
            absent.setdefault(names.UNSUPPORTED[name], []).append(f"`{name}`")
    return (
        HEAD
        + listed
        + "\n## Not here\n\n| names | instead |\n|---|---|\n"
        + "".join(f"| {', '.join(found)} | {why} |\n" for why, found in sorted(absent.items()))
    )


def value_of(module: str, name: str) -> Any:
    """What a program that imports a name from a module gets."""
    target = names.PACKAGE.modules[module].get(name)
    if target is not None:
        return target.value()
    constants = names.PACKAGE.constants[module]
    return constants[name] if name in constants else names.fallback(name)


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), __doc__


def test_every_public_name_of_every_module_is_there_or_says_what_to_use() -> None:
    missing = [
        f"{module}.{name}"
        for module, text in names.SURFACE.items()
        for name in text.split()
        if f"{module}.{name}" not in names.SURFACE and value_of(module, name) is UNKNOWN
    ]
    assert missing == []


def test_what_is_left_out_raises_one_sentence() -> None:
    known = {name for text in names.SURFACE.values() for name in text.split()}
    for name in names.UNSUPPORTED.keys() & known:
        with pytest.raises(NotImplementedError, match=rf"^{name} is not available: [^\n]+\.$"):
            names.fallback(name)()


def test_every_module_can_be_imported() -> None:
    finder = Finder(names.PACKAGE)
    assert [module for module in names.SURFACE if finder.find_spec(module) is None] == []


def differences() -> Iterator[str]:
    """Parameters and methods of Accelerate that the stand-in's functions and classes do not have."""
    for line in PARAMETERS.read_text().splitlines():
        module, path, listed = line.split(":")
        name, _, method = path.partition(".")
        found = value_of(module, name)
        if name in names.UNSUPPORTED or not callable(found):
            continue
        if method and not hasattr(found, method):
            yield path
            continue
        function = inspect.getattr_static(found, method) if method else found
        function = getattr(found, method) if isinstance(function, (staticmethod, classmethod)) else function
        if not callable(function):
            continue
        given = inspect.signature(function).parameters | inspect.signature(function, follow_wrapped=False).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in given.values()):
            yield from (f"{path}({one})" for one in listed.split() if one not in given)


def test_functions_take_the_arguments_of_accelerate() -> None:
    assert sorted(set(differences())) == sorted(name for listed in DIFFERENT.values() for name in listed.split())


if __name__ == "__main__":
    PAGE.write_text(page())

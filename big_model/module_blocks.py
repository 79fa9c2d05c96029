"""Find a module's repeated blocks, and walk its modules from the bottom up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
#: Containers, which only store modules and cannot be called.
NO_FORWARD = (nn.ModuleList, nn.ModuleDict)


def bottom_up(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once, children before parents, which is the order in which layers are usually created."""
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for key, child in module.named_children():
            yield from visit(f"{name}.{key}" if name else key, child)
        yield name, module

    return visit("", root)


def repeated_elements(root: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks by name: modules in containers, if at least two of these modules have the same class.

    Modules inside a block, such as experts, belong to that block even if they repeat there.
    """
    elements: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for name, module in root.named_modules():
        for key, child in module.named_children() if isinstance(module, CONTAINERS) else ():
            if id(child) not in seen and type(child) not in NO_FORWARD and any(True for _ in child.parameters()):
                seen.add(id(child))
                elements[f"{name}.{key}" if name else key] = child
    return outermost(of_repeated_classes(elements))


def of_repeated_classes(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return only those of the given modules whose class occurs more than once among them."""
    counts = Counter(type(module) for module in found.values())
    return {name: module for name, module in found.items() if counts[type(module)] > 1}


def outermost(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return only those of the given modules that are not inside another given module."""
    return {name: module for name, module in found.items() if not any(name.startswith(f"{other}.") for other in found)}

"""Choose the modules to shard separately, and the modules to recompute during backward."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ... import messages
from ...big_model.module_blocks import NO_FORWARD, of_repeated_classes, outermost, repeated_elements

#: One or more classes or class names, a number of parameters, ``f(name, module) -> bool``, or ``"auto"``.
Policy = Any


def check_ignored(ignored: Iterable[nn.Module] | str | None) -> tuple[nn.Module, ...] | str | None:
    """Return ``ignored_modules`` as a tuple of modules or a regular expression; None if nothing is ignored.

    Raises:
        ValueError: the regular expression is not valid.
        TypeError: ``ignored`` is neither a list of modules nor a regular expression.
    """
    if not ignored:
        return None
    if isinstance(ignored, str):
        try:
            re.compile(ignored)
        except re.error as error:
            raise ValueError(
                f"FSDPStrategy: ignored_modules={ignored!r} is not a valid regular expression: {error}. Pass a "
                "list of modules, or an expression that matches full module names, such as 'encoder|.*[.]head'."
            ) from error
        return ignored
    found = () if isinstance(ignored, nn.Module) or not isinstance(ignored, Iterable) else tuple(ignored)
    if not found or not all(isinstance(module, nn.Module) for module in found):
        raise TypeError(
            f"FSDPStrategy: ignored_modules={ignored!r} is {messages.a(ignored)}. Pass a list of modules, or a "
            "regular expression that matches the modules' full names."
        )
    return found


def find_ignored(root: nn.Module, ignored: tuple[nn.Module, ...] | str | None) -> list[nn.Module]:
    """Return the modules inside ``root`` that ``ignored_modules`` lists or matches.

    Raises:
        ValueError: no parameter would be left to shard.
    """
    if ignored is None:
        return []
    if isinstance(ignored, str):
        found = [module for name, module in root.named_modules() if re.fullmatch(ignored, name)]
    else:
        given = set(map(id, ignored))
        found = [module for module in root.modules() if id(module) in given]
    if not found:
        shown = repr(ignored) if isinstance(ignored, str) else f"[{', '.join(type(m).__name__ for m in ignored)}]"
        messages.warn_once(
            f"FSDPStrategy(ignored_modules={shown}) matches no module of {type(root).__name__}, so all of its "
            "parameters are sharded. A regular expression must match a module's full name, as in named_modules()."
        )
    whole = parameter_ids(found)
    if whole and all(id(parameter) in whole for parameter in root.parameters()):
        raise ValueError(
            f"FSDPStrategy(ignored_modules=...) covers every parameter of {type(root).__name__}, so there is nothing "
            "to shard. Ignore fewer modules, or use strategy='ddp'."
        )
    return found


def parameter_ids(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the modules' parameters."""
    return {id(parameter) for module in modules for parameter in module.parameters()}


def choose_blocks(root: nn.Module, policy: Policy, whole: Collection[int] = ()) -> dict[str, nn.Module]:
    """Return a dict, by name, of the modules inside ``root`` that should be sharded separately, outer modules first.

    Modules that share a parameter stay in the root's group, so that the parameter remains one tensor. ``whole``
    contains the ids of parameters that are not sharded; a module that has only such parameters is never chosen.

    Raises:
        ValueError: the policy matches no module; the message lists the model's classes.
        TypeError: ``policy`` is not a valid policy.
    """
    if policy in (None, "root", "none"):
        return {}
    found = _repeated_blocks(root, whole) if policy == "auto" else find_modules(root, policy, "wrap", True, whole)
    tied = _tied_modules(root, found, whole)
    if tied:
        messages.info_once(
            f"FSDP keeps {messages.names(sorted(tied), last='and')} in the root's group, because modules that share a "
            "parameter must be gathered together."
        )
    return {name: module for name, module in found.items() if name not in tied}


def find_modules(
    root: nn.Module, policy: Policy, argument: str, smallest: bool = False, whole: Collection[int] = ()
) -> dict[str, nn.Module]:
    """Return the modules inside ``root``, without ``root`` itself, that a policy selects.

    The policy is one or more classes or class names, ``f(name, module)`` or, if ``smallest`` is True, a minimum
    number of parameters. ``argument`` is the name of the policy's argument, for error messages. Modules whose
    parameters are all in ``whole`` are left out.
    """
    candidates = {
        name: module
        for name, module in root.named_modules()
        if name and type(module) not in NO_FORWARD and _is_sharded(module, whole)
    }
    if smallest and isinstance(policy, int) and not isinstance(policy, bool):
        found = _by_size(candidates, policy, whole)
    else:
        matches = _matcher(policy, argument)
        found = {name: module for name, module in candidates.items() if matches(name, module)}
    if not found:
        counts = Counter(type(module).__name__ for module in candidates.values())
        listed = ", ".join(f"{name} ({count})" for name, count in counts.most_common(20)) or "none"
        raise ValueError(
            f"FSDPStrategy({argument}={_shown(policy)}) matches no module with parameters in {type(root).__name__}. "
            f"The model contains these classes: {listed}. Pass one of them, or leave {argument} out."
        )
    return found


def _shown(policy: Policy) -> str:
    if isinstance(policy, type):
        return policy.__name__
    if isinstance(policy, (list, tuple, set, frozenset)):
        return f"[{', '.join(map(_shown, policy))}]"
    return getattr(policy, "__qualname__", None) or repr(policy)


def _matcher(policy: Policy, argument: str) -> Callable[[str, nn.Module], bool]:
    several = policy if isinstance(policy, (list, tuple, set, frozenset)) else [policy]
    if several and all(isinstance(kind, (type, str)) for kind in several):
        classes = tuple(kind for kind in several if isinstance(kind, type))
        names = {kind for kind in several if isinstance(kind, str)}
        return lambda _, module: isinstance(module, classes) or bool(names & {c.__name__ for c in type(module).__mro__})
    if callable(policy) and not isinstance(policy, nn.Module):
        return lambda name, module: bool(policy(name, module))
    raise TypeError(
        f"FSDPStrategy: {argument}={policy!r} is {messages.a(policy)}. Pass one or more classes or class names, or a "
        "function f(name, module) -> bool."
    )


def _is_sharded(module: nn.Module, whole: Collection[int]) -> bool:
    return any(id(parameter) not in whole for parameter in module.parameters())


def _by_size(candidates: dict[str, nn.Module], least: int, whole: Collection[int]) -> dict[str, nn.Module]:
    """Choose, bottom-up, each module that has at least ``least`` parameters outside the submodules chosen so far."""
    if least < 1:
        raise ValueError(f"FSDPStrategy: wrap={least} is not a valid number of parameters. Pass 1 or more, or 'auto'.")
    chosen: set[str] = set()
    taken = set(whole)
    for name, module in reversed(list(candidates.items())):
        own = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        if sum(own.values()) >= least:
            chosen.add(name)
            taken |= own.keys()
    return {name: module for name, module in candidates.items() if name in chosen}


def _repeated_blocks(root: nn.Module, whole: Collection[int]) -> dict[str, nn.Module]:
    """Return a model's repeated blocks.

    Among the classes that occur at least twice in a container, the class with the most parameters is chosen.
    """
    outer = {name: module for name, module in repeated_elements(root).items() if _is_sharded(module, whole)}
    kinds = {type(module) for module in of_repeated_classes(outer).values()}
    if not kinds:
        messages.info_once(
            f"FSDP found no repeated blocks in {type(root).__name__}, so it gathers the whole model at once. For a "
            "large model, pass the classes whose instances should be gathered separately: FSDPStrategy(wrap=[...])."
        )
        return {}
    found = [{name: module for name, module in outer.items() if type(module) is kind} for kind in kinds]
    blocks = max(found, key=lambda blocks: (_size(blocks), len(blocks)))
    kind = type(next(iter(blocks.values()))).__name__
    messages.info_once(f"FSDP gathers the {len(blocks)} {kind} modules of {type(root).__name__} one at a time.")
    return blocks


def _size(found: dict[str, nn.Module]) -> int:
    return sum({id(p): p.numel() for module in found.values() for p in module.parameters()}.values())


def _tied_modules(root: nn.Module, blocks: dict[str, nn.Module], whole: Collection[int]) -> set[str]:
    """Return the names of blocks that share a sharded parameter with a module outside the block."""
    homes: dict[int, set[int]] = {}
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            homes.setdefault(id(parameter), set()).add(id(module))
    tied = set()
    for name, block in blocks.items():
        inside = {id(module) for module in block.modules()}
        if any(homes[id(p)] - inside for p in block.parameters() if id(p) not in whole):
            tied.add(name)
    return tied


def check_shapes(module: nn.Module, whole: Collection[int] = ()) -> None:
    """Raise a ValueError if a parameter that is not in ``whole`` has no dimension to shard along."""
    scalars = [name for name, p in module.named_parameters() if p.dim() == 0 and id(p) not in whole]
    if scalars:
        raise ValueError(
            f"{type(module).__name__} has parameters of shape () ({messages.names(scalars[:5], 'and')}), which cannot "
            "be sharded. Give them shape (1,), as in nn.Parameter(torch.tensor([1.0])), exclude their modules from "
            "sharding (ignored_modules=[...]), or use strategy='ddp'."
        )


# ---- activation checkpointing ----------------------------------------------------------------------------------------


def checkpoint_activations(root: nn.Module, policy: Policy, blocks: dict[str, nn.Module]) -> None:
    """Recompute modules during backward instead of keeping their activations (Chen et al., Sublinear Memory, 2016).

    ``policy`` selects the modules as in :func:`find_modules`; True selects ``blocks``. Only the forward of each
    instance is replaced, so parameter names do not change.
    """
    if policy is None or policy is False:
        return
    if policy is True and not blocks:
        raise ValueError(
            f"FSDPStrategy(activation_checkpointing=True) recomputes the blocks that are sharded separately, but "
            f"{type(root).__name__} has none. List the classes: activation_checkpointing=[...]."
        )
    found = blocks if policy is True else find_modules(root, policy, "activation_checkpointing")
    for module in outermost(found).values():
        vars(module)["forward"] = partial(checkpoint, module.forward, use_reentrant=False)

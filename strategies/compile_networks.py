"""Compile networks in place for ``Trainer(compile=...)``, so that names in checkpoints do not change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import nn

from .. import messages
from ..torch_private import COMPILED_CALL, compiler_of, inside_compiled, is_compiled, plain_call
from .recompile_watch import watch_compiling

#: What ``Trainer(compile=...)`` compiles: the networks that steps call, the training step, or that step as a CUDA
#: graph.
Scope = Literal["networks", "step", "graphs"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def scope_of(settings: Any) -> str | None:
    """Return what to compile, as one of :data:`SCOPES`; None if nothing is to be compiled."""
    if isinstance(settings, Mapping):
        scope = settings.get("scope", "networks")
        return None if settings.get("disable") and scope in ("step", "graphs") else scope
    return settings if isinstance(settings, str) else "networks" if settings else None


def arguments_of(settings: Any) -> dict[str, Any]:
    """Return the arguments for ``torch.compile``."""
    given = dict(settings) if isinstance(settings, Mapping) else {}
    if given.pop("scope", "") == "graphs" or settings == "graphs":
        given.setdefault("mode", "reduce-overhead")
    return given


def compile_in_place(module: nn.Module, settings: bool | str | Mapping[str, Any]) -> None:
    """Compile the networks that a module's steps call: its submodules and, for ``self(x)``, the module itself.

    The steps stay plain Python, so ``self.log`` and the rest of the trainer stay outside the graph. ``settings`` is
    True or a dict of arguments for ``torch.compile``. With ``regional``, only the module's repeated blocks are
    compiled, if it has any.
    """
    watch_compiling()
    arguments = arguments_of(settings)
    if arguments.pop("regional", False) and compile_repeated(module, arguments):
        return
    for target in (module, *_networks(module)):
        if not is_compiled(target):
            compile_one(target, arguments)


def compile_repeated(module: nn.Module, settings: Mapping[str, Any]) -> bool:
    """Compile a model's repeated blocks in place, sharing one compilation. Returns False if the model has none."""
    found: list[str] = []
    for name, holder in module.named_modules():
        blocks = list(holder.children()) if isinstance(holder, (nn.ModuleList, nn.Sequential)) else []
        inside = any(name == other or name.startswith(f"{other}.") for other in found)
        if len(blocks) > 1 and len({type(block) for block in blocks}) == 1 and not inside:
            found.append(name)
            for block in blocks:
                compile_one(block, settings)
    return bool(found)


def compile_one(module: nn.Module, settings: Mapping[str, Any]) -> None:
    """Run ``module.compile(**settings)``, and make it work for torch's own layers, which torch would skip."""
    if not type(module).forward.__module__.startswith("torch."):
        module.compile(**settings)
        return

    plain = plain_call(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    # Torch limits compilations per code object. If all layers shared one, a few layers would reach the limit.
    call.__code__ = call.__code__.replace(co_name=type(module).__name__)
    setattr(module, COMPILED_CALL, torch.compile(call, **settings))


def _networks(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, CONTAINERS):
            found += _networks(child)
        elif any(True for _ in child.parameters()):
            found.append(child)
    return found


def uncompiled(module: Any) -> Any:
    """Return the module inside ``torch.compile(module)``; return any other object unchanged."""
    compiler = compiler_of(module)
    if compiler is None:
        return module
    inner = inside_compiled(module)
    setattr(inner, COMPILED_CALL, compiler(plain_call(inner)))
    messages.info_once(
        "The module is wrapped by torch.compile. Its forward is compiled in place, and its steps stay plain Python. "
        "Trainer(compile=True) also compiles the networks that the steps call."
    )
    return inner

"""Which profiler ``Trainer(profiler=...)`` means."""

from __future__ import annotations

from typing import Any, Literal, get_args

from .. import messages
from ..profilers.base import PassThroughProfiler, Profiler

#: The profilers that have a name.
ProfilerName = Literal["simple", "advanced", "pytorch", "doctor"]
NAMES: tuple[ProfilerName, ...] = get_args(ProfilerName)


def chosen(value: Any) -> Profiler:
    """The profiler that ``Trainer(profiler=)`` means.

    Raises:
        ValueError: an unknown name.
        TypeError: neither a name nor a profiler.
    """
    if value is None:
        return PassThroughProfiler()
    if isinstance(value, Profiler):
        return value
    if not isinstance(value, str):
        hint = f" Did you mean {value.__name__}()?" if isinstance(value, type) else ""
        raise TypeError(
            f"Trainer(profiler={value!r}) is {messages.a(value)}. Pass {messages.names(NAMES)}, or a Profiler.{hint}"
        )
    name = value.lower()
    if name not in NAMES:
        raise ValueError(messages.unknown("profiler", value, NAMES, ", or pass a Profiler"))
    return _by_name(name)


def _by_name(name: str) -> Profiler:
    """Imported here, so that only who asks for one pays for it."""
    if name == "doctor":
        from ..doctor.doctor import Doctor

        return Doctor()
    if name == "simple":
        from ..profilers.simple import SimpleProfiler

        return SimpleProfiler()
    if name == "advanced":
        from ..profilers.advanced import AdvancedProfiler

        return AdvancedProfiler()
    from ..profilers.pytorch import PyTorchProfiler

    return PyTorchProfiler()

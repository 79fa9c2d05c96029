"""Resolve each setting to the value with the highest priority (code, launch flag, environment, file, default)."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

from .. import messages
from .files import CONFIG_VARIABLE, ConfigFile, find_file, read_file
from .names import PREFIX, SETTINGS, Setting

T = TypeVar("T")
Place = Literal["code", "flag", "env", "file", "default"]

#: Environment variable that tells launched processes which settings come from the launcher's flags, separated by
#: commas.
FLAGS = "PACELINE_LAUNCH_FLAGS"
#: Variables that users may set but that are not settings.
_OTHER_VARIABLES = ("PACELINE_GLOBAL_SEED", "PACELINE_LOG_LEVEL")
#: How similar an unknown variable must be to a known one to count as a misspelling of it.
_CLOSE = 0.75


class Given(NamedTuple):
    """A value from code, which is used unchanged, and its source, such as ``Trainer(precision='bf16')``."""

    value: Any
    where: str


class Origin(NamedTuple):
    """Where a value comes from: the kind of source and the source itself."""

    place: Place
    where: str


class Row(NamedTuple):
    """A row of the settings table. If ``place`` is ``"settings"``, ``where`` is the name of the setting."""

    name: str
    value: Any
    place: Place | Literal["settings"]
    where: str


class _Candidate(NamedTuple):
    value: Any
    origin: Origin


class Settings(Mapping[str, Any]):
    """The resolved values of the settings, by name.

    Attributes:
        file: the path of the configuration file that was read, or None.
    """

    def __init__(self, chosen: Mapping[str, _Candidate], file: str | None) -> None:
        self._chosen = dict(chosen)
        self.file = file

    def __getitem__(self, name: str) -> Any:
        return self._of(name).value

    def __iter__(self) -> Iterator[str]:
        return iter(self._chosen)

    def __len__(self) -> int:
        return len(self._chosen)

    def origin(self, name: str) -> Origin:
        """Return where the value of a setting comes from."""
        return self._of(name).origin

    def is_set(self, name: str) -> bool:
        """Return True if the setting was given a value, False if it has its default."""
        return self.origin(name).place != "default"

    def table(self) -> list[Row]:
        """Return every setting with its value and origin."""
        return [Row(name, chosen.value, *chosen.origin) for name, chosen in self._chosen.items()]

    def print(self, everything: bool = True) -> None:
        """Print the settings, each with its value and origin, on rank 0.

        Without ``everything``, settings with their default value are left out.
        """
        if messages.is_rank_zero():
            messages.answer(self.text(everything))

    def text(self, everything: bool = True) -> str:
        """Return the text that :meth:`print` prints."""
        rows = [row for row in self.table() if everything or row.place != "default"]
        rows = [row._replace(where=row.where.removeprefix(f"{self.file}: ")) for row in rows]
        lines = [f"Current settings (file: {self.file or 'none'})"]
        name, value = (max((len(str(row[i])) for row in rows), default=0) for i in (0, 1))
        lines += [f"  {row.name:{name}}  {row.value!s:{value}}  {row.place}  {row.where}".rstrip() for row in rows]
        if not everything:
            lines.append("  all others: their defaults" if rows else "  all settings: their defaults")
        return "\n".join(lines)

    def _of(self, name: str) -> _Candidate:
        if name not in self._chosen:
            raise KeyError(
                f"There is no setting {name!r}.{messages.did_you_mean(name, self._chosen)} "
                "`paceline env` lists all settings."
            )
        return self._chosen[name]


def resolve(
    code: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    config_file: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    door: str = "Accelerator",
    late_variables: Mapping[str, Given] | None = None,
) -> Settings:
    """Resolve the value of every setting. None means "not set"; an explicit ``no`` or ``False`` counts as a value.

    Args:
        code: values from the program, by setting name; a :class:`Given` also records the value's source.
        flags: values from a launcher's command line.
        config_file: the file to read; if None, it is searched for in the environment, the current folder and the user's
            folder.
        environment: the environment variables; None means those of this process.
        door: the class to which ``code`` was passed, for messages.
        late_variables: values from other variables, with lower priority than the settings' own variables.

    Raises:
        ValueError: a name is unknown, or a value is not valid.
        FileNotFoundError: the given file does not exist.
    """
    variables = os.environ if environment is None else environment
    for given in (code or {}, flags or {}):
        for name in given:
            if name not in SETTINGS:
                raise ValueError(
                    f"There is no setting {name!r}.{messages.did_you_mean(name, SETTINGS)} "
                    "`paceline env` lists all settings."
                )
    _report_misspellings(variables)
    path = find_file(variables) if config_file is None else config_file
    file = None if path is None else read_file(path)
    launched = variables.get(FLAGS)
    chosen = {}
    for one in SETTINGS.values():
        found = list(_candidates(one, code or {}, flags or {}, variables, late_variables or {}, file, door))
        _report(one.name, found, of_code_only=launched is not None)
        chosen[one.name] = found[0]
    settings = Settings(chosen, None if file is None else file.path)
    if settings["debug"] and launched is None and not (code is None and flags is None):  # a launcher has printed them
        messages.info_once(settings.text())
    return settings


def _report_misspellings(variables: Iterable[str]) -> None:
    """Warn once about each PACELINE_ variable that is unknown but close to a known one."""
    known = [one.variable for one in SETTINGS.values()] + [FLAGS, CONFIG_VARIABLE, *_OTHER_VARIABLES]
    endings = [variable.removeprefix(PREFIX) for variable in known]
    for variable in variables:
        if variable.startswith(PREFIX) and variable not in known:
            for ending in difflib.get_close_matches(variable.removeprefix(PREFIX), endings, n=1, cutoff=_CLOSE):
                messages.warn_once(
                    f"The environment variable {variable} has no effect. Did you mean {PREFIX + ending!r}?"
                )


def _candidates(
    one: Setting,
    code: Mapping[str, Any],
    flags: Mapping[str, Any],
    variables: Mapping[str, str],
    late_variables: Mapping[str, Given],
    file: ConfigFile | None,
    door: str,
) -> Iterator[_Candidate]:
    """Yield the values that the sources provide for a setting, highest priority first."""
    given = code.get(one.name)
    if isinstance(given, Given):
        if given.value is not None:
            yield _Candidate(given.value, Origin("code", given.where))
    elif given is not None:
        as_it_is = one.objects and not isinstance(given, str)
        where = Origin("code", f"{door}({one.name}={given!r})" if not as_it_is else f"{door}({one.name}=)")
        yield _Candidate(given if as_it_is else one.parsed(given, f"{door}({one.name}=)"), where)
    if flags.get(one.name) is not None:
        where = f"--{one.name}"
        yield _Candidate(one.parsed(flags[one.name], where), Origin("flag", where))
    from_flags = variables.get(FLAGS, "").split(",")
    for variable in (one.variable, *one.variables):
        if one.is_nothing(variables.get(variable)):
            continue
        is_flag = variable == one.variable and one.name in from_flags
        origin = Origin("flag", f"--{one.name}") if is_flag else Origin("env", variable)
        yield _Candidate(one.parsed(variables[variable], origin.where), origin)
    late = late_variables.get(one.name)
    if late is not None and late.value is not None:
        yield _Candidate(late.value, Origin("env", late.where))
    if file is not None and one.name in file.values:
        yield _Candidate(file.values[one.name], Origin("file", f"{file.path}: {file.keys[one.name]}"))
    yield _Candidate(one.default, Origin("default", ""))


def _report(name: str, found: Iterable[_Candidate], of_code_only: bool) -> None:
    """Print once that two sources set a setting differently. A launcher has already reported conflicts with flags."""
    first, *others = found
    if of_code_only and first.origin.place != "code":
        return
    lost = [one for one in others if one.origin.place != "default" and one.value != first.value]
    if lost:
        against = ", ".join(f"{one.value!r} from {one.origin.where}" for one in lost)
        messages.info_once(f"{name}={first.value!r} from {first.origin.where} overrides {against}.")


def if_set(settings: Mapping[str, Any] | None, name: str) -> Any:
    """Return a setting's value, or None if the setting was left at its default."""
    if settings is None:
        return None
    is_set = getattr(settings, "is_set", None)
    return settings.get(name) if is_set is None or is_set(name) else None


def fill(one: T, settings: Mapping[str, Any] | None, names: Mapping[str, str]) -> T:
    """Return a copy of a dataclass with its None fields set from the settings; ``names`` maps fields to settings."""
    found = {field: if_set(settings, name) for field, name in names.items() if getattr(one, field) is None}
    return replace(one, **{field: value for field, value in found.items() if value is not None})  # type: ignore[type-var]


def hand_over(settings: Settings) -> dict[str, str]:
    """Return the environment variables that pass a launcher's settings to its processes.

    The variables contain the configuration file's path, the value of every flag, and the names of the settings that
    come from flags.
    """
    flags = [row for row in settings.table() if row.place == "flag"]
    return {
        **{SETTINGS[row.name].variable: written(row.value) for row in flags},
        FLAGS: ",".join(row.name for row in flags),
        CONFIG_VARIABLE: "none" if settings.file is None else os.path.abspath(settings.file),
    }


def written(value: Any) -> str:
    """Format a setting's value as text for a flag, an environment variable or a file."""
    return str(value).lower() if isinstance(value, bool) else str(value)

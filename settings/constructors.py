"""Make constructors suggest a valid name for an unknown argument."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec

from .. import messages

P = ParamSpec("P")
Constructor = Callable[Concatenate[Any, P], None]


def check_names(moved: Mapping[str, str] | None = None) -> Callable[[Constructor[P]], Constructor[P]]:
    """Decorator for ``__init__`` that raises an error for an unknown argument and suggests a valid name.

    ``moved`` maps argument names of other libraries to their replacements in Paceline.
    """

    def decorate(init: Constructor[P]) -> Constructor[P]:
        known, owner = tuple(inspect.signature(init).parameters)[1:], init.__qualname__.partition(".")[0]

        @functools.wraps(init)
        def checked(self: Any, *args: P.args, **kwargs: P.kwargs) -> None:
            for name in kwargs:
                if name not in known:
                    used = f" Use {moved[name]}." if moved and name in moved else messages.did_you_mean(name, known)
                    raise TypeError(f"{owner} has no argument {name!r}.{used} See help({owner}).")
            init(self, *args, **kwargs)

        return checked

    return decorate

"""Class methods that create an object, and that must be called on the class, not on an existing object."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    making = classmethod
else:

    class making(classmethod):  # noqa: N801 - a decorator
        """A ``classmethod`` that raises a TypeError if it is called on an instance.

        The method creates a new object, so such a call would leave the instance unchanged.
        """

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            bound = super().__get__(instance, owner)
            if instance is None:
                return bound
            name, kind = self.__func__.__name__, type(instance).__name__

            @functools.wraps(self.__func__)
            def refuse(*args: Any, **kwargs: Any) -> Any:
                raise TypeError(
                    f"{name} was called on an instance of {kind}, but this method creates a new object and does not "
                    f"change the instance. Call it on the class: {kind}.{name}(...)."
                )

            return refuse

"""The registry of strategies by name, to which a program can add its own strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

from .base import SingleDevice
from .choose import SEVERAL, Added, added, registered


class Registry(Mapping[str, dict[str, Any]]):
    """The names that ``Trainer(strategy=...)`` and ``Accelerator(strategy=...)`` accept, with a description of each."""

    def available_strategies(self) -> list[str]:
        """Return the names of all strategies, sorted."""
        return sorted({*SingleDevice.names, *SEVERAL, *registered()})

    def register(
        self,
        name: str,
        strategy: Callable[..., Any] | None = None,
        description: str = "",
        override: bool = False,
        **init_params: Any,
    ) -> Any:
        """Register a strategy under a name.

        Args:
            name: the name to register.
            strategy: a Strategy class; if None, a decorator for such a class is returned.
            description: a text that says what the strategy does.
            override: whether to replace a strategy that was registered under the same name.
            **init_params: arguments for the class.

        Raises:
            ValueError: a strategy with this name already exists.
        """
        if name in self and not (override and name in added):
            raise ValueError(
                f"StrategyRegistry.register({name!r}): a strategy with this name already exists. Choose another name"
                f"{', or pass override=True' if name in added else ''}."
            )

        def add(strategy: Callable[..., Any]) -> Callable[..., Any]:
            added[name] = Added(strategy, init_params, description)
            return strategy

        return add if strategy is None else add(strategy)

    def remove(self, name: str) -> None:
        """Remove a strategy that :meth:`register` added."""
        added.pop(name)

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name in added:
            one = added[name]
            found, arguments, text = one.strategy, one.arguments, one.description
        elif name in SEVERAL:
            file, kind, arguments = SEVERAL[name]
            found, text = getattr(import_module(f".{file}", __package__), kind), ""
        elif name in SingleDevice.names:
            found, arguments, text = SingleDevice, {}, ""
        else:
            found, arguments, text = registered()[name].load(), {}, ""
        return {"strategy": found, "init_params": dict(arguments), "description": text, "strategy_name": name}

    def __iter__(self) -> Iterator[str]:
        return iter(self.available_strategies())

    def __len__(self) -> int:
        return len(self.available_strategies())

    def __repr__(self) -> str:
        return f"Registered strategies: {', '.join(self)}"


StrategyRegistry = Registry()

"""``ArgumentParser``: adds arguments from the signatures of Trainers, modules, callbacks, optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .. import messages
from ..callbacks.base import Callback
from ..data.datamodule import DataModule
from ..trainer.module import TrainingModule
from ..trainer.trainer import Trainer

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser as _Base
    from jsonargparse import Namespace
    from jsonargparse.typing import class_from_function
else:
    try:
        from jsonargparse import ArgumentParser as _Base
        from jsonargparse import Namespace
        from jsonargparse.typing import class_from_function
    except ImportError:  # missing or too old: the names can still be imported; creating a parser raises
        from argparse import Namespace

        _Base = object

#: The oldest version of jsonargparse that has everything used here.
_OLDEST = "4.49"
#: Accepted command line arguments: a list of words, a dict or Namespace of values, or None for ``sys.argv``.
ArgsType: TypeAlias = list[str] | Mapping[str, Any] | Namespace | None
#: Type of an ``__init__`` argument that creates an optimizer from parameters: ``self.optimizer(self.parameters())``.
OptimizerCallable = Callable[[Iterable], Optimizer]
#: Subpackages whose classes can be chosen by their short names.
_ROOMS = ("callbacks", "loggers", "profilers", "strategies")
#: Those of them whose modules take long to import, because they import torch.distributed.tensor.
_SLOW = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's scheduler of the same name, with an additional argument for the name of the metric to watch.

    Args:
        optimizer: the optimizer whose learning rates are reduced.
        monitor: name of the logged metric to watch.
        *args: as for torch's class.
        **kwargs: as for torch's class.
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
#: Type of an ``__init__`` argument that creates a scheduler from an optimizer.
LRSchedulerCallable = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau]


class ArgumentParser(_Base):
    """A jsonargparse parser that supports Paceline's classes.

    Args:
        *args: as for jsonargparse's parser.
        description: text that ``--help`` shows.
        env_prefix: prefix for the names of environment variables.
        default_env: whether to read values from environment variables.
        short_names: whether to import Paceline's callbacks, loggers, profilers and strategies, so that users can choose
            them by their short names and ``--help`` lists them.
        slow_imports: whether to also import the classes that take long to import. If False, ``--help`` ends with their
            names.
        **kwargs: as for jsonargparse's parser.
    """

    def __init__(
        self,
        *args: Any,
        description: str = "Command line of a Trainer",
        env_prefix: str = "PL",
        default_env: bool = False,
        short_names: bool = True,
        slow_imports: bool = True,
        **kwargs: Any,
    ) -> None:
        if _Base is object:
            raise _no_parser()
        if short_names and not slow_imports:
            more = f"Strategies that are not listed, because they take long to import: {', '.join(_SLOW)}."
            kwargs.setdefault("epilog", more)
        super().__init__(*args, description=description, env_prefix=env_prefix, default_env=default_env, **kwargs)
        #: Names of the arguments under which callbacks were added.
        self.callback_keys: list[str] = []
        #: For each optimizer's argument name: its class (or the classes to choose from), and the argument it links to.
        self.optimizers: dict[str, tuple[Any, str]] = {}
        #: Like :attr:`optimizers`, but for schedulers.
        self.lr_schedulers: dict[str, tuple[Any, str]] = {}
        for room in _ROOMS if short_names else ():
            module = import_module(f"...{room}", __name__)
            for name in module.__all__:
                if slow_imports or name not in _SLOW:
                    getattr(module, name)

    def add_lightning_class_args(
        self,
        lightning_class: Callable[..., Trainer | TrainingModule | DataModule | Callback] | type,
        nested_key: str,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> list[str]:
        """Add the arguments of a class.

        Args:
            lightning_class: a Trainer, TrainingModule, DataModule or Callback class, or a function that returns an
                instance of one.
            nested_key: name under which the arguments are added.
            subclass_mode: whether to let the user choose a subclass.
            required: in subclass mode, whether the user has to choose a class.

        Returns:
            The names of the added arguments.

        Raises:
            TypeError: if ``lightning_class`` is neither such a class nor such a function.
        """
        added = class_of(lightning_class)
        if not isinstance(added, type) or not issubclass(added, (Trainer, TrainingModule, DataModule, Callback)):
            raise TypeError(
                f"add_lightning_class_args got {lightning_class!r}, which is not a Trainer, TrainingModule, DataModule "
                "or Callback class. Use add_class_arguments or add_subclass_arguments for other classes."
            )
        if issubclass(added, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            self.add_subclass_arguments(added, nested_key, fail_untyped=False, required=required)
            return [nested_key]
        makes = not issubclass(added, Trainer)
        return self.add_class_arguments(added, nested_key, fail_untyped=False, instantiate=makes, sub_configs=True)

    def add_optimizer_args(
        self,
        optimizer_class: type[Optimizer] | tuple[type[Optimizer], ...] = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = "AUTOMATIC",
    ) -> None:
        """Add the arguments of an optimizer.

        Args:
            optimizer_class: the class; a tuple lets the user choose among these classes and their subclasses.
            nested_key: name under which the arguments are added.
            link_to: argument that receives the class and its arguments, as a dict for :func:`instantiate_class`. With
                ``"AUTOMATIC"``, ``configure_optimizers`` returns the optimizer.
        """
        self._add_one_of(optimizer_class, nested_key, {"params"})
        self.optimizers[nested_key] = (optimizer_class, link_to)

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: Any = LRSchedulerTypeTuple,
        nested_key: str = "lr_scheduler",
        link_to: str = "AUTOMATIC",
    ) -> None:
        """Add the arguments of a learning rate scheduler.

        Args:
            lr_scheduler_class: the class; a tuple lets the user choose among these classes and their subclasses.
            nested_key: name under which the arguments are added.
            link_to: see :meth:`add_optimizer_args`.
        """
        self._add_one_of(lr_scheduler_class, nested_key, {"optimizer"})
        self.lr_schedulers[nested_key] = (lr_scheduler_class, link_to)

    def _add_one_of(self, classes: Any, key: str, skip: Any) -> None:
        if isinstance(classes, tuple):
            self.add_subclass_arguments(classes, key, instantiate=False, fail_untyped=False, skip=skip)
        else:
            self.add_class_arguments(classes, key, instantiate=False, fail_untyped=False, sub_configs=True, skip=skip)


@cache
def class_of(owner: Any) -> Any:
    """Return a class unchanged; for a function that returns an instance, return the class that jsonargparse creates."""
    if isinstance(owner, type) or not callable(owner):
        return owner
    made = class_from_function(owner)
    # jsonargparse stores the class in this module and would then reject another function with the same name.
    del globals()[made.__name__]
    return made


def with_class_path(cls: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a class and its arguments in the form that :func:`instantiate_class` accepts."""
    values = arguments if isinstance(arguments, dict) else vars(arguments)
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": dict(values)}


def _no_parser() -> ImportError:
    """Return the error for a jsonargparse that is missing or too old."""
    what, package = "A command line built from classes", "jsonargparse"
    if not messages.is_installed(package):
        return ModuleNotFoundError(messages.missing(what, f"{package}[signatures]"), name=package)
    return ImportError(
        f"{what} needs {package} {_OLDEST} or newer, but {version(package)} is installed. Run: pip install "
        f"'{package}[signatures]>={_OLDEST}'",
        name=package,
    )


def instantiate_class(args: Any, init: Mapping[str, Any]) -> Any:
    """Create an object from a class path and arguments.

    Args:
        args: one positional argument, or a tuple of positional arguments.
        init: a dict with ``class_path`` and, optionally, keyword arguments under ``init_args``.

    Returns:
        The object.
    """
    module, _, name = init["class_path"].rpartition(".")
    positional = args if isinstance(args, tuple) else (args,)
    return getattr(import_module(module), name)(*positional, **init.get("init_args", {}))

"""``TrainerCLI``: a command line and config files for a Trainer, a module and a DataModule."""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from .. import messages
from ..callbacks.base import Callback, overridden
from ..checkpoint import instantiate
from ..checkpoint.hyperparameters import COMMAND_LINE_KEYS, parsed_hyperparameters
from ..checkpoint.read import read
from ..data.datamodule import DataModule
from ..processes.cluster_environment import is_requeued
from ..processes.seed import seed_everything, seed_from_environment
from ..trainer.module import TrainingModule
from ..trainer.settings_arguments import SETTLED, from_variables
from ..trainer.trainer import Trainer
from .argument_parser import (
    ArgsType,
    ArgumentParser,
    LRSchedulerTypeTuple,
    Namespace,
    class_of,
    instantiate_class,
    with_class_path,
)

#: Arguments of fit that a config contains only if they were given, so that fit's config works with all subcommands.
_ONLY_IF_GIVEN = ("restore",)


class SaveConfigCallback(Callback):
    """Writes a run's config to the run's folder when the run starts.

    Args:
        parser: the parser that read the config.
        config: the parsed config.
        config_filename: name of the file.
        overwrite: whether to replace an existing file. If False, an existing file causes an error, unless a fit resumes
            from a checkpoint.
        multifile: whether to write one file for each config file that was read.
        save_to_log_dir: whether to write the file. If False, override :meth:`save_config` to save the config elsewhere.

    Raises:
        ValueError: if ``save_to_log_dir=False`` and ``save_config`` is not overridden.
    """

    def __init__(
        self,
        parser: ArgumentParser,
        config: Namespace,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        self.parser, self.config = parser, config
        self.config_filename, self.overwrite, self.multifile = config_filename, overwrite, multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False
        if not save_to_log_dir and overridden(self, "save_config", SaveConfigCallback) is None:
            raise ValueError(
                f"{type(self).__name__}(save_to_log_dir=False) saves nothing, because the class does not override "
                "save_config(trainer, pl_module, stage). Override that method, or leave out save_to_log_dir."
            )

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Save the config on rank 0; if saving fails, raise an error on all ranks."""
        if self.already_saved:
            return
        problem: Exception | None = None
        if trainer.is_global_zero:
            try:
                if self.save_to_log_dir:
                    self._write(trainer, stage)
                self.save_config(trainer, pl_module, stage)
            except Exception as error:
                problem = error
        failed = trainer.strategy.broadcast(problem and f"{type(problem).__name__}: {problem}")
        if problem is not None:
            raise problem
        if failed:
            raise RuntimeError(f"Rank 0 could not save the config: {failed}")
        self.already_saved = True

    def save_config(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Override this method to save the config elsewhere too. The method is called only on rank 0.

        Args:
            trainer: the run's Trainer.
            pl_module: the run's module.
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """

    def _write(self, trainer: Trainer, stage: str) -> None:
        path = Path(trainer.log_dir or os.curdir, self.config_filename)
        if path.is_file() and not self.overwrite and not _resumes(trainer, stage):
            raise RuntimeError(
                f"{type(self).__name__}: {str(path)!r} already exists from another run. Aborting to avoid overwriting "
                "it. Delete the file, choose another folder (a logger creates one for each run) or another "
                "config_filename, or pass save_config_kwargs={'overwrite': True}."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self.parser.save(self.config, path, skip_unset=False, overwrite=True, multifile=self.multifile)


def _resumes(trainer: Trainer, stage: str) -> bool:
    """Return True if this is a fit that resumes an earlier run."""
    request = trainer.current_run.request
    told = trainer.asked_ckpt_path if request is None else request.ckpt_path or trainer.asked_ckpt_path
    return stage == "fit" and (told is not None or is_requeued())


class TrainerCLI:
    """Runs a Trainer from the command line: ``python train.py fit --model.lr=0.1 --config run.yaml``.

    The arguments come from the classes' ``__init__`` methods. The attributes ``trainer``, ``model`` and ``datamodule``
    are the created objects, and ``config`` is the parsed config. To change one of the steps below, override its method.

    Args:
        model_class: a TrainingModule class, or a function that returns an instance. If None, the user chooses a class
            with ``--model=Name``.
        datamodule_class: a DataModule class, or a function that returns an instance. If None, the user may choose a
            class with ``--data=Name``.
        save_config_callback: class of the callback that saves the config in the run's folder. If None, the config is
            not saved.
        save_config_kwargs: additional arguments for that callback, after the parser and the config.
        trainer_class: the Trainer class, or a function that returns an instance.
        trainer_defaults: values that replace the defaults of Trainer arguments. Callbacks given here are added to the
            user's callbacks.
        seed_everything_default: default value of ``--seed_everything``: a seed, True for the seed in the environment (0
            if there is none), or False for no seeding.
        parser_kwargs: arguments for the parser or, under a subcommand's name, for that subcommand's parser.
        parser_class: class of the parser.
        subclass_mode_model: whether to let the user choose a subclass of ``model_class``.
        subclass_mode_data: whether to let the user choose a subclass of ``datamodule_class``.
        args: the arguments to parse. If None, the command line's arguments are used.
        run: whether to add subcommands and run the chosen subcommand. If False, only create the objects.
        auto_configure_optimizers: whether to let the user choose an optimizer and a scheduler, which are then used
            instead of those from ``configure_optimizers``.
        load_from_checkpoint_support: whether to make ``save_hyperparameters`` store arguments as they were parsed, so
            that ``load_from_checkpoint`` can recreate the objects.

    Raises:
        ModuleNotFoundError: if jsonargparse is not installed.
    """

    def __init__(
        self,
        model_class: type[TrainingModule] | Callable[..., TrainingModule] | None = None,
        datamodule_class: type[DataModule] | Callable[..., DataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | dict[str, dict[str, Any]] | None = None,
        parser_class: type[ArgumentParser] = ArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = save_config_kwargs or {}
        self.trainer_class = trainer_class
        self.trainer_defaults = trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_kwargs = parser_kwargs or {}
        self.parser_class = parser_class
        self.auto_configure_optimizers = auto_configure_optimizers
        self.load_from_checkpoint_support = load_from_checkpoint_support
        self.model_class, self._model_class = model_class, model_class or TrainingModule
        self.subclass_mode_model = model_class is None or subclass_mode_model
        self.datamodule_class, self._datamodule_class = datamodule_class, datamodule_class or DataModule
        self.subclass_mode_data = datamodule_class is None or subclass_mode_data
        self._subparsers: dict[str, ArgumentParser] = {}
        self._method_arguments: dict[str, list[str]] = {}
        self._args = args
        of_subcommands = {name: self.parser_kwargs.get(name, {}) for name in self.subcommands()}
        of_main = {name: value for name, value in self.parser_kwargs.items() if name not in of_subcommands}
        self.setup_parser(run, of_main, of_subcommands)
        self.parse_arguments(self.parser, args)
        self.subcommand: str | None = self.config["subcommand"] if run else None
        self._parse_ckpt_path()
        self._set_seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run_subcommand(self.subcommand)

    # ---- the parser ------------------------------------------------------------------------------------------------

    def init_parser(self, **kwargs: Any) -> ArgumentParser:
        """Create a parser with a ``--config`` argument."""
        kwargs.setdefault("dump_header", [f"paceline=={sys.modules[__name__.partition('.')[0]].__version__}"])
        parser = self.parser_class(**kwargs)
        parser.add_argument(
            "-c", "--config", action="config", help="Config file in YAML or JSON; may be given several times."
        )
        return parser

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, dict[str, Any]]
    ) -> None:
        """Create :attr:`parser`, and add to it either the subcommands or the arguments."""
        names = list(self.subcommands()) if add_subcommands else []
        given = sys.argv[1:] if self._args is None else self._args
        words = set(given) if isinstance(given, list) else set()
        asks = bool(words & {"-h", "--help"})
        only_asks = asks and words <= {"-h", "--help", *names}
        light, full = {"short_names": False}, {"slow_imports": False} if only_asks else {}
        if not add_subcommands:
            self.parser = self.init_parser(**full | main_kwargs)
            self._add_arguments(self.parser)
            return
        needed = [name for name in names if name in words] if asks else names
        self.parser = self.init_parser(**(full if needed else light) | main_kwargs)
        owner = class_of(self.trainer_class)
        subcommands = self.parser.add_subcommands()
        for name, skip in self.subcommands().items():
            help_line = (getattr(owner, name).__doc__ or "").strip().partition("\n")[0]
            settings = {"description": help_line, **(full if name in needed else light), **subparser_kwargs[name]}
            parser = self._subparsers[name] = self.init_parser(**settings)
            if name in needed:
                self._add_arguments(parser)
                added = self._method_arguments[name] = parser.add_method_arguments(owner, name, skip=set(skip))
                parser.set_defaults({one: SUPPRESS for one in added if one in _ONLY_IF_GIVEN})
            subcommands.add_subcommand(name, parser, help=help_line)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the Trainer methods that become subcommands, each with the parameters that users cannot pass."""
        evaluation = {"model", "dataloaders", "datamodule"}
        fit = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        return {"fit": fit, "validate": set(evaluation), "test": set(evaluation), "predict": set(evaluation)}

    def add_default_arguments_to_parser(self, parser: ArgumentParser) -> None:
        """Add ``--seed_everything``."""
        parser.add_argument(
            "--seed_everything",
            type=bool | int,
            default=self.seed_everything_default,
            help="Seed to set before the objects are created. True: the environment's seed, or 0. False: no seeding.",
        )

    def add_core_arguments_to_parser(self, parser: ArgumentParser) -> None:
        """Add arguments for the Trainer, the module and the DataModule."""
        added = parser.add_lightning_class_args(self.trainer_class, "trainer")
        variables = from_variables([name.removeprefix("trainer.") for name in added], {})
        # If an argument that is also a setting is left out, the Trainer itself reads the environment variable.
        defaults = {name: value for name, value in variables.items() if name not in SETTLED} | self.trainer_defaults
        parser.set_defaults({f"trainer.{name}": value for name, value in defaults.items() if name != "callbacks"})
        parser.add_lightning_class_args(self._model_class, "model", subclass_mode=self.subclass_mode_model)
        parser.add_lightning_class_args(
            self._datamodule_class,
            "data",
            subclass_mode=self.subclass_mode_data,
            required=self.datamodule_class is not None,
        )

    def add_arguments_to_parser(self, parser: ArgumentParser) -> None:
        """Override this method to add arguments, or to link arguments with ``parser.link_arguments``."""

    def _add_arguments(self, parser: ArgumentParser) -> None:
        self.add_core_arguments_to_parser(parser)
        self.add_default_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser.optimizers:
                parser.add_optimizer_args()
            if not parser.lr_schedulers:
                parser.add_lr_scheduler_args()
        self.link_optimizers_and_lr_schedulers(parser)

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: ArgumentParser) -> None:
        """Link each optimizer and scheduler that was added with ``link_to`` to the argument that ``link_to`` names."""
        for key, (chosen, link_to) in {**parser.optimizers, **parser.lr_schedulers}.items():
            if link_to != "AUTOMATIC":
                make = None if isinstance(chosen, tuple) else partial(with_class_path, chosen)
                parser.link_arguments(key, link_to, compute_fn=make)

    def parse_arguments(self, parser: ArgumentParser, args: ArgsType) -> None:
        """Parse the arguments into :attr:`config`."""
        if args is not None and len(sys.argv) > 1:
            messages.warn(
                f"{type(self).__name__} got args=..., so the following command line arguments have no effect: "
                f"{sys.argv[1:]}. Pass either args or command line arguments."
            )
        if isinstance(args, Mapping | Namespace):
            self.config: Any = parser.parse_object(args)  # pyright: ignore[reportArgumentType]
        else:
            self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Replace the module's arguments with the hyperparameters in the ``--ckpt_path`` checkpoint."""
        path = None if self.subcommand is None else self.config[self.subcommand].get("ckpt_path")
        if not path or not Path(path).exists():
            return
        saved = dict(read(path, "meta").get("hyper_parameters", {}))
        known = {key: saved.pop(key, None) for key in COMMAND_LINE_KEYS}
        if not saved:
            return
        if known["_class_path"] is not None and self.subclass_mode_model:
            saved = {"class_path": known["_class_path"], "dict_kwargs": saved}
        elif self.subclass_mode_model:
            saved = {"init_args": saved}
        before = self.config
        try:
            with instantiate.importing_nothing(saved):
                self.config = self.parser.parse_object({str(self.subcommand): {"model": saved}}, before)
        except SystemExit:
            messages.error(
                f"Parsing of ckpt_path hyperparameters failed, because the hyperparameters in {str(path)!r} are not "
                "arguments of this model. Choose the model class that the checkpoint was saved with."
            )
            raise
        if self.config != before:
            messages.info(f"The model's arguments were taken from the hyperparameters in {messages.path(path)}.")

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is False:
            return
        if seed is True:
            seed = seed_from_environment() or 0
        self._config["seed_everything"] = seed_everything(seed, workers=True)

    @property
    def _config(self) -> Any:
        """The subcommand's part of the config, or the entire config if there is no subcommand."""
        return self.config if self.subcommand is None else self.config[self.subcommand]

    # ---- the objects -----------------------------------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        """Override this method to run code before the objects are created."""

    def instantiate_classes(self) -> None:
        """Create :attr:`datamodule`, :attr:`model` and :attr:`trainer`."""
        instantiators = []
        if self.load_from_checkpoint_support:
            for key, owner, any_subclass in (
                ("model", self._model_class, self.subclass_mode_model),
                ("data", self._datamodule_class, self.subclass_mode_data),
            ):
                instantiators.append((_Keeping(self, key), class_of(owner), any_subclass))
        self.config_init = self.parser.instantiate(self.config, instantiators=instantiators)
        self.datamodule: Any = self._get(self.config_init, "data")
        self.model: Any = self._get(self.config_init, "model")
        self._add_configure_optimizers_method_to_model(self.subcommand)
        self.trainer = self.instantiate_trainer()

    def after_instantiate_classes(self) -> None:
        """Override this method to run code after the objects are created."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Create a Trainer from the config.

        Args:
            **kwargs: arguments that override those in the config.
        """
        config = {**dict(self._get(self.config_init, "trainer", {}).items()), **kwargs}
        keys = self._parser(self.subcommand).callback_keys
        return self._instantiate_trainer(config, [self._get(self.config_init, key) for key in keys])

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        if "callbacks" not in config:
            owner = self.trainer_class
            messages.warn(
                f"{getattr(owner, '__qualname__', owner)} does not expose the argument 'callbacks', so the callbacks "
                "from the command line are not used. Add the argument 'callbacks' to its signature."
            )
            return self.trainer_class(**config)
        more = _as_list(self.trainer_defaults.get("callbacks"))
        more = [instantiate_class((), one) if isinstance(one, Mapping) else one for one in more]
        config["callbacks"] = [*_as_list(config["callbacks"]), *callbacks, *more]
        if self.save_config_callback and not config.get("fast_dev_run"):
            saver = self.save_config_callback(self._parser(self.subcommand), self._config, **self.save_config_kwargs)
            config["callbacks"].append(saver)
        return self.trainer_class(**config)

    def _parser(self, subcommand: str | None) -> ArgumentParser:
        return self.parser if subcommand is None else self._subparsers[subcommand]

    def _get(self, config: Any, key: str, default: Any = None) -> Any:
        """Return a value from the config, or from the subcommand's part of it."""
        return (config if self.subcommand is None else config[self.subcommand]).get(key, default)

    # ---- optimizers ------------------------------------------------------------------------------------------------

    @staticmethod
    def configure_optimizers(lightning_module: TrainingModule, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """Return the result of the module's ``configure_optimizers`` if the user has chosen an optimizer.

        Override this method to change the return value.

        Args:
            lightning_module: the module.
            optimizer: the chosen optimizer.
            lr_scheduler: the chosen scheduler; None if no scheduler was chosen.
        """
        if lr_scheduler is None:
            return optimizer
        monitor = getattr(lr_scheduler, "monitor", None)
        if monitor is not None:
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "monitor": monitor}}
        return [optimizer], [lr_scheduler]

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Make the module use the chosen optimizer and scheduler."""
        if not self.auto_configure_optimizers:
            return
        parser = self._parser(subcommand)
        optimizers = _automatic(parser.optimizers, Optimizer)
        schedulers = _automatic(parser.lr_schedulers, LRSchedulerTypeTuple)
        if len(optimizers) > 1 or len(schedulers) > 1:
            raise ValueError(
                f"{type(self).__name__} can configure one optimizer and one scheduler, but the parser has "
                f"{messages.names([*optimizers, *schedulers], 'and')}. Add each of these with link_to=..., and create "
                "them with instantiate_class in the module's configure_optimizers."
            )
        chosen = [self._chosen(key, parser.optimizers) for key in optimizers]
        if not any(chosen):
            return
        scheduler = next((self._chosen(key, parser.lr_schedulers) for key in schedulers), None)
        optimizes = subcommand not in ("validate", "test", "predict")
        if optimizes and overridden(self.model, "configure_optimizers", TrainingModule) is not None:
            messages.warn(
                f"`{type(self.model).__name__}.configure_optimizers` will be overridden by "
                f"`{type(self).__name__}.configure_optimizers`, because an optimizer was chosen on the command line."
            )
        self.model.configure_optimizers = partial(
            _configure_optimizers, self.configure_optimizers, self.model, chosen[0], scheduler
        )

    def _chosen(self, key: str, registered: dict[str, tuple[Any, str]]) -> Any:
        """Return the chosen class and its arguments; None if nothing was chosen."""
        arguments = self._get(self.config_init, key)
        kind = registered[key][0]
        if arguments is None or isinstance(kind, tuple):
            return arguments
        return with_class_path(kind, arguments)

    # ---- the run ---------------------------------------------------------------------------------------------------

    def _run_subcommand(self, subcommand: str) -> None:
        """Call ``before_<subcommand>()``, the Trainer method, and ``after_<subcommand>()``, skipping undefined ones."""
        getattr(self, f"before_{subcommand}", lambda: None)()
        run = getattr(self, subcommand, None) or getattr(self.trainer, subcommand)
        run(**self._prepare_subcommand_kwargs(subcommand))
        getattr(self, f"after_{subcommand}", lambda: None)()

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Return the arguments for the Trainer method."""
        given = self.config_init[subcommand].items()
        kwargs = {key: value for key, value in given if key in self._method_arguments[subcommand]}
        kwargs["model"] = self.model
        if self.datamodule is not None:
            kwargs["datamodule"] = self.datamodule
        return kwargs


class _Keeping:
    """Creates an object and stores its parsed arguments as its hyperparameters."""

    def __init__(self, cli: TrainerCLI, key: str) -> None:
        self.cli, self.key = cli, key

    def __call__(self, class_type: type, *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any) -> Any:
        parsed = self._parsed(applied_instantiation_links)
        path = parsed.get("class_path")
        if path is not None:
            if path.rpartition(".")[2] != class_type.__name__:
                return class_type(*args, **kwargs)
            parsed = {"_class_path": path, **parsed.get("init_args", {}), **parsed.get("dict_kwargs", {})}
        with parsed_hyperparameters(class_type, {**parsed, "_instantiator": instantiate.MARK}):
            return class_type(*args, **kwargs)

    def _parsed(self, links: dict[str, Any]) -> dict[str, Any]:
        """Return the object's part of the config as plain data, including values set by linked arguments."""
        import yaml

        cli = self.cli
        parser = cli._parser(cli.subcommand)
        dumped = parser.dump(cli._config, format="yaml", skip_link_targets=False, skip_unset=False)
        parsed: dict[str, Any] = yaml.safe_load(dumped).get(self.key) or {}
        for target, value in links.items():
            first, *inner, last = target.split(".")
            owner: Any = parsed if first == self.key else None
            for name in inner:
                owner = owner.get(name) if isinstance(owner, dict) else None
            if isinstance(owner, dict):
                owner[last] = value
        return parsed


def _configure_optimizers(configure: Callable[..., Any], module: TrainingModule, optimizer: Any, scheduler: Any) -> Any:
    """Create the optimizer and scheduler when the Trainer needs them, because only then are the parameters final."""
    made = instantiate_class(module.parameters(), optimizer)
    return configure(module, optimizer=made, lr_scheduler=scheduler and instantiate_class(made, scheduler))


def _automatic(registered: dict[str, tuple[Any, str]], kinds: Any) -> list[str]:
    """Return the names of the arguments for the optimizers and schedulers that ``configure_optimizers`` uses."""
    return [
        key
        for key, (chosen, link_to) in registered.items()
        if link_to == "AUTOMATIC" and any(issubclass(one, kinds) for one in _as_list(chosen))
    ]


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]

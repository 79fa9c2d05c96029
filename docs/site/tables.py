"""The pages of the reference that are built from the package's tables: hooks, commands, settings."""

from __future__ import annotations

import inspect
import re
from argparse import SUPPRESS, Action, ArgumentParser, HelpFormatter
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

from rst import block, heading, literal, plain, table


def hooks() -> str:
    """Return the page of hooks, with one entry per hook."""
    from paceline.callbacks.base import HOOKS, Callback
    from paceline.data.datamodule import DataModule
    from paceline.trainer.hook_names import DATA_METHODS, MODULE_METHODS
    from paceline.trainer.module import TrainingModule

    owners = {"callback": Callback, "module": TrainingModule, "DataModule": DataModule}
    shared = [name for name in HOOKS if name not in MODULE_METHODS]
    text = heading("All hooks", "=") + (
        "Every hook: when it runs, on which ranks, what it may do, and what it must not. :doc:`/hooks` shows the order "
        "of the calls in a fit.\n\n"
        "Unless an entry says otherwise, a hook runs on every rank; it may read everything and set "
        "``trainer.should_stop = True``; it must not call a collective on only some ranks.\n\n"
    )
    text += heading("Hooks of callbacks and modules", "-") + "".join(hook(name, owners) for name in shared)
    text += heading("Hooks and methods of modules", "-")
    text += "".join(hook(name, {"module": TrainingModule, "DataModule": DataModule}) for name in MODULE_METHODS)
    others = [name for name in DATA_METHODS if name not in MODULE_METHODS and name not in HOOKS]
    return (
        text + heading("Hooks of DataModules", "-") + "".join(hook(name, {"DataModule": DataModule}) for name in others)
    )


class Rights(NamedTuple):
    """What an entry says where the docstring of a hook or method says nothing."""

    ranks: str = "every rank"
    may: str = "read everything, stop the run"
    must_not: str = "call a collective on only some ranks"


_OWN_BATCHES = "every rank, each with its own batches; ranks that split a model share theirs"
_EVALUATES = Rights(
    f"{_OWN_BATCHES}; gradients are off",
    "log, and return anything for the hooks that get ``outputs``",
    "step an optimizer, or call a collective on only some ranks",
)
_LOADS = Rights(
    may="return a DataLoader, any iterable of batches, or a collection of these",
    must_not="download or write files (``prepare_data`` does that once), or split the data over the ranks (the run "
    "does that)",
)
#: Methods that a module or DataModule overrides.
METHODS = {
    "configure_model": Rights(may="create large layers, empty or on the device; the strategy shards them"),
    "configure_callbacks": Rights(
        may="return a callback or a list of callbacks", must_not="return different callbacks on different ranks"
    ),
    "configure_optimizers": Rights(
        may="return optimizers with or without schedulers, or None to train nothing",
        must_not="return different optimizers on different ranks",
    ),
    "configure_gradient_clipping": Rights(
        "every rank; gradients are complete, averaged over the ranks and unscaled. With a sharded model, each rank has "
        "its own shard",
        "call ``self.clip_gradients``, or change gradients itself",
        "scale a shard's gradients by its own norm: ``clip_gradients`` takes the norm over all shards",
    ),
    "training_step": Rights(
        _OWN_BATCHES,
        "log, and return the loss, a dict with the loss, or None to skip the batch",
        "call backward or step an optimizer, unless ``automatic_optimization`` is False",
    ),
    "validation_step": _EVALUATES,
    "test_step": _EVALUATES,
    "predict_step": Rights(_EVALUATES.ranks, "return anything: it becomes the batch's prediction", "log"),
    "backward": Rights(
        may="call ``loss.backward`` with other arguments", must_not="clear gradients or step an optimizer"
    ),
    "optimizer_step": Rights(may="skip the step, if the closure has run", must_not="skip the step on only some ranks"),
    "optimizer_zero_grad": Rights(
        may="clear the gradients in another way", must_not="keep gradients for the next step"
    ),
    "lr_scheduler_step": Rights(
        may="call ``scheduler.step`` in another way", must_not="step it on only some ranks, or more often on some"
    ),
    "train_dataloader": _LOADS,
    "val_dataloader": _LOADS,
    "test_dataloader": _LOADS,
    "predict_dataloader": _LOADS,
    "on_before_batch_transfer": Rights(
        "every rank, for its own batches", "change the batch on the host, and return it", "move it to the device"
    ),
    "transfer_batch_to_device": Rights(
        "every rank, for its own batches", "move batches of any type", "leave tensors that a step uses on the host"
    ),
    "on_after_batch_transfer": Rights(
        "every rank, for its own batches", "change the batch on the device, and return it", "move it back to the host"
    ),
    "on_validation_model_zero_grad": Rights(may="clear gradients that your own code has kept"),
    **{
        f"on_{stage}_model_{mode}": rights
        for stage in ("validation", "test", "predict")
        for mode, rights in (
            ("eval", Rights(may="leave some layers in train mode", must_not="change weights")),
            ("train", Rights(may="restore modes in another way", must_not="change weights")),
        )
    },
    "state_dict": Rights(may="return plain data and tensors"),
    "load_state_dict": Rights(may="read the state and set attributes"),
}


def hook(name: str, owners: dict[str, type]) -> str:
    """Return a hook's entry, from its docstrings."""
    having = {who: found for who, kind in owners.items() if (found := getattr(kind, name, None)) and found.__doc__}
    if not having:
        return ""
    text = heading(name, "~")
    text += block("python", "\n".join(f"{signature(name, found)}  # {who}" for who, found in having.items()))
    facts: dict[str, list[str]] = {"When": [], "Ranks": [], "May": [], "Must not": []}
    for clause in clauses(inspect.getdoc(next(iter(having.values()))) or ""):
        facts[topic(clause)].append(clause)
    rights = METHODS.get(name, Rights())
    defaults = {"Ranks": rights.ranks, "May": rights.may, "Must not": rights.must_not}
    for fact, found in facts.items():
        if found:
            said = [RIGHT.sub("", one) for one in found]
            text += f":{fact}: {' '.join(said) if fact in ('When', 'Ranks') else ' '.join(said).rstrip('.')}\n"
        elif fact in defaults:
            text += f":{fact}: {defaults[fact]}\n"
    return text + "\n"


def signature(name: str, function: Any) -> str:
    """Return a hook's ``def``; several hooks can share one function, which has the name of the first."""
    names = [str(one.replace(annotation=one.empty)) for one in inspect.signature(function).parameters.values()]
    return f"def {name}({', '.join(names)})"


#: The beginning of a sentence that says what a hook may or must not do.
RIGHT = re.compile(r"^(?:(?:The hook|It) )?(may|must not) ", re.I)


def clauses(doc: str) -> list[str]:
    """Return a docstring's sentences; what a hook may and must not do becomes separate sentences."""
    body = doc.partition("\n\nArgs:")[0].partition("\n\nReturns:")[0].partition("\n\nRaises:")[0]
    text = re.sub(r":meth:`(?:~)?(\w+)`", r"``\1``", " ".join(body.split()))
    return re.split(r"(?<=\.) (?=[A-Z`])", text)


def topic(clause: str) -> str:
    if right := RIGHT.match(clause):
        return right[1].capitalize()
    return "Ranks" if re.search(r"\b(all ranks|once per machine|each rank)\b", clause, re.I) else "When"


def commands() -> str:
    """Return the page of commands with their arguments, from the parsers."""
    from paceline.cli.main import COMMANDS

    text = heading("All commands and options", "=") + (
        "Every command and its arguments, as ``--help`` shows them. Flags may use ``-`` instead of ``_``. "
        "Guide: :doc:`/commands`.\n\n"
    )
    for name, line in COMMANDS.items():
        parser = ArgumentParser(f"paceline {name}", add_help=False)
        import_module(f"paceline.cli.{name.replace(' ', '.').replace('-', '_')}").add_arguments(parser)
        text += heading(f"paceline {name}", "-") + f"{line[:1].upper()}{line[1:]}.\n\n.. program:: paceline {name}\n\n"
        for group in parser._action_groups:
            shown = [action for action in group._group_actions if action.help != SUPPRESS]
            if shown and group.title not in ("positional arguments", "options"):
                text += f".. rubric:: {plain(str(group.title))}\n\n"
            text += "".join(option(parser, action) for action in shown)
    return text


def option(parser: ArgumentParser, action: Action) -> str:
    formatter = HelpFormatter(parser.prog)
    takes = "" if action.nargs == 0 else f" {formatter._format_args(action, action.dest.upper())}"
    form = ", ".join(f"{one}{takes}" for one in action.option_strings) or str(action.metavar or action.dest)
    words = " ".join(formatter._expand_help(action).split()) if action.help else ""
    facts = "; ".join(accepted(action, words, listed="{" in takes))
    return f".. option:: {form}\n\n   {plain(words)}{' ' * bool(facts)}{facts and f'({facts})'}\n\n"


def accepted(action: Action, words: str, listed: bool) -> Iterator[str]:
    """Return the values of an option, unless its form lists them, and its default, unless its help names it."""
    from paceline.settings import SETTINGS

    one = SETTINGS.get(action.dest)
    default = one.default if one and one.default is not None else action.default
    if action.nargs == 0:
        default = bool(default)
    elif one or action.choices:
        if not listed:
            yield plain(one.accepts if one else ", ".join(map(str, action.choices or ())))
    elif action.type in (int, float):
        yield "a whole number" if action.type is int else "a number"
    if default not in (None, SUPPRESS, []) and "default" not in words:
        yield f"default: {literal(str(default).lower() if isinstance(default, bool) else str(default))}"


#: Titles of groups of settings that cannot be derived from their names.
GROUPS = {"deepspeed": "DeepSpeed", "fsdp": "FSDP", "dynamo": "Compiling", "parallelism_config": "Parallelism"}
#: Variables that belong to no setting.
VARIABLES = {
    "PACELINE_CONFIG_FILE": "the settings file to read; ``none`` reads no file",
    "PACELINE_STANDS_IN": "packages that Paceline replaces in this process and its children: ``lightning``, "
    "``accelerate``, or both with a comma",
    "PACELINE_GLOBAL_SEED": "the seed of ``seed_everything()`` without an argument",
    "PL_GLOBAL_SEED": "the same, as Lightning names it",
    "PACELINE_LAUNCH_FLAGS": "which settings came from flags of ``paceline launch``, which sets it",
    "PACELINE_LOG_LEVEL": "the level of loggers from ``get_logger``",
}


def settings() -> str:
    """Return the page of settings and environment variables."""
    from paceline.settings import SETTINGS

    text = heading("All settings and environment variables", "=") + (
        "Every setting with its flag of ``paceline launch``, its environment variables and its key in a settings file. "
        "Guide: :doc:`/settings`.\n\n"
    )
    groups: dict[str, list[Any]] = {}
    for one in SETTINGS.values():
        groups.setdefault(one.group, []).append(one)
    for group, members in groups.items():
        text += heading(GROUPS.get(group, group.replace("_", " ").capitalize()), "-")
        for one in members:
            default = "" if one.default is None else str(one.default)
            default = default.lower() if isinstance(one.default, bool) else default
            facts = [
                f"Accepts {plain(one.accepts)}.",
                f"Default: {literal(default)}." if default else "",
                f"Flag: ``--{one.name}``.",
                "Also read: " + ", ".join(map(literal, one.variables)) + "." if one.variables else "",
                "Accelerate's key: " + ", ".join(map(literal, one.keys)) + "." if one.keys else "",
            ]
            text += f".. envvar:: {one.variable}\n\n   ``{one.name}``: {plain(one.help)}.\n\n"
            text += f"   {' '.join(fact for fact in facts if fact)}\n\n"
    text += heading("Other variables", "-")
    for name, about in VARIABLES.items():
        text += f".. envvar:: {name}\n\n   {about}\n\n"
    text += "Variables of launchers, loggers and other libraries are at the end of :doc:`/settings`.\n\n"
    return text + table(
        ("variable", "meaning"),
        [("``PL_TRAINER_<ARGUMENT>``", "an argument of :class:`paceline.Trainer` that the code leaves out")],
    )

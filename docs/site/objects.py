"""The pages of the reference that describe classes and functions: which page has which names."""

from __future__ import annotations

import importlib
import inspect
from enum import EnumMeta
from functools import cache
from typing import Any, NamedTuple

from rst import heading, plain, table


class Page(NamedTuple):
    """A page: its title, one sentence about it, the guide to read, its names by section, and the module they are in."""

    title: str
    about: str
    guide: str
    sections: dict[str, list[str]]
    room: str = ""


def public(room: str) -> list[str]:
    """Return the public names of a package."""
    names = importlib.import_module(room).__all__
    return [f"{room}.{name}" for name in sorted(names, key=str.lower)]


def group(room: str, names: str) -> list[str]:
    return [f"{room}.{name}" for name in names.split()]


_PRECISIONS = "Precision TruePrecision MixedPrecision Float8Precision TransformerEnginePrecision BitsandbytesPrecision"
PAGES: dict[str, Page] = {
    "trainer": Page(
        "Trainer",
        "Runs a module: ``fit``, ``validate``, ``test``, ``predict``.",
        "first_fit",
        {"": ["paceline.Trainer"]},
    ),
    "training_module": Page(
        "TrainingModule",
        "Your model, its training step and its optimizers.",
        "first_fit",
        {"": ["paceline.TrainingModule"]},
    ),
    "data": Page(
        "Data modules and loaders",
        "Loaders in one place, and several loaders as one.",
        "data",
        {"": ["paceline.DataModule", "paceline.CombinedLoader", *public("paceline.data")]},
        "paceline.data",
    ),
    "callbacks": Page(
        "Callback classes",
        "What a run does besides training. :doc:`hooks` describes the hooks one by one.",
        "callbacks",
        {
            "Base class": ["paceline.callbacks.Callback", "paceline.Callback"],
            "Callbacks": public("paceline.callbacks"),
        },
        "paceline.callbacks",
    ),
    "loggers": Page(
        "Logger classes",
        "Where numbers go.",
        "loggers",
        {"Base class": ["paceline.loggers.Logger"], "Loggers": public("paceline.loggers")},
        "paceline.loggers",
    ),
    "profilers": Page(
        "Profiler classes",
        "Where the time goes.",
        "doctor",
        {"": public("paceline.profilers")},
        "paceline.profilers",
    ),
    "tuner": Page(
        "Tuner and checks",
        "A learning rate and a batch size before the run, and a check of a module.",
        "optimization",
        {
            "": [
                "paceline.Tuner",
                "paceline.tuner.lr_range_test.LRFinder",
                "paceline.verify",
                "paceline.seed_everything",
            ]
        },
    ),
    "accelerator": Page(
        "Accelerator",
        "Devices, precisions, strategies, checkpoints and loggers for your own loop.",
        "own_loop",
        {"": ["paceline.Accelerator"]},
    ),
    "accelerator_arguments": Page(
        "Arguments of the Accelerator",
        "Plugins, handlers and enums that configure an :class:`paceline.Accelerator`.",
        "own_loop",
        {
            "Plugins": group(
                "paceline",
                "DataLoaderConfiguration DeepSpeedPlugin FullyShardedDataParallelPlugin GradientAccumulationPlugin "
                "ParallelismConfig ProjectConfiguration TorchDynamoPlugin",
            ),
            "Handlers": group(
                "paceline",
                "AutocastKwargs DistributedDataParallelKwargs GradScalerKwargs InitProcessGroupKwargs ProfileKwargs",
            )
            + group("paceline.accelerator.kwargs_handlers", "AORecipeKwargs TERecipeKwargs"),
            "Enums": group("paceline", "DDPCommunicationHookType DistributedType DynamoBackend"),
        },
    ),
    "own_loop": Page(
        "Processes, loaders and trackers",
        "What a loop needs around its Accelerator.",
        "own_loop_trackers",
        {
            "Processes": group("paceline", "PartialState notebook_launcher debug_launcher LocalSGD get_logger"),
            "Loaders and seeds": group("paceline", "skip_first_batches set_seed synchronize_rng_states"),
            "Memory": [
                "paceline.find_executable_batch_size",
                "paceline.memory.out_of_memory_retry.release_memory",
                "paceline.memory.out_of_memory_retry.clear_device_cache",
            ],
            "Trackers": [
                "paceline.accelerator.trackers.GeneralTracker",
                "paceline.accelerator.trackers.register_tracker_class",
            ],
        },
    ),
    "fabric": Page(
        "Fabric",
        "Lightning's ``Fabric``, for loops that were written for it.",
        "from_lightning",
        {"": ["paceline.compat.lightning.fabric.Fabric"]},
    ),
    "strategies": Page(
        "Strategy classes",
        "Where tensors live, and how processes communicate.",
        "strategies",
        {
            "Base classes": group("paceline.strategies", "Strategy DistributedStrategy"),
            "Strategies": group(
                "paceline.strategies",
                "SingleDevice DDPStrategy FSDPStrategy ModelParallelStrategy DeepSpeedStrategy",
            ),
            "Choosing": ["paceline.strategies.choose_strategy"],
        },
        "paceline.strategies",
    ),
    "precision": Page(
        "Precision classes",
        "The dtypes that a run computes in.",
        "precision",
        {"": group("paceline.strategies", _PRECISIONS)},
    ),
    "plugins": Page(
        "Plugins",
        "Objects that replace parts of a run: how checkpoints are written, how launchers name ranks, devices.",
        "strategies",
        {
            "Checkpoints": group(
                "paceline.checkpoint.checkpoint_io", "CheckpointIO TorchCheckpointIO AsyncCheckpointIO"
            ),
            "Launchers": group(
                "paceline.processes.environments",
                "ClusterEnvironment LocalEnvironment TorchElasticEnvironment SLURMEnvironment MPIEnvironment "
                "LSFEnvironment KubeflowEnvironment",
            ),
            "Devices": group(
                "paceline.processes.accelerators",
                "Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator XPUAccelerator TPUAccelerator",
            ),
            "Layers": group("paceline.strategies.sync_batch_norm", "TorchSyncBatchNorm"),
        },
    ),
    "big_models": Page(
        "Functions for big models",
        "Models that are larger than the memory of a device.",
        "big_models",
        {
            "Build": group("paceline", "init_empty_weights init_on_device"),
            "Plan": group("paceline", "compute_module_sizes infer_auto_device_map plan_device_map"),
            "Load and run": group(
                "paceline",
                "load_checkpoint_and_dispatch load_checkpoint_in_model dispatch_model cpu_offload "
                "cpu_offload_with_hook disk_offload",
            ),
            "Quantize": group("paceline", "load_and_quantize_model BnbQuantizationConfig"),
        },
    ),
    "estimate": Page(
        "Memory estimates",
        "How much memory a model and its training take, without allocating it.",
        "big_models",
        {"": group("paceline.estimate.memory_estimate", "estimate_memory estimate_strategies MemoryEstimate")},
    ),
    "command_line": Page(
        "Classes of the command line",
        "A command line and config files from your classes.",
        "cli",
        {"": public("paceline.cli")},
        "paceline.cli",
    ),
    "utilities": Page(
        "Utilities",
        "Small helpers that programs written for Lightning import.",
        "from_lightning",
        {"": public("paceline.utilities")},
        "paceline.utilities",
    ),
    "stand_ins": Page(
        "Stand-ins",
        "``import lightning`` and ``import accelerate`` give Paceline. :doc:`/lightning_names` and "
        ":doc:`/accelerate_names` list every name.",
        "from_lightning",
        {"": ["paceline.compat.install"]},
    ),
}


def find(name: str) -> Any:
    """Return the object with a dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@cache
def home() -> dict[str, str]:
    """Return the name under which each public name is described: the first page with the same object has it."""
    homes, described = {}, {}
    for page in PAGES.values():
        for names in page.sections.values():
            for name in names:
                homes[name] = described.setdefault(id(find(name)), name)
    return homes


def text(page: Page) -> str:
    """Return the page's text."""
    made = heading(page.title, "=") + (f".. py:module:: {page.room}\n\n" if page.room else "")
    made += f"{page.about} Guide: :doc:`/{page.guide}`.\n\n"
    done = set()
    every = [name for names in page.sections.values() for name in names]
    if len(every) > 3:
        homes = dict.fromkeys(home()[name] for name in every)
        made += table(("name", ""), [(f":py:obj:`{last(name)} <{name}>`", first_line(find(name))) for name in homes])
    for title, names in page.sections.items():
        left = [name for name in names if name not in done]
        made += heading(title, "-") if title and left else ""
        made += "".join(entry(name) for name in left)
        done.update(names)
    return made


def last(name: str) -> str:
    return name.rpartition(".")[2]


def first_line(found: Any) -> str:
    line = (inspect.getdoc(found) or "").partition("\n\n")[0] if described(found) else ""
    return " ".join(line.split())


def described(found: Any) -> bool:
    return inspect.isclass(found) or inspect.isroutine(found)


def value(found: Any) -> str:
    """Return what an object that is no class or function is: its value, or the first line of its class's docstring."""
    return first_line(type(found)) if type(found).__repr__ is object.__repr__ else plain(repr(found))


def entry(name: str) -> str:
    """Return the description of one object."""
    found, at = find(name), home()[name]
    if at != name or not described(found):
        module, _, own = name.rpartition(".")
        about = f"The same as :py:obj:`{at}`." if at != name else value(found)
        return f".. py:data:: {own}\n   :module: {module}\n\n   {about}\n\n"
    if not inspect.isclass(found):
        return f".. autofunction:: {name}\n\n"
    options = ["   :members:"]
    if name in INTERNALS:
        options += [f"   :exclude-members: {INTERNALS[name]}"]
    if found.__bases__ != (object,):
        options += ["   :show-inheritance:"]
    if isinstance(found, EnumMeta):
        options += ["   :undoc-members:"]
    if name in INHERITS:
        options += [f"   :inherited-members: {INHERITS[name]}"]
    return "\n".join([f".. autoclass:: {name}", *options]) + "\n\n"


#: Members that only other parts of the package use, by class.
INTERNALS = {
    "paceline.Trainer": "asked_ckpt_path, brought_callbacks, has_own_save, logs_this_step, may_stop, saver",
    "paceline.strategies.Strategy": "progress",
}
#: Classes that show the members of their bases too, up to the one named.
INHERITS = {
    "paceline.Trainer": "object",
    "paceline.TrainingModule": "Module",
    "paceline.DataModule": "object",
    "paceline.Accelerator": "object",
    "paceline.PartialState": "object",
    "paceline.strategies.Strategy": "object",
    "paceline.compat.lightning.fabric.Fabric": "object",
}

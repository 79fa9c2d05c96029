"""Gathers everything that an Accelerator's saved state contains, and restores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .. import messages
from ..checkpoint.manifest import FORMAT
from ..checkpoint.plain_data import plain
from ..checkpoint.rank_files import (
    digest,
    entry_of,
    mean_of_replicas,
    optimizer_apart,
    put_back,
    replica,
    tell_derived,
    tensors_apart,
    without_entry,
)
from ..checkpoint.restore import load_weights, optimizer_problem, restore_precision, versions
from ..checkpoint.sharded_folder import together
from ..processes import seed
from ..torch_private import is_in_parts
from .loader_positions import FirstUse, LoadedPosition
from .schedulers import AcceleratedScheduler

if TYPE_CHECKING:
    from ..settings import Settings
    from ..strategies.base import Strategy
    from .models import PreparedModel
    from .optimizers import AcceleratedOptimizer
    from .plugins import ProjectConfiguration
    from .prepare import Prepared
    from .state_folders import Files
    from .trackers import Trackers
    from .windows import Windows

#: Weights by model index, in order of preparation.
Weights = dict[int, dict[str, Any]]


@dataclass(eq=False)
class Contents:
    """The parts of an Accelerator whose state is saved.

    Attributes:
        prepared: models, optimizers, schedulers and loaders.
        windows: micro-batches that are waiting for an optimizer step.
        trackers: trackers whose positions are saved.
        project: the ``ProjectConfiguration``, which contains the number of the next folder.
        settings: the Accelerator's settings, which are recorded but not restored.
        objects: objects registered for checkpointing, in order.
        script_skips: whether the script itself skips to the loaded position in the data.
    """

    strategy: Strategy
    prepared: Prepared
    windows: Windows
    trackers: Trackers
    project: ProjectConfiguration
    settings: Settings
    objects: list[Any] = field(default_factory=list)
    script_skips: bool = False

    def weights(self, only_trainable: bool) -> tuple[Weights, dict[int, list[str]]]:
        """Return the weights of all models, and the names of omitted weights. Every rank must call this."""
        weights: Weights = {}
        left_out: dict[int, list[str]] = {}
        for index, placement in enumerate(self.prepared.placements.values()):
            if id(placement.module) in self.prepared.unsaved:
                continue
            state = placement.strategy.model_state(placement.module)
            if only_trainable:
                frozen = {name for name, p in _parameters(placement.module) if not p.requires_grad}
                left_out[index] = [name for name in state if name in frozen]
                for name in left_out[index]:
                    del state[name]
            weights[index] = state
        return weights, left_out

    def gather(
        self, weights: Weights, left_out: Mapping[int, list[str]], files: Files, sequence: int, line: str
    ) -> dict[str, Any]:
        """Return everything that a loop needs to resume. Every rank must call this."""
        strategy = self.strategy
        custom = together(strategy, "saved", self._custom_states)
        ranks = strategy.gather_objects(self._of_this_rank(custom))
        models = [
            {"class": type(model).__name__, "saved": index in weights, "left_out": left_out.get(index, [])}
            for index, model in enumerate(self.prepared.models)
        ]
        return {
            "epoch": max((loader.epoch for loader in self.prepared.loaders), default=0),
            "global_step": self._updates(),
            "state_dict": weights.get(0, {}),
            "models": {index: state for index, state in weights.items() if index},
            "optimizer_states": [
                one.strategy.optimizer_state(_module_of(one), one.optimizer) for one in self.prepared.optimizers
            ],
            "lr_schedulers": [one.state_dict() for one in self.prepared.schedulers],
            "paceline": {
                "format": FORMAT,
                "versions": versions(),
                "world_size": strategy.world_size,
                "data_ranks": strategy.num_data_ranks,
                "optimizers": [type(one.optimizer).__name__ for one in self.prepared.optimizers],
                "precision": strategy.precision.state_dict(),
                "manifest": {"sequence": sequence, "line": line},
                "ranks": ranks,
                "accelerator": {
                    "step": self.windows.state.step,
                    "iteration": self.project.iteration,
                    "seed": self.prepared.seed,
                    "models": models,
                    "schedulers": [type(_inner(one)).__name__ for one in self.prepared.schedulers],
                    "loaders": len(self.prepared.loaders),
                    "custom": [
                        {"class": type(one).__name__, "state": state}
                        for one, state in zip(self.objects, custom, strict=True)
                    ],
                    "trackers": self.trackers.state_dict(),
                    "settings": self._settings(),
                    "files": files,
                },
            },
        }

    def _updates(self) -> int:
        """Return the number of weight updates, according to the counters of optimizers and schedulers."""
        counts = [
            float(values["step"])
            for one in self.prepared.optimizers
            for values in list(one.optimizer.state.values())[:1]
            if isinstance(values, dict) and "step" in values
        ]
        counts += [float(getattr(_inner(one), "last_epoch", 0) or 0) for one in self.prepared.schedulers]
        return int(max(counts, default=self.windows.state.step // max(self.windows.state.num_steps, 1)))

    def _custom_states(self) -> list[Any]:
        return [
            plain(one.state_dict(), f"The state_dict() of registered object {index} ({type(one).__name__})")
            for index, one in enumerate(self.objects)
        ]

    def _of_this_rank(self, custom: list[Any]) -> dict[str, Any]:
        strategy = self.strategy
        placements = list(self.prepared.placements.values())
        sums = [_fingerprint(state) for state in custom]
        first = strategy.broadcast(sums)
        for one in self.prepared.trained:
            one.strategy.check_replicas(one.module)
        return {
            "rank": strategy.global_rank,
            "data_rank": strategy.data_rank,
            "device": strategy.device.type,
            "loaders": [loader.state_dict() for loader in self.prepared.loaders],
            **self.windows.gather(),
            "buffers": [tensors_apart(replica(one.module, one.strategy), one.strategy) for one in placements],
            "reduction_orders": self._reduction_orders() if strategy.is_global_zero else [],
            "optimizers": self._optimizers_apart(),
            "local_steps": {index: one.local_steps for index, one in enumerate(placements) if one.local_steps},
            **self._counters_apart(),
            "custom": {i: state for i, state in enumerate(custom) if sums[i] != first[i]},
            "random": seed.random_states(),
        }

    def _reduction_orders(self) -> list[list[int] | None]:
        return [one.strategy.reduction_order() for one in self.prepared.placements.values()]

    def _optimizers_apart(self) -> dict[int, Any]:
        """Return this rank's optimizer states that differ from rank 0's because the ranks trained apart."""
        found = {i: optimizer_apart(one.optimizer, one.strategy) for i, one in enumerate(self.prepared.optimizers)}
        return {index: state for index, state in found.items() if state is not None}

    def _counters_apart(self) -> dict[str, Any]:
        """Return this rank's own schedules and loss scale if ranks trained apart, because fp16 may skip their steps."""
        if not any(one.strategy.replicas_differ for one in self.prepared.trained):
            return {}
        schedules = [one.state_dict() for one in self.prepared.schedulers]
        return {"lr_schedulers": schedules, "precision": self.strategy.precision.state_dict()}

    def _settings(self) -> dict[str, str]:
        """Return the settings that were set explicitly, as strings."""
        settings = self.settings
        return {name: str(settings[name]) for name in settings if settings.is_set(name)}


def _module_of(optimizer: AcceleratedOptimizer) -> nn.Module:
    return nn.Module() if optimizer.placement is None else optimizer.placement.module


def _parameters(module: nn.Module) -> Any:
    return module.named_parameters(remove_duplicate=False)


def _fingerprint(value: Any) -> Any:
    """Return a value that is equal for equal plain data, with checksums in place of tensors."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), b"" if is_in_parts(value) else digest(value.detach().cpu()))
    if isinstance(value, dict):
        return [(repr(key), _fingerprint(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return [_fingerprint(inner) for inner in value]
    return repr(value)


# ---- restore ---------------------------------------------------------------------------------------------------------


class Restored:
    """Compares a loaded state with the prepared objects, and restores them.

    Args:
        models: models whose weights are to be loaded; hooks may have loaded the weights of other models.
        newer: folder with a later state of the run that saved the loaded state, or None.

    Attributes:
        missing: descriptions of objects that only this run has (they keep their state), or that only the checkpoint
            has.
    """

    def __init__(
        self,
        contents: Contents,
        checkpoint: dict[str, Any],
        models: Sequence[nn.Module],
        newer: str | None = None,
    ) -> None:
        self.contents = contents
        self.newer = newer
        self.checkpoint = checkpoint
        self.section: dict[str, Any] = checkpoint.get("paceline", {})
        self.own_section: dict[str, Any] = self.section.get("accelerator", {})
        self.missing: list[str] = []
        self.derived: list[str] = []
        self.prepared, self.strategy = contents.prepared, contents.strategy
        strategy = self.strategy
        self.ranks: list[dict[str, Any]] = self.section.get("ranks", []) if self.own_section else []
        self.world = self.section.get("world_size", 1)
        self.alike = (self.world, self.section.get("data_ranks", 1)) == (strategy.world_size, strategy.num_data_ranks)
        self.own: dict[str, Any] | None = entry_of(self.ranks, strategy, self.alike)
        self.weights = self._match_weights({id(model) for model in models})
        self._compare()

    def _match_weights(self, wanted: set[int]) -> list[tuple[PreparedModel, dict[str, Any], list[str]]]:
        """Return the models to load, each with its weights and the names of omitted weights."""
        about = self.own_section.get("models", [{"class": "its own", "saved": True, "left_out": []}])
        others = self.checkpoint.get("models", {})
        found = []
        for index, placement in enumerate(self.prepared.placements.values()):
            name = f"model {index} ({type(placement.module).__name__})"
            if id(placement.module) not in wanted:
                continue
            if index >= len(about):
                self.missing.append(name)
            elif not about[index]["saved"]:
                self.missing.append(f"{name}, whose weights a hook removed when the state was saved")
            else:
                state = self.checkpoint["state_dict"] if index == 0 else others[index]
                found.append((placement, state, about[index]["left_out"]))
        self._compare_counts("model", about, self.prepared.models[: len(about)], [one["class"] for one in about])
        return found

    def _compare(self) -> None:
        own = self.own_section
        optimizers = self.checkpoint.get("optimizer_states", [])
        names = self.section.get("optimizers", [])
        inner = [one.optimizer for one in self.prepared.optimizers]
        self._compare_counts("optimizer", optimizers, inner, names)
        for index, (one, state) in enumerate(zip(inner, optimizers, strict=False)):
            problem = optimizer_problem(one, state, names[index] if index < len(names) else "another optimizer")
            if problem:
                raise ValueError(
                    f"accelerator.load_state: the saved state does not match optimizer {index} ({type(one).__name__}): "
                    f"{problem}. Create the optimizer as it was when the state was saved, and pass the objects to "
                    "prepare in the same order."
                )
        schedulers = self.checkpoint.get("lr_schedulers", [])
        inner = [_inner(one) for one in self.prepared.schedulers]
        self._compare_counts("scheduler", schedulers, inner, own.get("schedulers", []))
        loaders = range(own.get("loaders", 0))
        self._compare_counts("loader", loaders, self.prepared.loaders, [])
        self._compare_custom(own.get("custom", []))
        if self.strategy.precision.state_dict() and not self.section.get("precision"):
            self.missing.append("the loss scale, which keeps its current value")
        if not self.ranks:
            self.missing.append(
                "RNG states and the position in the data, because the file was not written by save_state"
            )

    def _compare_custom(self, saved: list[dict[str, Any]]) -> None:
        objects = self.contents.objects
        self._compare_counts("registered object", saved, objects, [one["class"] for one in saved])
        for index, (one, kept) in enumerate(zip(objects, saved, strict=False)):
            if kept["class"] != type(one).__name__:
                self.missing.append(
                    f"registered object {index} ({type(one).__name__}; the state has a {kept['class']} there)"
                )

    def _compare_counts(self, what: str, saved: Sequence[Any], present: Sequence[Any], names: Sequence[str]) -> None:
        """Record objects that exist only in this run, or only in the state."""
        for index in range(len(saved), len(present)):
            self.missing.append(f"{what} {index} ({type(present[index]).__name__})")
        for index in range(len(present), len(saved)):
            name = f" ({names[index]})" if index < len(names) else ""
            self.missing.append(f"{what} {index}{name} of the saved state, which has no counterpart in this run")

    # ---- apply ------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Restore everything. Every rank must call this."""
        contents = self.contents
        self._load_models()
        own = (self.own or {}) if self.alike else {}
        for index, state in enumerate(self.checkpoint.get("optimizer_states", [])[: len(self.prepared.optimizers)]):
            one = self.prepared.optimizers[index]
            apart = own.get("optimizers", {}).get(index) if one.strategy.holds_whole_module else None
            one.strategy.load_optimizer_state(_module_of(one), one.optimizer, apart or state)
        orders = self.ranks[0].get("reduction_orders", []) if self.alike and self.ranks else []
        for placement, order in zip(self.prepared.placements.values(), orders, strict=False):
            placement.strategy.restore_reduction_order(order)
        for index, placement in enumerate(self.prepared.placements.values()):
            placement.local_steps = own.get("local_steps", {}).get(index, 0)
        schedules = own.get("lr_schedulers") or self.checkpoint.get("lr_schedulers", [])
        for one, state in zip(self.prepared.schedulers, schedules, strict=False):
            one.load_state_dict(state)
        restore_precision(self.strategy.precision, own.get("precision") or self.section.get("precision"))
        if not self.own_section:
            return
        together(self.strategy, "loaded", self._load_custom)
        self._load_loaders()
        self._load_windows()
        contents.trackers.load_state_dict(self.own_section["trackers"], self.newer)
        contents.windows.state.step = self.own_section["step"]
        self.prepared.seed = self.own_section["seed"]
        contents.project.iteration = self.own_section["iteration"] + 1
        self._load_random()
        tell_derived(self.derived, self.alike, self.world, self.strategy.world_size)

    def _load_models(self) -> None:
        for placement, state, left_out in self.weights:
            module, load = placement.module, placement.strategy.load_model_state
            means = self._means(placement, state)
            own = module.state_dict().keys()
            fits = not (own - state.keys() - set(left_out)) and not (state.keys() - own)
            partly = bool(left_out) and fits
            load_weights(module, {**state, **means}, not partly, _silent(load) if partly else load, _ADVICE)
            if partly:
                messages.info_once(
                    f"The state contains only the {len(state)} trained weights and buffers of {type(module).__name__}. "
                    f"The {len(left_out)} frozen weights keep their current values (only_trainable=True)."
                )
            if self.alike and self.own is not None:
                put_back(replica(module, placement.strategy), self._apart(self.own, placement))

    def _means(self, placement: PreparedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the means of weights that ranks trained apart, unless each rank resumes with its own weights."""
        found = mean_of_replicas(placement.module, [self._apart(kept, placement) for kept in self.ranks], state)
        if found and self.alike and placement.strategy.holds_whole_module:
            placement.strategy.replicas_differ = True
            return {}
        if found:
            self.derived.append(
                f"the weights of {type(placement.module).__name__} that processes trained apart (their mean)"
            )
        return found

    def _apart(self, rank: Mapping[str, Any], placement: PreparedModel) -> dict[str, Tensor]:
        """Return the model's tensors that a saved rank had to itself, by name."""
        index = list(self.prepared.placements.values()).index(placement)
        return rank["buffers"][index] if index < len(rank["buffers"]) else {}

    def _load_custom(self) -> None:
        apart = (self.own or {}).get("custom", {}) if self.alike else {}
        objects = self.contents.objects
        for index, (one, kept) in enumerate(zip(objects, self.own_section["custom"], strict=False)):
            if kept["class"] == type(one).__name__:
                one.load_state_dict(apart.get(index, kept["state"]))

    def _load_loaders(self) -> None:
        kept = (self.own or self.ranks[0])["loaders"]
        for index, (loader, state) in enumerate(zip(self.prepared.loaders, kept, strict=False)):
            loader.load_state_dict(state)
            if loader.derived:
                self.derived.append(loader.derived)
            loaded = loader.loaded
            if loaded is not None:
                loaded.by_script = self.contents.script_skips
                if not loaded.by_script:
                    _tell_position(index, loaded)

    def _load_windows(self) -> None:
        """Restore incomplete accumulation windows, now or once the script has skipped to the loaded position."""
        contents, own = self.contents, self.own if self.alike else None
        count = max((entry["state"]["count"] for entry in (own or self.ranks[0])["windows"]), default=0)
        within = [loader.loaded for loader in self.prepared.loaders if loader.loaded is not None]
        for loaded in within:
            loaded.window_start = loaded.position["batches"] - count
            loaded.leave = contents.windows.forget
        if not contents.script_skips or all(loaded.position["last"] for loaded in within):
            self.derived += contents.windows.restore(own, self.ranks)
            return
        contents.windows.forget()
        use, ranks, told = FirstUse(contents.windows.state), self.ranks, (self.alike, self.world)

        def arrive() -> None:
            if not use.seen:
                use.seen = True
                tell_derived(contents.windows.restore(own, ranks), *told, self.strategy.world_size)

        for loaded in within:
            loaded.arrive = arrive

    # ---- randomness --------------------------------------------------------------------------------------------------

    def _load_random(self) -> None:
        """Restore RNG states; call this last, because restoring other objects may draw random numbers."""
        strategy = self.strategy
        seed.warn_of_other_device(self.ranks[0].get("device"), strategy.device.type)
        if self.own is not None:
            seed.set_random_states(self.own["random"])
        else:
            shared = int.from_bytes(digest(self.ranks[0]["random"]["torch"]), "little")
            seed.seed_all(seed.mixed(shared, strategy.data_rank))
        lacking = without_entry(self.ranks, strategy.world_size)
        if lacking:
            self.derived.append(f"the RNG states of {lacking} (seeded from rank 0's state and the rank)")


def _inner(scheduler: Any) -> Any:
    """Return the scheduler that a prepared scheduler wraps.

    A scheduler that is not prepared, which programs written for Accelerate may register, is returned unchanged.
    """
    return scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler


def _tell_position(index: int, loaded: LoadedPosition) -> None:
    """Print where the next pass over a loader begins, so that the script does not skip again."""
    epoch, done = loaded.position["epoch"], loaded.position["batches"]
    if loaded.position["last"]:
        messages.info_once(
            f"The state was saved at the last batch of epoch {epoch}, so the next pass over loader {index} is epoch "
            f"{epoch + 1}. Whatever the loop does between epochs, such as validation, still has to run."
        )
    elif done:
        messages.info_once(
            f"The next pass over loader {index} continues epoch {epoch} after batch {done}, so the script does not "
            "need to skip batches."
        )


def _silent(load: Any) -> Any:
    """Wrap ``load`` so that it returns None, and weights that are known to be missing are not reported."""

    def loading(*args: Any) -> None:
        load(*args)

    return loading


_ADVICE = "Create the model as it was when the state was saved, and prepare models in the same order."

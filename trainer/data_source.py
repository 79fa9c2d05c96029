"""The loaders of a run: where they come from, and how many batches each yields."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import messages
from ..data.combined_loader import CombinedLoader, end_persistent_workers, length_of
from ..data.datamodule import DataModule
from ..data.loaders import (
    advise,
    count_batches,
    eval_loaders,
    in_structure,
    leaves_of,
    release_shuffling,
    seed_shuffling,
    shuffles,
    train_loader,
    users_generators,
    without_shuffling,
)
from ..data.sharding import (
    batch_indices,
    batch_share,
    ends_separately,
    ends_unknown,
    last_share,
    shard_evaluation,
    shard_training,
    unweighted,
)
from ..devices.kinds import kind_of
from ..processes.seed import isolate_rng
from .hooks import overridden
from .module import TrainingModule

if TYPE_CHECKING:
    from .run import Run

INF = float("inf")

#: The hook that returns a stage's loaders.
HOOK = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
STEP = {"train": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}


class DataSource:
    """The loaders of one run: those passed to the entry point (``given``, by stage), or those that hooks create."""

    def __init__(self, run: Run, given: dict[str, Any]) -> None:
        self.run = run
        self.given = given
        self.train_loader: Any = None
        self.num_training_batches: int | float = INF
        self.eval: dict[str, tuple[list[Any], list[int | float]]] = {}
        self._shown: dict[str, Any] = {}
        self._loaded_at = 0
        self._validation_until = INF
        self._agreed_on: Any = None
        self._is_elsewhere = False  # the run happened in other processes
        self._is_mine = False  # the training loader was sharded here, so all ranks must draw the same order
        #: The last training batch's :meth:`share`; None if shares are not known before the batches are fetched.
        self.known_share: float | None = 1.0
        #: Whether batches other than an epoch's last one may have a share, too.
        self.ends_separately = False

    # ---- finding ---------------------------------------------------------------------------------------------------

    def defined(self, stage: str) -> bool:
        """Return True if a stage has loaders."""
        return self.given.get(stage) is not None or self.hook(stage) is not None

    def require(self, stage: str) -> None:
        """Raise if there are no loaders for a stage."""
        if not self.defined(stage):
            owner = type(self.run.trainer.training_module).__name__
            raise TypeError(
                f"There is no data for {STEP[stage]}, because no loader was passed and neither {owner} nor a "
                f"DataModule defines {HOOK[stage]}(). Pass a loader, or define the hook."
            )

    def hook(self, stage: str) -> Callable[[], Any] | None:
        """Return the hook that creates a stage's loaders; None if neither the DataModule nor the module defines it."""
        run, name = self.run, HOOK[stage]
        found = overridden(run.datamodule, name, DataModule) if run.datamodule is not None else None
        return found or overridden(run.trainer.training_module, name, TrainingModule)

    def load(self, stage: str) -> Any:
        """Return the loaders that were passed, or those that the hook creates now."""
        if self.given.get(stage) is not None:
            return self.given[stage]
        hook = self.hook(stage)
        loaders = self.require(stage) if hook is None else hook()
        if loaders is None:
            raise TypeError(f"{HOOK[stage]}() returned None. Return a DataLoader or another iterable of batches.")
        return loaders

    def limit(self, stage: str) -> int | float | None:
        """Return the stage's ``limit_*_batches``, with ``overfit_batches`` applied."""
        run = self.run
        name = {"train": "train", "validate": "val", "test": "test", "predict": "predict"}[stage]
        limit = getattr(run.trainer, f"limit_{name}_batches")
        return (
            run.trainer.overfit_batches if run.trainer.overfit_batches and name in ("train", "val") and limit else limit
        )

    # ---- training --------------------------------------------------------------------------------------------------

    def train(self) -> Any:
        """Create the training loader on the first call, and return it."""
        if self.train_loader is None and not self._is_elsewhere:
            profiler = self.run.trainer.profiler
            with profiler.profile("setup_train_dataloader"):
                given = profiler.loader_to_prepare(self.load("train"))
                if isinstance(given, CombinedLoader):  # counted although the next line may refuse it, as in Lightning
                    self.num_training_batches = count_batches(given, self.limit("train"), "train_dataloader")
                loader = train_loader(given)
            if self.run.trainer.overfit_batches:
                loader = self._in_order(loader, "train")
            whole, loader = loader, self._mine(loader, shard_training)
            self._is_mine = loader is not whole
            self.num_training_batches = count_batches(loader, self.limit("train"), "train_dataloader")
            self.train_loader = loader
            self.ends_separately = ends_separately(loader)
            self.known_share = last_share(loader) if self.num_training_batches == length_of(loader) else 1.0
            if self.ends_separately or (self._is_mine and ends_unknown(loader, self.num_training_batches)):
                self.known_share = None
            if self._is_mine and isinstance(loader, CombinedLoader):
                self._tell_unweighted(unweighted(loader, self.num_training_batches))
            self._loaded_at = self.run.state.epoch
        return self.train_loader

    def _tell_unweighted(self, indices: list[int]) -> None:
        if indices:
            one = len(indices) == 1
            messages.warn_once(
                f"The {self.run.strategy.num_data_ranks} processes share the last batch of "
                f"{'loader' if one else 'loaders'} {', '.join(map(str, indices))} of the CombinedLoader "
                "unevenly. Because a step's loss has a single weight for the batches of all loaders, this cannot be "
                "corrected: on a process with fewer samples from that batch, each of them counts more. Pass "
                f"drop_last=True to {'that loader' if one else 'those loaders'}, or use a number of samples that the "
                "processes can share evenly."
            )

    def share(self, batch_idx: int) -> float:
        """Return the weight of a training batch's loss on this rank; it differs if ranks have unequal batches.

        The batch has been fetched. It is the epoch's last one, unless workers' streams end separately.
        """
        if self.known_share is not None:
            return self.known_share
        return batch_share(self.train_loader, batch_idx, at_end=True)

    def _in_order(self, loader: Any, stage: str) -> Any:
        """Return the loader with shuffling turned off, for ``overfit_batches``."""
        if shuffles(loader):
            messages.warn_once(
                f"{HOOK[stage]} shuffles, but Trainer(overfit_batches={self.run.trainer.overfit_batches}) needs the "
                "same batches in every epoch, so shuffling is turned off."
            )
        return without_shuffling(loader)

    def _mine(self, loader: Any, shard: Callable[[Any, int, int], Any]) -> Any:
        """Return a copy of a loader that yields only this rank's shard of the data."""
        strategy = self.run.strategy
        if strategy.num_data_ranks == 1 or not self.run.trainer.use_distributed_sampler:
            return loader
        return shard(loader, strategy.data_rank, strategy.num_data_ranks)

    def agree_on_length(self) -> None:
        """Limit every rank to the smallest number of batches that any rank has; warn if the numbers differ."""
        strategy = self.run.strategy
        if strategy.world_size == 1 or self._agreed_on is self.train_loader:
            return
        self._agreed_on = self.train_loader
        if self._is_mine:
            for generator in users_generators(self.train_loader):
                generator.set_state(strategy.broadcast(generator.get_state()))
        found = strategy.gather_objects(self.num_training_batches)
        if INF in found:
            self.num_training_batches = INF
        elif len(set(found)) > 1:
            self.num_training_batches = min(found)
            messages.warn(
                f"The number of batches in the train_dataloader differs between ranks ({', '.join(map(str, found))}). "
                f"Each rank uses {min(found)} per epoch and skips the rest. Give every rank the same number of "
                "batches, or let Trainer(use_distributed_sampler=True) do the sharding."
            )

    def batch_agreement(self) -> Callable[[bool], bool] | None:
        """Return a function that checks whether every rank has a next batch; None if no check is needed."""
        strategy = self.run.strategy
        if strategy.world_size == 1 or self.num_training_batches != INF:
            return None
        return partial(strategy.agree, all=True)

    def reload_if_due(self) -> None:
        """Call the loader hooks again in the epochs that ``reload_dataloaders_every_n_epochs`` selects."""
        every, epoch = self.run.trainer.reload_dataloaders_every_n_epochs, self.run.state.epoch
        if every and epoch - self._loaded_at >= every:
            self.train_loader = None
        self.train()
        self.agree_on_length()

    def val_check_batch(self) -> int | float:
        """Return the number of batches between validations; inf means after the epoch's last batch."""
        interval, batches = self.run.trainer.val_check_interval, self.num_training_batches
        if isinstance(interval, int) and not isinstance(interval, bool):
            if interval > batches and self.run.trainer.check_val_every_n_epoch is not None:
                raise ValueError(
                    f"Trainer: val_check_interval={interval} exceeds the number of training batches per epoch "
                    f"({batches}), so validation would never run. Lower val_check_interval, or set "
                    "check_val_every_n_epoch=None to count batches across epochs."
                )
            return interval
        if interval == 1.0 or not isinstance(interval, float):
            return INF
        if batches == INF:
            raise ValueError(
                f"Trainer: val_check_interval={interval} is a fraction of an epoch, but the train_dataloader has no "
                "length. Pass a number of batches (an int), or give the loader a __len__."
            )
        return max(1, int(batches * interval))

    # ---- evaluation ------------------------------------------------------------------------------------------------

    def validates(self) -> bool:
        """Return True if this fit has a validation loader and step, and does not limit validation to 0 batches."""
        run = self.run
        loader = self.defined("validate")
        step = overridden(run.trainer.training_module, "validation_step", TrainingModule) is not None
        if self.limit("validate") == 0:
            return False
        owner = type(run.trainer.training_module).__name__
        if loader and not step:
            messages.warn_once(
                f"{owner} has a val_dataloader but no validation_step, so validation is skipped. Define "
                "validation_step(self, batch, batch_idx), or leave out the loader."
            )
        if step and not loader and run.state.fn == "fit":
            messages.warn_once(
                f"{owner} has a validation_step but no val_dataloader, so validation is skipped. Pass val_dataloaders "
                "to fit, or define val_dataloader()."
            )
        return loader and step

    def evaluation(self, kind: str) -> tuple[list[Any], list[int | float]]:
        """Return a stage's loaders, shuffled for this epoch, and the number of batches to take from each."""
        run = self.run
        if run.state.fn == "fit" and run.state.epoch >= self._validation_until:
            self.eval.pop(kind, None)
        loaders, limits = self.load_evaluation(kind)
        for loader in loaders:
            seed_shuffling(loader, run.state.shuffle_seed, run.state.epoch)
        if run.state.stage == "sanity_check" and run.trainer.num_sanity_val_steps != -1:
            limits = [min(limit, run.trainer.num_sanity_val_steps) for limit in limits]
        return loaders, limits

    def load_evaluation(self, kind: str) -> tuple[list[Any], list[int | float]]:
        """Create a stage's loaders on the first call; return them and the number of batches that each yields."""
        run = self.run
        if kind not in self.eval:
            with isolate_rng() if self.reloads() else nullcontext():  # a resumed run calls the hook in other epochs
                loaders = eval_loaders(given := self.load(kind))
            self._validation_until = self._keeps_validation_until()
            if run.trainer.overfit_batches and kind == "validate":
                loaders = [self._in_order(loader, kind) for loader in loaders]
            loaders = [self._mine(loader, shard_evaluation) for loader in loaders]
            limits = [count_batches(one, self.limit(kind), HOOK[kind]) for one in loaders]
            for loader in loaders:
                advise(loader, HOOK[kind])
            self.eval[kind] = (loaders, limits)
            self._shown[kind] = in_structure(given, loaders)
        return self.eval[kind]

    def reloads(self) -> bool:
        """Return True if this fit calls the loader hooks again after some epochs."""
        return self.run.state.fn == "fit" and self.run.trainer.reload_dataloaders_every_n_epochs > 0

    def _keeps_validation_until(self) -> int | float:
        """Return the first epoch in which validation needs new loaders.

        Loaders created for the sanity check are reused if the first epoch validates too.
        """
        state, trainer = self.run.state, self.run.trainer
        if not self.reloads():
            return INF
        if state.stage == "sanity_check" and trainer.check_val_every_n_epoch not in (None, 1):
            return state.epoch
        return state.epoch + trainer.reload_dataloaders_every_n_epochs

    def shown(self, stage: str) -> Any:
        """Return a stage's loaders, in the structure that the user passed; None before they are created."""
        if stage == "train":
            loader = self.train_loader
            return loader.iterables if isinstance(loader, CombinedLoader) else loader
        return self._shown.get(stage)

    def track_indices(self, loader: Any) -> Callable[[], list[int]] | None:
        """Return a function that returns the next batch's sample indices; None if the order is not known in advance."""
        indices = batch_indices(loader)
        return None if indices is None else lambda: next(indices)

    def release(self) -> None:
        """At the end of a run, restore the loaders to their original state, and stop their workers."""
        for loader in (self.train_loader, *(one for loaders, _ in self.eval.values() for one in loaders)):
            release_shuffling(loader)
            for leaf in leaves_of(loader):
                end_persistent_workers(leaf)

    def counts(self) -> dict[str, Any]:
        """Return the number of batches in each loader, for :meth:`take_over` in another process."""
        evaluated = {kind: limits for kind, (_, limits) in self.eval.items()}
        return {"train": self.num_training_batches, "made": self.train_loader is not None, "eval": evaluated}

    def take_over(self, counts: dict[str, Any]) -> None:
        """Take over the loaders and the numbers of batches from a run in other processes."""
        self._is_elsewhere = True
        self.num_training_batches = counts["train"]
        if counts["made"] and self.given.get("train") is not None:
            self.train_loader = train_loader(self.given["train"])
        for kind, limits in counts["eval"].items():
            given = self.given.get(kind)
            self.eval[kind] = (eval_loaders(given), limits)
            self._shown[kind] = None if given is None else in_structure(given, self.eval[kind][0])

    def name_of(self, leaf: Any) -> str | None:
        """Return a name for a loader of this run, such as ``val_dataloader 1``; None for any other loader."""
        if any(one is leaf for one in leaves_of(self.train_loader)):
            return HOOK["train"]
        for kind, (loaders, _) in self.eval.items():
            for idx, loader in enumerate(loaders):
                if any(one is leaf for one in leaves_of(loader)):
                    return f"{HOOK[kind]}{f' {idx}' if len(loaders) > 1 else ''}"
        return None

    # ---- lengths ---------------------------------------------------------------------------------------------------

    def length(self, loader: Any) -> int | float:
        """Return the loader's length in batches, or inf if it has none."""
        return count_batches(loader, None, "dataloader")

    def length_known(self) -> bool:
        """Return True if the training loader has a length."""
        return self.length(self.train_loader) != INF

    def cut(self) -> int | float:
        """Return the number of training batches to fetch; inf if no limit cuts the loader short."""
        return self.num_training_batches if self.num_training_batches < self.length(self.train_loader) else INF

    def looks_ahead(self, loader: Any) -> bool:
        """Return True if one batch is fetched ahead, to overlap its copy with compute or to detect the last batch."""
        unknown = self.length(loader) == INF or (loader is self.train_loader and self.num_training_batches == INF)
        return kind_of(self.run.strategy.device).overlaps_copies() or unknown

"""Prepared loaders that use the same sample order and random numbers as Accelerate, given the same script and seed."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ... import messages
from ...accelerator.dispatched_loader import Dispatched
from ...accelerator.loader_positions import FirstUse, Pass
from ...accelerator.loaders import DataLoaderConfiguration, PreparedLoader
from ...data.batches import Batches
from ...data.combined_loader import length_of
from ...data.loaders import announce_epoch, replaced, users_generators
from ...data.sample_order import cuts, pass_over
from ...data.sharding import is_split
from ...strategies.base import Strategy


class DataLoaderShard(PreparedLoader):
    """A prepared loader that shuffles and draws random numbers as Accelerate does.

    With one process, the loader draws its order from torch's global generator, as a plain DataLoader does. With several
    processes, its sampler gets its own generator, seeded with one draw from the global generator. With
    ``use_seedable_sampler``, the order depends on the seed and the number of complete passes. The next batch is always
    fetched before the current batch is yielded. Process 0 reads iterable datasets for all processes.

    Args:
        **options: other arguments of ``PreparedLoader``, except ``seed``, which this class chooses itself.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        strategy: Strategy,
        config: DataLoaderConfiguration,
        device_placement: bool = True,
        **options: Any,
    ) -> None:
        sampler, options["seed"] = sampler_of(loader), None
        messages.ignored(
            "DataLoaderConfiguration",
            "torch's global generator determines the order (use_seedable_sampler is False)",
            data_seed=None if config.use_seedable_sampler else config.data_seed,
        )
        central = dispatches(loader, config, device_placement)
        if central:
            loader = replaced(loader, generator=None)
        early = config.use_stateful_dataloader and (strategy.num_data_ranks == 1 or not central)
        shares = not (config.use_seedable_sampler or central) and strategy.num_data_ranks > 1
        if shares and getattr(sampler, "generator", loader) is None:
            sampler.generator = torch.Generator().manual_seed(_draw())
        before = _first_draws(loader) if early else None
        if config.use_seedable_sampler and isinstance(sampler, RandomSampler):
            own = torch.initial_seed() if config.data_seed is None else config.data_seed
            options["seed"] = _shared(strategy.gather_objects(own))
            sampler.generator = torch.Generator()
            if early and loader.num_workers:
                _tell(
                    "With use_stateful_dataloader=True and workers, the seedable sampler determines the order of "
                    "every pass. In Accelerate, torch's global generator determines the order of the first pass.",
                    key="the first pass of a stateful loader",
                )
        config = replace(config, dispatch_batches=central, data_seed=None)
        vars(self).update(_sampler=sampler, _first=True, _before=before)
        super().__init__(loader, strategy, config, device_placement=device_placement, **options)

    @property
    def iteration(self) -> int:
        """Index of the current pass; between passes, the index of the next one."""
        return self.epoch

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self.set_epoch(iteration)

    #: Whether the loader is also a torchdata StatefulDataLoader.
    use_stateful_dataloader = False

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """The loader that yields the batches of all processes."""
        return self.base

    @property
    def device(self) -> torch.device | None:
        """The device that batches are moved to; None if they stay where the dataset puts them."""
        return self.strategy.device if self.device_placement else None

    @device.setter
    def device(self, device: torch.device | str | None) -> None:
        if device is not None and torch.device(device) != self.strategy.device:
            raise ValueError(
                f"A prepared loader got device={str(device)!r}, but its batches can only be moved to this process's "
                f"device, {self.strategy.device}. Set device to None, and move the batches in the loop."
            )
        self.device_placement = device is not None

    @property
    def rng_types(self) -> list[str]:
        """RNG states that all processes copy from process 0 when a pass begins."""
        return list(self._rng_types)

    @property
    def synchronized_generator(self) -> torch.Generator | None:
        """The generator of the loader's sampler, which is the same on all processes; None if it has none."""
        return getattr(self._sampler, "generator", None)

    @property
    def skip_batches(self) -> int:
        """Number of batches that are skipped at the beginning of each pass."""
        return self._skip

    @skip_batches.setter
    def skip_batches(self, num_batches: int) -> None:
        if num_batches < 0:
            raise ValueError(f"A prepared loader got skip_batches={num_batches}, which is negative. Set 0 or more.")
        vars(self)["_skip"] = num_batches

    def begin(self) -> None:
        """Record that a pass has begun, for code that reads the batches without iterating over this loader."""
        self.reset()
        self.gradient_state.begin(self)

    def end(self) -> None:
        """Record that a pass has ended."""
        self.gradient_state.end(self)

    def reset(self) -> None:
        """Record that the last batch has not been read yet."""
        self.end_of_dataloader = False

    @property
    def samples(self) -> int:
        """Number of samples in the most recent batch, not counting repeated ones.

        A batch may have more rows than samples (pairs of texts), or fewer (texts joined into one row), so the number is
        computed from the sampler where possible.
        """
        batches: Any = self.base.batch_sampler
        total, size, world = length_of(sampler_of(self.base)), self.total_batch_size, self.strategy.num_data_ranks
        known = self._even and cuts(batches) and not is_split(self.base)
        if not known or total is None or not size or isinstance(self.base.dataset, IterableDataset):
            return self.rows
        left = 0 if batches.drop_last or not self.end_of_dataloader or self._is_cut() else total % size
        return round(self.share * left / world) if left else size // world

    def _batches(self, epoch: int, start: int, resume: Mapping[str, Any] | None = None) -> Batches:
        strategy, now = self.strategy, None
        if self._before is not None and start == 0 and resume is None:
            now = torch.get_rng_state()
            torch.set_rng_state(self._before)
        if strategy.num_data_ranks > 1:
            if isinstance(self._source, Dispatched):
                if strategy.global_rank:
                    pass_over(self.base, self._first, 0)  # Accelerate starts the loader on every process
            else:
                for generator in users_generators(self._source):
                    generator.set_state(strategy.broadcast(generator.get_state()))
        vars(self).update(_first=False, _before=None)
        found = super()._batches(epoch, start, resume)
        if now is not None:
            found.prepare = partial(torch.set_rng_state, now)
        return found

    def _settle_order(self, epoch: int) -> int | None:
        if self.seed is not None:
            self._sampler.generator.manual_seed(self.seed + epoch)
        announce_epoch(self._order, epoch)
        return None

    def _begin_again(self, position: Mapping[str, Any]) -> tuple[Pass, Iterator[Any]]:
        self._tell_order()
        return super()._begin_again(position)

    def _continue(self, position: Mapping[str, Any]) -> tuple[Pass, Iterator[Any]]:
        self._tell_order()
        return super()._continue(position)

    def _tell_order(self) -> None:
        """Report how the sample order differs from Accelerate's after loading a state that was saved during a pass."""
        if isinstance(self._sampler, RandomSampler) and (self.seed is None or not self._first):
            _tell(
                "The pass during which the loaded state was saved continues in its original order, so that each "
                "sample appears once. Accelerate draws the remaining samples of the pass from a different order.",
                key="the order of an interrupted pass",
            )

    def _looks_ahead(self) -> bool:
        return True

    def _yield_batches(self, one: Pass, iterator: Iterator[Any]) -> Generator[Any]:
        """Yield a pass's batches. A pass that the loop leaves early does not count, so the next pass repeats it."""
        use, self._place.epoch = FirstUse(self.gradient_state), one.epoch
        try:
            yield from super()._yield_batches(one, iterator)
            self._place.epoch += 1
        finally:  # some loops stop after the last batch without exhausting the iterator
            if use.seen and self.end_of_dataloader:
                self._tell_differences()

    def _tell_differences(self) -> None:
        """Report how this training pass, or the next one, differs from what Accelerate would do."""
        state, world = self.gradient_state, self.strategy.num_data_ranks
        window, steps = state.window, state.num_steps
        if window.complete and not window.free and 0 < window.count < steps:
            _tell(
                f"The last window of a pass has {window.count} of {steps} micro-batches. Its gradient is the mean "
                f"over these micro-batches, whereas Accelerate divides the sum by {steps}.",
                key="the last window is short",
            )
        if steps > 1 and sum(one.count > 0 for one in state.windows.values()) > 1:
            _tell(
                "Each group of models passed to accumulate has its own accumulation window, whereas in Accelerate, "
                "all accumulate blocks count toward the same window.",
                key="several windows",
            )
        if world > 1 and self.remainder > 0:
            theirs = "repeats other samples" if self._even else "fills the batches of the first processes"
            _tell(
                f"The dataset's last samples ({self.remainder} of {self.total_dataset_length}) do not fill a batch on "
                f"each of {world} processes. The processes divide these samples, so that each sample counts once, "
                f"whereas Accelerate {theirs}.",
                key="the last batches are not full",
            )
        if self._skip and self.seed is not None:
            _tell(
                "After a pass over skip_first_batches(...), the next pass uses the order of the next epoch, whereas "
                "Accelerate's seedable sampler repeats the order of the pass that skipped batches.",
                key="the order after a pass that skipped batches",
            )


def _tell(difference: str, key: str) -> None:
    messages.info_once(f"{difference} As a result, losses differ from Accelerate's.", key=key)


def dispatches(loader: DataLoader[Any], config: DataLoaderConfiguration, device_placement: bool) -> bool:
    """Return True if process 0 reads a loader for all processes."""
    if config.dispatch_batches is None:
        return device_placement and isinstance(loader.dataset, IterableDataset)
    return config.dispatch_batches


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler of a loader's batch sampler; None if there is none."""
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    return getattr(batches, "sampler", None)


def _draw() -> int:
    """Draw a seed from torch's global generator."""
    return int(torch.empty((), dtype=torch.int64).random_())


def _first_draws(loader: DataLoader[Any]) -> Tensor | None:
    """Draw the first random numbers of the first pass, as Accelerate does when it prepares a stateful loader.

    Returns:
        The state of the global generator before these draws; None if the numbers are drawn when the pass begins.
    """
    before, sampler = torch.get_rng_state(), sampler_of(loader)
    if loader.num_workers and not isinstance(sampler, (RandomSampler, SequentialSampler, type(None))):
        return None
    if loader.generator is None:
        _draw()
    if loader.num_workers and getattr(sampler, "generator", loader) is None:
        _draw()
    return before


def _shared(seeds: list[int]) -> int:
    """Return process 0's seed; warn once if the processes have different seeds."""
    if len(set(seeds)) > 1:
        messages.info_once(
            "The processes have different seeds (set_seed(..., device_specific=True)). They all shuffle with process "
            "0's seed, so that each sample appears once. With Accelerate's seedable sampler, each process would use "
            "its own order, so samples would be repeated or left out. To choose the seed, pass "
            "DataLoaderConfiguration(data_seed=...)."
        )
    return seeds[0]

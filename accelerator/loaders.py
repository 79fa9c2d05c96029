"""Prepared loaders, which yield this process's shard of the data on its device and can save their position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from .. import messages
from ..data.batches import Batches
from ..data.combined_loader import length_of
from ..data.loaders import (
    load_loader_state,
    loader_state,
    replaced,
    samplers_of,
    samples_in_batch,
    seed_shuffling,
    users_generators,
    what_fetching_changes,
)
from ..data.sample_order import cuts, takes_indices
from ..data.sharding import batch_share, ends_separately, is_split, shard
from ..data.uneven_shards import Division
from ..data.worker_processes import explain_lost_worker, torchs_own
from ..devices.kinds import kind_of
from ..processes.seed import host_random_states, mixed, set_random_states
from ..strategies.base import Strategy
from .accumulation import GradientState
from .dispatched_loader import Dispatched
from .loader_positions import FirstUse, LeftOut, LoadedPosition, Pass, Place
from .nested_tensors import rows_of
from .random_seeds import share_random_state

INF = float("inf")


@dataclass
class DataLoaderConfiguration:
    """Settings for preparing loaders.

    Attributes:
        split_batches: whether to split each batch across processes; otherwise each process gets full batches.
        dispatch_batches: whether process 0 reads all batches and sends them to the other processes; None means False.
        even_batches: whether all processes get the same number of batches. If False, no sample is repeated, so some
            processes may get one batch fewer.
        use_seedable_sampler: has no effect, because the order always depends only on the seed and the epoch.
        data_seed: seed for shuffling; None uses torch's seed.
        non_blocking: has no effect, because copies to a GPU always use pinned memory and do not block.
        use_stateful_dataloader: whether to read iterable datasets with torchdata's StatefulDataLoader, which can save
            its position even with workers. Map-style datasets resume exactly even without this setting.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


class PreparedLoader(DataLoader[Any]):
    """A DataLoader that yields this process's batches on its device.

    Attributes that this class does not define are read from and set on the user's loader, ``base``.

    Args:
        gradient_state: the state that records which loader is being read.
        seed: determines the sample order, together with the epoch; if None, the user's loader determines the order.
        device_placement: whether to move batches to the device.
        rng_types: RNG states that process 0 broadcasts to all processes when a pass begins; see
            :func:`.random_seeds.synchronize_rng_state`. The sample order (``"generator"``) is always the same on all
            processes.
        cut: function that returns this process's part of each sequence in a batch; None if sequences are not split.

    Attributes:
        end_of_dataloader: whether the most recent batch is the last one of its pass.
        reading: the pass that yielded the most recent batch; None outside a pass.
        ends_separately: whether :attr:`share` may differ from 1.0 for batches other than the last one of a pass.
        derived: text for messages that says what :meth:`load_state_dict` had to compute instead of restoring.
        lengths: number of batches on each process if some processes have more batches than others; otherwise empty.
    """

    _is_accelerate_prepared = True
    base: DataLoader[Any]
    strategy: Strategy
    end_of_dataloader: bool
    ends_separately: bool
    reading: Pass | None
    derived: str
    lengths: list[int]
    gradient_state: GradientState

    def __init__(
        self,
        loader: DataLoader[Any],
        strategy: Strategy,
        config: DataLoaderConfiguration,
        gradient_state: GradientState | None = None,
        seed: int | None = None,
        device_placement: bool = True,
        rng_types: Iterable[str] = (),
        cut: Callable[[Any], Any] | None = None,
    ) -> None:
        vars(self).update(
            base=loader,
            strategy=strategy,
            config=config,
            gradient_state=gradient_state or GradientState(),
            seed=seed if config.data_seed is None else config.data_seed,
            device_placement=device_placement,
            _rng_types=[kind for kind in rng_types if kind != "generator" and strategy.num_data_ranks > 1],
            end_of_dataloader=False,
            derived="",
            _even=config.even_batches,
            _cut=cut,
            _skip=0,
            _batch=None,
            _place=Place(),
            reading=None,
        )
        self._divide()

    # ---- this process's shard of the data --------------------------------------------------------------------------

    def _divide(self) -> None:
        """Shard the loader for this process. Every process must call this."""
        source = _part(self.base, self.strategy, self.config, self._even)
        dispatched = isinstance(source, Dispatched)
        order = self.base if dispatched else source
        vars(self).update(_source=source, _order=order, ends_separately=ends_separately(source))
        if source is not self.base and not dispatched:
            for generator in users_generators(source):
                generator.set_state(self.strategy.broadcast(generator.get_state()))
        vars(self)["_limit"] = self._common_length()

    def _common_length(self) -> int | float:
        """Return the number of batches after which a pass must stop; inf if there is no limit."""
        vars(self)["lengths"] = []
        if self.strategy.world_size == 1 or isinstance(self._source, Dispatched):
            return INF
        found = self.strategy.gather_objects(length_of(self._source))
        known = [length for length in found if length is not None]
        if len(known) < len(found) or len(set(known)) == 1:
            return INF
        if not self._even:
            vars(self)["lengths"] = known
            return INF
        messages.warn(
            f"The number of batches differs between processes ({', '.join(map(str, known))}). Each process uses only "
            f"{min(known)} per epoch and skips the rest. Give every process the same number of batches, or let "
            "prepare() shard the data."
        )
        return min(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "base" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(vars(self)["base"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        own, inherited = vars(self), getattr(type(self), name, None)
        if (
            name in own
            or name in vars(PreparedLoader)
            or (isinstance(inherited, property) and not hasattr(DataLoader, name))
        ):
            object.__setattr__(self, name, value)
            return
        setattr(own["base"], name, value)
        if own["_source"] is not own["base"] and isinstance(own["_source"], DataLoader):
            setattr(own["_source"], name, value)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"gradient_state": GradientState(), "_batch": None, "reading": None}

    def __len__(self) -> int:
        return max(int(min(len(self._source), self._limit)) - self._skip, 0)

    @property
    def even_batches(self) -> bool:
        """Whether all processes get the same number of batches. Every process must set this to the same value."""
        return self._even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        if even != self._even:
            vars(self)["_even"] = even
            self._divide()

    def get_sampler(self) -> Any:
        """Return the user's innermost sampler."""
        return next(iter(samplers_of(self.base)[-1:]), None)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the user's sampler. Every process must call this."""
        changes: dict[str, Any] = {"sampler": sampler}
        if cuts(self.base.batch_sampler):
            kind, old = type(self.base.batch_sampler), self.base.batch_sampler
            changes["batch_sampler"] = kind(sampler, old.batch_size, old.drop_last)  # type: ignore[union-attr,call-arg]
        vars(self)["base"] = replaced(self.base, **changes)
        self._divide()

    # ---- a pass ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.gradient_state.on_pass is not None:
            self.gradient_state.on_pass(self)
        place = self._place
        if place.left_out is not None:
            place.left_out.over()
        loaded, place.resume, place.left_out = place.resume, None, None
        return self._hand_out(*self._begin(place.epoch)) if loaded is None else self._resumed(loaded)

    def _begin(self, epoch: int) -> tuple[Pass, Iterator[Any]]:
        """Begin a pass, starting after the batches that ``skip_first_batches`` skips."""
        return self._begun(epoch, self._skip, self._batches(epoch, self._skip))

    def _begun(self, epoch: int, start: int, batches: Batches) -> tuple[Pass, Iterator[Any]]:
        place = self._place
        length = -1 if self._looks_ahead() else int(min(len(self._source), self._limit))
        place.current = one = Pass(epoch, start, batches, length)
        try:
            iterator = iter(batches)
        except (RuntimeError, EOFError, OSError) as error:
            better = explain_lost_worker(error, f"the start of pass {epoch} over the data")
            if better is None:
                raise
            raise better from torchs_own(error)
        place.epoch = epoch + 1
        return one, iterator

    def _hand_out(self, one: Pass, iterator: Iterator[Any]) -> Generator[Any]:
        """Yield the batches of a pass, and tell the observers how long reading each batch takes."""
        found = partial(self._yield_batches, one)
        for observer in self.gradient_state.observers:
            found = partial(observer.one_pass, self, found)
        return found(iterator)

    def _yield_batches(self, one: Pass, iterator: Iterator[Any]) -> Generator[Any]:
        own, batches, state, done, last = vars(self), one.batches, self.gradient_state, one.done, one.length
        own["reading"] = one
        state.begin(self)
        try:
            for batch in iterator:
                one.done = done = done + 1
                one.read_ahead += 1
                if done == last or batches.exhausted:
                    one.ends_with(own["_batch"])
                    own["end_of_dataloader"] = True
                else:
                    own["end_of_dataloader"] = False
                own["_batch"] = batch
                state.active_dataloader = self
                yield batch
            if batches.left_over:
                messages.info_anywhere(
                    f"Rank {self.strategy.global_rank} still had batches when another rank's loader ended after batch "
                    f"{done} of epoch {one.epoch}. This rank skips its remaining batches, so that no rank waits for "
                    "another."
                )
        except (RuntimeError, EOFError, OSError) as error:
            better = explain_lost_worker(error, f"batch {done} of pass {one.epoch} over the data")
            if better is None:
                raise
            raise better from torchs_own(error)
        finally:
            own["_batch"] = None
            batches.close()
            if self._place.current is one:
                self._place.current = None
            state.end(self)
            if own["reading"] is one:
                own["reading"] = None

    def _batches(self, epoch: int, start: int, resume: Mapping[str, Any] | None = None) -> Batches:
        """Return the batches of a pass, starting at batch number ``start``."""
        order, source, strategy, limit = self._order, self._source, self.strategy, self._limit
        for kind in self._rng_types:
            share_random_state(strategy, kind)
        ahead, seed, skip = self._looks_ahead(), self._settle_order(epoch), start
        ended = resume is not None and resume["ended"]
        if resume is not None:
            knows_place = load_loader_state(order, resume["loader"], not ended, self._is_mine(resume))
            if knows_place and not ended:
                skip, limit = 0, limit - start
        if isinstance(source, Dispatched):
            source.start, source.worker_seed, skip = skip, seed, 0
        reads = not isinstance(source, Dispatched) or strategy.global_rank == 0
        fetched = None if resume is None or not self._is_mine(resume) else resume["random_before_fetch"]
        before_fetch = None if fetched is None else partial(set_random_states, fetched)
        return Batches(
            source,
            self._mover(),
            ahead,
            skip if ended else limit,
            skip,
            self._keeps_step(),
            seed,
            what_fetching_changes(order) if ahead and reads else None,
            before_fetch,
        )

    def _mover(self) -> Callable[[Any], Any] | None:
        """Return the function that moves a batch to the device and splits its sequences; None if neither is needed."""
        move, cut = self.strategy.batch_mover() if self.device_placement else None, self._cut
        return move if cut is None else cut if move is None else lambda batch: cut(move(batch))

    def _settle_order(self, epoch: int) -> int | None:
        """Fix the sample order of a pass before it begins; return the seed for its workers (None: torch's seed)."""
        if self.seed is None:
            return None
        seed_shuffling(self._order, self.seed, epoch)
        return mixed(self.seed, epoch, self.strategy.data_rank)

    def _looks_ahead(self) -> bool:
        """Return True if one batch is fetched ahead, to overlap copies with computation or to detect the last batch."""
        if kind_of(self.strategy.device).overlaps_copies() or isinstance(self._source, Dispatched):
            return True
        owners = {type(sampler).__module__.partition(".")[0] for sampler in samplers_of(self.base)}
        return not takes_indices(self._source) or not owners <= {"torch", "builtins"}

    def _keeps_step(self) -> Callable[[bool], bool] | None:
        """Return a function that checks whether all processes have a next batch, or None if no check is needed."""
        strategy, source = self.strategy, self._source
        if (
            strategy.world_size == 1
            or isinstance(source, Dispatched)
            or not self._even
            or length_of(source) is not None
        ):
            return None
        return partial(strategy.agree, all=True)

    @property
    def ends_anywhere(self) -> bool:
        """Whether a pass may end earlier on this process than on others, which cannot be known in advance."""
        source, several = self._source, self.strategy.world_size > 1
        return several and not self._even and not isinstance(source, Dispatched) and length_of(source) is None

    # ---- the last batch ----------------------------------------------------------------------------------------------

    @property
    def batches_done(self) -> int:
        """Number of batches that the current pass has yielded."""
        place = self._place
        if place.current is not None:
            return place.current.done
        if place.resume is None or place.resume.position["epoch"] != place.epoch:
            return 0
        return place.resume.position["batches"]

    @property
    def in_parts(self) -> bool:
        """Whether batches contain only one part of each sequence."""
        return self._cut is not None

    @property
    def batch_rows(self) -> int:
        """Number of samples in the most recent batch; 0 outside a pass."""
        return rows_of(self._batch)

    @property
    def rows(self) -> int:
        """Number of samples in the most recent batch, not counting samples repeated from another process."""
        rows, last = self.batch_rows, self.end_of_dataloader and not self._is_cut()
        if not rows or self.share == 0.0:
            return 0
        return max(rows - self._repeated(), 0) if last else rows

    @property
    def may_repeat(self) -> bool:
        """Whether the most recent batch may repeat samples of another process on some process."""
        return self.end_of_dataloader or (self.ends_separately and self.share != 1.0)

    def _repeated(self) -> int:
        """Return how many samples the user's DistributedSampler repeats at the end of this process's shard."""
        sampler: Any = next((s for s in samplers_of(self.base) if isinstance(s, DistributedSampler)), None)
        if sampler is None or sampler.drop_last:
            return 0
        return sum(i % sampler.num_replicas == sampler.rank for i in range(len(sampler.dataset), sampler.total_size))

    @property
    def share(self) -> float:
        """Weight of this process's mean in the mean across all processes, for the most recent batch."""
        return batch_share(self._source, self.batches_done - 1, self.end_of_dataloader and not self._is_cut())

    def _is_cut(self) -> bool:
        """Return True if passes stop early because another process has fewer batches."""
        return self._limit != INF and len(self._source) > self._limit

    @property
    def total_batch_size(self) -> int | None:
        """Number of samples in one batch across all processes; None if unknown."""
        return samples_in_batch(self.base, 1 if self.config.split_batches else self.strategy.num_data_ranks)

    @property
    def total_dataset_length(self) -> int | None:
        """Number of samples in the dataset; None if unknown."""
        return length_of(self.base.dataset)

    @property
    def remainder(self) -> int:
        """Number of samples in the last, incomplete round of batches; -1 if unknown or dropped."""
        total, size = self.total_dataset_length, self.total_batch_size
        return -1 if total is None or not size or self.base.drop_last else total % size

    # ---- its position ----------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Index of the current pass over the data or, between passes, of the next one."""
        current = self._place.current
        return self._place.epoch if current is None else current.epoch

    @property
    def loaded(self) -> LoadedPosition | None:
        """The loaded position; None if no position was loaded, or once the next pass has begun."""
        return self._place.resume

    def set_epoch(self, epoch: int) -> None:
        """Set the index of the next pass over the data."""
        place, loaded = self._place, self._place.resume
        if loaded is not None and epoch not in (loaded.position["epoch"], loaded.next_epoch):
            if not loaded.by_script:
                messages.warn(
                    f"set_epoch({epoch}) discards the loaded position (batch {loaded.position['batches']} of epoch "
                    f"{loaded.position['epoch']}), so the next pass starts epoch {epoch} from the beginning. To resume "
                    f"at the loaded position, start your loop at epoch {loaded.next_epoch}."
                )
            place.resume = None
        place.epoch = epoch
        if place.current is None:
            self._settle_order(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return this process's position as plain data and tensors, for a checkpoint."""
        place, current = self._place, self._place.current
        if current is None and place.resume is not None:
            return dict(place.resume.position)
        ended = current is not None and current.batches.exhausted
        ahead = {} if current is None or ended else current.batches.before_ahead or {}
        return {
            "epoch": self.epoch,
            "batches": self.batches_done,
            "under_way": current is not None,
            "ended": ended,
            "last": current is not None and current.at_last,
            "seed": self.seed,
            "rank": self.strategy.data_rank,
            "ranks": self.strategy.num_data_ranks,
            "batch_samples": self.total_batch_size,
            "loader": ahead.get("loader") or loader_state(self._order),
            "random_at_start": None if current is None else current.random,
            "random_before_fetch": ahead.get("random"),
            "random": None if current is None else host_random_states(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume at a position from :meth:`state_dict`, so that the next pass is the rest of the saved pass.

        If nothing is left of the saved pass, the next pass starts the following epoch. If the number of processes or
        the batch size has changed, the loader resumes at the same sample.
        """
        place, own = self._place, vars(self)
        own["derived"], done = "", state_dict["batches"]
        saved, now = state_dict["batch_samples"], self.total_batch_size
        if saved is None or now is None:  # assume the same batch size
            saved, now = state_dict["ranks"], self.strategy.num_data_ranks
        if saved != now and done:
            done, left = divmod(done * saved, now)
            again = "; samples that do not fill a complete batch are read again" if left else ""
            own["derived"] = (
                f"the position, batch {done} of the epoch (batch {state_dict['batches']} in the saved run){again}"
            )
        if self.seed is not None and state_dict["seed"] is not None:
            own["seed"] = state_dict["seed"]
        length, place.current, place.left_out = length_of(self._source), None, None
        if not state_dict["under_way"]:
            place.epoch, place.resume = state_dict["epoch"], None
            load_loader_state(self._order, state_dict["loader"], same_ranks=self._is_mine(state_dict))
            return
        last = state_dict.get("last", state_dict["ended"]) or (length is not None and done >= min(length, self._limit))
        place.resume = LoadedPosition(
            {**state_dict, "batches": done, "batch_samples": self.total_batch_size, "last": last}
        )
        place.epoch = place.resume.next_epoch

    def _is_mine(self, state: Mapping[str, Any]) -> bool:
        """Return True if the state was saved by this rank, in a run with the current number of ranks."""
        return (state["rank"], state["ranks"]) == (self.strategy.data_rank, self.strategy.num_data_ranks)

    def _continue(self, position: Mapping[str, Any]) -> tuple[Pass, Iterator[Any]]:
        """Resume a saved pass with the saved RNG states."""
        present, epoch, start = host_random_states(), position["epoch"], position["batches"]
        batches = self._batches(epoch, start, position)
        set_random_states(position["random_at_start"])
        found = self._begun(epoch, start, batches)
        set_random_states(position["random"] if self._is_mine(position) else present)
        return found

    def _begin_again(self, position: Mapping[str, Any]) -> tuple[Pass, Iterator[Any]]:
        """Restart a saved pass from its beginning, in the same order."""
        present = host_random_states()
        load_loader_state(self._order, position["loader"], mid_epoch=True, restarts=True)
        set_random_states(position["random_at_start"])
        found = self._begin(position["epoch"])
        set_random_states(present)
        return found

    def _finish(self, position: Mapping[str, Any]) -> None:
        """Finish a pass that was saved at its last batch."""
        one, iterator = self._continue(position)
        deque(iterator, maxlen=0)  # a sampler may draw random numbers at its end
        one.batches.close()
        self._place.current = None

    # ---- the first pass after a position was loaded ----------------------------------------------------------------

    def _resumed(self, loaded: LoadedPosition) -> Generator[Any]:
        """Return the batches of the first pass after a position was loaded."""
        if loaded.by_script:
            return self._led_by_script(loaded)
        position, skip, place = loaded.position, self._skip, self._place
        done = position["batches"]
        if skip not in (0, done, loaded.window_start or 0):
            loaded.skipped_to(skip)
            return self._hand_out(*self._begin(position["epoch"]))
        if skip:
            messages.info_once(
                f"skip_first_batches(loader, {skip}) has no effect after accelerator.load_state, because the loader is "
                f"already at batch {done} of epoch {position['epoch']} and continues there. Delete the call."
            )
        next_epoch = place.epoch
        if position["last"] and not skip and next_epoch != position["epoch"]:
            self._finish(position)
            one, batches = self._begin(next_epoch)
        else:
            one, batches = self._continue(position)
        found = self._hand_out(one, batches)
        if not done or not self.gradient_state.trains:
            return found
        place.left_out = LeftOut(self.gradient_state, loaded, one)
        return place.left_out.watch(found)

    def _led_by_script(self, loaded: LoadedPosition) -> Generator[Any]:
        """Return the first pass after a position was loaded, for a script that itself skips to the position."""
        position, skip = loaded.position, self._skip
        if skip == position["batches"]:
            loaded.arrive()
            return self._hand_out(*self._continue(position))
        if position["last"] and self._place.epoch != position["epoch"]:
            self._finish(position)
            return self._unless_dropped(position, *self._begin(position["epoch"] + 1))
        if skip > position["batches"]:
            return self._hand_out(*self._begin(position["epoch"]))
        return self._up_to(loaded, *self._begin_again(position))

    def _up_to(self, loaded: LoadedPosition, one: Pass, iterator: Iterator[Any]) -> Generator[Any]:
        """Run a pass from its beginning. If the loop reaches the loaded position without training, resume there."""
        use, done, begun = FirstUse(self.gradient_state), loaded.position["batches"], one.done
        batches = self._hand_out(one, iterator)
        try:
            for batch in batches:
                yield batch
                if use.seen:
                    if one.done == begun + 1 and not begun:
                        messages.info_once(
                            f"The state was saved after batch {done} of epoch {one.epoch}, but the loop restarts that "
                            "epoch, so it trains on the epoch's first batches twice. To continue at the saved "
                            f"position, use accelerator.skip_first_batches(loader, {done})."
                        )
                    break
                if one.done == done:
                    batches.close()
                    loaded.arrive()
                    batches = self._hand_out(*self._continue(loaded.position))
                    break
            yield from batches
        finally:
            batches.close()

    def _unless_dropped(self, position: Mapping[str, Any], one: Pass, iterator: Iterator[Any]) -> Generator[Any]:
        """Run the first pass after loading a position at the end of a pass.

        If the loop never trains during this pass, it was only skipping the batches of the saved pass, which then counts
        as finished.
        """
        use, batches = FirstUse(self.gradient_state), self._hand_out(one, iterator)
        try:
            for batch in batches:
                yield batch
                if use.seen:
                    break
            else:
                self._finish(position)
            yield from batches
        finally:
            batches.close()


def prepare_data_loader(
    loader: Any,
    strategy: Strategy,
    config: DataLoaderConfiguration | None = None,
    kind: Callable[..., PreparedLoader] = PreparedLoader,
    **options: Any,
) -> PreparedLoader:
    """Return a loader that yields this process's shard of the data on its device. Every process must call this.

    A loader that is already prepared for this strategy is returned unchanged. A loader that was prepared for another
    strategy is prepared again.

    Args:
        loader: the user's loader.
        strategy: determines this process's shard and device.
        config: the settings.
        kind: class of the loader to return.
        **options: other arguments of :class:`PreparedLoader`; ``seed`` defaults to 0.

    Raises:
        TypeError: ``loader`` is not a DataLoader.
        ValueError: ``split_batches`` is set, but the batches cannot be split.
    """
    if isinstance(loader, PreparedLoader):
        if loader.strategy is strategy:
            return loader
        loader = loader.base
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"prepare_data_loader got {messages.a(loader)}, but only a torch.utils.data.DataLoader can be split "
            "across processes. Wrap your data in DataLoader(dataset, batch_size=...), with batch_size=None if its "
            "items are already batches."
        )
    config = config or DataLoaderConfiguration()
    if config.use_stateful_dataloader:
        loader = _stateful(loader)
    return kind(loader, strategy, config, **{"seed": 0, **options})


def refuse_slice_fn(where: str, loader: PreparedLoader, **given: Any) -> None:
    """Raise an error if a batch-slicing function was passed for a loader that only process 0 reads.

    Raises:
        NotImplementedError: only process 0 reads the loader.
    """
    ((name, slice_fn),) = given.items()
    if slice_fn is not None and isinstance(loader._source, Dispatched):
        raise NotImplementedError(
            f"{where}({name}=...) is not supported, because process 0 sends whole batches instead of concatenating "
            f"and slicing them. Leave out {name}."
        )
    messages.ignored(where, "every process reads its own batches", **given)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader that skips the first ``num_batches`` batches of each pass.

    The returned loader shares its epoch count with ``dataloader``, so after one pass over the returned loader,
    ``dataloader`` continues with the next epoch. Batches that ``load_state`` has already skipped are not skipped again.

    Raises:
        ValueError: ``num_batches`` is negative.
    """
    if num_batches < 0:
        raise ValueError(f"skip_first_batches: num_batches={num_batches} is negative. Pass 0 or more.")
    if not isinstance(dataloader, PreparedLoader):
        dataloader = PreparedLoader(dataloader, Strategy(), DataLoaderConfiguration())
    skipping = object.__new__(type(dataloader))
    vars(skipping).update(vars(dataloader), _skip=num_batches, _batch=None, reading=None)
    return skipping


def _part(loader: Any, strategy: Strategy, config: DataLoaderConfiguration, even: bool) -> Any:
    """Return a loader that yields this process's shard of the data."""
    world = strategy.num_data_ranks
    if world == 1:
        return loader
    if is_split(loader):
        messages.info_once(
            f"The loader for {type(loader.dataset).__name__} is already split by rank (it has a DistributedSampler, or "
            "a dataset that splits itself), so prepare() leaves it unchanged. To let prepare() split the data, remove "
            "the sampler and use shuffle=True."
        )
        return loader
    size = _batch_size(loader)
    if config.split_batches and (not size or size % world):
        raise ValueError(
            f"split_batches=True splits each batch into {world} equal parts, so batch_size must be divisible by "
            f"{world}, but batch_size is {size}. Change batch_size, or leave out split_batches so that every process "
            "gets full batches."
        )
    if config.dispatch_batches:
        return Dispatched(loader, strategy, config.split_batches)
    if config.split_batches and not isinstance(loader.dataset, IterableDataset) and not cuts(loader.batch_sampler):
        raise ValueError(
            f"split_batches=True cannot split the batches of a {type(loader.batch_sampler).__name__} without reading "
            "them. Pass batch_size (and a sampler) to DataLoader, or leave out split_batches so that each process gets "
            "full batches."
        )

    def divide(size: int, drop_last: bool = False) -> Division:
        rows = size // world if config.split_batches else size
        return Division(strategy.data_rank, world, rows, drop_last, repeats=even)

    return shard(loader, world, divide)


def _batch_size(loader: Any) -> int | None:
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)


def _stateful(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Replace the loader of an iterable dataset with a torchdata loader, which can save its position."""
    if not messages.is_installed("torchdata"):
        raise ModuleNotFoundError(
            messages.missing("DataLoaderConfiguration(use_stateful_dataloader=True)", "torchdata")
        )
    if callable(getattr(loader, "state_dict", None)) or not isinstance(loader.dataset, IterableDataset):
        return loader
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[reportMissingImports]

    kept = ("batch_size", "drop_last", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn")
    kept += ("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "in_order")
    return StatefulDataLoader(loader.dataset, **{name: getattr(loader, name) for name in kept})

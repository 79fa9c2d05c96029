"""The supported kinds of loaders, the number of their batches, their shuffling and their saved states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from .. import messages
from ..processes.seed import host_random_states, mixed
from ..torch_private import forget_iterator, running_iterator
from .combined_loader import CombinedLoader, holds_loaders, length_of
from .streams import counts_all_ranks, needs_counts, saves_position, splits_itself
from .uneven_shards import Shard
from .worker_processes import SEEDED

_MISSING = object()

#: States of the user's generators when :func:`announce_epoch` was last called, and whether they had already seeded the
#: loader's persistent workers; newest last.
_at_epoch_start: dict[torch.Generator, tuple[Tensor, bool]] = {}
_MOST_GENERATORS = 64  # a limit, because torch 2.11 has no weak references to generators


def is_loader_collection(loaders: Any) -> bool:
    """Return True if a list, tuple, mapping or dataclass contains loaders, at any depth.

    A list of batches is a single loader, not a collection. The values of a mapping may be lists of batches, because a
    mapping itself cannot be a loader.
    """
    if isinstance(loaders, Mapping):
        return holds_loaders(loaders) or any(
            isinstance(entry, (list, tuple)) and len(entry) > 0 for entry in loaders.values()
        )
    return holds_loaders(loaders)


def train_loader(loaders: Any) -> Iterable[Any]:
    """Return one loader for training. A collection becomes a ``CombinedLoader`` that ends with its longest loader."""
    if isinstance(loaders, CombinedLoader):
        if loaders.mode == "sequential":
            raise ValueError(
                "fit got a CombinedLoader with mode='sequential', but a training step uses batches from all loaders at "
                "once. Use mode='max_size_cycle', 'min_size' or 'max_size', or join the datasets with "
                "torch.utils.data.ConcatDataset."
            )
        return loaders
    if is_loader_collection(loaders):
        return CombinedLoader(loaders, "max_size_cycle")
    return _single(loaders)


def eval_loaders(loaders: Any) -> list[Iterable[Any]]:
    """Return the loaders for an evaluation, which iterates over them one after the other."""
    if loaders is None:
        return []
    if isinstance(loaders, CombinedLoader):
        return list(loaders.flattened) if loaders.mode == "sequential" else [loaders]
    if is_loader_collection(loaders):
        return CombinedLoader(loaders, "sequential").flattened
    if isinstance(loaders, (list, tuple)) and not loaders:
        return []
    return [_single(loaders)]


def in_structure(given: Any, loaders: Sequence[Any]) -> Any:
    """Return loaders in the structure in which the user passed them: a single loader or a (nested) list or dict."""
    if not isinstance(given, CombinedLoader) and not is_loader_collection(given):
        return loaders[0] if loaders else None
    if isinstance(given, CombinedLoader) and given.mode != "sequential":
        return loaders[0].iterables
    combined = CombinedLoader(given.iterables if isinstance(given, CombinedLoader) else given)
    combined.flattened = loaders
    return combined.iterables


def count_batches(loader: Any, limit: float | int | None, what: str) -> int | float:
    """Return the number of batches per epoch with ``limit_*_batches``; ``inf`` if the loader has no known length.

    Args:
        loader: any loader.
        limit: a number of batches (int), a fraction of them (float), or None for all.
        what: the loader's name for error messages, such as ``"train_dataloader"``.
    """
    argument = f"limit_{what.split('_')[0]}_batches"
    _check_limit(limit, argument)
    if limit == 0:
        return 0
    length = length_of(loader)
    if length == 0:
        raise ValueError(_is_empty(loader, what, argument))
    if isinstance(limit, int):
        return limit if length is None else min(limit, length)
    if limit is None or limit == 1.0:
        return float("inf") if length is None else length
    if length is None:
        raise ValueError(
            f"{argument}={limit} is a fraction of {what}, but a {type(loader).__name__} without __len__ has no known "
            f"number of batches. Pass a number of batches ({argument}=100), or 1.0 for all of them."
        )
    batches = int(length * limit + 1e-9)  # 0.29 * 100 is 28.999...
    if batches == 0:
        raise ValueError(
            f"{argument}={limit} of the {length} batches of {what} is less than one batch. "
            f"Use at least {1 / length:.4g}, or a number of batches such as {argument}=1."
        )
    return batches


def seed_shuffling(loader: Any, seed: int, epoch: int) -> None:
    """Make the order of the next epoch depend only on ``seed`` and ``epoch``, and call :func:`announce_epoch`.

    Samplers that draw from torch's global generator get their own generator, and the loader gets one for its workers'
    seeds; these generators are reseeded in each call. A generator that the user passed is not changed. All processes
    draw the same order, and each process uses its shard; the seeds of workers that augment samples differ between
    processes.
    """
    for index, leaf in enumerate(leaves_of(loader)):
        samplers, shard = samplers_of(leaf), shard_of(leaf)
        if shard is not None:
            shard.order_seed = mixed(seed, epoch, index)
        owners = [*samplers, leaf] if isinstance(leaf, DataLoader) else samplers
        for place, owner in enumerate(owners):
            if getattr(owner, "generator", _MISSING) is None:
                owner.generator = _EpochGenerator()
            if isinstance(getattr(owner, "generator", None), _EpochGenerator):
                apart = () if shard is None or shard.alike or owner is not leaf else (shard.division.rank,)
                owner.generator.manual_seed(mixed(seed, epoch, index, place, *apart))
    announce_epoch(loader, epoch)


def announce_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` on the loader, its samplers and its dataset, and record the user's generators' states.

    Must be called before each epoch, because a resumed epoch begins with the recorded states.
    """
    for leaf in leaves_of(loader):
        for generator in _generators(leaf):
            _note_epoch_start(generator, generator.get_state(), _has_workers(leaf))
        for owner in (leaf, *samplers_of(leaf), getattr(leaf, "dataset", None)):
            set_epoch = getattr(owner, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)


def _note_epoch_start(generator: torch.Generator, state: Tensor, has_workers: bool) -> None:
    _at_epoch_start.pop(generator, None)
    _at_epoch_start[generator] = state, has_workers
    if len(_at_epoch_start) > _MOST_GENERATORS:
        del _at_epoch_start[next(iter(_at_epoch_start))]


def release_shuffling(loader: Any) -> None:
    """Remove the generators that :func:`seed_shuffling` set, so that the loader is as the user created it."""
    for leaf in leaves_of(loader):
        for owner in (leaf, *samplers_of(leaf)):
            if isinstance(getattr(owner, "generator", None), _EpochGenerator):
                owner.generator = None


def loader_state(loader: Any) -> dict[str, Any] | None:
    """Return a loader's state for a checkpoint: its own ``state_dict`` and the states of the user's generators.

    For each generator, this includes its current state and its state before the current epoch. Returns None if the
    loader has neither a ``state_dict`` nor generators.
    """
    states = [_leaf_state(leaf) for leaf in leaves_of(loader)]
    return {"loaders": states} if any(state is not None for state in states) else None


def load_loader_state(
    loader: Any,
    state: Mapping[str, Any] | None,
    mid_epoch: bool = False,
    same_ranks: bool = True,
    restarts: bool = False,
) -> bool:
    """Restore the state that :func:`loader_state` returned; warn about states that do not match the loader.

    Args:
        loader: the current loader.
        state: the state of the saved run's loader.
        mid_epoch: whether the run resumes within an epoch; if so, the order of that epoch is restored.
        same_ranks: whether this rank saved the state, in a run with the same number of ranks. If not, the saved
            position in the data does not apply to this rank, unless it counts the samples of all ranks.
        restarts: whether the saved epoch starts over; if so, the saved position is not restored.

    Returns:
        True if the loader restores its position itself, so no batches have to be skipped.
    """
    if mid_epoch and not same_ranks:
        _tell_other_split(loader, state)
    if not state:
        return False
    leaves, states = list(leaves_of(loader)), state["loaders"]
    if len(leaves) != len(states):
        messages.warn(
            f"The checkpoint is from a run with a different number of loaders ({len(states)} instead of "
            f"{len(leaves)}), so their states are ignored, and the loaders start from the beginning. To resume at the "
            "next batch, pass the saved run's loaders to fit."
        )
        return False
    positioned = _saves_position(loader) and not restarts
    positions = (same_ranks or _counts_all_ranks(state)) and (positioned or not mid_epoch) and not restarts
    pairs = [(leaf, kept) for leaf, kept in zip(leaves, states, strict=True) if kept]
    known = [_load_leaf_state(leaf, kept, mid_epoch, positions) for leaf, kept in pairs]
    return positioned and any(known)


def _counts_all_ranks(state: Mapping[str, Any] | None) -> bool:
    states = [kept for kept in (state or {}).get("loaders", []) if kept]
    return bool(states) and all(counts_all_ranks(kept.get("state_dict")) for kept in states)


def _tell_other_split(loader: Any, state: Mapping[str, Any] | None) -> None:
    """Warn if a position in streams is only approximate because it was saved by a run with a different number of ranks.

    Streams that split themselves by rank give each rank different samples if the number of ranks changes. If several
    workers take turns, the number of ranks also determines how many samples a worker reads per turn, so this run's
    workers would have stopped at different positions than the saved run's workers.
    """
    if _counts_all_ranks(state):
        return
    for leaf in leaves_of(loader):
        dataset, workers = getattr(leaf, "dataset", leaf), getattr(leaf, "num_workers", 0)
        name = type(getattr(whole_of(leaf), "dataset", leaf)).__name__
        if splits_itself(dataset):
            why, instead = f"{name} itself decides which samples each rank reads", "let Paceline split the data by rank"
        elif isinstance(dataset, IterableDataset) and workers > 1:
            why, instead = f"{workers} workers take turns reading {name}", "use at most one worker"
        else:
            continue
        messages.warn_once(
            f"The saved run had a different number of ranks than this run, and {why}. The saved position is therefore "
            "only approximate: the rest of this epoch may repeat some samples and skip others. The next epoch is "
            f"complete. To resume exactly, finish the epoch with the saved number of ranks, or {instead}."
        )
        return


def what_fetching_changes(loader: Any) -> Callable[[], dict[str, Any]] | None:
    """Return a function that captures any state that prefetching a batch changes, or None if nothing changes.

    For example, loading samples in this process draws random numbers, and a loader that keeps track of its position
    moves forward.
    """
    leaves = list(leaves_of(loader))
    draws = any(not isinstance(leaf, (list, tuple)) and not getattr(leaf, "num_workers", 0) for leaf in leaves)
    moves = _saves_position(loader)
    if not draws and not moves:
        return None

    def states() -> dict[str, Any]:
        found: dict[str, Any] = {"random": host_random_states()} if draws else {}
        return found | {"loader": loader_state(loader)} if moves else found

    return states


def without_shuffling(loader: Any) -> Any:
    """Return a loader that yields the same data in the same order every epoch, for ``overfit_batches``.

    A DataLoader (or a subclass) is copied with a sequential sampler in place of its own sampler.
    """
    if isinstance(loader, CombinedLoader):
        combined = CombinedLoader(loader.iterables, loader.mode)
        combined.flattened = [without_shuffling(leaf) for leaf in loader.flattened]
        combined.limits = loader.limits
        return combined
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    ordered = _in_order(loader.sampler, loader.dataset)
    batches = loader.batch_sampler
    if batches is None or hasattr(batches, "sampler"):
        inner = None if batches is None else _in_order(batches.sampler, loader.dataset)  # type: ignore[attr-defined]
        return _with_samplers(loader, ordered, inner)
    raise ValueError(
        f"overfit_batches needs the same batches every epoch, but the batch sampler of the {type(loader).__name__}, a "
        f"{type(batches).__name__}, has no `sampler` attribute, so its shuffling cannot be turned off. Pass a loader "
        "with batch_size= and shuffle=False. Or use a batch sampler that does not shuffle, and limit_train_batches= "
        "instead of overfit_batches=."
    )


def advise(loader: Any, what: str) -> None:
    """Warn once if an evaluation loader shuffles, which works but is probably not intended."""
    if what.startswith("train"):
        return
    if shuffles(loader):
        messages.warn_once(
            f"{what} shuffles (shuffle=True or a RandomSampler). Shuffling does not change the metrics, but outputs "
            "come in a different order every time. Use shuffle=False."
        )


def shuffles(loader: Any) -> bool:
    """Return True if torch's ``RandomSampler`` determines the order of a loader's samples."""
    return any(isinstance(sampler, RandomSampler) for leaf in leaves_of(loader) for sampler in samplers_of(leaf))


def samplers_of(loader: Any) -> list[Any]:
    """Return the user's samplers in a loader: its batch sampler, its sampler, and the samplers inside them."""
    loader = whole_of(loader)
    found: list[Any] = []
    pending = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    while pending:
        sampler = pending.pop()
        if sampler is not None and all(sampler is not other for other in found):
            found.append(sampler)
            pending.append(getattr(sampler, "sampler", None))
    return found


def users_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that the user passed to a loader and its samplers, in the same order on all processes.

    Each process has its own copies, which may be seeded differently. If all processes copy the states from one process
    before the first epoch of a fit, the processes agree on the order.
    """
    return [generator for leaf in leaves_of(loader) for generator in _generators(leaf)]


def whole_of(loader: Any) -> Any:
    """Return the user's original loader if the given loader yields a shard of it, or else the given loader."""
    return getattr(loader, "paceline_whole", loader)


def samples_in_batch(loader: Any, num_ranks: int) -> int | None:
    """Return the number of samples in a full batch across all ranks; None if the loader has no known batch size.

    For a ``CombinedLoader``, this is the sum over its loaders.
    """
    whole = whole_of(loader)
    if isinstance(whole, CombinedLoader):
        sizes = [samples_in_batch(leaf, num_ranks) for leaf in whole.flattened]
        return None if None in sizes else sum(size or 0 for size in sizes)
    if not isinstance(whole, DataLoader):
        return None
    size = whole.batch_size or getattr(whole.batch_sampler, "batch_size", None)
    return size * num_ranks if isinstance(size, int) else None


def shard_of(loader: Any) -> Any:
    """Return the :class:`Shard` that selects a loader's items for one process; None if the loader is not sharded."""
    places = [loader, *(getattr(loader, name, None) for name in ("batch_sampler", "sampler", "dataset"))]
    return next((place for place in places if isinstance(place, Shard)), None)


def replaced(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a copy of a loader with some attributes replaced, even those that a loader does not allow you to set."""
    clone = copy.copy(loader)
    clone.__dict__.update(attributes)
    forget_iterator(clone)  # the two must not share a running iterator
    return clone


class _EpochGenerator(torch.Generator):
    """A generator that Paceline sets on a sampler or loader and reseeds before each epoch."""

    def __reduce__(self) -> Any:
        return type(self), ()


def _single(loader: Any) -> Iterable[Any]:
    """Return a loader after checking that it is an iterable of batches."""
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TypeError(
            f"A dataset ({type(loader).__name__}) was passed as a loader, so every sample would be a separate batch. "
            "Pass DataLoader(dataset, batch_size=...), with batch_size=None if its items are already batches."
        )
    if isinstance(loader, Tensor):
        raise TypeError(
            f"A tensor of shape {tuple(loader.shape)} was passed as a loader, so every row would be a separate batch. "
            "Pass DataLoader(TensorDataset(tensor), batch_size=...), or list(tensor) if its rows are already batches."
        )
    iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if iterable and not isinstance(loader, (str, bytes, type, Mapping)):
        return loader
    raise TypeError(
        f"{_short(loader)} ({type(loader).__name__}) was passed as a loader, but it is not an iterable of batches. "
        "Pass a DataLoader, any iterable of batches, or a list or dict of loaders."
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_limit(limit: float | int | None, argument: str) -> None:
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        raise TypeError(
            f"{argument}={limit!r} is {messages.a(limit)}. Pass a number of batches (int), a fraction (float "
            "from 0 to 1), or None for all."
        )
    if isinstance(limit, float) and not 0.0 <= limit <= 1.0:
        hint = f"; for {int(limit)} batches, use {int(limit)}" if limit.is_integer() and limit > 1 else ""
        raise ValueError(
            f"{argument}={limit} is a float, so it is treated as a fraction and must be between 0.0 and 1.0{hint}."
        )
    if limit < 0:
        raise ValueError(f"{argument}={limit} is negative. Pass 0 or more batches, or None for all.")


def _is_empty(loader: Any, what: str, argument: str) -> str:
    if isinstance(loader, CombinedLoader):
        lengths = ", ".join(f"{type(leaf).__name__}: {length_of(leaf)}" for leaf in loader.flattened)
        return (
            f"{what} has no batches. Its CombinedLoader (mode {loader.mode!r}) combines loaders of lengths [{lengths}]."
            f" Fill or remove the empty loaders, or skip all of them with {argument}=0."
        )
    samples = length_of(getattr(loader, "dataset", None))
    batch_size = getattr(loader, "batch_size", None)
    if samples and batch_size and getattr(loader, "drop_last", False):
        shard = shard_of(loader)
        each = "" if shard is None or shard.division.evaluation else f" on each of {shard.division.world} processes"
        return (
            f"{what} has no batches, because its {samples} samples do not fill one batch of batch_size={batch_size}"
            f"{each}, and drop_last=True drops the rest. Use a smaller batch_size or drop_last=False."
        )
    return (
        f"{what} is empty, because the length of its {type(loader).__name__} is 0. Check the dataset, or skip the "
        f"loader with {argument}=0."
    )


def leaves_of(loader: Any) -> Iterator[Any]:
    """Yield the loader itself or, for a CombinedLoader, the loaders that it combines."""
    if isinstance(loader, CombinedLoader):
        for leaf in loader.flattened:
            yield from leaves_of(leaf)
    else:
        yield loader


def _positioned(loader: Any) -> Any:
    """Return the object that saves a loader's position: the loader, or an iterable dataset read in this process."""
    if saves_position(loader):
        return loader
    dataset = getattr(loader, "dataset", None)
    here = isinstance(loader, DataLoader) and loader.num_workers == 0 and isinstance(dataset, IterableDataset)
    return dataset if here and saves_position(dataset) else None


def _saves_position(loader: Any) -> bool:
    """Return True if a loader, or every loader in a combination, can resume at its position from its own state."""
    in_step = getattr(loader, "mode", "") != "max_size_cycle"
    return in_step and all(_positioned(leaf) is not None for leaf in leaves_of(loader))


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that the user passed to a loader or its samplers."""
    found: list[torch.Generator] = []
    for owner in (loader, *samplers_of(loader)):
        generator = getattr(owner, "generator", None)
        ours = isinstance(generator, _EpochGenerator)
        if isinstance(generator, torch.Generator) and not ours and all(generator is not other for other in found):
            found.append(generator)
    return found


def _leaf_state(loader: Any) -> dict[str, Any] | None:
    state: dict[str, Any] = {}
    positioned = _positioned(loader)
    if positioned is not None:
        state["state_dict"] = positioned.state_dict()
    elif needs_counts(getattr(loader, "dataset", None)):
        _tell_other_loader(loader)
    generators = _generators(loader)
    if generators:
        now = [(generator.get_state(), _has_workers(loader)) for generator in generators]
        begun = [_at_epoch_start.get(generator, pair) for generator, pair in zip(generators, now, strict=True)]
        for name, pairs in (("generators", now), ("generators_at_epoch_start", begun)):
            state[name] = [generator_state for generator_state, _ in pairs]
            state[f"workers_of_{name}"] = pairs[0][1]
    return state or None


def _has_workers(loader: Any) -> bool:
    """Return True if a loader has running persistent workers, and therefore draws no new seed for workers."""
    return isinstance(loader, DataLoader) and running_iterator(loader) is not None


def _tell_other_loader(loader: Any) -> None:
    dataset = getattr(loader.dataset, "whole_dataset", loader.dataset)  # a rank's stream wraps the user's dataset
    package = dataset.state_dict.__module__.partition(".")[0]
    messages.warn_once(
        f"A {type(dataset).__name__} of {package!r} can save its position only with its own package's loader, but "
        f"this run reads it with a {type(loader).__name__}. A resumed run reads the epoch again up to the saved "
        "position, possibly in a different order, so samples may be repeated or skipped. Use "
        f"{package}.StreamingDataLoader."
    )


def _load_leaf_state(loader: Any, state: Mapping[str, Any], mid_epoch: bool, positions: bool) -> bool:
    lost = []
    owner = _positioned(loader)
    positioned = positions and "state_dict" in state and owner is not None
    if positioned and owner is not None:
        owner.load_state_dict(state["state_dict"])
    elif positions and "state_dict" in state:
        lost.append("the position in the data (but this loader has no load_state_dict)")
    shard = shard_of(loader)
    # A shard with a sampler goes through the full order again, wherever the loader resumes.
    draws_anew = not positioned or (shard is not None and not shard.alike)
    name = "generators_at_epoch_start" if mid_epoch and draws_anew else "generators"
    saved, had_workers = state.get(name, []), state.get(f"workers_of_{name}", False)
    generators = _generators(loader)
    if len(saved) == len(generators):
        for generator, generator_state in zip(generators, saved, strict=True):
            generator.set_state(generator_state)
            _note_epoch_start(generator, generator_state, had_workers)
        if had_workers:
            SEEDED.add(loader)
    else:
        lost.append(f"the states of random generators ({len(saved)} in total, but this loader has {len(generators)})")
    if lost:
        messages.warn(
            f"The checkpoint contains {' and '.join(lost)}, which the training loader ({type(loader).__name__}) cannot "
            "restore, so the order of the data will differ from that of the saved run. To avoid that, pass the saved "
            "run's loader to fit."
        )
    return positioned


def _in_order(sampler: Any, dataset: Any) -> Any:
    """Return a sampler that yields the same samples in a fixed order."""
    if isinstance(sampler, (SequentialSampler, Sequence)):
        return sampler
    if isinstance(sampler, DistributedSampler):
        ordered = copy.copy(sampler)
        ordered.shuffle = False
        return ordered
    indices = getattr(sampler, "indices", None)
    return list(indices) if indices is not None else SequentialSampler(dataset)


def _with_samplers(loader: DataLoader[Any], sampler: Any, inner: Any) -> DataLoader[Any]:
    """Return a copy of a loader with other samplers; ``inner`` becomes the sampler of the copied batch sampler."""
    changes: dict[str, Any] = {"sampler": sampler}
    if inner is not None:
        batches: Any = copy.copy(loader.batch_sampler)
        batches.sampler = inner
        changes["batch_sampler"] = batches
    return replaced(loader, **changes)

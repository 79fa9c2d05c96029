"""What may be given as loaders, how many batches they have, and what their shuffling is computed from."""

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
from ..torch_private import forget_iterator
from .combined_loader import CombinedLoader, holds_loaders, length_of
from .stream_sharding import Shard

_MISSING = object()

#: States of generators of the users' when :func:`seed_shuffling` last announced an epoch; the newest come last.
_at_epoch_start: dict[torch.Generator, Tensor] = {}
_MOST_GENERATORS = 64  # kept alive here: torch 2.11 cannot refer to them weakly


def is_loader_collection(loaders: Any) -> bool:
    """Whether a list, tuple, mapping or dataclass holds loaders, at any depth; a list of batches is one loader.

    The values of a mapping may also be lists of batches, since a mapping cannot be a loader itself.
    """
    if isinstance(loaders, Mapping):
        return holds_loaders(loaders) or any(
            isinstance(entry, (list, tuple)) and len(entry) > 0 for entry in loaders.values()
        )
    return holds_loaders(loaders)


def train_loader(loaders: Any) -> Iterable[Any]:
    """Return the one loader to train from; a collection becomes a ``CombinedLoader`` that ends with its longest."""
    if isinstance(loaders, CombinedLoader):
        if loaders.mode == "sequential":
            raise ValueError(
                "fit got a CombinedLoader with mode='sequential', but a training step works on batches of all loaders "
                "at once. Use mode 'max_size_cycle', 'min_size' or 'max_size', or chain the data sets with "
                "torch.utils.data.ConcatDataset."
            )
        return loaders
    if is_loader_collection(loaders):
        return CombinedLoader(loaders, "max_size_cycle")
    return _single(loaders)


def eval_loaders(loaders: Any) -> list[Iterable[Any]]:
    """Return the loaders that are evaluated one after the other."""
    if loaders is None:
        return []
    if isinstance(loaders, CombinedLoader):
        return list(loaders.flattened) if loaders.mode == "sequential" else [loaders]
    if is_loader_collection(loaders):
        return CombinedLoader(loaders, "sequential").flattened
    if isinstance(loaders, (list, tuple)) and not loaders:
        return []
    return [_single(loaders)]


def count_batches(loader: Any, limit: float | int | None, what: str) -> int | float:
    """Return how many batches an epoch has under ``limit_*_batches``; ``inf`` if the loader does not know its length.

    Args:
        loader: any loader.
        limit: a number of batches (int), a fraction of them (float), or None for all.
        what: the loader's name in errors, such as ``"train_dataloader"``.
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
            f"{argument}={limit} asks for a fraction of {what}, but a {type(loader).__name__} without __len__ has no "
            f"known number of batches. Give a number of batches ({argument}=100) or 1.0."
        )
    batches = int(length * limit + 1e-9)  # 0.29 * 100 is 28.999...
    if batches == 0:
        raise ValueError(
            f"{argument}={limit} of the {length} batches of {what} is less than one batch. "
            f"Use at least {1 / length:.4g}, or a number of batches such as {argument}=1."
        )
    return batches


def seed_shuffling(loader: Any, seed: int, epoch: int) -> None:
    """Make the order of the coming epoch a function of ``seed`` and ``epoch`` alone. Call it before each epoch.

    Samplers that draw from torch's global generator get a generator of their own, as does the loader for the seeds of
    its workers; both are seeded anew each time. A generator that the user gave is left alone. ``set_epoch`` is called
    wherever the loader, its samplers or its data set have one. What a process's part of a loader is cut out of is drawn
    alike on all processes, the seeds of workers that augment samples differ.
    """
    for index, leaf in enumerate(leaves_of(loader)):
        for generator in _generators(leaf):
            _note_epoch_start(generator, generator.get_state())
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
        for owner in (leaf, *samplers, getattr(leaf, "dataset", None)):
            set_epoch = getattr(owner, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)


def _note_epoch_start(generator: torch.Generator, state: Tensor) -> None:
    _at_epoch_start.pop(generator, None)
    _at_epoch_start[generator] = state
    if len(_at_epoch_start) > _MOST_GENERATORS:
        del _at_epoch_start[next(iter(_at_epoch_start))]


def release_shuffling(loader: Any) -> None:
    """Take back the generators that :func:`seed_shuffling` gave, so that the loader is as the user made it."""
    for leaf in leaves_of(loader):
        for owner in (leaf, *samplers_of(leaf)):
            if isinstance(getattr(owner, "generator", None), _EpochGenerator):
                owner.generator = None


def loader_state(loader: Any) -> dict[str, Any] | None:
    """Return what a checkpoint keeps of a loader: its own ``state_dict`` and the states of the user's generators.

    Of a generator both the present state and the one before the epoch under way. None if the loader has neither.
    """
    states = [_leaf_state(leaf) for leaf in leaves_of(loader)]
    return {"loaders": states} if any(state is not None for state in states) else None


def load_loader_state(
    loader: Any, state: Mapping[str, Any] | None, mid_epoch: bool = False, same_ranks: bool = True
) -> bool:
    """Take back what :func:`loader_state` returned; warn about what finds no place.

    Args:
        loader: the loader as it is now.
        state: of the loader as it was then.
        mid_epoch: the epoch of then is gone through again up to where it was, so that its order is needed once more.
        same_ranks: the state is that of this rank among as many; otherwise a place in the data is none of this rank's.

    Returns:
        Whether the loader knows its position itself, so that no batches have to be skipped.
    """
    if not state:
        return False
    leaves, states = list(leaves_of(loader)), state["loaders"]
    if len(leaves) != len(states):
        messages.warn(
            f"The checkpoint holds the states of {len(states)} loaders, but this run trains from {len(leaves)}, so "
            "they are ignored and the data start over. Give fit the loaders of the saved run to continue with their "
            "next batch."
        )
        return False
    positioned = _knows_place(loader)
    places = same_ranks and (positioned or not mid_epoch)
    pairs = [(leaf, kept) for leaf, kept in zip(leaves, states, strict=True) if kept]
    known = [_load_leaf_state(leaf, kept, mid_epoch, places) for leaf, kept in pairs]
    return positioned and any(known)


def what_fetching_changes(loader: Any) -> Callable[[], dict[str, Any]] | None:
    """What gives, before a batch is fetched ahead, the states that fetching it changes; None if it changes none.

    In this process samples are drawn from its random states, and a loader with a place of its own moves on.
    """
    leaves = list(leaves_of(loader))
    draws = any(not isinstance(leaf, (list, tuple)) and not getattr(leaf, "num_workers", 0) for leaf in leaves)
    moves = _knows_place(loader)
    if not draws and not moves:
        return None

    def states() -> dict[str, Any]:
        found: dict[str, Any] = {"random": host_random_states()} if draws else {}
        return found | {"loader": loader_state(loader)} if moves else found

    return states


def without_shuffling(loader: Any) -> Any:
    """Return a loader that yields the same data in the same order every epoch, for ``overfit_batches``.

    A DataLoader (of a subclass too) is copied with a sequential sampler in place of its own; what it does not take from
    a sampler stays as it is.
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
        f"overfit_batches needs the same batches every epoch, but the {type(loader).__name__} has a "
        f"{type(batches).__name__} as batch_sampler, whose order cannot be taken out of it (it has no `sampler`). "
        "Give a loader with batch_size= and shuffle=False, or a batch sampler that does not shuffle together with "
        "limit_train_batches= in place of overfit_batches=."
    )


def advise(loader: Any, what: str) -> None:
    """Say once what about a loader works but is probably not meant: shuffling where nothing is trained."""
    if what.startswith("train"):
        return
    if any(isinstance(sampler, RandomSampler) for leaf in leaves_of(loader) for sampler in samplers_of(leaf)):
        messages.warn_once(
            f"{what} shuffles (shuffle=True or a RandomSampler). The order does not change the metrics, but outputs "
            "come in another order every time. Use shuffle=False."
        )


def samplers_of(loader: Any) -> list[Any]:
    """The user's samplers in a loader: its batch sampler, its sampler, and those inside of them."""
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
    """The generators that the user gave to a loader and its samplers, in an order that is the same on all processes.

    Each process made its own: give all of them the states of one process's before the first epoch of a fit, and they
    agree on the order even if a generator was seeded differently on each.
    """
    return [generator for leaf in leaves_of(loader) for generator in _generators(leaf)]


def whole_of(loader: Any) -> Any:
    """The loader as the user gave it, if this one yields one process's part of it."""
    return getattr(loader, "paceline_whole", loader)


def samples_in_batch(loader: Any, num_ranks: int) -> int | None:
    """How many samples a full batch of all ranks together has; None where the loader does not say."""
    whole = whole_of(loader)
    if not isinstance(whole, DataLoader):
        return None
    size = whole.batch_size or getattr(whole.batch_sampler, "batch_size", None)
    return size * num_ranks if isinstance(size, int) else None


def shard_of(loader: Any) -> Any:
    """What in a loader decides on one process's part of it; None where it yields everything."""
    places = [loader, *(getattr(loader, name, None) for name in ("batch_sampler", "sampler", "dataset"))]
    return next((place for place in places if isinstance(place, Shard)), None)


def replaced(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """A copy of a loader with some attributes replaced, those included that a loader refuses to have set."""
    clone = copy.copy(loader)
    clone.__dict__.update(attributes)
    forget_iterator(clone)  # no running iterator in common
    return clone


class _EpochGenerator(torch.Generator):
    """A generator that Paceline gave to a sampler; it is seeded before each epoch."""

    def __reduce__(self) -> Any:
        return type(self), ()


def _single(loader: Any) -> Iterable[Any]:
    """Check that something can be iterated over for batches."""
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TypeError(
            f"A data set ({type(loader).__name__}) was given as a loader, so every sample would be a batch of its "
            "own. Give "
            "DataLoader(dataset, batch_size=...), with batch_size=None if its items are batches already."
        )
    if isinstance(loader, Tensor):
        raise TypeError(
            f"A tensor of shape {tuple(loader.shape)} was given as a loader, so every row would be a batch of its own. "
            "Give a DataLoader(TensorDataset(tensor), batch_size=...), or list(tensor) if its rows are batches already."
        )
    iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if iterable and not isinstance(loader, (str, bytes, type, Mapping)):
        return loader
    raise TypeError(
        f"{_short(loader)} ({type(loader).__name__}) was given as a loader, but there are no batches to iterate over "
        "in it. Give a DataLoader, any iterable of batches, or a list or dict of them."
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_limit(limit: float | int | None, argument: str) -> None:
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        raise TypeError(
            f"{argument}={limit!r} is {messages.a(limit)}. Give a number of batches (int), a fraction (float "
            "between 0 and 1), or None for all."
        )
    if isinstance(limit, float) and not 0.0 <= limit <= 1.0:
        hint = f"; for {int(limit)} batches write {int(limit)}" if limit.is_integer() and limit > 1 else ""
        raise ValueError(f"{argument}={limit} is a float, so a fraction, and must lie between 0.0 and 1.0{hint}.")
    if limit < 0:
        raise ValueError(f"{argument}={limit} is negative. Give 0 or more batches, or None for all.")


def _is_empty(loader: Any, what: str, argument: str) -> str:
    if isinstance(loader, CombinedLoader):
        lengths = ", ".join(f"{type(leaf).__name__}: {length_of(leaf)}" for leaf in loader.flattened)
        return (
            f"{what} has no batch: the CombinedLoader (mode {loader.mode!r}) combines loaders of lengths [{lengths}]. "
            f"Fill the empty ones or take them out, or leave all out with {argument}=0."
        )
    samples = length_of(getattr(loader, "dataset", None))
    batch_size = getattr(loader, "batch_size", None)
    if samples and batch_size and getattr(loader, "drop_last", False):
        shard = shard_of(loader)
        each = "" if shard is None or shard.division.evaluation else f" on each of {shard.division.world} processes"
        return (
            f"{what} has no batch: its {samples} samples do not fill one of batch_size={batch_size}{each}, and "
            "drop_last=True drops the rest. Use a smaller batch_size or drop_last=False."
        )
    return (
        f"{what} is empty: len() of this {type(loader).__name__} is 0. Check the data set behind it, or leave it out "
        f"with {argument}=0."
    )


def leaves_of(loader: Any) -> Iterator[Any]:
    """The loader itself, or those that a CombinedLoader combines."""
    if isinstance(loader, CombinedLoader):
        for leaf in loader.flattened:
            yield from leaves_of(leaf)
    else:
        yield loader


def _is_stateful(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _positioned(loader: Any) -> Any:
    """What knows the place in a loader's data: the loader, or an iterable data set that it reads in this process."""
    if _is_stateful(loader):
        return loader
    dataset = getattr(loader, "dataset", None)
    here = isinstance(loader, DataLoader) and loader.num_workers == 0 and isinstance(dataset, IterableDataset)
    return dataset if here and _is_stateful(dataset) else None


def _knows_place(loader: Any) -> bool:
    """Whether a loader, or all of those that are combined in step, can be entered where it was by its own state."""
    in_step = getattr(loader, "mode", "") != "max_size_cycle"
    return in_step and all(_positioned(leaf) is not None for leaf in leaves_of(loader))


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators that the user gave to a loader or its samplers."""
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
    generators = _generators(loader)
    if generators:
        state["generators"] = [generator.get_state() for generator in generators]
        state["generators_at_epoch_start"] = [_at_epoch_start.get(g, g.get_state()) for g in generators]
    return state or None


def _load_leaf_state(loader: Any, state: Mapping[str, Any], mid_epoch: bool, positions: bool) -> bool:
    lost = []
    owner = _positioned(loader)
    positioned = positions and "state_dict" in state and owner is not None
    if positioned and owner is not None:
        owner.load_state_dict(state["state_dict"])
    elif positions and "state_dict" in state:
        lost.append("its position (the loader has no load_state_dict now)")
    shard = shard_of(loader)
    # What is shared by a sampler goes through the whole order once more, wherever the loader goes on.
    draws_anew = not positioned or (shard is not None and not shard.alike)
    saved = state.get("generators_at_epoch_start" if mid_epoch and draws_anew else "generators", [])
    generators = _generators(loader)
    if len(saved) == len(generators):
        for generator, generator_state in zip(generators, saved, strict=True):
            generator.set_state(generator_state)
            _note_epoch_start(generator, generator_state)
    else:
        lost.append(f"the states of {len(saved)} random generators (the loader has {len(generators)} now)")
    if lost:
        messages.warn(
            f"The checkpoint holds {' and '.join(lost)}, which the training loader ({type(loader).__name__}) cannot "
            "take. The order of the data will differ from the saved run. Give fit the loader of that run."
        )
    return positioned


def _in_order(sampler: Any, dataset: Any) -> Any:
    """A sampler of the same samples in a fixed order."""
    if isinstance(sampler, (SequentialSampler, Sequence)):
        return sampler
    if isinstance(sampler, DistributedSampler):
        ordered = copy.copy(sampler)
        ordered.shuffle = False
        return ordered
    indices = getattr(sampler, "indices", None)
    return list(indices) if indices is not None else SequentialSampler(dataset)


def _with_samplers(loader: DataLoader[Any], sampler: Any, inner: Any) -> DataLoader[Any]:
    """A copy of a loader with other samplers; ``inner`` goes into a copy of its batch sampler."""
    changes: dict[str, Any] = {"sampler": sampler}
    if inner is not None:
        batches: Any = copy.copy(loader.batch_sampler)
        batches.sampler = inner
        changes["batch_sampler"] = batches
    return replaced(loader, **changes)

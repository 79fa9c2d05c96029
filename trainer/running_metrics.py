"""Save each rank's metrics of the current epoch in a checkpoint, and restore them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..torch_private import pytree
from . import phases
from .metric_reductions import MetricRecord, Record, RecordOptions, make_record, reduction_of

if TYPE_CHECKING:
    from .metrics import MetricStore

STAGE = "train"
_MOMENTS = {moment.name: moment for moment in vars(phases).values() if isinstance(moment, phases.Moment)}


def logged(store: MetricStore, module: nn.Module) -> list[dict[str, Any]]:
    """Return the values that this rank has logged in the current training epoch, as plain data and CPU tensors."""
    places = {id(part): name for name, part in module.named_modules()}
    waiting = store.step_value_sharings()[1].waiting
    return [_entry(*found, places) | {"waits": waiting(found[3])} for found in store.running(STAGE)]


def _entry(moment: str, idx: int | None, name: str, record: Record, places: dict[int, str]) -> dict[str, Any]:
    options = record.options
    reduction = reduction_of(name, options.reduce_fx)
    value = record.value.detach() if isinstance(record.value, Tensor) else record.value
    return {
        "moment": moment,
        "loader": idx,
        "name": name,
        "options": tuple(options._replace(reduce_fx=reduction, sync_dist_group=None)),
        "metric": places.get(id(record.metric)) if isinstance(record, MetricRecord) else None,
        "double": record.dtype == torch.float64,
        "value": _to(value, "cpu"),
        "fresh": record.fresh,
        "state": _to(record.dump(), "cpu"),
    }


def put_back(store: MetricStore, module: nn.Module, ranks: list[list[dict[str, Any]]], takes_over: bool) -> None:
    """Restore the values that :func:`logged` returned on the saved ranks whose metrics this rank takes over.

    If ``takes_over`` is False, there are no such ranks, and this rank gets only the names, because all ranks compute
    the epoch's values together.
    """
    merged: dict[tuple[Any, ...], Record] = {}
    for entry in (entry for entries in ranks for entry in entries):
        place = entry["moment"], entry["loader"], entry["name"]
        state = _to(entry["state"], store.strategy.device)
        if place in merged:
            if takes_over:
                merged[place].merge(state)
            continue
        record = _record(entry, store, module)
        if record is not None:
            if takes_over:
                record.load(state)
            record.value, record.fresh, record.seen = _to(entry["value"], store.strategy.device), entry["fresh"], True
            merged[place] = record
            if entry.get("waits"):
                store.step_value_sharings()[1].wait(record)
    for (moment, idx, name), record in merged.items():
        store.resume(STAGE, _MOMENTS[moment], idx, name, record)


def _record(entry: dict[str, Any], store: MetricStore, module: nn.Module) -> Record | None:
    value: Any = 0.0
    if entry["metric"] is not None:
        try:
            value = module.get_submodule(entry["metric"])
        except AttributeError:
            return None
    moment = _MOMENTS[entry["moment"]]
    options = RecordOptions(*entry["options"])
    record = make_record(entry["name"], value, options, moment, moment.name, entry["loader"], store.weigher(moment))
    if entry["double"]:
        record.dtype = torch.float64
    return record


def _to(value: Any, device: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to(device), value)


# ---- torchmetrics ----------------------------------------------------------------------------------------------------


def _metrics(module: nn.Module) -> Iterator[tuple[str, Any]]:
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None:
        yield from ((name, part) for name, part in module.named_modules() if isinstance(part, torchmetrics.Metric))


def measured(store: MetricStore, module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the states of the torchmetrics that this rank has updated, by their names in the module.

    Metrics of a running validation are left out, because a resume repeats the validation.
    """
    begun = {id(r.metric) for *_, r in store.running("validate") if isinstance(r, MetricRecord)}
    return {
        name: {
            "state": _to(metric._copy_state_dict(), "cpu"),
            "updates": metric._update_count,
            "last": _to(metric._forward_cache, "cpu"),
        }
        for name, metric in _metrics(module)
        if metric._update_count and id(metric) not in begun
    }


def put_back_measured(module: nn.Module, ranks: list[dict[str, dict[str, Any]]], takes_over: bool) -> None:
    """Restore the states that :func:`measured` returned on the saved ranks whose metrics this rank takes over.

    If ``takes_over`` is False, there are no such ranks, and this rank gets only the values of the last step.
    """
    found = dict(_metrics(module))
    begun = set()
    for name, kept in ((name, kept) for states in ranks for name, kept in states.items() if name in found):
        metric, state = found[name], _to(kept["state"], found[name].device)
        if name in begun and takes_over:
            metric._update_count += kept["updates"]
            metric._reduce_states(state)
            continue
        begun.add(name)
        metric.reset()
        metric._forward_cache = _to(kept["last"], metric.device)
        if not takes_over:
            for attribute, value in state.items():
                if isinstance(value, list) and metric._reductions[attribute] is not None:  # gathered in its dtype
                    setattr(metric, attribute, [torch.atleast_1d(one)[:0] for one in value[:1]])
            continue
        metric._update_count = kept["updates"]
        for attribute, value in state.items():
            setattr(metric, attribute, value)

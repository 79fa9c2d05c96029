"""Findings about how data reaches the device."""

from __future__ import annotations

import math

from ..devices.kinds import kind_of
from .finding import Case, Finding, duration, faster, percent
from .measurements import Facts

#: Fractions of the time above which a finding is reported.
DATA = 0.20
COPIES = 0.05


def _waits_for_data(case: Case) -> Facts | None:
    """Return the process that waits longest for data, or None if its wait is too short to report."""
    worst = max(case, key=lambda facts: facts.share("data"))
    return worst if worst.share("data") >= DATA else None


def _fetch_and_rest(facts: Facts) -> tuple[float, float]:
    """Return the seconds to load a batch (in a worker or this process), and the seconds of a step minus data waits."""
    wait = facts.parts.get("data", 0.0) / max(facts.steps, 1)
    rest = facts.step - wait
    workers = facts.loader.get("num_workers", 0)
    return (facts.step * workers if workers else wait), max(rest, 1e-9)


def wanted_workers(facts: Facts) -> int:
    """Return how many workers are needed to have the next batch ready when a step ends."""
    fetch, rest = _fetch_and_rest(facts)
    return max(1, math.ceil(fetch / rest * 1.1))


def _cores(count: int) -> str:
    return f"each process has {count} core{'' if count == 1 else 's'}"


def cores_each(facts: Facts) -> int:
    """Return how many cores each process on a node can use."""
    return max(1, facts.cores // facts.local_world_size)


def data_bound(case: Case) -> Finding | None:
    """Report that steps wait for data and that more workers would not be enough."""
    facts = _waits_for_data(case)
    if facts is None:
        return None
    workers = facts.loader.get("num_workers")
    wanted, cores, more = wanted_workers(facts), cores_each(facts), ""
    if workers is not None and workers < cores and wanted <= cores:
        return None  # too_few_workers
    share, (fetch, rest) = facts.share("data"), _fetch_and_rest(facts)
    where = f" on rank {facts.rank}" if len(case) > 1 else ""
    if workers is None:
        change = (
            "Use a DataLoader with num_workers, or prepare the batches in advance, because the "
            f"{facts.loader.get('kind', 'loader')} loads them in the training process."
        )
    else:
        more = f"num_workers={cores} and " if workers < cores else ""
        change = (
            f"Use {more}a cheaper dataset: store decoded and resized samples, keep them in memory if they fit, or move "
            f"augmentation to the device. A worker may take at most {duration(rest * cores)} to load a batch."
        )
    return Finding(
        "data_bound",
        f"Waiting for data takes {percent(share)} of each step{where} ({duration(share * facts.step)}).",
        f"Loading a batch takes about {duration(fetch)}, and the rest of the step takes {duration(rest)}. To keep up "
        f"with a tenth to spare, loading would need {wanted} workers, and {_cores(cores)}.",
        change,
        (f"More workers make a step {facts.step / max(rest, fetch / cores):.1f} times as fast. " if more else "")
        + faster(share, "the wait"),
        share,
    )


def too_few_workers(case: Case) -> Finding | None:
    """Report that steps wait for data and that more workers would be enough."""
    facts = _waits_for_data(case)
    if facts is None or facts.loader.get("num_workers") is None:
        return None
    workers, wanted, cores = facts.loader["num_workers"], wanted_workers(facts), cores_each(facts)
    if workers >= cores or wanted > cores:
        return None
    wanted = max(wanted, workers + 1)
    share, (fetch, rest) = facts.share("data"), _fetch_and_rest(facts)
    return Finding(
        "too_few_workers",
        f"Waiting for data takes {percent(share)} of each step ({duration(share * facts.step)}) with "
        f"num_workers={workers}.",
        f"Loading a batch takes about {duration(fetch)}, and the rest of the step takes {duration(rest)}.",
        f"Set num_workers={wanted} and persistent_workers=True; {_cores(cores)}.",
        faster(share, "the wait"),
        share,
    )


def too_many_workers(case: Case) -> Finding | None:
    """Report that there are more workers than cores."""
    facts = case[0]
    workers, cores = facts.loader.get("num_workers") or 0, cores_each(facts)
    if workers <= cores or workers < 2:
        return None
    wanted = min(wanted_workers(facts), cores) if facts.share("data") >= DATA else max(1, min(workers, cores) // 2)
    return Finding(
        "too_many_workers",
        f"The loader has num_workers={workers}, but {_cores(cores)}.",
        "The workers compete for the cores with each other and with the training process. Each worker also keeps "
        "prefetched batches in memory and takes time to start.",
        f"Set num_workers={wanted}.",
        "The first step starts earlier, less memory is used, and throughput stays the same or rises slightly.",
        share=facts.share("data") / 2,
    )


def pageable_copies(case: Case) -> Finding | None:
    """Report that batches are copied to a GPU from memory that is not pinned."""
    facts = case[0]
    share = max(facts.share("copy") for facts in case)
    if not kind_of(facts.device).overlaps_copies() or facts.loader.get("pin_memory") is not False or share < COPIES:
        return None
    return Finding(
        "pageable_copies",
        f"Copying batches to the GPU takes {percent(share)} of each step ({duration(share * facts.step)}).",
        "The loader returns pageable memory, which the training process has to pin before each copy.",
        "Set pin_memory=True; a thread then pins the next batch while a step runs.",
        faster(share, "the copies"),
        share,
    )


FINDINGS = (data_bound, too_few_workers, too_many_workers, pageable_copies)

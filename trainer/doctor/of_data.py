"""Findings about the way of the data to the device."""

from __future__ import annotations

import math

from .facts import Facts
from .finding import Case, Finding, duration, faster, percent

#: Shares of the time from which on something is worth a word.
DATA = 0.20
COPIES = 0.05


def _waits_for_data(case: Case) -> Facts | None:
    """The process that waits longest for data, if that is long."""
    worst = max(case, key=lambda facts: facts.share("data"))
    return worst if worst.share("data") >= DATA else None


def _fetch_and_rest(facts: Facts) -> tuple[float, float]:
    """Seconds that loading a batch takes a worker (or this process), and a step without waiting."""
    wait = facts.parts.get("data", 0.0) / max(facts.steps, 1)
    rest = facts.step - wait
    workers = facts.loader.get("num_workers", 0)
    return (facts.step * workers if workers else wait), max(rest, 1e-9)


def wanted_workers(facts: Facts) -> int:
    """Workers a process needs so that a batch is there when the step before is done."""
    fetch, rest = _fetch_and_rest(facts)
    return max(1, math.ceil(fetch / rest * 1.1))


def _cores(count: int) -> str:
    return "is 1 core" if count == 1 else f"are {count} cores"


def cores_each(facts: Facts) -> int:
    """Cores for each process of a machine."""
    return max(1, facts.cores // facts.local_world_size)


def data_bound(case: Case) -> Finding | None:
    """The step waits for data, and more workers are not enough."""
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
            f"The batches come from a {facts.loader.get('kind', 'loader')}, which loads in the training process. Give "
            "a DataLoader with num_workers, or prepare the batches before."
        )
    else:
        more = f"num_workers={cores}, then " if workers < cores else ""
        change = (
            f"Use {more}a cheaper data set: store it decoded and resized, keep it in memory if it fits, move "
            f"augmentation to the device. A batch should take at most {duration(rest * cores)} of one worker."
        )
    return Finding(
        "data_bound",
        f"Waiting for data takes {percent(share)} of each step{where} ({duration(share * facts.step)}).",
        f"Loading a batch takes about {duration(fetch)}, the rest of the step {duration(rest)}; that would need "
        f"{wanted} workers, and there {_cores(cores)} for each process.",
        change,
        (f"{facts.step / max(rest, fetch / cores):.1f} times as fast with the workers. " if more else "")
        + faster(share),
        share,
    )


def too_few_workers(case: Case) -> Finding | None:
    """The step waits for data, and a few more workers would do."""
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
        f"Loading a batch takes about {duration(fetch)}, the rest of the step {duration(rest)}.",
        f"DataLoader(num_workers={wanted}, persistent_workers=True): there {_cores(cores)} for each process.",
        faster(share),
        share,
    )


def too_many_workers(case: Case) -> Finding | None:
    """More workers than cores."""
    facts = case[0]
    workers, cores = facts.loader.get("num_workers") or 0, cores_each(facts)
    if workers <= cores or workers < 2:
        return None
    wanted = min(wanted_workers(facts), cores) if facts.share("data") >= DATA else max(1, min(workers, cores) // 2)
    return Finding(
        "too_many_workers",
        f"num_workers={workers}, but there {_cores(cores)} for each process.",
        "Workers take the cores from each other and from the training process; each also holds memory, prefetched "
        "batches, and takes a moment to start.",
        f"DataLoader(num_workers={wanted}).",
        "An earlier first step, less memory, and as much throughput or a little more.",
        share=facts.share("data") / 2,
    )


def pageable_copies(case: Case) -> Finding | None:
    """Batches are copied to a GPU from memory that is not pinned."""
    facts = case[0]
    share = max(facts.share("copy") for facts in case)
    if facts.device != "cuda" or facts.loader.get("pin_memory") is not False or share < COPIES:
        return None
    return Finding(
        "pageable_copies",
        f"Bringing batches to the GPU takes {percent(share)} of each step ({duration(share * facts.step)}).",
        "The loader gives pageable memory, which the training process itself must pin before each copy.",
        "DataLoader(pin_memory=True): a thread pins the next batch meanwhile.",
        faster(share),
        share,
    )

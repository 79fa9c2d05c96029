"""Findings about memory, cores and the garbage collector."""

from __future__ import annotations

from ..messages import ranks as named_ranks
from .data_findings import cores_each
from .finding import Case, Finding, duration, faster, percent, there

#: Fractions of the time above which a finding is reported.
COLLECTIONS = 0.05
#: Limits as fractions of a device's or host's memory: in use, unused between tensors, left on the host.
NEARLY_FULL = 0.92
FRAGMENTED = 0.25
HOST_LEFT = 0.05


def memory_nearly_full(case: Case) -> Finding | None:
    """Report that little memory is left on a GPU or on the host."""
    for facts in case:
        memory = facts.memory
        total, peak = memory.get("total", 0.0), memory.get("peak_allocated", 0.0)
        if total and peak / total >= NEARLY_FULL:
            return Finding(
                "memory_nearly_full",
                f"Tensors fill {percent(peak / total)} of the GPU's {total / 2**30:.0f} GiB on rank {facts.rank}.",
                "A slightly larger batch would run out of memory. Even before memory runs out, torch frees and "
                "reallocates memory, which takes time.",
                there(
                    case,
                    "Use a smaller batch with accumulate_grad_batches, precision='bf16-mixed'",
                    "Use a smaller batch with gradient_accumulation_steps, mixed_precision='bf16'",
                )
                + ", activation checkpointing, or FSDP.",
                "A slightly larger batch will no longer run out of memory.",
                0.05,
            )
        host, left = memory.get("host_total", 0.0), memory.get("host_available", 0.0)
        if host and left / host < HOST_LEFT:
            return Finding(
                "memory_nearly_full",
                f"Only {left / 2**30:.1f} GiB of the host's {host / 2**30:.0f} GiB are free.",
                "When memory runs out, the system swaps memory to disk, or kills a process, which stops the run.",
                "Use fewer workers or a smaller prefetch_factor, or memory-map the data instead of loading it.",
                "The run will no longer fail when other programs need memory.",
                0.05,
            )
    return None


def fragmentation(case: Case) -> Finding | None:
    """Report that torch had to reallocate memory because of large unused gaps between tensors."""
    for facts in case:
        memory = facts.memory
        total, retries = memory.get("total", 0.0), memory.get("retries", 0.0)
        idle = memory.get("peak_reserved", 0.0) - memory.get("peak_allocated", 0.0)
        if total and retries and idle / total >= FRAGMENTED:
            return Finding(
                "fragmentation",
                f"On rank {facts.rank}, {percent(idle / total)} of the GPU's memory lies unused in gaps between "
                "tensors.",
                f"torch had to return memory and allocate it again {retries:.0f} time{'' if retries == 1 else 's'}, "
                "waiting for the GPU each time, because sizes change from step to step.",
                "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and use batches with only a few different "
                "shapes.",
                "Steps will no longer wait for memory, and a larger batch will fit.",
                0.05,
            )
    return None


def oversubscribed_threads(case: Case) -> Finding | None:
    """Report that there are more compute threads than cores."""
    facts = case[0]
    wanted = facts.threads * facts.local_world_size
    if wanted <= facts.cores * 1.5:
        return None
    each = cores_each(facts)
    return Finding(
        "oversubscribed_threads",
        f"On this machine, {wanted} threads compute on {facts.cores} core{'' if facts.cores == 1 else 's'} "
        f"({facts.local_world_size} process{'' if facts.local_world_size == 1 else 'es'} with {facts.threads} each).",
        "The threads interrupt each other during the computation, and those that finish first wait for the last one.",
        f"Set OMP_NUM_THREADS={each}, or call torch.set_num_threads({each}).",
        "With fewer threads, computing on the CPU is often 1.5 to 3 times as fast.",
        0.3 if facts.device == "cpu" else 0.1,
    )


def numa_distance(case: Case) -> Finding | None:
    """Report processes that may run on cores far from their GPU."""
    far = [facts for facts in case if facts.numa.get("nodes", 1) > 1 and facts.numa["near"] < facts.numa["cores"]]
    if not far:
        return None
    facts = far[0]
    return Finding(
        "numa_distance",
        f"{named_ranks(one.rank for one in far).capitalize()} may run on cores of {facts.numa['nodes']} NUMA nodes, "
        f"but the GPU of rank {facts.rank} is attached to node {facts.numa['device_node']}.",
        "Batches that were prepared on another node take longer to reach the GPU, and kernel launches take longer too.",
        "Use paceline launch --enable_cpu_affinity, DDPStrategy(numa=True), or numactl --cpunodebind.",
        "A step will be a few percent faster, or more if much data is copied.",
        0.03,
    )


def collection_pauses(case: Case) -> Finding | None:
    """Report that Python's garbage collector takes much of the time."""
    worst = max(case, key=lambda facts: facts.collection_seconds / (facts.total or 1.0))
    share = worst.collection_seconds / worst.total if worst.total else 0.0
    if share < COLLECTIONS:
        return None
    return Finding(
        "collection_pauses",
        f"Python's garbage collector takes {percent(share)} of the time on rank {worst.rank} ({worst.collections} "
        f"runs, {duration(worst.collection_seconds / max(worst.collections, 1))} each).",
        "The collector scans all objects of the program, or the step itself calls gc.collect().",
        there(
            case,
            "Use Trainer(callbacks=[GarbageCollection()]), which freezes existing objects and collects on all ranks at "
            "once, or raise its every_n_steps.",
            "Call gc.freeze() once everything is set up, and gc.collect() less often.",
        )
        + " Keep data in arrays instead of many small Python objects.",
        faster(share, "the collections"),
        share,
    )


FINDINGS = (memory_nearly_full, fragmentation, oversubscribed_threads, numa_distance, collection_pauses)

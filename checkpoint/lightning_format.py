"""The counters of a run under Lightning's names, so that Paceline and Lightning can resume from each other's files."""

from __future__ import annotations

from typing import Any

#: The version of Lightning whose layout the files follow.
LAYOUT_VERSION = "2.6.6"


def loops(counters: dict[str, Any]) -> dict[str, Any]:
    """Lightning's ``"loops"`` entry, made from the counters of a run."""
    in_epoch, steps, done = counters["next_batch"], counters["global_step"], counters["epoch_done"]
    epoch = _passed(counters["epoch"], in_epoch > 0 or done, done)
    return {
        "fit_loop": {
            "state_dict": {},
            "epoch_progress": {"total": epoch, "current": dict(epoch)},
            "epoch_loop.state_dict": {"_batches_that_stepped": counters["updates"]},
            "epoch_loop.batch_progress": {
                "total": _all(counters["batches"]),
                "current": _all(in_epoch),
                "is_last_batch": done,
            },
            "epoch_loop.scheduler_progress": {"total": _two(0), "current": _two(0)},
            "epoch_loop.automatic_optimization.state_dict": {},
            "epoch_loop.automatic_optimization.optim_progress": {
                "optimizer": {
                    "step": {"total": _two(steps), "current": _two(in_epoch)},
                    "zero_grad": {"total": _three(steps), "current": _three(in_epoch)},
                }
            },
            "epoch_loop.manual_optimization.state_dict": {},
            "epoch_loop.manual_optimization.optim_step_progress": {"total": _two(0), "current": _two(0)},
            "epoch_loop.val_loop.state_dict": {},
            "epoch_loop.val_loop.batch_progress": _nothing(),
        },
        "validate_loop": {"state_dict": {}, "batch_progress": _nothing()},
        "test_loop": {"state_dict": {}, "batch_progress": _nothing()},
        "predict_loop": {"state_dict": {}, "batch_progress": _nothing()},
    }


def progress(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The counters of a run, read from a checkpoint that Lightning wrote."""
    fit = checkpoint.get("loops", {}).get("fit_loop", {})
    found = {"global_step": checkpoint.get("global_step", 0), "window": 0, "pending": "", "stepped": False}
    try:
        epoch, batch = fit["epoch_progress"]["current"], fit["epoch_loop.batch_progress"]
        started, in_epoch = epoch["started"] > epoch["completed"], batch["current"]["completed"]
        return found | {
            "epoch": epoch["completed"],
            "epoch_done": epoch["processed"] > epoch["completed"],
            "next_batch": in_epoch if started else 0,
            "settled": batch["total"]["completed"],
            "batches": batch["total"]["completed"],
            "updates": fit["epoch_loop.state_dict"]["_batches_that_stepped"],
        }
    except KeyError:
        return found | {
            "epoch": checkpoint.get("epoch", 0),
            "epoch_done": True,
            "next_batch": 0,
            "settled": found["global_step"],
            "batches": found["global_step"],
            "updates": found["global_step"],
        }


def _passed(completed: int, started: bool, processed: bool) -> dict[str, int]:
    return {
        "ready": completed + started,
        "started": completed + started,
        "processed": completed + processed,
        "completed": completed,
    }


def _all(n: int) -> dict[str, int]:
    return {"ready": n, "started": n, "processed": n, "completed": n}


def _two(n: int) -> dict[str, int]:
    return {"ready": n, "completed": n}


def _three(n: int) -> dict[str, int]:
    return {"ready": n, "started": n, "completed": n}


def _nothing() -> dict[str, Any]:
    return {"total": _all(0), "current": _all(0), "is_last_batch": False}

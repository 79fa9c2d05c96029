"""Store a run's counters under Lightning's names, so that Paceline and Lightning can resume each other's runs."""

from __future__ import annotations

from typing import Any

#: The version of Lightning whose layout the files follow.
LAYOUT_VERSION = "2.6.6"
_ALL = ("ready", "started", "processed", "completed")
_TWO, _THREE = ("ready", "completed"), ("ready", "started", "completed")


def loops(counters: dict[str, Any]) -> dict[str, Any]:
    """Build Lightning's ``"loops"`` entry from the counters of a run."""
    in_epoch, steps, done = counters["next_batch"], counters["global_step"], counters["epoch_done"]
    completed = counters["epoch"]
    epoch = dict.fromkeys(_ALL, completed + (in_epoch > 0 or done))
    epoch |= {"processed": completed + done, "completed": completed}
    return {
        "fit_loop": {
            "state_dict": {},
            "epoch_progress": {"total": epoch, "current": dict(epoch)},
            "epoch_loop.state_dict": {"_batches_that_stepped": counters["updates"]},
            "epoch_loop.batch_progress": {**_progress(counters["batches"], in_epoch), "is_last_batch": done},
            "epoch_loop.scheduler_progress": _progress(0, 0, _TWO),
            "epoch_loop.automatic_optimization.state_dict": {},
            "epoch_loop.automatic_optimization.optim_progress": {
                "optimizer": {
                    "step": _progress(steps, in_epoch, _TWO),
                    "zero_grad": _progress(steps, in_epoch, _THREE),
                }
            },
            "epoch_loop.manual_optimization.state_dict": {},
            "epoch_loop.manual_optimization.optim_step_progress": _progress(0, 0, _TWO),
            "epoch_loop.val_loop.state_dict": {},
            "epoch_loop.val_loop.batch_progress": _nothing(),
        },
        **{f"{fn}_loop": {"state_dict": {}, "batch_progress": _nothing()} for fn in ("validate", "test", "predict")},
    }


def progress(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Read the counters of a run from a checkpoint that Lightning wrote."""
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


def _progress(total: int, current: int, names: tuple[str, ...] = _ALL) -> dict[str, Any]:
    return {"total": dict.fromkeys(names, total), "current": dict.fromkeys(names, current)}


def _nothing() -> dict[str, Any]:
    return {**_progress(0, 0), "is_last_batch": False}

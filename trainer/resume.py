"""Each rank's own state in a checkpoint, which lets a run resume inside an epoch as if it had never stopped.

It contains RNG states, the accumulation window's gradients, the epoch's logged values and metrics, and the loader's
position. If a run resumes with a different number of ranks, some parts are derived, and one message reports which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import messages
from ..checkpoint.rank_files import (
    entry_of,
    merged_gradients,
    put_back,
    replica,
    tell_derived,
    tensors_apart,
    whole_gradient,
    without_entry,
)
from ..data.loaders import load_loader_state, loader_state, samples_in_batch
from ..processes import seed
from ..strategies.precision.base import parameters as parameters_of
from ..torch_private import is_in_parts
from . import running_metrics
from .state import Pending, without_window

if TYPE_CHECKING:
    from .run import Run

# ---- gather ----------------------------------------------------------------------------------------------------------


def gather_ranks(run: Run) -> list[dict[str, Any]]:
    """Return the states of all ranks for the checkpoint, in rank order; every rank must call this."""
    run.strategy.barrier("save_checkpoint")  # errors about a rank that is waiting somewhere else show this name
    return run.strategy.gather_objects(_of_this_rank(run))


def _of_this_rank(run: Run) -> dict[str, Any]:
    strategy, module, metrics, state = run.strategy, run.module, run.metrics, run.state
    fit, over = run.fit, state.epoch_done and state.pending is not Pending.EPOCH_VALUES
    repeats = None if fit is None else fit.repeats
    kept: dict[str, Any] = {
        "rank": strategy.global_rank,
        "data_rank": strategy.data_rank,
        "device": strategy.device.type,
        "random": seed.random_states(),
        "metrics": [] if over else running_metrics.logged(metrics, module) if repeats is None else repeats.logged,
        "torchmetrics": running_metrics.measured(metrics, module) if repeats is None else repeats.measured,
        "logged_until": 0 if state.epoch_done else state.next_batch if repeats is None else repeats.until,
        "share": state.share,
        "gradients": _gradients(run),
        "buffers": tensors_apart(replica(run.module, strategy), strategy),
        "losses": None,
    }
    if strategy.is_global_zero:
        kept["reduction_order"] = strategy.reduction_order()
    if fit is not None:
        kept["losses"] = fit.losses.state_dict()
        kept |= fit.position_in_data()
        if state.pending is Pending.VALIDATION and fit.validation.random is not None:
            kept["random"] = fit.validation.random  # the validation is repeated
    if run.source.train_loader is not None and not kept.get("loader"):
        kept["loader"] = loader_state(run.source.train_loader)
    return kept


def _gradients(run: Run) -> dict[str, Any] | None:
    """Return the gradients that wait for an optimizer step; None if there are none, or if a failed step left them."""
    state, module = run.state, run.module
    if state.step_failed:
        return None
    if state.window:
        return run.strategy.window_gradients(module)
    if state.fn != "fit" or module.automatic_optimization or state.batch_idx < 0:
        return None
    stepped = (managed.optimizer for managed in run.managed if managed.stepped_at == state.batches - 1)
    used = {id(parameter) for optimizer in stepped for parameter in parameters_of(optimizer)}
    found = {name for name, p in module.named_parameters() if p.grad is not None and id(p) not in used}
    kept = run.strategy.window_gradients(module) if found else None
    return None if kept is None else {name: grad for name, grad in kept.items() if name in found}


def progress(run: Run, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counters to resume from.

    If the current window's gradients cannot be saved, these are the counters before the window.
    """
    state = run.state
    counters = state.state_dict() | {"accumulate": run.trainer.accumulate_grad_batches}
    if not state.window or all(kept["gradients"] is not None for kept in ranks):
        return counters
    if not state.step_failed:
        messages.info_once(
            f"{type(run.strategy).__name__} cannot save gradients that are still waiting for an optimizer step, so "
            "resuming from a checkpoint saved inside an accumulation window repeats that window's micro-batches "
            f"(here {state.window}). Save right after an update, as ModelCheckpoint(every_n_train_steps=) does."
        )
    return without_window(counters)


# ---- restore ---------------------------------------------------------------------------------------------------------


class Repeats:
    """Batches that a resumed run trains on again, although the epoch's restored values already contain them.

    Args:
        run: the run, with the restored values.
        until: index in the epoch of the first batch that the restored values do not contain.

    Attributes:
        logged: the restored values of ``self.log``, for a checkpoint that is saved before the batch ``until``.
        measured: the restored states of the torchmetrics, for the same purpose.
        forget: sets the epoch's values back to the restored ones.
    """

    def __init__(self, run: Run, until: int) -> None:
        self.until = until
        self.logged = running_metrics.logged(run.metrics, run.module)
        self.measured = running_metrics.measured(run.metrics, run.module)
        self.forget = run.metrics.remember_all(run.module)


class Resumed:
    """This rank's state in a checkpoint, which the loop restores in several steps."""

    def __init__(self, run: Run, checkpoint: Mapping[str, Any], parts: tuple[str, ...]) -> None:
        section = checkpoint.get("paceline", {})
        self.run = run
        self.in_loops = "loops" in parts
        self._parts = parts
        self.derived: list[str] = []
        self._saved = section.get("data_ranks") or 1
        self.batch_samples: int | None = section.get("batch_samples")
        self.ranks: list[dict[str, Any]] = [] if "accelerator" in section else section.get("ranks", [])
        strategy = run.strategy
        self._world = section.get("world_size", self._saved)
        self._alike = (self._world, self._saved) == (strategy.world_size, strategy.num_data_ranks)
        self.own: dict[str, Any] | None = entry_of(self.ranks, strategy, self._alike)
        self._seed = seed.mixed(
            section.get("progress", {}).get("shuffle_seed", 0), strategy.data_rank, run.state.global_step
        )
        self._random = "rng" in parts and bool(self.ranks)
        self._logged_until = 0

    def _stood_for(self) -> list[dict[str, Any]]:
        """Return the entries of the saved ranks whose running metrics this rank takes over."""
        if self._alike:
            return [self.own] if self.own else []
        strategy, firsts = self.run.strategy, {}
        for kept in self.ranks:
            firsts.setdefault(kept["data_rank"], kept)
        if strategy.num_data_ranks == self._saved:
            return [firsts[strategy.data_rank]] if strategy.data_rank in firsts else []
        return [kept for rank, kept in sorted(firsts.items()) if rank % strategy.num_data_ranks == strategy.data_rank]

    def _has_window(self) -> bool:
        """Return True if every rank's gradients were saved and the run still has the same ranks."""
        whole = self._alike and len(self.ranks) == self.run.strategy.world_size
        return whole and all(kept["gradients"] is not None for kept in self.ranks)

    # ---- position --------------------------------------------------------------------------------------------------

    def position(self, counters: dict[str, Any], accumulate: int) -> dict[str, Any]:
        """Return the saved counters, or the counters before the accumulation window if the window is lost."""
        if counters["window"] and not (self._has_window() and counters["accumulate"] == accumulate):
            waiting = counters["batches"] - counters["settled"]
            counters = without_window(counters)
            self.derived.append(f"the accumulation window, which starts over (batches trained on again: {waiting})")
        return counters

    def find_batch(self) -> None:
        """Convert the position in the epoch to a number of this run's batches, and report derived values."""
        run, state = self.run, self.run.state
        batch, ranks_now = state.next_batch, run.strategy.num_data_ranks
        now = samples_in_batch(run.source.train_loader, ranks_now)
        saved = self.batch_samples
        if saved is None or now is None:  # assume that a rank's batch size has not changed
            saved, now = self._saved, ranks_now
        self._logged_until = self.ranks[0].get("logged_until", 0) * saved // now if self.ranks else 0
        if self.in_loops and batch and not state.epoch_done and saved != now:
            here, left = divmod(batch * saved, now)
            again = "; samples that do not fill a batch are trained on again" if left else ""
            self.derived.append(f"the position, batch {here} of the epoch (batch {batch} in the saved run){again}")
            state.next_batch, state.batch_idx = here, here - 1
        self._tell()

    def _tell(self) -> None:
        """Report, in one message, the values that were derived instead of restored."""
        if self._random:
            seed.warn_of_other_device(self.ranks[0].get("device"), self.run.strategy.device.type)
        world = self.run.strategy.world_size
        lacking = without_entry(self.ranks, world)
        if self.ranks and lacking and self._random:
            self.derived.append(f"the RNG states of {lacking} (seeded from the shuffle seed, the rank and the step)")
        if not self._alike and any(kept["metrics"] or kept["torchmetrics"] for kept in self.ranks):
            self.derived.append(
                "the epoch's running metrics (from the saved run's ranks, divided among the ranks of this run)"
            )
        _, gradients = self._waiting()
        self.derived += [gradients] if gradients and self.in_loops else []
        tell_derived(self.derived, self._alike, self._world, world)

    # ---- the moments -----------------------------------------------------------------------------------------------

    def enter_epoch(self) -> None:
        """Restore the RNG states from the start of the epoch, for samplers that draw from them."""
        if self._random:
            states = (self.own or {}).get("random_at_epoch_start")
            self._set(states, seed.mixed(self._seed, 1))

    def before_fetch(self) -> None:
        """Restore the RNG states from just before the saved run prefetched its next batch."""
        states = (self.own or {}).get("random_before_fetch")
        if self._random and states:
            seed.set_random_states(states)

    @property
    def ended(self) -> bool:
        """Whether the loader had ended before the last batch of the epoch was trained on."""
        return self.in_loops and self._alike and (self.own or {}).get("ended", False)

    def position_in_data(self) -> dict[str, Any]:
        """Return this rank's saved position in the data, for a checkpoint that is written before a batch is fetched."""
        names = ("random_at_epoch_start", "ended", "random_before_fetch", "loader")
        own = self.own if self.in_loops and self._alike else None
        return {name: own[name] for name in names if name in own} if own else {}

    def restore(self) -> None:
        """Restore the state that is needed to train on the next batch."""
        run = self.run
        if self._alike and self.ranks:
            run.strategy.restore_reduction_order(self.ranks[0].get("reduction_order"))
        if self.in_loops:
            mine, module = self._stood_for(), run.module
            entries = mine or self.ranks
            running_metrics.put_back(run.metrics, module, [kept["metrics"] for kept in entries], bool(mine))
            running_metrics.put_back_measured(module, [kept["torchmetrics"] for kept in entries], bool(mine))
            self._put_back_gradients()
        if self._alike and self.own is not None and self.in_loops:
            run.state.share = self.own.get("share", 1.0)
        if self._alike and self.own is not None and "model" in self._parts:
            put_back(replica(run.module, run.strategy), self.own["buffers"])
        if self._random:
            self._set((self.own or {}).get("random"), self._seed)

    @property
    def values_wait(self) -> bool:
        """Whether step values that the saved batch's last hooks logged are yet to be shared; the same on all ranks."""
        return self.in_loops and any(entry.get("waits") for kept in self.ranks for entry in kept["metrics"])

    def repeats(self) -> Repeats | None:
        """Return the batches to train on again although :meth:`restore` has restored their values, or None."""
        repeated = self.in_loops and self._logged_until > self.run.state.next_batch
        return Repeats(self.run, self._logged_until) if repeated else None

    def _waiting(self) -> tuple[dict[str, Any], str]:
        """Merge the gradients saved before a manual step if the number of ranks has changed; also return a summary."""
        saved = [kept["gradients"] or {} for kept in self.ranks]
        if self._alike or self.run.module.automatic_optimization or not any(saved):
            return {}, ""
        if any(whole_gradient(one) is None for gradients in saved for one in gradients.values()):
            return {}, "the gradients that wait for an optimizer step, which start at zero"
        in_parts = any(map(is_in_parts, self.run.module.parameters()))
        found = merged_gradients(saved, 1 / len(saved), in_parts)
        return found, "the gradients that wait for an optimizer step (the mean over the saved ranks)"

    def _put_back_gradients(self) -> None:
        run, own = self.run, self.own
        waiting, _ = self._waiting()
        if waiting:
            run.strategy.load_window_gradients(run.module, waiting)
        if own is None or not self._alike:
            return
        if own["losses"] is not None and run.fit is not None:
            run.fit.losses.load_state_dict(own["losses"], in_window=run.state.window > 0)
        if own["gradients"] is not None and (run.state.window or not run.module.automatic_optimization):
            run.strategy.load_window_gradients(run.module, own["gradients"])

    def _set(self, states: dict[str, Any] | None, otherwise: int) -> None:
        if states is not None:
            seed.set_random_states(states)
        elif self.own is None:
            seed.seed_all(otherwise)

    def load_loader(self, loader: Any, mid_epoch: bool) -> bool:
        """Restore the loader's state; return True if that state includes the loader's position.

        If it does, the batches before the position do not have to be skipped.
        """
        if not self.in_loops or not self.ranks:
            return False
        kept = (self.own or self.ranks[0])["loader"]
        return load_loader_state(loader, kept, mid_epoch, same_ranks=self._alike)

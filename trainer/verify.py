"""Check whether a strategy gives the same numbers as one process, and find where they first differ."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..callbacks.base import Callback
from ..data.loaders import release_shuffling, seed_shuffling
from ..processes.device_transfer import convert, in_dtype
from ..processes.host_program import fork_obstacle
from ..strategies.base import Strategy
from ..strategies.distributed import DistributedStrategy
from ..torch_private import Dropout, pytree
from .trainer import Trainer

if TYPE_CHECKING:
    from ..strategies.choose import StrategyName
    from .module import TrainingModule

#: How many times larger a strategy's error may be than one process's error.
_FACTOR = 10.0
_SEED = 20


@dataclass
class Verdict:
    """How one strategy compares with one process.

    Attributes:
        error: the largest error of any parameter after the last step, relative to training in float64, as a fraction
            of the parameter's largest norm so far.
        one_process: the same error for one process in the requested precision; rounding is its only cause.
        step: the first step after which a parameter differs, where 0 is the start; None if no parameter differs.
        parameter: the name of the first parameter that differs; empty if none does.
        failure: the error that ended the run, or an empty string.
    """

    strategy: str
    error: float = float("nan")
    one_process: float = float("nan")
    step: int | None = None
    parameter: str = ""
    failure: str = ""

    @property
    def same(self) -> bool:
        """Whether the strategy gives the same numbers as one process."""
        return self.step is None and not self.failure


@dataclass
class VerifyReport:
    """The results of :func:`verify`; ``print`` shows them as a table."""

    steps: int
    tolerance: float
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all strategies give the same numbers as one process."""
        return all(verdict.same for verdict in self.verdicts)

    def __getitem__(self, strategy: str) -> Verdict:
        return next(verdict for verdict in self.verdicts if verdict.strategy == strategy)

    def __str__(self) -> str:
        width = max(len("strategy"), *(len(verdict.strategy) for verdict in self.verdicts))
        lines = [f"{'strategy':<{width}}  {'error':>8}  {'1 process':>9}  after {self.steps} steps"]
        for v in self.verdicts:
            found = "same" if v.same else f"differs at step {v.step} in {v.parameter}"
            found = f"failed: {v.failure:.200}" if v.failure else found
            lines.append(f"{v.strategy:<{width}}  {v.error:>8.1e}  {v.one_process:>9.1e}  {found}")
        return "\n".join(lines)


def verify(
    module: TrainingModule,
    loader: Iterable[Any],
    strategies: Sequence[StrategyName | str | Strategy] = ("ddp", "fsdp"),
    *,
    devices: int = 2,
    steps: int = 20,
    tolerance: float = 1e-6,
    **arguments: Any,
) -> VerifyReport:
    """Train a few steps under each strategy; after each step, compare every parameter with one-process training.

    Each run starts from the module's current weights and performs ``steps`` updates on the same batches. If a strategy
    splits the data, each process gets an equal part of every batch. The reference is one process in float64. A strategy
    differs if its error exceeds both ``tolerance`` and ten times the error of one process in the same precision.
    Dropout is switched off, because its masks depend on the process. The module itself is not changed.

    Args:
        module: as for ``fit``; its ``configure_optimizers`` is used.
        loader: batches whose size is divisible by the number of processes.
        strategies: names, or Strategy objects that are not in use.
        devices: number of processes for each strategy.
        steps: optimizer updates to compare.
        tolerance: the error that counts as rounding, as a fraction of the parameter's largest norm so far.
        **arguments: further Trainer arguments, such as ``precision=``, ``accumulate_grad_batches=`` and
            ``accelerator=``.

    Returns:
        A verdict for each strategy.
    """
    batches = _same_batches(loader, steps * arguments.setdefault("accumulate_grad_batches", 1))
    report = VerifyReport(steps, tolerance)
    with TemporaryDirectory(prefix="paceline_verify_") as folder:
        exact = _Exact(Path(folder))
        doubles = pytree.tree_map_only(Tensor, _exactly, batches)
        _run(_double(module), doubles, "single_device", 1, exact, arguments | {"precision": "64-true"})
        rounding = _Compared(Path(folder))
        _run(module, batches, "single_device", 1, rounding, arguments)
        for strategy in strategies:
            name = strategy if isinstance(strategy, str) else type(strategy).__name__
            compared = _Compared(Path(folder))
            verdict = Verdict(name, one_process=rounding.last())
            try:
                _run(module, batches, strategy, devices, compared, arguments)
            except Exception as error:
                verdict.failure = f"{type(error).__name__}: {error}"
            else:
                verdict.error = compared.last()
                verdict.step, verdict.parameter = compared.departs(rounding, tolerance)
            report.verdicts.append(verdict)
    return report


def _run(
    module: TrainingModule,
    batches: Iterable[Any],
    strategy: str | Strategy,
    devices: int,
    recorder: Callback,
    arguments: dict[str, Any],
) -> None:
    """Train a copy of the module on the batches, with a callback that reads the parameters after each update."""
    torch.manual_seed(_SEED)
    learner = copy.deepcopy(module)
    for part in learner.modules():
        if isinstance(part, Dropout):
            part.p = 0.0
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    ours = {"devices": devices, "strategy": strategy, "callbacks": recorder, "limit_val_batches": 0}
    given: dict[str, Any] = {**quiet, "max_epochs": 1, **arguments, **ours, "use_distributed_sampler": False}
    trainer = Trainer(**given)
    if isinstance(trainer.strategy, DistributedStrategy):
        trainer.strategy.start_method = "spawn" if fork_obstacle(trainer.strategy.device.type) else "fork"
    trainer.fit(learner, _ShardedBatches(batches, trainer))
    if isinstance(recorder, _Compared) and len(recorder.errors) < 2:
        raise RuntimeError(
            f"{strategy!r} ran no optimizer step, so there is nothing to compare. Check that training_step returns a "
            "loss, and that no Trainer argument passed to verify switches training off, as limit_train_batches=0 does."
        )


def _same_batches(loader: Iterable[Any], count: int) -> list[Any]:
    """Return the first ``count`` batches of a loader, in several passes if it has fewer."""
    found: list[Any] = []
    epoch = 0
    while len(found) < count:
        seed_shuffling(loader, _SEED, epoch)
        before = len(found)
        for batch in loader:
            found.append(batch)
            if len(found) == count:
                break
        if len(found) == before:
            raise ValueError(
                f"verify needs {count} batches, but the loader yielded only {before}. Pass a loader that can be read "
                "several times."
            )
        epoch += 1
    release_shuffling(loader)
    return found


def _double(module: TrainingModule) -> TrainingModule:
    return convert(copy.deepcopy(module), torch.float64)


def _exactly(tensor: Tensor) -> Tensor:
    return tensor.to(in_dtype(tensor.dtype, torch.float64))


class _ShardedBatches:
    """Yields this process's shard of each batch."""

    def __init__(self, batches: Iterable[Any], trainer: Trainer) -> None:
        self.batches = list(batches)
        self.trainer = trainer

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        strategy = self.trainer.strategy
        rank, count = strategy.data_rank, strategy.num_data_ranks
        for batch in self.batches:
            yield pytree.tree_map_only(Tensor, lambda tensor: _slice(tensor, rank, count), batch)


def _slice(tensor: Tensor, rank: int, count: int) -> Tensor:
    if tensor.dim() == 0:
        return tensor
    size, rest = divmod(len(tensor), count)
    if rest:
        raise ValueError(
            f"verify splits every batch across {count} processes, but the size of one batch is {len(tensor)}. Choose a "
            f"batch_size divisible by {count}, and set drop_last=True."
        )
    return tensor[rank * size : (rank + 1) * size]


class _Exact(Callback):
    """Saves the parameters to a file after each update."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.look(0, trainer.strategy.model_state(pl_module), trainer.is_global_zero)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.state.stepped:
            self.look(trainer.state.updates, trainer.strategy.model_state(pl_module), trainer.is_global_zero)

    def look(self, step: int, state: dict[str, Any], first: bool) -> None:
        """Record the parameters after an update; every process must call this."""
        torch.save(state, self.folder / f"{step}.pt")


class _Compared(_Exact):
    """Compares the parameters after each update with the saved ones."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.errors: list[dict[str, float]] = []
        self.norms: dict[str, float] = {}

    def look(self, step: int, state: dict[str, Any], first: bool) -> None:
        if not first:
            return
        exact = torch.load(self.folder / f"{step}.pt", weights_only=True, map_location="cpu")
        kinds = (torch.float64, torch.complex128)
        exact = {name: one for name, value in exact.items() if (one := _exactly(value)).dtype in kinds}
        for name, value in exact.items():
            self.norms[name] = max(self.norms.get(name, 1e-12), float(value.norm()))
        off = {name: float((_exactly(state[name].detach().cpu()) - value).norm()) for name, value in exact.items()}
        self.errors.append({name: error / self.norms[name] for name, error in off.items()})

    def last(self) -> float:
        """The largest error after the last update."""
        return max(self.errors[-1].values())

    def departs(self, rounding: _Compared, tolerance: float) -> tuple[int | None, str]:
        """The first step after which a parameter differs by more than rounding error, and the parameter's name."""
        allowed = tolerance
        for step, (mine, usual) in enumerate(zip(self.errors, rounding.errors, strict=True)):
            allowed = max(allowed, _FACTOR * max(usual.values()))
            worst = max(mine, key=lambda name: mine[name])
            if not mine[worst] <= allowed:
                return step, worst
        return None, ""

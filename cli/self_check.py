"""The checks that ``paceline test`` runs in each process, to find out whether training works as configured."""

from __future__ import annotations

import copy
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from .. import messages
from ..accelerator.accelerator import Accelerator

#: Largest allowed relative deviation from a single process in float32, by precision.
TOLERANCE = {"no": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
_EPOCHS = 4
_SAMPLES = 23


def main() -> int:
    """Run all checks and return the exit status. Rank 0 prints the results."""
    accelerator = Accelerator()
    for name, check in CHECKS.items():
        try:
            problem = "; ".join(check(accelerator))
        except Exception as error:
            messages.error(f"paceline test: rank {accelerator.process_index} raised an error in this check: {name}.")
            raise SystemExit(_told(error)) from error
        found = accelerator.strategy.gather_objects(problem)
        wrong = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text]
        if wrong:
            if accelerator.is_main_process:
                messages.error(f"paceline test: this check failed: {name} ({'; '.join(wrong)}).")
            return 1
        if accelerator.is_main_process:
            messages.answer(f"ok  {name}")
    if accelerator.is_main_process:
        messages.answer(
            f"All checks passed: {accelerator.num_processes} process"
            f"{'es' * (accelerator.num_processes > 1)} on {accelerator.device.type}, "
            f"{type(accelerator.strategy).__name__}, mixed_precision={accelerator.mixed_precision}."
        )
    return 0


def _told(error: Exception) -> int:
    sys.excepthook(type(error), error, error.__traceback__)
    return 1


def check_group(accelerator: Accelerator) -> Iterable[str]:
    """Check that every process is in the process group exactly once, and that no two processes share a GPU."""
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != asked:
        yield f"{asked} processes were started, but the group has {accelerator.num_processes}"
    here = accelerator.process_index, socket.gethostname(), str(accelerator.device)
    found = accelerator.strategy.gather_objects(here)
    if [rank for rank, _, _ in found] != list(range(asked)):
        yield f"the ranks are {[rank for rank, _, _ in found]}"
    devices = [(host, device) for _, host, device in found]
    if accelerator.device.type == "cuda" and len(set(devices)) < len(devices):
        yield f"processes share a GPU: {devices}"


def check_collectives(accelerator: Accelerator) -> Iterable[str]:
    """Check that reductions, gathered tensors and broadcast objects are correct."""
    strategy, count = accelerator.strategy, accelerator.num_processes
    mine = torch.arange(3.0, device=accelerator.device) + accelerator.process_index
    every = [torch.arange(3.0) + rank for rank in range(count)]
    expected = {"sum": sum(every), "mean": sum(every) / count, "max": every[-1]}
    for op, right in expected.items():
        got = strategy.reduce(mine, op).cpu()  # type: ignore[reportArgumentType]
        if not torch.allclose(got, torch.as_tensor(right)):
            yield f"reduce({op}) gave {got.tolist()} instead of {torch.as_tensor(right).tolist()}"
    gathered = accelerator.gather(mine).cpu()
    if not torch.equal(gathered, torch.cat(every)):
        yield f"gather gave {gathered.tolist()} instead of {torch.cat(every).tolist()}"
    if strategy.broadcast(f"from {accelerator.process_index}") != "from 0":
        yield "broadcast did not return rank 0's object"


def check_data(accelerator: Accelerator) -> Iterable[str]:
    """Check that an epoch contains every sample, and that gather_for_metrics returns each sample once, in order."""
    samples = torch.arange(_SAMPLES)
    size = 2 * _ranks_of_a_batch(accelerator)
    shuffled = accelerator.prepare(DataLoader(TensorDataset(samples), size, shuffle=True))
    mine = [number for (batch,) in shuffled for number in batch.tolist()]
    seen = sorted({number for part in accelerator.strategy.gather_objects(mine) for number in part})
    if seen != samples.tolist():
        yield f"a shuffled epoch left out the samples {sorted(set(samples.tolist()) - set(seen))}"
    ordered = accelerator.prepare(DataLoader(TensorDataset(samples), size))
    gathered = [number for (batch,) in ordered for number in accelerator.gather_for_metrics(batch).tolist()]
    if gathered != samples.tolist():
        yield f"gather_for_metrics returned {gathered} instead of each number from 0 to {_SAMPLES - 1} once"


def check_training(accelerator: Accelerator) -> Iterable[str]:
    """Check that a few updates result in the same weights as plain PyTorch in a single process on all the data."""
    x, y, model = _task(accelerator)
    alone = copy.deepcopy(model)
    trained = _train(accelerator, model, x, y)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(_EPOCHS):
        optimizer.zero_grad()
        nn.functional.mse_loss(alone(x), y).backward()
        optimizer.step()
    right, got = alone(x).detach(), _outputs(accelerator, trained, x)
    off = ((got - right).norm() / right.norm()).item()
    allowed = TOLERANCE.get(accelerator.mixed_precision, TOLERANCE["fp16"])
    if not off <= allowed:
        yield f"the trained model's outputs differ by {off:.1e} from those of a single process (allowed: {allowed:.0e})"


def check_checkpoint(accelerator: Accelerator) -> Iterable[str]:
    """Check that outputs are bit-identical after loading a saved state."""
    x, y, model = _task(accelerator)
    trained = _train(accelerator, model, x, y)
    before = _outputs(accelerator, trained, x)
    here = (
        Path(tempfile.gettempdir()) if accelerator.strategy.num_nodes == 1 else Path.cwd()
    )  # a folder that all machines can access
    folder = here / f"paceline_test_{accelerator.strategy.broadcast(os.getpid())}"
    try:
        accelerator.save_state(str(folder))
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.zero_()
        accelerator.load_state(str(folder))
        if not torch.equal(_outputs(accelerator, trained, x), before):
            yield f"the model's outputs changed after load_state from {folder}"
    finally:
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)


CHECKS: dict[str, Callable[[Accelerator], Iterable[str]]] = {
    "the processes form one group": check_group,
    "collectives are correct": check_collectives,
    "each sample is seen once": check_data,
    "training matches one process": check_training,
    "a saved state is restored": check_checkpoint,
}


def _ranks_of_a_batch(accelerator: Accelerator) -> int:
    """Return the number of data ranks that share a loader's batch: all data ranks with split_batches, otherwise 1."""
    return accelerator.strategy.num_data_ranks if accelerator.dataloader_config.split_batches else 1


def _task(accelerator: Accelerator) -> tuple[Tensor, Tensor, nn.Module]:
    """Return inputs, targets and a model, which are identical on all ranks; there are 8 samples for each data rank."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * accelerator.strategy.num_data_ranks, 8, generator=generator)
    torch.manual_seed(2)
    return x, x.sum(1, keepdim=True), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def _train(accelerator: Accelerator, model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(x, y), 8 * _ranks_of_a_batch(accelerator), shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(_EPOCHS):
        for batch, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(batch), targets))
                optimizer.step()
                optimizer.zero_grad()
    return model


def _outputs(accelerator: Accelerator, model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x.to(accelerator.device)).float().cpu()


if __name__ == "__main__":
    sys.exit(main())

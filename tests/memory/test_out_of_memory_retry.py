"""What is said when memory runs out."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from rank_processes import ranks
from tiny import TinyModule, tiny_loader

from paceline import Accelerator, Trainer, Tuner, find_executable_batch_size, messages, seed_everything
from paceline.memory import joint_retry
from paceline.memory.out_of_memory_error import TRAINER, Situation, _advice, measure
from paceline.memory.out_of_memory_retry import is_out_of_memory
from paceline.strategies import SingleDevice


class Hungry(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of torch's words")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.empty(1 << 60)


def test_b14_running_out_of_memory_says_where_and_what_to_try_with_numbers(quiet: dict[str, Any]) -> None:
    trainer = Trainer(**quiet, max_epochs=1, accumulate_grad_batches=3)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit(Hungry(), tiny_loader(batch_size=8))
    said = str(caught.value)
    assert "train, epoch 0, batch 1, step 0, batch size 8" in said
    assert "Tried to allocate 2.00 GiB." in said
    assert "weights take 20 bytes, gradients 20 bytes and optimizer state 0 bytes" in said
    assert "(1) batch_size=4 with accumulate_grad_batches=6, which keeps the updates the same (saves up to" in said
    assert "(2) precision='bf16-mixed', which keeps activations in 16 bits (saves up to" in said
    assert "(3) activation checkpointing" in said
    # Of 20 bytes of weights and as many of gradients the other process holds a half.
    assert (
        "(4) strategy='fsdp' with devices=2: each process holds 1/2 of weights, gradients and optimizer state" in said
    )
    assert "(saves 20 bytes)" in said
    assert "More of torch's words" in str(caught.value.__cause__)


def test_a_real_allocation_that_fails_on_the_cpu_is_explained(quiet: dict[str, Any]) -> None:
    found = r"The cpu device of rank 0 is out of memory \(validate, batch size 2.*\(1\) batch_size=1 \(saves"
    with pytest.raises(RuntimeError, match=found):
        Trainer(**quiet).validate(Hungry(), tiny_loader())


def test_the_sizes_are_those_of_weights_gradients_and_state_and_the_gpu_is_told_to_offload() -> None:
    layer = torch.nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    sizes = measure([layer], [optimizer], torch.device("cpu"))
    assert (sizes.weights, sizes.gradients, sizes.optimizer) == (4_000_000, 4_000_000, 8_000_004)
    strategy = SingleDevice()
    strategy.device = torch.device("meta")  # a device that is not the host
    now = Situation(TRAINER, "here", strategy, [layer], [optimizer], 8, 1, True)
    advice = list(_advice(now, sizes._replace(weights=2**30, gradients=2**30, optimizer=2**31, highest=2**33)))
    assert [one.rpartition("(saves ")[2] for one in advice] == [
        "up to 2 GiB)",  # half of the 4 GiB that are neither of the three
        "up to 2 GiB)",
        "most of 4 GiB)",
        "2 GiB)",  # half of the 4 GiB that are
        "up to 4 GiB)",
    ]
    assert "FSDPStrategy(cpu_offload=True)" in advice[-1]


class Greedy(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.empty(1 << 60)


class Failing(torch.nn.Linear):
    def __init__(self, where: str) -> None:
        super().__init__(4, 1)
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.where == "forward":
            torch.empty(1 << 60)
        return Greedy.apply(y) if self.where == "backward" else y  # type: ignore[return-value]


class HungryOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        torch.empty(1 << 60)


@pytest.mark.parametrize("where", ["forward", "forward in accumulate", "backward", "step"])
def test_a_loop_of_ones_own_gets_the_words_of_an_accelerator_once(where: str) -> None:
    precision = "bf16" if where == "forward" else "no"
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = Failing(where.partition(" ")[0])
    kind = HungryOptimizer if where == "step" else torch.optim.SGD
    loader = torch.utils.data.DataLoader(torch.ones(8, 4), 4)
    model, optimizer, loader = accelerator.prepare(model, kind(model.parameters(), lr=0.1), loader)

    def train() -> None:
        for batch in loader:
            with accelerator.accumulate(model) if "accumulate" in where or where == "step" else nullcontext():
                accelerator.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(RuntimeError, match="out of memory") as caught:
        train()
    said = str(caught.value)
    assert said.count("Try, in this order") == 1
    assert "batch size 4" in said
    assert "(1) batch_size=2 with gradient_accumulation_steps=4" in said
    assert ("mixed_precision='bf16'" in said) is (precision == "no")
    assert "Accelerator(strategy='fsdp') on 2 processes" in said
    assert "you tried to allocate" in str(caught.value.__cause__)


def test_an_error_that_nothing_of_ours_can_catch_is_answered_when_it_ends_the_program() -> None:
    program = (
        "import torch; from paceline import Accelerator\n"
        "class Hungry(torch.nn.Linear):\n"
        "    def forward(self, x): return torch.empty(1 << 60)\n"
        "accelerator = Accelerator(cpu=True); model = accelerator.prepare(Hungry(4, 1)); model(torch.ones(1, 4))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Hungry" not in done.stderr.splitlines()[-1]
    assert "weights take 20 bytes" in done.stderr.splitlines()[-1]
    assert done.stderr.count("Try, in this order") == 1


def test_the_batch_size_is_halved_until_it_fits_and_an_update_learns_from_as_many_samples() -> None:
    tried: list[tuple[int, int]] = []

    @find_executable_batch_size(starting_batch_size=48)
    def train(batch_size: int, word: str, accumulate_grad_batches: int) -> str:
        tried.append((batch_size, accumulate_grad_batches))
        if batch_size > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return word

    assert train("done") == "done"
    assert tried == [(48, 1), (24, 2), (12, 4), (6, 8)]


SAID = [
    torch.OutOfMemoryError("Allocation on device"),
    RuntimeError("CUDA out of memory."),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory"),
    torch.AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`", 2),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if ..."),
    RuntimeError("CUDNN_STATUS_NOT_SUPPORTED."),
    RuntimeError("NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'"),
    RuntimeError("XPU out of memory."),
    RuntimeError("HIP out of memory."),
    RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
]


@pytest.mark.parametrize("error", SAID, ids=range(len(SAID)))
def test_every_text_of_an_end_of_memory_is_known_at_all_doors(error: RuntimeError, quiet: dict[str, Any]) -> None:
    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> int:
        if batch_size > 4:
            raise error
        return batch_size

    class Raises(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > 4:
                raise error
            return super().training_step(batch, batch_idx)

    assert train() == 4
    trainer = Trainer(**quiet, max_steps=1)
    assert Tuner(trainer).scale_batch_size(Raises(), tiny_loader(batch_size=8), init_val=8, max_trials=2) == 4
    with pytest.raises(RuntimeError, match=r"The cpu device of rank 0 is out of memory .*\(1\) batch_size=4") as caught:
        trainer.fit(Raises(), tiny_loader(batch_size=8))
    assert isinstance(caught.value, torch.OutOfMemoryError) == isinstance(error, torch.OutOfMemoryError)


@pytest.mark.parametrize("error", [ValueError("CUDA out of memory."), RuntimeError("2 ran out of memory")], ids=str)
def test_other_errors_are_no_end_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_sizes_shrink_by_a_given_factor_and_only_to_those_that_divide_where_gradients_are_accumulated() -> None:
    sizes: list[int] = []

    def train(batch_size: int, gradient_accumulation_steps: int = 0) -> None:
        assert batch_size * gradient_accumulation_steps == 20
        sizes.append(batch_size)
        torch.empty(1 << 60)

    with pytest.raises(RuntimeError, match=r"train\(\) runs out of memory with every batch size from 20 down to 1 \("):
        find_executable_batch_size(train, 20, factor=0.9)()
    assert sizes == [20, 10, 5, 4, 2, 1]

    def plain(batch_size: int) -> int:
        return batch_size if batch_size < 90 else torch.empty(1 << 60).numel()

    assert find_executable_batch_size(plain, 100, factor=0.9)() == 81
    assert find_executable_batch_size(plain, 100, reduce_batch_size_fn=lambda: 7)() == 7


def test_other_errors_are_raised_as_they_are_and_wrong_arguments_are_refused() -> None:
    def broken(batch_size: int) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        find_executable_batch_size(broken)()
    with pytest.raises(TypeError, match=r"takes no arguments.*<lambda>\(batch_size\)"):
        find_executable_batch_size(lambda: None)
    with pytest.raises(ValueError, match=r"factor=1\.5"):
        find_executable_batch_size(broken, factor=1.5)


def test_the_sizes_that_were_tried_are_told_in_one_message(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="paceline")

    def train(batch_size: int, accumulate_grad_batches: int) -> None:
        if batch_size > 16:
            torch.empty(1 << 60)

    find_executable_batch_size(train, 64)()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "train(): 64 ran out of memory; 32 ran out of memory; 16 worked. Using 16, with" in said[0]
    assert "accumulate_grad_batches=4, for 64 samples per update" in said[0]


# ---- several processes -----------------------------------------------------------------------------------------------


def uneven(limits: tuple[int, int], steps: tuple[int, int] | None = None) -> tuple[int, list[int]]:
    """A search on ranks of which each has its own limit; returns the size that it ended with, and those it saw."""
    torch.distributed.init_process_group("gloo")
    rank, sizes = torch.distributed.get_rank(), []

    def train(batch_size: int) -> int:
        sizes.append(batch_size)
        if batch_size > limits[rank]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch_size

    smaller = None if steps is None else lambda: sizes[-1] - steps[rank]
    return find_executable_batch_size(train, 64, reduce_batch_size_fn=smaller)(), sizes


def test_u20_ranks_with_different_limits_go_down_together() -> None:
    assert ranks(2, uneven, (64, 10)) == [(8, [64, 32, 16, 8])] * 2
    assert ranks(3, uneven, (20, 64, 64)) == [(16, [64, 32, 16])] * 3
    assert ranks(2, uneven, (40, 64), (10, 1)) == [(34, [64, 54, 44, 34])] * 2  # rank 0's function counts


def wrong_on_rank_1() -> str:
    torch.distributed.init_process_group("gloo")

    def train(batch_size: int) -> None:
        if torch.distributed.get_rank() == 1:
            raise KeyError("mine")

    with pytest.raises((RuntimeError, KeyError)) as caught:
        find_executable_batch_size(train)()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_an_error_of_one_rank_ends_the_search_of_all() -> None:
    first, second = ranks(2, wrong_on_rank_1)
    assert "failed on rank 1, so rank 0 cannot continue alone" in first
    assert "KeyError: 'mine'" in first
    assert second == "KeyError: 'mine'"


class HungryOnRank1(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_rank == 1 and batch_idx == 1 and len(batch[0]) > 4:
            torch.empty(1 << 60)
        return super().training_step(batch, batch_idx)


def train_with_ddp(strategy: str) -> tuple[int, list[int], list[float]]:
    joint_retry.GRACE_SECONDS = 0.5
    sizes: list[int] = []

    def train(batch_size: int) -> tuple[int, list[float]]:
        sizes.append(batch_size)
        seed_everything(1)
        module = HungryOnRank1()
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(module, tiny_loader(64, batch_size=batch_size))
        weights = [getattr(p, "full_tensor", lambda p=p: p)().flatten().tolist() for p in module.parameters()]
        return trainer.global_step, [value for part in weights for value in part]

    said: list[str] = []
    messages.info = said.append
    steps, weights = find_executable_batch_size(train, 16)()
    assert "16 ran out of memory on rank 1; 8 ran out of memory on rank 1; 4 worked" in said[-1]
    return steps, sizes, weights


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_u20_a_rank_that_waits_in_a_collective_for_one_that_ran_out_is_released(strategy: str) -> None:
    first, second = ranks(2, train_with_ddp, strategy)
    assert first == second
    assert first[0] > 1
    assert first[1] == [16, 8, 4]

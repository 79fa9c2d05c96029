"""What is said when memory runs out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader

from paceline import Trainer, find_executable_batch_size


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
    assert "train, epoch 0, batch 1, step 0, 8 samples in the batch" in said
    assert "Tried to allocate 2.00 GiB." in said
    assert "batch_size=4 and accumulate_grad_batches=6" in said
    assert "precision='bf16-mixed'" in said
    assert "strategy='fsdp' with devices=2" in said
    assert "More of torch's words" in str(caught.value.__cause__)


def test_a_real_allocation_that_fails_on_the_cpu_is_explained(quiet: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"The cpu of rank 0 is out of memory \(validate, 2 samples.*batch_size=1;"):
        Trainer(**quiet).validate(Hungry(), tiny_loader())


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


def test_sizes_shrink_by_a_given_factor_and_only_to_those_that_divide_where_gradients_are_accumulated() -> None:
    sizes: list[int] = []

    def train(batch_size: int, gradient_accumulation_steps: int = 0) -> None:
        assert batch_size * gradient_accumulation_steps == 20
        sizes.append(batch_size)
        torch.empty(1 << 60)

    with pytest.raises(
        RuntimeError, match=r"train\(\) runs out of memory with a batch of 1 samples too, from 20 on down"
    ):
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
    with pytest.raises(TypeError, match=r"takes no argument.*<lambda>\(batch_size\)"):
        find_executable_batch_size(lambda: None)
    with pytest.raises(ValueError, match=r"factor=1\.5"):
        find_executable_batch_size(broken, factor=1.5)

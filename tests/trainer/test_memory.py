"""What is said when memory runs out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import TinyModule, tiny_loader

from paceline import Trainer


class Hungry(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of torch's words")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.empty(1 << 60)


def test_running_out_of_memory_says_where_and_what_to_try_with_numbers(quiet: dict[str, Any]) -> None:
    trainer = Trainer(**quiet, max_epochs=1, accumulate_grad_batches=3)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit(Hungry(), tiny_loader(batch_size=8))
    said = str(caught.value)
    assert "train, epoch 0, batch 1, step 1, 8 samples in the batch" in said
    assert "Tried to allocate 2.00 GiB." in said
    assert "batch_size=4 and accumulate_grad_batches=6" in said
    assert "precision='bf16-mixed'" in said
    assert "strategy='fsdp' with devices=2" in said
    assert "More of torch's words" in str(caught.value.__cause__)


def test_a_real_allocation_that_fails_on_the_cpu_is_explained(quiet: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"The cpu of rank 0 is out of memory \(validate, 2 samples.*batch_size=1;"):
        Trainer(**quiet).validate(Hungry(), tiny_loader())

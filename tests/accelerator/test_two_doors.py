"""A Trainer and an Accelerator's loop over one machine room: the same numbers to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from own_loop import data, loss_of, network, whole_weights
from rank_processes import ranks
from torch import Tensor
from torch.utils.data import DataLoader

from paceline import Trainer, TrainingModule
from paceline.accelerator.accelerator import Accelerator

SILENT = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Net(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(torch.float32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def by_trainer(strategy: str, precision: str, accumulate: int) -> Any:
    module = Net()
    torch.manual_seed(5)
    trainer = Trainer(
        **SILENT,
        accelerator="cpu",
        strategy=strategy,
        precision={"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[precision],
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.7,
        max_epochs=2,
    )
    trainer.fit(module, DataLoader(data(26, torch.float32), 4 // trainer.world_size, shuffle=True))
    state = trainer.strategy.model_state(module)
    return torch.cat([value.reshape(-1) for value in state.values()]) if trainer.is_global_zero else None


def by_hand(strategy: str, precision: str, accumulate: int) -> Any:
    model = network(torch.float32)
    torch.manual_seed(5)
    accelerator = Accelerator(
        cpu=True,
        strategy=strategy,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulate,
        output_dtype="keep",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    loader = DataLoader(data(26, torch.float32), 4 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model), accelerator.autocast():
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.7)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return whole_weights(accelerator, model)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_b16_both_doors_train_to_the_same_bits(precision: str, accumulate: int) -> None:
    assert torch.equal(by_trainer("auto", precision, accumulate), by_hand("auto", precision, accumulate))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_b16_both_doors_train_to_the_same_bits_on_two_processes(strategy: str) -> None:
    for accumulate in (1, 3):
        found = [ranks(2, door, strategy, "no", accumulate)[0] for door in (by_trainer, by_hand)]
        assert torch.equal(*found)

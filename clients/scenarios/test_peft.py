"""peft: LoRA with a Trainer (also on quantized weights), with trl, and in a loop with an Accelerator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import datasets
import peft
import pytest
import tiny
import torch
import transformers
import trl

SHARDED = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["GPT2Block"]}}


def adapted() -> Any:
    """Return the language model with adapters."""
    return peft.get_peft_model(tiny.language_model(), lora())


def lora() -> peft.LoraConfig:
    """Return the configuration of adapters of rank 4, with dropout."""
    return peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True
    )


@pytest.mark.parametrize(
    ("more", "processes"), [({}, 1), ({}, 2), (SHARDED, 2)], ids=["1 process", "2 processes", "sharded"]
)
def test_trainer(record_losses: Callable[..., None], more: dict[str, Any], processes: int) -> None:
    def train(folder: Path) -> list[float]:
        losses, arguments = tiny.Losses(), transformers.TrainingArguments(**tiny.settings(folder, **more))
        run = transformers.Trainer(adapted(), arguments, train_dataset=tiny.tokens(64), callbacks=[losses])
        run.train()
        return losses.seen

    record_losses(train, processes)


@pytest.mark.parametrize(
    ("quantization", "more"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, {}),
        ({"load_in_8bit": True}, {"optim": "adamw_bnb_8bit"}),
    ],
    ids=["4 bits", "8 bits"],
)
def test_quantized(record_losses: Callable[..., None], quantization: dict[str, Any], more: dict[str, Any]) -> None:
    def train(folder: Path) -> list[float]:
        tiny.language_model().save_pretrained(folder / "whole")
        config = transformers.BitsAndBytesConfig(**quantization)
        loaded = {"quantization_config": config, "device_map": "cpu"}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "whole", **loaded)
        model = peft.get_peft_model(peft.prepare_model_for_kbit_training(model), lora())
        losses, arguments = tiny.Losses(), transformers.TrainingArguments(**tiny.settings(folder, **more))
        run = transformers.Trainer(model, arguments, train_dataset=tiny.tokens(64), callbacks=[losses])
        run.train()
        return losses.seen

    record_losses(train)


def test_fine_tuning(record_losses: Callable[..., None]) -> None:
    def train(folder: Path) -> list[float]:
        losses, arguments = tiny.Losses(), trl.SFTConfig(max_length=16, **tiny.settings(folder))
        data = {"train_dataset": datasets.Dataset.from_dict({"text": tiny.sentences(64)})}
        data["processing_class"] = tiny.tokenizer()
        model, args = tiny.language_model(), arguments
        trl.SFTTrainer(model=model, args=args, peft_config=lora(), callbacks=[losses], **data).train()
        return losses.seen

    record_losses(train)


@pytest.mark.parametrize("processes", [1, 2])
def test_own_loop(record_losses: Callable[..., None], processes: int) -> None:
    def train(folder: Path) -> list[float]:
        accelerator = accelerate.Accelerator(cpu=True)
        accelerate.utils.set_seed(tiny.SEED)
        model, seen = adapted(), []
        loader = torch.utils.data.DataLoader(tiny.tokens(64).with_format("torch"), batch_size=4, shuffle=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        model, loader, optimizer = accelerator.prepare(model, loader, optimizer)
        for _ in range(2):
            model.train()
            for batch in loader:
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
        accelerator.wait_for_everyone()
        place = folder / "adapter"
        saved = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
        accelerator.unwrap_model(model).save_pretrained(place, **saved)
        accelerator.wait_for_everyone()
        again = peft.PeftModel.from_pretrained(tiny.language_model(), place).eval()
        inputs = torch.arange(4, 16).reshape(1, -1)
        return [*seen, again(input_ids=inputs, labels=inputs).loss.item()]

    record_losses(train, processes)

"""transformers.Trainer on Paceline, next to a hand-written loop; prints what it found as JSON for test_compat.py."""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from paceline import compat

compat.install("accelerate")

import torch  # noqa: E402
from rank_processes import ranks  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

FOLDER = Path(sys.argv[1])
RATE, ROWS, STEPS = 0.05, 4, 2


class Texts(Dataset[Any]):
    """Sequences of 6 tokens, of which different numbers count."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 16, (count, 6), generator=generator)
        self.labels = self.tokens.clone()
        for row, length in enumerate(torch.randint(0, 5, (count,), generator=generator)):
            self.labels[row, :length] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def model(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, attention_dropout=dropout))


def trainer(network: Any, name: str, seen: list[Any] | None = None, **more: Any) -> Trainer:
    def collate(rows: list[Any]) -> Any:
        batch = stacked(rows)
        if seen is not None and network.training:
            seen.append(copy.deepcopy(batch))
        return batch

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = TrainingArguments(
        str(FOLDER / name),
        per_device_train_batch_size=ROWS // processes,
        per_device_eval_batch_size=ROWS // processes,
        gradient_accumulation_steps=STEPS,
        num_train_epochs=2,
        max_grad_norm=0.5,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **more,
    )
    data = network, arguments, collate, Texts(18, 1), Texts(10, 2)
    if "learning_rate" in more:  # transformers makes the optimizer, as it wants to for FSDP
        return Trainer(*data)
    optimizer = torch.optim.SGD(network.parameters(), RATE, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return Trainer(*data, optimizers=(optimizer, schedule))


def by_hand(network: Any, batches: list[Any]) -> int:
    """The same steps over the same batches, windows ending with each epoch; the number of steps."""
    optimizer = torch.optim.SGD(network.parameters(), RATE, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    network.train()
    taken, epoch = 0, math.ceil(18 / ROWS)
    for start in range(0, len(batches), epoch):
        for first in range(start, start + epoch, STEPS):
            window = batches[first : min(first + STEPS, start + epoch)]
            items = sum((batch["labels"][:, 1:] != -100).sum() for batch in window)
            for batch in window:
                network(**batch, num_items_in_batch=items).loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            taken += 1
    return taken


def evaluated(network: Any) -> float:
    """The mean over batches of their losses, each counted as often as it has rows."""
    network.eval()
    data, total = Texts(10, 2), 0.0
    with torch.no_grad():
        for start in range(0, 10, ROWS):
            rows = [data[i] for i in range(start, min(start + ROWS, 10))]
            total += network(**stacked(rows)).loss.item() * len(rows)
    return total / 10


def spread() -> tuple[list[Any], float]:
    """Weights and evaluation loss of a training in sequence, on as many processes as there are.

    The last batch of the evaluation has 3 samples, with different numbers of tokens.
    """
    network = model()
    run = trainer(network, "spread", save_strategy="no", train_sampling_strategy="sequential")
    run.train()
    return [parameter.tolist() for parameter in network.parameters()], run.evaluate(Texts(11, 2))["eval_loss"]


def sharded(fsdp: bool, resume: bool) -> list[Any]:
    """Whole weights of a training with AdamW, in sequence."""
    more: dict[str, Any] = {"learning_rate": 0.05, "train_sampling_strategy": "sequential", "save_steps": 2}
    if fsdp:
        more["fsdp"], more["fsdp_config"] = True, {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    folder = f"sharded{fsdp}"
    run = trainer(model(), folder, **more)
    run.train(resume_from_checkpoint=str(FOLDER / folder / "checkpoint-2") if resume else None)
    state: dict[str, Any] = run.accelerator.get_state_dict(run.model)
    return [value.tolist() for value in state.values()]


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def main() -> None:
    import accelerate

    network, seen = model(), []
    expected = copy.deepcopy(network)
    run = trainer(network, "plain", seen, save_strategy="no")
    run.train()
    taken = by_hand(expected, seen)
    whole, resumed = model(0.2), model(0.2)
    trainer(whole, "whole", save_steps=2).train()
    trainer(resumed, "whole", save_strategy="no").train(resume_from_checkpoint=str(FOLDER / "whole" / "checkpoint-2"))
    evaluation = [run.evaluate()["eval_loss"], evaluated(network)]
    rows = len(run.predict(Texts(10, 2)).predictions)
    one, two = spread(), ranks(2, spread)
    alone, shards, again = sharded(False, False), *(ranks(2, sharded, True, resume)[0] for resume in (False, True))
    pairs = [(torch.tensor(a), torch.tensor(b)) for part in two for a, b in zip(one[0], part[0], strict=True)]
    found = {
        "file": accelerate.__file__,
        "kind": type(run.accelerator).__mro__[2].__module__,
        "steps": [run.state.global_step, taken],
        "same": same(network, expected),
        "trained": not same(network, model()),
        "eval": evaluation,
        "rows": rows,
        "sharded_apart": max(
            (torch.tensor(a) - torch.tensor(b)).abs().max().item() for a, b in zip(alone, shards, strict=True)
        ),
        "sharded_resumed": shards == again,
        "apart": max((a - b).abs().max().item() for a, b in pairs),
        "eval_spread": [one[1], *(part[1] for part in two)],
        "resumed": same(whole, resumed),
        "differs": not same(whole, network),
        "real": [
            name
            for name in sys.modules
            if name.startswith("accelerate") and "compat" not in str(getattr(sys.modules[name], "__file__", ""))
        ],
    }
    sys.stdout.write("\nFOUND " + json.dumps(found) + "\n")


main()

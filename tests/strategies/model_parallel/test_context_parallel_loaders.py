"""Loaders that yield parts of sequences, with the numbers of full ones, as in loops written for DeepSpeed's Ulysses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_processes import ranks
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from paceline import Accelerator
from paceline.accelerator.parallelism_config import DeepSpeedSequenceParallelConfig, ParallelismConfig
from paceline.compat.accelerate.accelerator import Accelerator as StandIn
from paceline.strategies.model_parallel.context_parallel_loaders import SplitBatches

WORDS, WIDTH, LENGTH = 11, 8, 6


class Language(nn.Module):
    """One block of causal attention, which is run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.mixed, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)
        self.double()

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(x).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.words(input_ids) + self.places(position_ids)
        return self.head(checkpoint(self.attend, x, use_reentrant=False))


def samples(count: int) -> list[dict[str, Tensor]]:
    lines = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    places, found = torch.arange(LENGTH), []
    for number, line in enumerate(lines):
        real = places < LENGTH - number % 3
        labels = line.where((line > 2) & real, -100)
        found.append({"input_ids": line, "position_ids": places, "labels": labels, "attention_mask": real.long()})
    return found


def loss_of(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The mean loss of the tokens that count, and their number."""
    following = batch["shift_labels"] if "shift_labels" in batch else F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    count = (following != -100).sum()
    return F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum") / count.clamp(min=1), count


def made(batch_size: int, **sizes: int) -> tuple[Accelerator, Any, Any, Any]:
    config = ParallelismConfig(**sizes) if sizes else None  # type: ignore[arg-type]
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    model = Language()
    loader = DataLoader(samples(12), batch_size, shuffle=True)  # type: ignore[arg-type]
    torch.manual_seed(3)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.01), loader)


def learned(folder: Path, batch_size: int, joined: bool, **sizes: int) -> Any:
    """The losses, the weights after a pass that was saved and resumed after its first batch, and evaluations."""
    accelerator, model, optimizer, batches = made(batch_size, **sizes)
    split, losses = bool(sizes), []
    for resumed in (False, True):
        if resumed:
            accelerator, model, optimizer, batches = made(batch_size, **sizes)
            accelerator.load_state(folder)
        for batch in batches:
            assert ("shift_labels" in batch, batch["input_ids"].shape[1]) == (split, LENGTH // 2 if split else LENGTH)
            loss, count = loss_of(model(batch["input_ids"], batch["position_ids"], batch["attention_mask"]), batch)
            if split and joined:
                group = accelerator.torch_device_mesh["sp"].get_group()
                given = all_gather(loss, group=group), all_gather(count, group=group)
                total = sum(one * number for one, number in zip(*given, strict=True))
                loss, count = total / sum(given[1]), sum(given[1])
                losses.append(loss.item())
            accelerator.backward(loss, num_items=count)
            losses += [] if split else [loss.item()]
            optimizer.step()
            optimizer.zero_grad()
            if not resumed:
                accelerator.save_state(folder)
                break
    model.eval()
    with torch.no_grad():
        reading = iter(batches)
        batch = next(reading)
        parts = accelerator.gather_for_metrics(model(batch["input_ids"], batch["position_ids"]).mean((1, 2)))
        line = samples(1)[0]
        whole = model(line["input_ids"][None], line["position_ids"][None])
    full = accelerator.get_state_dict(model)
    return (losses, {**full, "parts": parts.mean(), "whole": whole}) if accelerator.is_main_process else None


@pytest.mark.parametrize(
    ("processes", "joined", "sizes"),
    [
        pytest.param(2, True, {}),
        pytest.param(4, False, {"dp_shard_size": 2}),
    ],
)
def test_loaders_that_split_sequences_train_like_whole_ones(
    tmp_path: Path, processes: int, joined: bool, sizes: dict[str, int]
) -> None:
    found = ranks(processes, partial(learned, tmp_path / "split", 8 // processes, joined, sp_size=2, **sizes))[0]
    expected = learned(tmp_path / "whole", 4, joined)
    assert len(expected[0]) == 3
    torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-11)
    if joined:
        torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-12)


class Half:
    """The mesh of the second of two processes."""

    def size(self) -> int:
        return 2

    def get_local_rank(self) -> int:
        return 1


def test_a_batch_is_cut_with_the_labels_of_the_next_tokens() -> None:
    line = torch.arange(4)[None]
    batches = SplitBatches(Half(), "loader")  # type: ignore[arg-type]
    batch = {"input_ids": line, "position_ids": line, "labels": line + 5, "name": "a"}
    found = batches.cut(batch)
    assert {name: value if name == "name" else value.tolist() for name, value in found.items()} == {
        "input_ids": [[2, 3]],
        "position_ids": [[2, 3]],
        "shift_labels": [[8, -100]],
        "name": "a",
    }
    assert "labels" in batch
    for given, problem in (
        ((line, line), "needs batches with input_ids and position_ids, but the batch is a tuple"),
        ({"input_ids": line}, r"position_ids, but the batch has the keys \['input_ids'\]"),
        ({**batch, "weight": torch.ones(1)}, r"'weight' has shape \(1,\) and input_ids has 4 tokens"),
        ({"input_ids": line[:, :3], "position_ids": line[:, :3]}, "3 elements .'input_ids', dimension 1. cannot be"),
    ):
        with pytest.raises(ValueError, match=problem):
            batches.cut(given)


def test_forward_passes_with_gradients_need_a_batch_in_parts() -> None:
    line = torch.arange(4)[None]
    forward = SplitBatches(Half(), "loader").bind(torch.neg, training=True)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"Prepare the loader in the same call as the model.*torch\.no_grad"):
        forward(line)


def test_a_loader_that_was_prepared_alone_is_not_split_later() -> None:
    accelerator = StandIn(cpu=True)
    loader = accelerator.prepare(DataLoader([1]))  # type: ignore[arg-type]
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, None) is loader
    config = ParallelismConfig(sp_size=2, sp_handler=DeepSpeedSequenceParallelConfig())
    vars(accelerator.state)["parallelism_config"] = config
    with pytest.raises(NotImplementedError, match=r"Trainer does not work with .*sp_size=2.*use cp_size=2 instead"):
        accelerator.deepspeed_ulysses_dl_adapter(loader, None)

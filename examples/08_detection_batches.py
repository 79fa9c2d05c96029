"""Batches that are more than two tensors: each image has a dict of boxes and labels, as many as it has objects.

    python examples/08_detection_batches.py
    paceline launch --cpu --num_processes 2 examples/08_detection_batches.py --batch_size 4    # the same numbers
    tensorboard --logdir runs/detection

A loader's own ``collate_fn`` makes the batches; their tensors arrive on the device however deep they are nested. Losses
are means over boxes, of which each batch has another number: ``backward(loss, num_items=...)`` makes the gradient the
mean over all boxes of a window on all processes. The evaluation gathers a dict for each image.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline import Accelerator, set_seed

Target = dict[str, Tensor]

SIZE, CELLS, KINDS = 32, 8, 2


def shapes(count: int, seed: int) -> list[tuple[Tensor, Target]]:
    """Images of shape (1, 32, 32) with one to four frames or blocks.

    The boxes of an image have shape (objects, 4): x and y of the center, width and height, as parts of the image. Its
    labels have shape (objects,): 0 for a frame, 1 for a block.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    found = []
    for _ in range(count):
        image = 0.2 * torch.rand(1, SIZE, SIZE, generator=generator)
        boxes, labels = [], []
        for _ in range(draw(1, 5)):
            width, height, label = draw(6, 15), draw(6, 15), draw(0, KINDS)
            x, y = draw(0, SIZE - width), draw(0, SIZE - height)
            image[:, y : y + height, x : x + width] = 1.0
            if label == 0:
                image[:, y + 2 : y + height - 2, x + 2 : x + width - 2] = 0.0
            boxes.append([x + width / 2, y + height / 2, width, height])
            labels.append(label)
        found.append((image, {"boxes": torch.tensor(boxes) / SIZE, "labels": torch.tensor(labels)}))
    return found


def collate(samples: list[tuple[Tensor, Target]]) -> tuple[Tensor, list[Target]]:
    """A batch: images of shape (batch, 1, 32, 32), and the targets as they are, in a list."""
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), list(targets)


class Detector(nn.Module):
    """Says for each of 8 x 8 cells whether an object's center lies in it, of which kind, and what its box is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(32, 32, 7, padding=3),
            nn.SiLU(),
            nn.Conv2d(32, KINDS + 4, 1),
        )
        nn.init.constant_(self.layers[-1].bias[:KINDS], -3.0)  # most cells are empty

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Returns ``kinds``, logits of shape (batch, 64, 2), and ``boxes`` of shape (batch, 64, 4)."""
        cells = self.layers(images).flatten(2).transpose(1, 2)
        kinds, boxes = cells.split([KINDS, 4], dim=2)
        number = torch.arange(CELLS * CELLS, device=boxes.device)
        corners = torch.stack([number % CELLS, number // CELLS], dim=1)
        centers = (corners + boxes[..., :2].sigmoid()) / CELLS
        return {"kinds": kinds, "boxes": torch.cat([centers, boxes[..., 2:].sigmoid()], dim=2)}


def loss_of(outputs: dict[str, Tensor], targets: list[Target]) -> tuple[Tensor, int]:
    """The loss for each box, shape (), and how many boxes there are."""
    wanted = torch.zeros_like(outputs["kinds"])
    distance = outputs["boxes"].new_zeros(())
    for index, target in enumerate(targets):
        column, row = (target["boxes"][:, :2] * CELLS).long().unbind(dim=1)
        cells = row * CELLS + column
        wanted[index, cells, target["labels"]] = 1.0
        distance = distance + (outputs["boxes"][index, cells] - target["boxes"]).abs().sum()
    missed = nn.functional.binary_cross_entropy_with_logits(outputs["kinds"], wanted, reduction="sum")
    count = sum(len(target["labels"]) for target in targets)
    return (missed + 5 * distance) / count, count


def detections(outputs: dict[str, Tensor], targets: list[Target]) -> list[dict[str, Any]]:
    """For each image what was found and what is there."""
    found = []
    for scores, boxes, target in zip(outputs["kinds"].sigmoid(), outputs["boxes"], targets, strict=True):
        best, labels = scores.max(dim=1)
        sure = best > 0.5
        seen = {"boxes": boxes[sure].tolist(), "labels": labels[sure].tolist()}
        found.append({"seen": seen, "true": {name: value.tolist() for name, value in target.items()}})
    return found


def overlap(one: list[float], other: list[float]) -> float:
    """What two boxes have in common, as a part of what they cover together."""
    common = 1.0
    for axis in (0, 1):
        ends = min(box[axis] + box[axis + 2] / 2 for box in (one, other))
        begins = max(box[axis] - box[axis + 2] / 2 for box in (one, other))
        common *= max(ends - begins, 0.0)
    return common / (one[2] * one[3] + other[2] * other[3] - common)


def share_found(images: list[dict[str, Any]]) -> float:
    """How many of all objects were found: by a box of the right label that overlaps by more than half."""
    hits = [
        any(
            label == wanted and overlap(box, there) > 0.5
            for box, label in zip(image["seen"]["boxes"], image["seen"]["labels"], strict=True)
        )
        for image in images
        for there, wanted in zip(image["true"]["boxes"], image["true"]["labels"], strict=True)
    ]
    return sum(hits) / len(hits)


def train(batch_size: int, epochs: int, count: int, out: str) -> tuple[list[float], list[dict[str, Any]]]:
    """Train and test.

    Returns:
        The mean loss of each epoch over all boxes, and the last evaluation's detections for each image.
    """
    accelerator = Accelerator(gradient_accumulation_steps=2, log_with="tensorboard", project_dir=out)
    accelerator.init_trackers("boxes")
    set_seed(0)
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    learn = DataLoader(shapes(count, seed=1), batch_size=batch_size, shuffle=True, collate_fn=collate)
    test = DataLoader(shapes(49, seed=2), batch_size=batch_size, collate_fn=collate)
    model, optimizer, learn, test = accelerator.prepare(model, optimizer, learn, test)
    history: list[float] = []
    images: list[dict[str, Any]] = []
    for epoch in range(epochs):
        model.train()
        total = torch.zeros(2, device=accelerator.device)
        for pictures, targets in learn:
            with accelerator.accumulate(model):
                loss, boxes = loss_of(model(pictures), targets)
                accelerator.backward(loss, num_items=boxes)
                optimizer.step()
                optimizer.zero_grad()
            total += torch.stack([loss.detach() * boxes, torch.tensor(boxes, device=loss.device)])
        summed, boxes = accelerator.reduce(total, "sum").tolist()
        history.append(summed / boxes)
        model.eval()
        images = []
        with torch.inference_mode():
            for pictures, targets in test:
                found = detections(model(pictures), targets)
                images.extend(accelerator.gather_for_metrics(found, use_gather_object=True))
        accelerator.log({"loss": history[-1], "found": share_found(images)}, step=epoch)
        accelerator.print(f"epoch {epoch}: loss {history[-1]:.3f}, found {share_found(images):.0%} of the objects")
    accelerator.end_training()
    return history, images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=8, help="of each process")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", default="runs/detection")
    parser.add_argument("--fast", action="store_true", help="one epoch with few images, to see that it runs")
    args = parser.parse_args()
    train(args.batch_size, 1 if args.fast else args.epochs, 40 if args.fast else 1000, args.out)


if __name__ == "__main__":
    main()

"""What each strategy keeps on each of four ranks: weights, gradients, optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from canvas import Canvas, Color, Scheme

NAME = "placement"
RANKS = LAYERS = SLICES = 4
Share = Literal["all", "slice", "slice in machine", "layer", "none"]


@dataclass(frozen=True)
class Placement:
    """What one rank holds under a strategy.

    Attributes:
        title: what the strategy is called.
        written: how it is chosen.
        weights: the share of the weights on each rank.
        gradients: the same for the gradients when a backward pass has ended.
        optimizer: the same for the optimizer's state.
        exchange: what goes from rank to rank.
        on_host: which of the three are in the memory of the host.
        gathers: whether ranks gather a layer while it computes.
        ranks: how many there are.
        machines: how many machines they are on.
    """

    title: str
    written: str
    weights: Share
    gradients: Share
    optimizer: Share
    exchange: str
    on_host: frozenset[str] = frozenset()
    gathers: bool = False
    ranks: int = RANKS
    machines: int = 1


PLACEMENTS = (
    Placement("One process", "single_device", "all", "all", "all", "nothing is exchanged", ranks=1),
    Placement("Data parallel (DDP)", "ddp", "all", "all", "all", "gradients are averaged"),
    Placement("ZeRO-1", "deepspeed_stage_1", "all", "all", "slice", "gradients, then new weights"),
    Placement("ZeRO-2", "deepspeed_stage_2", "all", "slice", "slice", "gradients, then new weights"),
    Placement("FSDP (ZeRO-3)", "fsdp", "slice", "slice", "slice", "gathers the layer that computes", gathers=True),
    Placement(
        "FSDP on the host",
        "fsdp_cpu_offload",
        "slice",
        "slice",
        "slice",
        "the same, from host memory",
        frozenset({"weights", "gradients", "optimizer"}),
        gathers=True,
    ),
    Placement(
        "Hybrid sharding (HSDP)",
        "hybrid_shard",
        "slice in machine",
        "slice in machine",
        "slice in machine",
        "two machines; gathers within each",
        gathers=True,
        machines=2,
    ),
    Placement("Tensor parallel", "tensor_parallel=4", "slice", "slice", "slice", "each computes a part of each layer"),
    Placement("Pipeline", "pipeline_parallel=4", "layer", "layer", "layer", "activations go to the next rank"),
)
KINDS: tuple[tuple[str, Color], ...] = (("weights", "blue"), ("gradients", "violet"), ("optimizer", "teal"))
CELL_X, CELL_Y, APART = 10.7, 7.0, 14.0
PANEL_X, PANEL_Y, GUTTER = 244.0, 196.0, 13.0


def held(share: Share, rank: int) -> set[tuple[int, int]]:
    """The (layer, slice) pairs that a rank holds."""
    cells = [(layer, part) for layer in range(LAYERS) for part in range(SLICES)]
    mine = {
        "all": lambda layer, part: True,
        "slice": lambda layer, part: part == rank,
        "slice in machine": lambda layer, part: part // 2 == rank % 2,
        "layer": lambda layer, part: layer == rank,
        "none": lambda layer, part: False,
    }[share]
    return {cell for cell in cells if mine(*cell)}


def draw(scheme: Scheme) -> str:
    """The picture in one scheme."""
    rows = -(-len(PLACEMENTS) // 3)
    canvas = Canvas(
        scheme, 60 + rows * (PANEL_Y + GUTTER) - GUTTER + 2, "What each strategy keeps on each of four ranks"
    )
    _legend(canvas)
    for index, placement in enumerate(PLACEMENTS):
        _panel(canvas, placement, 1 + index % 3 * (PANEL_X + GUTTER), 60 + index // 3 * (PANEL_Y + GUTTER))
    return canvas.svg()


def _legend(canvas: Canvas) -> None:
    x = 2.0
    for words, (_, color) in zip(("weights", "gradients", "optimizer state"), KINDS, strict=True):
        canvas.rect(x, 3, 13, 13, color, radius=3)
        canvas.text(x + 19, 14, words)
        x += 40 + 7.4 * len(words)
    canvas.rect(x, 3, 13, 13, None, "ink", radius=3, thick=1.6)
    canvas.text(x + 19, 14, "in host memory")
    canvas.rect(x + 146, 3, 13, 13, "blue", radius=3, opacity=_faint(canvas))
    canvas.text(x + 165, 14, "gathered for a moment")
    canvas.text(
        2,
        41,
        "Ranks 0 to 3. Each block is a model of four layers (rows), each cut into four slices (columns).",
        13,
        "muted",
    )


def _faint(canvas: Canvas) -> float:
    return canvas.scheme.soft * 2.4


def _panel(canvas: Canvas, placement: Placement, x: float, y: float) -> None:
    canvas.rect(x, y, PANEL_X, PANEL_Y, "panel", "line", radius=8)
    canvas.text(x + 12, y + 22, placement.title, 13.5, bold=True)
    canvas.text(x + 12, y + 40, placement.written, 11.5, "muted", mono=True)
    size = SLICES * CELL_X
    for rank in range(placement.ranks):
        left = x + 15 + rank * (size + APART)
        canvas.text(left + size / 2, y + 64, str(rank), 11.5, "muted", "middle")
        for index, (kind, color) in enumerate(KINDS):
            _block(canvas, placement, kind, color, rank, left, y + 71 + index * (LAYERS * CELL_Y + 6))
    if placement.machines == 2:
        for machine in range(2):
            start = x + 9 + machine * 2 * (size + APART)
            canvas.rect(start, y + 51, 2 * size + APART + 11, 119, None, "muted", radius=5, dash="3 3", thick=1)
    canvas.text(x + 12, y + 186, placement.exchange, 12, "muted")


def _block(canvas: Canvas, placement: Placement, kind: str, color: Color, rank: int, x: float, y: float) -> None:
    own = held(getattr(placement, kind), rank)
    for layer in range(LAYERS):
        for part in range(SLICES):
            at = (x + part * CELL_X, y + layer * CELL_Y, CELL_X - 1.2, CELL_Y - 1.2)
            if (layer, part) in own and kind in placement.on_host:
                left, top, width, height = at
                canvas.rect(left + 0.6, top + 0.6, width - 1.2, height - 1.2, None, color, radius=1, thick=1.3)
            elif (layer, part) in own:
                canvas.rect(*at, color, radius=1.2)
            elif kind == "weights" and placement.gathers and layer == 1:
                canvas.rect(*at, color, radius=1.2, opacity=_faint(canvas))
            else:
                canvas.rect(*at, "line", radius=1.2, opacity=0.55)

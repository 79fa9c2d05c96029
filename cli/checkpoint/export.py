"""``paceline checkpoint export``: write a checkpoint in another format."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from ... import messages
from ...checkpoint.storage import Location, location
from .select import the_one

#: Keys that only a resume needs, and keys of the "paceline" section that describe the checkpoint.
_TRAINING = ("callbacks", "optimizer_states", "lr_schedulers", "current_model_state")
_ABOUT = ("format", "versions", "fn", "stage", "world_size", "data_ranks", "progress", "manifest", "runs")
_FORMATS = ("safetensors", "full", "weights")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.add_argument("file", help="a checkpoint file or folder from Paceline or Lightning")
    parser.add_argument("out", help="the file to write, which must not exist")
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        help="safetensors: only the weights (the default for *.safetensors); full: one file with everything; "
        "weights: one file without optimizers, callbacks and RNG states",
    )


def run(arguments: Namespace) -> int:
    """Read the checkpoint, convert it, and write the result."""
    from ...checkpoint import single_file
    from ...checkpoint.read import read

    out = location(arguments.out)
    kind = arguments.format or ("safetensors" if out.name.endswith(".safetensors") else None)
    if kind is None:
        raise ValueError(
            f"{arguments.out!r} does not end in .safetensors. Pass --format with one of {', '.join(_FORMATS)}."
        )
    if out.exists():
        raise FileExistsError(f"{arguments.out!r} already exists. Choose another name, or delete the existing file.")
    checkpoint = read(the_one(arguments.file))
    if kind == "safetensors":
        _write_safetensors(checkpoint["state_dict"], out)
    else:
        single_file.write(checkpoint if kind == "full" else _without_training(checkpoint), out)
    messages.answer(f"Wrote {arguments.out} ({kind}, {out.stat().st_size:,} bytes).")
    return 0


def _without_training(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return only the contents that ``save_checkpoint(weights_only=True)`` writes."""
    section = checkpoint.get("paceline", {})
    kept = {key: section[key] for key in _ABOUT if key in section}
    return {key: value for key, value in checkpoint.items() if key not in _TRAINING} | {"paceline": kept}


def _write_safetensors(state: dict[str, Any], out: Location) -> None:
    """Write a ``state_dict``'s tensors to a file; a tensor with several names is written only once.

    The metadata lists the omitted names in a form that ``safetensors.torch.load_model`` understands.
    """
    from ...checkpoint import atomic_write
    from ...checkpoint.safetensors_export import bare, write_safetensors

    found = bare(state)
    with atomic_write.written_aside(out) as temporary:
        write_safetensors(found.tensors, temporary, found.twins)
    for name, kind in found.others.items():
        messages.answer(f"Left out {name}, which is {kind}, because the format stores only tensors.")
    for name, first in found.twins.items():
        messages.answer(f"{name} is the same tensor as {first} and is written only once, as {first}.")

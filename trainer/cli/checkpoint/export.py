"""``paceline checkpoint export``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from ....callbacks.locations import Location, location
from ....loggers import messages

#: What only a fit needs that goes on; and what of the section "paceline" says what the checkpoint is.
_TRAINING = ("callbacks", "optimizer_states", "lr_schedulers", "current_model_state")
_ABOUT = ("format", "versions", "fn", "stage", "world_size", "data_ranks", "progress", "manifest", "runs")
_FORMATS = ("safetensors", "full", "weights")


def add_arguments(parser: ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("file", help="a checkpoint, file or folder, of Paceline or Lightning")
    parser.add_argument("out", help="the file to write, which must not exist")
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        help="safetensors: the bare weights (the default for *.safetensors); full: one file that holds everything; "
        "weights: one file without optimizers, callbacks and random states",
    )


def run(arguments: Namespace) -> int:
    """Read, convert, write."""
    from ...checkpoint import file
    from ...checkpoint.read import read

    out = location(arguments.out)
    kind = arguments.format or ("safetensors" if out.name.endswith(".safetensors") else None)
    if kind is None:
        raise ValueError(f"{arguments.out!r} does not tell the format. Pass --format {', '.join(_FORMATS)}.")
    if out.exists():
        raise FileExistsError(f"There is something at {arguments.out!r} already. Choose another name, or delete it.")
    checkpoint = read(arguments.file)
    if kind == "safetensors":
        _write_safetensors(checkpoint["state_dict"], out)
    else:
        file.write(checkpoint if kind == "full" else _without_training(checkpoint), out)
    messages.answer(f"Wrote {arguments.out} ({kind}, {out.stat().st_size:,} bytes).")
    return 0


def _without_training(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What ``save_checkpoint(weights_only=True)`` writes."""
    section = checkpoint.get("paceline", {})
    kept = {key: section[key] for key in _ABOUT if key in section}
    return {key: value for key, value in checkpoint.items() if key not in _TRAINING} | {"paceline": kept}


def _write_safetensors(state: dict[str, Any], out: Location) -> None:
    """The tensors of a ``state_dict``. One that has two names is written once; the metadata say which name is left out.

    ``safetensors.torch.load_model`` understands that.
    """
    from torch import Tensor

    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(messages.missing("checkpoint export --format safetensors", "safetensors")) from error
    from ...checkpoint import replace

    tensors: dict[str, Tensor] = {}
    metadata, seen = {"format": "pt"}, dict[Any, str]()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            messages.answer(f"Left out {name}: it is a {type(value).__name__}, and the format holds tensors only.")
            continue
        place = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
        if value.numel() and (first := seen.setdefault(place, name)) != name:
            metadata[name] = first
            messages.answer(f"{name} is the same tensor as {first}, under which it is written.")
            continue
        tensors[name] = value.clone().contiguous()  # the format refuses views of one memory
    with replace.written_aside(out) as temporary:
        save_file(tensors, temporary, metadata)

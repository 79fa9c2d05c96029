"""``paceline merge-weights``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from .checkpoint import export

_FILE = "model.safetensors"
#: The state of an Accelerator is a folder that holds one checkpoint of this name.
_STATE = "state.ckpt"


def add_arguments(parser: ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("directory", help="a checkpoint in parts, or a folder of Accelerator.save_state")
    parser.add_argument("out", help=f"a file *.safetensors, or a folder, in which {_FILE} is written")
    parser.add_argument("--unsafe_serialization", action="store_true", help="refused: only safetensors are written")
    parser.add_argument("--remove_checkpoint_dir", action="store_true", help="refused: nothing is deleted")


def run(arguments: Namespace) -> int:
    """Write the weights as ``paceline checkpoint export`` does."""
    if arguments.unsafe_serialization:
        raise ValueError(
            "--unsafe_serialization: only safetensors are written. For a file of torch.save write "
            "paceline checkpoint export DIRECTORY weights.ckpt --format weights."
        )
    if arguments.remove_checkpoint_dir:
        raise ValueError(
            "--remove_checkpoint_dir: training can continue only from the parts, so they are not deleted. Leave "
            "the flag out, and delete the folder yourself."
        )
    inside = Path(arguments.directory) / _STATE
    out = Path(arguments.out)
    if out.suffix != ".safetensors":
        out.mkdir(parents=True, exist_ok=True)
        out = out / _FILE
    file = str(inside) if inside.exists() else arguments.directory
    return export.run(Namespace(file=file, out=str(out), format="safetensors"))

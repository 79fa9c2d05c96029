"""``paceline merge-weights``: write the weights of a sharded checkpoint as one safetensors file."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from .checkpoint import export

_FILE = "model.safetensors"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.add_argument("directory", help="a sharded checkpoint, or a folder from Accelerator.save_state")
    parser.add_argument("out", help=f"a *.safetensors file, or a folder to write {_FILE} to")
    parser.add_argument(
        "--unsafe_serialization", action="store_true", help="not supported; only safetensors files are written"
    )
    parser.add_argument("--remove_checkpoint_dir", action="store_true", help="not supported; nothing is deleted")


def run(arguments: Namespace) -> int:
    """Write the weights with ``paceline checkpoint export``."""
    if arguments.unsafe_serialization:
        raise ValueError(
            "--unsafe_serialization: only safetensors files are written. For a torch.save file, use paceline "
            "checkpoint export DIRECTORY weights.ckpt --format weights."
        )
    if arguments.remove_checkpoint_dir:
        raise ValueError(
            "--remove_checkpoint_dir: training can resume only from the sharded checkpoint, so it is not deleted. "
            "Remove the flag and delete the folder yourself."
        )
    out = Path(arguments.out)
    if out.suffix != ".safetensors":
        out.mkdir(parents=True, exist_ok=True)
        out = out / _FILE
    return export.run(Namespace(file=arguments.directory, out=str(out), format="safetensors"))

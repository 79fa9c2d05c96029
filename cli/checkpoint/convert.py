"""``paceline checkpoint convert``: convert another program's checkpoint to a file that contains only plain data."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from ... import messages
from ...checkpoint.storage import location

#: Packages that Paceline can replace, each with its value for PACELINE_STANDS_IN.
_REPLACED = {
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "lightning_fabric": "lightning",
    "accelerate": "accelerate",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.description = (
        "Convert another program's checkpoint to a file that contains only plain data, so that it can be loaded\n"
        "without running code. Without --trust, a file that references code is rejected, and the error lists that code."
    )
    parser.add_argument("file", help="a file written by torch.save, such as Lightning's .ckpt")
    parser.add_argument("out", help="the file to write, which must not exist")
    parser.add_argument(
        "--trust", action="store_true", help="also load objects, which runs the code that the file references"
    )


def run(arguments: Namespace) -> int:
    """Read the file, convert its contents to plain data, and write the result."""
    from ...checkpoint import single_file
    from ...checkpoint.convert import converted

    out = location(arguments.out)
    if out.exists():
        raise FileExistsError(f"{arguments.out!r} already exists. Choose another name, or delete the existing file.")
    contents, apart = converted(_load(arguments.file, arguments.trust), arguments.file)
    single_file.write(contents, out, whole="state_dict" in contents)
    if apart:
        messages.answer(
            f"These entries were kept as objects, which can be loaded only with weights_only=False: {', '.join(apart)}."
        )
    messages.answer(f"Wrote {arguments.out} ({out.stat().st_size:,} bytes).")
    return 0


def _load(file: str, trusted: bool) -> Any:
    from ...checkpoint import single_file
    from ...checkpoint.objects import open_section

    try:
        contents = single_file.load(file, trusted=trusted)
        return open_section(contents, file, trusted) if trusted and isinstance(contents, dict) else contents
    except (AttributeError, ImportError) as error:
        if isinstance(error, AttributeError) and "__main__" in str(error):
            raise RuntimeError(
                f"{file!r} references a class that is defined in the script that wrote the file ({error}). Load the "
                "file with weights_only=False in that script, or move the class to a module and write the file again."
            ) from error
        package = _REPLACED.get((getattr(error, "name", None) or "").partition(".")[0])
        fix = (
            f"Run the command with Paceline in place of that package: PACELINE_STANDS_IN={package} paceline checkpoint "
            "convert ..."
            if package
            else "Install the missing package, or run the command where the program's modules can be imported: "
            "PYTHONPATH=FOLDER paceline checkpoint convert ..."
        )
        raise RuntimeError(f"{file!r} references code that cannot be imported: {error}. {fix}") from error

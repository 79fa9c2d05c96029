"""Builds the model for ``paceline estimate-memory`` without allocating memory, or reads sizes from its files."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .. import messages
from ..big_model.weight_files import kinds_and_shapes, weight_files
from ..data.batches import batch_size_of
from ..estimate.tensor_lifetimes import Ledger
from ..torch_private import FakeTensorMode, pytree, storage_key

#: Default number of tokens in a sequence; fewer if the model has fewer positions.
SEQUENCE_LENGTH = 512
_BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "C64": 64}
_FLOATING = ("F", "BF", "C")
_WEIGHTS = (".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt")


class Size(tuple[int, int, bool]):
    """A tensor's number of elements, bits per element, and whether it is floating-point and therefore convertible."""

    def bytes(self, bits: int | None = None) -> int:
        """Return the size in bytes. If ``bits`` is given, floating-point values are converted to that many bits."""
        elements, own, floating = self
        return -(-elements * (bits if bits is not None and floating else own) // 8)


@dataclass
class Source:
    """A model to estimate.

    Attributes:
        what: description of the model and where it was found.
        sizes: each tensor's size, by name.
        module: the module, built without allocating memory; None if there are only weight files.
        batch: a batch for the module, also built without allocating memory; None if the module's input is unknown.
        loss: ``loss(module, batch)``, if a factory returned such a function.
        notes: assumptions behind the estimate.
    """

    what: str
    sizes: dict[str, Size]
    module: nn.Module | None = None
    batch: Any = None
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Wish:
    """Options for finding the model.

    Attributes:
        library: one of ``LIBRARIES``; if None, the library is detected.
        trust_remote_code: whether code in the model's folder may run.
        batch_size: samples in a batch; None means the factory's batch size, or 1 without a factory.
        sequence_length: tokens in a sequence; None means :data:`SEQUENCE_LENGTH`.
    """

    library: str | None = None
    trust_remote_code: bool = False
    batch_size: int | None = None
    sequence_length: int | None = None


def find(name: str, wish: Wish) -> Source:
    """Find a model by name. Local files take precedence, and nothing is downloaded.

    ``name`` is a folder, a file, ``module:factory``, ``file.py:factory``, or the name of a timm model.

    Raises:
        FileNotFoundError: if no model is found.
        ValueError: if a file is damaged or does not define the factory.
    """
    path = Path(name)
    if wish.library == "timm":
        return _of_timm(name, wish)
    if path.exists():
        return _of_path(path, wish)
    before, colon, factory = name.rpartition(":")
    if colon and before and factory.isidentifier():
        return _of_factory(before, factory, wish)
    raise FileNotFoundError(_not_here(name))


def _not_here(name: str) -> str:
    near = Path(name).parent
    close = messages.did_you_mean(Path(name).name, [one.name for one in near.iterdir()] if near.is_dir() else [])
    return (
        f"There is no file or folder {name!r} in the working directory.{close} If {name} is a model on the Hugging "
        f"Face Hub, download its config.json (a few kB) with: hf download {name} config.json --local-dir FOLDER. Then "
        "run paceline estimate-memory FOLDER. paceline estimate-memory itself downloads nothing, so that it works "
        "without a network. For your own model, pass module:factory or file.py:factory."
    )


def _of_path(path: Path, wish: Wish) -> Source:
    if path.suffix == ".py":
        raise ValueError(
            f"{str(path)!r} is a Python script. Add the name of the function that builds the model, for example "
            f"{path}:build_model."
        )
    config = path if path.name == "config.json" else path / "config.json"
    if config.exists() and wish.library in (None, "transformers"):
        if messages.is_installed("transformers"):
            return _of_transformers(config, wish)
        if wish.library or path == config or not _has_weights(path):
            raise ModuleNotFoundError(
                messages.missing(f"Building the model of {str(config)!r}", "transformers"), name="transformers"
            )
    if wish.library == "transformers":
        raise FileNotFoundError(
            f"{str(path)!r} has no config.json, which transformers needs to build a model. Pass a folder with this "
            "file, or module:factory."
        )
    return _of_files(path)


def _has_weights(folder: Path) -> bool:
    return any(one.suffix in (".safetensors", ".bin", ".pt", ".pth") for one in folder.iterdir())


# ---- weight files ------------------------------------------------------------------------------------------------


def _of_files(path: Path) -> Source:
    if path.is_file() and path.suffix not in _WEIGHTS:
        raise ValueError(
            f"{str(path)!r} is not a weight file. Pass a folder, or a file that ends in one of {', '.join(_WEIGHTS)}."
        )
    sizes: dict[str, Size] = {}
    files = weight_files(path)
    for file in files:
        sizes |= _headers(file) if file.suffix == ".safetensors" else _of_torch(file)
    notes = [
        "Weight files alone do not show what a training step keeps in memory, so activations are not included. To "
        "include them, pass a folder with a config.json, or module:factory."
    ]
    return Source(f"{len(files)} weight file{'s' * (len(files) > 1)} at {path}", sizes, notes=notes)


def _headers(file: Path) -> dict[str, Size]:
    """Read tensor sizes from a safetensors file's header, without reading its data."""
    sizes = {}
    for name, (kind, shape) in kinds_and_shapes(file).items():
        digits = "".join(filter(str.isdigit, kind.split("_")[0]))
        bits = _BITS.get(kind) or int(digits or 8)
        sizes[name] = Size((math.prod(shape), bits, kind.startswith(_FLOATING)))
    return sizes


def _of_torch(file: Path) -> dict[str, Size]:
    state = torch.load(file, map_location="meta", weights_only=True, mmap=True)
    state = state.get("state_dict", state)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    once = {_place(value): name for name, value in reversed(tensors.items())}  # keeps the first name of tied tensors
    return {name: size_of(value) for name, value in tensors.items() if name in once.values()}


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return storage_key(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride()


def size_of(tensor: Tensor) -> Size:
    """Return the :class:`Size` of a tensor."""
    return Size((tensor.numel(), 8 * tensor.element_size(), tensor.is_floating_point() or tensor.is_complex()))


# ---- built models -------------------------------------------------------------------------------------------


@contextmanager
def without_memory() -> Iterator[None]:
    """Context manager in which new tensors have a shape but no memory."""
    with FakeTensorMode(allow_non_fake_inputs=True), Ledger():
        yield


def _built(what: str, module: nn.Module, batch: Any, notes: list[str], loss: Any = None) -> Source:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return Source(what, {name: size_of(tensor) for name, tensor in tensors.items()}, module, batch, loss, notes)


def _of_transformers(config: Path, wish: Wish) -> Source:
    import transformers

    try:
        settings = transformers.AutoConfig.from_pretrained(
            config.parent, trust_remote_code=wish.trust_remote_code, local_files_only=True
        )
        with without_memory():
            module = _kind(transformers, settings, wish.trust_remote_code)(settings)
    except (ConnectionError, TimeoutError) as error:
        raise RuntimeError(
            f"Reading {str(config)!r} needs a network connection, which failed: {error}. Connect to the network, or "
            "download the files that the configuration refers to."
        ) from error
    notes: list[str] = []
    batch = _batch_for(module, settings, wish, notes)
    return _built(
        f"{type(module).__name__} of {config} (transformers {transformers.__version__})", module, batch, notes
    )


def _kind(transformers: ModuleType, settings: Any, trust: bool) -> Callable[[Any], nn.Module]:
    """Return the function that builds the model: the class that the config specifies, or else an auto class."""
    names = getattr(settings, "architectures", None) or []
    found = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if found is not None:
        return found
    auto_map = getattr(settings, "auto_map", None) or {}
    kinds = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageClassification", "AutoModel")
    for kind in (*(key for key in auto_map if key.startswith("AutoModel")), *kinds):
        auto = getattr(transformers, kind)
        if kind in auto_map or type(settings) in auto._model_mapping:
            return lambda settings: auto.from_config(settings, trust_remote_code=trust)
    raise ValueError(
        f"transformers {transformers.__version__} has no model for a config of type {type(settings).__name__}. Upgrade "
        "transformers, or pass module:factory."
    )


def _batch_for(module: nn.Module, settings: Any, wish: Wish, notes: list[str]) -> Any:
    size = wish.batch_size or 1
    given = inspect.signature(module.forward).parameters
    main = getattr(module, "main_input_name", "input_ids")
    text = getattr(settings, "text_config", settings)
    if main == "input_ids":
        most = getattr(text, "max_position_embeddings", None) or SEQUENCE_LENGTH
        length = wish.sequence_length or min(SEQUENCE_LENGTH, most)
        tokens = _whole((size, length))
        notes.append(f"A batch is {size} x {length} tokens.")
        batch = {"input_ids": tokens}
        if getattr(settings, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = tokens
        if "labels" in given:
            per_token = (
                not type(module).__name__.endswith(("Classification", "MultipleChoice"))
                or "Token" in type(module).__name__
            )
            batch["labels"] = tokens if per_token else _whole((size,))
        return batch
    vision = getattr(settings, "vision_config", settings)
    side, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
    if main == "pixel_values" and side:
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        notes.append(f"A batch is {size} images of {height} x {width}.")
        batch = {"pixel_values": _floating((size, channels, height, width))}
        return batch | ({"labels": _whole((size,))} if "labels" in given else {})
    notes.append(
        f"The input of {type(module).__name__} ({main}) is unknown, so activations are not included. To "
        "include them, pass module:factory, where factory returns (model, batch)."
    )
    return None


def _whole(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


def _floating(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, device="meta")


def _of_timm(name: str, wish: Wish) -> Source:
    if not messages.is_installed("timm"):
        raise ModuleNotFoundError(messages.missing("--library_name timm", "timm"), name="timm")
    import timm  # type: ignore[reportMissingImports]

    with without_memory():
        module = timm.create_model(name.removeprefix("timm/"), pretrained=False)
    size, shape = wish.batch_size or 1, tuple(module.default_cfg["input_size"])
    return _built(f"{name} of timm", module, (_floating((size, *shape)),), [f"A batch is {size} images of {shape}."])


def _of_factory(place: str, name: str, wish: Wish) -> Source:
    owner = _imported(place)
    factory = getattr(owner, name, None)
    if not callable(factory):
        public = [key for key, value in vars(owner).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"{place!r} has no function or class {name!r}.{messages.did_you_mean(name, public)}")
    takes = inspect.signature(factory).parameters
    asked = {"batch_size": wish.batch_size, "sequence_length": wish.sequence_length}
    given = {key: value for key, value in asked.items() if key in takes and value is not None}
    if wish.sequence_length is not None and "sequence_length" not in takes:
        raise ValueError(
            f"--sequence_length: {name}() has no parameter sequence_length. Add this parameter to the function."
        )
    with without_memory():
        made = factory(**given)
    module, batch, loss = (*made, None, None)[:3] if isinstance(made, (tuple, list)) else (made, None, None)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{place}:{name}() returned {type(module).__name__}. It must return an nn.Module, (module, batch), or "
            "(module, batch, loss), where loss(module, batch) is a function."
        )
    notes = []
    if batch is None:
        notes.append(
            f"{name}() returned no batch, so activations are not included. Return (module, batch) to include them."
        )
    elif wish.batch_size is not None and "batch_size" not in takes:
        batch = resized(batch, wish.batch_size)
    return _built(f"{type(module).__name__} of {place}:{name}", module, batch, notes, loss)


def _imported(place: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place)
        if not path.is_file():
            raise FileNotFoundError(_not_here(place))
        sys.path.insert(0, str(path.resolve().parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        return module
    finally:
        sys.path.remove("")


def resized(batch: Any, size: int) -> Any:
    """Return a batch of another size, by resizing every tensor whose first dimension is the batch dimension."""
    before = batch_size_of(batch)

    def change(tensor: Tensor) -> Tensor:
        fits = tensor.dim() > 0 and tensor.shape[0] == before
        return torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype, device="meta") if fits else tensor

    return pytree.tree_map_only(Tensor, change, batch)

"""A language model that is larger than the memory it may take: planned, loaded from shards and generating, from disk.

    python examples/11_larger_than_memory.py                                      # 60 MB, limit 20 MB: seconds
    python examples/11_larger_than_memory.py --gigabytes 6 --limit 2GB            # 7 GB of disk, minutes

The weights are random and written here first, a shard at a time, so nothing is downloaded. With published ones leave
``write`` out and name their folder. Needs transformers: pip install ".[examples]".
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import (
    Accelerator,
    compute_module_sizes,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    seed_everything,
)

WORDS = 1024


def configuration(gigabytes: float) -> LlamaConfig:
    """A network of at least so many bytes of float32 weights."""
    width = 256 if gigabytes < 1 else 2048
    block = 4 * (4 * width**2 + 3 * width * 4 * width + 2 * width)
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=math.ceil(gigabytes * 1e9 / block),
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=WORDS,
        tie_word_embeddings=True,
        dtype="float32",
        eos_token_id=None,
    )


def write(model: nn.Module, folder: Path) -> None:
    """Write random weights for a model without any: a file for each block, and an index."""
    accelerator = Accelerator()
    files: dict[str, str] = {}
    for block, named in groupby(model.named_parameters(), key=lambda item: ".".join(item[0].split(".")[:3])):
        tensors = {name: random_values(empty.shape) for name, empty in named}
        accelerator.save(tensors, folder / f"{block}.safetensors", safe_serialization=True)
        files.update(dict.fromkeys(tensors, f"{block}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    accelerator.free_memory()


def random_values(shape: torch.Size) -> Tensor:
    return torch.ones(shape) if len(shape) == 1 else torch.randn(shape) / shape[1] ** 0.5


def peak_bytes() -> int:
    """The highest resident size of this process since the last :func:`reset_peak`; 0 where it is not known."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def reset_peak() -> int:
    """Begin to measure; returns the present size."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return peak_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.06)
    parser.add_argument("--limit", default="20MB", help="bytes of weights in memory")
    parser.add_argument("--words", type=int, default=16, help="to generate")
    parser.add_argument("--out", default=".", help="folder with room for the weights, which are removed at the end")
    parser.add_argument("--check", action="store_true", help="also load it whole and compare what it says")
    args = parser.parse_args()
    seed_everything(1)
    with tempfile.TemporaryDirectory(dir=args.out) as name:
        folder = Path(name)
        config = configuration(args.gigabytes)
        with init_empty_weights():
            model = LlamaForCausalLM(config)
        size = compute_module_sizes(model)[""]
        print(f"{size / 1e9:.2f} GB of weights in {config.num_hidden_layers} blocks")
        write(model, folder)
        before = reset_peak()
        start = time.perf_counter()
        model = load_checkpoint_and_dispatch(model, folder, device_map="auto", max_memory={"cpu": args.limit})
        print(f"loaded in {time.perf_counter() - start:.1f} s")
        start = time.perf_counter()
        prompt = torch.tensor([[1, 2, 3]])
        words = model.generate(prompt, max_new_tokens=args.words, do_sample=False)
        seconds = (time.perf_counter() - start) / args.words
        print(f"generated {words[0, 3:].tolist()}, {seconds * 1000:.0f} ms a word")
        print(f"at most {(peak_bytes() - before) / 1e6:.0f} MB more than before the load")
        if args.check:
            whole = LlamaForCausalLM(config)
            whole = load_checkpoint_and_dispatch(whole, folder)
            same = torch.equal(words, whole.generate(prompt, max_new_tokens=args.words, do_sample=False))
            print(f"the same as from memory: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    main()

"""Weights from the files that other tools write."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from big_models import Net, empty
from big_models import write as write_aligned
from torch import nn

from paceline import Accelerator, dispatch_model, load_checkpoint_and_dispatch, load_checkpoint_in_model
from paceline.big_model.device_map import device_of
from paceline.messages import PacelineWarning


class Tied(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight


def write(folder: Path, kind: str) -> tuple[Path, nn.Module]:
    """Weights in a form, and the model that they are of."""
    torch.manual_seed(3)
    model = Tied()
    accelerator = Accelerator(cpu=True)
    size = 600 if "shards" in kind else "1GB"
    if "state" in kind:
        torch.save(model.state_dict(), folder / "weights.pt")
        return folder / "weights.pt", model
    accelerator.save_model(model, folder, size, safe_serialization="bin" not in kind)
    if "file" in kind:
        return folder / "model.safetensors", model
    if "index" in kind:
        return next(folder.glob("*.index.json")), model
    return folder, model


FORMS = ["folder", "folder of shards", "index of shards", "file", "folder bin", "folder of bin shards", "a state"]


@pytest.mark.parametrize("meta", [False, True], ids=["with values", "on meta"])
@pytest.mark.parametrize("kind", FORMS)
def test_g5_weights_come_from_a_folder_a_file_or_an_index(kind: str, meta: bool, tmp_path: Path) -> None:
    path, model = write(tmp_path, kind)
    if "shards" in kind:
        assert len(list(tmp_path.glob("*-of-*"))) > 1
    torch.manual_seed(9)
    other = Tied()
    if meta:
        other = other.to("meta")
        other.head.weight = other.embed.weight
    loaded = load_checkpoint_in_model(other, path, strict=True)
    assert loaded == ([], [])
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


def test_a_type_is_converted_on_the_way(tmp_path: Path) -> None:
    path, model = write(tmp_path, "folder")
    other = Tied()
    load_checkpoint_in_model(other, path, dtype=torch.bfloat16)
    assert other.body[0].weight.dtype == torch.bfloat16
    assert torch.equal(other.body[0].weight, model.body[0].weight.bfloat16())  # type: ignore[union-attr]
    assert other.body[1].num_batches_tracked.dtype == torch.int64


def test_what_does_not_fit_is_said_or_raised(tmp_path: Path) -> None:
    path, model = write(tmp_path, "folder")

    class More(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(2, 2)

    with pytest.warns(PacelineWarning, match=r"2 missing from the checkpoint \(more.weight, more.bias\)"):
        load_checkpoint_in_model(More(), path)
    with pytest.raises(RuntimeError, match=r"8 unexpected \(body\.0\.bias.*strict=False"):
        load_checkpoint_in_model(nn.Sequential(), path, strict=True)
    assert isinstance(model, Tied)


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (lambda folder: Tied(4), ValueError, r"embed.weight has the shape \(16, 8\).* but \(16, 4\) in Tied"),
        (
            lambda folder: next(folder.glob("*-of-*")).unlink(),
            FileNotFoundError,
            r"lists 2 files, of which 1 could not be found: model-00001",
        ),
        (
            lambda folder: next(folder.glob("*-of-*")).write_bytes(b"x" * 50),
            ValueError,
            "damaged or has another format",
        ),
        (
            lambda folder: [f.unlink() for f in folder.iterdir()],
            FileNotFoundError,
            "Cannot tell which weights to load",
        ),
    ],
    ids=["shapes", "missing shard", "damaged", "nothing"],
)
def test_bad_files_are_named(spoil: Any, error: type[Exception], said: str, tmp_path: Path) -> None:
    path, _ = write(tmp_path, "folder of shards")
    model = spoil(tmp_path)
    with pytest.raises(error, match=said):
        load_checkpoint_in_model(model if isinstance(model, nn.Module) else Tied(), path)


def test_a_damaged_file_of_torch_and_a_misspelled_one_are_named(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "a state")
    with pytest.raises(FileNotFoundError, match=r"Did you mean 'weights\.pt'"):
        load_checkpoint_in_model(Tied(), tmp_path / "weigths.pt")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged or has another format"):
        load_checkpoint_in_model(Tied(), path)


# ---- spread ----------------------------------------------------------------------------------------------------------


def test_i3_the_keywords_are_those_of_accelerate() -> None:
    said = " ".join(inspect.signature(load_checkpoint_and_dispatch).parameters)
    assert said == (
        "model checkpoint device_map max_memory no_split_module_classes offload_folder offload_buffers dtype "
        "offload_state_dict skip_keys preload_module_classes force_hooks strict full_state_dict broadcast_from_rank0"
    )
    said = " ".join(inspect.signature(dispatch_model).parameters)
    assert said == (
        "model device_map main_device state_dict offload_dir offload_index offload_buffers skip_keys "
        "preload_module_classes force_hooks"
    )


@pytest.mark.parametrize("device_map", [None, "auto", "balanced", "balanced_low_0", "sequential", {"": "cpu"}])
def test_i3_all_lies_in_memory_where_it_fits(device_map: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Net()
    write_aligned(model.state_dict(), tmp_path / "model.safetensors")
    other = empty(Net)
    found = load_checkpoint_and_dispatch(
        model=other, checkpoint=tmp_path, device_map=device_map, no_split_module_classes=["Block"]
    )
    assert found is other
    assert all(parameter.device.type == "cpu" for parameter in other.parameters())
    assert other.head.weight is other.start.weight
    x = torch.randn(3, 64)
    assert torch.equal(model(x), other(x))


def test_i4_the_plan_counts_what_the_files_have(tmp_path: Path) -> None:
    """A model in bfloat16 without values gets what the file has, which is twice as large."""
    model = Net()
    write_aligned(model.state_dict(), tmp_path / "model.safetensors")
    other = empty(lambda: Net().bfloat16())
    size = sum(parameter.nbytes for parameter in model.parameters())
    load_checkpoint_and_dispatch(other, tmp_path, "auto", {"cpu": size * 2 // 3}, ["Block"])
    assert set(other.hf_device_map.values()) == {"cpu", "disk"}
    held = sum(p.nbytes for name, p in other.named_parameters() if device_of(name, other.hf_device_map) == "cpu")
    assert held <= size * 2 // 3


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": "disk"}])
def test_what_no_file_has_is_an_error_where_there_are_no_values(device_map: Any, tmp_path: Path) -> None:
    state = {name: value for name, value in Net().state_dict().items() if "blocks.2." not in name}
    write_aligned(state, tmp_path / "model.safetensors")
    with (
        pytest.raises(RuntimeError, match=r"Net has no values for 6 of its tensors: blocks\.2\.norm\.weight"),
        pytest.warns(PacelineWarning, match="7 missing from the checkpoint"),
    ):
        load_checkpoint_and_dispatch(empty(Net), tmp_path, device_map)
    with pytest.raises(RuntimeError, match="7 missing from the checkpoint"):
        load_checkpoint_and_dispatch(empty(Net), tmp_path, device_map, strict=True)


def test_two_names_of_one_memory_do_not_change_together(tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "model.bin")

    class Untied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 64)

    other = load_checkpoint_and_dispatch(empty(Untied), tmp_path / "model.bin", {"": "disk"})
    before = other.start.weight.clone()
    with torch.no_grad():
        other.head.weight.add_(1)
    other(torch.randn(3, 64))
    assert torch.equal(other.start.weight, before)
    assert torch.equal(other.head.weight, before + 1)


def test_loading_again_into_a_spread_model_is_seen(tmp_path: Path) -> None:
    one, two = Net(2, 128), Net(2, 128)
    for name, model in (("one", one), ("two", two)):
        write_aligned(model.state_dict(), tmp_path / f"{name}.safetensors")
    other = load_checkpoint_and_dispatch(empty(Net, 2, 128), tmp_path / "one.safetensors", {"": "disk"})
    x = torch.randn(3, 128)
    assert torch.equal(other(x), one(x))
    load_checkpoint_in_model(other, tmp_path / "two.safetensors")
    for _ in range(2):
        assert torch.equal(other(x), two(x))


def test_a_spread_model_can_be_saved_over_its_own_files(tmp_path: Path) -> None:
    model = Net(2, 128)
    write_aligned(model.state_dict(), tmp_path / "model.safetensors")
    other = load_checkpoint_and_dispatch(empty(Net, 2, 128), tmp_path, {"": "disk"})
    Accelerator(cpu=True).save_model(other, tmp_path)
    x = torch.randn(3, 128)
    assert torch.equal(other(x), model(x))
    again = load_checkpoint_and_dispatch(empty(Net, 2, 128), tmp_path, {"": "disk"})
    assert torch.equal(again(x), model(x))


def test_parts_of_names_keep_float32(tmp_path: Path) -> None:
    write_aligned(Net().state_dict(), tmp_path / "model.safetensors")
    other = empty(Net)
    load_checkpoint_in_model(other, tmp_path, dtype="bfloat16", keep_in_fp32_modules=["norm"])
    assert other.blocks[0].norm.weight.dtype == torch.float32
    assert other.blocks[0].up.weight.dtype == torch.bfloat16


def test_what_there_is_not_is_refused(tmp_path: Path) -> None:
    write_aligned(Net().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(NotImplementedError, match="quantized layers cannot be offloaded"):
        load_checkpoint_in_model(Net(), tmp_path, offload_8bit_bnb=True)
    with pytest.raises(ValueError, match="does not cover"):
        load_checkpoint_in_model(Net(), tmp_path, {"start": "cpu"})
    with pytest.raises(ValueError, match="dtype='whole' is not a torch dtype"):
        load_checkpoint_in_model(Net(), tmp_path, dtype="whole")
    with pytest.raises(ValueError, match=r"dtype=torch\.int8 would round weights"):
        load_checkpoint_in_model(Net(), tmp_path, dtype="int8")
    with pytest.raises(FileNotFoundError, match="There are no weights at"):
        load_checkpoint_and_dispatch(Net(), tmp_path / "gone", "auto")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot be offloaded"):
        load_checkpoint_in_model(Net(), tmp_path, {"": "disk"}, tmp_path / "file", "bfloat16")


def test_a_language_model_generates_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    kinds = {"aligned": {"": "disk"}, "misaligned": {"": "cpu", "model.layers": "disk"}, "auto": "auto"}
    tokens = torch.arange(6).view(1, 6)
    ask = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens, **ask)
    for kind, device_map in kinds.items():
        file = write_aligned(model.state_dict(), tmp_path / f"{kind}.safetensors", kind == "misaligned")
        other = empty(transformers.LlamaForCausalLM, config)
        other.tie_weights()
        other = load_checkpoint_and_dispatch(other, file, device_map, {"cpu": "420kB"}).eval()
        assert "disk" in other.hf_device_map.values()
        assert torch.equal(other.generate(tokens, **ask), expected)
        with torch.no_grad():
            assert torch.equal(other(tokens).logits, model(tokens).logits)

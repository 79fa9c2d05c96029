"""Models that are spread over memory and disk give what they give in one place, to the bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from big_models import Block, Net, empty, write
from torch import Tensor, nn

from paceline import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model, load_checkpoint_and_dispatch
from paceline.big_model.dispatch import attach_layerwise_casting_hooks
from paceline.big_model.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from paceline.big_model.weight_files import Pages

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
#: A product with one row goes through other kernels, whose bits depend on where a matrix begins.
ROW = X[:1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(1, -1, 64)
        return self.layers(self.attention(x, x, x)[0])


class Listed(nn.Module):
    """Parameters in lists, complex ones, one of no dimension, which shifts those behind it in a file."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(64, 64) for _ in range(3)])
        self.named = nn.ParameterDict({"b": torch.randn(64)})
        self.inner = nn.Linear(64, 64)
        self.turn = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight) * self.factor
        return self.inner(x) + self.named["b"] + (x.to(torch.complex64) @ self.turn).real


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 2000), nn.BatchNorm1d(2000), nn.Linear(2000, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def recurrent() -> nn.Module:
    return nn.GRU(64, 32, num_layers=2, batch_first=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": Net,
    "attention": Attention,
    "lists": Listed,
    "norm": Normed,
    "recurrent": recurrent,
}


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return make().eval()


def spread(
    make: Callable[[], nn.Module], folder: Path, kind: str = "safetensors", device_map: Any = None, **rest: Any
) -> tuple[nn.Module, nn.Module]:
    """A model in one place, and the same one spread."""
    model = made(make)
    path = folder / ("model.bin" if kind == "bin" else "model.safetensors")
    if kind == "bin":
        torch.save(model.state_dict(), path)
    else:
        write(model.state_dict(), path, kind == "misaligned")
    other = load_checkpoint_and_dispatch(empty(make), path, device_map or {"": "disk"}, **rest).eval()
    return model, other


def nearly(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= 1e-6 * other.abs().max())


KINDS = ["safetensors", "misaligned", "bin"]
MODES = {"grad": torch.enable_grad, "no grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_i3_outputs_and_gradients_are_the_same_to_the_bit(make: Any, kind: str, tmp_path: Path) -> None:
    # A backward that takes a parameter itself, not a view of it, reads the values where they lie by then.
    same = nearly if make is Listed else torch.equal
    model, other = spread(make, tmp_path, kind)
    for mode in [*MODES.values(), torch.enable_grad]:
        with mode():
            for x in (X, ROW):
                assert torch.equal(first(model(x)), first(other(x)))
    for values in (X, ROW):
        inputs = [values.clone().requires_grad_(), values.clone().requires_grad_()]
        for one, x in zip((model, other), inputs, strict=True):
            first(one(x)).square().sum().backward()
        assert same(inputs[0].grad, inputs[1].grad)
    for (name, ours), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or same(ours.grad, theirs.grad), name


@pytest.mark.parametrize("kind", KINDS)
def test_i3_a_limit_puts_some_on_disk_and_outputs_stay(kind: str, tmp_path: Path) -> None:
    model, other = spread(Net, tmp_path, kind, "auto", max_memory={"cpu": "180kB"}, no_split_module_classes=["Block"])
    assert set(other.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(model(X), other(X))
    pages = Pages()
    for number, block in enumerate(other.blocks):  # type: ignore[arg-type]
        assert pages.holds(block.up.weight) == (other.hf_device_map[f"blocks.{number}"] == "disk")


def test_i3_without_a_limit_all_is_in_memory_and_no_hooks_are(tmp_path: Path) -> None:
    model, other = spread(Net, tmp_path, device_map="auto", max_memory={"cpu": "1GB"})
    assert other.hf_device_map == {"": "cpu"}
    assert not any(hasattr(module, "_hf_hook") for module in other.modules())
    assert torch.equal(model(X), other(X))
    assert not any(Pages().holds(parameter) for parameter in other.parameters())
    other.to(torch.float64)


MAPS = {
    "inside of a block": {"": "cpu", "blocks.1.up": "disk", "blocks.2.down.weight": "disk"},
    "blocks named apart": {"start": "disk", "shift": "disk", "blocks": "cpu", "blocks.0": "disk", "head": "cpu"},
    "one tensor": {"": "cpu", "shift": "disk"},
    "tied": {"": "cpu", "start": "disk"},
    "only a container": {"": "cpu", "blocks": "disk"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device_map", MAPS.values(), ids=MAPS)
def test_any_map_gives_the_same(device_map: Any, kind: str, tmp_path: Path) -> None:
    model, other = spread(Net, tmp_path, kind, device_map)
    for x in (X, ROW, X):
        assert torch.equal(model(x), other(x))
    assert other.head.weight is other.start.weight


def test_weights_that_another_module_reads_are_there(tmp_path: Path) -> None:
    """They are the same values; of an aligned file also where it matters for the bits."""

    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.blocks[0].down.weight.t())  # type: ignore[arg-type]

    model, other = spread(Reads, tmp_path, "misaligned")
    assert torch.allclose(model(ROW), other(ROW))
    model, other = spread(Reads, tmp_path)
    assert torch.equal(model(ROW), other(ROW))


def test_inside_of_a_block_only_what_is_on_disk_is_mapped(tmp_path: Path) -> None:
    _, other = spread(Net, tmp_path, "misaligned", MAPS["inside of a block"])
    pages = Pages()
    mapped = {name for name, parameter in other.named_parameters() if pages.holds(parameter)}
    assert mapped == {"blocks.1.up.weight", "blocks.1.up.bias", "blocks.2.down.weight"}


def test_types_are_converted_into_the_folder(tmp_path: Path) -> None:
    model, other = spread(Net, tmp_path, dtype="bfloat16", offload_folder=tmp_path / "offload")
    model.to(torch.bfloat16)
    assert torch.equal(model(X.bfloat16()), other(X.bfloat16()))
    assert Pages().holds(other.blocks[0].up.weight)
    with pytest.raises(ValueError, match=r"on disk as torch\.bfloat16, .* Pass offload_folder="):
        spread(Net, tmp_path, dtype="bfloat16")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_in_a_file_is_not_written_to_the_folder_again(kind: str, tmp_path: Path) -> None:
    model, other = spread(Net, tmp_path, kind, offload_folder=tmp_path / "offload")
    assert torch.equal(model(X), other(X))
    assert not (tmp_path / "offload").exists()


def index_of(model: nn.Module, file: Path, dtype: str = "float32") -> dict[str, Any]:
    """Where the weights of a model lie, as libraries say it that offload to the files of a checkpoint."""
    entries = {
        name: {"safetensors_file": str(file), "weight_name": name, "dtype": dtype} for name in model.state_dict()
    }
    return {**entries, "head.weight": entries["start.weight"]}


@pytest.mark.parametrize("folder", [None, "offload"])
@pytest.mark.parametrize("misaligned", [False, True], ids=["aligned", "misaligned"])
def test_weights_that_an_index_finds_in_a_file_are_read_there(
    misaligned: bool, folder: str | None, tmp_path: Path
) -> None:
    model = made(Net)
    file = write(model.state_dict(), tmp_path / "model.safetensors", misaligned)
    other = dispatch_model(
        empty(Net), {"": "cpu", "blocks": "disk"}, offload_dir=folder, offload_index=index_of(model, file)
    )
    assert torch.equal(model(X), other.eval()(X))
    assert all(Pages().holds(parameter) for parameter in other.blocks.parameters())  # type: ignore[union-attr]
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_folder_is_needed_for_weights_of_an_index_in_another_dtype(tmp_path: Path) -> None:
    model = made(Net)
    file = write(model.state_dict(), tmp_path / "model.safetensors")
    index = index_of(model, file, "bfloat16")
    with pytest.raises(
        ValueError, match=r"on disk as torch\.bfloat16 \(its file has torch\.float32\), .* offload_dir="
    ):
        dispatch_model(empty(Net), {"": "disk"}, offload_index=index)
    other = dispatch_model(empty(Net), {"": "disk"}, offload_dir=tmp_path / "offload", offload_index=index)
    assert torch.equal(model.to(torch.bfloat16)(X.bfloat16()), other.eval()(X.bfloat16()))
    assert (tmp_path / "offload" / "start.weight.dat").stat().st_size == 2 * 64 * 64


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_batch_statistics_are_kept(kind: str, offload_buffers: bool, tmp_path: Path) -> None:
    model, other = spread(Normed, tmp_path, kind, offload_buffers=offload_buffers)
    assert Pages().holds(other.layers[1].running_mean) == offload_buffers  # type: ignore[index]
    for _ in range(3):
        x = torch.randn(5, 64)
        assert torch.equal(model.train()(x), other.train()(x))
        assert torch.equal(model.eval()(x), other.eval()(x))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_parts_may_be_left_out_or_come_in_another_order(kind: str, tmp_path: Path) -> None:
    model, other = spread(Net, tmp_path, kind)
    for order in ([0, 1, 2, 3], [3, 1], [], [2, 2, 0], [0, 1, 2, 3], [1, 3, 0]):
        model.order = other.order = order
        assert torch.equal(model(X), other(X))


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_within_a_forward_leaves_a_model_that_runs(kind: str, tmp_path: Path) -> None:
    model, other = spread(Net, tmp_path, kind)
    places = {name: parameter.data_ptr() for name, parameter in other.named_parameters()}
    for order in ([0, 1, 99], [0, "x"]):
        other.order = order
        with pytest.raises((IndexError, TypeError)):
            other(X)
    with pytest.raises(RuntimeError, match="shape"):
        other.blocks[0](torch.randn(3, 3))
    assert {name: parameter.data_ptr() for name, parameter in other.named_parameters()} == places
    other.order = model.order
    assert torch.equal(model(X), other(X))


def add(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def add_through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.add_(1)


def add_in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.add_(1)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def load_in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        load(model)


def assign(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + 1


def train(model: nn.Module) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 128)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


CHANGES = [add, add_through_data, add_in_inference_mode, load, load_in_inference_mode, assign, train]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_changed_stays_changed(kind: str, change: Callable[[nn.Module], None], tmp_path: Path) -> None:
    def large() -> Net:
        return Net(3, 128)

    x = torch.randn(5, 128)
    model, other = spread(large, tmp_path, kind)
    for _ in range(3):
        other(x)
        change(model)
        change(other)
        for _ in range(2):
            assert torch.equal(model(x), other(x))
        state = other.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    remove_hook_from_submodules(other)
    assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("kind", KINDS)
def test_without_hooks_it_is_a_model_like_any_other(kind: str, tmp_path: Path) -> None:
    model, other = spread(Net, tmp_path, kind)
    other(X)
    remove_hook_from_submodules(other)
    assert not hasattr(other, "hf_device_map")
    assert torch.equal(model(ROW), other(ROW))
    assert torch.equal(model(X), other(X))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(other)))
    add(other)
    assert torch.equal(model(X), twin(X))
    add(model)
    assert torch.equal(model(X), other(X))
    assert torch.equal(model.double()(X.double()), other.double()(X.double()))


@pytest.mark.parametrize("kind", ["safetensors", "misaligned"])
def test_it_can_be_spread_again(kind: str, tmp_path: Path) -> None:
    model, other = spread(Net, tmp_path, kind)
    seen: list[str] = []

    class Watch(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            seen.append("ran")
            return output

    add_hook_to_module(other.blocks[0], Watch(), append=True)
    for device_map in ({"": "disk"}, {"": "cpu", "blocks.0": "disk"}, {"": "cpu"}):
        dispatch_model(other, device_map)
        assert torch.equal(model(ROW), other(ROW))
    assert seen == ["ran"] * 3
    other.to("cpu")


def test_values_may_come_from_a_state_or_a_folder(tmp_path: Path) -> None:
    from paceline.big_model.offload import offload_state_dict

    model = made(Net)
    other = dispatch_model(made(lambda: Net()), {"": "cpu", "blocks": "disk"}, offload_dir=tmp_path / "a")
    assert torch.equal(model(X), other(X))
    offload_state_dict(tmp_path / "b", model.state_dict())
    import json

    index = json.loads((tmp_path / "b" / "index.json").read_text())
    again = dispatch_model(empty(Net), {"": "disk"}, offload_dir=tmp_path / "b", offload_index=index)
    assert torch.equal(model(X), again.eval()(X))
    again = dispatch_model(empty(Net), {"": "cpu", "blocks": "disk"}, state_dict=model.state_dict(), offload_dir="c")
    assert torch.equal(model(X), again.eval()(X))


def test_cpu_and_disk_offload(tmp_path: Path) -> None:
    model = made(Net)
    assert torch.equal(cpu_offload(made(Net))(X), model(X))
    other = disk_offload(made(Net), tmp_path)
    assert torch.equal(other(X), model(X))
    pages = Pages()
    assert all(pages.holds(parameter) for parameter in other.parameters())
    assert (tmp_path / "index.json").exists()
    assert not pages.holds(other.blocks[0].scale)
    again = disk_offload(made(Net), tmp_path, offload_buffers=True)
    assert Pages().holds(again.blocks[0].scale)
    assert torch.equal(again(X), model(X))


def test_two_models_take_turns() -> None:
    one, hook = cpu_offload_with_hook(made(Net))
    two, second = cpu_offload_with_hook(made(Net), prev_module_hook=hook)
    assert torch.equal(one(X), two(X))
    second.offload()
    hook.remove()
    second.remove()
    assert not hasattr(one, "_hf_hook")
    assert torch.equal(one(X), made(Net)(X))


class Untied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 64)


def test_layers_lie_in_a_smaller_type_than_they_compute_in() -> None:
    model = made(Untied)
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, skip_modules_pattern=("head", r"\.1$"))
    assert model.blocks[0].up.weight.dtype == torch.bfloat16
    assert model.blocks[1].up.weight.dtype == torch.float32
    assert model.blocks[0].norm.weight.dtype == torch.float32
    expected = made(Untied)
    for name, part in expected.named_modules():
        if isinstance(part, nn.Linear) and not name.startswith(("head", "blocks.1.")):
            for parameter in part.parameters():
                parameter.data = parameter.data.bfloat16().float()
    assert torch.equal(model(X), expected(X))
    with pytest.raises(RuntimeError):
        model.blocks[0].up(torch.randn(3, 3))
    assert model.blocks[0].up.weight.dtype == torch.bfloat16
    other = made(Net)
    attach_layerwise_casting_hooks(other, torch.bfloat16, torch.float32, skip_modules_classes=(Block,))
    assert other.blocks[0].up.weight.dtype == torch.float32
    assert other.start.weight.dtype == torch.bfloat16


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["to", "cuda", "cpu", "half", "float", "double", "bfloat16"])
def test_moving_a_spread_model_is_refused(name: str, tmp_path: Path) -> None:
    _, other = spread(Net, tmp_path)
    with pytest.raises(RuntimeError, match=r"would move or convert Net, .* memory or disk.*remove_hook"):
        getattr(other, name)(*(["cpu"] if name == "to" else []))


def test_copying_and_pickling_a_spread_model_is_refused(tmp_path: Path) -> None:
    _, other = spread(Net, tmp_path)
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled, because its weights are mapped from files"):
            attempt(other)


def test_disk_needs_a_folder_where_values_are_in_memory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"device_map puts 'shift' on disk as torch\.float32, but .* as offload_dir="):
        dispatch_model(made(Net), {"": "disk"})
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"'shift' \(256 bytes\) cannot be offloaded"):
        disk_offload(made(Net), tmp_path / "file")


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"Net has no values for \d+ of its tensors: shift, start\.weight"):
        dispatch_model(empty(Net), {"": "cpu"}, force_hooks=True)


@pytest.mark.parametrize(
    ("device_map", "said"),
    [({"start": "cpu"}, "does not cover"), ({"": 7}, "this process sees"), ({"": "cpu", "x": 0}, "entry for 'x'")],
)
def test_maps_that_cannot_be_kept_are_refused_before_anything_moves(device_map: Any, said: str) -> None:
    model = made(Net)
    with pytest.raises(ValueError, match=said):
        dispatch_model(model, device_map)
    assert not hasattr(model, "hf_device_map")

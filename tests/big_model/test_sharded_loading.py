"""Weights from files into models that lie in parts: every process reads its own part, and the numbers are the same."""

from __future__ import annotations

import copy
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import RanksError, ranks
from tiny import QUIET
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import Accelerator, Trainer, TrainingModule, init_empty_weights, load_checkpoint_in_model
from paceline.big_model import deferred_weights, sharded_loading, weight_files
from paceline.messages import PacelineWarning
from paceline.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

WORDS, WIDTH, LENGTH = 26, 8, 5
SETTINGS: dict[str, Any] = QUIET | {"use_distributed_sampler": False, "max_epochs": 1}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Network(nn.Module):
    """Repeated blocks, a tied head, a buffer that is saved and one that is not."""

    def __init__(self, more: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.bend = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)
        if more:
            self.blocks[1].up = nn.Linear(WIDTH, 3 * WIDTH)
            self.classes = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        if hasattr(self, "classes"):
            x = self.classes(x)
        return self.head(self.bend(x.transpose(1, 2)).transpose(1, 2) * self.scale)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of a network in several files, that of the first seed."""
    path = tmp_path_factory.mktemp("weights")
    Accelerator(cpu=True).save_model(trained(), path, 900)
    assert len(list(path.glob("*-of-*.safetensors"))) > 3
    return path


def trained() -> Network:
    torch.manual_seed(3)
    network = Network()
    network.bend.running_mean.uniform_(-1, 1)
    network.bend.num_batches_tracked.fill_(7)
    return network


class Language(TrainingModule):
    """One script for all strategies: made empty, filled from a folder."""

    def __init__(self, folder: Path, empty: bool = True, change: Any = None, **load: Any) -> None:
        super().__init__()
        self.folder, self.empty, self.change, self.load = folder, empty, change, load
        self.more = False
        self.losses: list[Tensor] = []
        self.loaded: Any = None
        self.started: dict[str, Tensor] = {}
        self.random: Tensor | None = None

    def configure_model(self) -> None:
        if self.empty:
            with init_empty_weights():
                self.network = Network(self.more)
        else:
            self.network = Network(self.more)
        self.loaded = load_checkpoint_in_model(self.network, self.folder, **self.load)
        if self.change is not None:
            self.change(self)

    def on_fit_start(self) -> None:
        self.started = whole(self.trainer.strategy.model_state(self))
        self.random = torch.get_rng_state()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.network(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items() if not value.is_meta}


def batches(count: int = 3) -> list[Tensor]:
    """This rank's: the strategies compared see the same."""
    generator = torch.Generator().manual_seed(5 + int(os.environ.get("RANK", 0)))
    return [torch.randint(WORDS, (4, LENGTH), generator=generator) for _ in range(count)]


def fit(make: Any, strategy: Any, **arguments: Any) -> dict[str, Any]:
    """What a fit starts from and what it computes."""
    torch.manual_seed(11)
    module = make()
    trainer = Trainer(strategy=strategy, **{**SETTINGS, **arguments})
    trainer.fit(module, batches())
    return {
        "loaded": module.loaded,
        "started": module.started,
        "random": module.random,
        "losses": torch.stack(module.losses or [torch.zeros(())]),
        "end": whole(trainer.strategy.model_state(module)),
    }


def at(world: int, function: Any) -> list[Any]:
    return ranks(world, function) if world > 1 else [function()]


STRATEGIES: dict[str, Any] = {
    "cpu": (1, partial(str, "single_device")),
    "ddp": (2, DDPStrategy),
    "fsdp": (2, FSDPStrategy),
    "fsdp root only": (2, partial(FSDPStrategy, wrap=None)),
    "fsdp offload": (2, partial(FSDPStrategy, cpu_offload=True)),
    "hybrid": (4, partial(FSDPStrategy, sharding="hybrid", data_parallel_replicate=2)),
    "tensor": (2, partial(ModelParallelStrategy, tensor_parallel=2)),
    "tensor and fsdp": (4, partial(ModelParallelStrategy, tensor_parallel=2)),
    "pipeline": (2, partial(ModelParallelStrategy, pipeline_parallel=2, microbatches=2)),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_script_starts_from_the_same_bits_and_trains_to_the_same_under_every_strategy(
    name: str, folder: Path
) -> None:
    world, make = STRATEGIES[name]
    found = at(world, lambda: fit(partial(Language, folder), make()))
    usual = at(world, lambda: fit(partial(Language, folder, empty=False), make()))
    expected = trained().state_dict()
    started = {key.removeprefix("network."): value for key, value in found[0]["started"].items()}
    assert started.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in started.items())
    for one, other in zip(found, usual, strict=True):
        assert one["loaded"] == ([], [])
        assert torch.equal(one["losses"], other["losses"])
    assert all(torch.equal(value, usual[0]["end"][key]) for key, value in found[0]["end"].items())


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(None, "bf16-true"), (torch.bfloat16, "bf16-true"), (torch.bfloat16, "64-true"), (torch.float64, "bf16-mixed")],
)
def test_dtypes_are_converted_on_the_way_as_on_one_device(
    dtype: torch.dtype | None, precision: Any, folder: Path
) -> None:
    make = partial(Language, folder, dtype=dtype)
    (one,) = at(1, lambda: fit(make, "single_device", precision=precision))
    found = ranks(2, lambda: fit(make, FSDPStrategy(), precision=precision))[0]
    for key, value in one["started"].items():
        assert value.dtype == found["started"][key].dtype
        assert torch.equal(value, found["started"][key])


# ---- what the files miss ---------------------------------------------------------------------------------------------


class More(Language):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.more = True


def test_what_the_files_miss_is_initialized_by_the_layers_as_on_one_device(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    lacking = {}
    for file in folder.glob("*.safetensors"):
        lacking.update(load_file(file))
    del lacking["blocks.0.up.bias"]  # its layer's weight is there
    save_file(lacking, tmp_path / "model.safetensors")

    def run(strategy: Any) -> Any:
        if int(os.environ.get("RANK", 0)):
            return fit(partial(More, tmp_path), strategy)
        with pytest.warns(PacelineWarning, match=r"3 missing from the checkpoint \(.*initialized by their layers"):
            return fit(partial(More, tmp_path), strategy)

    (one,) = at(1, lambda: run("single_device"))
    many = ranks(2, lambda: run(FSDPStrategy()))
    assert sorted(one["loaded"].missing_keys) == ["blocks.0.up.bias", "classes.bias", "classes.weight"]
    assert many[0]["loaded"] == one["loaded"]
    assert many[0]["started"].keys() == one["started"].keys()
    for key, value in one["started"].items():
        assert torch.equal(value, many[0]["started"][key]), key
    expected = trained().state_dict()
    assert torch.equal(one["started"]["network.blocks.0.up.weight"], expected["blocks.0.up.weight"])
    assert one["started"]["network.classes.weight"].abs().sum() > 0
    assert all(torch.equal(one["random"], found["random"]) for found in many)


def test_nothing_random_is_drawn_for_what_the_files_have(folder: Path) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    found = ranks(2, lambda: fit(partial(Language, folder), FSDPStrategy()))
    assert all(torch.equal(before, one["random"]) for one in found)


def test_strict_loading_is_an_error_on_all_ranks_before_anything_is_read(folder: Path) -> None:
    with pytest.raises(RanksError) as caught:
        ranks(2, lambda: fit(partial(More, folder, strict=True), FSDPStrategy()))
    assert [type(error) for error in caught.value.errors] == [RuntimeError] * 2
    text = "2 missing from the checkpoint (classes.weight, classes.bias)"
    assert all(text in str(error) for error in caught.value.errors)


# ---- how much a process holds ----------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


class Allocated(TorchDispatchMode):
    """Bytes that new tensors take, the largest of them, and bytes that are copied from files."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        result = plain(answer)
        inputs = {plain(t).untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        if (
            type(result) is Tensor and not result.is_meta and result.is_floating_point()
        ):  # others are objects that are sent, and what is asked about pages
            storage = result.untyped_storage()
            mapped = weight_files.Pages().holds(result)
            if storage.nbytes() and storage.data_ptr() not in inputs and not mapped:
                self.total += storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        return answer


def test_no_process_allocates_more_than_its_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Any:
        counted, copied = Allocated(), []
        fill = sharded_loading.fill

        def counting(own: Tensor, *rest: Any) -> None:
            fill(own, *rest)
            copied.append(sharded_loading.local(own).nbytes)

        monkeypatch.setattr(sharded_loading, "fill", counting)

        class Counted(Language):
            def configure_model(self) -> None:
                with init_empty_weights():
                    self.network = Network()
                counted.__enter__()
                load_checkpoint_in_model(self.network, self.folder)

            def on_fit_start(self) -> None:
                counted.__exit__(None, None, None)
                self.held = sum(p.to_local().nbytes for p in self.parameters())
                self.size = sum(p.numel() * p.itemsize for p in self.parameters())

        module = Counted(folder)
        Trainer(strategy=FSDPStrategy(), **SETTINGS).fit(module, batches())
        return counted.total, counted.largest, sum(copied), module.held, module.size

    found = ranks(2, run)
    size = found[0][4]
    embedding = WORDS * WIDTH * 4
    assert sum(held for *_, held, _ in found) == size
    for total, largest, copied, held, _ in found:
        assert copied == held
        assert largest <= max(embedding // 2, 3 * WIDTH * WIDTH * 4)
        assert held <= total < 0.8 * size


# ---- a checkpoint wins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_run_that_goes_on_does_not_read_the_files(kind: Any, folder: Path, tmp_path: Path) -> None:
    def run() -> Any:
        module = Language(folder)
        trainer = Trainer(strategy=FSDPStrategy(state_dict_type=kind), **SETTINGS)
        trainer.fit(module, batches(2))
        trainer.save_checkpoint(tmp_path / "it.ckpt")
        saved = whole(trainer.strategy.model_state(module))
        read: list[Any] = []
        again = Language(folder)
        again.change = lambda module: monkey.setattr(sharded_loading, "fill", lambda *a: read.append(a))
        monkey = pytest.MonkeyPatch()
        goes_on = Trainer(strategy=FSDPStrategy(), **{**SETTINGS, "max_epochs": 2})
        goes_on.fit(again, batches(2), ckpt_path=tmp_path / "it.ckpt")
        monkey.undo()
        only_weights = Language(folder)
        validated = Trainer(strategy=FSDPStrategy(), **{**SETTINGS, "max_epochs": 2})
        validated.fit(only_weights, batches(2), ckpt_path=tmp_path / "it.ckpt", restore=["model"])
        return saved, again.started, len(read), only_weights.started

    (saved, started, read, other), _ = ranks(2, run)
    assert read == 0
    assert all(torch.equal(value, started[key]) for key, value in saved.items())
    assert all(torch.equal(value, other[key]) for key, value in saved.items())


def test_what_a_checkpoint_does_not_bring_is_read(folder: Path, tmp_path: Path) -> None:
    def run() -> Any:
        module = Language(folder)
        trainer = Trainer(strategy=FSDPStrategy(), **SETTINGS)
        trainer.fit(module, batches(2))
        trainer.save_checkpoint(tmp_path / "it.ckpt")

        class InPart(Language):
            def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                del checkpoint["state_dict"]["network.blocks.0.up.weight"]

        again = InPart(folder)
        again.strict_loading = False
        Trainer(strategy=FSDPStrategy(), **{**SETTINGS, "max_epochs": 2}).fit(
            again, batches(2), ckpt_path=tmp_path / "it.ckpt", restore=["model"]
        )
        return again.started

    started, _ = ranks(2, run)
    assert torch.equal(started["network.blocks.0.up.weight"], trained().blocks[0].up.weight)  # type: ignore[union-attr]
    assert not torch.equal(started["network.embed.weight"], trained().embed.weight)


# ---- what is done to a model after it was loaded -----------------------------------------------------------------


def test_a_copy_of_a_loaded_model_is_filled_too(folder: Path) -> None:
    def teacher(module: Any) -> None:
        module.teacher = copy.deepcopy(module.network).requires_grad_(False)

    (found, _) = ranks(2, lambda: fit(partial(Language, folder, change=teacher), FSDPStrategy()))
    for key, value in trained().state_dict().items():
        assert torch.equal(found["started"][f"teacher.{key}"], value)
        assert torch.equal(found["started"][f"network.{key}"], value)


def test_a_loaded_model_may_be_sent_to_other_processes(folder: Path) -> None:
    with init_empty_weights():
        network = Network()
    with deferred_weights.noting():
        load_checkpoint_in_model(network, folder)
    found = pickle.loads(pickle.dumps(network))
    assert found.head.weight is found.embed.weight
    assert str(deferred_weights.Waiting(found)) == str(deferred_weights.Waiting(network)) != ""


def test_a_model_is_evaluated_without_a_fit(folder: Path) -> None:
    class Evaluated(Language):
        def forward(self, batch: Tensor) -> Tensor:
            return self.network(batch)

    def run(strategy: Any) -> Any:
        torch.manual_seed(11)
        return torch.cat(Trainer(strategy=strategy, **SETTINGS).predict(Evaluated(folder), batches(1)))

    rank_0 = batches(1)[0]
    expected = trained().eval()(rank_0)
    assert torch.allclose(run("single_device"), expected, atol=1e-6)
    assert torch.allclose(ranks(2, lambda: run(FSDPStrategy()))[0], expected, atol=1e-6)


def test_building_the_model_again_in_a_later_run_is_an_error(folder: Path) -> None:
    def run() -> None:
        module = Language(folder)
        trainer = Trainer(strategy=FSDPStrategy(), **SETTINGS)
        trainer.fit(module, batches(1))
        with pytest.raises(RuntimeError, match=r"recreated without memory.*in every run"):
            trainer.fit(module, batches(1))

    ranks(2, run)


def zero(module: Any) -> None:
    nn.init.zeros_(module.network.head.weight)


def resize(module: Any) -> None:
    with torch.device("meta"):
        module.network.embed = nn.Embedding(WORDS + 2, WIDTH)


@pytest.mark.parametrize(("change", "said"), [(zero, "changed in place"), (resize, "replaced by a new parameter")])
def test_a_change_to_a_loaded_model_that_would_be_lost_is_an_error(change: Any, said: str, folder: Path) -> None:
    def run() -> None:
        with pytest.raises(
            RuntimeError, match=rf"embed.weight was loaded from a file and then {said}.*Change the parameter before"
        ):
            fit(partial(Language, folder, change=change), FSDPStrategy())

    ranks(2, run)


def test_loading_on_one_rank_only_is_an_error_on_all(folder: Path) -> None:
    def run() -> None:
        class Alone(Language):
            def configure_model(self) -> None:
                with init_empty_weights():
                    self.network = Network()
                if self.trainer.is_global_zero:
                    load_checkpoint_in_model(self.network, self.folder)

        with pytest.raises(RuntimeError, match="Call load_checkpoint_in_model on every rank"):
            fit(partial(Alone, folder), FSDPStrategy())

    ranks(2, run)


# ---- files that are bad ------------------------------------------------------------------------------------------


def copied(folder: Path, target: Path) -> list[Path]:
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return sorted(target.glob("*.safetensors"))


def harm(file: Path, how: str) -> None:
    from safetensors.torch import load_file, save_file

    if how == "missing":
        file.unlink(missing_ok=True)
    elif how == "corrupt":
        file.write_bytes(b"x" * 50)
    else:
        save_file({name: value[:1].clone() for name, value in load_file(file).items()}, file)


def look_elsewhere(module: nn.Module, place: Path) -> None:
    """Let the notes of one process's parameters mean other files: those of another machine."""
    for parameter in module.parameters():
        note, version = vars(parameter)["_paceline_note"]
        vars(parameter)["_paceline_note"] = (note._replace(file=place / note.file.name), version)


SAID = {
    "missing": "could not be found|No such file",
    "corrupt": "damaged or has another format",
    "another shape": r"has the shape \(1,",
}


@pytest.mark.parametrize("when", ["before", "after the names were read", "after, on one rank"])
@pytest.mark.parametrize("how", list(SAID))
def test_bad_files_are_the_same_error_on_all_ranks(how: str, when: str, folder: Path, tmp_path: Path) -> None:
    bad = copied(folder, tmp_path)[1]
    if when == "before":
        harm(bad, how)

    def later(module: Any) -> None:
        module.trainer.strategy.barrier()
        if when == "after, on one rank" and not module.trainer.is_global_zero:
            other = tmp_path / "other"
            other.mkdir()
            harm(copied(folder, other)[1], how)
            look_elsewhere(module, other)
        elif when == "after the names were read" and module.trainer.is_global_zero:
            harm(bad, how)
        module.trainer.strategy.barrier()

    with pytest.raises(RanksError) as caught:
        ranks(2, lambda: fit(partial(Language, tmp_path, change=later), FSDPStrategy()))
    assert all(error is not None for error in caught.value.errors)
    for error in caught.value.errors:
        with pytest.raises((RuntimeError, ValueError, OSError), match=SAID[how]):
            raise error  # type: ignore[misc]


# ---- the part of a process -------------------------------------------------------------------------------------------

LAYOUTS: list[Any] = [
    [Shard(0), Replicate()],
    [Replicate(), Shard(0)],
    [Shard(0), Shard(0)],
    [Shard(0), Shard(1)],
    [Shard(1), Replicate()],
    [_StridedShard(0, split_factor=2), Shard(0)],
    [_StridedShard(1, split_factor=2), Shard(1)],
]


def test_the_part_is_the_one_that_torch_gives_a_process() -> None:
    def run() -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for shape in ((8, 8), (5, 7), (1, 3), (3, 9, 2), (16,), (4,)):
            value = torch.randn(shape, generator=torch.Generator().manual_seed(1))
            for placements in LAYOUTS:
                if any(getattr(p, "dim", 0) >= len(shape) for p in placements):
                    continue
                spread = distribute_tensor(value, mesh, placements, src_data_rank=None)
                assert torch.equal(sharded_loading.part_of(value, spread), spread.to_local()), (shape, placements)
                empty = torch.empty_like(spread)
                sharded_loading.fill(empty, value.double(), None, weight_files.Pages())
                assert torch.equal(empty.to_local(), spread.to_local())

    ranks(4, run)


class Feed(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("meta", [False, True], ids=["with values", "on meta"])
@pytest.mark.parametrize(("width", "inner"), [(8, 16), (6, 10), (5, 6)])
def test_models_that_torch_has_split_are_filled(width: int, inner: int, meta: bool, tmp_path: Path) -> None:
    torch.manual_seed(4)
    whole_model = nn.Sequential(Feed(width, inner), Feed(width, inner))
    Accelerator(cpu=True).save_model(whole_model, tmp_path, 500)
    x = torch.randn(3, width)
    expected = whole_model(x).detach()

    def run() -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with torch.device("meta" if meta else "cpu"):
            model = nn.Sequential(Feed(width, inner), Feed(width, inner))
        for feed in model:
            parallelize_module(feed, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(feed, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        assert load_checkpoint_in_model(model, tmp_path, strict=True) == ([], [])
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), whole_model.get_parameter(name)), name
        assert torch.allclose(model(x), expected, atol=1e-6)
        model(x).sum().backward()

    ranks(4, run)


# ---- Accelerator -----------------------------------------------------------------------------------------------------


def loop(folder: Path, how: str, **arguments: Any) -> dict[str, Any]:
    """A loop of one's own over a network that is filled before, by or after ``prepare``."""
    torch.manual_seed(11)
    accelerator = Accelerator(cpu=True, **arguments)
    if how == "usual":
        network = Network()
        load_checkpoint_in_model(network, folder)
    elif how == "by prepare":
        with accelerator.init_module(), init_empty_weights():
            network = Network()
            load_checkpoint_in_model(network, folder, strict=True)
    else:
        with init_empty_weights():
            network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    network, optimizer = accelerator.prepare(network, optimizer)
    if how == "after prepare":
        load_checkpoint_in_model(network, folder, strict=True)
    started, losses = whole(accelerator.get_state_dict(network)), []
    for batch in batches():
        loss = nn.functional.cross_entropy(network(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        losses.append(loss.detach())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return {"started": started, "losses": torch.stack(losses), "end": whole(accelerator.get_state_dict(network))}


@pytest.mark.parametrize("how", ["by prepare", "after prepare"])
@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
def test_a_prepared_model_starts_from_the_same_bits_and_trains_to_the_same(
    strategy: str, how: str, folder: Path
) -> None:
    if strategy == "single_device" and how == "by prepare":
        pytest.skip("it is loaded at once")
    world = 1 if strategy == "single_device" else 2
    found = at(world, lambda: loop(folder, how, strategy=strategy))
    usual = at(world, lambda: loop(folder, "usual", strategy=strategy))
    expected = trained().state_dict()
    assert all(torch.equal(found[0]["started"][key], value) for key, value in expected.items())
    for one, other in zip(found, usual, strict=True):
        assert torch.equal(one["losses"], other["losses"])
    assert all(torch.equal(value, usual[0]["end"][key]) for key, value in found[0]["end"].items())


class Table(nn.Module):
    """Holds a parameter that no method of its own fills."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.table = nn.Parameter(torch.ones(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + self.table)


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
def test_a_model_that_nothing_initializes_may_be_prepared_and_must_then_be_loaded(
    strategy: str, tmp_path: Path
) -> None:
    Accelerator(cpu=True).save_model(Table(), tmp_path)

    def run(load: bool) -> None:
        accelerator = Accelerator(cpu=True, strategy=strategy)
        with init_empty_weights():
            model = Table()
        model = accelerator.prepare(model)
        if load:
            load_checkpoint_in_model(model, tmp_path)
            assert model(torch.zeros(2, LENGTH, WIDTH)).isfinite().all()
            return
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"nothing sets the values of 'table'.*load_checkpoint_in_model"):
                model(torch.zeros(2, LENGTH, WIDTH))

    for load in (True, False):
        at(1 if strategy == "single_device" else 2, partial(run, load))


def test_weights_are_loaded_into_a_sharded_model_in_the_middle_of_a_run(folder: Path) -> None:
    """Its root is whole after a forward; what is loaded then must not be lost."""

    def run() -> None:
        accelerator = Accelerator(cpu=True, strategy="fsdp")
        network = accelerator.prepare(Network())
        network(batches()[0])
        load_checkpoint_in_model(network, folder)
        found = accelerator.get_state_dict(network)
        if accelerator.is_main_process:
            assert all(torch.equal(found[key], value) for key, value in trained().state_dict().items())
        with pytest.raises(ValueError, match=r"blocks.0.norm.bias is already sharded as torch.float32.*before prepare"):
            load_checkpoint_in_model(network, folder, dtype=torch.bfloat16)

    ranks(2, run)


@pytest.mark.parametrize("how", list(SAID))
def test_one_rank_with_bad_files_stops_all_that_load_into_a_prepared_model(
    how: str, folder: Path, tmp_path: Path
) -> None:
    harm(copied(folder, tmp_path)[1], how)

    def run() -> None:
        accelerator = Accelerator(cpu=True, strategy="fsdp")
        network = accelerator.prepare(Network())
        mine = folder if accelerator.is_main_process else tmp_path
        with pytest.raises((RuntimeError, ValueError, OSError), match=SAID[how]):
            load_checkpoint_in_model(network, mine)

    ranks(2, run)


# ---- models of transformers ------------------------------------------------------------------------------------------


def llama(tied: bool) -> Any:
    import transformers

    return transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip


class Pretrained(Language):
    def __init__(self, folder: Path, empty: bool, tied: bool) -> None:
        super().__init__(folder, empty)
        self.tied = tied

    def configure_model(self) -> None:
        from transformers import AutoModelForCausalLM

        if self.empty:
            with init_empty_weights():
                self.network = AutoModelForCausalLM.from_config(llama(self.tied))
        else:
            self.network = AutoModelForCausalLM.from_config(llama(self.tied))
        self.loaded = load_checkpoint_in_model(self.network, self.folder, strict=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.network(input_ids=batch, labels=batch).loss
        self.losses.append(loss.detach())
        return loss


@pytest.mark.parametrize("tied", [False, True], ids=["two tables", "tied"])
@pytest.mark.parametrize("name", ["cpu", "fsdp", "tensor"])
def test_a_model_of_transformers_is_made_empty_and_filled_from_its_shards(
    name: str, tied: bool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    saved = transformers.AutoModelForCausalLM.from_config(llama(tied))
    saved.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*-of-*.safetensors"))) > 2
    world, make = STRATEGIES[name]
    found = at(world, lambda: fit(partial(Pretrained, tmp_path, True, tied), make()))
    usual = at(world, lambda: fit(partial(Pretrained, tmp_path, False, tied), make()))
    for key, value in saved.state_dict().items():
        assert torch.equal(found[0]["started"][f"network.{key}"], value), key
    for one, other in zip(found, usual, strict=True):
        assert torch.equal(one["losses"], other["losses"])
    assert all(torch.equal(value, usual[0]["end"][key]) for key, value in found[0]["end"].items())

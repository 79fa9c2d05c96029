"""Checkpoints that are folders: written by all processes, read by any number of them."""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
import resource
import signal
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from rank_processes import RanksError, ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Trainer, TrainingModule
from paceline.callbacks import ModelCheckpoint
from paceline.checkpoint import atomic_write, manifest
from paceline.checkpoint.atomic_write import take_place
from paceline.checkpoint.checksums import sums
from paceline.checkpoint.read import read
from paceline.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

EXACT = 1e-11
SHARDED = partial(FSDPStrategy, state_dict_type="sharded")
PLACES: dict[str, tuple[int, Any]] = {
    "single": (1, "single_device"),
    "ddp x2": (2, DDPStrategy),
    "fsdp x2": (2, FSDPStrategy),
    "sharded x2": (2, SHARDED),
    "sharded x3": (3, SHARDED),
    "sharded 2x2": (4, partial(SHARDED, data_parallel_replicate=2)),
    "sharded and split": (
        4,
        partial(
            ModelParallelStrategy,
            data_parallel_shard=2,
            tensor_parallel=2,
            plan={"blocks.*.0": "colwise", "blocks.*.2": "rowwise"},
            state_dict_type="sharded",
        ),
    ),
}


class Net(TrainingModule):
    """Tied first and last layer, a batch norm with buffers, a parameter that is smaller than the number of ranks."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first = nn.Linear(6, 6, bias=False)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2)])
            self.norm = nn.BatchNorm1d(6)
            self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        y = self.first(x)
        for block in self.blocks:
            y = block(y)
        self.norm.eval()
        loss = (self.last(self.norm(y)) * self.scale - x).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


def loader(rank: int, world: int, batches: int = 3, size: int = 12) -> DataLoader:
    data = torch.randn(batches * size, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    share = size // world
    order = [b * size + rank * share + i for b in range(batches) for i in range(share)]
    return DataLoader(TensorDataset(data), batch_size=share, sampler=order)


def fit(strategy: Any, seed: int = 1, ckpt_path: Any = None, callbacks: Any = None, **arguments: Any) -> Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "precision": "64-true",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": callbacks is not None,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    trainer = Trainer(strategy=strategy, callbacks=callbacks, **{**settings, **arguments})
    strategy = trainer.strategy
    trainer.fit(Net(seed), loader(strategy.data_rank, strategy.num_data_ranks), ckpt_path=ckpt_path)
    return trainer


def run_at(place: str, save: Any = None, **arguments: Any) -> dict[str, Tensor]:
    world, strategy = PLACES[place]

    def run() -> Any:
        trainer = fit(strategy if isinstance(strategy, str) else strategy(), **arguments)
        if save is not None:
            trainer.save_checkpoint(save)
        return trainer.strategy.model_state(trainer.training_module)

    return run() if world == 1 else ranks(world, run)[0]


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(one) == list(other)
    return max(float((one[k] - other[k]).abs().max()) for k in one)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one epoch, written by two processes."""
    path = tmp_path_factory.mktemp("sharded") / "two.ckpt"
    run_at("sharded x2", path)
    return path


@pytest.mark.parametrize("place", PLACES)
def test_a_run_goes_on_from_a_folder_at_any_place(place: str, folder: Path) -> None:
    assert furthest(run_at("single", max_epochs=2), run_at(place, seed=2, ckpt_path=folder, max_epochs=2)) < EXACT


@pytest.mark.parametrize("place", ["sharded x3", "sharded 2x2", "sharded and split"])
def test_any_number_of_processes_writes_a_folder(place: str, tmp_path: Path) -> None:
    run_at(place, tmp_path / "it.ckpt")
    went_on = run_at("sharded x2", seed=2, ckpt_path=tmp_path / "it.ckpt", max_epochs=2)
    assert furthest(run_at("single", max_epochs=2), went_on) < EXACT


def test_a_folder_holds_what_the_file_of_one_process_holds(folder: Path, tmp_path: Path) -> None:
    run_at("fsdp x2", tmp_path / "one.ckpt")
    one, two = read(tmp_path / "one.ckpt"), read(folder)
    assert list(one) == list(two)
    assert furthest(one["state_dict"], two["state_dict"]) == 0
    assert one["optimizer_states"][0]["param_groups"] == two["optimizer_states"][0]["param_groups"]
    for index, state in one["optimizer_states"][0]["state"].items():
        assert all(torch.equal(value, two["optimizer_states"][0]["state"][index][key]) for key, value in state.items())
    assert two["state_dict"]["first.weight"] is two["state_dict"]["last.weight"]
    module = Net.load_from_checkpoint(folder)
    assert furthest(dict(module.double().state_dict()), two["state_dict"]) < 1e-6  # it was made in float32


def test_each_process_writes_a_part_and_the_folder_has_nothing_else(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "contents.ckpt", "manifest.json"]
    assert list(folder.parent.iterdir()) == [folder]
    contents = torch.load(folder / "contents.ckpt", weights_only=True)
    assert contents["state_dict"]["first.weight"].is_meta
    assert not contents["state_dict"]["norm.running_mean"].is_meta


def test_reading_in_parts_reads_no_whole_tensor(folder: Path) -> None:
    def run() -> Any:
        strategy = SHARDED()
        strategy.place([torch.device("cpu")] * 2)
        strategy.setup_environment()
        found = read(folder, strategy=strategy)
        return found["state_dict"]["first.weight"].to_local().shape, found["state_dict"]["norm.weight"].to_local().shape

    assert ranks(2, run) == [((3, 6), (3,)), ((3, 6), (3,))]


# ---- whole or not at all ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata", "contents.ckpt", "manifest.json"])
@pytest.mark.parametrize("how", ["missing", "cut", "changed", "appended to"])
def test_a_damaged_folder_is_refused(name: str, how: str, folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "it.ckpt"
    copied.mkdir()
    for path in folder.iterdir():
        data = bytearray(path.read_bytes())
        if path.name == name and how == "missing":
            continue
        if path.name == name and how == "cut":
            data = data[:-7]
        if path.name == name and how == "appended to":
            data += b"\n"
        if path.name == name and how == "changed":
            data[len(data) // 2] ^= 1
        (copied / path.name).write_bytes(data)
    with pytest.raises(ValueError, match=f"damaged or truncated: its file '{name}' "):
        read(copied)
    with pytest.raises(ValueError, match=f"damaged or truncated: its file '{name}' "):
        read(copied, map_location="meta")


def test_an_index_that_names_code_is_refused(folder: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("touch ran",)

    copied = tmp_path / "it.ckpt"
    copied.mkdir()
    for path in folder.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    (copied / ".metadata").write_bytes(pickle.dumps(Evil()))
    found = manifest.read_folder(copied)
    (copied / "manifest.json").unlink()
    manifest.write(copied, dataclasses.replace(found, files=found.files | sums([copied / ".metadata"])))
    with pytest.raises(ValueError, match=r"nothing in it was run, because its index would import posix.system"):
        read(copied)
    assert not Path("ran").exists()


def test_a_write_that_fails_on_one_rank_fails_on_all_and_leaves_what_was_there(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "it.ckpt"

    def run() -> Any:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        trainer = fit(SHARDED())
        trainer.save_checkpoint(target)
        if int(os.environ["RANK"]) == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        messages = []
        try:
            trainer.save_checkpoint(target)
        except OSError as error:
            messages.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return messages

    one, two = ranks(2, run)
    assert len(one) == len(two) == 1
    assert "rank 1 could not write its shards" in one[0]
    assert "rank 1 could not write its shards" in two[0]
    assert list(tmp_path.iterdir()) == [target]
    assert read(target)["epoch"] == read(folder)["epoch"]


def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(RanksError, match=r"A folder with this name already exists, but it is not a checkpoint"):
        run_at("sharded x2", tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_files_and_folders_replace_each_other(tmp_path: Path) -> None:
    def make(name: str, folder: bool) -> Path:
        path = tmp_path / name
        if folder:
            path.mkdir()
            path = path / "inside"
        path.write_text(name)
        return tmp_path / name

    for new in (False, True, True, False, False):
        take_place(make("new", new), tmp_path / "it")
        assert (tmp_path / "it").is_dir() is new
        assert [path.name for path in tmp_path.iterdir()] == ["it"]


@pytest.mark.parametrize("linux", [True, False])
@pytest.mark.parametrize("folder", [True, False])
def test_a_new_name_replaces_nothing(folder: bool, linux: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if not linux:
        monkeypatch.setattr(atomic_write, "_renameat2", lambda *_: errno.ENOSYS)
    for turn in ("first", "second"):
        inside = new = tmp_path / "new"
        if folder:
            new.mkdir()
            inside = new / "inside"
        inside.write_text(turn)
        if turn == "first":
            take_place(new, tmp_path / "it", new=True)
        else:
            with pytest.raises(FileExistsError, match=r"another run saved a checkpoint with the same name.*dirpath"):
                take_place(new, tmp_path / "it", new=True)
    assert (tmp_path / "it" / "inside" if folder else tmp_path / "it").read_text() == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it", "new"]


def test_what_killed_saves_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    ours = [atomic_write.temporary_name("a.ckpt"), atomic_write.temporary_name("x" * 254), f".{uuid4().hex}.tmp"]
    others = ["a.ckpt", ".a.ckpt.tmp", ".notes.1.tmp", "a.0123456789ab.tmp", ".hidden"]
    for name in [*ours, *others]:
        (tmp_path / name).write_text(name)
    (tmp_path / atomic_write.temporary_name("folder.ckpt")).mkdir()
    atomic_write.remove_temporaries(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_model_checkpoint_keeps_and_deletes_folders(tmp_path: Path) -> None:
    def run() -> Any:
        keeper = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_last=True)
        fit(SHARDED(), callbacks=[keeper], max_epochs=3)
        return keeper.best_model_path, keeper.last_model_path

    best, last = ranks(2, run)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=9.ckpt"]
    assert (Path(best).name, Path(last).name) == ("step=9.ckpt", "last.ckpt")
    assert Path(best).is_dir()


def test_last_is_the_newest_folder_that_is_whole(tmp_path: Path) -> None:
    def run() -> Any:
        return fit(
            SHARDED(), callbacks=[ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, filename="{step}")], max_epochs=2
        )

    def resume() -> Any:
        trainer = fit(SHARDED(), callbacks=[ModelCheckpoint(dirpath=tmp_path)], max_epochs=2, ckpt_path="last")
        return str(trainer.ckpt_path)

    ranks(2, lambda: run() and None)
    (tmp_path / "step=6.ckpt" / "__0_0.distcp").write_bytes(b"")
    os.utime(tmp_path / "step=6.ckpt")
    assert ranks(2, resume) == [str(tmp_path / "step=3.ckpt")] * 2

"""Runs whose checkpoints lie behind an address: in memory, on a disk that shows what it does, on a real S3 server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RanksError, ranks
from remote_places import Disk, s3_server
from tiny import TinyModule, tiny_loader

from paceline import Trainer
from paceline.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from paceline.checkpoint import manifest, single_file
from paceline.checkpoint.read import read
from paceline.checkpoint.storage import Remote, location
from paceline.cli.main import main
from paceline.loggers import CSVLogger
from paceline.messages import PacelineWarning
from paceline.strategies import FSDPStrategy

SILENT: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """The settings for a server with a bucket."""
    pytest.importorskip("moto", reason="needs moto")
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs")
    import fsspec

    s3fs.S3FileSystem.clear_instance_cache()  # of a server that this process had before
    with s3_server() as url:
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
        settings = {**keys, "AWS_ENDPOINT_URL": url}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            fsspec.filesystem("s3").makedirs("bucket", exist_ok=True)  # moto keeps what servers before had
        yield settings


@pytest.fixture(params=["memory", "disk", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An address under which nothing lies yet."""
    if request.param == "s3":
        for name, value in request.getfixturevalue("s3").items():
            monkeypatch.setenv(name, value)
        return f"s3://bucket/{tmp_path.parent.name}-{tmp_path.name}"
    return f"{request.param}://{tmp_path}/remote"


def seen(address: str) -> list[str]:
    """Everything below an address."""
    where = location(address)
    assert isinstance(where, Remote)
    return sorted(str(found).removeprefix(f"{where}/") for found in where.files_below())


def fit(epochs: int, callbacks: Any, ckpt_path: Any = None, module: Any = None, **arguments: Any) -> Trainer:
    torch.manual_seed(1)
    settings = {"logger": False, **SILENT, **arguments}
    trainer = Trainer(max_epochs=epochs, callbacks=callbacks, **settings)
    loaders = tiny_loader(shuffle=True), tiny_loader(2)
    trainer.fit(module or TinyModule(), *loaders, ckpt_path=ckpt_path)
    return trainer


def best_two(folder: str | None = None) -> ModelCheckpoint:
    return ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}")


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_saves_keeps_the_best_and_goes_on_as_on_a_local_folder(root: str) -> None:
    local = best_two("local")
    whole = fit(4, local)
    fit(2, best_two(root))
    assert seen(root) == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    again = best_two(root)
    resumed = fit(4, again, ckpt_path="last", module=TinyModule())
    assert str(resumed.ckpt_path).startswith(f"{root}/")
    assert torch.equal(resumed.model.layer.weight, whole.model.layer.weight)
    assert again.best_model_path == f"{root}/{Path(local.best_model_path).name}"
    assert [f"{root}/{Path(path).name}" for path in local.best_k_models] == list(again.best_k_models)
    assert set(seen(root)) == {path.name for path in Path("local").iterdir()}
    loaded = TinyModule.load_from_checkpoint(f"{root}/last.ckpt")
    assert torch.equal(loaded.layer.weight, whole.model.layer.weight)
    assert fit(5, again, ckpt_path=again.last_model_path).global_step == 20
    assert fit(5, best_two(root), ckpt_path=again.best_model_path).global_step == 20


def test_a_remote_root_takes_checkpoints_and_logs_stay_local(root: str, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "paceline")
    trainer = fit(1, None, default_root_dir=root, logger=True)
    assert trainer.checkpoint_callback.dirpath == f"{root}/checkpoints"
    assert seen(root) == ["checkpoints/epoch=0-step=4.ckpt"]
    assert trainer.log_dir.startswith(str(tmp_path))
    assert f"Checkpoints are written to {root}, but logs are written to the working directory" in caplog.text
    resumed = fit(2, None, ckpt_path="auto", default_root_dir=root, logger=CSVLogger("logs"))
    assert resumed.global_step == 8
    assert str(resumed.ckpt_path) == f"{root}/checkpoints/epoch=0-step=4.ckpt"
    assert (Path(resumed.log_dir) / "metrics.csv").exists()


def test_auto_starts_fresh_where_nothing_lies(root: str) -> None:
    trainer = fit(1, ModelCheckpoint(root), ckpt_path="auto")
    assert trainer.ckpt_path is None
    assert trainer.global_step == 4


def test_last_passes_over_what_is_damaged_or_was_never_finished(root: str) -> None:
    fit(2, ModelCheckpoint(root, save_top_k=-1, filename="{epoch}"))
    newest = location(f"{root}/epoch=1.ckpt")
    Path("torn").write_bytes(newest.read_bytes()[:-200])
    newest.upload(Path("torn"))
    location(f"{root}/half.ckpt/12ab/__0_0.distcp").upload(Path("torn"))
    with pytest.warns(PacelineWarning, match=r"half.ckpt \(it has no manifest.*uses .*epoch=0.ckpt"):
        trainer = fit(3, ModelCheckpoint(root, save_top_k=-1, filename="{epoch}"), ckpt_path="last")
    assert str(trainer.ckpt_path) == f"{root}/epoch=0.ckpt"


def test_retention_deletes_nothing_that_the_run_did_not_write(root: str) -> None:
    fit(1, ModelCheckpoint(root, filename="other"))
    fit(2, ModelCheckpoint(root, filename="other", save_top_k=1))
    assert len(seen(root)) == 2


def test_a_crash_is_saved_there(root: str) -> None:
    class Failing(TinyModule):
        def on_train_epoch_end(self) -> None:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fit(2, OnExceptionCheckpoint(root), module=Failing(), enable_checkpointing=False)
    assert seen(root) == ["on_exception.ckpt"]
    assert read(f"{root}/on_exception.ckpt")["global_step"] == 4


def test_the_command_line_works_there_too(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    fit(3, ModelCheckpoint(root, save_top_k=-1, filename="{epoch}"))
    assert main(["checkpoint", "ls", root]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main(["checkpoint", "verify", root]) == 0
    assert main(["checkpoint", "prune", root, "--keep-last", "1", "--yes"]) == 0
    assert seen(root) == ["epoch=2.ckpt"]
    assert main(["checkpoint", "export", f"{root}/epoch=2.ckpt", f"{root}/w.safetensors"]) == 0
    assert seen(root) == ["epoch=2.ckpt", "w.safetensors"]


def test_a_file_that_is_not_there_is_named_with_its_neighbors(root: str) -> None:
    trainer = fit(1, ModelCheckpoint(root, filename="best"))
    with pytest.raises(FileNotFoundError, match=r" contains best.ckpt. Did you mean 'best.ckpt'"):
        trainer.validate(dataloaders=tiny_loader(), ckpt_path=f"{root}/bets.ckpt")


# ---- folders in parts ------------------------------------------------------------------------------------------------


def save_in_parts(address: str, steps: int, before: Any = None, ckpt_path: Any = None) -> list[torch.Tensor]:
    """A fit on two processes that saves in the end; the weights it reached."""

    def run() -> torch.Tensor:
        strategy = FSDPStrategy(state_dict_type="sharded")
        trainer = Trainer(strategy=strategy, max_steps=steps, logger=False, enable_checkpointing=False, **SILENT)
        torch.manual_seed(1)
        trainer.fit(TinyModule(), tiny_loader(), ckpt_path=ckpt_path)
        if before is not None:
            before(trainer)
        trainer.save_checkpoint(address)
        return trainer.strategy.model_state(trainer.training_module)["layer.weight"]

    return ranks(2, run)


@pytest.mark.parametrize("root", ["disk", "s3"], indirect=True)
def test_a_folder_in_parts_is_written_replaced_and_read_by_any_number(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    address = f"{root}/x.ckpt"
    reached = save_in_parts(address, 2)
    assert torch.equal(read(address)["state_dict"]["layer.weight"], reached[0])
    first = seen(address)
    assert [name.partition("/")[2] for name in first if "/" in name] == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "contents.ckpt",
    ]
    assert "manifest.json" in first
    whole = save_in_parts(f"{root}/whole.ckpt", 4)
    assert torch.equal(save_in_parts(address, 4, ckpt_path=address)[0], whole[0])
    second = seen(address)
    assert len(second) == 5
    assert not {name for name in first if "/" in name} & set(second)
    assert read(address)["global_step"] == 4
    assert not list(tmp_path.glob(".*.tmp"))
    trainer = Trainer(max_steps=5, logger=False, enable_checkpointing=False, **SILENT)
    trainer.fit(TinyModule(), tiny_loader(), ckpt_path=address)
    assert trainer.global_step == 5
    copy = tmp_path / "copy.ckpt"
    for name in second:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        location(f"{address}/{name}").download(copy / name)
    assert torch.equal(read(copy)["state_dict"]["layer.weight"], whole[0])


def die_at_upload(trainer: Trainer, number: int) -> None:
    """Let rank 0 be killed at its n-th upload."""
    upload, calls = Remote.upload, []

    def deadly(self: Remote, source: Path) -> None:
        calls.append(self)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        upload(self, source)

    if trainer.is_global_zero:
        Remote.upload = deadly  # type: ignore[method-assign]


#: Its part, the contents, the manifest.
@pytest.mark.parametrize(("root", "number"), [("disk", 1), ("disk", 3), ("disk", 4), ("s3", 4)], indirect=["root"])
def test_a_kill_between_the_uploads_leaves_the_older_folder_valid(root: str, number: int) -> None:
    address = f"{root}/x.ckpt"
    old = save_in_parts(address, 2)
    with pytest.raises(RanksError):
        save_in_parts(address, 3, before=partial(die_at_upload, number=number))
    assert read(address)["global_step"] == 2
    assert torch.equal(read(address)["state_dict"]["layer.weight"], old[0])
    save_in_parts(address, 4)
    assert read(address)["global_step"] == 4


def test_a_folder_whose_upload_fails_is_as_it_was(tmp_path: Path) -> None:
    address = f"disk://{tmp_path}/x.ckpt"
    save_in_parts(address, 2)
    before = seen(address)

    def broken(self: Any, source: str, target: str, **options: Any) -> None:
        raise OSError(28, "No space left on device", target)

    def break_one(trainer: Trainer) -> None:
        if trainer.global_rank == 1:
            Disk.put_file = broken  # type: ignore[method-assign]

    with pytest.raises(RanksError, match=r"No space left on device"):
        save_in_parts(address, 3, before=break_one)
    assert seen(address) == before
    assert read(address)["global_step"] == 2


def test_a_folder_is_saved_even_if_what_it_replaces_cannot_be_deleted(tmp_path: Path) -> None:
    address = f"disk://{tmp_path}/x.ckpt"
    save_in_parts(address, 2)

    def refused(self: Any, path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    def refuse(trainer: Trainer) -> None:
        Disk.rm_file = refused  # type: ignore[method-assign]

    save_in_parts(address, 3, before=refuse)
    assert read(address)["global_step"] == 3
    assert len(seen(address)) == 9


def test_a_file_and_a_folder_replace_each_other(tmp_path: Path, s3: dict[str, str], monkeypatch: Any) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    address = f"s3://bucket/{tmp_path.name}/x.ckpt"
    save_in_parts(address, 2)
    single_file.write(small(7.0), address)
    assert read(address)["state_dict"]["weight"][0] == 7.0
    assert seen(f"s3://bucket/{tmp_path.name}") == ["x.ckpt"]
    save_in_parts(address, 3)
    assert read(address)["global_step"] == 3
    assert not location(address).is_file()


# ---- whole or not at all ---------------------------------------------------------------------------------------------


def small(value: float, size: int = 4) -> dict[str, Any]:
    return {"epoch": 0, "global_step": 1, "state_dict": {"weight": torch.full((size,), value)}}


class Relay:
    """Passes bytes on to a server, and kills whoever sends after so many of them."""

    def __init__(self, server: str, limit: int) -> None:
        host, port = server.removeprefix("http://").split(":")
        self._server, self._limit, self.victim = (host, int(port)), limit, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            for source, target, counted in ((client, server, True), (server, client, False)):
                self._threads.append(threading.Thread(target=self._pass_on, args=(source, target, counted)))
                self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                target.sendall(data)
                self._limit -= len(data) if counted else 0
                if self._limit < 0 and self.victim:
                    os.kill(self.victim, signal.SIGKILL)
                    self.victim = 0
                    break
        for end in (source, target):
            shut(end)

    def close(self) -> None:
        shut(self._listener)
        for thread in self._threads:
            thread.join()


def shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def test_kill_9_in_the_middle_of_an_upload_to_s3_leaves_the_old_file(
    tmp_path: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    address = f"s3://bucket/{tmp_path.name}/x.ckpt"
    single_file.write(small(1.0), address)
    relay = Relay(s3["AWS_ENDPOINT_URL"], limit=1_000_000)
    gate, opener = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(gate, 1)
        os.environ["AWS_ENDPOINT_URL"] = relay.address
        try:
            single_file.write(small(2.0, 2_000_000), address)
        finally:
            os._exit(7)
    relay.victim = pid
    os.write(opener, b"!")
    _, status = os.waitpid(pid, 0)
    os.close(gate)
    os.close(opener)
    relay.close()
    assert os.WIFSIGNALED(status)
    assert read(address)["state_dict"]["weight"].tolist() == [1.0] * 4
    assert manifest.read(address) is not None
    single_file.write(small(3.0), address)
    assert read(address)["state_dict"]["weight"][0] == 3.0


def test_a_bucket_that_does_not_exist_is_an_error_that_names_it(s3: dict[str, str], monkeypatch: Any) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OSError, match=r"checkpoint was not saved.*credentials.*s3://nobody/x.ckpt"):
        single_file.write(small(1.0), "s3://nobody/x.ckpt")
    with pytest.raises(FileNotFoundError, match="The file does not exist"):
        single_file.read("s3://nobody/x.ckpt")

"""A checkpoint file appears whole or not at all, and is read only when it is what it says it is."""

from __future__ import annotations

import errno
import io
import os
import pickle
import random
import resource
import signal
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import single_file
from paceline.checkpoint.checksums import problem
from paceline.loggers import CSVLogger


def checkpoint(value: float = 1.0, numel: int = 12) -> dict[str, Any]:
    section = {"format": single_file.FORMAT, "versions": {"paceline": "0.1.0"}}
    return {"state_dict": {"weight": torch.full((numel,), value)}, "epoch": 3, "paceline": section}


def value_in(path: Path) -> float:
    weight = single_file.read(path)["state_dict"]["weight"]
    assert torch.equal(weight, torch.full_like(weight, weight[0].item()))
    return weight[0].item()


def in_child(work: Callable[[], None]) -> tuple[int, Callable[[], int]]:
    """Run ``work`` in a forked process; returns its id and a function that waits for it and returns its wait status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid, lambda: os.waitpid(pid, 0)[1]


# ---- written whole or not at all -------------------------------------------------------------------------------------


def test_writing_makes_the_folder_and_leaves_one_file(tmp_path: Path):
    path = tmp_path / "a" / "b" / "x.ckpt"
    single_file.write(checkpoint(2.0), path)
    assert value_in(path) == 2.0
    assert os.listdir(path.parent) == ["x.ckpt"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_link_is_replaced_not_written_through(tmp_path: Path):
    single_file.write(checkpoint(1.0), tmp_path / "best.ckpt")
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    single_file.write(checkpoint(2.0), tmp_path / "last.ckpt")
    assert (value_in(tmp_path / "best.ckpt"), value_in(tmp_path / "last.ckpt")) == (1.0, 2.0)
    assert not (tmp_path / "last.ckpt").is_symlink()


def test_long_and_foreign_names_can_be_written(tmp_path: Path):
    for name in ("é中" * 40 + ".ckpt", "x" * 250 + ".ckpt"):
        single_file.write(checkpoint(), tmp_path / name)
        assert value_in(tmp_path / name) == 1.0


def test_the_shape_of_a_state_dict_and_shared_storage_survive(tmp_path: Path):
    module = torch.nn.Linear(3, 3)
    tied = torch.zeros(4)
    single_file.write({"state_dict": module.state_dict(), "a": tied, "b": tied[:2]}, tmp_path / "x.ckpt")
    read = single_file.read(tmp_path / "x.ckpt")
    assert read["state_dict"]._metadata == module.state_dict()._metadata
    read["a"][0] = 5
    assert read["b"][0] == 5


def test_data_that_is_not_plain_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "x.ckpt"
    single_file.write(checkpoint(1.0), path)
    with pytest.raises(TypeError, match=r"checkpoint\['callbacks'\]\['A'\] is of type"):
        single_file.write({**checkpoint(2.0), "callbacks": {"A": object()}}, path)
    assert value_in(path) == 1.0
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_data_that_contains_itself_is_an_error_and_leaves_nothing(tmp_path: Path):
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="contains itself"):
        single_file.write({"state_dict": {}, "loop": loop}, tmp_path / "x.ckpt")
    assert os.listdir(tmp_path) == []


def test_ctrl_c_while_writing_comes_out_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "x.ckpt"
    single_file.write(checkpoint(1.0), path)
    monkeypatch.setattr(single_file, "_Stream", InterruptedStream)
    with pytest.raises(KeyboardInterrupt):
        single_file.write(checkpoint(2.0, 100_000), path)
    assert value_in(path) == 1.0
    assert os.listdir(tmp_path) == ["x.ckpt"]


class InterruptedStream(single_file._Stream):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, Interrupting(value) if name == "raw" else value)


class Interrupting:
    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def write(self, data: Any) -> None:
        if len(data) > 100_000:
            raise KeyboardInterrupt
        self.raw.write(data)


def test_a_folder_in_the_way_is_an_error(tmp_path: Path):
    with pytest.raises(IsADirectoryError, match="this path is a folder") as caught:
        single_file.write(checkpoint(), tmp_path)
    assert caught.value.filename == str(tmp_path)


def test_a_file_where_the_folder_should_be_is_an_error_that_names_the_path(tmp_path: Path):
    (tmp_path / "runs").write_text("not a folder")
    with pytest.raises(OSError, match=r"the checkpoint was not saved.*dirpath") as caught:
        single_file.write(checkpoint(), tmp_path / "runs" / "x.ckpt")
    assert caught.value.errno in (errno.EEXIST, errno.ENOTDIR)
    assert caught.value.filename == str(tmp_path / "runs" / "x.ckpt")


def test_a_file_size_limit_leaves_the_old_file_and_names_path_and_bytes(tmp_path: Path):
    path = tmp_path / "x.ckpt"
    single_file.write(checkpoint(1.0), path)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
        try:
            single_file.write(checkpoint(2.0, 1_000_000), path)
        except OSError as error:
            (tmp_path / "error.txt").write_text(f"{error.errno}\n{error}")

    _, wait = in_child(work)
    assert wait() == 0
    number, message = (tmp_path / "error.txt").read_text().split("\n", 1)
    (tmp_path / "error.txt").unlink()
    assert int(number) == errno.EFBIG
    assert repr(str(path)) in message
    assert "needs about 4,000,000 bytes" in message
    assert "bytes are free in its folder" in message
    assert "The existing file is unchanged." in message
    assert value_in(path) == 1.0
    assert os.listdir(tmp_path) == ["x.ckpt"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 2 MB; only root can have one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_the_old_file_and_names_path_and_bytes(small_disk: Path):
    path = small_disk / "x.ckpt"
    single_file.write(checkpoint(1.0), path)
    with pytest.raises(OSError, match="No space left on device: the checkpoint was not saved") as caught:
        single_file.write(checkpoint(2.0, 1_000_000), path)
    assert caught.value.errno == errno.ENOSPC
    assert repr(str(path)) in str(caught.value)
    assert "needs about 4,000,000 bytes" in str(caught.value)
    assert "save_top_k" in str(caught.value)
    assert value_in(path) == 1.0
    assert os.listdir(small_disk) == ["x.ckpt"]
    single_file.write(checkpoint(3.0, 10_000), path)
    assert value_in(path) == 3.0


def test_a_read_only_folder_leaves_the_old_file_and_says_what_to_do(small_disk: Path):
    path = small_disk / "x.ckpt"
    single_file.write(checkpoint(1.0), path)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(OSError, match=r"Read-only file system: the checkpoint was not saved.*Make the folder writable"):
        single_file.write(checkpoint(2.0), path)
    logger = CSVLogger(small_disk / "logs")
    with pytest.raises(OSError, match=r"CSVLogger cannot .*Make the folder writable, .*save_dir.*Folder: '.*logs"):
        logger.log_metrics({"loss": 1.0}, step=0)
    assert value_in(path) == 1.0
    assert os.listdir(small_disk) == ["x.ckpt"]


def stopped_child(work: Callable[[], None], where: Any, name: str) -> Callable[[], int]:
    """Start ``work`` in a child that stops for good where ``where.name`` is called; returns what kills it and waits."""
    told, tell = os.pipe()

    def work_and_stop() -> None:
        setattr(where, name, lambda *_: (os.write(tell, b"!"), signal.pause()))
        work()

    pid, wait = in_child(work_and_stop)
    assert os.read(told, 1) == b"!"

    def kill() -> int:
        os.kill(pid, signal.SIGKILL)
        return os.WTERMSIG(wait())

    return kill


class HalfStream(single_file._Stream):
    def write(self, data: Any) -> int:
        if len(data) > 1_000_000:
            self.raw.write(data[: len(data) // 2])
            self.raw.flush()
            self.halfway()
        return super().write(data)

    def halfway(self) -> None:
        """Where the test stops the child."""


def test_kill_9_in_the_middle_of_the_bytes_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "x.ckpt"
    single_file.write(checkpoint(1.0), path)
    monkeypatch.setattr(single_file, "_Stream", HalfStream)
    kill = stopped_child(lambda: single_file.write(checkpoint(2.0, 1_000_000), path), HalfStream, "halfway")
    monkeypatch.undo()
    (half,) = (entry for entry in tmp_path.iterdir() if entry != path)
    assert kill() == signal.SIGKILL
    assert half.name.endswith(".tmp")
    assert 1_000_000 < half.stat().st_size < 4_000_000
    with pytest.raises(ValueError, match="damaged or truncated"):
        single_file.read(half)
    assert value_in(path) == 1.0


def test_kill_9_before_the_new_name_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "x.ckpt"
    single_file.write(checkpoint(1.0), path)
    kill = stopped_child(lambda: single_file.write(checkpoint(2.0), path), os, "fsync")
    assert kill() == signal.SIGKILL
    assert value_in(path) == 1.0
    single_file.write(checkpoint(3.0), path)
    assert value_in(path) == 3.0


def test_the_bytes_are_on_disk_before_the_new_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    steps = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd))[1])
    monkeypatch.setattr(Path, "replace", lambda self, to: (steps.append("replace"), replace(self, to))[1])
    single_file.write(checkpoint(), tmp_path / "x.ckpt")
    assert steps[0].endswith(".tmp")
    assert steps[1:] == ["replace", str(tmp_path)]


def test_writing_does_not_hold_the_file_in_memory(tmp_path: Path):
    size = 64_000_000
    content = checkpoint(1.0, size // 4)

    def work() -> None:
        before = peak_bytes()
        single_file.write(content, tmp_path / "x.ckpt")
        (tmp_path / "grown").write_text(str(peak_bytes() - before))

    _, wait = in_child(work)
    assert wait() == 0
    assert (tmp_path / "x.ckpt").stat().st_size > size
    assert int((tmp_path / "grown").read_text()) < size // 2


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


# ---- read only if it is what it says ---------------------------------------------------------------------------------


def damaged(path: Path, change: Callable[[bytearray], Any]) -> Path:
    data = bytearray(path.read_bytes())
    change(data)
    return written(path, data)


def written(path: Path, data: bytes) -> Path:
    copy = path.with_name("damaged.ckpt")
    copy.write_bytes(data)
    return copy


@pytest.fixture
def good(tmp_path: Path) -> Path:
    single_file.write(checkpoint(1.5), tmp_path / "good.ckpt")
    return tmp_path / "good.ckpt"


def test_a_file_cut_anywhere_is_refused(good: Path):
    data = good.read_bytes()
    for length in [*range(8), *range(8, len(data), 37), len(data) - 1]:
        with pytest.raises(ValueError, match=r"damaged\.ckpt' is (damaged or truncated|not a checkpoint): "):
            single_file.read(written(good, data[:length]))


@pytest.mark.parametrize("more", [b"\n", b"garbage", b"\0" * 4096, b"PK\x05\x06", b"x" * 100_000])
def test_a_file_to_which_something_was_appended_is_refused(more: bytes, good: Path):
    data = good.read_bytes()
    longer = written(good, data + more)
    with pytest.raises(ValueError, match=r"damaged\.ckpt' is damaged or truncated: ") as caught:
        single_file.read(longer)
    assert problem(longer) is not None
    if len(more) < 2**16 and more[:2] != b"PK":
        said = f"it has {len(data) + len(more)} bytes but should end after {len(data)}. If bytes were appended"
        assert said in str(caught.value)
        assert f"truncate -s {len(data)} FILE" in str(caught.value)
    foreign = good.with_name("foreign.ckpt")
    torch.save({"state_dict": {}}, foreign)
    assert single_file.read(foreign) == {"state_dict": {}}
    with pytest.raises(ValueError, match="damaged or truncated"):
        single_file.read(written(good, foreign.read_bytes() + more))


def test_noise_in_any_byte_is_refused_or_changes_nothing(good: Path):
    rng = random.Random(0)
    data, expected = good.read_bytes(), repr(single_file.read(good))
    refusals = []
    for place in range(len(data)):
        noisy = bytearray(data)
        noisy[place] ^= 1 << rng.randrange(8)
        try:
            read = single_file.read(io.BytesIO(noisy))
        except ValueError as error:
            refusals.append(str(error))
        else:
            assert repr(read) == expected, f"byte {place}"
    assert len(refusals) > len(data) // 3
    assert all(
        refusal.count(" is damaged or truncated: ") + refusal.count(" is not a checkpoint: ") for refusal in refusals
    )


def test_noise_in_a_weight_names_the_record(good: Path):
    place = good.read_bytes().index(torch.full((12,), 1.5).numpy().tobytes())
    path = damaged(good, lambda data: data.__setitem__(place, data[place] ^ 1))
    assert torch.load(path)["state_dict"]["weight"][0] != 1.5
    with pytest.raises(
        ValueError, match=r"its record '.*data/0' does not match its checksum\. Use a different checkpoint"
    ):
        single_file.read(path)


def test_a_weight_that_is_marked_as_a_folder_is_refused(good: Path):
    def mark(data: bytearray) -> None:
        entry = data.rindex(b"PK\x01\x02", 0, data.rindex(b"data/0"))
        data[entry + 38] |= 0x10

    with pytest.raises(ValueError, match="data/0' does not match its checksum"):
        single_file.read(damaged(good, mark))


def test_a_file_written_without_checksums_is_read(tmp_path: Path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(checkpoint(4.0), tmp_path / "x.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert value_in(tmp_path / "x.ckpt") == 4.0


def test_a_newer_format_is_refused_with_both_versions(tmp_path: Path):
    section = {"format": single_file.FORMAT + 1, "versions": {"paceline": "9.9"}}
    single_file.write({**checkpoint(), "paceline": section}, tmp_path / "x.ckpt")
    with pytest.raises(
        ValueError, match=r"format 2 \(written by paceline 9\.9\), but this version .* reads only .* up to 1\. Upgrade"
    ):
        single_file.read(tmp_path / "x.ckpt")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_text("hello world"), r"it starts with the bytes b'hell'"),
        (lambda path: path.write_bytes(b""), "it is empty"),
        (lambda path: torch.save([1], path), "a single object of type list"),
        (lambda path: torch.save({"model": {}}, path), r"it has no 'state_dict', only 'model'"),
        (lambda path: torch.save({}, path), r"it has no 'state_dict', only nothing"),
        (lambda path: torch.save({"w": torch.zeros(1)}, path), r"bare weights with module\.load_state_dict"),
        (lambda path: zipfile.ZipFile(path, "w").writestr("a.txt", "hi"), "it is a zip file with other contents"),
        (lambda path: torch.jit.save(torch.jit.trace(torch.nn.ReLU(), torch.zeros(1)), path), r"torch\.jit\.load"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_not_a_checkpoint_is_refused_and_described(tmp_path: Path, make: Callable[[Path], Any], said: str):
    make(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=rf"x\.ckpt' is (not a checkpoint|damaged or truncated): .*{said}"):
        single_file.read(tmp_path / "x.ckpt")


def test_a_missing_file_lists_what_is_there_and_the_nearest_name(tmp_path: Path):
    for name in ("epoch=1-step=10.ckpt", "last.ckpt", "hparams.yaml"):
        (tmp_path / name).write_text("")
    with pytest.raises(FileNotFoundError) as caught:
        single_file.read(tmp_path / "lats.ckpt")
    message = str(caught.value)
    assert f"{tmp_path} contains epoch=1-step=10.ckpt, last.ckpt." in message
    assert "Did you mean 'last.ckpt'?" in message
    assert caught.value.filename == str(tmp_path / "lats.ckpt")


def test_a_missing_folder_names_the_nearest_that_exists(tmp_path: Path):
    with pytest.raises(
        FileNotFoundError, match=f"folder does not exist either. The nearest existing folder is {tmp_path}"
    ):
        single_file.read(tmp_path / "no" / "such" / "x.ckpt")


def test_a_folder_is_refused_and_its_files_are_listed(tmp_path: Path):
    (tmp_path / "last.ckpt").write_text("")
    with pytest.raises(IsADirectoryError, match=r"this path is a folder\. .* contains last\.ckpt"):
        single_file.read(tmp_path)


def test_an_address_of_an_unknown_kind_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"'s4://bucket/model.ckpt'.*Unknown protocol 's4'.*Choose 's3'"):
        single_file.read("s4://bucket/model.ckpt")


class RunsCode:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("save", [torch.save, lambda x, path: path.write_bytes(pickle.dumps(x, 2))])
def test_a_file_that_wants_to_run_code_is_refused_and_runs_nothing(tmp_path: Path, save: Callable[[Any, Path], Any]):
    mark, path = tmp_path / "ran", tmp_path / "x.ckpt"
    save({"state_dict": {}, "hyper_parameters": RunsCode(mark)}, path)
    with pytest.raises(ValueError, match=r"x\.ckpt' was not loaded and nothing in it was run|x\.ckpt' is damaged"):
        single_file.read(path)
    assert not mark.exists()


def test_a_refused_file_names_the_code_and_the_ways_to_trust_it(tmp_path: Path):
    mark, path = tmp_path / "ran", tmp_path / "x.ckpt"
    torch.save({"state_dict": {}, "hyper_parameters": RunsCode(mark)}, path)
    said = r"calls 'posix.mkdir'\. If.*weights_only=False.*checkpoint convert .*x.ckpt OUT --trust.*add_safe_globals"
    with pytest.raises(ValueError, match=said):
        single_file.read(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the file does run code where it is let"


def test_an_open_file_can_be_read(good: Path):
    data = io.BytesIO(good.read_bytes())
    assert single_file.read(data)["epoch"] == 3
    with pytest.raises(ValueError, match="damaged or truncated"):
        single_file.read(io.BytesIO(good.read_bytes()[:100]))


def test_tensors_are_read_to_the_cpu_unless_told_otherwise(good: Path):
    assert single_file.read(good)["state_dict"]["weight"].device.type == "cpu"
    assert single_file.read(good, map_location="meta")["state_dict"]["weight"].device.type == "meta"


def test_reading_old_torch_files_works(tmp_path: Path):
    torch.save(checkpoint(6.0), tmp_path / "x.ckpt", _use_new_zipfile_serialization=False)
    assert value_in(tmp_path / "x.ckpt") == 6.0

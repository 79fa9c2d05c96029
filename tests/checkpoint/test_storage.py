"""Paths and addresses: what they mean, and that both do the same."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from remote_places import Disk

from paceline.checkpoint import storage
from paceline.checkpoint.storage import Remote, location


@pytest.fixture(params=["path", "file", "memory", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder of each kind."""
    addresses = {
        "path": tmp_path,
        "file": f"file://{tmp_path}",
        "memory": f"memory:/{tmp_path}",
        "disk": f"disk://{tmp_path}",
    }
    return str(addresses[request.param])


def put(path: str, data: bytes) -> str:
    where = location(path)
    if isinstance(where, Path):
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(data)
    else:
        source = Path("source")
        source.write_bytes(data)
        where.upload(source)
    return path


def test_what_has_no_protocol_is_a_path_and_so_is_file(tmp_path: Path) -> None:
    assert location(tmp_path) == location(str(tmp_path)) == location(f"file://{tmp_path}") == tmp_path
    assert location("a/b") == Path("a/b")
    assert location("C:/a") == Path("C:/a")
    assert location("s3:x/y") == Path("s3:x/y")


def test_an_address_is_the_same_as_text_and_as_a_path_that_lost_a_slash() -> None:
    address = location("s3://bucket/run")
    assert isinstance(address, Remote)
    assert str(address) == "s3://bucket/run"
    assert location(Path("s3://bucket/run")) == address == location(address) == location("s3://bucket/./x/../run/")
    assert pickle.loads(pickle.dumps(address)) == address
    assert len({address, location("s3://bucket/run")}) == 1
    assert address != Path("s3://bucket/run")


def test_names_and_parents_of_an_address_are_those_of_a_path() -> None:
    address = location("s3://bucket/run/x.ckpt")
    assert (address.name, str(address.parent)) == ("x.ckpt", "s3://bucket/run")
    assert [str(above) for above in address.parents] == ["s3://bucket/run", "s3://bucket", "s3://"]
    assert str(address.with_name("y.ckpt")) == str(address.parent / "y.ckpt") == "s3://bucket/run/y.ckpt"
    assert address.parts == ("s3://", "bucket", "run", "x.ckpt")


@pytest.mark.parametrize("root", ["/runs", "s3://bucket/runs"])
def test_relative_paths_lead_back(root: str) -> None:
    for path in (f"{root}/a/x.ckpt", f"{root}/x.ckpt", f"{root}/../x.ckpt"):
        seen = storage.relative(path, f"{root}/a")
        assert "://" not in seen
        assert os.path.normpath(storage.join(f"{root}/a", seen)) == os.path.normpath(path)
    assert storage.relative("s3://bucket/x", "/runs") == "s3://bucket/x"
    assert storage.relative("gs://bucket/x", "s3://bucket") == "gs://bucket/x"


def test_inside_is_below_and_nothing_else() -> None:
    for root in ("/runs/a", "memory://runs/a"):
        assert storage.is_inside(f"{root}/x", root)
        assert storage.is_inside(f"{root}/b/x", root)
        assert not storage.is_inside(f"{root}/../x", root)
        assert not storage.is_inside(f"{root}2/x", root)
        assert not storage.is_inside(root, root)
    assert not storage.is_inside("memory://runs/a/x", "/runs/a")


def test_reading_looking_and_deleting_is_the_same_everywhere(folder: str) -> None:
    place = location(put(f"{folder}/a/x.bin", b"12345"))
    assert place.exists()
    assert place.is_file()
    assert not place.is_dir()
    assert place.parent.is_dir()
    assert not (place.parent / "y").exists()
    assert place.read_bytes() == b"12345"
    assert place.stat().st_size == 5
    assert place.stat().st_mtime_ns > 1e18
    with place.open("rb") as stream:
        stream.seek(-2, 2)
        assert stream.read() == b"45"
    assert list(place.parent.iterdir()) == [place]
    with storage.local_copy(place) as copy:
        assert copy.read_bytes() == b"12345"
    assert copy.exists() == isinstance(place, Path)
    storage.remove(place)
    assert not place.exists()
    with pytest.raises(FileNotFoundError):
        place.read_bytes()


def test_a_folder_is_deleted_with_all_that_is_below_and_the_manifest_first(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.bin", "deep/b.bin", "manifest.json"):
        put(f"{folder}/x.ckpt/{name}", b"1")
    beside = put(f"{folder}/x.ckpt.bin", b"1")
    gone: list[str] = []
    unlink = Remote.unlink
    monkeypatch.setattr(Remote, "unlink", lambda self, **k: (gone.append(self.name), unlink(self, **k))[1])
    storage.remove(f"{folder}/x.ckpt")
    assert not gone or gone[0] == "manifest.json"
    assert not (location(folder) / "x.ckpt" / "deep" / "b.bin").exists()
    assert not (location(folder) / "x.ckpt" / "manifest.json").exists()
    assert location(beside).exists()


def test_where_an_upload_can_be_seen_it_goes_under_a_hidden_name_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    put_file = Disk.put_file

    def watched(self: Any, source: str, target: str, **options: Any) -> None:
        put_file(self, source, target, **options)
        seen.append(Path(target).name)
        assert not (tmp_path / "new" / "x.bin").exists() or (tmp_path / "new" / "x.bin").read_bytes() == b"old"

    monkeypatch.setattr(Disk, "put_file", watched)
    put(f"disk://{tmp_path}/new/x.bin", b"old")
    put(f"disk://{tmp_path}/new/x.bin", b"new")
    assert [name.startswith(".x.bin.") for name in seen] == [True, True]
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == {"x.bin": b"new"}


def test_an_upload_that_fails_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(f"disk://{tmp_path}/x.bin", b"old")

    def full(self: Any, source: str, target: str, **options: Any) -> None:
        Path(target).write_bytes(b"ne")
        raise RuntimeError("the connection broke")

    monkeypatch.setattr(Disk, "put_file", full)
    with pytest.raises(OSError, match=r"'disk://.*x.bin' cannot be reached \(RuntimeError: the connection broke\)"):
        put(path, b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != "source"} == {"x.bin": b"old"}


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.registry import known_implementations

    missing = {"class": "no_such_package.FileSystem", "err": "Install it"}
    monkeypatch.setitem(known_implementations, "nowhere", missing)
    with pytest.raises(
        ModuleNotFoundError, match=r"'nowhere://x' needs .*'no_such_package'.*pip install no_such_package"
    ):
        storage.absolute("nowhere://x")
    with pytest.raises(ModuleNotFoundError, match="pip install no_such_package"):
        location("nowhere://x").exists()


def test_an_unknown_protocol_is_an_error_that_lists_the_usual_ones() -> None:
    with pytest.raises(ValueError, match=r"'s4://x': Unknown protocol 's4'.*'s3', 'gs'"):
        storage.absolute("s4://x")


def test_only_a_leading_tilde_is_the_home_folder() -> None:
    home, here = Path.home(), Path.cwd()
    assert storage.absolute("~/runs") == storage.absolute(Path("~/runs")) == str(home / "runs")
    assert storage.absolute("./~/runs") == str(here / "~" / "runs")

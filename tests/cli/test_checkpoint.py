"""``paceline checkpoint ...``: on files as the trainer writes them, on damaged ones, and on those of other tools."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import ranks
from terminals import seen
from tiny import TinyModule, tiny_loader
from torch import nn

from paceline import Trainer
from paceline.checkpoint import single_file
from paceline.checkpoint.objects import set_apart
from paceline.checkpoint.read import read
from paceline.cli.main import main
from paceline.strategies import FSDPStrategy


def state() -> dict[str, torch.Tensor]:
    return {"layer.weight": torch.full((2, 2), 0.5), "layer.bias": torch.zeros(2)}


def write(path: Path, sequence: int, score: float | None = None, weights_only: bool = False, **more: Any) -> Path:
    section = {
        "format": 1,
        "versions": {"paceline": "0.1.0"},
        "world_size": 2,
        "random": [],
        "manifest": {"sequence": sequence, "score": score, "monitor": None if score is None else "loss"},
    }
    checkpoint: dict[str, Any] = {"epoch": sequence // 2, "global_step": 10 * sequence, "state_dict": state()}
    if not weights_only:
        checkpoint |= {"optimizer_states": [{"m": torch.ones(3)}], "lr_schedulers": [], "callbacks": {"A": {"x": 1}}}
    single_file.write({**checkpoint, "paceline": section, **more}, path)
    return path


def damage(path: Path) -> Path:
    data = bytearray(path.read_bytes())
    at = bytes(data).index(torch.full((4,), 0.5).numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    assert main(["checkpoint", *map(str, arguments)]) == status
    captured = capsys.readouterr()
    return captured.out if status < 2 else captured.err


# ---- ls --------------------------------------------------------------------------------------------------------------


def test_ls_lists_what_the_manifests_say_in_the_order_of_the_saves(tmp_path: Path, capsys: Any) -> None:
    write(tmp_path / "b.ckpt", 1, 0.25)
    write(tmp_path / "a.ckpt", 2, 0.125)
    write(tmp_path / "w.ckpt", 3, weights_only=True)
    torch.save({"state_dict": {}}, tmp_path / "lightning.ckpt")
    (tmp_path / "torn.ckpt").write_bytes((tmp_path / "a.ckpt").read_bytes()[:-100])
    rows = [line.split() for line in said(capsys, "ls", tmp_path).splitlines()]
    assert rows[0] == ["name", "save", "epoch", "step", "score", "kind", "ranks", "size", "written", "state"]
    assert [row[0] for row in rows[1:]] == ["lightning.ckpt", "torn.ckpt", "b.ckpt", "a.ckpt", "w.ckpt"]
    assert rows[3][1:7] == ["1", "0", "10", "loss=0.25", "whole", "2"]
    assert rows[4][1:6] == ["2", "1", "20", "loss=0.125", "whole"]
    assert rows[5][5] == "weights"
    assert [row[-1] for row in rows[3:]] == ["ok"] * 3
    assert " ".join(rows[1]).endswith("no manifest")
    assert "damaged: its records cannot be read" in " ".join(rows[2])


@pytest.mark.parametrize("columns", [80, 60])
def test_ls_fits_the_width_of_the_terminal(tmp_path: Path, capsys: Any, columns: int) -> None:
    name = "epoch=0-step=1000-val_accuracy=0.9712.ckpt"
    write(tmp_path / name, 1, 0.25)
    (tmp_path / "torn.ckpt").write_bytes((tmp_path / name).read_bytes()[:-100])
    assert max(map(len, said(capsys, "ls", tmp_path).splitlines())) > 105
    shown = seen(lambda: main(["checkpoint", "ls", str(tmp_path)]), columns).text
    assert max(map(len, shown.splitlines())) <= columns
    assert {"name", "step", "score", "state"} <= set(shown.splitlines()[0].split())
    assert "left out for lack of room: save" in shown
    assert "loss=0.25" in shown
    if columns == 80:
        assert name in shown


def test_ls_looks_into_the_folders_of_earlier_runs_and_tells_programs_as_json(tmp_path: Path, capsys: Any) -> None:
    for version in (0, 1):
        write(tmp_path / "logs" / f"version_{version}" / "checkpoints" / "x.ckpt", version + 1, 0.5)
    found = json.loads(said(capsys, "ls", tmp_path, "--json"))
    assert [one["sequence"] for one in found] == [1, 2]
    assert found[1]["path"] == str(tmp_path / "logs" / "version_1" / "checkpoints" / "x.ckpt")
    assert found[1]["bytes"] == Path(found[1]["path"]).stat().st_size
    assert (found[1]["score"], found[1]["kind"], found[1]["state"]) == (0.5, "whole", "ok")


@pytest.mark.cold
def test_ls_imports_no_torch(tmp_path: Path) -> None:
    write(tmp_path / "x.ckpt", 1)
    program = (
        "import sys; from paceline.cli.main import main; "
        f"main(['checkpoint', 'ls', {str(tmp_path)!r}]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "x.ckpt" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_a_folder_without_checkpoints_is_said(tmp_path: Path, capsys: Any) -> None:
    assert "There is no checkpoint (*.ckpt) in" in said(capsys, "ls", tmp_path, status=2)


# ---- show ------------------------------------------------------------------------------------------------------------


def test_show_tells_the_manifest_and_with_keys_what_is_inside(tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "x.ckpt", 4, 0.5, hyper_parameters={"lr": 0.1})
    short = said(capsys, "show", path)
    assert "score      loss=0.5" in short
    assert "step       40" in short
    assert "layer" not in short
    long = said(capsys, "show", path, "--keys")
    assert "  lr: 0.1" in long
    row = next(line.split() for line in long.splitlines() if "layer.weight" in line)
    assert row == ["layer.weight", "[2,", "2]", "float32", "16"]


def test_show_of_a_folder_names_one_of_its_checkpoints(tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "x.ckpt", 4)
    assert f"Pass one checkpoint, such as {str(path)!r}" in said(capsys, "show", tmp_path, status=2)


# ---- verify ----------------------------------------------------------------------------------------------------------


def test_verify_finds_a_single_changed_bit(tmp_path: Path, capsys: Any) -> None:
    write(tmp_path / "good.ckpt", 1)
    assert "good.ckpt: ok" in said(capsys, "verify", tmp_path)
    damage(write(tmp_path / "bad.ckpt", 2))
    lines = said(capsys, "verify", tmp_path, status=1).splitlines()
    assert lines[0].endswith("good.ckpt: ok")
    assert "bad.ckpt: its record" in lines[1]
    assert "does not match its checksum" in lines[1]


def test_verify_finds_what_was_appended(tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "it.ckpt", 1)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"garbage")
    found = said(capsys, "verify", path, status=1)
    assert f"it.ckpt: it has {size + 7} bytes but should end after {size}" in found


def test_verify_of_something_else_is_a_failure(tmp_path: Path, capsys: Any) -> None:
    other = tmp_path / "x.ckpt"
    other.write_bytes(b"hello")
    assert "it starts with the bytes" in said(capsys, "verify", other, status=1)


# ---- prune -----------------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_prune_keeps_the_newest_and_the_best_and_says_why(tmp_path: Path, capsys: Any) -> None:
    for number, score in enumerate([0.3, 0.1, 0.2, 0.4, 0.5], start=1):
        write(tmp_path / f"{number}.ckpt", number, score)
    dry = said(capsys, "prune", tmp_path, "--keep-last", 2, "--keep-best", 1, "--dry-run")
    assert len(names(tmp_path)) == 5
    assert "keep  " + str(tmp_path / "2.ckpt") + "  (among the best: loss=0.1)" in dry
    assert "keep  " + str(tmp_path / "5.ckpt") + "  (among the newest)" in dry
    assert "delete  " + str(tmp_path / "1.ckpt") in dry
    said(capsys, "prune", tmp_path, "--keep-last", 2, "--keep-best", 1, "--yes")
    assert names(tmp_path) == ["2.ckpt", "4.ckpt", "5.ckpt"]
    said(capsys, "prune", tmp_path, "--keep-best", 1, "--mode", "max", "--yes")
    assert names(tmp_path) == ["5.ckpt"]


def test_prune_neither_counts_nor_deletes_what_is_damaged_or_not_ours(tmp_path: Path, capsys: Any) -> None:
    for number in (1, 2):
        write(tmp_path / f"{number}.ckpt", number)
    damage(write(tmp_path / "3.ckpt", 3))
    (tmp_path / "4.ckpt").write_bytes((tmp_path / "2.ckpt").read_bytes()[:-100])
    torch.save({"state_dict": {}}, tmp_path / "lightning.ckpt")
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path / "below" / "5.ckpt", 5)
    told = said(capsys, "prune", tmp_path, "--keep-last", 1, "--yes")
    assert names(tmp_path) == ["2.ckpt", "3.ckpt", "4.ckpt", "below", "lightning.ckpt", "notes.txt"]
    assert names(tmp_path / "below") == ["5.ckpt"]
    assert "3.ckpt  (damaged: its record" in told


def test_prune_counts_only_what_a_fit_can_go_on_from_as_newest(tmp_path: Path, capsys: Any) -> None:
    write(tmp_path / "1.ckpt", 1)
    write(tmp_path / "2.ckpt", 2, weights_only=True)
    said(capsys, "prune", tmp_path, "--keep-last", 1, "--yes")
    assert names(tmp_path) == ["1.ckpt"]


def test_prune_asks_and_refuses_where_nobody_answers(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    for number in (1, 2):
        write(tmp_path / f"{number}.ckpt", number)
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115 - closed with the test
    assert "Pass --yes or --dry-run" in said(capsys, "prune", tmp_path, "--keep-last", 1, status=2)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert "Nothing would be kept" in said(capsys, "prune", tmp_path, "--yes", status=2)
    assert len(names(tmp_path)) == 2


# ---- export ----------------------------------------------------------------------------------------------------------


def test_safetensors_hold_the_weights_and_a_tied_one_once(tmp_path: Path, capsys: Any) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, load_model

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3, bias=False)
            self.last = nn.Linear(3, 3, bias=False)
            self.last.weight = self.first.weight

    net = Tied()
    write(tmp_path / "x.ckpt", 1, state_dict={**net.state_dict(), "extra": 3})
    told = said(capsys, "export", tmp_path / "x.ckpt", tmp_path / "x.safetensors")
    assert "last.weight is the same tensor as first.weight" in told
    assert "Left out extra, which is an int" in told
    found = load_file(tmp_path / "x.safetensors")
    assert list(found) == ["first.weight"]
    assert torch.equal(found["first.weight"], net.first.weight)
    with safe_open(tmp_path / "x.safetensors", "pt") as opened:
        assert opened.metadata().items() >= {"format": "pt", "last.weight": "first.weight"}.items()
    again = Tied()
    load_model(again, str(tmp_path / "x.safetensors"))
    assert torch.equal(again.last.weight, net.first.weight)
    assert names(tmp_path) == ["x.ckpt", "x.safetensors"]


def test_weights_are_what_a_weights_only_save_holds(tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "x.ckpt", 3, 0.5, hyper_parameters={"lr": 0.1})
    said(capsys, "export", path, tmp_path / "w.ckpt", "--format", "weights")
    found = read(tmp_path / "w.ckpt")
    assert set(found) == {"epoch", "global_step", "state_dict", "hyper_parameters", "paceline"}
    assert set(found["paceline"]) == {"format", "versions", "world_size", "manifest"}
    assert " weights " in said(capsys, "ls", tmp_path / "w.ckpt")


def test_a_lightning_file_gets_a_manifest(tmp_path: Path, capsys: Any) -> None:
    old = {
        "state_dict": state(),
        "optimizer_states": [],
        "epoch": 2,
        "global_step": 7,
        "pytorch-lightning_version": "2.5",
    }
    torch.save(old, tmp_path / "old.ckpt")
    said(capsys, "export", tmp_path / "old.ckpt", tmp_path / "new.ckpt", "--format", "full")
    assert read(tmp_path / "new.ckpt")["optimizer_states"] == []
    assert json.loads(said(capsys, "ls", tmp_path / "new.ckpt", "--json"))[0]["global_step"] == 7


def test_what_is_there_is_not_overwritten_and_a_format_is_needed(tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "x.ckpt", 1)
    assert "already exists" in said(capsys, "export", path, path, "--format", "full", status=2)
    assert "Pass --format with one of safetensors, full, weights" in said(
        capsys, "export", path, tmp_path / "y", status=2
    )


def test_a_folder_in_parts_becomes_one_file(tmp_path: Path, capsys: Any) -> None:
    def save() -> None:
        silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        strategy = FSDPStrategy(state_dict_type="sharded")
        trainer = Trainer(accelerator="cpu", strategy=strategy, max_steps=1, enable_model_summary=False, **silent)
        trainer.fit(TinyModule(), tiny_loader())
        trainer.save_checkpoint(tmp_path / "parts.ckpt")

    ranks(2, save)
    assert json.loads(said(capsys, "ls", tmp_path, "--json"))[0]["kind"] == "sharded"
    assert "parts.ckpt: ok" in said(capsys, "verify", tmp_path)
    with (tmp_path / "parts.ckpt" / "__1_0.distcp").open("ab") as part:
        end = part.tell()
        part.write(b"x")
    assert f"'__1_0.distcp' has {end + 1} bytes" in said(capsys, "verify", tmp_path, status=1)
    os.truncate(part.name, end)
    said(capsys, "export", tmp_path / "parts.ckpt", tmp_path / "whole.ckpt", "--format", "full")
    parts, whole = read(tmp_path / "parts.ckpt"), read(tmp_path / "whole.ckpt")
    assert list(whole) == list(parts)
    assert torch.equal(whole["state_dict"]["layer.weight"], parts["state_dict"]["layer.weight"])
    facts = json.loads(said(capsys, "ls", tmp_path / "whole.ckpt", "--json"))[0]
    assert (facts["kind"], facts["world_size"]) == ("whole", 2)
    write(tmp_path / "newest.ckpt", 99)
    said(capsys, "prune", tmp_path, "--keep-last", 1, "--yes")
    assert names(tmp_path) == ["newest.ckpt"]


# ---- convert ---------------------------------------------------------------------------------------------------------


class Config:
    def __init__(self, width: int) -> None:
        self.width = width


def test_a_foreign_file_is_refused_with_a_list_and_with_trust_becomes_plain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = Namespace(lr=0.1, model=Namespace(width=2), means=np.ones(2), where=tmp_path)
    foreign: dict[str, Any] = {"state_dict": state(), "epoch": 3, "global_step": 7, "hyper_parameters": given}
    foreign["callbacks"] = {"Early": {"best": np.float64(0.5), "scores": (np.zeros(1), 2)}, "Other": {"cfg": Config(3)}}
    path, out = tmp_path / "foreign.ckpt", tmp_path / "plain.ckpt"
    torch.save(foreign, path)
    told = said(capsys, "convert", path, out, status=2)
    assert "creates 'argparse.Namespace'" in told
    assert f"convert {path} OUT --trust" in told
    assert not out.exists()
    told = said(capsys, "convert", path, out, "--trust")
    assert (
        "These entries were kept as objects, which can be loaded only with weights_only=False: callbacks/Other ("
        in told
    )
    assert "Config)." in told
    plain = read(out)
    hparams = plain["hyper_parameters"]
    assert (hparams["lr"], hparams["model"], hparams["where"]) == (0.1, {"width": 2}, str(tmp_path))
    assert hparams["means"].equal(torch.ones(2, dtype=torch.float64))
    assert plain["callbacks"]["Early"]["best"] == 0.5
    assert (plain["epoch"], plain["global_step"], list(plain["callbacks"])) == (3, 7, ["Early"])
    assert read(out, trusted=True)["callbacks"]["Other"]["cfg"].width == 3
    assert "already exists" in said(capsys, "convert", path, out, status=2)


def test_a_pickled_module_becomes_its_weights_and_any_dict_is_written_if_it_can_be_plain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(nn.Linear(2, 1), tmp_path / "module.pt")
    said(capsys, "convert", tmp_path / "module.pt", tmp_path / "weights.ckpt", "--trust")
    assert list(read(tmp_path / "weights.ckpt")["state_dict"]) == ["weight", "bias"]
    torch.save({"model": state(), "args": Namespace(lr=0.1)}, tmp_path / "own.pt")
    said(capsys, "convert", tmp_path / "own.pt", tmp_path / "plain.pt", "--trust")
    assert torch.load(tmp_path / "plain.pt", weights_only=True)["args"] == {"lr": 0.1}
    torch.save({"model": state(), "args": Config(2)}, tmp_path / "own.pt")
    told = said(capsys, "convert", tmp_path / "own.pt", tmp_path / "other.pt", "--trust", status=2)
    assert re.search(r"checkpoint\['args'\] is of type .*Config, which a checkpoint cannot store", told)
    torch.save(Config(2), tmp_path / "own.pt")
    told = said(capsys, "convert", tmp_path / "own.pt", tmp_path / "other.pt", "--trust", status=2)
    assert "contains a single object of type" in told


@pytest.mark.parametrize(
    ("became", "told"),
    [
        (f"{__name__}\nGonfig", "PYTHONPATH=FOLDER"),
        ("lightning.nowhere\nConfig", "PACELINE_STANDS_IN=lightning paceline checkpoint convert"),
    ],
)
def test_code_that_cannot_be_imported_is_named(
    became: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"state_dict": {}, "cfg": Config(1)}, tmp_path / "x.ckpt")
    raw = zipfile.ZipFile(tmp_path / "x.ckpt")
    was = f"c{__name__}\nConfig\n".encode()
    with zipfile.ZipFile(tmp_path / "y.ckpt", "w") as changed:
        for name in raw.namelist():
            changed.writestr(name, raw.read(name).replace(was, f"c{became}\n".encode()))
    answer = said(capsys, "convert", tmp_path / "y.ckpt", tmp_path / "z.ckpt", "--trust", status=2)
    assert "references code that cannot be imported: " in answer
    assert told in answer


def test_convert_says_that_a_class_belongs_to_the_script_that_wrote_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type("Obj", (), {"__module__": "__main__"})
    with monkeypatch.context() as script:
        script.setattr(sys.modules["__main__"], "Obj", kind, raising=False)
        torch.save(set_apart({"state_dict": {}, "mine": kind(), "paceline": {}}), tmp_path / "x.ckpt")
    answer = said(capsys, "convert", tmp_path / "x.ckpt", tmp_path / "z.ckpt", "--trust", status=2)
    assert "references a class that is defined in the script that wrote the file (" in answer
    assert "move the class to a module" in answer

"""What the pages in docs/ say is so: their programs run and print what they show, their tables are the code's."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import io
import re
import sys
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from rank_processes import ranks
from test_architecture import FILES
from tiny import TinyModule, tiny_loader
from torch import nn

import paceline
from paceline import DataModule, Trainer, TrainingModule
from paceline.callbacks import ModelCheckpoint
from paceline.callbacks.base import FIT_PSEUDO_CODE
from paceline.cli.main import main
from paceline.data.combined_loader import MODES
from paceline.messages import PacelineWarning
from paceline.processes.process_group import leave
from paceline.settings import SETTINGS
from paceline.strategies.choose import SEVERAL, SingleDevice
from paceline.strategies.precision.choose import ALIASES, NAMES

DOCS = Path(__file__).resolve().parent.parent / "docs"
#: The text of each page by its path in docs/ without the suffix, such as "hooks" or "howto/hang".
PAGES = {
    path.relative_to(DOCS).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(DOCS.rglob("*.md"))
    if path.relative_to(DOCS).parts[0] not in ("reference", "sources")  # written by `make docs`
}


class Block(NamedTuple):
    """A fenced block: what stands behind its opening fence, its text, the line it begins at."""

    info: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    text = PAGES[page]
    found = re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.M | re.S)
    return [Block(m[1], m[2], text.count("\n", 0, m.start(2))) for m in found]


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.M | re.S)


def sections(page: str) -> Iterator[tuple[str, str]]:
    """(heading, text) of every second-level section."""
    for part in re.split(r"^## ", PAGES[page], flags=re.M)[1:]:
        heading, _, text = part.partition("\n")
        yield heading, text


def rows_after(comment: str) -> list[list[str]]:
    """The cells of the table behind ``<!-- comment -->``, without its header."""
    page = next(text for text in PAGES.values() if f"<!-- {comment} -->" in text)
    table = page.partition(f"<!-- {comment} -->\n")[2].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table[2:]]


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.info == "python" for b in blocks(page))])
def test_the_programs_of_a_page_run_in_order_and_print_what_it_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [page])
    monkeypatch.setattr("paceline.processes.devices.count", lambda kind: int(kind == "cpu"))  # the pages show a CPU's
    module = types.ModuleType(f"docs_{page.replace('/', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    request.addfinalizer(leave)
    printed, seen = "", dict[str, str]()
    for block in blocks(page):
        if block.info.startswith("python file: "):  # which later blocks run or import
            file = tmp_path / block.info.partition(": ")[2]
            file.write_text(block.text, encoding="utf-8")
            monkeypatch.syspath_prepend(tmp_path)
            request.addfinalizer(partial(sys.modules.pop, file.stem, None))
        elif block.info == "python":
            code = compile("\n" * block.line + block.text, str(DOCS / f"{page}.md"), "exec")
            out = io.StringIO()
            with contextlib.redirect_stdout(out), warnings.catch_warnings():
                warnings.simplefilter("error", PacelineWarning)
                exec(code, module.__dict__)
            printed = out.getvalue()
        elif block.info == "text output":
            lines = [line.rstrip() for line in printed.splitlines()]
            assert_shown(lines, block.text.splitlines(), block.line)
            for found, expected in zip(lines, block.text.splitlines(), strict=True):  # equal lines are equal on any CPU
                assert seen.setdefault(expected, found) == found, f"line {block.line}"


def assert_shown(printed: list[str], shown: list[str], line: int) -> None:
    """Check that a page shows what was printed; CPUs round differently, so a decimal number may be 0.25 % off."""
    decimals = re.compile(r"\d+\.(\d+)")
    assert [decimals.sub("", one) for one in printed] == [decimals.sub("", one) for one in shown], f"line {line}"
    for found, expected in zip(decimals.finditer("\n".join(printed)), decimals.finditer("\n".join(shown)), strict=True):
        unit = 1.01 * 10.0 ** -len(expected[1]) if len(expected[1]) > 2 else 0.0
        assert len(found[1]) == len(expected[1]), f"line {line}: {found[0]} for {expected[0]}"
        assert float(found[0]) == pytest.approx(float(expected[0]), rel=2.5e-3, abs=unit), f"line {line}"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_strategy_of_the_docs_trains_two_processes_as_one(accumulate: int, tmp_path: Path) -> None:
    made: dict[str, Any] = {}
    text = next(block.text for block in blocks("strategies") if "class AfterBackward" in block.text)
    exec(text.partition("quiet = ")[0], made)

    def weights(batch_size: int, **arguments: Any) -> tuple[int, list[torch.Tensor]]:
        silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        torch.manual_seed(0)
        model = made["Line"]()
        loader = torch.utils.data.DataLoader(made["data"], batch_size, shuffle=True)
        arguments |= {
            "accumulate_grad_batches": accumulate,
            "enable_checkpointing": False,
            "default_root_dir": tmp_path,
        }
        trainer = Trainer(max_epochs=2, accelerator="cpu", **silent, **arguments)
        trainer.fit(model, loader)
        return trainer.world_size, list(model.layer.state_dict().values())

    _, alone = weights(16 // accumulate)
    for world_size, found in ranks(2, lambda: weights(8 // accumulate, strategy=made["AfterBackward"]())):
        assert world_size == 2
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)


def test_the_table_of_modes_is_that_of_the_combined_loader() -> None:
    assert {re.findall(r'"(\w+)"', row[0])[0] for row in rows_after("combined modes")} == set(MODES)


def test_every_block_says_what_it_is() -> None:
    known = ("python", "text", "text output", "diff", "sh", "yaml", "{toctree}")
    for page in PAGES:
        for block in blocks(page):
            other = re.fullmatch(r"python no-run: \w.*|python file: \w+\.py|\{image\} \S+", block.info)
            assert block.info in known or other, f"{page}, line {block.line}: {block.info!r}"


def test_the_pseudo_code_is_the_one_in_the_code() -> None:
    shown = [block.text for block in blocks("hooks") if block.text.startswith("def fit():")]
    assert shown == [FIT_PSEUDO_CODE]


def test_a9_k3_three_changed_lines_and_an_import_move_a_plain_loop_to_the_accelerator() -> None:
    before, after = (
        PAGES["own_loop"].partition(f"<!-- {mark} -->\n```python\n")[2].partition("```")[0].splitlines()
        for mark in ("before", "after")
    )
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:].strip()]
    assert [line[2:].strip() for line in changed] == [
        "from paceline import Accelerator",
        "accelerator = Accelerator()",
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        "loss.backward()",
        "accelerator.backward(loss)",
    ]
    names = ("cuda", ".to(", "DistributedSampler", "GradScaler", "autocast", "init_process_group")
    assert not [name for name in names if name in "\n".join(after)]


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            path, _, anchor = target.partition("#")
            if target.startswith("https://"):
                continue
            own = DOCS / f"{page}.md"
            goal = (own.parent / path).resolve() if path else own
            if goal.suffix == ".rst" and goal.parent == DOCS / "reference":
                continue  # a build writes this page; the test of the site looks for it
            assert goal.exists(), f"{page}: {target}"
            if anchor:
                there = goal.relative_to(DOCS).with_suffix("").as_posix()
                headings = re.findall(r"^#+ (.*)$", prose(there), re.M)
                assert anchor in [slug(heading) for heading in headings], f"{page}: {target}"


def test_the_table_of_settings_is_the_one_in_the_code() -> None:
    def shown(value: Any) -> str:
        return "" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"

    also = {one.name: ", ".join(f"`{text}`" for text in (*one.variables, *one.keys)) for one in SETTINGS.values()}
    expected = [
        [f"`{one.name}`", one.accepts, shown(one.default), one.help, also[name]] for name, one in SETTINGS.items()
    ]
    assert rows_after("settings") == expected


def test_the_page_of_settings_names_every_variable_that_the_package_reads() -> None:
    others = {"RESOURCE_DOES_NOT_EXIST", "LOCAL_MACHINE", "MULTI_CPU", "MULTI_GPU", "SC_PAGE_SIZE", "SC_PHYS_PAGES"}
    only_set = {"GIT_OPTIONAL_LOCKS", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"}
    parts = {"LOCAL_SIZE", "PACELINE_TRAINER_"}  # of a longer name; of a mistake
    settings = {variable for one in SETTINGS.values() for variable in (one.variable, *one.variables)}
    sources = [path.read_text(encoding="utf-8") for path in FILES]
    words = r'"([A-Z][A-Z0-9]*_[A-Z0-9_]+|RANK|COLUMNS)"'
    found = {word for text in sources if re.search(r"\benviron\b", text) for word in re.findall(words, text)}
    named = re.findall(r"`([A-Z][A-Za-z0-9_]+)`", PAGES["settings"].partition("\n## Other variables\n")[2])
    assert found > {"RANK", "SLURM_PROCID", "PL_GLOBAL_SEED", "PACELINE_LAUNCH_FLAGS"}
    assert found - settings - others - only_set - parts <= set(named)


def test_the_screen_of_config_is_a_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = PAGES["commands"].partition("<!-- screen: paceline config -->\n```text\n")[2].partition("```")[0]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("PACELINE_CONFIG_FILE")
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\nno\nno\nno\nall\nno\nbf16\n4\n"))
    assert main(["config"]) == 0
    printed = capsys.readouterr().out.replace(str(tmp_path), "~/.config")
    assert [line.rstrip() for line in printed.splitlines()] == screen.splitlines()
    (written,) = [block.text for block in blocks("commands") if block.info == "yaml"]
    assert (tmp_path / "paceline" / "config.yaml").read_text() == written


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_program_of_the_start_page_is_the_one_of_the_readme() -> None:
    (program,) = [block.text for block in blocks("index") if block.info.startswith("python")]
    assert program in (DOCS.parent / "README.md").read_text()


def test_pages_are_ascii_and_no_line_is_too_long() -> None:
    for page, text in PAGES.items():
        assert text.isascii(), page
        table_or_code = re.compile(r"^(\||    )")
        long = [line for line in text.splitlines() if len(line) > 120 and not table_or_code.match(line)]
        assert not long, f"{page}: {long}"


def documented() -> list[str]:
    return re.findall(r"<!-- arguments: ([\w.]+) -->", "\n".join(PAGES.values()))


@pytest.mark.parametrize("name", documented())
def test_a_table_of_arguments_has_the_signature_of_the_code(name: str) -> None:
    owner, _, attribute = name.rpartition(".")
    try:
        function = getattr(importlib.import_module(owner), attribute)
    except ModuleNotFoundError:
        outer, _, cls = owner.rpartition(".")
        function = getattr(getattr(importlib.import_module(outer), cls), attribute)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    expected = [(f"`{'**' if p.kind is p.VAR_KEYWORD else ''}{p.name}`", default(p)) for p in parameters]
    assert [(row[0], row[1]) for row in rows_after(f"arguments: {name}")] == expected


def default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return "" if parameter.kind is parameter.VAR_KEYWORD else "required"
    value = parameter.default
    return f"`{value.__name__ if callable(value) else repr(value) if not isinstance(value, str) else quoted(value)}`"


def quoted(text: str) -> str:
    return f'"{text}"'


@pytest.mark.parametrize("room", ["callbacks", "loggers"])
def test_every_callback_and_logger_has_a_section_with_a_program(room: str) -> None:
    named = {name: text for heading, text in sections(room) for name in re.findall(r"`(\w+)`", heading)}
    promised = set(getattr(paceline, room).__all__)
    assert set(named) == promised
    assert not [name for name, text in named.items() if "```python" not in text]


def test_every_callback_and_logger_has_its_table_of_arguments() -> None:
    without = {"Callback", "LambdaCallback", "Logger", "ProgressBar", "RichModelSummary"}
    for room in ("callbacks", "loggers"):
        for name in getattr(paceline, room).__all__:
            takes = inspect.signature(getattr(getattr(paceline, room), name)).parameters
            if takes and name not in without:
                assert f"paceline.{room}.{name}" in documented(), name


def test_the_table_of_precisions_is_complete() -> None:
    rows = rows_after("precisions")
    assert [row[0] for row in rows] == [f'`"{name}"`' for name in NAMES]
    aliases = {alias: row[0] for row in rows for alias in re.findall(r'`"([\w-]+)"`', row[1])}
    assert aliases == {alias: f'`"{name}"`' for alias, name in ALIASES.items()}
    text = inspect.getdoc(Trainer).partition("precision: ")[2].partition("; the short forms")[0]
    assert set(re.findall(r'"([\w.-]+)"', text)) == set(NAMES)


def test_every_strategy_name_is_in_the_table_of_the_first_fit_and_in_the_help_of_the_trainer() -> None:
    row = next(line for line in PAGES["first_fit"].splitlines() if line.startswith("| `strategy` |"))
    text = inspect.getdoc(Trainer).partition("strategy: ")[2].partition("\n    devices: ")[0]
    endings = ("_find_unused_parameters_true", "_find_unused_parameters_false")
    plain = {name for name in ("auto", *SingleDevice.names, *SEVERAL) if not name.endswith(endings)}
    assert {f"{name}{ending}" for name in plain if name.startswith("ddp") for ending in endings} <= set(SEVERAL)
    assert set(re.findall(r'"(\w+)"', row)) == plain
    assert set(re.findall(r'"(\w+)"', text)) == plain
    assert all(ending in row for ending in endings)
    assert "_find_unused_parameters_true" in text


def test_a_traceback_has_as_many_frames_as_the_table_says() -> None:
    class Fails(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("of the user")

    def frames(strategy: str, precision: str = "32-true") -> tuple[int, int]:
        """Frames between the call of fit and the step, and how many of them are torch's."""
        silent: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        silent |= {"enable_model_summary": False, "limit_val_batches": 0}
        with pytest.raises(KeyError) as caught:
            Trainer(max_epochs=1, accelerator="cpu", strategy=strategy, precision=precision, **silent).fit(
                Fails(), tiny_loader(1)
            )
        found = [one.filename for one in traceback.extract_tb(caught.value.__traceback__)][1:-1]
        return len(found), len([file for file in found if f"{Path(torch.__file__).parent}" in file])

    alone, mixed, true = frames("auto"), frames("auto", "bf16-mixed"), frames("auto", "64-true")
    (fsdp, _), (ddp, _) = ranks(2, frames, "fsdp"), ranks(2, frames, "ddp")
    assert mixed == true == (alone[0] + 1, 0)
    assert (
        f"{alone[0]} in one process, {fsdp[0]} under `fsdp`, {ddp[0]} under `ddp`; {fsdp[1]} and {ddp[1]} of these"
        in PAGES["differences"]
    )


class Everything(TrainingModule):
    """Has all that a checkpoint can hold."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch).sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Data(DataModule):
    def __init__(self, batches: int = 2) -> None:
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return [torch.ones(2, 2)] * 2

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 2}


def test_the_tables_of_checkpoint_keys_are_complete(tmp_path: Path) -> None:
    trainer = Trainer(
        max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path
    )
    trainer.fit(Everything(), datamodule=Data())
    file = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    names = {"Data": "the name of the DataModule's class"}
    for comment, found in (("checkpoint keys", file), ("paceline keys", file["paceline"])):
        in_file = {names.get(key, f"`{key}`") for key in found}
        assert {row[0] for row in rows_after(comment)} == in_file


def test_the_host_exchanges_in_an_epoch_what_the_table_says(tmp_path: Path) -> None:
    def exchanged(epochs: int, batches: int, validates: bool, saves: bool) -> Counter[str]:
        counts: Counter[str] = Counter()

        def counted(name: str, call: Any, *args: Any, **given: Any) -> Any:
            counts[name] += 1
            return call(*args, **given)

        for name in ("all_reduce", "broadcast_object_list"):
            setattr(dist, name, partial(counted, name, getattr(dist, name)))
        callbacks = [ModelCheckpoint(tmp_path / f"{epochs}-{batches}")] if saves else []
        silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(
            max_epochs=epochs, accelerator="cpu", enable_checkpointing=saves, callbacks=callbacks, **silent
        )
        trainer.fit(TinyModule(), tiny_loader(batches), tiny_loader(batches) if validates else None)
        return counts

    def each_epoch(validates: bool = False, saves: bool = False) -> Counter[str]:
        (short, _), (long, _) = (ranks(2, exchanged, n, 2 * n, validates, saves) for n in (1, 2))
        return long - short

    plain = each_epoch()
    seen = {
        "a training epoch": plain,
        "a validation": each_epoch(validates=True) - plain,
        "a checkpoint": each_epoch(saves=True) - plain,
    }
    for moment, all_reduces, broadcasts in rows_after("host collectives"):
        found = seen[moment]
        assert [found["all_reduce"], found["broadcast_object_list"]] == [int(all_reduces), int(broadcasts)], moment

"""Examples in docstrings, which the reference shows, run and print what they say."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_architecture import FILES
from tiny import TinyModule, tiny_loader
from torch import nn

import paceline
from paceline import Accelerator, Trainer

ROOT = Path(__file__).resolve().parent.parent
#: An example that is a plain block: its indented lines.
BLOCK = re.compile(r"^Example::\n\n((?:(?:    .*)?\n)+)", re.M)


def examples() -> dict[str, tuple[str, str]]:
    """Return the module and the docstring of each class and function that has an example."""
    found = {}
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if "Example:" not in text:
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                doc = ast.get_docstring(node) or ""
                if re.search(r"^Example::?$", doc, re.M):
                    found[f"{'.'.join(parts)}.{node.name}"] = (".".join(("paceline", *parts)), doc)
    return found


EXAMPLES = examples()
#: Examples that ask for more memory than the machines of the tests have.
TOO_LARGE = {"big_model.empty_init.init_empty_weights"}


def silent(**arguments: Any) -> Trainer:
    shown = {} if "callbacks" in arguments else {"enable_progress_bar": False}
    shown |= {"logger": False, "enable_model_summary": False, "enable_checkpointing": False}
    return Trainer(max_epochs=1, accelerator="cpu", **(shown | arguments))


class Tiny(TinyModule):
    """Can be tuned, and called with a batch as keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return tiny_loader(8, self.batch_size)

    def val_dataloader(self) -> Any:
        return tiny_loader()

    def forward(self, x: Any, y: Any = None) -> Any:
        predicted = self.layer(x)
        return predicted if y is None else SimpleNamespace(loss=nn.functional.mse_loss(predicted, y))


def surroundings(module: str) -> dict[str, Any]:
    """Return what an example may use without making it, as a reader of the reference has it."""
    names = {name: getattr(room, name) for room in (paceline.callbacks, paceline) for name in room.__all__}
    names |= vars(importlib.import_module(module))
    model, loader = Tiny(), tiny_loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names |= {"__name__": "examples", "torch": torch, "nn": nn, "DataLoader": torch.utils.data.DataLoader}
    names |= {"Trainer": silent, "trainer": silent(), "module": Tiny(), "model": model, "loader": loader}
    names |= {"optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    names |= {"loss_of": lambda model, batch: model(*batch).loss, "MyModel": lambda config: nn.Linear(2, 1)}

    def read_csv(path: str) -> None:
        """Stand in for pandas, after a fit with the logger of the example."""
        names["trainer"].fit(Tiny(), tiny_loader(50), tiny_loader())
        assert Path(path).read_text().startswith("step,epoch,wall_time,")

    names |= {"config": None, "pandas": SimpleNamespace(read_csv=read_csv)}
    return names


def is_expression(source: str) -> bool:
    return isinstance(ast.parse(source).body[0], ast.Expr)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in TOO_LARGE])
def test_an_example_of_a_docstring_runs_and_prints_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    module, doc = EXAMPLES[name]
    names = surroundings(module)
    if name.endswith(".LocalSGD"):
        names["accelerator"] = accelerator = Accelerator(cpu=True)
        names["model"], names["optimizer"] = accelerator.prepare(names["model"], names["optimizer"])
        names["loader"] = [dict(zip("xy", batch, strict=True)) for batch in names["loader"]]
    if '"weights/"' in doc:
        Path("weights").mkdir()
        torch.save(nn.Linear(2, 1).state_dict(), "weights/pytorch_model.bin")
    blocks = [textwrap.dedent(found[1]) for found in BLOCK.finditer(f"{doc}\n")]
    for block in blocks:
        exec(block, names)
    tested = doctest.DocTestParser().get_doctest(doc, names, name, inspect.getfile(importlib.import_module(module)), 0)
    tested.globs = names  # not a copy, so that the functions above see what the example makes
    for example in tested.examples:
        if example.options.pop(doctest.SKIP, None):  # it runs here, but what it returns is not shown
            example.source = f"_ = {example.source}" if is_expression(example.source) else example.source
    said: list[str] = []
    failed, tried = doctest.DocTestRunner().run(tested, out=said.append)
    assert not failed, "".join(said)
    assert tried or blocks, "the example has neither >>> nor an indented block"

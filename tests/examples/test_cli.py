"""The program with a command line made from its classes: its config file, its words, and what it saves."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn, optim

pytestmark = pytest.mark.usefixtures("only_torchs_optimizers")
FOLDER = Path(__file__).resolve().parent.parent.parent / "examples" / "cli"
CONFIG = f"--config={FOLDER / 'config.yaml'}"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    spec = importlib.util.spec_from_file_location("example_of_a_command_line", FOLDER / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:`Classifier.configure_optimizers` will be overridden")
def test_the_config_file_trains_and_the_saved_one_tests_the_checkpoint(program: Any) -> None:
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    cli = program.main(["fit", CONFIG, *quiet, "--trainer.max_epochs=2", "--data.dimensions=2"])
    assert cli.trainer.current_epoch == 2
    assert isinstance(cli.trainer.optimizers[0], optim.AdamW)
    assert (cli.model.hparams.inputs, cli.model.hparams.classes) == (2, 4)
    folder = Path(cli.trainer.log_dir)
    assert yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["max_epochs"] == 2
    last = folder / "checkpoints" / "last.ckpt"
    loaded = program.Classifier.load_from_checkpoint(last)
    assert isinstance(loaded.layers[1], nn.Tanh)
    tested = program.main(["test", CONFIG, *quiet, f"--ckpt_path={last}", "--data.dimensions=2"])
    assert tested.trainer.callback_metrics["test_accuracy"] > 0.9

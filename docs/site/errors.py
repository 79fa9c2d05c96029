"""Write the page about errors: each program runs when the site is built, and the page shows its real message."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import warnings
from typing import Any, NamedTuple
from unittest import mock

from rst import block, heading, indented

#: The beginning of every program below. The page shows it once.
BEGIN = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, Trainer, TrainingModule
from paceline.callbacks import Callback, EarlyStopping


class Line(TrainingModule):
    def __init__(self, width=1):
        super().__init__()
        self.layer = nn.Linear(1, width)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


data = TensorDataset(torch.ones(8, 1), torch.ones(8, 1))
loader = DataLoader(data, batch_size=4)
"""
#: Added to the arguments of every Trainer here, so that nothing but the error is printed.
QUIET = {
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Case(NamedTuple):
    """An error: its title, a program that causes it, the cause, and the fix."""

    title: str
    program: str
    cause: str
    fix: str


CASES = [
    Case(
        "The device is not available",
        'Trainer(accelerator="cuda", devices=2)',
        "torch sees no such device: its build has no support for it, the driver is missing, or "
        "``CUDA_VISIBLE_DEVICES`` hides the device.",
        "Run ``paceline env``, which prints the build of torch and the devices that it sees. With "
        '``accelerator="auto"``, the same script runs on the machine without GPUs too.',
    ),
    Case(
        "A name is misspelled",
        'Trainer(strategy="dpp")',
        "Strategies, precisions, profilers and devices are chosen by name, and this name does not exist.",
        "Use the name that the message suggests, or one from its list.",
    ),
    Case(
        "An argument does not exist",
        "Trainer(max_epoch=3)",
        "The name is misspelled, or belongs to another library or version.",
        "Use the suggested name, or look it up in the :class:`paceline.Trainer` reference.",
    ),
    Case(
        "A hook would never be called",
        """\
class Counts(Callback):
    def on_train_batch_ends(self, trainer, pl_module, outputs, batch, batch_idx):
        print(batch_idx)


Trainer(callbacks=[Counts()]).fit(Line(), loader)""",
        "A method of a callback or module looks like a hook, but no hook has this name.",
        "Rename it. :doc:`hooks` lists all hooks.",
    ),
    Case(
        "A hook has the wrong arguments",
        """\
class Counts(Callback):
    def on_train_batch_end(self, trainer):
        print(trainer.global_step)


Trainer(callbacks=[Counts()]).fit(Line(), loader)""",
        "The run calls each hook with fixed arguments, and this hook cannot take them. You see this error "
        "before the first batch.",
        "Copy the line from the message.",
    ),
    Case(
        "There is no loss",
        """\
class Predicts(Line):
    def training_step(self, batch, batch_idx):
        return {"prediction": self.layer(batch[0])}


Trainer().fit(Predicts(), loader)""",
        "``training_step`` returned something, but no loss to run backward on.",
        'Return the loss, or a dict with the key ``"loss"``. None skips the batch.',
    ),
    Case(
        "The loss does not depend on the weights",
        """\
class Detached(Line):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).detach()


Trainer().fit(Detached(), loader)""",
        "The graph between the weights and the loss is cut, for example by ``.item()``, ``.detach()``, a conversion to "
        "NumPy, or because all parameters are frozen.",
        "Compute the loss from the outputs themselves. Detach only values that you log.",
    ),
    Case(
        "The loss is not finite",
        """\
class Diverges(Line):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * float("nan")


Trainer(detect_anomaly=True).fit(Diverges(), loader)""",
        "A learning rate that is too high, a bad sample, or float16 without a loss scale.",
        "``detect_anomaly=True`` finds the operation. :class:`paceline.callbacks.LossGuard` skips such batches, or "
        "goes back to the last checkpoint.",
    ),
    Case(
        "The monitored metric was not logged",
        'Trainer(callbacks=[EarlyStopping(monitor="val_loss")]).fit(Line(), loader)',
        "No hook logged a value of this name, the name is misspelled, or there is no validation in this fit.",
        'Log it with ``self.log("val_loss", ...)`` in ``validation_step``, and pass a validation loader.',
    ),
    Case(
        "A logged value is not a single number",
        """\
class LogsAll(Line):
    def training_step(self, batch, batch_idx):
        self.log("prediction", self.layer(batch[0]))
        return super().training_step(batch, batch_idx)


Trainer().fit(LogsAll(), loader)""",
        "Loggers and progress bars show numbers, and this is a tensor with several elements.",
        "Log its mean, or use ``self.log_dict``. Loggers of services have methods for images and tables.",
    ),
    Case(
        "There is no data",
        "Trainer().fit(Line())",
        "``fit`` got no loader, and neither the module nor a DataModule defines one.",
        "Pass a loader, or a :class:`paceline.DataModule`.",
    ),
    Case(
        "A loader has no batches",
        "Trainer().fit(Line(), DataLoader(data, batch_size=16, drop_last=True))",
        "The data set is smaller than one batch, and ``drop_last=True`` drops incomplete batches. With several "
        "processes, each of them needs a batch.",
        "Use a smaller batch, or keep the last one.",
    ),
    Case(
        "The checkpoint does not exist",
        'Trainer().fit(Line(), loader, ckpt_path="lost.ckpt")',
        "The path is wrong, is relative to another working directory, or the file was never written.",
        'Pass ``ckpt_path="auto"``, which resumes from the newest valid checkpoint of the run and starts fresh if '
        "there is none. ``paceline checkpoint ls`` lists a folder.",
    ),
    Case(
        "The checkpoint is damaged",
        """\
from pathlib import Path

trainer = Trainer()
trainer.fit(Line(), loader)
trainer.save_checkpoint("whole.ckpt")
Path("half.ckpt").write_bytes(Path("whole.ckpt").read_bytes()[:900])
trainer.fit(Line(), loader, ckpt_path="half.ckpt")""",
        "The file was cut off, usually while it was copied. Files that Paceline writes appear whole or not at all.",
        "Copy it again, and check it with ``paceline checkpoint verify``.",
    ),
    Case(
        "The checkpoint belongs to another model",
        """\
trainer = Trainer()
trainer.fit(Line(), loader)
trainer.save_checkpoint("line.ckpt")
trainer.fit(Line(width=2), loader, ckpt_path="line.ckpt")""",
        "The module was built with other arguments, or its code has changed since.",
        "Build it with the arguments used for training. With ``self.save_hyperparameters()`` in ``__init__``, "
        "``load_from_checkpoint`` finds them in the file.",
    ),
    Case(
        "The checkpoint contains code",
        """\
torch.save({"state_dict": {}, "layer": nn.Linear}, "theirs.ckpt")
Line.load_from_checkpoint("theirs.ckpt")""",
        "Loading a pickled object runs code, so Paceline loads only tensors and plain data unless you say otherwise.",
        "If you trust the file, convert it once with ``paceline checkpoint convert``, or pass ``weights_only=False``.",
    ),
    Case(
        "A module is not a TrainingModule",
        "Trainer().fit(nn.Linear(1, 1), loader)",
        "``fit`` needs to know the training step and the optimizer, and a plain ``nn.Module`` has neither.",
        "Make it an attribute of a :class:`paceline.TrainingModule`, or keep your own loop with "
        ":class:`paceline.Accelerator`.",
    ),
    Case(
        "An argument contradicts manual optimization",
        """\
class Manual(Line):
    automatic_optimization = False


Trainer(gradient_clip_val=1.0).fit(Manual(), loader)""",
        "With manual optimization your code steps the optimizer, so the Trainer cannot clip or accumulate for it.",
        "Call ``self.clip_gradients`` in ``training_step``.",
    ),
    Case(
        "The state of your own loop does not exist",
        'Accelerator(cpu=True).load_state("lost")',
        "The folder does not exist, or is relative to another working directory.",
        "Pass a folder that ``save_state`` wrote.",
    ),
    Case(
        "A package is missing",
        """\
from paceline.loggers import AimLogger

AimLogger()""",
        "Packages that only some runs need are not installed with Paceline.",
        "Run the command in the message.",
    ),
]


def page() -> str:
    """Return the page's text."""
    text = heading("Common errors", "=") + (
        "Every message says what failed, with the value, why, and how to fix it. These are the most common "
        "ones. The programs ran when this page was built, and the messages are their output. Each program begins "
        "with:\n\n"
    )
    text += block("python", BEGIN)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as back:
        back.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        for case in CASES:
            error = raised_by(case.program)
            text += heading(case.title, "-") + block("python", case.program)
            text += indented(f"{type(error).__name__}: {error}", ".. code-block:: text", "   :class: output")
            text += f":Cause: {case.cause}\n:Fix: {case.fix}\n\n"
    return text


def raised_by(program: str) -> BaseException:
    """Run a program and return what it raises."""
    from paceline import Trainer
    from paceline.processes import devices

    names: dict[str, Any] = {"__name__": "errors"}
    exec(BEGIN, names)
    # As on a machine without a GPU, wherever the site is built.
    with (
        mock.patch.object(devices, "count", lambda kind: int(kind == "cpu")),
        mock.patch("paceline.messages.is_installed", lambda package: package != "aim"),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        names["Trainer"] = lambda **given: Trainer(**{**QUIET, **given})
        try:
            exec(program, names)
        except Exception as error:
            return error
    raise RuntimeError(f"docs/site/errors.py: this program no longer raises anything. Remove it.\n\n{program}")

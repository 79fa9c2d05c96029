"""``accelerate``'s helpers for test suites: skip conditions, test cases, and a small regression problem."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ... import messages
from ...accelerator.process_state import AcceleratorState, PartialState
from ...devices.kinds import CUDA_KIND, present
from . import probes
from .details import get_free_port as get_torch_dist_unique_port  # noqa: F401 - two names of one function
from .environment import is_torch_version, parse_flag_from_env
from .gradient_state import GradientState
from .processes import gather

DEFAULT_LAUNCH_COMMAND = [
    *(sys.executable, "-m", "paceline", "launch", "--num_processes=1", "--monitor_interval=0.1"),
    *("-m", "paceline.compat", "accelerate"),
]


def _count() -> int:
    return present().count()


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return the device type, the number of devices, and a function that returns the bytes of device memory in use."""
    return present().name, _count(), present().allocated_memory


torch_device, device_count, memory_allocated_func = get_backend()


# ---- conditions ------------------------------------------------------------------------------------------------------


def _condition(holds: Callable[[], Any], why: str) -> Callable[[Any], Any]:
    """Return a decorator that skips a test unless a condition holds."""

    def decorate(test_case: Any) -> Any:
        return unittest.skipUnless(holds(), why)(test_case)

    return decorate


def _without(name: str) -> bool:
    return not probes.ANSWERS[f"is_{name}_available"]()


_PACKAGES = (
    "aim bnb clearml comet_ml datasets deepspeed dvclive import_timer matplotlib mlflow pandas peft pippy schedulefree "
    "swanlab tensorboard timm torchao torchdata_stateful_dataloader torchvision trackio transformer_engine "
    "transformer_engine_mxfp8 transformers triton wandb cuda mps fp8 hpu mlu musa neuron npu sdaa xpu fp16"
)
REQUIREMENTS: dict[str, Callable[[Any], Any]] = {
    **{
        f"require_{name}": _condition(probes.ANSWERS[f"is_{name}_available"], f"test requires {name}")
        for name in _PACKAGES.split()
    },
    **{
        f"require_non_{name}": _condition(partial(_without, name), f"test requires a machine without {name}")
        for name in ("hpu", "torch_xla", "xpu")
    },
    "require_cpu": _condition(lambda: torch_device == "cpu", "test requires only a CPU"),
    "require_non_cpu": _condition(lambda: torch_device != "cpu", "test requires an accelerator"),
    "require_cuda_or_hpu": _condition(CUDA_KIND.is_available, "test requires CUDA"),
    "require_cuda_or_xpu": _condition(CUDA_KIND.is_available, "test requires CUDA"),
    "require_tpu": _condition(lambda: False, "test requires a TPU"),
    "require_single_device": _condition(
        lambda: torch_device != "cpu" and _count() == 1, "test requires exactly one device"
    ),
    "require_single_gpu": _condition(lambda: CUDA_KIND.count() == 1, "test requires exactly one GPU"),
    "require_single_xpu": _condition(lambda: False, "test requires an XPU"),
    "require_multi_device": _condition(lambda: _count() > 1, "test requires several devices"),
    "require_multi_gpu": _condition(lambda: CUDA_KIND.count() > 1, "test requires several GPUs"),
    "require_multi_gpu_or_xpu": _condition(lambda: CUDA_KIND.count() > 1, "test requires several GPUs"),
    "require_multi_xpu": _condition(lambda: False, "test requires several XPUs"),
    "require_huggingface_suite": _condition(
        lambda: importlib.util.find_spec("transformers") and importlib.util.find_spec("datasets"),
        "test requires transformers and datasets",
    ),
    "require_trackers": _condition(
        lambda: any(not _without(name) for name in ("wandb", "tensorboard")), "test requires a tracker"
    ),
    "require_fsdp2": _condition(lambda: True, ""),
    "require_tp": _condition(lambda: True, ""),
    "skip": _condition(lambda: False, "test is skipped"),
    "slow": _condition(lambda: parse_flag_from_env("RUN_SLOW"), "test is slow; set RUN_SLOW=1"),
}


def __getattr__(name: str) -> Any:
    if name in REQUIREMENTS:
        return REQUIREMENTS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Decorator that skips a test if torch is older than the given version."""
    if test_case is None:
        return partial(require_torch_min_version, version=version)
    return unittest.skipUnless(is_torch_version(">=", str(version)), f"test requires torch {version}")(test_case)


def run_first(test_case: Any) -> Any:
    """Mark a test to run first; requires the plugin pytest-order."""
    pytest: Any = importlib.import_module("pytest")
    return pytest.mark.order(1)(test_case)


# ---- test cases ------------------------------------------------------------------------------------------------------


class AccelerateTestCase(unittest.TestCase):
    """A test case that resets the states of Accelerators and processes after each test."""

    def tearDown(self) -> None:
        """Reset the states."""
        super().tearDown()
        AcceleratorState._reset_state()
        PartialState._reset_state()
        GradientState._reset_state()


class TempDirTestCase(unittest.TestCase):
    """A test case with a temporary folder ``tmpdir``; if ``clear_on_setup``, each test begins with an empty folder."""

    clear_on_setup = True
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        """Create the folder."""
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Delete the folder."""
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        """Empty the folder."""
        for path in self.tmpdir.glob("**/*") if self.clear_on_setup else ():
            if path.is_file():
                path.unlink()
            elif path.is_dir():
                shutil.rmtree(path)


class MockingTestCase(unittest.TestCase):
    """A test case that starts mocks and stops them after each test."""

    def add_mocks(self, mocks: Any) -> None:
        """Start one or more mocks."""
        self.mocks = mocks if isinstance(mocks, (tuple, list)) else [mocks]
        for one in self.mocks:
            one.start()
            self.addCleanup(one.stop)


# ---- commands --------------------------------------------------------------------------------------------------------


class SubprocessCallException(Exception):  # noqa: N818 - the name that programs catch
    """Raised when a command that ran in another process failed."""


def get_launch_command(**kwargs: Any) -> list[str]:
    """Return the command that launches a script with the given flags, without the name of the script."""
    flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in kwargs.items() if value]
    return [*(sys.executable, "-m", "paceline", "launch"), *flags, *("-m", "paceline.compat", "accelerate")]


def run_command(command: list[Any], return_stdout: bool = False, env: dict[str, str] | None = None) -> str | None:
    """Run a command; raise SubprocessCallException with its output if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, env=env or dict(os.environ), capture_output=True, text=True)
    if done.returncode:
        raise SubprocessCallException(
            f"Command `{' '.join(words)}` failed with status {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout if return_stdout else None


def execute_subprocess_async(
    cmd: list[Any], env: Any = None, stdin: Any = None, timeout: float = 180, quiet: bool = False, echo: bool = True
) -> SimpleNamespace:
    """Run a command and return its status and its lines of output; raise RuntimeError if it fails.

    With ``echo``, print the command first. Unless ``quiet`` is set, print its output afterward.
    """
    words = [str(word) for word in cmd]
    if echo:
        messages.answer(f"\nRunning:  {' '.join(words)}")
    done = subprocess.run(
        words, env=env or dict(os.environ), stdin=stdin, timeout=timeout, capture_output=True, text=True
    )
    for line in () if quiet else done.stdout.splitlines():
        messages.answer(f"stdout: {line}")
    for line in () if quiet else done.stderr.splitlines():
        messages.error(f"stderr: {line}")
    if done.returncode:
        raise RuntimeError(
            f"'{' '.join(words)}' failed with returncode {done.returncode}. Its output:\n{done.stdout}{done.stderr}"
        )
    return SimpleNamespace(returncode=0, stdout=done.stdout.splitlines(), stderr=done.stderr.splitlines())


def pytest_xdist_worker_id() -> int:
    """Return the number of this pytest-xdist worker; 0 without pytest-xdist."""
    return int("".join(filter(str.isdigit, os.environ.get("PYTEST_XDIST_WORKER", "gw0"))) or 0)


def path_in_accelerate_package(*components: str) -> Path:
    """Return a path inside the folder of Paceline's replacement for ``accelerate``."""
    return Path(__file__).resolve().parent.joinpath(*components)


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return what a function prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        func(*args, **kwargs)
    return printed.getvalue()


@contextlib.contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Context manager whose body must raise an exception with ``msg`` in the exception's text."""
    try:
        yield
    except exception_class as error:
        if msg is not None and msg not in str(error):
            raise AssertionError(
                f"Expected {msg!r} in the error message, but the message is {str(error)!r}."
            ) from error
        return
    raise AssertionError(f"Expected {exception_class.__name__}, but nothing was raised.")


def are_the_same_tensors(tensor: Tensor) -> bool:
    """Return True if all processes pass equal tensors."""
    own = tensor[None].clone()
    return all(bool((one == own[0]).all()) for one in gather(own))


# ---- a small problem -------------------------------------------------------------------------------------------------


class RegressionDataset(Dataset[Any]):
    """Points near the line ``y = a * x + b``."""

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        import numpy

        generator = numpy.random.default_rng(seed)
        self.length = length
        self.x = generator.normal(size=length).astype(numpy.float32)
        self.y = a * self.x + b + generator.normal(scale=0.1, size=length).astype(numpy.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i]}


class RegressionModel(nn.Module):
    """A model of the line ``a * x + b``."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a).float())
        self.b = nn.Parameter(torch.tensor(b).float())
        self.double_output = double_output

    def forward(self, x: Any = None) -> Any:
        """Return the line's values; with ``double_output``, return them twice."""
        y = x * self.a + self.b
        return (y, y) if self.double_output else y


def mocked_dataloaders(accelerator: Any, batch_size: int = 16) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return a training and a validation loader of random token sequences with labels."""

    def loader(count: int, shuffle: bool) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(count)
        tokens = torch.randint(100, (count, 8), generator=generator)
        data = TensorDataset(tokens, torch.ones_like(tokens), torch.randint(2, (count,), generator=generator))
        return DataLoader(data, batch_size, shuffle, collate_fn=_named)

    return loader(4 * batch_size, True), loader(2 * batch_size, False)


def _named(rows: list[Any]) -> dict[str, Tensor]:
    names = ("input_ids", "attention_mask", "labels")
    return {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}

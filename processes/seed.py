"""Seed all random number generators, and save and restore their states.

numpy is included only if it is already imported. Torch imports numpy if torch was built with numpy support and numpy is
installed.
"""

from __future__ import annotations

import hashlib
import operator
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import messages
from ..devices.kinds import CUDA_KIND, accelerators, kind_of

SEED_VARIABLE = "PACELINE_GLOBAL_SEED"
WORKERS_VARIABLE = "PACELINE_SEED_WORKERS"
_OTHER_SEED_VARIABLE = "PL_GLOBAL_SEED"
#: Prefixes of further variables that :func:`seed_everything` sets; the stand-in for Lightning adds one.
OTHER_PREFIXES: list[str] = []
_MAX_SEED = 2**32 - 1
#: Entries of random_states() that are not devices.
_HOST = ("python", "torch", "numpy")
#: Key of the warnings that random numbers differ after a resume; only one of them is shown.
_DIFFER = "random numbers differ"


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python's ``random``, numpy and torch (all devices); processes started later inherit the seed.

    numpy is seeded, and its state is saved in checkpoints, only if it is imported before this call. ``import torch``
    imports numpy, unless torch was built without numpy support. In that case, import numpy at the top of the script. If
    numpy is first imported during the run, it draws different numbers each time.

    Args:
        seed: a number from 0 to 4294967295; if None, the environment variable ``PACELINE_GLOBAL_SEED`` or
            ``PL_GLOBAL_SEED`` is used, or else 0.
        workers: whether to seed data loader workers by rank too. Within one process, torch already gives every worker
            its own seed for ``random``, numpy and torch, derived from ``seed``.
        verbose: whether to print the seed.

    Returns:
        The seed that was set.
    """
    value = seed_from_environment() if seed is None else _valid_seed(seed, "seed_everything(seed={!r})")
    if value is None:
        value = 0
        messages.warn(
            f"seed_everything() uses seed 0, because no seed was passed and {SEED_VARIABLE} is not set. Pass a seed."
        )
    for prefix in ("PACELINE", *OTHER_PREFIXES):
        os.environ[f"{prefix}_GLOBAL_SEED"] = str(value)
        os.environ[f"{prefix}_SEED_WORKERS"] = str(int(workers))
    if verbose:
        messages.info(f"Seed set to {value}")
    seed_all(value)
    return value


def reset_seed() -> None:
    """Seed everything again with the seed of the last :func:`seed_everything` call, if there was one."""
    if seed_from_environment() is not None:
        seed_everything(workers=os.environ.get(WORKERS_VARIABLE, "0") == "1", verbose=False)


def seed_from_environment() -> int | None:
    """Return the seed from the environment variables; None if none of them is set."""
    for variable in (SEED_VARIABLE, _OTHER_SEED_VARIABLE):
        text = os.environ.get(variable)
        if text:
            return _valid_seed(text, f"The environment variable {variable}={{!r}}")
    return None


def _valid_seed(seed: Any, said: str) -> int:
    try:
        value = int(seed) if isinstance(seed, str) else operator.index(seed)
    except (TypeError, ValueError):
        value = -1
    if not 0 <= value <= _MAX_SEED:
        raise ValueError(f"{said.format(seed)} is not a valid seed. Use a whole number from 0 to {_MAX_SEED}.")
    return value


def random_states() -> dict[str, Any]:
    """Return the state of every random number generator in use, as plain data and tensors.

    The entry ``torch`` is a uint8 CPU tensor of shape (n,). Each kind of device in use has an entry under its name: the
    entry ``mps`` is one such tensor, and any other entry has one tensor per device. Reading the states may wait for the
    devices.
    """
    states = host_random_states()
    for kind in accelerators():
        found = kind.random_states()
        if found is not None:
            states[kind.name] = found
    return states


def host_random_states() -> dict[str, Any]:
    """Like :func:`random_states`, but for the host's generators only; does not wait for a device."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = numpy_random()
    if numpy is not None:
        name, keys, *rest = numpy.get_state()
        states["numpy"] = (name, keys.tolist(), *rest)
    return states


def numpy_random() -> Any:
    """Return ``numpy.random`` if numpy is imported (numpy loads this module on first use); None otherwise."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def seed_host(value: int) -> None:
    """Seed Python's ``random``, numpy and torch, for the CPU only."""
    random.seed(value)
    torch.default_generator.manual_seed(value)  # torch.manual_seed would seed the devices too
    numpy = numpy_random()
    if numpy is not None:
        numpy.seed(value % 2**32)


def seed_all(value: int) -> None:
    """Seed the host's generators (see :func:`seed_host`) and the devices' generators."""
    seed_host(value)
    torch.manual_seed(value % 2**63)


def mixed(*numbers: int) -> int:
    """Return one 64-bit seed derived from several numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def set_random_states(states: dict[str, Any]) -> None:
    """Restore the states that :func:`random_states` returned; warn about generators that this process lacks."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["torch"].cpu())
    missing = []
    numpy = numpy_random()
    if "numpy" in states and numpy is None:
        missing.append("numpy")
    elif "numpy" in states:
        name, keys, *rest = states["numpy"]
        numpy.set_state((name, sys.modules["numpy"].array(keys, dtype="uint32"), *rest))
    missing += [name for name in states if name not in _HOST and not kind_of(name).set_random_states(states[name])]
    if missing:
        messages.warn_once(
            f"The RNG state of {messages.names(missing, last='and')} was saved but cannot be restored (because numpy "
            "is not imported, or the devices differ), so the random numbers will differ from those of the saved run. "
            "Import numpy before fit, or use the same number of devices.",
            key=_DIFFER,
        )


def warn_of_other_device(saved: str | None, present: str) -> None:
    """Warn that a resumed run draws different random numbers if its kind of device differs from the saved run's.

    Args:
        saved: the kind of the saved run's device; None if the checkpoint does not record it.
        present: the kind of this run's device.
    """
    if saved not in (None, present):
        messages.warn_once(
            f"The saved run used the device {saved!r}, but this run uses {present!r}. Each kind of device generates "
            f"its own random numbers, so the numbers will differ from those of the saved run. Resume on {saved!r} to "
            "get the same numbers.",
            key=_DIFFER,
        )


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Context manager that restores all RNG states on exit, whatever was drawn or seeded inside it.

    Args:
        include_cuda: whether to restore CUDA's generators too (reading their states waits for the devices).
    """
    states = random_states()
    cuda = states.pop("cuda", [])
    try:
        yield
    finally:
        set_random_states(states)
        if include_cuda:
            CUDA_KIND.set_random_states(cuda)


class PrivateRandomness:
    """Private RNG states (Python, numpy, torch on the CPU), active inside ``with``.

    The context can be entered repeatedly; the states then continue from where they left off. Numbers drawn inside it
    depend only on the seed and on earlier draws inside it; the states outside do not change.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: tuple[Any, ...] | None = None
        self._outer: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        self._outer = _host_states()
        if self._own is not None:
            _set_host_states(self._own)
            return
        seed_host(self._seed)

    def __exit__(self, *exception: object) -> None:
        self._own = _host_states()
        _set_host_states(self._outer)


def _host_states() -> tuple[Any, ...]:
    numpy = numpy_random()
    return random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.get_state()


def _set_host_states(states: tuple[Any, ...]) -> None:
    python, host, numpy = states
    random.setstate(python)
    torch.set_rng_state(host)
    if numpy is not None:
        numpy_random().set_state(numpy)

"""DeepSpeed's configuration: what the strategy and the run decide, what a file may add, what contradicts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import messages

#: What the run decides, so that a configuration file can only repeat it: key -> who says so.
DECIDED = {
    "optimizer": "configure_optimizers makes the optimizer",
    "scheduler": "configure_optimizers makes the scheduler",
    "amp": "Trainer(precision=...) decides precision",
    "torch_autocast": "Trainer(precision=...) decides precision ('bf16-mixed' and '16-mixed' are autocast)",
}


def read_config(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    """The configuration as a dict; values ``"auto"`` are left out, they mean what the run decides.

    Raises:
        ValueError: the file is not there, is no JSON, or holds something that the run decides.
        TypeError: it is neither a dict nor a path.
    """
    if config is None:
        return {}
    if isinstance(config, Mapping):
        found, name = dict(config), "DeepSpeedStrategy(config=...)"
    elif isinstance(config, (str, os.PathLike)):
        found, name = _from_file(Path(config)), f"The DeepSpeed configuration {os.fspath(config)!r}"
    else:
        raise TypeError(
            f"DeepSpeedStrategy(config={config!r}) is {messages.a(config)}. Pass a dict, or the path of a JSON file."
        )
    found = _without_auto(found)
    for key, why in DECIDED.items():
        if found.get(key):
            raise ValueError(f"{name} holds {key!r} ({found[key]!r}), but {why}. Leave it out of the configuration.")
    _refuse_nvme(found, name)
    return found


def _from_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"DeepSpeedStrategy(config={str(path)!r}): there is no such file in {Path.cwd()}.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"DeepSpeedStrategy(config={str(path)!r}) is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"DeepSpeedStrategy(config={str(path)!r}) holds {messages.a(found)}, not a JSON object.")
    return found


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value != "auto"
    }


def _refuse_nvme(config: Mapping[str, Any], name: str) -> None:
    zero = config.get("zero_optimization", {})
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key, {}).get("device") == "nvme":
            raise ValueError(
                f"{name} asks for {key} to 'nvme'. Paceline clips, scales and saves what lies in memory: write "
                '"device": "cpu".'
            )


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``over``, which win, at every depth."""
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = merge(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return merged


def zero_stage(config: Mapping[str, Any], stage: int, offload_parameters: bool) -> int:
    """The stage in force: the configuration's, else the argument.

    Raises:
        ValueError: it is not 1, 2 or 3, or something was asked for that this stage has not.
    """
    chosen = config.get("zero_optimization", {}).get("stage", stage)
    if isinstance(chosen, bool) or chosen not in (1, 2, 3):
        hint = " Stage 0 is strategy='ddp'." if chosen == 0 else ""
        raise ValueError(f"DeepSpeedStrategy: ZeRO stage {chosen!r} was asked for. Choose 1, 2 or 3.{hint}")
    if chosen != 3 and (offload_parameters or config.get("zero_optimization", {}).get("offload_param")):
        raise ValueError(
            f"DeepSpeedStrategy(stage={chosen}) with parameters offloaded: only stage 3 takes parameters apart. Write "
            "stage=3, or leave offload_parameters out."
        )
    if chosen == 1 and config.get("zero_optimization", {}).get("overlap_comm"):
        raise ValueError(
            "The DeepSpeed configuration asks for overlap_comm under stage 1, where a window that ends early has "
            "nothing to overlap with. Leave it out, or use stage 2, which reduces gradients while backward runs."
        )
    return chosen


def full_config(
    config: Mapping[str, Any], stage: int, precision: str, offload_optimizer: bool, offload_parameters: bool
) -> dict[str, Any]:
    """What DeepSpeed is given: the arguments, the precision's meaning, and the user's configuration, which wins.

    Under ``"bf16-mixed"`` and ``"16-mixed"`` the weights are float32 for DeepSpeed too and autocast is Paceline's, so
    that the numbers are those of any other strategy; ``"bf16-true"`` and ``"16-true"`` are its own 16-bit modes, which
    keep float32 weights in the sharded optimizer. Windows and clipping are Paceline's, so DeepSpeed's are switched off.
    """
    zero: dict[str, Any] = {"stage": stage}
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    base = {
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "bf16": {"enabled": precision == "bf16-true"},
        "fp16": {"enabled": precision == "16-true"},
    }
    merged = merge(base, config)
    merged.pop("train_batch_size", None)
    zero = merged["zero_optimization"]
    if stage < 3 and precision != "16-true" and not offloads(merged):
        # The norm is how DeepSpeed sees an overflow; without loss scaling a bad gradient is for the user to see.
        zero.setdefault("compute_grad_norm", precision == "16-mixed")
    return merged | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
    }


def offloads(config: Mapping[str, Any]) -> bool:
    """Whether the optimizer's state lies on the host."""
    asked = config["zero_optimization"].get("offload_optimizer") or {}
    return asked.get("device", "none") not in (None, "none")


# ---- contradictions --------------------------------------------------------------------------------------------------


def refuse_contradictions(config: Mapping[str, Any], precision: str, accumulate: Any, clip: Any) -> None:
    """Raise where a configuration says something else than the run's settings.

    Args:
        config: the user's.
        precision: the run's, by name.
        accumulate: ``Trainer(accumulate_grad_batches=...)``; None: not known.
        clip: ``Trainer(gradient_clip_val=...)``.

    Raises:
        ValueError: both values, and which to change.
    """
    for key, mine in (("bf16", "bf16-true"), ("fp16", "16-true")):
        enabled = config.get(key, {}).get("enabled")
        if enabled is not None and bool(enabled) != (precision == mine):
            raise ValueError(
                f"The DeepSpeed configuration says {key}.enabled={enabled!r}, but the precision is {precision!r}. "
                f"DeepSpeed's {key} mode keeps 16-bit weights and a float32 copy in the optimizer: write "
                f"Trainer(precision={mine!r}) for it, or leave {key!r} out of the configuration."
            )
    asked = config.get("gradient_accumulation_steps")
    if asked is not None and accumulate is not None and asked != accumulate:
        raise ValueError(_two("gradient_accumulation_steps", asked, "accumulate_grad_batches", accumulate))
    asked = config.get("gradient_clipping")
    if asked is not None and float(asked) != float(clip or 0.0):
        raise ValueError(_two("gradient_clipping", asked, "gradient_clip_val", clip))


def refuse_other_batch_size(config: Mapping[str, Any], micro: int | None, world_size: int, accumulate: int) -> None:
    """Raise where a configuration has another batch size than the loader."""
    if micro is None:
        return
    whole = micro * world_size * accumulate
    for key, real in (("train_micro_batch_size_per_gpu", micro), ("train_batch_size", whole)):
        if config.get(key, real) != real:
            raise ValueError(
                f"The DeepSpeed configuration says {key}={config[key]}, but the train loader has batch_size={micro}"
                f"{'' if real == micro else f', which makes {real} a step'}. The loader decides: leave {key} out, or "
                'write "auto".'
            )


def _two(key: str, asked: Any, argument: str, value: Any) -> str:
    return (
        f"The DeepSpeed configuration says {key}={asked!r}, but Trainer({argument}={value!r}). The Trainer decides: "
        f'leave {key} out of the configuration (or write "auto"), or give the Trainer the same value.'
    )

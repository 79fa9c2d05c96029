"""Read DeepSpeed's configuration from settings and plugins, add the run's values, and reject contradictions."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ... import messages
from ...settings import fill

if TYPE_CHECKING:
    from typing_extensions import Self

#: The names that select DeepSpeedStrategy.
DeepSpeedName = Literal[
    "deepspeed",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3",
    "deepspeed_stage_3_offload",
]

#: The setting that each field can be filled from.
_FROM = {
    "hf_ds_config": "deepspeed_config_file",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_stage",
    "offload_optimizer_device": "offload_optimizer_device",
    "offload_param_device": "offload_param_device",
    "offload_optimizer_nvme_path": "offload_optimizer_nvme_path",
    "offload_param_nvme_path": "offload_param_nvme_path",
    "zero3_init_flag": "zero3_init_flag",
    "zero3_save_16bit_model": "zero3_save_16bit_model",
    "transformer_moe_cls_names": "deepspeed_moe_layer_cls_names",
}
_UNSUPPORTED = (
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "transformer_moe_cls_names",
    "enable_msamp",
    "msamp_opt_level",
)


@dataclass
class DeepSpeedSettings:
    """The settings of ZeRO, documented in ``DeepSpeedPlugin``.

    A field that is None is not set.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: Literal["none", "cpu"] | None = None
    offload_param_device: Literal["none", "cpu"] | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    def filled(self, settings: Mapping[str, Any] | None) -> Self:
        """Return a copy whose unset fields are filled from ``settings``."""
        return fill(self, settings, _FROM)

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration without its ``"auto"`` values."""
        return self.read()

    def read(self) -> dict[str, Any]:
        """Return the configuration without its ``"auto"`` values, from a file if ``hf_ds_config`` is a path."""
        return read_config(getattr(self.hf_ds_config, "config", self.hf_ds_config))

    def decided(self, name: str) -> Any:
        """Return the configuration's value for ``name``, or this object's field if the configuration has none.

        Raises:
            ValueError: the configuration and the field contradict each other.
        """
        field, config = getattr(self, name), self.read().get(name)
        if None not in (field, config) and field != config:
            raise ValueError(
                f"{type(self).__name__}({name}={field!r}) contradicts the DeepSpeed configuration, which has "
                f"{config!r}. Leave one out."
            )
        return field if config is None else config

    def micro_batches(self, steps: int | None) -> int | None:
        """Return the number of micro-batches per update; ``steps`` is the Accelerator's number, None if it is not set.

        Raises:
            ValueError: DeepSpeed is configured with a different number.
        """
        own = self.decided("gradient_accumulation_steps")
        if None not in (steps, own) and steps != own:
            raise ValueError(
                f"DeepSpeed is configured with gradient_accumulation_steps={own}, but the Accelerator is configured "
                f"with {steps}. Leave one out."
            )
        return own if steps is None else steps

    def options(self) -> dict[str, Any]:
        """Return the arguments for DeepSpeedStrategy.

        Raises:
            NotImplementedError: Paceline does not support a field.
            ValueError: a device is unknown.
        """
        for name in _UNSUPPORTED:
            if getattr(self, name) not in (None, False, "", "none"):
                raise NotImplementedError(
                    f"{type(self).__name__}({name}={getattr(self, name)!r}) is not supported: Paceline can clip, "
                    "scale and save only 16-bit and 32-bit tensors in memory, and does not support mixture-of-experts "
                    f"models. Leave {name} out."
                )
        for field, default, why in (
            ("is_train_batch_min", True, "DeepSpeed does not need the batch size"),
            ("zero3_init_flag", False, "models are partitioned when they are prepared"),
            ("zero3_save_16bit_model", False, "saving always gathers the full weights"),
        ):
            messages.ignored(type(self).__name__, why, default, **{field: getattr(self, field)})
        ours = ("gradient_accumulation_steps", "gradient_clipping")  # the Accelerator does both itself
        config = {name: value for name, value in self.read().items() if name not in ours}
        found: dict[str, Any] = {"config": config} if self.hf_ds_config is not None else {}
        if self.zero_stage is not None:
            found["stage"] = int(self.zero_stage)
        for field, argument in (("optimizer", "offload_optimizer"), ("param", "offload_parameters")):
            name = f"offload_{field}_device"
            device = str(getattr(self, name) or "none").lower()
            if device not in ("none", "cpu"):
                raise ValueError(
                    f"{type(self).__name__}({name}={device!r}): Paceline can clip, scale and save only tensors that "
                    "are in memory. Choose 'cpu' or 'none'."
                )
            if device == "cpu":
                found[argument] = True
        return found


# ---- the configuration ---------------------------------------------------------------------------------------------

#: Keys that a configuration must not contain because the run sets them, each with the reason.
DECIDED = {
    "optimizer": "configure_optimizers creates the optimizer",
    "scheduler": "configure_optimizers creates the scheduler",
    "amp": "Trainer(precision=...) decides the precision",
    "torch_autocast": "Trainer(precision=...) decides the precision ('bf16-mixed' and '16-mixed' use autocast)",
}


def read_config(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return the configuration as a dict without its ``"auto"`` values, which the run sets.

    Raises:
        ValueError: the file does not exist or is not JSON, or it contains a key that the run sets.
        TypeError: ``config`` is neither a dict nor a path.
    """
    found = without_auto(read_dict(config))
    name = "DeepSpeedStrategy(config=...)"
    if isinstance(config, (str, os.PathLike)):
        name = f"The DeepSpeed configuration {os.fspath(config)!r}"
    for key, why in DECIDED.items():
        if found.get(key):
            raise ValueError(f"{name} has {key!r} ({found[key]!r}), but {why}. Leave {key!r} out of the configuration.")
    for key in ("offload_optimizer", "offload_param"):
        if found.get("zero_optimization", {}).get(key, {}).get("device") == "nvme":
            raise ValueError(
                f"{name} sets the device of {key} to 'nvme', but Paceline can clip, scale and save only tensors in "
                'memory. Use "device": "cpu".'
            )
    return found


def read_dict(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return a complete configuration as a dict, from a file if ``config`` is a path.

    Raises:
        ValueError: the file does not exist or is not JSON.
        TypeError: ``config`` is neither a dict nor a path.
    """
    if isinstance(config, (str, os.PathLike)):
        return _from_file(Path(config))
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(
            f"DeepSpeedStrategy: config={config!r} is {messages.a(config)}. Pass a dict, or the path of a JSON file."
        )
    return dict(config or {})


def _from_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(
            f"DeepSpeedStrategy: config={str(path)!r} does not exist in {Path.cwd()}. Pass the path of a JSON file."
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"DeepSpeedStrategy: config={str(path)!r} is not valid JSON: {error}. Correct the file, or pass a dict."
        ) from None
    if not isinstance(found, dict):
        raise ValueError(
            f"DeepSpeedStrategy: config={str(path)!r} contains {messages.a(found)}, but a configuration must be a "
            "JSON object."
        )
    return found


def without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the ``"auto"`` values in any of its sections."""
    return {
        key: without_auto(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value != "auto"
    }


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Recursively merge ``over`` into a copy of ``base``; values in ``over`` take precedence."""
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = merge(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return merged


def zero_stage(config: Mapping[str, Any], stage: int, offload_parameters: bool) -> int:
    """Return the ZeRO stage to use: the configuration's stage or, if it has none, the argument.

    Raises:
        ValueError: the stage is not 1, 2 or 3, or it does not support one of the other settings.
    """
    zero = config.get("zero_optimization", {})
    chosen = zero.get("stage", stage)
    if isinstance(chosen, bool) or chosen not in (1, 2, 3):
        hint = " For stage 0, use strategy='ddp'." if chosen == 0 else ""
        raise ValueError(f"DeepSpeedStrategy does not support ZeRO stage {chosen!r}. Choose 1, 2 or 3.{hint}")
    if chosen != 3 and (offload_parameters or zero.get("offload_param")):
        raise ValueError(
            f"DeepSpeedStrategy(stage={chosen}) cannot offload parameters, because only stage 3 partitions them. Use "
            "stage=3, or leave offload_parameters out."
        )
    if chosen == 1 and zero.get("overlap_comm"):
        raise ValueError(
            "The DeepSpeed configuration sets overlap_comm for stage 1, in which the communication for an "
            "accumulation window that ends early has nothing to overlap with. Leave overlap_comm out, or use stage "
            "2, which reduces gradients during backward."
        )
    return chosen


def full_config(
    config: Mapping[str, Any], stage: int, precision: str, offload_optimizer: bool, offload_parameters: bool
) -> dict[str, Any]:
    """Return DeepSpeed's configuration: defaults from the arguments and the precision, then the user's values.

    With ``"bf16-mixed"`` and ``"16-mixed"``, DeepSpeed gets float32 weights and Paceline runs autocast, so the results
    match other strategies. ``"bf16-true"`` and ``"16-true"`` are DeepSpeed's own 16-bit modes, which keep float32
    weights in the sharded optimizer. DeepSpeed's accumulation and clipping are off, because Paceline does both.
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
        # DeepSpeed detects overflows from the norm; without loss scaling, the user must see a bad gradient.
        zero.setdefault("compute_grad_norm", precision == "16-mixed")
    return merged | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
    }


def offloads(config: Mapping[str, Any]) -> bool:
    """Return True if the optimizer's state is kept on the host."""
    asked = config["zero_optimization"].get("offload_optimizer") or {}
    return asked.get("device", "none") not in (None, "none")


# ---- contradictions --------------------------------------------------------------------------------------------------


def refuse_contradictions(config: Mapping[str, Any], precision: str, accumulate: Any, clip: Any) -> None:
    """Raise an error if the user's configuration contradicts the run's precision, accumulation or clipping.

    ``accumulate`` is None if the number of micro-batches is not known.
    """
    for key, mine in (("bf16", "bf16-true"), ("fp16", "16-true")):
        enabled = config.get(key, {}).get("enabled")
        if enabled is not None and bool(enabled) != (precision == mine):
            raise ValueError(
                f"The DeepSpeed configuration sets {key}.enabled={enabled!r}, but the precision is {precision!r}. "
                f"DeepSpeed's {key} mode keeps 16-bit weights and a float32 copy in the optimizer. Use "
                f"Trainer(precision={mine!r}) for this mode, or leave {key!r} out of the configuration."
            )
    asked = config.get("gradient_accumulation_steps")
    if asked is not None and accumulate is not None and asked != accumulate:
        raise ValueError(_two("gradient_accumulation_steps", asked, "accumulate_grad_batches", accumulate))
    asked = config.get("gradient_clipping")
    if asked is not None and float(asked) != float(clip or 0.0):
        raise ValueError(_two("gradient_clipping", asked, "gradient_clip_val", clip))


def refuse_other_batch_size(config: Mapping[str, Any], micro: int | None, world_size: int, accumulate: int) -> None:
    """Raise an error if the configuration's batch size differs from the loader's batch size."""
    if micro is None:
        return
    whole = micro * world_size * accumulate
    for key, real in (("train_micro_batch_size_per_gpu", micro), ("train_batch_size", whole)):
        if config.get(key, real) != real:
            raise ValueError(
                f"The DeepSpeed configuration sets {key}={config[key]}, but the train loader has batch_size={micro}"
                f"{'' if real == micro else f', which makes {real} per step'}. The loader sets the batch size. "
                f'Leave {key} out, or set it to "auto".'
            )


def _two(key: str, asked: Any, argument: str, value: Any) -> str:
    return (
        f"The DeepSpeed configuration sets {key}={asked!r}, but the Trainer has {argument}={value!r}. The Trainer "
        f'sets this value, so leave {key} out of the configuration (or use "auto"), or give the Trainer the same value.'
    )

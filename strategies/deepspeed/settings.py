"""DeepSpeed as launchers, settings files and plugins describe it, and the arguments of DeepSpeedStrategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ... import messages
from ...settings import fill
from .config import read_config

if TYPE_CHECKING:
    from typing_extensions import Self

#: The names of DeepSpeedStrategy.
DeepSpeedName = Literal[
    "deepspeed",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3",
    "deepspeed_stage_3_offload",
]

#: The setting that each field can come from.
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


@dataclass
class DeepSpeedSettings:
    """ZeRO as fields; ``DeepSpeedPlugin`` describes them. A field that is None is not set."""

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
        """A copy with what is open from the settings."""
        return fill(self, settings, _FROM)

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration, read from its file; values ``"auto"`` are left out."""
        return read_config(getattr(self.hf_ds_config, "config", self.hf_ds_config))

    def decided(self, name: str) -> Any:
        """``gradient_accumulation_steps`` or ``gradient_clipping``: the configuration's, else the field's.

        Raises:
            ValueError: the two differ.
        """
        field, config = getattr(self, name), self.deepspeed_config.get(name)
        if None not in (field, config) and field != config:
            raise ValueError(
                f"{type(self).__name__}({name}={field!r}) contradicts its configuration, which says {config!r}. "
                "Leave one out."
            )
        return field if config is None else config

    def options(self) -> dict[str, Any]:
        """The arguments of DeepSpeedStrategy.

        Raises:
            NotImplementedError: a field that Paceline has nothing for.
            ValueError: an unknown device.
        """
        for name in (
            "offload_optimizer_nvme_path",
            "offload_param_nvme_path",
            "transformer_moe_cls_names",
            "enable_msamp",
            "msamp_opt_level",
        ):
            if getattr(self, name) not in (None, False, "", "none"):
                raise NotImplementedError(
                    f"{type(self).__name__}({name}={getattr(self, name)!r}) is not supported: Paceline clips, "
                    "scales and saves what DeepSpeed keeps in memory, in 16 or 32 bits, and knows no experts. Leave it "
                    "out."
                )
        if not self.is_train_batch_min or self.zero3_init_flag:
            named = "is_train_batch_min=False" if not self.is_train_batch_min else "zero3_init_flag=True"
            messages.info_once(
                f"{type(self).__name__}({named}) has no effect: DeepSpeed is not told batch sizes, and splits a model "
                "when it is prepared."
            )
        # Windows and clipping are the Accelerator's.
        ours = ("gradient_accumulation_steps", "gradient_clipping")
        config = {name: value for name, value in self.deepspeed_config.items() if name not in ours}
        found: dict[str, Any] = {"config": config} if self.hf_ds_config is not None else {}
        if self.zero_stage is not None:
            found["stage"] = int(self.zero_stage)
        for field, argument in (("optimizer", "offload_optimizer"), ("param", "offload_parameters")):
            name = f"offload_{field}_device"
            device = str(getattr(self, name) or "none").lower()
            if device not in ("none", "cpu"):
                raise ValueError(
                    f"{type(self).__name__}({name}={device!r}): Paceline clips, scales and saves what lies in memory. "
                    "Choose 'cpu' or 'none'."
                )
            if device == "cpu":
                found[argument] = True
        return found

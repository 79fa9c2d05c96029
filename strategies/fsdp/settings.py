"""Convert FSDP settings from launchers, settings files and plugins to FSDPStrategy arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ... import messages
from ...devices.kinds import present
from ...settings import fill
from ...torch_private import classes_of_policy, function_of_policy

if TYPE_CHECKING:
    from torch.distributed.fsdp import OffloadPolicy
    from typing_extensions import Self

SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
WRAPPING = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STATES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
#: The default minimum number of parameters in a block, for SIZE_BASED_WRAP.
MIN_NUM_PARAMS = 100_000_000
DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}

#: Fields that have no setting.
_WITHOUT_SETTING = (
    "mixed_precision_policy",
    "state_dict_config",
    "optim_state_dict_config",
    "limit_all_gathers",
    "param_init_fn",
)
#: Settings whose name is not ``fsdp_`` plus the field's name.
_OTHER_NAMES = {
    "fsdp_version": "fsdp_version",
    "cpu_offload": "fsdp_offload_params",
    "transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
}


@dataclass
class FSDPSettings:
    """The settings of FSDP1 and FSDP2, documented in ``FullyShardedDataParallelPlugin``.

    A field that is None is not set.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Callable[..., Any] | str | None = None
    cpu_offload: Any = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | str | None = None
    min_num_params: int | None = None

    def filled(self, settings: Mapping[str, Any] | None) -> Self:
        """Return a copy whose unset fields are filled from ``settings``."""
        names = [field.name for field in fields(FSDPSettings) if field.name not in _WITHOUT_SETTING]
        return fill(self, settings, {name: _OTHER_NAMES.get(name, f"fsdp_{name}") for name in names})

    def options(self) -> dict[str, Any]:
        """Return the arguments for FSDPStrategy, and report fields that have no effect (once).

        Raises:
            ValueError: a field has an unknown value, or two fields contradict each other.
            NotImplementedError: Paceline does not support a field.
        """
        found = self.arguments()
        self._say()
        return found

    def arguments(self) -> dict[str, Any]:
        """Like :meth:`options`, but report nothing."""
        self._refuse()
        found: dict[str, Any] = {
            **self._sharding(),
            "wrap": self._wrap(),
            "cpu_offload": _offload(self.cpu_offload) or None,
            "activation_checkpointing": is_true(self.activation_checkpointing) or None,
            "mixed_precision": _policy(self.mixed_precision_policy),
            "ignored_modules": self.ignored_modules or None,
        }
        if self.state_dict_type is not None:
            kind = as_word("state_dict_type", self.state_dict_type, STATES)
            if kind == "LOCAL_STATE_DICT":
                raise ValueError(
                    f"{type(self).__name__}: FSDP2 has no state_dict_type='LOCAL_STATE_DICT'. Use "
                    "'SHARDED_STATE_DICT', which can be loaded with any number of processes."
                )
            found["state_dict_type"] = "sharded" if kind == "SHARDED_STATE_DICT" else "full"
        return {name: value for name, value in found.items() if value is not None}

    def _refuse(self) -> None:
        fixes = {
            "param_init_fn": "layers on the meta device are initialized by their own reset_parameters() or by an "
            "enclosing module's _init_weights(module). Define one of these two methods.",
            "activation_checkpointing_offload": "activations that are kept for recomputation stay on the device. Use "
            "activation_checkpointing alone.",
        }
        for name, fix in fixes.items():
            value = getattr(self, name)
            if value not in (None, False, "") and value != []:
                raise NotImplementedError(f"{type(self).__name__}({name}=...) is not supported: {fix}")
        if self.fsdp_version not in (None, 1, 2):
            raise ValueError(
                f"{type(self).__name__}(fsdp_version={self.fsdp_version!r}): the version must be 1 or 2. "
                "Use fsdp_version=2."
            )

    def _sharding(self) -> dict[str, Any]:
        asked, reshard = self.sharding_strategy, self.reshard_after_forward
        if reshard is not None and not _is_truth(reshard):
            if asked is not None and as_word("", asked, SHARDING) != as_word(
                "reshard_after_forward", reshard, SHARDING
            ):
                raise ValueError(
                    f"{type(self).__name__}: sharding_strategy={asked!r} and reshard_after_forward={reshard!r} "
                    "contradict each other. Leave one out."
                )
            asked, reshard = reshard, None
        name = None if asked is None else as_word("sharding_strategy", asked, SHARDING)
        if name == "NO_SHARD":
            raise ValueError(
                f"{type(self).__name__}(sharding_strategy='NO_SHARD') shards nothing, which is the same as DDP. Leave "
                "the plugin (use_fsdp) out to use DDP."
            )
        keeps = name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
        if self.fsdp_version == 1:
            reshard = None  # the sharding strategy decides this; launchers set both
        if keeps and reshard is not None and is_true(reshard):
            raise ValueError(
                f"{type(self).__name__}(sharding_strategy={name!r}) keeps weights unsharded from forward to backward, "
                f"but reshard_after_forward={reshard!r} frees the weights. Leave one out."
            )
        keeps = keeps or (reshard is not None and not is_true(reshard))
        return {
            "sharding": "hybrid" if name in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2") else None,
            "reshard_after_forward": False if keeps else None,
        }

    def _wrap(self) -> Any:
        policy, names, least = self.auto_wrap_policy, self.class_names(), self.min_num_params
        if policy is None:
            return names or (int(least) if least else "auto")
        word = self.wrapping()
        if word is None or isinstance(policy, functools.partial):
            return _torch_policy(policy)
        if word == "NO_WRAP":
            return "root"
        if word == "SIZE_BASED_WRAP":
            return int(least) if least else MIN_NUM_PARAMS
        return names or "auto"

    def wrapping(self) -> str | None:
        """Return the word for ``auto_wrap_policy``; None if it is not set, or is another function than torch's two."""
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        policy = self.auto_wrap_policy
        if isinstance(policy, str):
            return as_word("auto_wrap_policy", policy, WRAPPING)
        function = policy.func if isinstance(policy, functools.partial) else policy
        torchs = {
            transformer_auto_wrap_policy: "TRANSFORMER_BASED_WRAP",
            size_based_auto_wrap_policy: "SIZE_BASED_WRAP",
        }
        return torchs.get(function) if inspect.isfunction(function) else None

    def class_names(self) -> list[str]:
        """Return ``transformer_cls_names_to_wrap`` as a list."""
        names = self.transformer_cls_names_to_wrap or []
        return [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else list(names)

    def _say(self) -> None:
        """Report fields that have no effect."""
        prefetch, original, synced = self.backward_prefetch, self.use_orig_params, self.sync_module_states
        asked = {
            "fsdp_version": self.fsdp_version == 1,
            "backward_prefetch": prefetch is not None
            and as_word("backward_prefetch", prefetch, PREFETCH) != "BACKWARD_PRE",
            "forward_prefetch": is_true(self.forward_prefetch),
            "limit_all_gathers": not self.limit_all_gathers,
            "use_orig_params": original is not None and not is_true(original),
            "sync_module_states": synced is not None and not is_true(synced),
            "cpu_ram_efficient_loading": is_true(self.cpu_ram_efficient_loading),
            "state_dict_config": True,
            "optim_state_dict_config": True,
        }
        messages.ignored(
            type(self).__name__,
            "FSDP2 starts from rank 0's weights, keeps the original parameters, prefetches the next block while the "
            "current one runs, and gathers full state dicts on rank 0's CPU",
            **{name: getattr(self, name) for name, is_asked in asked.items() if is_asked},
        )
        self._say_wrapping()

    def _say_wrapping(self) -> None:
        """Report fields that the chosen wrapping policy does not use."""
        classes, least = "transformer_cls_names_to_wrap", "min_num_params"
        unused = {classes: self.class_names() or None, least: self.min_num_params or None}
        policy, decides = self.auto_wrap_policy, "auto_wrap_policy"
        if policy is None:
            decides, used = classes, classes if unused[classes] else least
        else:
            decides = f"auto_wrap_policy={policy!r}" if isinstance(policy, str) else decides
            used = {"TRANSFORMER_BASED_WRAP": classes, "SIZE_BASED_WRAP": least}.get(self.wrapping() or "", "")
        unused.pop(used, None)
        messages.ignored(type(self).__name__, f"{decides} decides which modules are sharded as one unit", **unused)


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool) or str(value).lower() in ("true", "false", "yes", "no", "1", "0")


def is_true(value: Any) -> bool:
    """Return True for True and for words that mean it; False for anything else, also None."""
    return str(value).lower() in ("true", "yes", "1")


def as_word(field: str, value: Any, words: tuple[str, ...]) -> str:
    """Convert a string, a torch enum or an enum's number (counting from 1) to one of ``words``."""
    text = str(getattr(value, "name", value)).upper()
    if text.isdecimal() and 1 <= int(text) <= len(words):
        return words[int(text) - 1]
    if text not in words:
        hint = messages.did_you_mean(text, words)
        raise ValueError(
            f"Unknown FullyShardedDataParallelPlugin {field} {value!r}.{hint} Choose {messages.names(words)}."
        )
    return text


def _offload(asked: Any) -> Any:
    """Convert a bool, FSDP1's ``CPUOffload`` or FSDP2's policy to FSDPStrategy's ``cpu_offload`` argument."""
    if isinstance(asked, (bool, str)) or asked is None:
        return is_true(asked)
    return asked.offload_params if hasattr(asked, "offload_params") else asked


def offload_policy(asked: bool | OffloadPolicy) -> OffloadPolicy:
    """Return the policy that ``fully_shard`` takes for FSDPStrategy's ``cpu_offload`` argument."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    if isinstance(asked, OffloadPolicy):
        return asked
    return CPUOffloadPolicy(pin_memory=present().overlaps_copies()) if asked else OffloadPolicy()


def _policy(asked: Any) -> Any:
    """Convert an FSDP1 policy, a dict of arguments, a dtype or its name to an FSDP2 mixed-precision policy."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if asked is None or isinstance(asked, MixedPrecisionPolicy):
        return asked
    if isinstance(asked, (str, torch.dtype)):
        dtype = _dtype(asked)
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if isinstance(asked, Mapping):
        for name in asked:
            if name not in names:
                raise ValueError(messages.unknown("mixed_precision_policy key", name, names))
        found: dict[str, Any] = {
            key: value if isinstance(value, bool) else _dtype(value) for key, value in asked.items()
        }
        return MixedPrecisionPolicy(**found)
    if hasattr(asked, "param_dtype") and hasattr(asked, "buffer_dtype"):
        if asked.buffer_dtype not in (None, torch.float32):
            raise ValueError(
                f"FullyShardedDataParallelPlugin: mixed_precision_policy has buffer_dtype={asked.buffer_dtype}, "
                "but with FSDP2, buffers always keep their dtype. Leave buffer_dtype out."
            )
        return MixedPrecisionPolicy(
            param_dtype=asked.param_dtype,
            reduce_dtype=asked.reduce_dtype,
            cast_forward_inputs=bool(asked.cast_forward_inputs or asked.cast_root_forward_inputs),
        )
    raise TypeError(
        f"FullyShardedDataParallelPlugin: mixed_precision_policy={asked!r} is {messages.a(asked)}. Pass a "
        "torch.distributed.fsdp.MixedPrecisionPolicy, a dict of its arguments, or 'bf16' or 'fp16'."
    )


def _dtype(name: Any) -> Any:
    if name is None or isinstance(name, torch.dtype):
        return name
    text = str(name).lower().removeprefix("torch.")
    if text not in DTYPES:
        raise ValueError(messages.unknown("mixed_precision_policy dtype", name, DTYPES))
    return DTYPES[text]


def _torch_policy(given: Any) -> Any:
    """Convert a policy from torch.distributed.fsdp.wrap to a ``wrap`` argument; return other functions unchanged."""
    policy: Any = given
    told: Mapping[str, Any] = given.keywords if isinstance(given, functools.partial) else {}
    classes = told.get("transformer_layer_cls") or told.get("module_classes")
    if classes or told.get("min_num_params"):
        return tuple(classes) if classes else told["min_num_params"]
    wrapped, decide = classes_of_policy(policy), function_of_policy(policy)
    if wrapped is not None:
        return wrapped
    if decide is not None:
        return lambda _, module: bool(decide(module))
    if not callable(policy):
        raise TypeError(
            f"FullyShardedDataParallelPlugin: auto_wrap_policy={policy!r} is {messages.a(policy)}. Pass one of "
            f"{messages.names(name.lower() for name in WRAPPING)}, or a policy from torch.distributed.fsdp.wrap."
        )
    if {"module", "recurse", "nonwrapped_numel"} <= set(inspect.signature(policy).parameters):
        return lambda _, module: bool(
            policy(module=module, recurse=False, nonwrapped_numel=sum(p.numel() for p in module.parameters()))
        )
    return policy

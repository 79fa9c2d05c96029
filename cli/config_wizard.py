"""Asks the questions of ``paceline config``. Enter, or the end of the input, accepts a question's default."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .. import messages
from ..settings import SETTINGS

MACHINES = ("No distributed training", "multi-CPU", "multi-GPU", "TPU")
#: The setting that a type of machine turns on.
_SWITCHES = {"multi-GPU": "multi_gpu", "TPU": "tpu"}
PLACES = ("This machine", "AWS (Amazon SageMaker)")
_INSTEAD_OF_AWS = (
    "is not supported, because Paceline starts processes only on the machine on which it is launched. Choose 'This "
    "machine'. To train on N machines, run the following command on each machine, with RANK from 0 to N - 1: paceline "
    "launch --num_machines N --num_processes TOTAL --machine_rank RANK --main_process_ip ADDRESS --main_process_port "
    "29500 train.py."
)


class Dialog:
    """Asks for one setting at a time and skips those in ``given``."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = dict(given)
        self._fixed = frozenset(given)
        self._ended = False

    def yes(self, question: str, default: bool = False) -> bool:
        """Ask a yes-or-no question."""
        return self._ask(f"{question} [{'YES/no' if default else 'yes/NO'}]: ", SETTINGS["cpu"].parse, default)

    def switch(self, name: str, question: str, default: bool = False) -> bool:
        """Ask whether to turn a setting on."""
        if name not in self._fixed:
            self.values[name] = self.yes(question, default)
        return self.values[name]

    def choose(self, question: str, choices: Sequence[str], unsupported: Mapping[str, str] | None = None) -> str:
        """Ask the user to pick one of ``choices``; the first choice is the default.

        ``unsupported`` maps listed choices that are not supported to messages that say what to do instead.
        """

        def parse(word: str) -> str:
            close = [one for one in choices if one.lower().startswith(word.lower())]
            if word.isdecimal() and int(word) < len(choices):
                close = [choices[int(word)]]
            if len(close) != 1:
                raise ValueError(f"is not one of the choices. Enter a number or a name: {messages.names(choices)}.")
            if unsupported and close[0] in unsupported:
                raise ValueError(unsupported[close[0]])
            return close[0]

        listed = "".join(f"\n  {number}: {one}" for number, one in enumerate(choices))
        return self._ask(f"{question}{listed}\nYour choice [0]: ", parse, choices[0])

    def setting(self, name: str, question: str, default: Any = None, choices: bool = False) -> Any:
        """Ask for a setting's value. A setting without a default may stay unset."""
        if name in self._fixed:
            return self.values[name]
        one = SETTINGS[name]
        default = one.default if default is None else default
        among = f" ({one.accepts})" if choices else ""
        shown = "none" if default is None else default
        answer = self._ask(f"{question}{among} [{shown}]: ", one.parse, default)
        if answer is not None:
            self.values[name] = answer
        return answer

    def _ask(self, prompt: str, parse: Any, default: Any) -> Any:
        while True:
            word = self._read(prompt)
            if not word:
                return default
            try:
                return parse(word)
            except ValueError as error:
                if not sys.stdin.isatty():
                    question = prompt.partition("\n")[0].partition(" [")[0]
                    raise ValueError(f"{question} {word!r} {error}") from None
                messages.answer(f"{word!r} {error}")

    def _read(self, prompt: str) -> str:
        if self._ended:
            messages.answer(prompt)
            return ""
        try:
            word = input(prompt).strip()
        except EOFError:
            self._ended = True
            word = ""
        if not sys.stdin.isatty():
            messages.answer(word)
        return word


def ask(given: Mapping[str, Any]) -> dict[str, Any]:
    """Ask for everything that training needs. Return the settings, starting with the given ones."""
    talk = Dialog(given)
    talk.choose("In which compute environment are you running?", PLACES, {PLACES[1]: _INSTEAD_OF_AWS})
    machine = talk.choose("Which type of machine are you using?", MACHINES)
    several = machine != MACHINES[0]
    if several:
        _machines(talk)
    if machine == "multi-CPU":
        cpu = talk.values.setdefault("cpu", True)
    else:
        cpu = not several and talk.switch("cpu", "Do you want to run your training on the CPU only?")
    if machine in _SWITCHES:
        talk.values.setdefault(_SWITCHES[machine], True)
    _dynamo(talk)
    deepspeed = not cpu and machine != "TPU" and _deepspeed(talk)
    if machine == "multi-GPU" and not deepspeed and _fsdp(talk):
        _dimensions(talk)
    if several:
        present = _count(machine)
        default = max(1 if machine == "TPU" else 2, present * talk.values["num_machines"])
        talk.setting("num_processes", "How many processes should be used in total, across all machines?", default)
    else:
        talk.values.setdefault("num_processes", 1)
    if not cpu and machine != "TPU":
        talk.setting("gpu_ids", "Which GPUs (by ID) should be used for training on this machine?", "all")
        talk.switch("enable_cpu_affinity", "Would you like to enable NUMA efficiency? (NVIDIA only)")
    talk.setting("mixed_precision", "Do you wish to use mixed precision?", choices=True)
    talk.setting("gradient_accumulation_steps", "How many micro-batches should be accumulated per optimizer step?")
    return talk.values


def _count(machine: str) -> int:
    """Return the number of visible devices that a type of machine uses; 0 if it uses none.

    For ``multi-GPU``, these are the devices of the best kind on this machine other than TPUs.
    """
    if machine not in _SWITCHES:
        return 0
    from ..devices.kinds import accelerators
    from ..processes.devices import count

    kinds = ["tpu"] if machine == "TPU" else [kind.name for kind in accelerators() if kind.name != "tpu"]
    return next(filter(None, map(count, kinds)), 0)


def _machines(talk: Dialog) -> None:
    machines = talk.setting("num_machines", "How many machines will you use?")
    if machines > 1:
        talk.setting("machine_rank", "What is the rank of this machine, counted from 0?")
        talk.setting("main_process_ip", "What is the address of machine 0?")
        talk.setting("main_process_port", "What is the port of machine 0?", 29500)
        talk.setting("rdzv_backend", "How should machines find each other, static or c10d?")
    talk.switch("debug", "Should distributed operations be checked for errors while running?")


def _dynamo(talk: Dialog) -> None:
    if "dynamo_backend" in talk.values:
        return
    if not talk.yes("Do you wish to optimize your script with torch dynamo?"):
        talk.values["dynamo_backend"] = "no"
        return
    talk.setting("dynamo_backend", "Which dynamo backend would you like to use?", "inductor")
    talk.setting("dynamo_mode", "Which mode do you want to use?", choices=True)
    talk.switch("dynamo_use_fullgraph", "Must the model be compiled as a single graph?")
    talk.switch("dynamo_use_dynamic", "Do you want to enable dynamic shape tracing?")
    talk.switch("dynamo_use_regional_compilation", "Do you want to compile repeated blocks only once?")


def _deepspeed(talk: Dialog) -> bool:
    if not talk.switch("use_deepspeed", "Do you want to use DeepSpeed?"):
        return False
    if talk.setting("deepspeed_config_file", "Which DeepSpeed configuration file (JSON) should be used?"):
        return True
    stage = talk.setting("zero_stage", "Which ZeRO stage should DeepSpeed use?", choices=True)
    if stage >= 2:
        _offload(talk, "offload_optimizer", "Where should the optimizer's state be offloaded to?")
    if stage == 3:
        _offload(talk, "offload_param", "Where should the weights be offloaded to?")
        talk.switch("zero3_save_16bit_model", "Should 16-bit weights be gathered for saving?")
        talk.switch("zero3_init_flag", "Should the model be sharded while it is created?")
    if talk.yes("Do you want to clip gradients?"):
        talk.setting("gradient_clipping", "What is the maximum gradient norm?", 1.0)
    return True


def _offload(talk: Dialog, name: str, question: str) -> None:
    if talk.setting(f"{name}_device", question, choices=True) == "nvme":
        talk.setting(f"{name}_nvme_path", "Which folder on NVMe?")


def _fsdp(talk: Dialog) -> bool:
    if not talk.switch("use_fsdp", "Do you want to use FullyShardedDataParallel?"):
        return False
    talk.setting("fsdp_sharding_strategy", "What should be sharded?", choices=True)
    talk.switch("fsdp_offload_params", "Do you want to keep weights in CPU memory between uses?")
    policy = talk.setting("fsdp_auto_wrap_policy", "Which blocks should FSDP shard as units?", choices=True)
    if policy == "TRANSFORMER_BASED_WRAP":
        talk.setting("fsdp_transformer_layer_cls_to_wrap", "Which classes are the blocks? Separate them with commas.")
    if policy == "SIZE_BASED_WRAP":
        talk.setting("fsdp_min_num_params", "What is the minimum number of parameters in a block?")
    talk.setting("fsdp_state_dict_type", "How should weights be saved?", choices=True)
    talk.switch(
        "fsdp_cpu_ram_efficient_loading", "Should only one process read the weights and send them to the others?", True
    )
    talk.switch(
        "fsdp_activation_checkpointing", "Do you want to recompute activations instead of keeping them in memory?"
    )
    return True


def _dimensions(talk: Dialog) -> None:
    if talk.switch("use_parallelism_config", "Do you want to combine several kinds of parallelism?"):
        for name in ("dp_replicate", "dp_shard", "tp", "cp"):
            one = SETTINGS[f"parallelism_config_{name}_size"]
            talk.setting(one.name, f"How many {one.help}?")

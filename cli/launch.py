"""``paceline launch``: run a script in one or more processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import messages
from ..devices.hidden import HIDE
from ..processes.cluster_environment import STARTER
from ..processes.timings import STARTED
from ..settings import FLAGS, SETTINGS, Settings, hand_over, resolve
from .launch_flags import add_flags, given, refuse
from .launch_script import Script, find_script, point_out_config

_NAMES = ("--main_process_ip", "--main_process_port", "--machine_rank")
#: Variable that torch elastic always sets for a process that it starts, then all variables that it may set.
_RUN_ID = "TORCHELASTIC_RUN_ID"
_PLACE = (
    *(_RUN_ID, "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
)
#: Flags of DeepSpeed's own launcher, which Paceline does not use.
_DEEPSPEEDS_LAUNCHER = (
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "deepspeed_multinode_launcher",
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    add_flags(parser)


def run(arguments: Namespace, replace: bool = True) -> int:
    """Start the processes, wait for them, and return the script's exit status.

    ``replace`` specifies whether the script may replace this process if the script runs as a single process.
    """
    refuse(arguments)
    _leave_outer_launch()
    script = find_script(arguments)
    settings = resolve(flags=given(arguments), config_file=arguments.config_file, door="paceline launch")
    return start(script, settings, arguments, replace)


def start(script: Script, settings: Settings, arguments: Namespace, replace: bool = True) -> int:
    """Run a script with the given settings.

    ``arguments`` contains the flags that are not settings; ``replace`` is the same as for :func:`run`.
    """
    plan = _plan(settings)
    _refuse_deepspeed(settings)
    point_out_config(script)
    os.environ.update(hand_over(settings))
    os.environ.update(plan.variables)
    if settings["debug"]:
        os.environ[STARTED] = str(time.time())
    say = _Announcement(plan, settings, arguments.quiet)
    if plan.is_one and not arguments.log_dir and not settings["max_restarts"]:
        say.chosen()
        return _replace(script.alone()) if replace else subprocess.call(script.alone())
    from ..processes import launch, launched_worker
    from ..processes.torch_elastic import ElasticOptions

    options = ElasticOptions(
        max_restarts=settings["max_restarts"],
        monitor_interval=settings["monitor_interval"],
        log_dir=arguments.log_dir,
        tee=arguments.tee or ("3" if arguments.log_dir else "0"),
        role=arguments.role,
        rdzv_backend=settings["rdzv_backend"],
        rdzv_conf=_pairs(settings["rdzv_conf"]),
        quiet=not settings["debug"],
        serving=say.chosen,
    )
    is_ranked = settings["rdzv_backend"] != "static" or settings.is_set("machine_rank")
    place = launch.find_place(
        settings["num_machines"],
        settings["machine_rank"] if is_ranked else None,
        settings["main_process_ip"],
        settings["main_process_port"],
        _NAMES,
        _line(script, settings),
    )
    if plan.num_machines > 1:
        say.chosen()
    command = script.alone()
    if script.kind != "program":
        command = launched_worker.command(script.target, script.arguments, module=script.kind == "module")
    os.environ[STARTER] = "paceline launch"
    return launch.run(command, plan.num_processes, place, plan.kind, plan.binds_gpus, options)


def _leave_outer_launch() -> None:
    """Remove the variables and flags that an outer launcher has set, because nested launches are independent."""
    for name in filter(None, os.environ.pop(FLAGS, "").split(",")):
        os.environ.pop(SETTINGS[name].variable, None)
    if _RUN_ID in os.environ:
        for name in _PLACE:
            os.environ.pop(name, None)


def _replace(command: list[str]) -> int:
    """Replace this process with the script, so that the script itself receives signals and sets the exit status."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name != "nt":  # on Windows, exec returns to the shell immediately
        os.execvp(command[0], command)
    return subprocess.call(command)


def _line(script: Script, settings: Settings) -> str:
    flags = [f"--num_machines {settings['num_machines']} --machine_rank {{node}}"]
    flags += ["--main_process_ip {address} --main_process_port {port}"]
    named = ("num_processes", "cpu", "use_fsdp", "mixed_precision")
    rows = [row for row in settings.table() if row.place == "flag" and row.name in named]
    flags += [f"--{row.name}" if SETTINGS[row.name].bare else f"--{row.name} {row.value}" for row in rows]
    return f"paceline launch {' '.join(flags)} {script.target}"


def _pairs(text: str | None) -> dict[str, Any]:
    """Parse key=value pairs such as ``"timeout=60,is_host=true"``."""
    pairs = [pair.partition("=") for pair in (text or "").split(",") if pair.strip()]
    wrong = next((key for key, equals, _ in pairs if not equals), None)
    if wrong is not None:
        raise ValueError(
            f"rdzv_conf={text!r} contains {wrong!r}, which is not a key=value pair. Pass pairs, such as "
            "--rdzv_conf timeout=60."
        )
    return {key.strip(): int(value) if value.strip().isdecimal() else value.strip() for key, _, value in pairs}


def _refuse_deepspeed(settings: Settings) -> None:
    for name in _DEEPSPEEDS_LAUNCHER:
        if settings.is_set(name) and settings[name] != "standard":
            raise ValueError(
                f"{settings.origin(name).where} is for DeepSpeed's own launcher, which Paceline does not use. Remove "
                "this setting, and run the command on each machine with --num_machines, --machine_rank and "
                "--main_process_ip."
            )
    if settings["use_deepspeed"] and not messages.is_installed("deepspeed"):
        raise ModuleNotFoundError(
            f"{messages.missing(settings.origin('use_deepspeed').where, 'deepspeed')}, or use --use_fsdp, which shards "
            "models like ZeRO stage 3."
        )


# ---- the plan -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LaunchPlan:
    """The processes to start and their devices."""

    kind: str
    num_processes: int
    num_machines: int
    why: str
    threads: str
    variables: dict[str, str]
    binds_gpus: bool
    binding: str

    @property
    def is_one(self) -> bool:
        """Whether this process can run the script itself, as the only process and without torch's NUMA binding."""
        return self.num_processes * self.num_machines == 1 and not self.binds_gpus


def _plan(settings: Settings) -> _LaunchPlan:
    variables = _visible(settings)
    os.environ.update(variables)
    kind, present = _devices(settings)
    _check_gpu_ids(settings, kind)
    local, why = _processes(settings, kind, present)
    threads, more = _threads(settings, local)
    binds_gpus, binding, bound = _binding(settings, kind, local)
    return _LaunchPlan(
        kind, local, settings["num_machines"], why, threads, variables | more | bound, binds_gpus, binding
    )


def _devices(settings: Settings) -> tuple[str, int]:
    """Return the kind of device to run on, and the number of such devices on this machine (0 for the CPU)."""
    if settings["cpu"] and settings["tpu"]:
        raise ValueError(
            f"{settings.origin('tpu').where} and {settings.origin('cpu').where} cannot be used together. Remove one of "
            "them."
        )
    kind, present = ("cpu", 0) if settings["cpu"] else ("tpu", _count_tpus()) if settings["tpu"] else _find_best()
    _check_multi_gpu(settings, 0 if kind == "tpu" else present)
    if settings["tpu"] and not present:
        raise RuntimeError(
            f"{settings.origin('tpu').where} needs a TPU, but "
            f"{'torch_tpu sees none' if _has_torch_tpu() else 'the package torch_tpu is not installed'}. Run the "
            "command on a machine with a TPU and torch_tpu (pip install 'paceline[tpu]'), or remove this setting to "
            "use the best device of this machine."
        )
    return kind, present


def _visible(settings: Settings) -> dict[str, str]:
    """Return the environment variables that select the visible devices."""
    if settings["cpu"]:  # the first hides CUDA devices from all code, the second hides every kind from Paceline
        return {"CUDA_VISIBLE_DEVICES": "", HIDE: "1"}
    ids = _gpu_ids(settings)
    if ids is None:
        return {}
    from ..devices.kinds import accelerators

    variables = [kind.visible_variable for kind in accelerators() if not kind.one_per_process]
    return {name: ids for name in variables if name is not None}


def _gpu_ids(settings: Settings) -> str | None:
    ids = settings["gpu_ids"]
    return None if ids in (None, "all") else ids.replace(" ", "")


def _check_gpu_ids(settings: Settings, kind: str) -> None:
    """Warn if ``gpu_ids`` has no effect."""
    if _gpu_ids(settings) is None:
        return
    if kind == "cpu":
        why = _why_no_gpu(settings)
    elif kind == "tpu" or _visible_variable(kind) is None:
        why = f"it cannot select {_title(kind)}s"
    else:
        return
    messages.warn(f"paceline launch: {settings.origin('gpu_ids').where} has no effect, because {why}.")


def _title(kind: str) -> str:
    """Return the name of a kind of device for messages."""
    from ..devices.kinds import kind_of

    return "GPU" if kind == "cuda" else kind_of(kind).title


def _visible_variable(kind: str) -> str | None:
    from ..devices.kinds import kind_of

    return kind_of(kind).visible_variable


def _selected(kind: str) -> str:
    """Return text such as ``" (CUDA_VISIBLE_DEVICES=0)"`` for a kind of device; empty if the variable is not set."""
    variable = _visible_variable(kind)
    value = None if variable is None else os.environ.get(variable)
    return "" if value is None else f" ({variable}={value})"


def _find_best() -> tuple[str, int]:
    """Return the best kind of device that torch sees, and the number of devices; import torch only if necessary."""
    if "torch" not in sys.modules and not _may_have_devices():
        return "cpu", 0
    from ..processes.devices import find_best

    return find_best()


def _may_have_devices() -> bool:
    if sys.platform != "linux" or _has_torch_tpu() or any(map(_is_gpu, Path("/dev").iterdir())):
        return True
    from importlib.metadata import entry_points

    return bool(entry_points(group="torch.backends"))  # packages that add kinds of device; torch imports them


def _has_torch_tpu() -> bool:
    return importlib.util.find_spec("torch_tpu") is not None


def _count_tpus() -> int:
    """Return the number of TPUs that torch_tpu sees, without importing torch if it is not installed."""
    if not _has_torch_tpu():
        return 0
    from ..processes.devices import count

    return count("tpu")


def _is_gpu(device: Path) -> bool:
    name = device.name
    return name in ("kfd", "dxg", "dri") or (name.startswith("nv") and not name.startswith(("nvme", "nvram")))


def _check_multi_gpu(settings: Settings, gpus: int) -> None:
    if not settings["multi_gpu"] or gpus * settings["num_machines"] > 1:
        return
    why = f"{settings.origin('cpu').where} leaves 0" if settings["cpu"] else f"torch sees {gpus}{_selected('cuda')}"
    raise ValueError(
        f"{settings.origin('multi_gpu').where} needs at least 2 GPUs, but {why}. Remove this setting, or use --cpu "
        "--num_processes 2 for two processes on the CPU."
    )


def _processes(settings: Settings, kind: str, present: int) -> tuple[int, str]:
    """Return the number of processes on this machine, and where that number comes from."""
    asked, machines = settings["num_processes"], settings["num_machines"]
    if asked is None:
        why = f"one for each visible {_title(kind)}" if present else _why_no_gpu(settings)
        return max(present, 1), why
    where = settings.origin("num_processes").where
    if asked % machines:
        raise ValueError(
            f"{where} is {asked}, which cannot be divided evenly among {machines} machines. Use a multiple of "
            f"{machines}, because the number includes the processes on all machines."
        )
    local = asked // machines
    if present and local > present:
        raise ValueError(
            f"{where} needs {local} {_title(kind)}s on this machine, but torch sees {present}{_selected(kind)}. Use at "
            f"most {present} process{'es' * (present > 1)} per machine, or add --cpu to run the processes on the CPU."
        )
    return local, f"{where}{'' if present else '; ' + _why_no_gpu(settings)}"


def _why_no_gpu(settings: Settings) -> str:
    return settings.origin("cpu").where if settings["cpu"] else "no GPU is visible"


def _threads(settings: Settings, local: int) -> tuple[str, dict[str, str]]:
    """Return a description of the CPU threads per process, and the environment variables that set their number."""
    from ..processes.launch import threads_of

    name = "num_cpu_threads_per_process"
    origin, outside = settings.origin(name), os.environ.get("OMP_NUM_THREADS")
    if settings[name] is not None and not (outside and origin.place == "file"):
        count, why = settings[name], origin.where
    elif outside:
        return f"CPU threads each: {outside} (OMP_NUM_THREADS)", {}
    elif local == 1:
        return "CPU threads chosen by torch", {}
    else:
        count = threads_of(local)
        why = f"{threads_of(1)} core{'s' * (threads_of(1) > 1)} / {local} processes"
    return f"{count} CPU thread{'s' * (count > 1)} each ({why})", {"OMP_NUM_THREADS": str(count)}


def _binding(settings: Settings, kind: str, local: int) -> tuple[bool, str, dict[str, str]]:
    """Decide how processes are bound to NUMA nodes.

    Return whether torch binds processes to the nodes of their GPUs, a description of the binding, and environment
    variables for processes that bind themselves.
    """
    if not settings["enable_cpu_affinity"]:
        return False, "", {}
    from ..processes.cpu_affinity import BIND, nodes

    folder = Path(os.environ.get(BIND) or "/sys/devices/system/node")
    where, found = settings.origin("enable_cpu_affinity").where, len(nodes(folder))
    if found < 2 or (kind == "cpu" and local == 1):
        why = "this machine has one NUMA node" if found < 2 else "a single process can use all cores"
        return False, f"{where} has no effect: {why}", {}
    if kind == "cuda":
        return True, f"each process on the cores of its GPU's node ({where})", {}
    return False, f"each process on the cores of one of {found} nodes ({where})", {BIND: str(folder)}


def _backends(kind: str) -> str:
    """Return the names of the communication backends."""
    from ..devices.kinds import kind_of

    backend = kind_of(kind).collective_backend()
    return backend if backend == "gloo" else f"{backend}, and gloo for CPU tensors"


class _Announcement:
    """Reports once what the launcher has chosen, and why."""

    def __init__(self, plan: _LaunchPlan, settings: Settings, quiet: bool) -> None:
        self.plan, self.settings, self.quiet = plan, settings, quiet

    def chosen(self, port: int | None = None) -> None:
        """Print the report. ``port`` is the port of a single-machine rendezvous, if there is one."""
        if self.quiet:
            return
        plan, count = self.plan, self.plan.num_processes
        device = "the CPU" if plan.kind == "cpu" else f"{_title(plan.kind)}s"
        parts = [f"{count} process{'es' * (count > 1)} on {device} ({plan.why})"]
        if plan.num_machines > 1:
            rank = self.settings["machine_rank"]
            parts[0] += f", machine {rank} of {plan.num_machines}"
        if not plan.is_one:
            parts.append(f"backend {_backends(plan.kind)}")
        parts.append(plan.threads)
        if port is not None:
            origin = self.settings.origin("main_process_port")
            chosen = not self.settings["main_process_port"] and not os.environ.get("MASTER_PORT")
            parts.append(f"port {port} ({'a free one' if chosen else origin.where or 'MASTER_PORT'})")
        if plan.binding:
            parts.append(plan.binding)
        messages.info(f"paceline launch: {'; '.join(parts)}.")

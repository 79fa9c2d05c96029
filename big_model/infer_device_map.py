"""Build a device map from the sizes of a model's parts and the devices' memory limits, and explain each choice."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from .. import messages
from ..devices.kinds import kind_of, present
from ..processes import devices
from .device_map import Device, DeviceMap, is_offloaded, join_neighbors
from .module_blocks import repeated_elements
from .module_sizes import Sizes, named_tensors, size_in_bytes

Spread = Literal["auto", "balanced", "balanced_low_0", "sequential"]
WORDS: tuple[Spread, ...] = get_args(Spread)
#: Modules that read their submodules' weights without calling the submodules.
_INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
#: Fraction of a device's free memory to use for weights if no limit is given; the rest is left for activations.
_FOR_WEIGHTS = 0.9


class DeviceMapRow(NamedTuple):
    """One line of a plan.

    Attributes:
        module: name of a module or tensor; ``""`` means the entire model.
        kind: name of the part's class.
        device: the part's device.
        bytes: bytes that the part uses on the device; 0 for a tied tensor that is already on that device.
        why: the reason for this device.
    """

    module: str
    kind: str
    device: Device
    bytes: int
    why: str


@dataclass
class DevicePlan:
    """A plan that assigns a device to each part of a model.

    Attributes:
        device_map: device by name, for :func:`dispatch_model`.
        rows: the parts in order, before sibling modules on the same device are merged.
        limits: maximum bytes of weights on each device; infinite for the disk.
        main_device: device on which offloaded parts run.
        reserved: bytes kept free on the main device for the part that is fetched while the previous part runs.
        buffers: bytes on the main device for the buffers of offloaded parts.
        used: bytes used on each device.
    """

    device_map: DeviceMap
    rows: list[DeviceMapRow]
    limits: dict[Device, float]
    main_device: Device
    reserved: int = 0
    buffers: int = 0
    used: dict[Device, int] = field(init=False)

    def __post_init__(self) -> None:
        self.used = {device: sum(row.bytes for row in self.rows if row.device == device) for device in self.limits}
        self.used[self.main_device] += self.buffers

    @property
    def offloaded(self) -> list[str]:
        """Names of the map's offloaded parts, which are not stored on the device on which they run."""
        return [name for name, device in self.device_map.items() if is_offloaded(device, self.main_device)]

    def __str__(self) -> str:
        head = ("module", "class", "device", "size", "why")
        lines = [
            (_span(rows), rows[0].kind, str(rows[0].device), _bytes(rows), rows[0].why) for rows in _runs(self.rows)
        ]
        totals = [
            f"{messages.size(self.used[device])}{f' of {messages.size(limit)}' if limit < math.inf else ''} on {device}"
            for device, limit in self.limits.items()
        ]
        kept = f"; {messages.size(self.reserved)} kept free on {self.main_device} for fetching" if self.reserved else ""
        return "\n".join([messages.table([head, *lines]), f"Used: {', '.join(totals)}{kept}."])


def plan_device_map(
    model: nn.Module,
    device_map: Spread = "auto",
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Any = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
    verbose: bool = True,
) -> DevicePlan:
    """Choose a device for each part of a model, and print the plan as a table; nothing is moved.

    Devices are filled in order: accelerators, host memory, disk. A part that does not fit is split if allowed. Each
    part is placed on the device of the previous part or on a later device, so that data passes through each device
    once. If the model does not fit on the main device, enough space is kept free on that device to fetch the largest
    offloaded part.

    Args:
        model: the model; it may be on the meta device.
        device_map: ``"auto"`` or ``"balanced"`` spreads the model evenly across the accelerators; ``"balanced_low_0"``
            leaves space on the first accelerator; ``"sequential"`` fills one accelerator after another.
        max_memory: limit for weights on each device, in bytes or as a string such as ``"20GiB"``, keyed by accelerator
            number, ``"cpu"`` or ``"disk"``. Devices without an entry are not used, except the disk. None means 90% of
            free memory.
        no_split_module_classes: one or more classes, or their names, whose instances are not split. None means the
            classes in the model's ``_no_split_modules``, or else the blocks that repeat in its containers.
        dtype: dtype that floating-point weights will have; None means their dtype in the model.
        special_dtypes: dtypes that individual tensors will have, by name.
        offload_buffers: whether to offload the buffers of offloaded parts too; if not, buffers stay on the main device.
        fallback_allocation: whether a part may be placed out of order, on an earlier device where it fits.
        verbose: whether to print the table.

    Raises:
        ValueError: ``device_map``, a device or a limit is invalid, or a device's limit is too small for the parts that
            must run on it.
    """
    if device_map not in WORDS:
        more = f", or a dict that maps module names to devices, such as {{'': {device_map!r}}} for the entire model"
        raise ValueError(messages.unknown("device_map", device_map, WORDS, more))
    limits = get_max_memory(max_memory)
    atoms = _atoms(model, no_split_module_classes)
    sizes = Sizes(model, dtype, special_dtypes)
    if device_map != "sequential":
        limits = _balanced(model, sizes, atoms, limits, low_zero=device_map == "balanced_low_0")
    placer = _Placer(model, sizes, atoms, limits, offload_buffers, fallback_allocation)
    plan = placer.plan()
    if verbose:
        messages.info(str(plan))
    return plan


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Any = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> DeviceMap:
    """Return the map that :func:`plan_device_map` builds with ``"sequential"``.

    With ``clean_result``, sibling modules on the same device are merged into one entry under their parent's name.
    """
    rest = (no_split_module_classes, dtype, special_dtypes, offload_buffers, fallback_allocation, verbose)
    plan = plan_device_map(model, "sequential", max_memory, *rest)
    return plan.device_map if clean_result else {row.module: row.device for row in plan.rows}


def get_max_memory(max_memory: Mapping[Any, int | str] | None = None) -> dict[Device, float]:
    """Return the maximum bytes of weights for each device: accelerators first, then ``"cpu"`` and ``"disk"``.

    Args:
        max_memory: limits by device; None means 90% of the free memory on each device. Sizes given as strings are
            replaced with numbers in this dict itself, because libraries compare the limits in their dict with the
            result.

    Raises:
        ValueError: a device or size is unknown.
    """
    if max_memory is None:
        kind = present()
        free: dict[Device, float] = {
            device: int(memory * _FOR_WEIGHTS)
            for device in ([] if kind.name == "cpu" else range(kind.count()) if kind.is_numbered else [kind.name])
            if (memory := kind.free_memory(device)) is not None
        }
        return {**free, "cpu": int(devices.available_memory() * _FOR_WEIGHTS), "disk": math.inf}
    if not isinstance(max_memory, Mapping):
        raise TypeError(f"max_memory={max_memory!r} is not a dict. Pass a dict such as {{'cpu': '2GB'}}.")
    limits = {_key(device): _limit(device, size) for device, size in max_memory.items()}
    if isinstance(max_memory, MutableMapping):
        texts: list[Any] = [device for device, size in max_memory.items() if isinstance(size, str)]
        max_memory.update({device: int(limits[_key(device)]) for device in texts})
    numbered = sorted((device for device in limits if isinstance(device, int)), key=int)
    others = [device for device in limits if not isinstance(device, int) and device not in ("cpu", "disk")]
    order: list[Device] = [*numbered, *others, *(["cpu"] if "cpu" in limits else []), "disk"]
    return {device: limits.get(device, math.inf) for device in order}


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Any = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    low_zero: bool = False,
) -> dict[Device, float]:
    """Return limits that spread a model evenly across the accelerators.

    ``max_memory`` sets upper limits. With ``low_zero``, the first accelerator gets only parts that do not fit on the
    other accelerators. The other arguments are the same as for :func:`plan_device_map`.
    """
    sizes = Sizes(model, dtype, special_dtypes)
    return _balanced(model, sizes, _atoms(model, no_split_module_classes), get_max_memory(max_memory), low_zero)


def smallest_parts(model: nn.Module, no_split_module_classes: Any = None) -> list[tuple[str, nn.Module | Tensor]]:
    """Return the named parts that each move as a unit: blocks, and the layers and tensors outside of blocks."""
    return [(item.name, item.module) for item in _smallest(_Item("", model), _atoms(model, no_split_module_classes))]


# ---- choosing devices ------------------------------------------------------------------------------------------------


class _Item(NamedTuple):
    """A part that has no device yet: a module with all its contents, or a single tensor in a module."""

    name: str
    module: nn.Module | Tensor

    def ids(self, sizes: Sizes) -> set[int]:
        return sizes.within(self.module) if isinstance(self.module, nn.Module) else {id(self.module)}

    def parts(self, atoms: set[int]) -> list[_Item]:
        """Return the parts that this item can be split into; the result is empty if the item must not be split."""
        if not isinstance(self.module, nn.Module) or id(self.module) in atoms:
            return []
        children = [_Item(self._below(name), child) for name, child in self.module.named_children()]
        if not children:
            return []
        own = [_Item(self._below(name), tensor) for name, tensor in named_tensors(self.module, recurse=False)]
        return [*own, *(child for child in children if any(True for _ in named_tensors(child.module)))]  # type: ignore[arg-type]

    def _below(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name


@dataclass
class _Placed:
    """The result of choosing devices.

    Attributes:
        rows: the plan's rows.
        fetched: the offloaded parts that are each fetched as a unit.
        buffers: bytes on the main device for the buffers of offloaded parts.
    """

    rows: list[DeviceMapRow]
    fetched: list[_Item]
    buffers: int


class _Placer:
    def __init__(
        self,
        model: nn.Module,
        sizes: Sizes,
        atoms: set[int],
        limits: dict[Device, float],
        offload_buffers: bool,
        first_fit: bool,
    ) -> None:
        self.model = model
        self.sizes = sizes
        self.atoms = atoms
        self.limits = limits
        self.main = next((device for device, limit in limits.items() if limit and device != "disk"), "cpu")
        self.buffers = set() if offload_buffers else {id(buffer) for buffer in model.buffers()}
        self.first_fit = first_fit

    def plan(self) -> DevicePlan:
        if self.main not in self.limits:
            raise ValueError(
                f"max_memory={dict(self.limits)} leaves no device for the model to run on. Add an entry for 'cpu' or a "
                "GPU index with a limit above 0."
            )
        placed, reserved = self._place(0), 0
        if any(is_offloaded(row.device, self.main) for row in placed.rows):
            placed, reserved = self._with_fetch_space()
        device_map = join_neighbors({row.module: row.device for row in placed.rows})
        return DevicePlan(device_map, placed.rows, self.limits, self.main, reserved, placed.buffers)

    def _with_fetch_space(self) -> tuple[_Placed, int]:
        """Place the parts, keeping only enough space free on the main device to fetch the largest offloaded part."""
        limit, buffers = self.limits[self.main], 0
        parts = _smallest(_Item("", self.model), self.atoms)
        for reserved in sorted({self._fetch_bytes(part) for part in parts}):
            kept: float = reserved
            while kept <= limit:
                placed = self._place(kept)
                over = sum(row.bytes for row in placed.rows if row.device == self.main) + placed.buffers
                over += reserved - limit
                if over <= 0 and max(map(self._fetch_bytes, placed.fetched), default=0) <= reserved:
                    return placed, reserved
                buffers = placed.buffers
                kept = kept + over if over > 0 else limit + 1
        largest = max(parts, key=self._fetch_bytes)
        size = self._fetch_bytes(largest)
        if size <= limit:
            raise ValueError(
                f"max_memory={{{self.main!r}: {int(limit)}}} is too small, because the buffers of offloaded parts stay "
                f"on that device and need {messages.size(buffers)}, and fetching parts needs another "
                f"{messages.size(size)}. Pass offload_buffers=True, or a higher limit."
            )
        raise ValueError(
            f"max_memory={{{self.main!r}: {int(limit)}}} is too small by {messages.size(size - limit)}: fetching "
            f"{largest.name!r} "
            f"({type(largest.module).__name__}){'' if self.main == 'cpu' else ' while the previous part runs'} takes "
            f"{messages.size(size)}. Raise the limit to at least {size} bytes, load in a smaller dtype, or choose "
            "smaller blocks in no_split_module_classes."
        )

    def _fetch_bytes(self, item: _Item) -> int:
        """Return the bytes to reserve for fetching a part.

        On an accelerator, this is twice the part's size, because the part that is running is still in memory.
        """
        return self.sizes.sum(item.ids(self.sizes) - self.buffers) * (1 if self.main == "cpu" else 2)

    def _place(self, kept: float) -> _Placed:
        """Choose a device for every part, keeping ``kept`` bytes of the main device free."""
        room = {device: limit - (kept if device == self.main else 0) for device, limit in self.limits.items()}
        order = list(room)
        homes: dict[int, tuple[Device, str]] = {}
        placed = _Placed([], [], 0)
        queue = deque([_Item("", self.model)])
        current = 0
        while queue:
            item = queue.popleft()
            ids = item.ids(self.sizes)
            new = ids - homes.keys()
            device, why = self._choose(item, ids, new, homes, room, order if self.first_fit else order[current:])
            if device is None:
                queue.extendleft(reversed(item.parts(self.atoms)))
                continue
            offloaded = is_offloaded(device, self.main)
            staying = new & self.buffers if offloaded else set()
            size = self.sizes.sum(new - staying)
            room[device] -= size
            placed.buffers += self.sizes.sum(staying)
            if offloaded:
                placed.fetched += _smallest(item, self.atoms)
            if new or not ids:
                current = max(current, order.index(device))
            homes.update(dict.fromkeys(new, (device, item.name)))
            placed.rows.append(DeviceMapRow(item.name, type(item.module).__name__, device, size, why))
        return placed

    def _choose(
        self,
        item: _Item,
        ids: set[int],
        new: set[int],
        homes: dict[int, tuple[Device, str]],
        room: dict[Device, float],
        order: list[Device],
    ) -> tuple[Device | None, str]:
        """Return a device and the reason for choosing it; the device is None if the part must be split."""
        size = self.sizes.sum(new)
        if ids and not new:
            device, other = homes[next(one for one in self.sizes.bytes if one in ids)]
            return device, f"tied to {other!r}"
        full: list[str] = []
        for device in order:
            needed = size - (self.sizes.sum(new & self.buffers) if is_offloaded(device, self.main) else 0)
            if needed <= room[device]:
                return device, f"no room on {', '.join(full)}" if full else "fits"
            if item.parts(self.atoms):
                return None, ""
            full.append(f"{device} ({messages.size(max(0, room[device]))} left)")
        raise ValueError(
            f"{item.name!r} ({type(item.module).__name__}, {messages.size(size)}) does not fit on any device, because "
            f"there is not enough room on {', '.join(full)}. Raise the limits in max_memory."
        )


def _smallest(item: _Item, atoms: set[int]) -> list[_Item]:
    parts = item.parts(atoms)
    return [small for part in parts for small in _smallest(part, atoms)] if parts else [item]


def _balanced(
    model: nn.Module, sizes: Sizes, atoms: set[int], limits: dict[Device, float], low_zero: bool
) -> dict[Device, float]:
    """Lower the limit of each accelerator except the last to an even share of the model plus one part."""
    several = [device for device, limit in limits.items() if device not in ("cpu", "disk") and limit]
    if len(several) < 2:
        return limits
    total = sizes.of(model)
    largest = max(sizes.sum(item.ids(sizes)) for item in _smallest(_Item("", model), atoms))
    share = math.ceil(total / (len(several) - low_zero)) + largest
    lowered = {device: min(limits[device], share) for device in several[:-1]}
    if low_zero:
        others = sum(min(limits[device], share) for device in several[1:])
        lowered[several[0]] = min(limits[several[0]], max(0, total - others))
    return {**limits, **lowered}


def _atoms(model: nn.Module, no_split_module_classes: Any) -> set[int]:
    """Return the IDs of modules that must not be split, even though they contain other modules."""
    fixed = {id(module) for module in model.modules() if isinstance(module, _INDIVISIBLE)}
    asked = bool(no_split_module_classes)
    if no_split_module_classes is None:
        named = getattr(model, "_no_split_modules", None)
        if not named:
            return fixed | {id(module) for module in repeated_elements(model).values()}
        no_split_module_classes = named
    if isinstance(no_split_module_classes, (str, type)):
        no_split_module_classes = [no_split_module_classes]
    names = {one if isinstance(one, str) else one.__name__ for one in no_split_module_classes}
    known = {type(module).__name__ for module in model.modules()}
    if asked and not names & known:
        name = min(names)
        messages.warn(
            f"no_split_module_classes contains {name!r}, but {type(model).__name__} has no module of that class, so "
            f"the model's blocks may be split.{messages.did_you_mean(name, known)}"
        )
    return fixed | {id(module) for module in model.modules() if type(module).__name__ in names}


def _key(device: Any) -> Device:
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise ValueError(
            f"max_memory has an invalid device {device!r}. Use a number, 'cpu', 'disk', or a name such as 'cuda:0'."
        )
    if isinstance(device, int):
        return device
    if device == "disk":
        return "disk"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            messages.unknown("max_memory device", device, ("cpu", "disk", "mps"), ", or a number for a GPU")
        ) from error
    if found.type == "cpu":
        return "cpu"
    return found.index if kind_of(found).is_numbered and found.index is not None else str(found)


def _limit(device: Any, size: float | str) -> float:
    if size == 0 or size == math.inf:
        return float(size)
    whole = int(size) if isinstance(size, float) else size
    return size_in_bytes(whole, f"max_memory[{device!r}]")


def _runs(rows: Iterable[DeviceMapRow]) -> list[list[DeviceMapRow]]:
    """Group consecutive rows whose names differ only by an index."""
    runs: list[list[DeviceMapRow]] = []
    for row in rows:
        before = runs[-1][-1] if runs else None
        same = before is not None and before[1:4] == row[1:4] and before.why.split("(")[0] == row.why.split("(")[0]
        if same and before is not None and before.module.rpartition(".")[0] == row.module.rpartition(".")[0]:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _span(rows: list[DeviceMapRow]) -> str:
    first = rows[0].module or "(all)"
    return first if len(rows) == 1 else f"{first} to {rows[-1].module.rpartition('.')[2]}"


def _bytes(rows: list[DeviceMapRow]) -> str:
    return messages.size(rows[0].bytes) if len(rows) == 1 else f"{len(rows)} x {messages.size(rows[0].bytes)}"

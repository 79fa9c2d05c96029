"""Make an optimizer traceable by torch.compile without fixing its learning rate in the graph."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..devices.kinds import kind_of
from ..torch_private import HAS_STEPPED, keep_address, let_trace_groups

#: The file that defines torch's wrappers of ``step``.
_TORCHS = inspect.getfile(Optimizer)
#: Attributes that belong to the class itself and are not copied to the traced class.
_OF_CLASS = {"__dict__", "__weakref__", "__init__", "__new__", "__init_subclass__", "__slots__"}


class TracedOptimizer:
    """Steps an optimizer inside a compiled function.

    Torch breaks the graph at ``Optimizer.step``, looks for gradients before the graph computes them, and treats each
    learning rate as a constant. So the ``step`` of the optimizer's class is traced on an object that is not an
    ``Optimizer``, but shares the optimizer's attributes and state. That object's parameter groups (``groups``) are
    copies with the learning rate in a tensor; the optimizer's own groups keep numbers, which schedulers set.

    Args:
        optimizer: the optimizer to trace; once it is traced, the compiled graph steps it.
        cycled: whether a scheduler changes the optimizer's momentum, which optimizers such as Adam keep in ``betas``.
    """

    def __init__(self, optimizer: Optimizer, cycled: bool = False) -> None:
        self.optimizer, self.cycled = optimizer, cycled
        self.groups: list[dict[str, Any]] = []
        groups = self.groups
        body: dict[str, Any] = {"param_groups": property(lambda _: groups)}
        for kind in type(optimizer).__mro__[:-1]:
            body = {name: value for name, value in vars(kind).items() if name not in _OF_CLASS} | body
        let_trace_groups(body)
        self.seen: Any = object.__new__(type(type(optimizer).__name__, (), body))
        self.seen.__dict__ = vars(optimizer)
        self.raw_step = _without_torch_wrappers(type(optimizer).step)
        setattr(optimizer, HAS_STEPPED, True)  # otherwise, a scheduler would warn
        self.refresh()

    def refresh(self) -> None:
        """Update the copied groups, because schedulers and callbacks may have changed the originals."""
        given = self.optimizer.param_groups
        if len(given) != len(self.groups):
            self.groups[:] = [{} for _ in given]
            self.rates = [_Data(group) for group in given]
            self.betas = [(_Data(group), _Data(group)) for group in given]
        for group, copy, rate, betas in zip(given, self.groups, self.rates, self.betas, strict=True):
            copy.update(group)
            if "lr" in copy:
                copy["lr"] = rate.now(copy["lr"])
            if self.cycled and "betas" in copy:
                copy["betas"] = tuple([data.now(beta) for data, beta in zip(betas, copy["betas"], strict=True)])
            if copy.get("fused"):  # the compiler fuses the step itself
                copy["fused"] = False

    def step(self) -> None:
        """Run the optimizer's step; the compiler traces this method."""
        for group in self.groups:
            if "capturable" in group:  # no value may leave the graph
                group["capturable"] = torch.compiler.is_compiling()
        with torch.no_grad():
            self.raw_step(self.seen)

    def settle(self, static: bool) -> None:
        """Move step counters to the devices of their parameters, as the graph requires.

        With ``static``, also keep the state at fixed memory addresses, because CUDA graphs write to the same memory on
        every replay.
        """
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                if "capturable" in group and "step" in state:
                    state["step"] = torch.as_tensor(state["step"]).to(parameter.device)
                for value in (*state.values(), parameter) if static else ():
                    if isinstance(value, Tensor):
                        keep_address(value)


class _Data:
    """A numeric option of a parameter group, kept in a tensor because a graph would treat a number as a constant."""

    def __init__(self, group: dict[str, Any]) -> None:
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        kind = kind_of(device).widest_float
        self.tensor, self.number = torch.zeros((), dtype=kind, device=device), 0.0

    def now(self, number: Any) -> Tensor:
        """Set the tensor to ``number`` and return it. A tensor that the user passed is returned unchanged."""
        if isinstance(number, Tensor):
            return number
        if number != self.number:
            self.number = number
            self.tensor.fill_(number)
        return self.tensor


def _without_torch_wrappers(step: Any) -> Any:
    """Strip torch's wrappers, which break graphs, from a class's ``step``; keep all other wrappers."""
    while hasattr(step, "__wrapped__") and step.__code__.co_filename == _TORCHS:
        step = step.__wrapped__
    return step

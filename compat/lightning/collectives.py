"""Lightning's collectives: one interface to ``torch.distributed`` and to a single process."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from ... import messages
from .private import find_free_network_port

#: What ``new_group`` returns: a process group, or an object that stands for this one process.
CollectibleGroup: TypeAlias = Any


class Collective(ABC):
    """Operations in which all processes of a group take part. Subclass it to use a library other than torch."""

    def __init__(self) -> None:
        self._group: CollectibleGroup | None = None

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's rank in the group, 0-based."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of processes in the group."""

    @property
    def group(self) -> CollectibleGroup:
        """This object's group. Raises RuntimeError before ``create_group``."""
        if self._group is None:
            raise RuntimeError(f"{type(self).__name__} has no group. Call create_group() first.")
        return self._group

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        """Overwrite the tensor on every process with the one on process ``src``."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Reduce the tensors in place, on all processes."""

    @abstractmethod
    def reduce(self, tensor: Tensor, dst: int, op: str) -> Tensor:
        """Reduce the tensors in place, on process ``dst``."""

    @abstractmethod
    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        """Gather the tensors of all processes into ``tensor_list`` on every process."""

    @abstractmethod
    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]:
        """Gather the tensors of all processes into ``gather_list`` on process ``dst``."""

    @abstractmethod
    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor:
        """Send one tensor of process ``src``'s list to each process, which receives it in ``tensor``."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: str) -> Tensor:
        """Reduce the lists of all processes, and write one tensor of the result to ``output`` on each process."""

    @abstractmethod
    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> list[Tensor]:
        """Send one tensor to every process, and receive one from every process."""

    @abstractmethod
    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send a tensor to process ``dst``, which calls ``recv``."""

    @abstractmethod
    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor:
        """Receive a tensor from process ``src`` (None means any process) in ``tensor``."""

    @abstractmethod
    def barrier(self, device_ids: list[int] | None = None) -> None:
        """Wait for all processes of the group."""

    @classmethod
    @abstractmethod
    def is_available(cls) -> bool:
        """Return True if this process can use these collective operations."""

    @classmethod
    @abstractmethod
    def is_initialized(cls) -> bool:
        """Return whether the default process group is initialized."""

    @classmethod
    @abstractmethod
    def init_group(cls, **kwargs: Any) -> None:
        """Initialize the default process group."""

    @classmethod
    @abstractmethod
    def new_group(cls, **kwargs: Any) -> CollectibleGroup:
        """Create a group of processes."""

    @classmethod
    @abstractmethod
    def destroy_group(cls, group: CollectibleGroup) -> None:
        """Destroy a group."""

    @classmethod
    @abstractmethod
    def _convert_to_native_op(cls, op: str) -> Any: ...

    def setup(self, **kwargs: Any) -> Self:
        """Initialize the default process group unless it already is."""
        if not self.is_initialized():
            self.init_group(**kwargs)
        return self

    def create_group(self, **kwargs: Any) -> Self:
        """Create this object's group. All processes must call this."""
        if self._group is not None:
            raise RuntimeError(
                f"{type(self).__name__} already has a group. Call teardown() before you call create_group() again."
            )
        self._group = self.new_group(**kwargs)
        return self

    def teardown(self) -> Self:
        """Destroy this object's group."""
        if self._group is None:
            raise RuntimeError(f"{type(self).__name__} has no group to leave. Call create_group() before teardown().")
        self.destroy_group(self._group)
        self._group = None
        return self


class TorchCollective(Collective):
    """Collectives of ``torch.distributed``, among all processes unless ``create_group`` is called."""

    #: Whether ``setup`` initialized the default process group, so that ``teardown`` destroys it.
    manages_default_group: ClassVar[bool] = False
    addr_key = "MASTER_ADDR"
    port_key = "MASTER_PORT"

    def __init__(self) -> None:
        if not dist.is_available():
            raise RuntimeError("TorchCollective needs torch.distributed, which this build of torch lacks.")
        super().__init__()

    @property
    def group(self) -> CollectibleGroup:
        """This object's group; the default group before ``create_group``."""
        return dist.GroupMember.WORLD if self._group is None else self._group

    @property
    def rank(self) -> int:
        """This process's rank in the group, 0-based."""
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        """Number of processes in the group."""
        return dist.get_world_size(self.group)

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        """Overwrite the tensor on every process with the one on process ``src``."""
        dist.broadcast(tensor, src, group=self.group)
        return tensor

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Tensor:
        """Reduce the tensors in place, on all processes."""
        dist.all_reduce(tensor, op=self._convert_to_native_op(op), group=self.group)
        return tensor

    def reduce(self, tensor: Tensor, dst: int, op: Any = "sum") -> Tensor:
        """Reduce the tensors in place, on process ``dst``."""
        dist.reduce(tensor, dst, op=self._convert_to_native_op(op), group=self.group)
        return tensor

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        """Gather the tensors of all processes into ``tensor_list`` on every process."""
        dist.all_gather(tensor_list, tensor, group=self.group)
        return tensor_list

    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]:
        """Gather the tensors of all processes into ``gather_list`` on process ``dst``."""
        dist.gather(tensor, gather_list, dst, group=self.group)
        return gather_list

    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor:
        """Send one tensor of process ``src``'s list to each process, which receives it in ``tensor``."""
        dist.scatter(tensor, scatter_list, src, group=self.group)
        return tensor

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: Any = "sum") -> Tensor:
        """Reduce the lists of all processes, and write one tensor of the result to ``output`` on each process."""
        dist.reduce_scatter(output, input_list, op=self._convert_to_native_op(op), group=self.group)
        return output

    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> list[Tensor]:
        """Send one tensor to every process, and receive one from every process."""
        dist.all_to_all(output_tensor_list, input_tensor_list, group=self.group)
        return output_tensor_list

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send a tensor to process ``dst``, which calls ``recv``."""
        dist.send(tensor, dst, tag=tag, group=self.group)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor:
        """Receive a tensor from process ``src`` (None means any process) in ``tensor``."""
        dist.recv(tensor, src, tag=tag, group=self.group)
        return tensor

    def all_gather_object(self, object_list: list[Any], obj: Any) -> list[Any]:
        """Gather the objects of all processes into ``object_list`` on every process."""
        dist.all_gather_object(object_list, obj, group=self.group)
        return object_list

    def broadcast_object_list(self, object_list: list[Any], src: int, device: torch.device | None = None) -> list[Any]:
        """Replace the objects in each process's list with those of process ``src``."""
        dist.broadcast_object_list(object_list, src, group=self.group, device=device)
        return object_list

    def gather_object(self, obj: Any, object_gather_list: list[Any], dst: int = 0) -> list[Any]:
        """Gather the objects of all processes into ``object_gather_list`` on process ``dst``."""
        dist.gather_object(obj, object_gather_list, dst, group=self.group)
        return object_gather_list

    def scatter_object_list(
        self, scatter_object_output_list: list[Any], scatter_object_input_list: list[Any], src: int = 0
    ) -> list[Any]:
        """Send one object of process ``src``'s list to each process, which receives it in its output list."""
        dist.scatter_object_list(scatter_object_output_list, scatter_object_input_list, src, group=self.group)
        return scatter_object_output_list

    def barrier(self, device_ids: list[int] | None = None) -> None:
        """Wait for all processes of the group."""
        dist.barrier(group=self.group, device_ids=device_ids)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all processes of a gloo group. If some do not arrive in time, the error names them."""
        dist.monitored_barrier(group=self.group, timeout=timeout, wait_all_ranks=wait_all_ranks)

    def setup(self, main_address: str | None = None, main_port: str | None = None, **kwargs: Any) -> Self:
        """Initialize the default process group unless it already is, by default at a free port of this machine."""
        if self.is_initialized():
            return self
        given = {self.addr_key: main_address or "localhost", self.port_key: main_port or find_free_network_port()}
        added = {name: str(value) for name, value in given.items() if name not in os.environ}
        os.environ.update(added)
        try:
            super().setup(**kwargs)
        finally:
            for name in added:
                os.environ.pop(name, None)
        TorchCollective.manages_default_group = True
        return self

    def teardown(self) -> Self:
        """Destroy this object's group, and the default process group if ``setup`` initialized it."""
        if self._group is not None:
            super().teardown()
        if TorchCollective.manages_default_group and self.is_initialized():
            self.destroy_group(dist.GroupMember.WORLD)
            TorchCollective.manages_default_group = False
        return self

    @classmethod
    def is_available(cls) -> bool:
        """Return True if this process can use these collective operations."""
        return dist.is_available()

    @classmethod
    def is_initialized(cls) -> bool:
        """Return whether the default process group is initialized."""
        return cls.is_available() and dist.is_initialized()

    @classmethod
    def init_group(cls, **kwargs: Any) -> None:
        """Initialize the default process group."""
        dist.init_process_group(**kwargs)

    @classmethod
    def new_group(cls, **kwargs: Any) -> CollectibleGroup:
        """Create a group of processes."""
        return dist.new_group(**kwargs)

    @classmethod
    def destroy_group(cls, group: CollectibleGroup) -> None:
        """Destroy a group."""
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)

    @classmethod
    def _convert_to_native_op(cls, op: Any) -> Any:
        if not isinstance(op, str):
            return op
        known = {name.lower(): value for name, value in dist.ReduceOp.RedOpType.__members__.items()}
        if op.lower() not in known:
            raise ValueError(messages.unknown("reduction", op, known))
        return known[op.lower()]


class SingleDeviceCollective(Collective):
    """Collectives for a single process, which return their input."""

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    def broadcast(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the tensor."""
        return tensor

    def all_reduce(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the tensor."""
        return tensor

    def reduce(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the tensor."""
        return tensor

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor, **__: Any) -> list[Tensor]:
        """Return a list that contains only the tensor."""
        return [tensor]

    def gather(self, tensor: Tensor, *_: Any, **__: Any) -> list[Tensor]:
        """Return a list that contains only the tensor."""
        return [tensor]

    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], *_: Any, **__: Any) -> Tensor:
        """Return the first tensor of the list."""
        return scatter_list[0]

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], *_: Any, **__: Any) -> Tensor:
        """Return the first tensor of the list."""
        return input_list[0]

    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], *_: Any) -> list[Tensor]:
        """Return the list."""
        return input_tensor_list

    def send(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def recv(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the tensor."""
        return tensor

    def barrier(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    @classmethod
    def is_available(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def is_initialized(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def init_group(cls, **_: Any) -> None:
        """Do nothing."""

    @classmethod
    def new_group(cls, **_: Any) -> CollectibleGroup:
        """Return a placeholder for the group."""
        return object()

    @classmethod
    def destroy_group(cls, group: CollectibleGroup) -> None:
        """Do nothing."""

    @classmethod
    def _convert_to_native_op(cls, op: str) -> str:
        return op

"""Fetch offloaded weights to the device that uses them, one part of the model ahead of the computation."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..devices.kinds import kind_of
from ..torch_private import change_count
from .weight_files import Pages, advise_needed, copy_into, is_aligned, short_lived

_CHUNK = 16 * 2**20


class _Fetched(NamedTuple):
    """A tensor's values while it is in use (None: the stored ones), and the tensor's version when they were read."""

    values: Tensor | None
    version: int | None


class _OffloadedTensor:
    """An offloaded tensor that is copied to its device when needed.

    A tensor that is mapped from a file and that the CPU can compute with is used in place, so ``fetch`` only reads its
    pages, and ``leave`` frees them. Any other tensor is copied. Between uses, the tensor's ``data`` is on disk or in
    host memory.
    """

    __slots__ = ("_fetched", "_pages", "copied", "device", "home", "mapped", "tensor")

    def __init__(self, tensor: Tensor, device: torch.device, pages: Pages) -> None:
        self.tensor = tensor
        self.device = device
        self._store_current(pages)

    def _store_current(self, pages: Pages) -> None:
        """Use the tensor's current values as its stored values."""
        self.home = self.tensor.data
        self.mapped = pages.holds(self.home)
        self.copied = self.home.device != self.device or (self.mapped and not is_aligned(self.home))
        self._pages = pages
        self._fetched = _Fetched(None, 0)

    def fetch(self) -> _Fetched:
        """Read the tensor, and copy it if it cannot be used where it is stored. Any thread may call this."""
        version = change_count(self.tensor)
        if not self.copied:
            if self.mapped:
                advise_needed(self.home)
            return _Fetched(None, version)
        if not self.mapped:
            return _Fetched(self.home.to(self.device, copy=True, non_blocking=True), version)
        made = short_lived(self.home.shape, self.home.dtype, self.device)
        copy_into(made, self.home, self._pages)
        return _Fetched(made, version)

    def enter(self, fetched: _Fetched) -> None:
        """Make the tensor use the fetched values. If it was changed after the fetch, fetch the values again first."""
        if not _same_memory(self.tensor.data, self.home):
            self._store_current(Pages())
            fetched = self.fetch()
        elif fetched.version != change_count(self.tensor):
            fetched = self.fetch()
        self._fetched = fetched
        if fetched.values is not None:
            self.tensor.data = fetched.values

    def leave(self) -> None:
        """Save changes that were made while the tensor was in use, and make the tensor use its stored values again."""
        (values, version), self._fetched = self._fetched, _Fetched(None, 0)
        if values is not None:
            if not _same_memory(self.tensor.data, values):  # its data was replaced
                self._store_current(Pages())
                return
            if self._was_changed(values, version):
                with torch.inference_mode():
                    self.home.copy_(values)
            self.tensor.data = self.home
        self.give_back()

    def _was_changed(self, values: Tensor, version: int | None) -> bool:
        if isinstance(self.tensor, nn.Parameter) and version is not None:
            return change_count(self.tensor) != version
        return values.device.type != "cpu" or not torch.equal(
            values, self.home
        )  # batch statistics do not change the version

    def give_back(self) -> None:
        """Free pages that can be read from the file again."""
        if self.mapped:
            self._pages.give_back(self.home, around=True)

    def release(self) -> None:
        """Make the tensor usable without :meth:`enter`: replace a tensor mapped from a file with a copy in memory."""
        if self.mapped and self.copied and _same_memory(self.tensor.data, self.home):
            self.tensor.data = self.home.clone(memory_format=torch.contiguous_format)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and (one.shape, one.dtype) == (other.shape, other.dtype)


class Part:
    """The tensors of a block, or of a layer outside blocks, which are fetched and freed together.

    ``fetcher`` is shared by all parts of a model.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, fetcher: Fetcher) -> None:
        self.device = device
        self.following: Part | None = None
        self._tensors = [_OffloadedTensor(tensor, device, fetcher.pages) for tensor in tensors]
        self._fetcher = fetcher
        self._depth = 0

    def enter(self) -> None:
        """Fetch the tensors, and start prefetching the part that ran after this one in the previous run."""
        if not self._depth:
            try:
                for tensor, fetched in zip(self._tensors, self._fetcher.take(self), strict=True):
                    tensor.enter(fetched)
            except BaseException:
                for tensor in self._tensors:
                    tensor.leave()
                raise
            self._fetcher.begin(self.following)
        self._depth += 1

    def leave(self) -> None:
        """Save values that were changed while the part ran, and free the part's memory."""
        self._depth -= 1
        if not self._depth:
            for tensor in self._tensors:
                tensor.leave()

    def fetch(self) -> list[_Fetched]:
        """Fetch the values for :meth:`enter`. The fetcher's thread calls this."""
        return [tensor.fetch() for tensor in self._tensors]

    def give_back(self) -> None:
        """Free fetched values that were not used."""
        for tensor in self._tensors:
            tensor.give_back()

    def release(self) -> None:
        """Give the tensors values that can be used without this object."""
        for tensor in self._tensors:
            tensor.release()


class _Advance(NamedTuple):
    part: Part
    tensors: Future[list[_Fetched]]


class Fetcher:
    """Fetches a model's parts in a separate thread while the model runs, one part ahead."""

    def __init__(self) -> None:
        self.pages = Pages()
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, Any] = {}
        self._advance: _Advance | None = None
        self._last: Part | None = None
        self._running = self._runner = 0

    def __reduce__(self) -> Any:
        raise TypeError(
            "A model with offloaded weights cannot be copied or pickled, because its weights are mapped from files. "
            "Save model.state_dict(), which contains the weights, or call remove_hook_from_submodules(model) first."
        )

    def start(self) -> None:
        """Record that the model has started running.

        Raises:
            RuntimeError: the model is already running in another thread.
        """
        if self._running and self._runner != threading.get_ident():
            raise RuntimeError(
                "A model with offloaded weights was called while it was running in another thread. This is not "
                "possible, because weights are copied and freed while the model runs. Call the model from only one "
                "thread at a time."
            )
        self._runner = threading.get_ident()
        self._running += 1

    def stop(self) -> None:
        """Record that the model has finished, and stop prefetching, because weights may change before the next run."""
        self._running -= 1
        if not self._running:
            self._last = None
            self._drop()
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    def begin(self, part: Part | None) -> None:
        """Start fetching a part if the model is running."""
        if part is not None and self._advance is None and self._running:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="paceline-fetch")
            self._advance = _Advance(part, self._thread.submit(self._fetch, part))

    def take(self, part: Part) -> list[_Fetched]:
        """Return a part's fetched tensors, and record that this part follows the part that was taken before."""
        if self._last is not None:
            self._last.following = part if part is not self._last else None
        self._last = part
        if self._advance is not None and (self._advance.part is not part or self._advance.tensors.exception()):
            self._drop()
        advance, self._advance = self._advance, None
        found = self._fetch(part) if advance is None else advance.tensors.result()
        stream = self._streams.get(part.device)
        if stream is not None:
            current = kind_of(part.device).current_stream(part.device)
            current.wait_stream(stream)
            for tensor, _ in found:
                if tensor is not None:
                    tensor.record_stream(current)
        return found

    def _drop(self) -> None:
        """Discard the prefetched part. If prefetching failed, the part is fetched again when it is needed."""
        advance, self._advance = self._advance, None
        if advance is not None and advance.tensors.exception() is None:
            advance.part.give_back()

    def _fetch(self, part: Part) -> list[_Fetched]:
        with torch.inference_mode(False), torch.no_grad():
            kind = kind_of(part.device)
            if not kind.overlaps_copies():
                return part.fetch()
            stream = self._streams.get(part.device)
            if stream is None:
                stream = self._streams[part.device] = kind.new_stream(part.device)
            with kind.on_stream(stream):
                return part.fetch()

"""Copies of a state for a background save, pinned memory, copies from and to GPUs, and detection
of changes that came too early.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, NoReturn

import numpy as np
import torch

from dist_checkpointing.byte_sizes import in_batches
from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.format.geometry import Box, split_rows
from dist_checkpointing.mapping import ShardedBase, ShardedTensor, is_main_replica
from dist_checkpointing.mapping.nested_dicts import flatten
from dist_checkpointing.planning import SavePlan, SavePlanner, WriteItem

ALIGNMENT_BYTES = 64
_MOST_BLOCK_BYTES = 2**24
"""Of a larger block neither a copy from a GPU nor a write gets faster."""
_MOST_TENSORS = 1024
Numbered = tuple[int, torch.Tensor]


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether the values must be copied to be written, by a device that can do so by itself."""
    return tensor.is_cuda


def padded(num_bytes: int) -> int:
    """The bytes that so many take in aligned memory."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class _TwoBlocks:
    """Two blocks of memory for one thread, page-locked where there is a GPU, made at first use."""

    def __init__(self, most_bytes: int) -> None:
        half = min(most_bytes // 2, _MOST_BLOCK_BYTES) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.block_bytes: int = max(ALIGNMENT_BYTES, half)

    @cached_property
    def _memory(self) -> torch.Tensor:
        shape, pinned = (2, self.block_bytes), torch.cuda.is_available()
        return torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)

    def view(self, block: int, start: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Memory in a block for a contiguous tensor."""
        stop = start + shape.numel() * dtype.itemsize
        return self._memory[block, start:stop].view(dtype).view(shape)


class HostBlocks(_TwoBlocks):
    """Gives the values of tensors on GPUs, a block of rows at a time.

    ``release`` is called before memory of a block that was given is used again.
    """

    def __init__(self, most_bytes: int, release: Callable[[], None]) -> None:
        super().__init__(most_bytes)
        self._release = release

    def of(self, tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """The number of each tensor and its values, in one block or several of them.

        Blocks of a tensor on a GPU are contiguous; other tensors are given as they are, one by one.
        """
        for is_copied, some in groupby(enumerate(tensors), lambda one: is_on_gpu(one[1])):
            yield from (self._copied if is_copied else iter)(some)

    def _copied(self, tensors: Iterable[Numbered]) -> Iterator[Numbered]:
        before, copies = CopyStreams({}), list[Numbered]()
        batches = in_batches(self._cut(tensors), self.block_bytes, _MOST_TENSORS)
        # The copies of one batch are launched before those of the last one are waited for.
        for number, batch in enumerate(batches):
            streams = self._launch(batch, number % 2)
            before.synchronize()
            yield from copies
            before, copies = streams, batch
        before.synchronize()
        yield from copies

    def _cut(self, tensors: Iterable[Numbered]) -> Iterator[tuple[Numbered, int]]:
        """Blocks of rows of numbered tensors, on their devices, and the memory that each takes."""
        for number, tensor in tensors:
            most = self.block_bytes // tensor.dtype.itemsize
            for box in split_rows(Box.whole(tuple(tensor.shape)), most):
                block = tensor.detach()[box.slices()]
                yield (number, block), padded(block.nbytes)

    def _launch(self, batch: list[Numbered], block: int) -> CopyStreams:
        """Put copies in the place of tensors on GPUs, and begin to fill them."""
        self._release()
        streams, start = CopyStreams({}), 0
        for row, (number, source) in enumerate(batch):
            copy = self.view(block, start, source.shape, source.dtype)
            batch[row] = number, copy
            streams.copy(source, copy)
            start += padded(source.nbytes)
        return streams


class DeviceBlocks(_TwoBlocks):
    """Fills tensors on GPUs, a block at a time."""

    def fill(
        self,
        targets: Iterable[tuple[torch.Tensor, Callable[[torch.Tensor], None]]],
        stored: torch.dtype,
    ) -> None:
        """Fill tensors of no more elements than a block has room for.

        Each comes with what reads its values, of dtype ``stored``, into a contiguous tensor on the
        CPU. The next one is read while one is copied.
        """
        copied: dict[int, torch.cuda.Event] = {}
        try:
            for number, (target, read) in enumerate(targets):
                if number % 2 in copied:
                    copied.pop(number % 2).synchronize()
                block = self.view(number % 2, 0, target.shape, stored)
                read(block)
                target.copy_(block, non_blocking=target.is_cuda)
                if target.is_cuda:
                    copied[number % 2] = _launched_on(target.device)
        finally:
            for event in copied.values():
                event.synchronize()


def _launched_on(device: torch.device) -> torch.cuda.Event:
    """What this thread has launched on a GPU until now."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class CopyStreams:
    """Copies to the CPU, those from a GPU on a stream of their own.

    There they wait for what was ``launched``; by default, for what this thread has launched.
    """

    def __init__(self, launched: Mapping[torch.device, torch.cuda.Event]) -> None:
        self._launched = launched
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        source, device = source.detach(), source.device
        if device.type != "cuda":
            target.copy_(source)
            return
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_event(self._launched.get(device) or _launched_on(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        # A view that the planner made must not be freed, and used again, before it is copied.
        source.record_stream(stream)

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


class StagingBuffers:
    """Memory for the copies of one save at a time.

    It grows to the bytes that this rank writes, and stays for the next save: the first touch of
    fresh memory costs more than the copy. Whoever saves many times owns one, through an
    ``AsyncSaver`` or a ``CheckpointManager``.

    Args:
        pinned: page-locked, for copies from a GPU that run by themselves; by default where there is
            a GPU.

    Example:
        >>> buffers = StagingBuffers()
    """

    def __init__(self, *, pinned: bool | None = None) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._sizes: list[int] = []
        self._views: dict[int, torch.Tensor] = {}
        self._launched: dict[torch.device, torch.cuda.Event] = {}
        self._is_taken = False

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated."""
        return self._memory.numel()

    def acquire(self) -> None:
        """Begin to use it.

        Raises:
            CheckpointingException: if a save that is not finished uses it.
        """
        if self._is_taken:
            finding = Finding(
                "the staging buffers hold a save that is not finished",
                remedy="Wait for it, or give each AsyncSaver separate buffers.",
            )
            raise CheckpointingException("cannot stage two saves at once", [finding])
        self._is_taken = True

    def release(self) -> None:
        """Let the next save use it."""
        self._launched = {}
        self._is_taken = False

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let copies that another thread makes wait for what this one has launched on GPUs."""
        for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
            self._launched[device] = _launched_on(device)

    def fill(self, sizes: Sequence[int], tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous CPU copies of tensors.

        Args:
            sizes: bytes of each; a tensor of another size gets memory of its own.
            tensors: on any device, of any strides; each is asked for only when it is its turn.
        """
        assert self._is_taken
        sizes = list(sizes)
        if sizes != self._sizes:
            self._sizes, self._views = sizes, {}
            needed = sum(map(padded, sizes))
            if needed > self.num_bytes:
                pinned = torch.cuda.is_available() if self._pinned is None else self._pinned
                self._memory = torch.empty(0, dtype=torch.uint8)  # never both at once
                self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=pinned)
        streams = CopyStreams(self._launched)
        starts = itertools.accumulate(map(padded, sizes), initial=0)
        for row, (start, size, tensor) in enumerate(zip(starts, sizes, tensors, strict=False)):
            view = self._views.get(row)
            if view is None or view.shape != tensor.shape or view.dtype is not tensor.dtype:
                if tensor.nbytes == size:
                    memory = self._memory[start : start + size]
                    view = memory.view(tensor.dtype).view(tensor.shape)
                else:
                    view = torch.empty(tensor.shape, dtype=tensor.dtype)
                self._views[row] = view
            streams.copy(tensor, view)
        streams.synchronize()
        return list(self._views.values())


class PlannedData(SavePlanner):
    """Answers for the data of a plan that is already made: ``data`` of its rows, in order."""

    def __init__(self, plan: SavePlan, data: Sequence[Any]) -> None:
        # A storage may change the items of the plan: the data is that of the rows of now.
        self._index, self._table, self._data = plan.index, plan.table, data

    @cached_property
    def _row_of(self) -> dict[WriteItem, int]:
        return {item: row for row, item in enumerate(SavePlan(self._table).items)}

    def get_data(self, item: WriteItem) -> torch.Tensor | object:
        data: object = self._data[self._row_of[item]]
        return data

    def data_of(self, plan: SavePlan) -> Callable[[int], torch.Tensor | object]:
        return self._data.__getitem__ if plan.table is self._table else super().data_of(plan)

    def _is_made(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the plan is already made")

    configure_planner = build_local_plan = build_global_plan = finalize_plan = _is_made


def stage_plan(plan: SavePlan, planner: SavePlanner, buffers: StagingBuffers) -> SavePlanner:
    """Copy all that one rank will write: a planner that no longer needs the state dict."""
    give, table = planner.data_of(plan), plan.table
    tensors = np.flatnonzero(~table.is_object)
    given: Iterator[Any] = map(give, tensors.tolist())
    copies = iter(buffers.fill(table.num_bytes[tensors].tolist(), given))
    data = [
        detached_copy(give(row)) if is_object else next(copies)
        for row, is_object in enumerate(table.is_object.tolist())
    ]
    return PlannedData(plan, data)


def detached_copy(value: Any) -> Any:
    """A copy of a nest of values that shares no memory with it."""
    leaves, _ = flatten({"": value})
    memo: dict[int, Any] = {}
    for leaf in leaves.values():
        # The only tensors that deepcopy refuses are results of a computation with gradients.
        if isinstance(leaf, torch.Tensor) and not leaf.is_leaf:
            memo[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return copy.deepcopy(value, memo)


def copied_objects(leaves: Mapping[Any, ShardedBase]) -> dict[Any, ShardedBase]:
    """Copies of leaves with copies of the objects that will be written, and without tensors."""
    result: dict[Any, ShardedBase] = {}
    for path, leaf in leaves.items():
        copied = result[path] = leaf.without_data()
        if not isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id):
            copied.data = detached_copy(leaf.data)
    return result


def change_check(tensors: Sequence[tuple[str, torch.Tensor]]) -> Callable[[], None]:
    """What raises a CheckpointingException if tensors have changed since now, with their keys.

    In-place operations of torch count themselves, which costs nothing to read. What writes past
    torch (numpy, ``.data``, another library) is not noticed.
    """
    before = [_version(tensor) for _, tensor in tensors]

    def require_unchanged() -> None:
        pairs = zip(tensors, before, strict=True)
        changed = {key: None for (key, tensor), version in pairs if _version(tensor) != version}
        remedy = "Call handle.captured.wait(), or handle.fence(optimizer), before the step."
        problem = "changed while it was being captured"
        findings = [Finding(problem, key, remedy=remedy) for key in changed]
        CheckpointingException.raise_if(findings, "the state changed before it was captured")

    return require_unchanged


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - its only name

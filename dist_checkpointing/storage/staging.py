"""Copies of what a rank is about to write, in memory that is allocated once and used again."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import torch

from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.mapping.nested_dicts import flatten
from dist_checkpointing.planning import SavePlan, SavePlanner, WriteItem
from dist_checkpointing.storage.host_blocks import CopyStreams, padded


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
        self._views: list[torch.Tensor | None] = []
        self._launched: dict[torch.device, torch.cuda.Event] = {}
        self._is_taken = False

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated."""
        return self._memory.numel()

    def take(self) -> None:
        """Begin to use it.

        Raises:
            CheckpointingException: if a save that is not finished uses it.
        """
        if self._is_taken:
            finding = Finding(
                "the staging buffers hold a save that is not finished",
                remedy="Wait for it, or give each AsyncSaver buffers of its own.",
            )
            raise CheckpointingException("cannot stage two saves at once", [finding])
        self._is_taken = True

    def give_back(self) -> None:
        """Let the next save use it."""
        self._launched = {}
        self._is_taken = False

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let copies that another thread makes wait for what this one has launched on GPUs."""
        for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
            event = self._launched[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))

    def fill(self, sizes: Sequence[int], tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous CPU copies of tensors.

        Args:
            sizes: bytes of each; a tensor of another size gets memory of its own.
            tensors: on any device, of any strides; each is asked for only when it is its turn.
        """
        assert self._is_taken
        self._make_room(list(sizes))
        copies, streams = [], CopyStreams(self._launched)
        starts = itertools.accumulate(map(padded, sizes), initial=0)
        for row, (start, size, tensor) in enumerate(zip(starts, sizes, tensors, strict=False)):
            view = self._views[row]
            if view is None or view.shape != tensor.shape or view.dtype is not tensor.dtype:
                view = self._view(start, size, tensor)
                self._views[row] = view
            streams.copy(tensor, view)
            copies.append(view)
        streams.synchronize()
        return copies

    def _make_room(self, sizes: list[int]) -> None:
        if sizes == self._sizes:
            return
        self._sizes, self._views = sizes, [None] * len(sizes)
        needed = sum(map(padded, sizes))
        if needed > self._memory.numel():
            pinned = torch.cuda.is_available() if self._pinned is None else self._pinned
            self._memory = torch.empty(0, dtype=torch.uint8)  # never both at once
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=pinned)

    def _view(self, start: int, size: int, like: torch.Tensor) -> torch.Tensor:
        if like.nbytes != size:
            return torch.empty(like.shape, dtype=like.dtype)
        return self._memory[start : start + size].view(like.dtype).view(like.shape)


class StagedPlanner(SavePlanner):
    """Answers with copies for the items of a plan that is already made.

    Args:
        plan: it.
        data: the copies, in its order.
    """

    def __init__(self, plan: SavePlan, data: Sequence[Any]) -> None:
        self._data = data
        self._plan = plan

    @property
    def settings(self) -> Hashable | None:
        return None

    @cached_property
    def _by_item(self) -> dict[WriteItem, object]:
        return dict(zip(self._plan.items, self._data, strict=True))

    def get_data(self, item: WriteItem) -> torch.Tensor | object:
        return self._by_item[item]

    def data_of(self, plan: SavePlan) -> Callable[[int], torch.Tensor | object]:
        if plan is not self._plan:
            return super().data_of(plan)
        return self._data.__getitem__

    def configure_planner(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the plan is already made")

    def build_local_plan(self) -> NoReturn:
        raise AssertionError("the plan is already made")

    def build_global_plan(self, all_plans: object) -> NoReturn:  # noqa: ARG002
        raise AssertionError("the plan is already made")

    def finalize_plan(self, plan: object) -> NoReturn:  # noqa: ARG002
        raise AssertionError("the plan is already made")


def stage_plan(plan: SavePlan, planner: SavePlanner, buffers: StagingBuffers) -> SavePlanner:
    """Copy all that one rank will write: a planner that no longer needs the state dict."""
    give, sizes = planner.data_of(plan), plan.table.num_bytes.tolist()
    data: list[Any] = [None] * len(sizes)
    is_object = plan.table.is_object
    tensors = np.flatnonzero(~is_object).tolist()
    given = (_require_tensor(give(row)) for row in tensors)
    copies = buffers.fill([sizes[row] for row in tensors], given)
    for row, copied in zip(tensors, copies, strict=True):
        data[row] = copied
    for row in np.flatnonzero(is_object).tolist():
        data[row] = detached_copy(give(row))
    return StagedPlanner(plan, data)


def _require_tensor(data: object) -> torch.Tensor:
    assert isinstance(data, torch.Tensor)
    return data


def detached_copy(value: Any) -> Any:
    """A copy of a nest of values that shares no memory with it.

    Raises:
        Exception: whatever a value raises that cannot be copied.
    """
    leaves, _ = flatten({"": value})
    memo: dict[int, Any] = {}
    for leaf in leaves.values():
        # The only tensors that deepcopy refuses are results of a computation with gradients.
        if isinstance(leaf, torch.Tensor) and not leaf.is_leaf:
            memo[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return copy.deepcopy(value, memo)


class ChangeDetector:
    """Notices tensors that change between two moments.

    In-place operations of torch count themselves, which costs nothing to read. What writes past
    torch (numpy, ``.data``, another library) is not noticed.
    """

    def __init__(self, tensors: dict[str, list[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._before = self._versions()

    def _versions(self) -> dict[str, list[int]]:
        return {key: [_version(t) for t in held] for key, held in self._tensors.items()}

    def check(self) -> None:
        """Raise if anything has changed.

        Raises:
            CheckpointingException: naming the keys.
        """
        after = self._versions()
        findings = [
            Finding(
                "changed while it was being captured",
                key,
                remedy="Call handle.captured.wait(), or handle.fence(optimizer), before the step.",
            )
            for key, versions in self._before.items()
            if versions != after[key]
        ]
        if findings:
            raise CheckpointingException("the state changed before it was captured", findings)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - its only name

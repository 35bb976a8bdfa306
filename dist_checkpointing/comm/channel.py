"""Collectives of a process group, each with a deadline."""

from __future__ import annotations

import atexit
import ctypes
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]  # not in its stubs
    AllgatherOptions,
)

_LOOK_SECONDS: Final = 1.0
_LENGTH_BYTES: Final = 8
_SMALL_BYTES: Final = 2**16
_MODULUS: Final = 2**64
HEAD_BYTES: Final = 1016
"""So many bytes of a payload travel with its length; a longer one takes a second collective."""
Row = np.ndarray[Any, np.dtype[np.uint8]]
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


@atexit.register
def _keep_recent_for_ever() -> None:
    for channel in list(_channels):
        for work in channel.recent:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))


class ContactLostError(Exception):
    """A collective did not end: a rank is gone, or did not come in time."""


class Channel:
    """What ranks send each other over a process group.

    Args:
        group: process group with a CPU (gloo) backend.
        tensor_group: process group that carries tensors.
        is_flagged: tells whether another rank has given up; called about once a second.

    Attributes:
        recent: The last small collectives. A thread of gloo reports that a collective is done just
            before it drops its reference. If that were the last reference to a tensor while the
            interpreter ends, the process would abort. With these kept, it never is.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tensor_group: dist.ProcessGroup,
        is_flagged: Callable[[], bool],
    ) -> None:
        self._group = group
        self._tensor_group = tensor_group
        self._is_flagged = is_flagged
        self.recent: deque[Any] = deque(maxlen=16)
        _channels.add(self)
        self._rank, self._world_size = group.rank(), group.size()

    def total(self, number: int, deadline: float) -> int:
        """The sum of a number over all ranks, modulo 2**64."""
        return self._reduced([_signed(number)], dist.ReduceOp.SUM, deadline)[0] % _MODULUS

    def maxima(self, numbers: Sequence[int], deadline: float) -> list[int]:
        """The highest of each number over all ranks."""
        return self._reduced(numbers, dist.ReduceOp.MAX, deadline)

    def _reduced(self, numbers: Sequence[int], operation: Any, deadline: float) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        options.timeout = _left(deadline)
        self._end(lambda: self._group.allreduce([tensor], options), deadline, tensor.nbytes)
        found: list[int] = tensor.tolist()
        return found

    def gather(self, payload: bytes, longest: int, deadline: float) -> list[bytes]:
        """The payload of every rank.

        Args:
            payload: payload of this rank.
            longest: number of bytes of the longest payload.
            deadline: deadline on the monotonic clock.
        """
        own = torch.zeros(_LENGTH_BYTES + longest, dtype=torch.uint8)
        data = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload
        own.numpy()[: len(data)] = np.frombuffer(data, np.uint8)
        rows = torch.empty(self._world_size, len(own), dtype=torch.uint8)
        self._gather_into(self._group, list(rows.unbind()), own, deadline)
        return [_without_length(row) for row in rows.numpy()]

    def gather_at_rank0(self, payload: bytes, deadline: float, *, has_rest: bool) -> list[bytes]:
        """The payload of every rank on rank 0; nothing on the others.

        Args:
            payload: payload of this rank.
            deadline: deadline on the monotonic clock.
            has_rest: whether the payload of any rank has more than ``HEAD_BYTES`` bytes.
        """
        own = _head(payload)
        rows = torch.empty(self._world_size if self._rank == 0 else 0, len(own), dtype=torch.uint8)
        options = dist.GatherOptions()
        options.rootRank = 0
        options.timeout = _left(deadline)
        tensors = [list(rows.unbind())] if self._rank == 0 else []
        self._end(
            lambda: self._group.gather(tensors, [own], options), deadline, rows.nbytes + own.nbytes
        )
        heads = [_without_length(row) for row in rows.numpy()]
        if not has_rest:
            return heads
        # Few ranks may have nearly all of it: each sends what it has, and no more.
        rest = torch.frombuffer(bytearray(payload[HEAD_BYTES:]) or bytearray(1), dtype=torch.uint8)
        sent, received = [0] * self._world_size, [0] * self._world_size
        sent[0] = max(0, len(payload) - HEAD_BYTES)
        if self._rank == 0:
            received = [max(0, _length(row) - HEAD_BYTES) for row in rows.numpy()]
        rests = self._all_to_all(rest[: sent[0]], sent, received, deadline)
        stops = np.cumsum(received).tolist()
        return [
            head + rests.numpy()[stop - size : stop].tobytes()
            for head, size, stop in zip(heads, received, stops, strict=False)
        ]

    def broadcast(self, payload: bytes, deadline: float) -> bytes:
        """The payload of rank 0."""
        head = _head(payload)
        self._broadcast(self._group, head, 0, deadline)
        found = _without_length(head.numpy())
        length = _length(head.numpy())
        if length <= HEAD_BYTES:
            return found
        rest = torch.empty(length - HEAD_BYTES, dtype=torch.uint8)
        if self._rank == 0:
            rest.numpy()[:] = np.frombuffer(payload, np.uint8)[HEAD_BYTES:]
        self._broadcast(self._group, rest, 0, deadline)
        return found + rest.numpy().tobytes()

    def broadcast_tensor(self, tensor: torch.Tensor, source: int, deadline: float) -> None:
        """Fill ``tensor`` with that of rank ``source``."""
        self._broadcast(self._tensor_group, tensor, source, deadline)

    def _all_to_all(
        self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], deadline: float
    ) -> torch.Tensor:
        result = tensor.new_empty(sum(received))
        options = dist.AllToAllOptions()
        options.timeout = _left(deadline)

        def start() -> Any:
            return self._group.alltoall_base(result, tensor, list(received), list(sent), options)

        self._end(start, deadline, tensor.nbytes + result.nbytes)
        return result

    def _broadcast(
        self, group: dist.ProcessGroup, tensor: torch.Tensor, source: int, deadline: float
    ) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        options.timeout = _left(deadline)
        self._end(lambda: group.broadcast([tensor], options), deadline, tensor.nbytes)

    def _gather_into(
        self,
        group: dist.ProcessGroup,
        tensors: list[torch.Tensor],
        own: torch.Tensor,
        deadline: float,
    ) -> None:
        options = AllgatherOptions()
        options.timeout = _left(deadline)
        num_bytes = (len(tensors) + 1) * own.nbytes
        self._end(lambda: group.allgather([tensors], [own], options), deadline, num_bytes)

    def _end(self, start: Callable[[], Any], deadline: float, num_bytes: int) -> None:
        work = None
        try:
            work = start()
            if num_bytes <= _SMALL_BYTES:
                self.recent.append(work)
            self._wait(work, deadline)
        except RuntimeError as error:
            raise ContactLostError(str(error)) from error

    def _wait(self, work: Any, deadline: float) -> None:
        """Wait for a collective, until the deadline or until another rank has given up."""
        while True:
            left = deadline - time.monotonic()
            try:
                work.wait(timedelta(seconds=min(_LOOK_SECONDS, max(left, 0.001))))
            except RuntimeError:
                if work.is_completed():
                    # It may have ended just after this wait: then it has not failed.
                    work.wait(timedelta(seconds=_LOOK_SECONDS))
                    return
            else:
                return
            if left <= 0:
                raise ContactLostError("it took too long")
            if self._is_flagged():
                raise ContactLostError("another rank has lost contact")


def _signed(number: int) -> int:
    """The signed number with the same 64 bits."""
    return (number + _MODULUS // 2) % _MODULUS - _MODULUS // 2


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _head(payload: bytes) -> torch.Tensor:
    """The length of a payload and its first bytes: as many bytes for every payload."""
    head = torch.zeros(_LENGTH_BYTES + HEAD_BYTES, dtype=torch.uint8)
    data = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[:HEAD_BYTES]
    head.numpy()[: len(data)] = np.frombuffer(data, np.uint8)
    return head


def _length(row: Row) -> int:
    return int.from_bytes(row[:_LENGTH_BYTES].tobytes(), "little")


def _without_length(row: Row) -> bytes:
    return row[_LENGTH_BYTES : _LENGTH_BYTES + _length(row)].tobytes()

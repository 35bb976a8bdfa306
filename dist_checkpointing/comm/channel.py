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
    """What ranks send each other over a process group with a CPU (gloo) backend, and tensors over
    ``tensor_group``. ``is_flagged`` is asked about once a second whether another rank has given up.

    ``recent`` are the last small collectives. A thread of gloo reports that a collective is done
    just before it drops its reference. If that were the last reference to a tensor while the
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
        signed = (number + _MODULUS // 2) % _MODULUS - _MODULUS // 2
        return self._reduced([signed], dist.ReduceOp.SUM, deadline)[0] % _MODULUS

    def maxima(self, numbers: Sequence[int], deadline: float) -> list[int]:
        """The highest of each number over all ranks."""
        return self._reduced(numbers, dist.ReduceOp.MAX, deadline)

    def _reduced(self, numbers: Sequence[int], operation: Any, deadline: float) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64)
        options = _options(dist.AllreduceOptions, deadline, reduceOp=operation)
        self._end(self._group.allreduce, deadline, tensor.nbytes, [tensor], options)
        found: list[int] = tensor.tolist()
        return found

    def gather(self, payload: bytes, longest: int, deadline: float) -> list[bytes]:
        """The payload of every rank, of which the longest has ``longest`` bytes."""
        sent = _with_length(payload, longest)
        rows = torch.empty(self._world_size, len(sent), dtype=torch.uint8)
        received, options = [list(rows.unbind())], _options(AllgatherOptions, deadline)
        size = rows.nbytes + sent.nbytes
        self._end(self._group.allgather, deadline, size, received, [sent], options)
        return [_without_length(row) for row in rows.numpy()]

    def gather_at_rank0(self, payload: bytes, deadline: float, *, has_rest: bool) -> list[bytes]:
        """The payload of every rank on rank 0; nothing on the others.

        ``has_rest`` says whether the payload of any rank has more than ``HEAD_BYTES`` bytes.
        """
        head = _with_length(payload, HEAD_BYTES)
        rows = torch.empty(self._world_size if self._rank == 0 else 0, len(head), dtype=torch.uint8)
        options = _options(dist.GatherOptions, deadline, rootRank=0)
        tensors = [list(rows.unbind())] if self._rank == 0 else []
        size = rows.nbytes + head.nbytes
        self._end(self._group.gather, deadline, size, tensors, [head], options)
        heads = [_without_length(row) for row in rows.numpy()]
        if not has_rest:
            return heads
        # Few ranks may have nearly all of it: each sends what it has, and no more.
        rest = torch.frombuffer(bytearray(payload[HEAD_BYTES:]) or bytearray(1), dtype=torch.uint8)
        sent, received = [0] * self._world_size, [0] * self._world_size
        sent[0] = max(0, len(payload) - HEAD_BYTES)
        if self._rank == 0:
            received = [max(0, _length(row) - HEAD_BYTES) for row in rows.numpy()]
        rest, rests = rest[: sent[0]], rest.new_empty(sum(received))
        options, size = _options(dist.AllToAllOptions, deadline), rest.nbytes + rests.nbytes
        exchange = self._group.alltoall_base
        self._end(exchange, deadline, size, rests, rest, received, sent, options)
        stops = np.cumsum(received).tolist()
        return [
            head + rests.numpy()[stop - size : stop].tobytes()
            for head, size, stop in zip(heads, received, stops, strict=False)
        ]

    def broadcast(self, payload: bytes, deadline: float) -> bytes:
        """The payload of rank 0."""
        head = _with_length(payload, HEAD_BYTES)
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

    def _broadcast(
        self, group: dist.ProcessGroup, tensor: torch.Tensor, source: int, deadline: float
    ) -> None:
        options = _options(dist.BroadcastOptions, deadline, rootRank=source, rootTensor=0)
        self._end(group.broadcast, deadline, tensor.nbytes, [tensor], options)

    def _end(
        self, start: Callable[..., Any], deadline: float, num_bytes: int, *arguments: Any
    ) -> None:
        try:
            work = start(*arguments)
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


def _options(kind: Callable[[], Any], deadline: float, **fields: Any) -> Any:
    """Options of a collective that times out at the deadline."""
    options = kind()
    fields["timeout"] = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def _with_length(payload: bytes, room: int) -> torch.Tensor:
    """The length of a payload and its first bytes: as many bytes for every payload."""
    tensor = torch.zeros(_LENGTH_BYTES + room, dtype=torch.uint8)
    data = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[:room]
    tensor.numpy()[: len(data)] = np.frombuffer(data, np.uint8)
    return tensor


def _length(row: Row) -> int:
    return int.from_bytes(row[:_LENGTH_BYTES].tobytes(), "little")


def _without_length(row: Row) -> bytes:
    return row[_LENGTH_BYTES : _LENGTH_BYTES + _length(row)].tobytes()

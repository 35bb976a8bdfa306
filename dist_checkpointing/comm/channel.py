"""What ranks talk over: a process group and the store of torch.distributed, neither for ever."""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in its stubs
    FileStore,
    PrefixStore,
    Store,
)
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]  # not in its stubs
    AllgatherOptions,
)

from dist_checkpointing.threads import fill

logger: logging.Logger = logging.getLogger(__name__)
T = TypeVar("T")
_LOOK_SECONDS: Final = 1.0
_LENGTH_BYTES: Final = 8
_SMALL_BYTES: Final = 2**16
_MODULUS: Final = 2**64
HEAD_BYTES: Final = 1016
"""So many bytes of a payload travel with its length; a longer one takes a second collective."""
Row = np.ndarray[Any, np.dtype[np.uint8]]
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _keep_for_ever(*objects: object) -> None:
    for kept in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


@atexit.register
def _end_in_order() -> None:
    for channel in list(_channels):
        _keep_for_ever(*channel.recent)
    for store in list(_running):
        # One that is in a call of torch while the interpreter ends would abort the process.
        store.calls.put(None)
        store.thread.join(_LEAST_SILENT_SECONDS)


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
        return tensor.tolist()

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

    def shift(
        self,
        sent: torch.Tensor,
        target: int | None,
        source: int | None,
        num_bytes: int,
        deadline: float,
    ) -> torch.Tensor:
        """Send a tensor to one rank, and receive one from another."""
        sizes, received = [0] * self._world_size, torch.empty(num_bytes, dtype=torch.uint8)
        expected = [*sizes]
        if target is not None:
            sizes[target] = len(sent)
        if source is not None:
            expected[source] = num_bytes
        options, size = _options(dist.AllToAllOptions, deadline), sent.nbytes + num_bytes
        exchange = self._group.alltoall_base
        self._end(exchange, deadline, size, received, sent, expected, sizes, options)
        return received

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
            try:
                self._wait(work, deadline)
            except BaseException:
                if not work.is_completed():
                    # Whoever destroys the group would wait for the stopped rank until the deadline.
                    _keep_for_ever(self._group, self._tensor_group)
                raise
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


HEARTBEATS: Final = "dist_checkpointing/heartbeats"
BEAT_SECONDS: Final = 2.5
SHORT_SECONDS: Final = 1.0
SILENT_SECONDS: Final = 300.0
_LEAST_SILENT_SECONDS: Final = 5.0


class StoreSilentError(Exception):
    """The store did not answer in time."""


class StoreThread:
    """Makes all calls into the store of a world, and writes a heartbeat there every few seconds.

    While the process that holds a TCPStore is stopped, no call but ``set`` returns, whatever the
    timeout of the store or of the call. So a thread makes the calls, and who waits for it gives up.
    """

    def __init__(self) -> None:
        # torch has no public way to the store that every process group has already joined.
        self._shared: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001
        self.calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._store: Any = None
        self._beat = f"{HEARTBEATS}/{dist.get_rank()}"
        self.thread: Thread = Thread(target=self._run, name="store", daemon=True)
        self.thread.start()
        weakref.finalize(dist.group.WORLD, self.calls.put, None).atexit = False
        _running.add(self)

    def begin(self, call: Callable[[Any], T]) -> Future[T]:
        """What ``call`` will return for the store."""
        answer: Future[T] = Future()
        self.calls.put(partial(fill, answer, lambda: call(self._connected())))
        return answer

    def _connected(self) -> Any:
        # A connection of its own: a thread that waits for a key blocks all users of its connection.
        self._store = self._store or self._shared.clone()
        return self._store

    def _run(self) -> None:
        base = self._shared
        while isinstance(base, PrefixStore):
            base = base.underlying_store
        # A FileStore would grow with each heartbeat.
        next_beat = math.inf if isinstance(base, FileStore) else 0.0
        while True:
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_SECONDS
                try:
                    self._connected().set(self._beat, str(time.time_ns()))
                except RuntimeError as error:
                    # The next call fails at once, too: connecting again to a dead host takes long.
                    logger.debug("a heartbeat failed: %s", error)
                    next_beat = math.inf
            with suppress(Empty):
                pause = min(next_beat - time.monotonic(), BEAT_SECONDS)
                call = self.calls.get(timeout=max(0.0, pause))
                if call is None:
                    return
                call()
                del call  # and what it holds, before the next one comes


_running: weakref.WeakSet[StoreThread] = weakref.WeakSet()
_store_threads: weakref.WeakKeyDictionary[Any, StoreThread] = weakref.WeakKeyDictionary()


class StoreKeys:
    """The keys of a store that begin with a prefix. No call waits for the store for ever.

    A call that takes ``SILENT_SECONDS`` raises StoreSilentError, and so do all later ones; or one
    that takes ``timeout_seconds``, if these are fewer.
    """

    def __init__(self, prefix: str, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._prefix, self._is_silent = prefix, False
        world = dist.group.WORLD
        self._thread = _store_threads.get(world) or _store_threads.setdefault(world, StoreThread())

    def ask(self, method: Callable[..., T], *arguments: object) -> T:
        """What a method of the store returns for these arguments, soon."""
        answer = self._begin(method, *arguments)
        seconds = max(_LEAST_SILENT_SECONDS, min(SILENT_SECONDS, self.timeout_seconds))
        # Seconds that this thread has waited: the process may have been stopped itself.
        for _ in range(math.ceil(seconds)):
            if self._is_silent or not self._thread.thread.is_alive():
                break
            with suppress(TimeoutError):
                return answer.result(1.0)
        self._is_silent = True
        raise StoreSilentError

    def wait(self, keys: Sequence[str], seconds: float = 0.0) -> bool:
        """Whether all keys are there, at the latest after so many seconds."""
        end = time.monotonic() + seconds
        while keys and not self.ask(Store.check, keys):
            left = min(SHORT_SECONDS, end - time.monotonic())
            if left <= 0:
                return False
            with suppress(dist.DistStoreError):
                self.ask(Store.wait, keys, timedelta(seconds=left))
        return True

    def delete(self, key: str) -> None:
        """Delete a key some time, without waiting for that."""
        self._begin(Store.delete_key, key)

    def watch(self, work: Callable[[], T]) -> T:
        """``work()``, which waits for other ranks in torch, as long as the store answers."""
        done: Future[T] = Future()
        Thread(target=fill, args=(done, work), name="torch", daemon=True).start()
        while not done.done():
            self.ask(Store.check, ["any"])
            with suppress(TimeoutError):
                done.exception(SHORT_SECONDS)
        return done.result()

    def _begin(self, method: Callable[..., T], *arguments: object) -> Future[T]:
        return self._thread.begin(
            lambda store: method(PrefixStore(self._prefix, store), *arguments)
        )

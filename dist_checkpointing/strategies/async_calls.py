"""AsyncRequest, a planned save that is executed later, and a queue of such requests."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from dist_checkpointing.comm import Comm, default_comm
from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.threads import Ownership, run_in_background

logger: logging.Logger = logging.getLogger(__name__)


class AsyncRequest(NamedTuple):
    """What is left to do of a save, as functions.

    Attributes:
        async_fn: Function that does most of the I/O, in any thread; None if this rank has none.
            Strategies of this library keep its error for the first of ``finalize_fns``, which
            raises it on all ranks.
        async_fn_args: Positional arguments of ``async_fn``.
        finalize_fns: Functions to call, in order, when ``async_fn`` has ended on all ranks. Ranks
            may have different numbers of them.
        async_fn_kwargs: Keyword arguments of ``async_fn``.
        preload_fn: Function that copies the data. Its result replaces ``async_fn_args[1]``.
        is_frozen: Whether ``finalize_fns`` is closed.
        call_idx: Number of the call in its queue.

    Example:
        >>> from dist_checkpointing.strategies.async_calls import AsyncRequest
        >>> request = AsyncRequest(print, ("written",), [lambda: print("committed")])
        >>> request.execute_sync()
        written
        committed
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: Sequence[Any]
    finalize_fns: list[Callable[[], None]]
    async_fn_kwargs: Mapping[str, Any] = {}
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], None]) -> None:
        """Add a last step.

        Raises:
            RuntimeError: if the request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError("Cannot add finalization functions to a frozen AsyncRequest")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """The same request, closed for more steps."""
        return self._replace(is_frozen=True)

    def staged(self) -> AsyncRequest:
        """The same request after ``preload_fn``. It no longer needs the caller's state."""
        if self.preload_fn is None:
            return self
        args = list(self.async_fn_args)
        args[1] = self.preload_fn()
        return self._replace(async_fn_args=args, preload_fn=None)

    def execute(self) -> None:
        """This rank's part, without the last steps. Not collective."""
        request = self.staged()
        if request.async_fn is not None:
            request.async_fn(*request.async_fn_args, **request.async_fn_kwargs)

    def execute_sync(self) -> None:
        """Do all of it now. Collective."""
        comm = default_comm()
        with comm.agreed("saving"):
            self.execute()
        self.finalize(comm)

    def finalize(self, comm: Comm) -> None:
        """The last steps. Collective; one that fails on some ranks fails on all."""
        # One agreement: Megatron adds different numbers of functions on the ranks.
        with comm.agreed("finalizing"):
            for finalize in self.finalize_fns:
                finalize()


class AsyncCallsQueue:
    """Executes requests during the training, one after the other, for code written for Megatron.

    Most of a request runs in a thread. What concerns other ranks happens in
    ``maybe_finalize_async_calls``, on the caller's thread, so that it does not mix with the
    collectives of the training. A checkpoint is therefore committed only by that call. Queues do
    not know each other. Threads of one process take turns with a queue, and must do so in the same
    order on all ranks. A forked process is refused.

    Args:
        persistent: Chooses a kind of process in Megatron. It has no effect here.
        comm: The ranks that finalize together; by default all of torch.distributed.

    Example:
        >>> import torch
        >>> from dist_checkpointing import ShardedTensor, load_plain_tensors, save
        >>> from dist_checkpointing.strategies.async_calls import AsyncCallsQueue
        >>> queue = AsyncCallsQueue()
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}
        >>> queue.schedule_async_request(save(state, "ckpt", async_sharded_save=True))
        0
        >>> queue.maybe_finalize_async_calls(blocking=True)
        [0]
        >>> load_plain_tensors("ckpt")
        {'w': tensor([1., 1.])}
    """

    def __init__(self, persistent: bool = False, *, comm: Comm | None = None) -> None:
        self._comm = comm
        self._calls: deque[tuple[AsyncRequest, Future[None]]] = deque()
        self._next = 0
        self._owner = Ownership("the queue of asynchronous calls")
        self._turns = threading.RLock()

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start a request as soon as those before it have ended, and return its number, from 0.

        Data that is still to be copied is copied before this returns.
        """
        self._owner.require()
        with self._turns:
            # An older AsyncRequest may have fewer fields.
            request = AsyncRequest(*async_request).staged().freeze()._replace(call_idx=self._next)
            before = self._calls[-1][1] if self._calls else None

            def work() -> None:
                if before is not None:
                    before.exception()  # only to wait: finalizing that call raises its error
                request.execute()

            self._calls.append((request, run_in_background(work, f"async-save-{self._next}")))
            self._next += 1
            return request.call_idx

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalize, in order, the calls that have ended on all ranks. Collective.

        Args:
            blocking: Wait for all calls.
            no_dist: Look at this rank alone. All ranks must call this when all have ended.

        Returns:
            The numbers of the calls that were finalized.

        Raises:
            CheckpointingException: on all ranks, if a call failed on any rank. The queue drops
                that call; to finalize the next one, call this again.
        """
        self._owner.require()
        with self._turns:
            comm = default_comm() if self._comm is None else self._comm
            finalized = []
            while self._calls:
                request, outcome = self._calls[0]
                index = request.call_idx
                has_ended = blocking or outcome.done()
                is_same = no_dist or comm.all_same(int(has_ended))
                if not (is_same and has_ended):
                    break
                with comm.agreed("ending an asynchronous call"):
                    error = outcome.exception()
                    self._calls.popleft()
                    if error is not None:
                        raise error
                if not comm.all_same(index):
                    problem = "ranks finalize different calls"
                    finding = Finding(problem, found=index, ranks=(comm.rank,))
                    raise CheckpointingException("Unmatched async calls", [finding])
                request.finalize(comm)
                finalized.append(index)
            return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Number of calls that are scheduled and not finalized."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalize everything. Collective, unless ``abort``.

        Args:
            abort: Finalize nothing. Checkpoints that are being saved stay uncommitted, and a write
                that has begun goes on until it ends.
        """
        if abort:
            self._calls.clear()
            return
        self.maybe_finalize_async_calls(blocking=True)

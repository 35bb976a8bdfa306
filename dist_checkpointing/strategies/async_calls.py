"""AsyncRequest: a save that is planned and waits to be executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dist_checkpointing.comm import default_comm


class AsyncRequest(NamedTuple):
    """What is left to do of a save, as functions.

    Attributes:
        async_fn: does the bulk I/O, in any thread or process; None if this rank has none.
        async_fn_args: its positional arguments.
        finalize_fns: to be called on every rank, in order, once all ranks are through.
        async_fn_kwargs: its keyword arguments.
        preload_fn: stages the data; its result takes the place of ``async_fn_args[1]``.
        is_frozen: whether ``finalize_fns`` is closed.
        call_idx: number of the call in its queue.
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

    def execute_sync(self) -> None:
        """Do all of it now. Collective."""
        args = list(self.async_fn_args)
        comm = default_comm()
        with comm.agreed("saving"):
            if self.preload_fn is not None:
                args[1] = self.preload_fn()
            if self.async_fn is not None:
                self.async_fn(*args, **self.async_fn_kwargs)
        for finalize in self.finalize_fns:
            finalize()

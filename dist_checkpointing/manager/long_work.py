"""Work of rank 0 that may take longer than ranks wait for each other in one step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Final

from dist_checkpointing.comm import Comm

_LOOK_SECONDS: Final = 10.0


def after_rank0(comm: Comm, step: str, work: Callable[[], object]) -> None:
    """Let rank 0 do something that takes any time; if it fails, all ranks raise alike. Collective.

    The ranks meet every few seconds, so that none takes another for dead.

    Args:
        comm: the ranks.
        step: name of the step, for errors.
        work: called in a thread of rank 0.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            done.set_exception(error)
        else:
            done.set_result(None)

    def look() -> bool:
        wait([done], _LOOK_SECONDS)
        if done.done():
            done.result()
        return done.done()

    if comm.rank == 0:
        Thread(target=run, name="long-work", daemon=True).start()
    while not comm.from_rank0(step, look):
        pass

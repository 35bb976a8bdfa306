"""The garbage collector is held back while we compute, and never while we wait."""

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from dist_checkpointing import PlanCache, ShardedObject, load, save
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.threads import paused_collector
from states import shard

T = TypeVar("T")


class Watched(SingleProcess):
    """Notes in which steps, where real ranks wait for each other, the collector is off."""

    def __init__(self) -> None:
        self.steps = 0
        self.paused_in: list[str] = []

    def _look(self, step: str) -> None:
        self.steps += 1
        if not gc.isenabled():
            self.paused_in.append(step)

    def all_gather(self, value: T) -> list[T]:
        self._look("gather")
        return super().all_gather(value)

    def broadcast(self, value: T) -> T:
        self._look("broadcast")
        return super().broadcast(value)

    def all_same(self, number: int | None) -> bool:
        self._look("number")
        return super().all_same(number)

    def agree(self, step: str, error: Exception | None) -> None:
        self._look(step)
        super().agree(step, error)

    def exchange(self, step: str, produce: Callable[[], T], *args: Any) -> list[T]:
        self._look(step)
        return super().exchange(step, produce, *args)


def state() -> dict[str, Any]:
    return {
        "w": shard("w", torch.arange(12.0)),
        "rng": ShardedObject("rng", [1, 2], (1,), (0,)),
        "iteration": 3,
    }


@pytest.mark.parametrize("backend", ["tensorstore", "torch_dist"])
def test_the_collector_is_on_wherever_ranks_wait_for_each_other(
    backend: Any, tmp_path: Path
) -> None:
    comm, cache = Watched(), PlanCache()
    for step in range(2):
        save(state(), tmp_path / str(step), backend, comm=comm, plan_cache=cache)
    checks: Any = {"strict": "raise_all", "validate_access_integrity": True, "verify": True}
    load(state(), tmp_path / "1", comm=comm, **checks)
    assert comm.steps > 20
    assert comm.paused_in == []


def test_it_is_off_until_the_last_thread_has_computed() -> None:
    def compute() -> None:
        with paused_collector():
            assert not gc.isenabled()

    with paused_collector():
        other = threading.Thread(target=compute)
        other.start()
        other.join()
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_it_is_on_in_a_child_that_was_forked_meanwhile() -> None:
    with paused_collector():
        child = os.fork()
        if child == 0:
            os._exit(10 + gc.isenabled())
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 11
    assert gc.isenabled()

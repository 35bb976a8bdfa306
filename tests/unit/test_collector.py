"""The garbage collector is held back while we compute, and never while we wait."""

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import PlanCache, load, save
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.threads import paused_collector
from states import cell, shard


def watched() -> tuple[SingleProcess, list[tuple[str, bool]]]:
    """Notes in which steps, where real ranks wait for each other, the collector is on."""
    comm, steps = SingleProcess(), list[tuple[str, bool]]()

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            steps.append((name, gc.isenabled()))
            return method(*args)

        return call

    for name in ("all_gather", "broadcast", "all_same", "agree", "exchange"):
        setattr(comm, name, noted(name, getattr(comm, name)))
    return comm, steps


def state() -> dict[str, Any]:
    return {"w": shard("w", torch.arange(12.0)), "rng": cell("rng", [1, 2]), "iteration": 3}


@pytest.mark.parametrize("backend", ["tensorstore", "torch_dist"])
def test_the_collector_is_on_wherever_ranks_wait_for_each_other(
    backend: Any, tmp_path: Path
) -> None:
    (comm, steps), cache = watched(), PlanCache()
    for number in range(2):
        save(state(), tmp_path / str(number), backend, comm=comm, plan_cache=cache)
    checks: Any = {"strict": "raise_all", "validate_access_integrity": True, "verify": True}
    load(state(), tmp_path / "1", comm=comm, **checks)
    assert len(steps) > 20
    assert [name for name, is_on in steps if not is_on] == []


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

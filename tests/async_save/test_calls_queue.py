"""AsyncCallsQueue: requests are executed in order, and finalized on all ranks or on none."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import CheckpointingException, check_is_distributed_checkpoint, save
from dist_checkpointing.comm import Comm, SingleProcess
from dist_checkpointing.strategies import (
    AsyncCallsQueue,
    AsyncRequest,
    AsyncSaveShardedStrategy,
    StrategyAction,
    base,
    get_default_strategy,
)
from dist_checkpointing.testing import run_ranks
from states import BACKENDS, assert_at_step, at_step, blanks, rows


def request(comm: Comm, folder: Path, value: float, backend: Any = None) -> AsyncRequest:
    """Of a tensor that is changed at once."""
    state = at_step(value, comm)
    made = save(state, folder, backend, async_sharded_save=True, comm=comm)
    state["w"].data.fill_(-1)
    assert made is not None
    return made


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_order(tmp_path: Path, backend: tuple[str, int]) -> None:
    added: list[int] = []

    def one(comm: Comm) -> None:
        queue = AsyncCallsQueue(comm=comm)
        assert queue.maybe_finalize_async_calls() == []
        folders = [tmp_path / str(i) for i in range(3)]
        requests = [request(comm, folder, i, backend) for i, folder in enumerate(folders)]
        for made in requests[comm.rank :]:  # as Megatron: another number on each rank
            made.add_finalize_fn(lambda: added.append(comm.rank))
        assert [queue.schedule_async_request(made) for made in requests] == [0, 1, 2]
        assert queue.get_num_unfinalized_calls() == 3
        comm.all_gather(None)
        assert not any(map(check_is_distributed_checkpoint, folders))
        comm.all_gather(None)
        assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
        assert queue.get_num_unfinalized_calls() == 0
        queue.close()

    run_ranks(2, one)
    assert sorted(added) == [0, 0, 0, 1, 1]
    for i in range(3):
        assert_at_step(tmp_path / str(i), i)


@pytest.mark.parametrize("backend", [("tensorstore", 1), ("torch_dist", 1)])
def test_a_strategy_alone_copies_the_state(tmp_path: Path, backend: tuple[str, int]) -> None:
    """``async_save`` of the strategies of this library, called without ``save``."""
    full = at_step(3)["w"].data

    def one(comm: Comm) -> None:
        strategy = get_default_strategy(StrategyAction.SAVE_SHARDED, *backend)
        strategy.comm = comm
        assert isinstance(strategy, AsyncSaveShardedStrategy)
        state: dict[str, Any] = {"w": rows("w", full, comm)}
        queue = AsyncCallsQueue(comm=comm)
        made = strategy.async_save(state, tmp_path / "c")
        state["w"].data.zero_()
        queue.schedule_async_request(made)
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]

    run_ranks(2, one)
    loader = get_default_strategy(StrategyAction.LOAD_SHARDED, *backend)
    found = loader.load(blanks({"w": full}), tmp_path / "c")
    assert torch.equal(found["w"], full)


def test_nothing_is_finalized_before_all_ranks_are_through() -> None:
    gate = threading.Event()
    finalized: list[int] = []

    def one(comm: Comm) -> None:
        queue = AsyncCallsQueue(comm=comm)
        work = gate.wait if comm.rank == 1 else (lambda: None)
        queue.schedule_async_request(AsyncRequest(work, (), [lambda: finalized.append(comm.rank)]))
        assert queue.maybe_finalize_async_calls() == []
        assert queue.maybe_finalize_async_calls() == []
        assert not finalized
        comm.all_gather(None)
        gate.set()
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]

    run_ranks(2, one)
    assert sorted(finalized) == [0, 1]


def test_a_failure_is_told_to_all_ranks_and_does_not_stop_the_next_call(tmp_path: Path) -> None:
    def one(comm: Comm) -> str:
        queue = AsyncCallsQueue(comm=comm)
        first = request(comm, tmp_path / "1", 1, "zarr")
        (tmp_path / "1" / "w").mkdir(exist_ok=True)
        if comm.rank == 1:
            # A folder in the place of this rank's chunk.
            (tmp_path / "1" / "w" / "c.1.0").mkdir()
        comm.all_gather(None)
        queue.schedule_async_request(first)
        queue.schedule_async_request(request(comm, tmp_path / "2", 2, "zarr"))
        with pytest.raises(CheckpointingException) as raised:
            queue.maybe_finalize_async_calls(blocking=True)
        assert queue.maybe_finalize_async_calls(blocking=True) == [1]
        return str(raised.value)

    texts = run_ranks(2, one)
    assert texts[0] == texts[1]
    assert "rank 1" in texts[0]
    assert "Traceback" in texts[0]
    assert not check_is_distributed_checkpoint(tmp_path / "1")
    assert_at_step(tmp_path / "2", 2)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the folder's lock
def test_abort(tmp_path: Path) -> None:
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request(SingleProcess(), tmp_path / "c", 1))
    queue.close(abort=True)
    assert queue.get_num_unfinalized_calls() == 0
    assert not check_is_distributed_checkpoint(tmp_path / "c")


def test_the_shared_queue_is_made_once() -> None:
    assert base.async_calls is base.async_calls
    assert isinstance(base.async_calls, AsyncCallsQueue)

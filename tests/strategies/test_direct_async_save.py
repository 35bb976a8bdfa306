"""``async_save`` of the strategies of this library, called without ``save``."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.strategies import (
    AsyncCallsQueue,
    AsyncSaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
)
from dist_checkpointing.testing import run_ranks
from states import rows, shard

FULL = torch.arange(24.0).reshape(4, 6)


def saver(backend: tuple[str, int], comm: Comm) -> Any:
    strategy = get_default_strategy(StrategyAction.SAVE_SHARDED, *backend)
    strategy.comm = comm
    return strategy


@pytest.mark.parametrize("backend", [("tensorstore", 1), ("torch_dist", 1)])
def test_the_state_may_change_before_it_is_written(
    tmp_path: Path, backend: tuple[str, int]
) -> None:
    def one(comm: Comm) -> None:
        strategy, state = saver(backend, comm), {"w": rows("w", FULL, comm)}
        assert state["w"].data is not None
        assert isinstance(strategy, AsyncSaveShardedStrategy)
        request = strategy.async_save(state, tmp_path / "c")
        state["w"].data.zero_()
        queue = AsyncCallsQueue(comm=comm)
        queue.schedule_async_request(request)
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]

    run_ranks(2, one)
    loader = get_default_strategy(StrategyAction.LOAD_SHARDED, *backend)
    found = loader.load({"w": shard("w", torch.zeros(4, 6))}, tmp_path / "c")
    assert torch.equal(found["w"], FULL)

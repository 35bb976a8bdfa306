"""Replicas share the work of a third party's backend, and nothing else changes."""

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import ShardedObject, ShardedTensor, load, save
from dist_checkpointing.comm import Comm
from dist_checkpointing.strategies import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from dist_checkpointing.testing import (
    CUT_SHAPE,
    CUTS,
    assert_same_bits,
    data_of,
    poisoned,
    random_bits,
    run_ranks,
    template,
)

PLAIN = runpy.run_path(str(Path(__file__).parent / "test_plain_strategies.py"))
FULL = {name: random_bits(CUT_SHAPE, torch.bfloat16, i) for i, name in enumerate(CUTS)}

Pair = tuple[Any, Any]


def npy() -> Pair:
    import npy_backend  # type: ignore[import-not-found]

    return npy_backend.NpySaveStrategy(), npy_backend.NpyLoadStrategy()


STRATEGIES: dict[str, Callable[[], Pair]] = {
    "planned": npy,
    "plain": lambda: (PLAIN["PlainSave"]("plain", 1), PLAIN["PlainLoad"]()),
}


def held_by(rank: int) -> dict[str, list[ShardedTensor]]:
    """Every tensor cut in every way for two ranks, and each of the two there twice."""
    place, copy_number = rank % 2, rank // 2
    return {
        name: [replace(s, replica_id=(copy_number, 0)) for s in cut(name, FULL[name], 2)[place]]
        for name, cut in CUTS.items()
        if cut(name, FULL[name], 2)[place][0].replica_id == 0
    }


@pytest.mark.parametrize("name", STRATEGIES)
def test_save_by_four_and_load_by_three(tmp_path: Path, name: str) -> None:
    def write(comm: Comm) -> None:
        saver, _ = STRATEGIES[name]()
        state: dict[str, Any] = dict(held_by(comm.rank))
        state["rng"] = ShardedObject("rng", [comm.rank], (2,), (comm.rank % 2,), comm.rank // 2)
        state["step"] = 5
        save(
            state,
            tmp_path / "c",
            FullyParallelSaveStrategyWrapper(saver, comm),
            comm=comm,
        )

    run_ranks(4, write)

    def read(comm: Comm) -> None:
        _, loader = STRATEGIES[name]()
        shards = {key: CUTS[key](key, FULL[key], 1)[0] for key in held_by(0)}
        wanted: dict[str, Any] = {
            key: [template(s, poisoned(data_of(s))) for s in own] for key, own in shards.items()
        }
        wanted["rng"] = ShardedObject("rng", None, (2,), (1,))
        for strategy in (
            loader,
            FullyParallelLoadStrategyWrapper(loader, comm, min_shared_bytes=0),
        ):
            loaded: Any = load(wanted, tmp_path / "c", strategy, comm=comm)
            assert (loaded["rng"], loaded["step"]) == ([1], 5)
            for key, own in shards.items():
                for i, shard in enumerate(own):
                    assert_same_bits(loaded[key][i], data_of(shard), key)
                    wanted[key][i].data.copy_(poisoned(data_of(shard)))

    run_ranks(3, read)

"""Ranks that hold the same describe it once; each gets the plan that it would get by itself."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.mapping import ShardedBase
from dist_checkpointing.planning import (
    BalancedSavePlanner,
    DefaultSavePlanner,
    SavePlan,
    table_exchange,
)
from dist_checkpointing.strategies import TensorStoreSaveShardedStrategy
from dist_checkpointing.testing import run_ranks
from states import shard
from tiers import examples

Planner = Callable[[], DefaultSavePlanner]


class SeesAllPlans(DefaultSavePlanner):
    """Looks at the plans of all ranks before it goes on as usual."""

    def build_global_plan(self, all_plans: Sequence[SavePlan]) -> Any:
        self.seen = [[item.index.index for item in plan.items] for plan in all_plans]
        return super().build_global_plan(all_plans)


@st.composite
def worlds(draw: st.DrawFn) -> list[list[ShardedBase]]:
    """What ranks hold: some the same, parts of some tensors twice or nowhere."""
    kinds = []
    for _ in range(draw(st.integers(1, 3))):
        leaves: list[ShardedBase] = []
        for key in draw(st.lists(st.sampled_from("abcd"), unique=True)):
            place, count = draw(st.integers(0, 2)), draw(st.integers(1, 2))
            leaf = shard(key, torch.arange(4.0) + 4 * place, (0, place, max(count, place + 1)))
            if draw(st.booleans()):
                stop = draw(st.integers(1, 4))
                own = torch.arange(4.0)[:stop] + 4 * place
                leaf = replace(leaf, data=own, flattened_range=slice(0, stop))
            leaves.append(replace(leaf, replica_id=draw(st.sampled_from([0, 0, 1]))))
        if draw(st.booleans()):
            leaves.append(dc.ShardedObject("o", 5, (1,), (0,), draw(st.integers(0, 1))))
        kinds.append(leaves)
    return draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5))


@examples(20)
@given(worlds(), st.sampled_from([0, 1 << 24]))
def test_a_plan_is_what_all_rows_of_all_ranks_make_it(
    ranks: list[list[ShardedBase]], inline_bytes: int
) -> None:
    """Also if the tables are as large as those that do not travel with an agreement."""

    def outcome(planner: Planner) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "c"

            def one(comm: Comm) -> None:
                strategy = TensorStoreSaveShardedStrategy(planner=planner())
                dc.save({"leaves": ranks[comm.rank]}, place, strategy, comm=comm)

            try:
                with mock.patch.object(table_exchange, "_INLINE_BYTES", inline_bytes):
                    run_ranks(len(ranks), one)
            except dc.InvalidShardingError as error:
                return str(error)
            saved = dc.load_plain_tensors(place)
            return {key: saved[key].tolist() for key in "abcd" if key in saved}

    assert outcome(DefaultSavePlanner) == outcome(SeesAllPlans) == outcome(BalancedSavePlanner)


class NotesRanks(DefaultSavePlanner):
    """Notes in the plan of each rank whose it is."""

    def build_local_plan(self) -> SavePlan:
        return replace(super().build_local_plan(), planner_data=[])

    def build_global_plan(self, all_plans: Sequence[SavePlan]) -> Any:
        self.seen: list[Any] = [plan.planner_data for plan in all_plans]
        for rank, notes in enumerate(self.seen):
            notes.append(rank)
        return super().build_global_plan(all_plans)


def test_plans_of_ranks_that_say_the_same_can_be_changed_one_by_one(tmp_path: Path) -> None:
    def one(comm: Comm) -> Any:
        strategy = TensorStoreSaveShardedStrategy(planner=NotesRanks())
        leaf = shard("w", torch.ones(4), replica_id=comm.rank)
        dc.save({"w": leaf}, tmp_path / "c", strategy, comm=comm)
        assert isinstance(strategy.planner, NotesRanks)
        return strategy.planner.seen

    assert run_ranks(3, one) == [[[0], [1], [2]]] * 3


def test_a_mistake_of_all_copies_names_them(tmp_path: Path) -> None:
    """All copies say that theirs is the main one: equal tables, which are written twice."""
    with pytest.raises(dc.InvalidShardingError, match="6 shards hold this part") as raised:
        run_ranks(6, lambda comm: dc.save({"w": shard("w", torch.zeros(4))}, tmp_path, comm=comm))
    assert raised.value.findings[0].ranks == (0, 1, 2, 3, 4, 5)

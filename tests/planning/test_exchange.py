"""Ranks that hold the same are one row of a catalog: every plan is as if each had its own rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_checkpointing import InvalidShardingError, ShardedObject, ShardedTensor
from dist_checkpointing.comm import Comm
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase
from dist_checkpointing.mapping.nested_dicts import DictKey
from dist_checkpointing.planning import BalancedSavePlanner, DefaultSavePlanner, SavePlan
from dist_checkpointing.planning import table_exchange as exchange_module
from dist_checkpointing.planning.chunking import RowBlockLayout
from dist_checkpointing.planning.coverage import find_coverage_problems, main_rows
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.replica_balancing import HolderSets, rows_of_ranks, tensor_replicas
from dist_checkpointing.planning.save_plan import SavePlanning
from dist_checkpointing.planning.shard_table import (
    COLUMNS,
    PackedTable,
    ShardTable,
    concatenate,
    describe,
    pack,
)
from dist_checkpointing.planning.table_exchange import exchange_tables
from dist_checkpointing.testing import run_ranks


@st.composite
def worlds(draw: st.DrawFn) -> list[list[ShardedBase]]:
    """What ranks hold: some the same, parts of some tensors twice or nowhere."""
    kinds = draw(st.integers(1, 3))
    tables: list[list[ShardedBase]] = []
    for _ in range(kinds):
        leaves: list[ShardedBase] = []
        for key in draw(st.lists(st.sampled_from("abcd"), unique=True)):
            at, count = draw(st.integers(0, 2)), draw(st.integers(1, 3))
            replica = draw(st.sampled_from([0, 0, 1]))
            flat = slice(0, draw(st.integers(1, 4))) if draw(st.booleans()) else None
            leaves.append(
                ShardedTensor(
                    key,
                    torch.empty(4 if flat is None else flat.stop, device="meta"),
                    torch.float32,
                    (4,),
                    (4 * max(count, at + 1),),
                    (4 * at,),
                    None,
                    replica,
                    flattened_range=flat,
                )
            )
        if draw(st.booleans()):
            cell = draw(st.integers(0, 1))
            leaves.append(ShardedObject("o", None, (2,), (cell,), draw(st.integers(0, 1))))
        tables.append(leaves)
    return draw(st.lists(st.sampled_from(tables), min_size=1, max_size=9))


def catalogs(ranks: Sequence[Sequence[ShardedBase]]) -> tuple[ShardTable, ShardTable]:
    """All rows of all ranks, and the distinct ones."""
    tables = [describe(leaves, rank) for rank, leaves in enumerate(ranks)]
    held: dict[bytes, list[int]] = {}
    for rank, table in enumerate(tables):
        held.setdefault(pack(table), []).append(rank)
    distinct = [PackedTable(data, number) for number, data in enumerate(held)]
    holders = [np.array(ranks, dtype=np.int32) for ranks in held.values()]
    return concatenate(tables), concatenate(distinct, holders)


def rows(table: ShardTable, *, columns: Sequence[str] = COLUMNS) -> list[Any]:
    ordered = table.take(np.lexsort((table.sources, table.ranks, table.keys)))
    found = zip(*(getattr(ordered, name).tolist() for name in columns), strict=True)
    return [table.names, *found]


@given(worlds())
def test_distinct_rows_are_all_rows_once_they_are_of_ranks(ranks: list[list[ShardedBase]]) -> None:
    every, distinct = catalogs(ranks)
    assert rows(distinct.of_ranks()) == rows(every)
    for key in np.unique(distinct.keys):
        held = every.ranks[every.keys == key]
        assert distinct.ranks_of(distinct.keys == key).tolist() == np.unique(held).tolist()
        assert distinct.first_rank(int(np.flatnonzero(distinct.keys == key)[0])) == held[0]


@given(worlds())
def test_the_same_problems_are_found(ranks: list[list[ShardedBase]]) -> None:
    every, distinct = catalogs(ranks)
    found = find_coverage_problems(distinct, main_rows(distinct))
    assert found == find_coverage_problems(every, main_rows(every))


PLANNERS = [
    DefaultSavePlanner(),
    BalancedSavePlanner(),
    BalancedSavePlanner(save_to_minimum_rank=True),
    BalancedSavePlanner(groups=[0, 1, 0, 1, 0, 1, 0, 1, 0]),
]


@given(worlds(), st.sampled_from(PLANNERS))
def test_the_same_ranks_write_the_same(
    ranks: list[list[ShardedBase]], planner: DefaultSavePlanner
) -> None:
    if isinstance(planner, BalancedSavePlanner) and planner.groups is not None:
        planner = planner.within(planner.groups[: len(ranks)])
    every, distinct = catalogs(ranks)
    if find_coverage_problems(every, main_rows(every)):
        return
    written, index = planner.assign(every, len(ranks))
    found, same_index = planner.assign(distinct, len(ranks))
    assert rows(found) == rows(written)
    assert found.holders is None
    assert same_index.to_json() == index.to_json()


@given(worlds())
def test_every_holder_of_a_part_is_in_its_set(ranks: list[list[ShardedBase]]) -> None:
    every, distinct = catalogs(ranks)
    found, whole = tensor_replicas(distinct), tensor_replicas(every)
    sets = HolderSets.of(distinct, found)
    assert len(found) == len(whole)
    for part in range(len(found)):
        own = sets.of_part[part]
        held = sets.ranks[sets.starts[own] : sets.starts[own + 1]]
        expected = whole.rows[whole.starts[part] : whole.starts[part + 1]]
        assert held.tolist() == every.ranks[expected].tolist()
        parts = np.full(len(held), part)
        mine = rows_of_ranks(distinct, found, parts, held)
        theirs = rows_of_ranks(every, whole, parts, held)
        assert theirs.tolist() == expected.tolist()
        assert (distinct.sources[mine] == every.sources[theirs]).all()


# --- between ranks --------------------------------------------------------------------------------


def model(rank: int, copies: int) -> list[ShardedBase]:
    """A model on ranks of which ``copies`` are alike, with an optimizer and an own random state."""
    place, copy = divmod(rank, copies)
    leaves: list[ShardedBase] = []
    for layer in range(3):
        data = torch.full((4, 6), 10.0 * layer + place)
        # Ranks differ in which leaves come before: what they hold alike is alike all the same.
        flat = slice(24 * copy // copies, 24 * (copy + 1) // copies)
        if copy % 2:
            leaves.append(_range(layer, place, flat, data))
        leaves.append(
            ShardedTensor.from_rank_offsets(f"w{layer}", data, (0, place, 2), replica_id=copy)
        )
        if not copy % 2:
            leaves.append(_range(layer, place, flat, data))
    return [*leaves, ShardedObject("rng", rank, (2 * copies,), (rank,))]


def _range(layer: int, place: int, flat: slice, data: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets_flat(
        f"m{layer}", data.reshape(-1)[flat], (4, 6), (0, place, 2), flattened_range=flat
    )


class SeesAllPlans(DefaultSavePlanner):
    """Looks at the plans of all ranks before it goes on as usual."""

    def build_global_plan(self, all_plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Index]:
        self.seen = [
            [(item.index.fqn, item.index.index) for item in plan.items] for plan in all_plans
        ]
        return super().build_global_plan(all_plans)


@pytest.mark.parametrize("inline_bytes", [0, 1 << 24])
@pytest.mark.parametrize("copies", [1, 4, 20])
def test_every_rank_gets_the_plan_it_would_get_from_all_rows(
    monkeypatch: pytest.MonkeyPatch, copies: int, inline_bytes: int
) -> None:
    monkeypatch.setattr(exchange_module, "_INLINE_BYTES", inline_bytes)

    def planned(comm: Comm) -> Any:
        leaves: Leaves = {(DictKey(i),): leaf for i, leaf in enumerate(model(comm.rank, copies))}
        own, all_seen = BalancedSavePlanner(), SeesAllPlans()
        found = SavePlanning(leaves, own, RowBlockLayout(), comm).agree(comm)
        plain = SavePlanning(leaves, DefaultSavePlanner(), RowBlockLayout(), comm).agree(comm)
        same = SavePlanning(leaves, all_seen, RowBlockLayout(), comm).agree(comm)
        assert all_seen.seen[comm.rank] == [
            (leaf.key, source) for source, leaf in enumerate(leaves.values())
        ]
        assert sorted(plain.plan.items, key=repr) == sorted(same.plan.items, key=repr)
        for item in (*found.plan.items, *plain.plan.items):
            assert item.index.index is not None
            leaf: Any = leaves[DictKey(item.index.index),]
            assert leaf.key == item.index.fqn
            assert leaf.global_offset == item.index.offset
        return found.plan.table, found.index.to_json(), plain.index.to_json()

    plans, indices, others = zip(*run_ranks(2 * copies, planned), strict=True)
    assert len({*indices, *others}) == 1
    assert [*Index.from_json(indices[0]).pieces] == ["m0", "m1", "m2"]
    bytes_of_ranks = [plan.num_bytes.sum() for plan in plans]
    assert sum(bytes_of_ranks) == 2 * 3 * 48 * 4
    if copies == 4:  # three matrices of 96 bytes, each alike on four ranks
        assert max(bytes_of_ranks) - min(bytes_of_ranks) <= 96


@pytest.mark.parametrize("inline_bytes", [0, 1 << 24])
@pytest.mark.parametrize("copies", [2, 16])
def test_a_table_that_many_ranks_hold_travels_once(
    monkeypatch: pytest.MonkeyPatch, copies: int, inline_bytes: int
) -> None:
    monkeypatch.setattr(exchange_module, "_INLINE_BYTES", inline_bytes)
    world = 2 * copies

    def one(comm: Comm) -> tuple[int, list[bytes], Any]:
        weight = next(leaf for leaf in model(comm.rank, copies) if leaf.key == "w0")
        table = describe([weight], comm.rank)
        table = replace(table, main=np.zeros_like(table.main))
        exchanged = exchange_tables(comm, "testing", lambda: ({"all": table}, comm.rank))
        assert exchanged.facts == [*range(world)]
        tables = exchanged.tables("all")
        assert [t.ranks.tolist() for t in tables] == [[rank] for rank in range(world)]
        return len(exchanged.data), exchanged.digests, rows(exchanged.catalog("all"))

    found = run_ranks(world, one)
    assert all(own == found[0] for own in found)
    number_of_tables, _, (names, *distinct) = found[0]
    assert number_of_tables == len(distinct)
    assert names == ("float32", "w0")
    assert len(distinct) == 2


def test_a_mistake_of_all_copies_names_them() -> None:
    """All copies say that theirs is the main one: equal tables, which are written twice."""

    def one(comm: Comm) -> None:
        leaf = ShardedTensor.from_rank_offsets("w", torch.zeros(4))
        leaves: Leaves = {(DictKey("w"),): leaf}
        SavePlanning(leaves, DefaultSavePlanner(), RowBlockLayout(), comm).agree(comm)

    with pytest.raises(InvalidShardingError, match="6 shards hold this part") as raised:
        run_ranks(6, one)
    assert raised.value.findings[0].ranks == (0, 1, 2, 3, 4, 5)

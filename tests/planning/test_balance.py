"""Replicas are shared out as the plain rule says, whichever way it is computed."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_checkpointing import CheckpointingException, ShardedObject, ShardedTensor
from dist_checkpointing.planning import BalancedSavePlanner, SavePlan, distribute_shards_to_ranks
from dist_checkpointing.planning.chunking import RowBlockLayout, WholeShardLayout
from dist_checkpointing.planning.coverage import find_coverage_problems
from dist_checkpointing.planning.replica_balancing import choose_writers, share_out, tensor_replicas
from dist_checkpointing.planning.shard_table import ShardTable, concatenate, describe
from tiers import examples


def scan(
    shard_to_ranks: Mapping[str, Sequence[int]],
    shard_to_size: Mapping[str, int],
    num_ranks: int,
    cross: AbstractSet[str],
) -> dict[str, int]:
    """The rule, word by word."""
    loads = [0] * num_ranks
    result = {}
    shards = sorted(
        shard_to_ranks,
        key=lambda s: (s in cross, len(shard_to_ranks[s]), -shard_to_size[s], s),
    )
    for shard in shards:
        rank = min(shard_to_ranks[shard], key=lambda r: (loads[r], r))
        loads[rank] += shard_to_size[shard]
        result[shard] = rank
    return result


@st.composite
def shards(draw: st.DrawFn) -> tuple[dict[str, list[int]], dict[str, int], int, set[str]]:
    num_ranks = draw(st.integers(1, 12))
    some_ranks = st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks)
    holders = draw(st.dictionaries(st.text("abc", max_size=4), some_ranks, max_size=40))
    sizes = {shard: draw(st.integers(0, 20)) for shard in holders}
    cross = {shard for shard in holders if draw(st.booleans())}
    return holders, sizes, num_ranks, cross


class TestDistribute:
    @given(shards())
    def test_is_the_plain_scan(
        self, case: tuple[dict[str, list[int]], dict[str, int], int, set[str]]
    ) -> None:
        result, expected = distribute_shards_to_ranks(*case), scan(*case)
        assert list(result.items()) == list(expected.items())

    def test_fewest_holders_first_then_the_largest(self) -> None:
        holders = {"a": [0, 1], "b": [0, 1], "c": [0, 1], "only": [0]}
        sizes = {"a": 5, "b": 7, "c": 5, "only": 3}
        result = distribute_shards_to_ranks(holders, sizes, 2, set())
        # 0 has 3; 7 to rank 1; 5 to rank 0 (8); 5 to rank 1, which has 7.
        assert list(result.items()) == [("only", 0), ("b", 1), ("a", 0), ("c", 1)]

    def test_equal_loads_go_to_the_lowest_rank(self) -> None:
        holders = {"x": [2, 1], "y": [1, 2], "z": [2, 1]}
        assert distribute_shards_to_ranks(holders, dict.fromkeys(holders, 4), 3, set()) == {
            "x": 1,
            "y": 2,
            "z": 1,
        }

    def test_shards_of_other_groups_come_last(self) -> None:
        holders = {"big": [0, 1], "small": [0, 1]}
        sizes = {"big": 100, "small": 1}
        result = distribute_shards_to_ranks(holders, sizes, 2, {"big"})
        assert result == {"small": 0, "big": 1}

    def test_nothing_to_assigned(self) -> None:
        assert distribute_shards_to_ranks({}, {}, 4, set()) == {}


@st.composite
def units(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int], int]:
    """Parts with their holders, units of them with sizes."""
    if draw(st.booleans()):  # many sets of as many ranks, none in common
        width, count = draw(st.integers(1, 4)), draw(st.integers(1, 14))
        order = draw(st.permutations(range(width * count)))
        sets = [sorted(order[i * width : (i + 1) * width]) for i in range(count)]
        num_ranks = width * count
        holders = draw(st.lists(st.sampled_from(sets), min_size=1, max_size=60))
    else:
        num_ranks = draw(st.integers(1, 10))
        some = st.sets(st.integers(0, num_ranks - 1), min_size=1).map(sorted)
        holders = draw(st.lists(some, min_size=1, max_size=40))
    number = st.integers(0, len(holders) - 1)
    parts = sorted(draw(st.lists(number, min_size=1, max_size=80)))
    sizes = draw(st.lists(st.integers(0, 9), min_size=len(parts), max_size=len(parts)))
    return holders, parts, sizes, num_ranks


@examples(200)
@given(units())
def test_arrays_give_what_the_plain_scan_gives(
    case: tuple[list[list[int]], list[int], list[int], int],
) -> None:
    check_against_the_plain_scan(*case)


@pytest.mark.parametrize("width", [2, 3])
def test_so_they_do_for_many_sets_of_ranks(width: int) -> None:
    """Which have none in common, and are handed their units all at a time."""
    count, rng = 12, random.Random(width)
    holders = [list(range(i * width, (i + 1) * width)) for i in range(count)]
    parts = sorted(rng.choices(range(count), k=200))
    sizes = [rng.randrange(1, 50) for _ in parts]
    check_against_the_plain_scan(holders, parts, sizes, width * count)


def check_against_the_plain_scan(
    holders: list[list[int]], parts: list[int], sizes: list[int], num_ranks: int
) -> None:
    ranks = np.array([rank for own in holders for rank in own], dtype=np.int64)
    starts = np.cumsum([0, *map(len, holders)]).astype(np.int64)
    loads = np.zeros(num_ranks, dtype=np.int64)
    chosen = share_out(
        ranks, starts, np.array(parts, dtype=np.int64), np.array(sizes, dtype=np.int64), loads
    )
    names = [f"{unit:03}" for unit in range(len(parts))]
    expected = scan(
        {name: holders[part] for name, part in zip(names, parts, strict=True)},
        dict(zip(names, sizes, strict=True)),
        num_ranks,
        set(),
    )
    assert ranks[chosen].tolist() == [expected[name] for name in names]
    assert all(starts[p] <= c < starts[p + 1] for p, c in zip(parts, chosen, strict=True))
    of_rank = [
        sum(s for s, n in zip(sizes, names, strict=True) if expected[n] == r)
        for r in range(num_ranks)
    ]
    assert loads.tolist() == of_rank


# --- who holds what -----------------------------------------------------------------------------


def box(
    key: str, offset: int, rows: int, *, main: bool, of: int = 8, flat: slice | None = None
) -> ShardedTensor:
    length = rows if flat is None else flat.stop - flat.start
    data = torch.empty(length, device="meta")
    replica = 0 if main else 1
    shape = (rows,)
    return ShardedTensor(
        key, data, data.dtype, shape, (of,), (offset,), None, replica, flattened_range=flat
    )


def catalog_of(*ranks: Sequence[ShardedTensor | ShardedObject]) -> ShardTable:
    return concatenate([describe(list(leaves), rank) for rank, leaves in enumerate(ranks)])


def test_a_part_is_a_key_a_box_and_a_range() -> None:
    same = [box("a", 0, 4, main=True), box("b", 0, 4, main=True)]
    catalog = catalog_of(
        same,
        [box("a", 0, 4, main=False), box("a", 4, 4, main=True), box("a", 0, 8, main=False)],
        [box("b", 0, 4, main=False), box("a", 0, 4, main=False, flat=slice(0, 2))],
        [box("a", 0, 4, main=False, flat=slice(0, 3)), box("b", 0, 4, main=True)],
    )
    replicas = tensor_replicas(catalog)
    found = [
        (
            catalog.key(rows[0]),
            catalog.box(rows[0]).offset + catalog.box(rows[0]).shape,
            catalog.flat_range(rows[0]),
            catalog.ranks[rows].tolist(),
        )
        for start, stop in zip(replicas.starts[:-1], replicas.starts[1:], strict=True)
        for rows in [replicas.rows[start:stop]]
    ]
    assert sorted(found, key=repr) == sorted(
        [
            ("a", (0, 4), None, [0, 1]),
            ("a", (0, 8), None, [1]),
            ("a", (0, 4), (0, 2), [2]),
            ("a", (0, 4), (0, 3), [3]),
            ("a", (4, 4), None, [1]),
            ("b", (0, 4), None, [0, 2, 3]),
        ],
        key=repr,
    )
    # b has two main replicas, two parts of a have none.
    assert (replicas.main_rows >= 0).sum() == 2


def test_a_rank_that_holds_a_part_twice_counts_once() -> None:
    catalog = catalog_of(
        [box("a", 0, 8, main=False), box("a", 0, 8, main=True)], [box("a", 0, 8, main=False)]
    )
    replicas = tensor_replicas(catalog)
    assert catalog.ranks[replicas.rows].tolist() == [0, 1]
    assert replicas.counts.tolist() == [2]


def test_what_has_no_single_main_replica_is_left_as_it_is() -> None:
    cell = ShardedObject("rng", None, (1,), (0,))
    other = ShardedObject("rng", None, (1,), (0,), replica_id=1)
    catalog = catalog_of(
        [box("none", 0, 8, main=False), box("two", 0, 8, main=True), other],
        [box("none", 0, 8, main=False), box("two", 0, 8, main=True), cell],
    )
    written = catalog.take(choose_writers(catalog, 2))
    found = list(zip(written.key_column, written.ranks.tolist(), strict=True))
    assert found == [("rng", 1), ("two", 0), ("two", 1)]
    assert {f.key for f in find_coverage_problems(catalog, written)} == {"none", "two"}


# --- real models --------------------------------------------------------------------------------

Shapes = dict[str, tuple[int, ...]]


def gpt2(layers: int, hidden: int) -> Shapes:
    shapes: Shapes = {"wte": (50257, hidden), "wpe": (1024, hidden)}
    for layer in range(layers):
        shapes |= {
            f"h.{layer}.attn": (3 * hidden, hidden),
            f"h.{layer}.proj": (hidden, hidden),
            f"h.{layer}.fc": (4 * hidden, hidden),
            f"h.{layer}.out": (hidden, 4 * hidden),
            f"h.{layer}.ln": (hidden,),
            f"h.{layer}.bias": (4 * hidden,),
        }
    return shapes


def llama(layers: int, hidden: int, inner: int, kv: int) -> Shapes:
    shapes: Shapes = {"embed": (128256, hidden), "output": (128256, hidden)}
    for layer in range(layers):
        shapes |= {
            f"{layer}.q": (hidden, hidden),
            f"{layer}.k": (kv, hidden),
            f"{layer}.v": (kv, hidden),
            f"{layer}.o": (hidden, hidden),
            f"{layer}.gate": (inner, hidden),
            f"{layer}.up": (inner, hidden),
            f"{layer}.down": (hidden, inner),
            f"{layer}.norm": (hidden,),
        }
    return shapes


MODELS = {
    "GPT-2 small": gpt2(12, 768),
    "GPT-2 XL": gpt2(48, 1600),
    "Llama 3.2 1B": llama(16, 2048, 8192, 512),
    "Llama 3 8B": llama(32, 4096, 14336, 1024),
}


def replicated(shapes: Shapes, replicas: int, tensor_parallel: int) -> list[ShardTable]:
    """What each rank holds, cut along axis 0 where that can be."""
    tables = []
    for rank in range(replicas * tensor_parallel):
        replica, position = divmod(rank, tensor_parallel)
        leaves = []
        for key, shape in shapes.items():
            cut = shape[0] % tensor_parallel == 0
            rows = shape[0] // tensor_parallel if cut else shape[0]
            data = torch.empty((rows, *shape[1:]), dtype=torch.bfloat16, device="meta")
            grid = [(0, position, tensor_parallel)] if cut else []
            replica_id = (0 if cut else position, replica)
            leaves.append(ShardedTensor.from_rank_offsets(key, data, *grid, replica_id=replica_id))
        tables.append(describe(leaves, rank))
    return tables


def final_tables(planner: BalancedSavePlanner, tables: Sequence[ShardTable]) -> list[ShardTable]:
    plans, _ = planner.build_global_plan([SavePlan(table) for table in tables])
    return [planner.finalize_plan(plan).table for plan in plans]


@pytest.mark.parametrize("tensor_parallel", [1, 4])
@pytest.mark.parametrize("model", MODELS)
def test_eight_replicas_of_a_real_model(model: str, tensor_parallel: int) -> None:
    shapes = MODELS[model]
    tables = replicated(shapes, 8, tensor_parallel)
    written = final_tables(BalancedSavePlanner(), tables)
    loads = [int(table.num_bytes.sum()) for table in written]
    assert sum(loads) == sum(2 * math.prod(shape) for shape in shapes.values())
    assert max(loads) <= 1.05 * sum(loads) / len(loads)
    assert not find_coverage_problems(concatenate(tables), concatenate(written))


def test_one_large_tensor_is_written_by_all_its_holders() -> None:
    tables = replicated({"w": (4096, 4096)}, 8, 1)
    written = final_tables(BalancedSavePlanner(), tables)
    loads = [int(table.num_bytes.sum()) for table in written]
    assert loads == [2 * 4096 * 4096 // 8] * 8


def test_a_layout_of_whole_shards_is_not_cut() -> None:
    planner = BalancedSavePlanner()
    planner.configure_planner({}, is_coordinator=True, rank=0, layout=WholeShardLayout())
    tables = replicated({"w": (4096, 4096), "v": (4096, 4096)}, 4, 1)
    written = final_tables(planner, tables)
    assert [table.key_column for table in written] == [["v"], ["w"], [], []]


def test_the_minimum_rank_writes_if_asked_for() -> None:
    tables = replicated(gpt2(2, 64), 4, 2)
    written = final_tables(BalancedSavePlanner(save_to_minimum_rank=True), tables)
    assert [len(table) > 0 for table in written] == [True, True, *[False] * 6]
    assert not find_coverage_problems(concatenate(tables), concatenate(written))


def test_the_main_replica_writes_if_redundancy_is_not_removed() -> None:
    holders = [replace(table, ranks=7 - table.ranks) for table in replicated(gpt2(2, 64), 4, 2)]
    planner = BalancedSavePlanner(remove_redundancy=False)
    written = final_tables(planner, holders[::-1])
    assert [len(table) > 0 for table in written] == [*[False] * 6, True, True]


def test_chunks_are_not_made_smaller_than_balance_asks_for() -> None:
    tables = replicated({f"w{i}": (4096, 1024) for i in range(64)}, 8, 1)
    plans, index = BalancedSavePlanner().build_global_plan([SavePlan(t) for t in tables])
    assert {tuple(shape or ()) for shape in index.chunk_shape_column} == {(4096, 1024)}
    assert {len(plan.table) for plan in plans} == {8}
    assert RowBlockLayout().max_chunk_bytes >= 4096 * 1024 * 2


def test_a_shard_stays_in_the_group_of_its_main_replica() -> None:
    tables = replicated({f"w{i}": (64,) for i in range(12)}, 4, 1)
    written = final_tables(BalancedSavePlanner(groups=[0, 1, 0, 1]), tables)
    assert [len(table) for table in written] == [6, 0, 6, 0]


def test_groups_of_another_world_are_refused() -> None:
    planner = BalancedSavePlanner(groups=[0, 1, 0])
    with pytest.raises(CheckpointingException, match="expected 2; found 3"):
        final_tables(planner, replicated({"w": (64,)}, 2, 1))

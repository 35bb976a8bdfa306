"""Replicas are shared out as the plain rule says, whichever way it is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_checkpointing import CheckpointingException, ShardedTensor
from dist_checkpointing.planning import (
    BalancedSavePlanner,
    RowBlockLayout,
    SavePlan,
    WholeShardLayout,
    distribute_shards_to_ranks,
)
from dist_checkpointing.planning.coverage import find_coverage_problems
from dist_checkpointing.planning.shard_table import ShardTable, concatenate, describe


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


# --- who holds what -----------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("model", "tensor_parallel"), [(model, 1 if "XL" in model else 4) for model in MODELS]
)
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

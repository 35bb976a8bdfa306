"""Who writes what, and how it is cut."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from cut_tensors import cut_tensors, shared_out
from dist_checkpointing import ShardedObject, ShardedTensor
from dist_checkpointing.format import Box, Index
from dist_checkpointing.planning import (
    BalancedSavePlanner,
    DefaultSavePlanner,
    RowBlockLayout,
    SavePlan,
    WholeShardLayout,
    distribute_shards_to_ranks,
)
from tiers import examples

Layout = RowBlockLayout | WholeShardLayout
Candidates = Callable[[Sequence[int], int], Sequence[int]]


@st.composite
def shards(draw: st.DrawFn) -> tuple[dict[str, list[int]], dict[str, int], int, set[str]]:
    num_ranks = draw(st.integers(1, 12))
    some_ranks = st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks)
    holders = draw(st.dictionaries(st.text("abc", max_size=4), some_ranks, max_size=40))
    sizes = {shard: draw(st.integers(0, 20)) for shard in holders}
    cross = {shard for shard in holders if draw(st.booleans())}
    return holders, sizes, num_ranks, cross


@given(shards())
def test_distribution_is_the_plain_scan(
    case: tuple[dict[str, list[int]], dict[str, int], int, set[str]],
) -> None:
    result, expected = distribute_shards_to_ranks(*case), shared_out(*case)
    assert list(result.items()) == list(expected.items())


# --- small worlds against the plain rule ----------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> list[list[ShardedTensor | ShardedObject]]:
    """What ranks hold: each part of each tensor on some of them, one of which is to write it."""
    ranks: list[list[ShardedTensor | ShardedObject]] = [[] for _ in range(draw(st.integers(1, 5)))]
    for key in draw(st.lists(st.sampled_from("abcdef"), unique=True, min_size=1)):
        for part in draw(cut_tensors(key)):
            holders = draw(st.permutations(range(len(ranks))))
            for replica_id, rank in enumerate(holders[: draw(st.integers(1, len(ranks)))]):
                ranks[rank].append(replace(part, replica_id=replica_id))
                ranks[rank][-1].init_data("meta")  # type: ignore[union-attr]
    return [[*own, ShardedObject("o", 1, (len(ranks),), (n,))] for n, own in enumerate(ranks)]


def planned(
    planner: DefaultSavePlanner, ranks: Sequence[Sequence[Any]], layout: Layout | None = None
) -> tuple[list[SavePlan], Index]:
    """The final plans of all ranks, and the index."""
    local = []
    for rank, leaves in enumerate(ranks):
        state: Any = dict(enumerate(leaves))
        planner.configure_planner(state, rank == 0, rank, layout=layout or RowBlockLayout())
        local.append(planner.build_local_plan())
    plans, index = planner.build_global_plan(local)
    return [planner.finalize_plan(plan) for plan in plans], index


GROUPS = [0, 1, 0, 1, 1]
PLANNERS: dict[str, tuple[Callable[[int], DefaultSavePlanner], Candidates]] = {
    "main": (lambda _: DefaultSavePlanner(), lambda _, main: [main]),
    "balanced": (lambda _: BalancedSavePlanner(), lambda holders, _: holders),
    "groups": (
        lambda count: BalancedSavePlanner().within(GROUPS[:count]),
        lambda holders, main: [rank for rank in holders if GROUPS[rank] == GROUPS[main]],
    ),
}


def is_inside(flat: tuple[int, int] | None, whole: tuple[int, int] | None) -> bool:
    if flat is None or whole is None:
        return flat is whole
    return whole[0] <= flat[0] <= flat[1] <= whole[1]


@pytest.mark.parametrize("name", PLANNERS)
@examples(50)
@given(worlds(), st.integers(8, 48) | st.integers(1, 200))
def test_each_element_is_written_once_by_whom_the_rule_says_in_chunks_of_the_index(
    name: str, ranks: list[list[Any]], most_bytes: int
) -> None:
    make, candidates = PLANNERS[name]
    plans, index = planned(make(len(ranks)), ranks, RowBlockLayout(most_bytes))
    holders: dict[Any, list[int]] = {}
    main: dict[Any, int] = {}
    for rank, leaf in ((rank, leaf) for rank, own in enumerate(ranks) for leaf in own[:-1]):
        holders.setdefault((leaf.key, leaf.box, leaf.flat_range), []).append(rank)
        main |= {(leaf.key, leaf.box, leaf.flat_range): rank} if leaf.replica_id == 0 else {}
    counts = {key: torch.zeros(index[key].global_shape, dtype=torch.int32) for key in index}
    pieces = {key: {*tensor.pieces} for key, tensor in index.items() if tensor.pieces is not None}
    written: list[Any] = []
    for rank, plan in enumerate(plans):
        (cell,) = (item for item in plan.items if item.tensor_data is None)
        assert (cell.index.fqn, cell.index.offset) == ("o", (rank,))
        for item in (item for item in plan.items if item.tensor_data is not None):
            key, part, tensor = item.index.fqn, item.tensor_data, index[item.index.fqn]
            assert part is not None
            box, flat = part.chunk, part.flat_range
            size = item.tensor_storage_size()
            assert size is not None
            assert size <= max(most_bytes, tensor.dtype.itemsize)
            (shard,) = (
                (own, of, whole)
                for own, of, whole in holders
                if own == key and of.contains(box) and is_inside(flat, whole)
            )
            may_write = candidates(holders[shard], main[shard])
            places = [
                (each.offset, each.shape, ends or ()) for each, ends in (shard[1:], (box, flat))
            ]
            written.append((key, *places, size, may_write, rank))
            if tensor.pieces is not None:
                assert (box, flat) in pieces[key]
            else:
                ((number, common),) = tensor.grid.intersecting(box)
                assert common == box == tensor.grid.box(number)
                largest = max(shard[1].num_elements for shard in holders if shard[0] == key)
                whole = math.prod(tensor.chunk_shape or ()) * tensor.dtype.itemsize
                assert whole >= min(most_bytes // 4, largest * tensor.dtype.itemsize)
            own = counts[key][box.slices()]
            target = own if flat is None else own.view(-1)[slice(*flat)]
            target += 1
    assert all((count == 1).all() for count in counts.values())
    units = dict(enumerate(sorted(written, key=lambda unit: unit[:3])))
    sizes, who, by = ({n: unit[column] for n, unit in units.items()} for column in (3, 4, 5))
    assert shared_out(who, sizes, len(ranks)) == by


def test_a_tensor_without_elements_has_a_chunk_however_small_they_must_be() -> None:
    leaf = ShardedTensor.from_rank_offsets("a", torch.empty(0, 5))
    _, index = planned(DefaultSavePlanner(), [[leaf]], RowBlockLayout(1))
    assert index["a"].chunk_shape == (1, 5)


@given(worlds(), st.integers(1, 4))
def test_whole_shards_share_a_divisor_or_an_axis(ranks: list[list[Any]], most: int) -> None:
    plans, index = planned(DefaultSavePlanner(), ranks, WholeShardLayout(most))
    written: dict[str, list[Box]] = {}
    for item in (item for plan in plans for item in plan.items):
        if item.tensor_data is not None:
            written.setdefault(item.index.fqn, []).append(item.tensor_data.chunk)
    for key, boxes in written.items():
        for axis, full in enumerate(index[key].global_shape):
            pairs = [(box.offset[axis], box.shape[axis]) for box in boxes]
            largest = max(extent for _, extent in pairs)
            divisor = math.gcd(*({o for o, _ in pairs} | {o + e for o, e in pairs}) - {full})
            expected = divisor if divisor * most >= largest else full
            if all(o % largest == 0 and e == min(largest, full - o) for o, e in pairs):
                expected = largest
            assert (index[key].chunk_shape or ())[axis] == expected


def test_a_plan_with_fewer_axes_than_the_index_is_cut() -> None:
    shapes = {"cube": (4, 4, 4), "row": (9,)}
    planner, local = DefaultSavePlanner(), []
    for rank, (key, shape) in enumerate(shapes.items()):
        state: Any = {0: ShardedTensor.from_rank_offsets(key, torch.zeros(shape, dtype=torch.int8))}
        planner.configure_planner(state, rank == 0, rank, layout=RowBlockLayout(4))
        local.append(planner.build_local_plan())
    _, index = planner.build_global_plan(local)
    for plan, count in zip(local, (16, 3), strict=True):
        assert len(planner.finalize_plan(replace(plan, index=index)).items) == count


# --- balance -------------------------------------------------------------------------------------


def replicated(shapes: dict[str, tuple[int, ...]], count: int) -> list[list[ShardedTensor]]:
    """What each of so many ranks holds: all of it, in bfloat16."""

    def leaf(key: str, shape: tuple[int, ...], rank: int) -> ShardedTensor:
        data = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        return ShardedTensor.from_rank_offsets(key, data, replica_id=rank)

    return [[leaf(*own, rank) for own in shapes.items()] for rank in range(count)]


def test_one_large_tensor_is_written_by_all_its_holders() -> None:
    plans, _ = planned(BalancedSavePlanner(), replicated({"w": (4096, 4096)}, 8))
    assert [plan.num_bytes for plan in plans] == [2 * 4096 * 4096 // 8] * 8


def test_chunks_are_not_made_smaller_than_balance_asks_for() -> None:
    ranks = replicated({f"w{i}": (4096, 1024) for i in range(64)}, 8)
    plans, index = planned(BalancedSavePlanner(), ranks)
    assert {tuple(shape or ()) for shape in index.chunk_shape_column} == {(4096, 1024)}
    assert {len(plan.items) for plan in plans} == {8}
